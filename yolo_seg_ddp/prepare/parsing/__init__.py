"""Builds the processed data set from photographs and label files: `build.py`. `formats.py` lists
the formats of labels, `label_file.py` says how to add one.
"""
