"""What the flat scripts share. No module here has side effects when imported."""
