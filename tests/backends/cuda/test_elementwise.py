"""Every elementwise op this backend has, in every type, against its meaning.

All ops of a type are one kernel: run by `host.py` here, and by both backends on a GPU.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from pallasite.backends import base
from pallasite.backends.cuda.elementwise import NATIVE
from pallasite.backends.cuda.text import c_type
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, Value
from pallasite.ir.opdef import OPS, table
from pallasite.ir.types import DTYPES, DType, TileType
from pallasite.primitive import Call, bind_call
from tests.backends.cuda import host
from tests.backends.triton.harness import whole_kernel
from tests.ops.sampling import (
    attr_choices,
    evaluate,
    samples,
    special_operands,
    ulp_error,
)

COUNT = 50  # not a power of two
SHAPED = {"cast", "bitcast", "select_n", "clamp", "reduce_precision"}
EXACT = ("div", "rem", "sign", "max", "min", "abs", "eq", "lt", "is_finite", "round")
SHIFTS = ("shift_left", "shift_right_logical", "shift_right_arithmetic")
TYPES = [d for d in DTYPES if c_type(DTYPES[d]) and not d.startswith("f8")]
CASTS = [d for d in TYPES if d not in ("i16", "u16")]

Step = tuple[str, list[np.ndarray], dict[str, Any]]
has_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)


def on_host(kernel: Kernel, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return host.simulated(kernel, arrays)


def on_gpu(backend: str, kernel: Kernel, arrays: Sequence[np.ndarray]):
    call = Call(kernel, backend=backend)
    with jax.enable_x64(True):
        return [np.asarray(r) for r in bind_call(call, arrays)]


runs = pytest.mark.parametrize(
    "run",
    [
        pytest.param(on_host, marks=has_compiler, id="host"),
        pytest.param(partial(on_gpu, "cuda"), marks=pytest.mark.gpu, id="cuda"),
        pytest.param(partial(on_gpu, "triton"), marks=pytest.mark.gpu, id="triton"),
    ],
)


def steps(kind: DType) -> Iterator[Step]:
    """Every op of the type on samples, and where it is exact on special values."""
    for name in NATIVE:
        row = OPS[name]
        if name in SHAPED or kind not in table()[name].dtypes:
            continue
        for attrs in attr_choices(name, kind):
            yield name, samples(row, kind, COUNT), attrs
            if name in (*EXACT, *SHIFTS):
                yield name, special_operands(row, kind), attrs


@runs
@pytest.mark.parametrize("dtype", TYPES)
def test_ops_mean_what_the_table_says(dtype: str, run):
    kind = DTYPES[dtype]
    chosen = list(steps(kind))
    arrays = [x for _, operands, _ in chosen for x in operands]
    inputs = [TileType(x.shape, kind) for x in arrays]
    results = [
        OPS[name].type_rule([TileType(x.shape, kind) for x in operands], attrs)[0]
        for name, operands, attrs in chosen
    ]

    def body(b: Builder, *tiles: Value) -> Iterator[Value]:
        pending = iter(tiles)
        for name, operands, attrs in chosen:
            yield b.op(name, *(next(pending) for _ in operands), **attrs)

    kernel = whole_kernel(lambda *a: tuple(body(*a)), inputs, *results)
    found = run(kernel, arrays)
    wrong = []
    for (name, operands, attrs), got, type_ in zip(chosen, found, results, strict=True):
        row = OPS[name]
        with np.errstate(all="ignore"):
            want = np.asarray(row.meaning(*operands, **attrs))  # type: ignore[misc]
        want = want.astype(type_.dtype.np)
        # One more: narrow types compute in f32 here, in their own type there.
        errors = ulp_error(got, want, type_.dtype)
        if errors.max() > row.max_ulp + 1:
            at = int(errors.argmax())
            given = [x[at] for x in operands]
            wrong.append(f"{name}{attrs} of {given}: {got[at]}, not {want[at]}")
    assert not wrong, "\n".join(wrong)


@runs
@pytest.mark.parametrize("old", CASTS)
def test_casts(old: str, run):
    source = DTYPES[old]
    rng = np.random.default_rng(0)
    x = rng.integers(-3, 300, COUNT).astype(np.float64) * 0.75
    if source.is_float:
        x[:5] = [np.nan, np.inf, -np.inf, 3e9, -3e9]
    else:
        info = (0, 1) if source.is_bool else (np.iinfo(source.np).min, 127)
        x = np.clip(x, *info)
    with np.errstate(all="ignore"):
        x = x.astype(source.np)
    tile, targets = TileType((COUNT,), source), [DTYPES[d] for d in CASTS if d != old]
    kernel = whole_kernel(
        lambda b, x: tuple(b.cast(x, target) for target in targets),
        [tile],
        *(tile.with_dtype(target) for target in targets),
    )
    for target, got in zip(targets, run(kernel, [x]), strict=True):
        with np.errstate(all="ignore"):
            want = OPS["cast"].meaning(x, dtype=target)  # type: ignore[misc]
        np.testing.assert_array_equal(
            got.astype(np.float64), want.astype(np.float64), err_msg=str(target)
        )


def many_uses(b: Builder, x: Value) -> Value:
    for _ in range(20):
        x = b.op("sin", b.op("atan2", b.op("tanh", x), x))
    return x


@runs
@pytest.mark.parametrize("name", ["f32", "f64", "bf16"])
def test_many_uses_are_calls(run, name: str):
    """Inline, each would be expanded for every element of a thread."""
    tile = TileType((8, 1024), DTYPES[name])
    kernel = whole_kernel(many_uses, [tile], tile)
    x = np.linspace(-1, 1, 8192).reshape(8, 1024).astype(tile.dtype.np)
    (got,), (want,) = run(kernel, [x]), evaluate(kernel, [x])
    tolerance = {"f32": 1e-4, "f64": 1e-12, "bf16": 0.05}[name]
    np.testing.assert_allclose(
        got.astype("f8"), want.astype("f8"), rtol=tolerance, atol=tolerance
    )


def test_called_functions_are_emitted_once():
    tile = TileType((8, 1024), DTYPES["f32"])
    text = base.Compiled(
        base.get("cuda"), whole_kernel(many_uses, [tile], tile), base.Options(), ()
    )["cuda"]
    assert text.count("__noinline__ float called_sinf(") == text.count(" sinf(") == 1
    assert "called_tanhf" not in text  # short enough to be inline
