"""Photographs without labels: what a trained model surely sees becomes labels, what it is unsure of
is ignored in training.
"""
