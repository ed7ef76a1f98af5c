"""`batch_invariant=True`: a row's bits, and those of its gradient, are the same among
any number of rows and at any place (docs/semantics.md).

On a CPU and a GPU by running; for an H200 also without one: kernels for any number of
rows add up in one order.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config, kernels, primitive, sites
from pallasite.backends import base
from pallasite.errors import PallasError, SpecError
from pallasite.ir.nodes import Block, Op, Value, walk
from pallasite.ir.rewrite import is_elementwise
from pallasite.target import GPUS

from .batch_invariance import Case, cases, operands, run

BF16, F32 = jnp.bfloat16, jnp.float32
SMALL, LARGE = cases(), cases(4096, 2048, 8192, 8192)
COUNTS = (1, 17, 64, 65, 200, 4096)
FEW = (1, 3, 16)  # sequences of attention


def differences(case: Case, dtype, parts) -> list[tuple[int, int, int]]:
    """The result or gradient, the place and the number of rows whose bits differ."""
    rows, shared = operands(case, dtype)
    whole = run(case, rows, shared, batch_invariant=True)
    found = []
    for at, count in parts:
        some = [x[at : at + count] for x in rows]
        got = run(case, some, shared, batch_invariant=True)
        for n, (want, have) in enumerate(zip(whole, got, strict=True)):
            same = np.asarray(want[at : at + count]).tobytes()
            if np.asarray(have).tobytes() != same:
                found.append((n, at, count))
    return found


def parts_of(case: Case) -> list[tuple[int, int]]:
    """Places and numbers of rows: one, a few, as many as a small block has, more."""
    if case.count < 10:
        return [(1, 1), (2, 3)]
    return [(5, 1), (1, 3), (20, 17), (100, 70)]


@pytest.mark.parametrize("name", SMALL)
def test_rows_have_the_same_bits_in_any_batch_on_a_cpu(name):
    assert not differences(SMALL[name], F32, parts_of(SMALL[name]))


@pytest.mark.parametrize("name", ["matmul gelu", "weight_only_matmul 8", "rms_norm"])
def test_rows_of_bf16_have_the_same_bits_in_any_batch_on_a_cpu(name):
    assert not differences(SMALL[name], BF16, parts_of(SMALL[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("name", SMALL)
def test_rows_have_the_same_bits_in_any_batch_on_a_gpu(name, dtype):
    case = SMALL[name]
    if case.count >= 10:
        case = replace(case, count=1000)
        parts = [*parts_of(case), (0, 64), (11, 65), (300, 500)]
    else:
        parts = parts_of(case)
    assert not differences(case, dtype, parts)


# --- without a GPU ---


def structs(case: Case, count: int):
    """Operands of so many rows, without elements."""
    made = jax.eval_shape(lambda: operands(replace(case, count=1), BF16))
    grown = lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)
    return [grown(x) for x in made[0]], made[1]


def orders(case: Case, count: int, **how) -> list:
    """In which order each kernel for an H200 adds up, forward and gradient."""
    with warnings.catch_warnings(), config.override(target="h200", verify=False):
        warnings.simplefilter("ignore")
        rows, shared = structs(case, count)

        def function(*given):
            return run(case, given[: len(rows)], given[len(rows) :], **how)

        calls = sites.calls_in(function, *rows, *shared)
        return [order(one) for call in calls for one in parts_run(call)]


def parts_run(call: primitive.Call) -> Iterator[primitive.Call]:
    program = primitive.planned(call, "cuda", chip=GPUS["h200"]).program
    yield from [call] if program is None else primitive.parts_of(call, program)


def order(call: primitive.Call) -> tuple:
    """What decides the order of sums in a kernel.

    That is the backend, the instructions and how deep they are, the arithmetic, and,
    without warpgroups' instructions, the shapes of all tiles. The rows and columns of
    such an instruction do not matter: each sum has units of its own.
    """
    assert primitive.on_arrays(call, "cuda", GPUS["h200"]) is None
    for name in base.defaults("cuda", call.kernel):
        options = replace(call.options, chip=GPUS["h200"])
        compiled = base.Compiled(base.get(name), call.kernel, options)
        try:
            text = compiled["cuda" if name == "cuda" else "ttir"]
        except PallasError:
            continue
        found = re.findall(r"wgmma\.mma_async\S+", text)
        kinds = sorted({re.sub(r"(m\d+)n\d+", r"\1", each) for each in found})
        body = compiled.scheduled.body
        made = {op.result: op for op in walk(body) if len(op.results) == 1}
        return call.kernel.name, name, kinds, set(code_of(body, made, not kinds))
    raise AssertionError(call.kernel.name)


def code_of(block: Block, made: dict[Value, Op], shapes: bool) -> Iterator[tuple]:
    """What each block of code computes of floats; a loop may be in parts.

    Masks are left out, as they may be those of an edge. `shapes`: with those of tiles.
    """
    names = [said for op in block.ops if (said := computed(op, made, shapes))]
    if names:
        yield tuple(sorted(names, key=str))
    for op in block.ops:
        for region in op.regions:
            yield from code_of(region, made, shapes)


def computed(op: Op, made: dict[Value, Op], shapes: bool) -> tuple | None:
    if len(op.results) != 1 or op.result.is_ref or not op.result.tile.dtype.is_float:
        return None
    tile = op.result.tile
    if op.name == "wgmma":  # it adds to what a loop carries, or starts a sum
        start = made.get(op.operands[0])
        (deep,) = op.attrs["contract"][0]
        starts = start is not None and start.name == "constant"
        return op.name, op.operands[1].type.shape[deep] if starts else None
    known = is_elementwise(op) or op.name in ("reduce", "dot", "scan")
    if not known or op.name in ("select_n", "cast") or tile.size == 1:
        return None
    return op.name, tile.shape if shapes else None


@pytest.mark.parametrize("name", LARGE)
def test_an_h200_adds_up_in_one_order_for_any_number_of_rows(name):
    case = LARGE[name]
    counts = COUNTS if case.count >= 10 else FEW
    found = {count: orders(case, count, batch_invariant=True) for count in counts}
    assert found[1]
    for count in counts[1:]:
        assert found[count] == found[1], count


def test_an_h200_adds_up_few_rows_in_another_order_if_not_asked():
    case = LARGE["matmul"]
    assert orders(case, 16) != orders(case, 4096)


# --- the argument ---


def test_xla_makes_no_such_promise():
    x, y = jnp.ones((4, 8)), jnp.ones((8, 16))
    with pytest.raises(SpecError, match="batch_invariant=True is a promise"):
        kernels.matmul(x, y, implementation="xla", batch_invariant=True)


def test_a_tuned_configuration_is_kept_and_marked():
    from pallasite.kernels import configs

    given = kernels.MatmulConfig(64, 64, 32, splits=4)
    found = configs.tuned("matmul", given, kernels.MatmulConfig(), {}, (), True)
    assert found == replace(given, batch_invariant=True)


def test_it_can_be_asked_of_any_kernel():
    """A compiler parameter, on every backend; the axis is in parts otherwise."""

    def column_sums(**params):
        def kernel(x_ref, o_ref):
            @pl.when(pl.program_id(0) == 0)
            def _():
                o_ref[...] = jnp.zeros_like(o_ref)

            o_ref[...] += jnp.sin(x_ref[...]).sum(axis=0, keepdims=True)

        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((1, 128), F32),
            grid=4096,
            in_specs=[pl.BlockSpec((64, 128), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((1, 128), lambda i: (0, 0)),
            compiler_params=params,
        )

    x = jax.ShapeDtypeStruct((4096 * 64, 128), F32)
    for params, has_parts in (({}, True), ({"batch_invariant": True}, False)):
        (call,) = sites.calls_in(column_sums(**params), x)
        planned = primitive.planned(call, "cuda", chip=GPUS["h200"])
        assert (planned.program is not None) == has_parts


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax"])
def test_it_is_proved_for_rows(name):
    case = SMALL[name]
    rows, shared = operands(case, F32)
    run = lambda *given: case.function(*given, batch_invariant=True)
    for count in (1, 3, 40):
        some = [x[:count] for x in rows]
        (found,) = pl.prove(run, claims=["batch"])(*some, *shared).kernels
        assert found.batch.verdict == "proved", count
