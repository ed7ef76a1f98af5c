"""Rewrites of scheduled code that make it cheaper."""
