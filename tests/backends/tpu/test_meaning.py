"""The emitted code means what the kernel means: it is run in numpy and compared."""

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config, kernels
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, Options, get
from pallasite.ir.nodes import walk
from pallasite.ir.opdef import table
from pallasite.ir.types import DTYPES, F32, TileType
from pallasite.kernels import masks
from pallasite.sites import calls_in, kernels_in
from pallasite.target import TPUS
from tests.backends.cpu import filled
from tests.backends.cpu.running import tiles_kernel
from tests.backends.tpu import harness
from tests.backends.tpu.kernels import CASES
from tests.fuzz.agreement import run_numpy
from tests.zoo import all_cases


def assert_close(got, want):
    """Integers exactly, floats to a share of the largest number."""
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape and g.dtype == w.dtype
        exact = np.dtype(w.dtype).kind in "iub"
        share = 1e-5 if w.dtype == np.float32 else 2e-2
        w = w.astype(np.float64)
        largest = np.max(np.abs(w), where=np.isfinite(w), initial=1.0)
        limits = (0, 0) if exact else (10 * share, share * largest)
        np.testing.assert_allclose(
            g.astype(np.float64), w, rtol=limits[0], atol=limits[1]
        )


@pytest.mark.parametrize("name", CASES)
def test_case_means_the_same(name):
    kernel = harness.kernel_of(name)
    arrays = harness.random_arrays(kernel)
    want = harness.emulated(kernel, arrays)
    got = harness.simulated(kernel, arrays)
    if name == "dynamic_grid":  # blocks past the last program hold anything
        rows = 64 * int(arrays[0])
        got, want = ([x[:rows] for x in xs] for xs in (got, want))
    assert_close(got, want)


FILLED = [
    filled.product(update, (13, 200, 150), (8, 128, 128), F32, squeezed)
    for update in filled.UPDATES
    for squeezed in (False, True)
]


@pytest.mark.parametrize("kernel", FILLED, ids=lambda kernel: kernel.name)
def test_stores_to_filled_blocks_mean_the_same(kernel):
    """What is stored outside is dropped, and the fill value is read there again."""
    arrays = filled.arrays_for(kernel)
    assert_close(harness.simulated(kernel, arrays), run_numpy(kernel, arrays))


@pytest.mark.parametrize("low, high", [(2, -1), (3, -2), (-1, 2), (-2, 3), (-1, 1)])
def test_padding_that_is_cut_again(low, high):
    """A negative number takes away what the other side has added."""
    x = np.arange(8, dtype=np.float32).reshape(1, 8)
    pad = lambda b, x: b.op(
        "pad", x, b.constant(7.0, TileType((), F32)),
        low=(low, 0), high=(high, 0), interior=(0, 0),
    )  # fmt: skip
    kernel = tiles_kernel(pad, [x])
    assert_close(harness.simulated(kernel, [x]), run_numpy(kernel, [x]))


def _zoo_kernels(case):
    """The kernels of a zoo case with the operands they are called with."""
    from pallasite import primitive

    seen = []
    bind = primitive.call_p.bind

    def watch(*operands, call):
        results = bind(*operands, call=call)
        arrays = [o for o in operands if hasattr(o, "__array__")]
        if len(arrays) == len(operands) and not _traced([*operands, *results]):
            seen.append((call.kernel, operands, results))
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitive.call_p, "bind", watch)
        case.run(*case.make_args(np.random.default_rng(0)))
    return seen


def _traced(operands):
    import jax

    return any(isinstance(o, jax.core.Tracer) for o in operands)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_zoo_kernel_means_the_same(case):
    from pallasite.passes.run import run

    for kernel, operands, results in _zoo_kernels(case):
        kernel = run(kernel)
        got = harness.simulated(kernel, [np.array(o) for o in operands])
        assert_close(got, [np.asarray(r) for r in results])


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_backward_kernels_mean_the_same(case):
    from pallasite.passes.run import run

    for kernel in map(run, harness.backward_kernels(case)):
        arrays = harness.random_arrays(kernel)
        assert_close(harness.simulated(kernel, arrays), run_numpy(kernel, arrays))


def edge_values(dtype, shape, seed):
    """Random numbers with the awkward ones among them."""
    rng = np.random.default_rng(seed)
    if dtype.is_bool:
        return rng.integers(0, 2, shape).astype(np.int32)
    if dtype.is_float:
        x = rng.normal(size=shape) * 4
        odd = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-3, 100.0]
        x.ravel()[: min(7, x.size)] = odd[: x.size]
        return x.astype(dtype.np)
    low, high = (0, 2**dtype.bits) if dtype.kind == "uint" else (None, None)
    if low is None:
        low, high = -(2 ** (dtype.bits - 1)), 2 ** (dtype.bits - 1)
    x = rng.integers(low, high, shape)
    x[::2] = rng.integers(max(low, -40), 41, x[::2].shape)
    odd = [0, high - 1, low, 1, dtype.bits, max(low, -1), 3]
    x.ravel()[: min(7, x.size)] = rng.permutation(odd)[: x.size]
    return x.astype(dtype.np)


OPS = [name for name, row in table().items() if row.elementwise]


@pytest.mark.parametrize("name", OPS)
def test_op_means_the_same(name):
    """Emitted code against the op's own meaning, awkward numbers included."""
    row = table()[name]
    for dtype in [d for d in harness.DTYPES_HERE if d in row.dtypes]:
        for attrs in harness.attrs_of(name, dtype):
            for scalar in (False, True):
                kernel = harness.op_kernel(name, dtype, attrs, scalar)
                check_op(row, kernel, dtype, attrs)


def check_op(row, kernel, dtype, attrs):
    arrays = [
        edge_values(dtype, p.ref.shape, seed) for seed, p in enumerate(kernel.inputs)
    ]
    if row.domain is not None and dtype.is_float:
        arrays = [np.clip(a, *row.domain).astype(dtype.np) for a in arrays]
    if row.name == "select_n":
        arrays[0] = edge_values(harness.BOOL, arrays[0].shape, 9)
    if row.name == "bitcast" and attrs["dtype"].is_float:
        arrays = [np.abs(a) // 4 for a in arrays]  # no NaN: their bits may change
    (got,) = harness.simulated(kernel, arrays)
    operands = [a != 0 if dtype.is_bool else a for a in arrays]
    if row.name == "select_n":
        operands[0] = arrays[0] != 0
    with np.errstate(all="ignore"):
        want = np.asarray(row.meaning(*operands, **attrs))
        if row.name == "bitcast":
            want = want.view(attrs["dtype"].np)
        want = want.astype(got.dtype)
    assert_close([got], [want])


MASKS = {"causal": masks.Causal(), "window": masks.Window(300, 0)}


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("name", MASKS)
def test_masked_attention_for_a_chip_means_the_same(name, chip):
    """Forward and backward: its steps are gathered, and joined in versions or one.

    Blocks of queries that are one program have one product with each block of keys and
    of values, where that pays.
    """
    x = jax.ShapeDtypeStruct((1, 1536, 1, 128), jnp.float32)
    run = lambda q, k, v: kernels.attention(q, k, v, mask=MASKS[name]).sum()
    with config.override(target=chip):
        found = calls_in(jax.grad(run, (0, 1, 2)), x, x, x)
    for number, call in enumerate(found):
        arrays = harness.random_arrays(call.kernel)
        compiled = Compiled(get("tpu"), call.kernel, Options(chip=TPUS[chip]))
        got = harness.run_compiled(compiled, arrays)
        assert_close(got, harness.emulated(call.kernel, arrays))
        changed = {step.name for step in compiled.steps if step.changed}
        branches = [op for op in walk(compiled.scheduled.body) if op.name == "cond"]
        assert "join_branches" in changed or not branches
        if number == 0:
            assert ("join_products" in changed) == (chip == "v6e")


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("name", MASKS)
def test_masked_attention_alone_is_one_program_without_branches(name, chip):
    """Halves of blocks that a mask rules out have no products; the others overlap."""
    x = jax.ShapeDtypeStruct((1, 1536, 1, 128), jnp.float32)
    run = lambda q, k, v: kernels.attention(q, k, v, mask=MASKS[name])
    with config.override(target=chip):
        (call,) = calls_in(run, x, x, x)
    arrays = harness.random_arrays(call.kernel)
    compiled = Compiled(get("tpu"), call.kernel, Options(chip=TPUS[chip]))
    got = harness.run_compiled(compiled, arrays)
    assert_close(got, harness.emulated(call.kernel, arrays))
    ops = [op for op in walk(compiled.scheduled.body)]
    assert not any(op.name in ("cond", "exp") for op in ops)
    pairs = sum(
        prod(op.result.tile.shape)
        for op in ops
        if op.name == "dot" and op.attrs["contract"] == ((1,), (1,))
    )
    # Of 36 quarters of blocks, those with an allowed pair.
    allowed = {"causal": 21, "window": 15}
    assert pairs == allowed[name] * 256**2
    changed = {step.name for step in compiled.steps if step.changed}
    assert {"scratch_values", "fold_exp2"} <= changed


# Of a block of queries and one of keys, by their first and last positions: is any pair
# allowed. And of two positions.
GUARDS = {
    "causal": (lambda q, k: k[0] <= q[1], lambda q, k: k <= q),
    "after": (lambda q, k: k[1] >= q[0], lambda q, k: k >= q),
    "window": (
        lambda q, k: (k[0] <= q[1]) & (k[1] > q[0] - 200),
        lambda q, k: (k <= q) & (k > q - 200),
    ),
    "prefix": (
        lambda q, k: (k[0] <= q[1]) | (k[0] < 130),
        lambda q, k: (k <= q) | (k < 130),
    ),
    "blocks before": (lambda q, k: k[1] < q[0], None),
}


def guarded_attention(q, k, v, kind: str, block_q: int, block_kv: int):
    """One head whose author skips blocks without a pair, and masks the others."""
    allowed, pairs = GUARDS[kind]
    length, width = q.shape

    def kernel(q_ref, k_ref, v_ref, o_ref, top_ref, total_ref, acc_ref):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j == 0)
        def _():
            top_ref[...] = jnp.full_like(top_ref, -1e30)
            total_ref[...] = jnp.full_like(total_ref, 1e-3)
            acc_ref[...] = jnp.zeros_like(acc_ref)

        first, last = i * block_q, i * block_q + block_q - 1
        others = j * block_kv, j * block_kv + block_kv - 1

        @pl.when(allowed((first, last), others))
        def _():
            scores = 0.1 * jnp.dot(q_ref[...], k_ref[...].T)
            if pairs is not None:
                rows = first + lax.broadcasted_iota(jnp.int32, scores.shape, 0)
                keys = others[0] + lax.broadcasted_iota(jnp.int32, scores.shape, 1)
                scores = jnp.where(pairs(rows, keys), scores, -1e30)
            top = jnp.maximum(top_ref[...], scores.max(axis=1, keepdims=True))
            weights = jnp.exp(scores - top)
            old = jnp.exp(top_ref[...] - top)
            total_ref[...] = old * total_ref[...] + weights.sum(axis=1, keepdims=True)
            acc_ref[...] = old * acc_ref[...] + jnp.dot(weights, v_ref[...])
            top_ref[...] = top

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = acc_ref[...] / total_ref[...]

    queries = pl.BlockSpec((block_q, width), lambda i, j: (i, 0))
    keys = pl.BlockSpec((block_kv, width), lambda i, j: (j, 0))
    columns = [pltpu.VMEM((block_q, n), jnp.float32) for n in (1, 1, width)]
    return pl.pallas_call(
        kernel,
        out_shape=q,
        grid=(pl.cdiv(length, block_q), len(k) // block_kv),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        scratch_shapes=columns,
    )(q, k, v)


@pytest.mark.parametrize("kind", GUARDS)
@pytest.mark.parametrize(
    "length, keys, block_q, block_kv",
    [(1024, 1024, 128, 128), (1024, 1024, 64, 256), (1000, 1536, 256, 128)],
)
def test_guards_of_small_blocks_mean_the_same(kind, length, keys, block_q, block_kv):
    """Joined programs, wider and gathered steps, versions that know their index."""
    x = jax.ShapeDtypeStruct((length, 128), jnp.float32)
    y = jax.ShapeDtypeStruct((keys, 128), jnp.float32)
    run = partial(guarded_attention, kind=kind, block_q=block_q, block_kv=block_kv)
    with config.override(target="v6e"):
        (call,) = calls_in(run, x, y, y)
    arrays = harness.random_arrays(call.kernel)
    compiled = Compiled(get("tpu"), call.kernel, Options(chip=TPUS["v6e"]))
    got = harness.run_compiled(compiled, arrays)
    assert_close(got, harness.emulated(call.kernel, arrays))


@pytest.mark.parametrize(
    ("wide", "narrow"), [("f32", "bf16"), ("u32", "u8"), ("i32", "i16")]
)
def test_bitcasts_between_widths_mean_the_same(wide: str, narrow: str):
    old, new = jnp.dtype(DTYPES[wide].np), jnp.dtype(DTYPES[narrow].np)
    x = np.random.default_rng(0).integers(0, 1 << 24, (8, 128)).astype(np.uint32)
    x |= 0x3F000000  # a number, if it is one of floats
    x = x.view(old)
    parts = (8, 128, old.itemsize // new.itemsize)

    def cut(x_ref, o_ref):
        o_ref[...] = jax.lax.bitcast_convert_type(x_ref[...], new)

    def join(x_ref, o_ref):
        o_ref[...] = jax.lax.bitcast_convert_type(x_ref[...], old)

    split = pl.pallas_call(cut, out_shape=jax.ShapeDtypeStruct(parts, new))
    whole = pl.pallas_call(join, out_shape=jax.ShapeDtypeStruct(x.shape, old))
    (found,) = harness.simulated(*kernels_in(split, x), [x])
    assert found.tobytes() == x.tobytes()
    (back,) = harness.simulated(*kernels_in(whole, found), [found])
    assert back.tobytes() == x.tobytes()
