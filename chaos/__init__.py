"""Trainings under attack: processes killed, machines lost, signals sent, and the result compared bit by bit."""
