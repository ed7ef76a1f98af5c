"""What a compiled kernel needs at run time: its interface to XLA."""
