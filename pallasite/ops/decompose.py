"""Decompositions: how an op is computed from others where a backend lacks it."""
