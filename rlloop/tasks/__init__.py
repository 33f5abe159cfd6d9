"""Tasks of other libraries: `task=NAME` with `task.name=...` (rlloop.config.tasks lists them)."""
