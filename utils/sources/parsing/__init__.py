"""Builds the processed data set from raw photographs and the label CSV."""
