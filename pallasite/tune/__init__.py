"""Kernel configurations: where they come from, and the search that finds them.

Reading order: `choices.py` (lookup at trace time), `table.py` (files of
configurations), `autotune.py` (the tuner) with `space.py`, `candidates.py`,
`search.py`, `workers.py`, `measure.py`.
"""
