"""Optional features. Each folder imports `utils` and no other extra, and can be deleted."""
