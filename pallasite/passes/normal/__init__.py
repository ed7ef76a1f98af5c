"""Normal form: one spelling for kernels that mean the same."""
