"""What a model finds, and how good it is."""
