"""Cotangents that programs scatter, merged in a fixed order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
import pallasite.tpu as pltpu
from pallasite import config
from pallasite.autodiff import backward
from pallasite.autodiff.backward import plan
from pallasite.ir.nodes import walk
from pallasite.sites import calls_in, kernels_in
from pallasite.target import GPUS, Host, Machine

H200 = Machine.usual(GPUS["h200"])


@pytest.fixture(autouse=True)
def planned_for_a_gpu(monkeypatch):
    """Gradients here are computed as on a GPU, which merges what programs scatter."""
    monkeypatch.setattr(backward, "chip_for", lambda backend: GPUS["h200"])


def merges(function, *args, machine: Machine = H200) -> int:
    (call,) = calls_in(function, *args)
    wanted = tuple(ref.ref.dtype.is_float for ref in call.kernel.inputs)
    return len(plan(call.kernel, wanted, (True,), machine).merges)


def check(function, reference, *args, merged: int = 1):
    """The gradient by the first operand."""
    weights = jnp.cos(jnp.arange(reference(*args).size, dtype=jnp.float32))

    def loss(f, *operands):
        return (f(*operands).astype(jnp.float32).ravel() * weights).sum()

    assert merges(function, *args) == merged
    got = jax.jit(jax.grad(lambda *a: loss(function, *a)))(*args)
    want = jax.grad(lambda *a: loss(reference, *a))(*args)
    assert got.dtype == want.dtype
    # JAX adds up in bf16, Pallasite in f32.
    atol = 0.05 if got.dtype == jnp.bfloat16 else 1e-5
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=atol)


def same_gradients(function, reference, x, weights):
    """Of the weighted sum of the results."""
    total = lambda f: lambda x: (f(x) * weights).sum()
    got, want = (jax.grad(total(f))(x) for f in (function, reference))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def embedding(rows_per_step: int):
    def kernel(table_ref, ids_ref, o_ref):
        o_ref[...] = table_ref[ids_ref[...], :]

    def run(table, ids):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((ids.shape[0], table.shape[1]), table.dtype),
            grid=(pl.cdiv(ids.shape[0], rows_per_step),),
            in_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec((rows_per_step,), lambda i: (i,)),
            ],
            out_specs=pl.BlockSpec((rows_per_step, table.shape[1]), lambda i: (i, 0)),
        )(table, ids)

    return run


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 33, 40])
def test_rows_by_an_index_array(dtype, width: int):
    ids = jax.random.randint(jax.random.key(1), (48,), 0, 7).at[3:9].set(5)
    table = jax.random.normal(jax.random.key(0), (13, width), dtype)
    check(embedding(8), lambda t, i: t[i], table, ids)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 40])
def test_few_cores_add_rows_where_they_belong(dtype, width: int, monkeypatch):
    """Sorting rows takes longer than adding them one after another."""
    host = Host(32, 16, threads=2)
    ids = jax.random.randint(jax.random.key(1), (48,), 0, 7).at[3:9].set(5)
    table = jax.random.normal(jax.random.key(0), (13, width), dtype)
    run = embedding(8)
    assert not merges(run, table, ids, machine=Machine.usual(host))
    monkeypatch.setattr(backward, "chip_for", lambda backend: host)
    check(run, lambda t, i: t[i], table, ids)


def sums_in_blocks(y, rows: int):
    """Running sums of blocks of rows: parts of them would not be computed again."""
    return jnp.cumsum(y.reshape(-1, rows, y.shape[1]), axis=1).reshape(y.shape)


def stencil(padding: int):
    """Three rows around each; blocks overlap, and may begin before the array."""

    def kernel(x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = jnp.cumsum(x[:-2] + 2 * x[1:-1] + 3 * x[2:], axis=0)

    def run(x):
        rows = x.shape[0] - 2 * (1 - padding)
        dim = pl.Element(6, (padding, padding))
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((rows, x.shape[1]), x.dtype),
            grid=(rows // 4,),
            in_specs=[pl.BlockSpec((dim, x.shape[1]), lambda i: (i * 4, 0))],
            out_specs=pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0)),
        )(x)

    return run


@pytest.fixture(params=["gpu", "cpu"])
def either_chip(request, monkeypatch):
    """Shifted copies are added up by XLA on a GPU, by one kernel on a CPU."""
    if request.param == "cpu":
        host = Host(32, 16, threads=2)
        monkeypatch.setattr(backward, "chip_for", lambda backend: host)


def test_overlapping_windows(either_chip):
    x = jax.random.normal(jax.random.key(0), (26, 5))
    reference = lambda x: sums_in_blocks(x[:-2] + 2 * x[1:-1] + 3 * x[2:], 4)
    check(stencil(0), reference, x)


def halo(rows: int, columns: int, dtype):
    """Blocks that overlap in two dimensions, and may end past those of the result."""

    def kernel(x_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        y = jnp.sin(x[:-3, :-1]) * x[3:, 1:]
        o_ref[...] = jnp.cumsum(y, axis=0).astype(o_ref.dtype)

    def run(x):
        n, m = x.shape[0] - 3, x.shape[1] - 1
        block = pl.Element(rows + 3), pl.Element(columns + 1)
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((n, m), dtype),
            grid=(n // rows, m // columns),
            in_specs=[pl.BlockSpec(block, lambda i, j: (i * rows, j * columns))],
            out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
        )(x)

    return run


@pytest.mark.parametrize(
    "dtype, block",
    [(jnp.float32, (6, 7)), (jnp.float32, (2, 14)), (jnp.bfloat16, (6, 7))],
    ids=str,
)
def test_overlaps_in_two_dimensions(dtype, block, either_chip):
    """With two rows a block, three tiles reach each of its elements."""
    x = jax.random.normal(jax.random.key(0), (15, 29)).astype(dtype)

    def reference(x):
        wide = x.astype(jnp.float32)
        y = jnp.sin(wide[:-3, :-1]) * wide[3:, 1:]
        return sums_in_blocks(y, block[0]).astype(dtype)

    check(halo(*block, dtype), reference, x)


def test_windows_that_begin_before_the_array(either_chip):
    x = jax.random.normal(jax.random.key(0), (24, 5))

    def inside(x):
        return sums_in_blocks((x[:-2] + 2 * x[1:-1] + 3 * x[2:])[3:-3], 4)

    check(lambda x: stencil(1)(x)[4:-4], inside, x)


def test_blocks_chosen_by_a_clamped_index():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * x_ref[...]

    def run(x):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((20, 3), x.dtype),
            grid=(5,),
            in_specs=[pl.BlockSpec((4, 3), lambda i: (jnp.maximum(i - 2, 0), 0))],
            out_specs=pl.BlockSpec((4, 3), lambda i: (i, 0)),
        )(x)

    x = jax.random.normal(jax.random.key(0), (11, 3))
    rows = jnp.array([0, 0, 0, 1, 2])[:, None] * 4 + jnp.arange(4)
    reference = lambda x: (jnp.pad(x, ((0, 1), (0, 0)))[rows.reshape(-1)]) ** 2
    check(lambda x: run(x)[:19], lambda x: reference(x)[:19], x)


def test_sums_of_whole_blocks_are_not_scattered():
    """The weights of a norm: a sum over programs, in parts."""

    def kernel(x_ref, g_ref, o_ref):
        o_ref[...] = x_ref[...] * g_ref[...]

    def run(g, x):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(x.shape[0] // 4,),
            in_specs=[
                pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0)),
                pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((4, x.shape[1]), lambda i: (i, 0)),
        )(x, g)

    x = jax.random.normal(jax.random.key(0), (256, 8))
    check(run, lambda g, x: g * x, jnp.ones((1, 8)), x, merged=0)


def test_batched_and_second_derivatives():
    ids = jax.random.randint(jax.random.key(1), (16,), 0, 5)
    table = jax.random.normal(jax.random.key(0), (2, 5, 8))
    ours, theirs = embedding(8), lambda t, i: t[i]

    def second(f):
        first = jax.grad(lambda t: (f(t, ids) ** 3).sum())
        return jax.vmap(jax.grad(lambda t: (first(t) ** 2).sum()))(table)

    np.testing.assert_allclose(second(ours), second(theirs), rtol=1e-4)


def test_iterations_with_parts_of_their_own_store_them():
    """The adjoint of a recurrence: no zero fill, nothing read back, no copied seed."""

    def kernel(a_ref, x_ref, o_ref):
        def step(t, h):
            h = a_ref[t, :] * h + x_ref[t, :]
            o_ref[t, :] = h
            return h

        jax.lax.fori_loop(0, a_ref.shape[0], step, jnp.zeros(a_ref.shape[1]))

    def run(a, x):
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(a.shape, a.dtype))(a, x)

    def reference(a, x):
        step = lambda h, ax: (ax[0] * h + ax[1],) * 2
        return jax.lax.scan(step, jnp.zeros(a.shape[1]), (a, x))[1]

    a, x = (jax.random.normal(jax.random.key(n), (12, 5)) for n in (0, 1))
    check(run, reference, a, x, merged=0)
    (call,) = calls_in(run, a, x)
    (step,) = plan(call.kernel, (True, True), (True,), H200).steps
    text = step.kernel.text
    assert "load %d_a_ref" not in text and "load %d_x_ref" not in text
    assert text.count("alloc") == 1, "the states, and no copy of a cotangent"


def test_weights_that_a_loop_captures_have_cotangents_of_their_size():
    def kernel(w_ref, x_ref, o_ref):
        w = jnp.broadcast_to(w_ref[...], (8, 16))

        def step(t, carry):
            x = x_ref[pl.ds(t * 8, 8), :] + carry
            o_ref[pl.ds(t * 8, 8), :] = x * w
            return jnp.sin(x)

        jax.lax.fori_loop(0, 4, step, jnp.zeros((8, 16)))

    def run(w, x):
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(w, x)

    def reference(w, x):
        step = lambda c, x: (jnp.sin(x + c), (x + c) * w)
        parts = jax.lax.scan(step, jnp.zeros((8, 16)), x.reshape(4, 8, 16))[1]
        return parts.reshape(x.shape)

    w, x = (
        jax.random.normal(jax.random.key(n), s)
        for n, s in enumerate([(1, 16), (32, 16)])
    )
    check(run, reference, w, x, merged=0)
    (call,) = calls_in(run, w, x)
    (step,) = plan(call.kernel, (True, True), (True,), H200).steps
    carried = [op for op in walk(step.kernel.body) if op.name == "for"][-1].results
    assert sum(v.tile.size for v in carried) <= 8 * 16 + 16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_rows_of_cotangents_are_added_up_where_they_lie(dtype):
    """No kernel copies them, and sums are stored in the operand's type."""
    ids = jax.random.randint(jax.random.key(1), (48,), 0, 7)
    function = embedding(8)
    args = (jax.random.normal(jax.random.key(0), (13, 33), dtype), ids)
    check(function, lambda t, i: t[i], *args)
    (call,) = calls_in(function, *args)
    wanted = tuple(ref.ref.dtype.is_float for ref in call.kernel.inputs)
    (step,) = plan(call.kernel, wanted, (True,), H200).steps
    assert [p.ref.dtype.name for p in step.kernel.outputs] == ["i32"]
    gradient = jax.grad(lambda t, i: function(t, i).astype(jnp.float32).sum())
    with config.override(target="gpu:h200"):
        *_, last = kernels_in(gradient, *args)
    assert last.outputs[0].ref.dtype.name == call.kernel.outputs[0].ref.dtype.name


@pytest.mark.parametrize("shape", [(6, 5, 12), (4, 3, 2, 8)], ids=str)
def test_points_of_planes_and_volumes(shape):
    """Interpolation: each point adds to its corners, which memory names."""
    *sizes, width = shape
    count, points = len(sizes), 14
    places = 0.5 + jax.random.uniform(jax.random.key(0), (points, count)) * (
        jnp.array(sizes) - 2
    )
    image = jax.random.normal(jax.random.key(1), shape)

    def corners(place, read):
        low = [jnp.floor(x).astype(jnp.int32) for x in place]
        total = 0.0
        for ends in np.ndindex(*(2,) * count):
            weight = 1.0
            for x, first, end in zip(place, low, ends, strict=True):
                weight *= x - first if end else 1 - (x - first)
            at = [first + end for first, end in zip(low, ends, strict=True)]
            total = total + weight * read(*at)
        return total

    def kernel(image_ref, place_ref, o_ref):
        place = [place_ref[0, d] for d in range(count)]
        o_ref[0, :] = corners(place, lambda *at: image_ref[(*at, slice(None))])

    def run(image, places):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((points, width), image.dtype),
            grid=(points,),
            in_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec((1, count), lambda i: (i, 0)),
            ],
            out_specs=pl.BlockSpec((1, width), lambda i: (i, 0)),
        )(image, places)

    def reference(image, places):
        one = lambda place: corners(list(place), lambda *at: image[at])
        return jax.vmap(one)(places)

    check(run, reference, image, places)
    turned = lambda f: lambda places, image: f(image, places)
    check(turned(run), turned(reference), places, image)


def random_access(rng: np.random.Generator):
    """A kernel that reads an array through a random index, and what it means."""
    rank = int(rng.integers(1, 4))
    shape = tuple(int(n) for n in rng.integers(3, 7, rank))
    steps, named = 3, tuple(int(n) for n in rng.integers(1, 4, rng.integers(1, 3)))
    kinds = [str(k) for k in rng.choice(["names", "slice", "whole", "one"], rank)]
    kinds[int(rng.integers(rank))] = "names"
    arrays = [n for n, kind in enumerate(kinds) if kind == "names"]
    given = rng.integers(-1, 7, (steps, len(arrays), *named)).astype(np.int32)
    masked = bool(rng.random() < 0.5)
    whole = bool(rng.random() < 0.5)

    def index(names, step):
        found = []
        for d, (kind, n) in enumerate(zip(kinds, shape, strict=True)):
            if kind == "names":
                found.append(names[arrays.index(d)])
            elif kind == "whole":
                found.append(slice(None))
            elif kind == "slice":
                found.append(pl.ds(step % (n - 1), 2))
            else:
                found.append(step % n)
        return tuple(found)

    def of_array(step):
        """The same for an array: clamped, but negative ones count from its end."""
        sizes = [shape[d] for d in arrays]
        pairs = zip(given[step], sizes, strict=True)
        names = [np.clip(np.where(g < 0, g + n, g), 0, n - 1) for g, n in pairs]
        found = index(names, step)
        plain = lambda e: slice(e.start, e.start + 2) if isinstance(e, pl.Slice) else e
        return tuple(map(plain, found))

    result = np.empty(shape)[of_array(0)].shape
    keep = rng.random((steps, *result)) < 0.7

    def kernel(x_ref, names_ref, keep_ref, o_ref):
        names = names_ref[0]
        at = index(names, pl.program_id(0))
        if masked:
            got = pl.load(x_ref, at, mask=keep_ref[0] != 0, other=0)
        else:
            got = x_ref[at]
        o_ref[0] = jnp.cumsum(jnp.sin(got), axis=0)

    def run(x):
        block = lambda a: pl.BlockSpec(
            (1, *a.shape[1:]), lambda i: (i, *(0 for _ in a.shape[1:]))
        )
        any_space = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((steps, *result), x.dtype),
            grid=(steps,),
            in_specs=[
                pl.BlockSpec(shape, lambda i: (0,) * rank) if whole else any_space,
                block(given),
                block(keep),
            ],
            out_specs=block(keep),
        )(x, given, keep.astype(np.int32))

    def reference(x):
        found = []
        for step in range(steps):
            got = x[of_array(step)]
            got = jnp.where(keep[step], got, 0) if masked else got
            found.append(jnp.cumsum(jnp.sin(got), axis=0))
        return jnp.stack(found)

    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return run, reference, x


@pytest.mark.parametrize("seed", range(16))
def test_random_places(seed: int):
    """Index arrays in any dimensions, slices beside them, and masks."""
    run, reference, x = random_access(np.random.default_rng(seed))
    np.testing.assert_allclose(run(x), reference(x), rtol=1e-5, atol=1e-5)
    check(run, reference, x)


@pytest.mark.parametrize("columns", ["clamped", "padded", "divided"])
def test_what_hangs_over_the_edge_reaches_no_other_row(columns):
    """Elements past the last column are not the first ones of the next row."""
    table = jnp.array([1, 0, 1])
    width = {"clamped": 8, "padded": pl.Element(8, (1, 1)), "divided": 4}[columns]

    def kernel(table_ref, x_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = x * (1 + x.sum(1, keepdims=True))

    def place(i, j, table_ref):
        return table_ref[i], {"clamped": 1 + j, "padded": 0, "divided": j}[columns]

    def run(x):
        steps = 2 if columns == "divided" else 1
        block = (4, 8 // steps)
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(3, steps),
            in_specs=[pl.BlockSpec((4, width), place, fill=0.5)],
            out_specs=pl.BlockSpec(block, lambda i, j, _: (i, j)),
        )
        out = jax.ShapeDtypeStruct((12, 8), x.dtype)
        return pl.pallas_call(kernel, out, grid_spec=spec)(table, x)

    def reference(x):
        before = 1 if columns == "padded" else 0
        x = jnp.pad(x, ((0, 0), (before, 2 - before)), constant_values=0.5)
        x = jnp.concatenate([x[4 * t : 4 * t + 4] for t in (1, 0, 1)])
        parts = jnp.split(x, 2, axis=1) if columns == "divided" else [x]
        return jnp.concatenate([p * (1 + p.sum(1, keepdims=True)) for p in parts], 1)

    x = jax.random.normal(jax.random.key(3), (8, 6))
    weights = jnp.cos(jnp.arange(96.0)).reshape(12, 8)
    same_gradients(run, reference, x, weights)


def test_rows_of_blocks_that_hang_over_the_edge():
    """As above, where index arrays name the rows."""
    rows = jnp.array([2, 0, 2, 1])

    def kernel(rows_ref, x_ref, o_ref):
        x = x_ref[rows_ref[...], :]
        o_ref[...] = x * (1 + x.sum(1, keepdims=True))

    def run(x):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((4, 8), x.dtype),
            grid=2,
            in_specs=[
                pl.BlockSpec((4,), lambda j: (0,)),
                pl.BlockSpec((3, 4), lambda j: (0, j), fill=0.5),
            ],
            out_specs=pl.BlockSpec((4, 4), lambda j: (0, j)),
        )(rows, x)

    def reference(x):
        x = jnp.pad(x, ((0, 0), (0, 2)), constant_values=0.5)[rows]
        parts = jnp.split(x, 2, axis=1)
        return jnp.concatenate([p * (1 + p.sum(1, keepdims=True)) for p in parts], 1)

    x = jax.random.normal(jax.random.key(3), (3, 6))
    weights = jnp.cos(jnp.arange(32.0)).reshape(4, 8)
    same_gradients(run, reference, x, weights)
