"""Optional features. Each folder imports the rooms above and no other extra, and can be deleted."""
