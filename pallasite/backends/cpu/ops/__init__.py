"""The rules of single ops, a family a file."""
