"""Estimators and losses for other trainers: one module each, which imports its trainer
(docs/integrations.md)."""
