"""How long a kernel call takes on this computer."""

import time
from typing import Any

import jax
import numpy as np

from pallasite.ir.nodes import Value, walk
from pallasite.primitive import Call, call_p

BATCHES = 5
BATCH_SECONDS = 0.02
MOST_CALLS = 1000
# Whether these end depends on the operands, and those are made up.
_WAIT = {"while", "sem_wait", "roles"}


def cannot_measure(call: Call) -> str:
    """Why a call is not measured; empty if it can be."""
    found = {op.name for op in walk(call.kernel.body)} & _WAIT
    if found:
        return f"not measured: {', '.join(sorted(found))} in it depends on operands"
    return ""


def measure(call: Call) -> float:
    """Seconds of one call, the best of several batches.

    Operands are made up: floats between 0 and 1, integers of 0.
    """
    rng = np.random.default_rng(0)
    operands = [jax.numpy.asarray(_made_up(p, rng)) for p in call.kernel.inputs]

    @jax.jit
    def run(*operands: Any) -> Any:
        return call_p.bind(*operands, call=call)

    jax.block_until_ready(run(*operands))
    once = _batch(run, operands, 1)
    calls = int(min(max(BATCH_SECONDS / max(once, 1e-9), 1), MOST_CALLS))
    return min(_batch(run, operands, calls) for _ in range(BATCHES))


def _batch(run: Any, operands: list[Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = run(*operands)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def _made_up(param: Value, rng: np.random.Generator) -> np.ndarray:
    ref = param.ref
    if not ref.dtype.is_float:
        return np.zeros(ref.shape, ref.dtype.np)
    return rng.random(ref.shape, np.float32).astype(ref.dtype.np)
