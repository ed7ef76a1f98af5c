"""Configurations of kernels: where they come from, and the search that finds them.

Reading order: `choices.py` (what a kernel asks while it is traced), `table.py` (files
of configurations), `autotune.py` (the tuner) with `space.py`, `candidates.py`,
`search.py`, `workers.py`, `measure.py`.
"""
