"""Backends: one folder each. `base.get(name)` is their only entry point."""
