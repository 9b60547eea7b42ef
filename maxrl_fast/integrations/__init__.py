"""Our advantages and losses inside other trainers. Each module needs the library of its name; see docs/integrations.md."""
