"""Attacks on the trainings of this project: kills, hangs, signals, full disks, damaged files, lost machines."""
