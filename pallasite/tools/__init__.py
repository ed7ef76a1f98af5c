"""What looks at kernels from outside."""
