"""What a compiled kernel needs at run time: its entry into XLA."""
