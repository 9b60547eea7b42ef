"""The estimators and losses inside other trainers: one module for each, which imports its trainer (docs/integrations.md)."""
