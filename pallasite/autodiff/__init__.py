"""Derivatives of kernel calls, as kernels."""
