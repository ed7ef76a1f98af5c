"""Derivatives of random Python kernels, against those of the same code as plain JAX.

Some calls run in the emulation, some on the platform's own backend; there, half of the
backward kernels are those planned for a GPU, which divide the work in other ways.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from pallasite.autodiff import backward
from pallasite.target import GPUS
from tests.fuzz.batches import each_batch
from tests.fuzz.choices import Stream, chance, pick
from tests.fuzz.python_kernels import RandomCall, random_call
from tests.share import SHARE

BYTES = 96
BATCH = 2
TOLERANCE = 2e-3  # of the largest number


@pytest.mark.parametrize(("engine", "batches"), [("emulation", 2), ("cpu", 5)])
def test_derivatives_of_python_kernels(engine: str, batches: int):
    def check(streams: list[bytes]) -> None:
        for stream in streams:
            check_gradient(Stream(stream), engine)

    each_batch(check, 0, max(batches // SHARE, 1), BATCH, BYTES)


def check_gradient(choices: Stream, engine: str) -> None:
    """The cotangents of both operands and a tangent of the results; or, in one of three
    cases each, derivatives of those cotangents in forward or in reverse mode.
    """
    order = pick(choices, ("first", "forward", "reverse"))
    chip = GPUS["h200"] if engine == "cpu" and chance(choices, 50) else None
    with pytest.MonkeyPatch.context() as patch:
        if chip is not None:
            patch.setattr(backward, "chip_for", lambda backend: chip)
        _check(random_call(choices), choices, order, engine)


def _check(call: RandomCall, choices: Stream, order: str, engine: str) -> None:
    run = functools.partial(call, interpret=engine == "emulation")
    rng = np.random.default_rng(choices.integer(0, 255))
    like = lambda x: rng.standard_normal(x.shape).astype(np.float32)
    cotangents = tuple(map(like, jax.eval_shape(run, *call.arrays)))
    tangents = tuple(map(like, call.arrays))

    def derivatives(function: Any) -> Any:
        backward = lambda *arrays: jax.vjp(function, *arrays)[1](cotangents)
        if order == "forward":
            return jax.jvp(backward, call.arrays, tangents)
        if order == "reverse":
            return jax.vjp(backward, *call.arrays)[1](tangents)
        return backward(*call.arrays), jax.jvp(function, call.arrays, tangents)

    got = jax.jit(derivatives, static_argnums=0)(run)
    with jax.default_device(jax.devices("cpu")[0]), jax.disable_jit():
        wanted = derivatives(call.in_jax)
    _assert_close(got, wanted, call)


def _assert_close(got: Any, wanted: Any, call: RandomCall) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        most = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(
            a, b, rtol=TOLERANCE, atol=TOLERANCE * most, err_msg=repr(call)
        )
