"""Tiles while code is written, their memory and its lifetime."""
