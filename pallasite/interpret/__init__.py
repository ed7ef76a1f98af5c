"""The evaluator that defines the language: one walker of the IR over a number system.

`walker.py` walks; `numbers.py` says what a number system provides; `numpy_numbers.py`
is the numpy one; `checked.py` adds shadow memory, `resume.py` and `schedule.py` what
runs side by side. The jax.numpy one, the emulation, is
`emulation/emulate.py`, since backends import no JAX.
"""

from pallasite.interpret.numbers import Numbers, Pick
from pallasite.interpret.walker import Walker

__all__ = ["Numbers", "Pick", "Walker"]
