"""Backends: one folder each. `base.get(name)` is the only door the frontend uses."""
