"""The rules for single ops, one family per file."""
