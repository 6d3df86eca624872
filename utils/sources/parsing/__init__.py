"""Builds the processed data set from photographs and label files: `build.py`. `formats.py` lists the formats of labels."""
