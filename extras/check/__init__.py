"""Looks for mistakes in the photographs and labels of a data set: check_data.py calls `main`."""

from extras.check.command import main
