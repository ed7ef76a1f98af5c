"""Tells JAX that kernel calls have derivatives; the first one loads the rules.

`rules.py` and its imports are half of the package, which most programs never use.
"""

from collections.abc import Sequence
from typing import Any

from jax.interpreters import ad

from pallasite.primitive import Call, call_p


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    from pallasite.autodiff import rules

    return rules.jvp(primals, tangents, call=call)


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call) -> list[Any]:
    from pallasite.autodiff import rules

    return rules.transpose_call(cotangents, *operands, call=call)


def register() -> None:
    """Called once, by `calls/pallas_call.py`."""
    ad.primitive_jvps[call_p] = _jvp
    ad.primitive_transposes[call_p] = _transpose
