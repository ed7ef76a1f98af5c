"""Matmuls: schemes, packing, microkernels."""
