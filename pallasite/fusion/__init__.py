"""Fusion: the functions around a kernel, computed on its blocks."""
