"""Behind check_data.py: looks for mistakes in the photographs and labels of a data set."""
