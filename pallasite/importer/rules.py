"""All import rules: which function makes IR of which JAX primitive.

Elementwise primitives are not here: the op table names them (`importer.py`).
"""

from pallasite.importer import (
    control,
    gpu,
    linalg,
    matrix_units,
    memory,
    random,
    reduce_window,
    seeded_random,
    tiles,
)
from pallasite.ir.rule_table import RuleTable

RULES = RuleTable()
_FILES = (control, gpu, linalg, matrix_units, memory, random, reduce_window)
_FILES += (seeded_random, tiles)
for _file in _FILES:
    RULES.join(_file.RULES)
