"""Proves the GPU path of the project on this machine's NVIDIA GPUs, and measures it: `make gpu`."""
