"""Random Python kernels: the call, its vmap, and the same code run as plain Python.

Half of the calls run in the emulation, half on the platform's own backend.
"""

import functools
from collections.abc import Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import pallasite as pl
from pallasite.errors import UnsupportedError
from pallasite.passes.run import run as run_passes
from pallasite.primitive import Call, bind_call
from pallasite.sites import kernels_in
from tests.backends.cuda import host as cuda
from tests.backends.tpu import harness as tpu
from tests.backends.triton import harness as triton
from tests.fuzz.agreement import expected, mismatch
from tests.fuzz.batches import each_batch
from tests.fuzz.choices import Stream, chance
from tests.fuzz.generate import BYTES as KERNEL_BYTES
from tests.fuzz.generate import FAMILIES, Case, random_kernel
from tests.fuzz.python_kernels import RandomCall, random_call
from tests.fuzz.running import COMPILER_OPTIONS
from tests.share import SHARE

BATCH = 6  # calls that XLA compiles together
BYTES = 96
CALLS = 3  # batches of calls in one test
COPIES = 2  # elements of a mapped axis
TOLERANCE = dict(rtol=2e-3, atol=2e-3)
SIMULATORS = {
    "triton": triton.simulated,
    "tpu": tpu.simulated,
    "cuda": cuda.simulated,
}


def compiled(function: Any, *arguments: Any) -> Any:
    lowered = jax.jit(function).lower(*arguments)
    results = lowered.compile(compiler_options=COMPILER_OPTIONS)(*arguments)
    return jax.tree.map(np.asarray, results)  # of JAX's, each `r[k]` is a program


@pytest.mark.parametrize("part", range(4))
def test_python_kernels_and_their_vmap(part: int):
    def check(streams: list[bytes]) -> None:
        calls = [random_call(Stream(s)) for s in streams]
        check_calls(calls, [s[-1] for s in streams], interpret=part % 2 == 0)

    each_batch(check, part, max(CALLS // SHARE, 1), BATCH, BYTES)


def check_calls(
    calls: Sequence[RandomCall], mapped: Sequence[int], interpret: bool
) -> None:
    """Each call, and its vmap over the first operand, the second, or both."""
    axes = [((0, None), (None, 1), (1, 0))[m % 3] for m in mapped]
    stacked = [
        [_stack(a, d) for a, d in zip(call.arrays, dims, strict=True)]
        for call, dims in zip(calls, axes, strict=True)
    ]

    def run_all(plain: Any, stacked: Any) -> Any:
        runs = [functools.partial(call, interpret=interpret) for call in calls]
        one = [run(*arrays) for run, arrays in zip(runs, plain, strict=True)]
        many = [
            jax.vmap(run, dims)(*arrays)
            for run, dims, arrays in zip(runs, axes, stacked, strict=True)
        ]
        return one, many

    one, many = compiled(run_all, [call.arrays for call in calls], stacked)
    for call, dims, arrays, single, mapped_results in zip(
        calls, axes, stacked, one, many, strict=True
    ):
        wanted = call.in_python(*call.arrays)
        _assert_close(single, wanted, call)
        for k in range(COPIES):
            if k:  # the first element is the call's own operands
                wanted = call.in_python(*_element(arrays, dims, k))
            _assert_close([r[k] for r in mapped_results], wanted, call)


def check_python(choices: Stream, engine: str) -> str | None:
    """One call on an engine; on a device and in the emulation its vmap, too.

    Returns the backend that took it, where there are several.
    """
    if engine in ("cpu", "gpu", "emulation"):
        call = random_call(choices, hangs=engine != "gpu")
        check_calls([call], [choices.integer(0, 2)], interpret=engine == "emulation")
        if engine != "gpu":
            return None
        run = functools.partial(call, interpret=False)
        chosen = pl.lower(run)(*call.arrays).choice("cuda")
        if chosen.launch is None:
            raise UnsupportedError(f"all refuse: {chosen}".splitlines()[0])
        return chosen.backend
    call = random_call(choices, hangs=False)
    (kernel,) = kernels_in(functools.partial(call, interpret=True), *call.arrays)
    if len(kernel.inputs) > len(call.arrays):
        raise UnsupportedError("simulators are not given arrays from outside a kernel")
    got = SIMULATORS[engine](run_passes(kernel), call.arrays)
    _assert_close(got, call.in_python(*call.arrays), call)
    return None


def _element(arrays: Sequence[np.ndarray], dims: Sequence[int | None], k: int):
    pairs = zip(arrays, dims, strict=True)
    return tuple(a if d is None else np.asarray(np.take(a, k, d)) for a, d in pairs)


def _stack(array: np.ndarray, dim: int | None) -> np.ndarray:
    if dim is None:
        return array
    return np.stack([array * (1 + k / 2) for k in range(COPIES)], axis=dim)


def _assert_close(got: Sequence[Any], wanted: Sequence[np.ndarray], call: RandomCall):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, err_msg=repr(call), **TOLERANCE)


# --- kernels made as IR, through the primitive ---


@pytest.mark.parametrize("family", [*FAMILIES, "edges"])
def test_vmap_of_the_primitive(family: str):
    size = BATCH * KERNEL_BYTES

    @hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.binary(min_size=size, max_size=size))
    def check(data: bytes) -> None:
        starts = range(0, size, KERNEL_BYTES)
        streams = [data[n : n + KERNEL_BYTES] for n in starts]
        cases = [random_kernel(Stream(s), family) for s in streams]
        check_vmap([c for c in cases if c.arrays], Stream(data[::-1]))

    check()


def check_vmap(cases: Sequence[Case], choices: Stream) -> None:
    axes = [_mapped_axes(case, choices) for case in cases]
    stacked = [
        [_variants(a, d) for a, d in zip(case.arrays, dims, strict=True)]
        for case, dims in zip(cases, axes, strict=True)
    ]

    def run_all(groups: Any) -> Any:
        return [
            jax.vmap(_call(case), dims)(*group)
            for case, dims, group in zip(cases, axes, groups, strict=True)
        ]

    for case, dims, group, found in zip(
        cases, axes, stacked, compiled(run_all, stacked), strict=True
    ):
        for k in range(COPIES):
            arrays = _element(group, dims, k)
            values, bounds = expected(Case(case.kernel, arrays, case.rough, case.exact))
            wrong = mismatch([np.asarray(r[k]) for r in found], values, bounds)
            assert wrong is None, f"element {k}: {wrong}\n{case!r}"


def _call(case: Case):
    call = Call(case.kernel, interpret=True)
    return lambda *arrays: bind_call(call, [jnp.asarray(a) for a in arrays])


def _mapped_axes(case: Case, choices: Stream) -> list[int | None]:
    """Where each operand is mapped; one at least is, and a grid size is not."""
    axes: list[int | None] = []
    for param in case.kernel.inputs:
        mapped = param.name != "sizes" and chance(choices, 60)
        axes.append(choices.integer(0, param.ref.rank) if mapped else None)
    if all(d is None for d in axes):
        names = [p.name for p in case.kernel.inputs]
        axes[next(n for n, name in enumerate(names) if name != "sizes")] = 0
    return axes


def _variants(array: np.ndarray, dim: int | None) -> np.ndarray:
    if dim is None:
        return array
    return np.stack([np.roll(array, k) for k in range(COPIES)], axis=dim)
