"""The student network, its losses and its training command."""
