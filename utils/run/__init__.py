"""A run's folder: lock, status, checkpoints, log."""
