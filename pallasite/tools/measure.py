"""Whether a kernel call compiles on this computer, and how long it takes."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallasite.ir.nodes import walk
from pallasite.primitive import Call, call_p
from pallasite.target import Named, chip_of_device

BATCHES = 5
BATCH_SECONDS = 0.02
MOST_CALLS = 1000
# Whether these terminate depends on the operands, which are synthetic.
_WAIT = {"while", "sem_wait", "roles"}


def is_here(target: Named) -> bool:
    """Whether JAX sees such a device."""
    if target.platform == "cpu":
        return jax.default_backend() == "cpu"
    try:
        devices = jax.devices(target.platform)
    except RuntimeError:
        return False
    return any(chip_of_device(d.device_kind) is target.chip for d in devices)


def refusal(call: Call) -> str:
    """Why XLA does not compile a call for this computer; empty if it does."""
    refs = [param.ref for param in call.kernel.inputs]
    shapes = [jax.ShapeDtypeStruct(ref.shape, ref.dtype.np) for ref in refs]
    try:
        jax.jit(lambda *xs: call_p.bind(*xs, call=call)).lower(*shapes).compile()
    except Exception as error:  # XLA's
        return f"{type(error).__name__}: {error}"
    return ""


def cannot_measure(call: Call) -> str:
    """Why a call cannot be measured; empty if it can."""
    found = {op.name for op in walk(call.kernel.body)} & _WAIT
    if found:
        return (
            f"not measured: its {', '.join(sorted(found))} depends on the operands' "
            "values"
        )
    return ""


def measure(call: Call) -> float:
    """Seconds per call, the best of several batches.

    Operands are synthetic: floats between 0 and 1, integers of 0.
    """
    rng = np.random.default_rng(0)
    refs = [param.ref for param in call.kernel.inputs]
    operands = [jax.numpy.asarray(made_up(r.shape, r.dtype.np, rng)) for r in refs]

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


def made_up(
    shape: Sequence[int], dtype: np.dtype, rng: np.random.Generator
) -> np.ndarray:
    """A synthetic operand: floats between 0 and 1, integers of 0."""
    if not jax.numpy.issubdtype(dtype, np.floating):
        return np.zeros(shape, dtype)
    return rng.random(tuple(shape), np.float32).astype(dtype)
