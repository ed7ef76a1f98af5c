"""Steps that store to places which memory names, at once: the last one stores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import sites
from pallasite import tpu as pltpu
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.normal.loop_axes import loop_axes
from pallasite.passes.run import run
from pallasite.passes.schedule import plan_parts
from pallasite.passes.schedule.last_writers import at_once, last_writers
from pallasite.passes.schedule.plan_parts import plan
from pallasite.target import GPUS
from tests.backends.triton import harness
from tests.passes.test_split_axis import evaluate, evaluate_program

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
Struct = jax.ShapeDtypeStruct
WHOLE = pl.BlockSpec(memory_space=pl.ANY)
STEPS, SLOTS, WIDTH, PAGE, ROWS = 24, 21, 40, 7, 4


def stored(body, specs, shape, grid=(STEPS,), caches=1):
    """A function that stores to caches in place, with slots in scalar memory."""

    def function(slots, *arrays):
        given, made = len(arrays) - caches, [Struct(shape, x.dtype) for x in arrays]
        return pl.pallas_call(
            body,
            out_shape=made[given:] if caches > 1 else made[given],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[*specs[:given], *specs[given:]],
                out_specs=specs[given:] if caches > 1 else specs[given],
            ),
            input_output_aliases={1 + given + n: n for n in range(caches)},
        )(slots, *arrays)

    return function


ROW = pl.BlockSpec((1, WIDTH), lambda i, _: (i, 0))
FLAT, PAGED = (SLOTS, WIDTH), (SLOTS // PAGE, PAGE, WIDTH)


def copied(slots_ref, x_ref, _, o_ref):
    o_ref[...] = x_ref[...]


def row(slots_ref, x_ref, _, o_ref):
    o_ref[slots_ref[pl.program_id(0)], :] = x_ref[0]


def paged(slots_ref, x_ref, _, o_ref):
    slot = slots_ref[pl.program_id(0)]

    @pl.when(slot >= 0)
    def _():
        o_ref[slot // PAGE, slot % PAGE] = x_ref[0]


def in_page(slots_ref, x_ref, _, o_ref):
    o_ref[0, slots_ref[pl.program_id(0)] % PAGE] = x_ref[0]


def both(slots_ref, k_ref, v_ref, _k, _v, ko_ref, vo_ref):
    slot = slots_ref[pl.program_id(0)]
    ko_ref[slot, :] = k_ref[0]
    vo_ref[slot, :] = v_ref[0] * 2


def unrolled(slots_ref, x_ref, _, o_ref):
    for n in range(ROWS):
        o_ref[slots_ref[pl.program_id(0) * ROWS + n], :] = x_ref[n]


def looped(slots_ref, x_ref, _, o_ref):
    def step(n, _):
        o_ref[slots_ref[pl.program_id(0) * ROWS + n], :] = x_ref[n]

    lax.fori_loop(0, ROWS, step, None)


def scattered(slots_ref, x_ref, _, o_ref):
    def step(n, _):
        o_ref[slots_ref[n], :] = x_ref[n] + 1

    lax.fori_loop(0, STEPS, step, None)


def by_array(slots_ref, x_ref, _, o_ref):
    slots = pl.load(slots_ref, pl.ds(pl.program_id(0) * ROWS, ROWS))
    o_ref[slots] = x_ref[...]


def by_arrays(slots_ref, x_ref, _, o_ref):
    slots = pl.load(slots_ref, pl.ds(pl.program_id(0) * ROWS, ROWS))

    @pl.when(slots_ref[0] != 100)
    def _():
        o_ref[slots // PAGE, slots % PAGE] = x_ref[...]


def padded(slots_ref, x_ref, _, o_ref):
    """As rows of experts, whose blocks are filled up with tokens that are none."""
    slots = pl.load(slots_ref, pl.ds(pl.program_id(0) * ROWS, ROWS))
    real = jnp.broadcast_to((slots < SLOTS - 4)[:, None], (ROWS, WIDTH))
    pl.store(o_ref, (slots, slice(None)), x_ref[...], mask=real)


def in_part(slots_ref, x_ref, _, o_ref):
    slots = pl.load(slots_ref, pl.ds(pl.program_id(0) * ROWS, ROWS))
    mask = lax.broadcasted_iota(I32, (ROWS, WIDTH), 1) < slots[:, None]
    pl.store(o_ref, (slots, slice(None)), x_ref[...], mask=mask)


NAMED = pl.BlockSpec((1, WIDTH), lambda i, slots: (slots[i], 0))
COLUMNS = WIDTH // 2
HALF = pl.BlockSpec((1, COLUMNS), lambda i, j, _: (i, j))
NAMED_HALF = pl.BlockSpec((1, COLUMNS), lambda i, j, slots: (slots[i], j))
ONE_PAGE = pl.BlockSpec((1, PAGE, WIDTH), lambda i, slots: (slots[i] // PAGE, 0, 0))
BLOCK = pl.BlockSpec((ROWS, WIDTH), lambda i, _: (i, 0))
ALL = pl.BlockSpec(FLAT, lambda i, _: (0, 0))
FORMS = {
    "window": (stored(copied, [ROW, NAMED], FLAT), FLAT),
    "columns": (stored(copied, [HALF, NAMED_HALF], FLAT, (STEPS, 2)), FLAT),
    "row": (stored(row, [ROW, WHOLE], FLAT), FLAT),
    "paged": (stored(paged, [ROW, WHOLE], PAGED), PAGED),
    "in_page": (stored(in_page, [ROW, ONE_PAGE], PAGED), PAGED),
    "unrolled": (stored(unrolled, [BLOCK, WHOLE], FLAT, (STEPS // ROWS,)), FLAT),
    "by_array": (stored(by_array, [BLOCK, WHOLE], FLAT, (STEPS // ROWS,)), FLAT),
    "in_block": (stored(by_array, [BLOCK, ALL], FLAT, (STEPS // ROWS,)), FLAT),
    "by_arrays": (stored(by_arrays, [BLOCK, WHOLE], PAGED, (STEPS // ROWS,)), PAGED),
    "padded": (stored(padded, [BLOCK, WHOLE], FLAT, (STEPS // ROWS,)), FLAT),
    "looped": (stored(looped, [BLOCK, WHOLE], FLAT, (STEPS // ROWS,)), FLAT),
    "scattered": (stored(scattered, [WHOLE, WHOLE], FLAT, ()), FLAT),
}


def normal(kernel):
    return loop_axes(run(kernel), lambda made: last_writers(made) is not None)


def structs(shape, dtype=F32, steps=STEPS, width=WIDTH):
    return Struct((steps,), I32), Struct((steps, width), dtype), Struct(shape, dtype)


def forward(name, dtype=F32):
    function, shape = FORMS[name]
    return normal(sites.kernels_in(function, *structs(shape, dtype))[0])


def backward(name, dtype=F32):
    function, shape = FORMS[name]

    def gradient(slots, x, cache, cotangent):
        return jax.vjp(lambda *given: function(slots, *given), x, cache)[1](cotangent)

    slots, x, cache = structs(shape, dtype)
    return normal(sites.kernels_in(gradient, slots, x, cache, cache)[-1])


def arrays(kernel):
    """Slots that repeat, and some out of range."""
    rng = np.random.default_rng(0)
    slots = rng.integers(-2, SLOTS + 3, kernel.inputs[0].ref.shape).astype(np.int32)
    more = [
        rng.normal(size=p.ref.shape).astype(p.ref.dtype.np) for p in kernel.inputs[1:]
    ]
    for x in more:
        x.reshape(-1)[::17] = np.nan
    return [slots, *more]


def check(kernel):
    """The program's results are those of the steps in order, bit for bit."""
    found = last_writers(kernel)
    assert found is not None
    program = at_once(kernel, found)
    same(program, kernel)
    return program


def same(program, kernel):
    given = arrays(kernel)
    expected = evaluate(kernel, given)
    for ours, theirs in zip(evaluate_program(program, given), expected, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(theirs))
    values = list(given)
    for step in program.steps:
        operands = [values[n] for n in step.operands]
        values += harness.simulated(step.kernel, operands, chip=GPUS["h200"])
    for result, theirs in zip(program.results, expected, strict=True):
        np.testing.assert_array_equal(bits(values[result.array]), bits(theirs))


def bits(x):
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FORMS)
def test_forward(name, dtype):
    program = check(forward(name, dtype))
    assert len(program.kernels) == 3
    assert not analyze(program.kernels[-1]).sequential


GRADIENTS = ["window", "row", "in_page", "scattered"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(name):
    """Rows that a later step overwrites have no cotangent, and nor has what was there.

    Nothing is added up, so that all have the type of the results.
    """
    kernel = backward(name, BF16)
    assert "f32[" not in kernel.text
    check(kernel)


@pytest.mark.parametrize("name", [*GRADIENTS, "paged", "unrolled", "looped"])
def test_gradient_values(name):
    function, shape = FORMS[name]
    rng = np.random.default_rng(1)
    slots = jnp.asarray(rng.integers(0, SLOTS, STEPS), I32)
    x, cache, cotangent = (
        jnp.asarray(rng.normal(size=s), F32) for s in ((STEPS, WIDTH), shape, shape)
    )
    last = {int(s): n for n, s in enumerate(slots)}
    made = jax.vjp(lambda *given: function(slots, *given), x, cache)[1](cotangent)
    rows, old = np.zeros((STEPS, WIDTH)), np.array(cotangent).reshape(FLAT)
    for slot, n in last.items():
        rows[n] = old[slot]
        old[slot] = 0
    np.testing.assert_array_equal(made[0], rows)
    np.testing.assert_array_equal(made[1], old.reshape(shape))


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("name", ["window", "paged", "by_array", "columns"])
def test_batched(name, own):
    """A table for each element's slots, or one for all if they are shared."""
    function, shape = FORMS[name]
    slots, *others = structs(shape)
    kernels = sites.kernels_in(
        jax.vmap(function, (0 if own else None, 0, 0)),
        Struct((3, *slots.shape), I32) if own else slots,
        *(Struct((3, *x.shape), x.dtype) for x in others),
    )
    program = check(normal(kernels[0]))
    (table,) = program.kernels[0].outputs
    assert table.ref.shape == ((3 if own else 1) * SLOTS,)


def test_two_caches_share_a_table():
    function = stored(both, [ROW, ROW, WHOLE, WHOLE], FLAT, caches=2)
    slots, x, cache = structs(FLAT)
    kernel = normal(sites.kernels_in(function, slots, x, x, cache, cache)[0])
    assert len(check(kernel).kernels) == 3


def test_text():
    fill, order, steps = check(forward("row")).kernels
    assert "store" in fill.text and "aliases {1: 0}" in order.text
    assert order.text.count('{kind="max"}') == 1 and "%x_ref" not in order.text
    assert steps.text.count("cond") == 1 and "aliases {2: 0}" in steps.text


def filled(slots_ref, x_ref, o_ref):
    o_ref[...] = jnp.full_like(o_ref, 7)

    def step(n, _):
        @pl.when(slots_ref[n] >= 0)
        def _():
            o_ref[slots_ref[n], :] = x_ref[n] + 1

    lax.fori_loop(0, STEPS, step, None)


def whole(name):
    """A kernel whose loop follows stores to all of a result."""
    if name != "filled":
        return backward(name)
    made = pl.pallas_call(filled, out_shape=Struct(FLAT, F32))
    return normal(sites.kernels_in(made, *structs(FLAT)[:2])[0])


@pytest.mark.parametrize("name", ["filled", "paged", "unrolled", "looped"])
def test_after_stores(name, monkeypatch):
    """A loop's steps run at once after the stores before it, whatever its size.

    Of two loops, the inner one adds to a part of a block that the outer one picks.
    """
    kernel = whole(name)
    monkeypatch.setattr(plan_parts, "GAIN", 0.0)
    found = plan_parts._plan(kernel, GPUS["h200"])
    assert found.kind == "last writers" and len(found.program.kernels) == 4
    sequential = analyze(found.program.kernels[-1]).sequential
    assert sequential == ((1,) if name == "looped" else ())
    same(found.program, kernel)


def read_first(slots_ref, x_ref, _, o_ref):
    o_ref[...] = o_ref[...] + x_ref[...]


def partly(slots_ref, x_ref, _, o_ref):
    o_ref[0, pl.ds(pl.program_id(0), 3)] = x_ref[0, :3]


def masked(slots_ref, x_ref, _, o_ref):
    columns = lax.broadcasted_iota(I32, (1, WIDTH), 1)
    pl.store(o_ref, (slice(0, 1), slice(None)), x_ref[...], mask=columns > 3)


def two_constants(slots_ref, x_ref, _, o_ref):
    old = o_ref[...]
    last = pl.program_id(0) == STEPS - 1
    o_ref[...] = jnp.where(last, jnp.ones_like(old), 0)
    x_ref[...] = old


def counted(slots_ref, x_ref, _, o_ref):
    o_ref[...] = x_ref[...]
    slots_ref[pl.program_id(0) + 1] = slots_ref[pl.program_id(0)] + 1


def two_rows(slots_ref, x_ref, _, o_ref):
    at = slots_ref[pl.program_id(0)]
    o_ref[pl.ds(at, 2), :] = jnp.broadcast_to(x_ref[...], (2, WIDTH))


REFUSED = [read_first, partly, masked, two_constants, counted]


@pytest.mark.parametrize("body", REFUSED, ids=lambda f: f.__name__)
def test_refused(body):
    function = stored(body, [ROW, NAMED], FLAT)
    kernel = normal(sites.kernels_in(function, *structs(FLAT))[0])
    assert last_writers(kernel) is None


def test_rows_that_masks_store_in_part():
    function = stored(in_part, [BLOCK, WHOLE], FLAT, (STEPS // ROWS,))
    kernel = normal(sites.kernels_in(function, *structs(FLAT))[0])
    assert last_writers(kernel) is None


def test_rows_that_overlap():
    function = stored(two_rows, [ROW, WHOLE], FLAT)
    kernel = normal(sites.kernels_in(function, *structs(FLAT))[0])
    assert last_writers(kernel) is None


def test_plan():
    rows, slots, width = 4096, 65536, 1024
    spec = pl.BlockSpec((1, width), lambda i, _: (i, 0))
    function = stored(row, [spec, WHOLE], (slots, width), (rows,))
    few = stored(row, [ROW, WHOLE], FLAT, (2,))
    kernel = sites.kernels_in(
        function, *structs((slots, width), BF16, steps=rows, width=width)
    )[0]
    found = plan(kernel, GPUS["h200"])
    assert found.kind == "last writers" and found.parts == rows
    small = sites.kernels_in(few, *structs(FLAT))[0]
    assert plan(small, GPUS["h200"]).program is None
