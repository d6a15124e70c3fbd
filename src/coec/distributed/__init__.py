"""Several workers: who holds windows, and blocks solved as tasks."""
