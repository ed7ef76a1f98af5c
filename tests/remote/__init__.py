"""Kernels that talk to other devices."""
