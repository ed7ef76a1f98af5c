"""Tools that inspect kernels from outside."""
