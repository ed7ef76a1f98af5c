"""Emulation of kernels that communicate between devices: one evaluator runs them all.

The operands of all devices are gathered, the first device's process runs the evaluator
(`interpret/devices.py`) on them, and each device gets its own results back. Devices
wait for each other only in XLA's collectives. A report is passed to every device, which
then raises it: if one raised it alone, the others would wait forever.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import CheckError, PallasError
from pallasite.interpret.checked import run_devices
from pallasite.ir.nodes import Kernel

Array = Any

_reports: dict[int, Exception] = {}  # by number; the oldest are dropped
_raised: dict[int, bool] = {}  # the numbers of those raised, in order
_numbers = itertools.count(1)
_KEPT = 64


def on_devices(
    kernel: Kernel, options: Any, axes: Sequence[tuple[str, int]]
) -> Callable[..., tuple[Array, ...]]:
    """A function of one device's operands, to be lowered for each device.

    Args:
        kernel: Kernel IR, as imported.
        options: a `pl.Checked`.
        axes: names and sizes of the mesh that devices are numbered in.
    """
    names, sizes = tuple(name for name, _ in axes), [size for _, size in axes]
    count = math.prod(sizes)
    labels = [_label(names, np.unravel_index(n, sizes)) for n in range(count)]
    outputs = [
        jax.ShapeDtypeStruct((count, *p.ref.shape), p.ref.dtype.np)
        for p in kernel.outputs
    ]
    shapes = (jax.ShapeDtypeStruct((count,), np.dtype(np.int32)), *outputs)

    def evaluate(*gathered: Array) -> tuple[np.ndarray, ...]:
        """Run all devices. The first result is the number of a report, 0 if none."""
        arrays = [np.asarray(x) for x in gathered]
        try:
            found = run_devices(
                kernel, [[x[n] for x in arrays] for n in range(count)], labels, options
            )
        except Exception as error:
            number = _keep(error.with_traceback(None))
            blank = (np.zeros(s.shape, s.dtype) for s in outputs)
            return (np.full(count, number, np.int32), *blank)
        results = [np.stack(each) for each in zip(*found, strict=True)]
        return (np.zeros(count, np.int32), *results)

    def run(*operands: Array) -> tuple[Array, ...]:
        _report_once()
        if count == 1:
            parts = jax.pure_callback(evaluate, shapes, *(x[None] for x in operands))
            return _checked_results([x[0] for x in parts])
        gathered = [jax.lax.all_gather(x, names) for x in operands]
        first = sum(jax.lax.axis_index(name) for name in names) == 0
        parts = jax.lax.cond(
            first,
            lambda *xs: jax.pure_callback(evaluate, shapes, *xs),
            lambda *xs: tuple(jnp.zeros(s.shape, s.dtype) for s in shapes),
            *gathered,
        )
        # Device n gets row n of the first device's results.
        own = [jax.lax.all_to_all(x, names, 0, 0)[0] for x in parts]
        return _checked_results(own)

    return run


def _label(names: Sequence[str], place: Sequence[Any]) -> str | None:
    """`x = 2`, or `(x, y) = (0, 1)`."""
    if not names:
        return None
    if len(names) == 1:
        return f"{names[0]} = {int(place[0])}"
    return f"({', '.join(names)}) = ({', '.join(str(int(i)) for i in place)})"


def _keep(error: Exception) -> int:
    number = next(_numbers)
    _reports[number] = error
    _reports.pop(number - _KEPT, None)
    return number


def _checked_results(parts: Sequence[Array]) -> tuple[Array, ...]:
    """The results, unless there is a report: then that is raised."""
    number, *results = parts
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results)

    def raise_report(number: Array, *results: Array) -> Any:
        _raised[int(number)] = True
        raise _reports[int(number)]

    return jax.lax.cond(
        number == 0,
        lambda *xs: tuple(xs[1:]),
        lambda *xs: jax.pure_callback(raise_report, shapes, *xs),
        number,
        *results,
    )


@functools.cache
def _report_once() -> None:
    jaxcompat.keep_out_of_callback_log(PallasError)
    jaxcompat.drop_failed_tokens(CheckError, _finish)


def _finish(wait: Callable[[], None]) -> None:
    """Prints the reports of calls that a program did not wait for before it ended."""
    before = set(_raised)
    wait()
    for number in _raised:
        if number not in before and number in _reports:
            print(_reports[number], file=sys.stderr)
