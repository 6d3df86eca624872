"""The commands of the recipe's folder besides training."""
