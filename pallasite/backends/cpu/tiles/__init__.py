"""Tiles during code generation, their memory and its lifetime."""
