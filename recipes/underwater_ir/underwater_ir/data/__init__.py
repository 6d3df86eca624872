"""Reading pictures and pseudo-labels, and making both."""
