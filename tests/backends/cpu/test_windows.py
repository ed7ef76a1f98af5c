"""Windows: edges, fill values, element and bounded blocks, aliases, inner pipelines."""

import jax
import numpy as np
import pytest

from pallasite.backends.cpu.llvm import vector_loops
from pallasite.emulation.emulate import emulate
from pallasite.ir.build import Builder
from pallasite.ir.nodes import At, Block, BlockDim, Kernel, Value, Window
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import BF16, BOOL, F32, F64, I8, I32, INDEX, DType, RefType
from tests.backends.cpu.running import llvm_of, run
from tests.ir.kernels import (
    block_refs,
    blocked,
    emit_pipeline,
    flash_attention,
    main_ref,
    matmul,
    vector_add,
    when,
)

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def attention(q, k, v):
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True) @ v


# --- the three kernels of the tracer bullet ---


@pytest.mark.parametrize(("size", "block"), [(1024, 128), (1000, 128), (5, 8), (7, 1)])
def test_vector_add(size: int, block: int):
    x, y = normal(size), normal(size)
    (got,) = run(vector_add(size, block), x, y)
    np.testing.assert_array_equal(got, x + y)


@pytest.mark.parametrize("shape", [(256, 256, 256), (200, 130, 300), (17, 5, 40)])
def test_matmul_accumulates_over_the_last_axis(shape: tuple[int, int, int]):
    m, n, k = shape
    x, y = normal(m, k), normal(k, n)
    (got,) = run(matmul(m, n, k, (64, 128, 32)), x, y)
    np.testing.assert_allclose(got, x @ y, rtol=1e-4, atol=1e-4)


def test_flash_attention_carries_scratch():
    q, k, v = normal(192, 32), normal(256, 32), normal(256, 32)
    (got,) = run(flash_attention(192, 256, 32, 64), q, k, v)
    np.testing.assert_allclose(got, attention(q, k, v), rtol=1e-4, atol=1e-5)


def test_blocks_inside_the_array_are_not_copied():
    assert "@malloc" not in llvm_of(vector_add(1024, 128))
    assert "@malloc" in llvm_of(vector_add(1000, 128))


# --- edges ---


def copy_kernel(
    source: tuple[int, ...],
    result: tuple[int, ...],
    grid: tuple[int, ...],
    windows: list[Window],
    maps: list,
    body=None,
) -> Kernel:
    refs = [main_ref("x", *source), main_ref("o", *result)]
    b = Builder()
    body = body or (lambda b, ids, x, o: b.store(o, b.load(x)))
    emit_pipeline(b, refs, windows, maps, grid, body)
    return Kernel("copy", tuple(refs), b.block(), 1)


def test_fill_is_read_outside_the_array():
    """Row sums over blocks of 4 columns of an array with 10."""
    x = normal(3, 10)
    windows = [
        Window((BlockDim(3), BlockDim(4)), "in", fill=100.0),
        Window((BlockDim(3), BlockDim(1)), "out"),
    ]
    by_column = lambda b, j: (b.index(0), j)

    def body(b, ids, x, o):
        sums = b.reduce(b.load(x), kind="sum", axes=(1,))
        b.store(o, b.reshape(sums, shape=(3, 1)))

    kernel = copy_kernel((3, 10), (3, 3), (3,), windows, [by_column] * 2, body)
    (got,) = run(kernel, x)
    padded = np.pad(x, ((0, 0), (0, 2)), constant_values=100)
    np.testing.assert_allclose(got, padded.reshape(3, 3, 4).sum(2), rtol=1e-5)


def test_an_edge_block_of_an_output_keeps_what_earlier_programs_wrote():
    """Each of three programs adds its number to the same overhanging block."""
    b = Builder()
    o = main_ref("o", 5)

    def body(b, ids, out):
        when(
            b,
            b.eq(ids[0], b.index(0)),
            lambda c: c.store(out, c.constant(0.0, out.ref.tile)),
        )
        number = b.broadcast(b.cast(ids[0], F32), (8,))
        b.store(out, b.add(b.load(out), number))

    emit_pipeline(b, [o], [blocked("out", 8)], [lambda b, i: (b.index(0),)], (3,), body)
    (got,) = run(Kernel("sum", (o,), b.block(), 1))
    np.testing.assert_array_equal(got, np.full(5, 3))


@pytest.mark.parametrize("dtype", [F32, BF16, I8, BOOL, F64], ids=str)
@pytest.mark.parametrize(("size", "block"), [(5, 8), (37, 16), (100, 33), (9, 1)])
def test_edge_blocks_keep_every_bit(dtype: DType, size: int, block: int):
    """Of all types, those of NaNs too; blocks longer and shorter than vectors."""
    raw = RNG.integers(0, 256, (3 * size * dtype.bytes,)).astype(np.uint8)
    x = raw.view(dtype.np) if dtype is not BOOL else raw > 99
    x = x.reshape(3, size)
    refs = [main_ref(n, 3, size, dtype=dtype) for n in "xo"]
    grid, windows = (
        (2, -(-size // block)),
        [blocked(m, 2, block) for m in ("in", "out")],
    )
    body = lambda b, ids, x, o: b.store(o, b.load(x))
    b = Builder()
    emit_pipeline(b, refs, windows, [lambda b, i, j: (i, j)] * 2, grid, body)
    (got,) = run(Kernel("copy", tuple(refs), b.block(), 1), x)
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))


def test_edge_blocks_are_copied_by_vectors():
    body = lambda b, ids, x, o: b.store(o, b.add(b.load(x), b.load(o)))
    by_row = lambda b, i: (i, b.index(0))
    windows = [blocked("in", 4, 256), blocked("out", 4, 256)]
    shape = (10, 200)
    read = copy_kernel(shape, shape, (3,), windows, [by_row] * 2, body)
    stored = copy_kernel(shape, shape, (3,), windows, [by_row] * 2)
    vectors = f" to <{vector_loops.width()} x i32>"
    counts = [llvm_of(kernel).count(vectors) for kernel in (read, stored)]
    # Both blocks are copied in and one back; what all is stored to is not copied in.
    assert counts == [3, 2]
    x = normal(*shape)
    np.testing.assert_array_equal(run(stored, x)[0], x)


@pytest.mark.parametrize("index", [-7, -1, 0, 1, 2, 40])
def test_block_numbers_are_clamped(index: int):
    x = normal(10)
    at = lambda b, i: (b.index(index),)
    windows = [blocked("in", 4), blocked("out", 4)]
    maps = [at, lambda b, i: (b.index(0),)]
    (got,) = run(copy_kernel((10,), (4,), (1,), windows, maps), x)
    start = 4 * max(0, min(index, 2))
    want = x[start : start + 4]
    np.testing.assert_array_equal(got[: len(want)], want)


def test_element_blocks_overlap_and_see_padding():
    """A three-point stencil: blocks of 6 elements every 4, one element of halo."""
    x = normal(12)
    windows = [
        Window((BlockDim(6, "element", (1, 1)),), "in", fill=0.0),
        Window((BlockDim(4),), "out"),
    ]
    maps = [lambda b, i: (b.mul(i, b.index(4)),), lambda b, i: (i,)]

    def body(b, ids, x, o):
        v = b.load(x)
        part = lambda n: b.slice(v, starts=(n,), limits=(n + 4,), strides=(1,))
        b.store(o, b.add(b.add(part(0), part(1)), part(2)))

    (got,) = run(copy_kernel((12,), (12,), (3,), windows, maps, body), x)
    padded = np.pad(x, 1)
    want = padded[:-2] + padded[1:-1] + padded[2:]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_element_blocks_proved_inside_are_views():
    windows = [Window((BlockDim(4, "element"),), "in"), Window((BlockDim(4),), "out")]
    maps = [lambda b, i: (b.mul(i, b.index(3)),), lambda b, i: (i,)]
    kernel = copy_kernel((10,), (12,), (3,), windows, maps)
    assert "@malloc" not in llvm_of(kernel)
    x = normal(10)
    (got,) = run(kernel, x)
    np.testing.assert_array_equal(got, np.concatenate([x[0:4], x[3:7], x[6:10]]))


def test_bounded_blocks_have_a_length():
    x = normal(9)
    windows = [
        Window((BlockDim(4, "bounded"),), "in", fill=0.0),
        Window((BlockDim(4),), "out"),
    ]
    # Program i sees i + 1 elements from 3 * i on.
    maps = [
        lambda b, i: (b.mul(i, b.index(3)), b.add(i, b.index(1))),
        lambda b, i: (i,),
    ]
    (got,) = run(copy_kernel((9,), (12,), (3,), windows, maps), x)
    want = np.zeros((3, 4), np.float32)
    for i in range(3):
        part = x[3 * i : 3 * i + i + 1]
        want[i, : len(part)] = part
    np.testing.assert_array_equal(got, want.ravel())


def test_bounded_outputs_drop_what_is_past_the_length():
    windows = [blocked("in", 4), Window((BlockDim(4, "bounded"),), "out")]
    maps = [
        lambda b, i: (i,),
        lambda b, i: (b.mul(i, b.index(3)), b.index(3)),
    ]
    x = normal(12)
    (got,) = run(copy_kernel((12,), (9,), (3,), windows, maps), x)
    np.testing.assert_array_equal(got, x.reshape(3, 4)[:, :3].ravel())


def test_squeezed_dimensions_disappear():
    x = normal(3, 4, 5)
    windows = [
        Window((BlockDim(1, "squeezed"), BlockDim(4), BlockDim(1, "squeezed")), "in"),
        Window((BlockDim(1, "squeezed"), BlockDim(4)), "out"),
    ]
    maps = [lambda b, i: (i, b.index(0), b.index(99)), lambda b, i: (i, b.index(0))]
    (got,) = run(copy_kernel((3, 4, 5), (3, 4), (3,), windows, maps), x)
    np.testing.assert_array_equal(got, x[:, :, 4])


# --- grids ---


def test_grid_runs_in_lexicographic_order():
    """Each program appends its ids to the result; the place is carried in scratch."""
    o = main_ref("o", 6, 2, dtype=I32)
    b = Builder()
    place = b.op("alloc", type=RefType((), I32, "smem"))
    b.store(place, b.index(0))

    def body(b, ids, out):
        n = b.load(place)
        b.store(out, ids[0], (At(), At(0)), [n])
        b.store(out, ids[1], (At(), At(1)), [n])
        b.store(place, b.add(n, b.index(1)))

    zero = lambda b, i, j: (b.index(0), b.index(0))
    emit_pipeline(b, [o], [blocked("out", 6, 2)], [zero], (2, 3), body)
    (got,) = run(Kernel("order", (o,), b.block(), 1))
    np.testing.assert_array_equal(got, [(i, j) for i in range(2) for j in range(3)])


@pytest.mark.parametrize("programs", [0, 1, 3])
def test_dynamic_grid_sizes(programs: int):
    n, x, o = main_ref("n", dtype=I32), main_ref("x", 12), main_ref("o", 12)
    b = Builder()
    b.store(o, b.constant(0.0, o.ref.tile))
    size = b.load(n)
    windows = [blocked("in", 4), blocked("out", 4)]
    ids = [Value(INDEX) for _ in range(3)]
    blocks = block_refs([x, o], windows)
    inner = Builder()
    inner.store(blocks[1], inner.neg(inner.load(blocks[0])))
    regions = [Block((i,), (), (i,)) for i in ids[:2]]
    regions.append(inner.block((ids[2], *blocks)))
    attrs = dict(grid=(None,), windows=tuple(windows), semantics=("arbitrary",))
    b.emit("pipeline", size, x, o, regions=regions, **attrs)
    kernel = Kernel("dynamic", (n, x, o), b.block(), 1)
    data = normal(12)
    (got,) = run(kernel, np.int32(programs), data)
    done = 4 * programs
    np.testing.assert_array_equal(got, np.concatenate([-data[:done], 0 * data[done:]]))


def test_scalars_steer_index_maps():
    """A gather of rows by numbers in memory, as scalar prefetch does; one is wild."""
    which, x, o = (
        main_ref("which", 4, dtype=I32),
        main_ref("x", 5, 3),
        main_ref("o", 4, 3),
    )
    windows = [blocked("in", 1, 3), blocked("out", 1, 3)]
    maps = [
        lambda b, i: (b.load(which, (At(),), [i]), b.index(0)),
        lambda b, i: (i, b.index(0)),
    ]
    b = Builder()
    body = lambda b, ids, x, o: b.store(o, b.load(x))
    emit_pipeline(b, [x, o], windows, maps, (4,), body)
    kernel = Kernel("rows", (which, x, o), b.block(), 1)
    rows, data = np.array([3, 0, 1000, 2], np.int32), normal(5, 3)
    (got,) = run(kernel, rows, data)
    np.testing.assert_array_equal(got, data[np.clip(rows, 0, 4)])


@pytest.mark.parametrize("placed", [True, False])
def test_a_later_block_is_fetched_where_numbers_place_it(placed: bool):
    """Not what follows in memory: the rows of an embedding come in any order."""
    which, x, o = (
        main_ref("which", 3, 4, dtype=I32),
        main_ref("x", 50, 64),
        main_ref("o", 3, 4, 64),
    )
    row = lambda b, i, j: b.load(which, (At(), At()), [i, j]) if placed else j
    windows = [blocked("in", 1, 64), blocked("out", 1, 1, 64)]
    maps = [
        lambda b, i, j: (row(b, i, j), b.index(0)),
        lambda b, i, j: (i, j, b.index(0)),
    ]
    b = Builder()
    body = lambda b, ids, x, o: b.store(o, b.op("reshape", b.load(x), shape=(1, 1, 64)))
    emit_pipeline(b, [x, o], windows, maps, (3, 4), body)
    kernel = Kernel("rows", (which, x, o), b.block(), 1)
    text = llvm_of(kernel)
    assert text.count("call void @llvm.prefetch") == 1
    assert ("ptrtoint ptr" in text.split("@handler")[0]) == placed
    rows, data = (
        np.array([[3, 0, 1000, 2], [49, 1, 1, 7], [-5, 4, 3, 9]]),
        normal(50, 64),
    )
    (got,) = run(kernel, rows.astype(np.int32), data)
    want = data[np.clip(rows, 0, 49)] if placed else np.stack([data[:4]] * 3)
    np.testing.assert_array_equal(got, want)


def test_inner_pipeline_over_a_block():
    """The outer grid takes 8 rows, an inner one takes these 3 at a time, with edges."""
    refs = [main_ref("x", 16, 10), main_ref("o", 16, 10)]
    windows = [blocked("in", 8, 10), blocked("out", 8, 10)]
    by_row = lambda b, i: (i, b.index(0))

    def body(b, ids, x, o):
        small = [blocked("in", 3, 4), blocked("out", 3, 4)]
        step = lambda c, ids, u, v: c.store(v, c.neg(c.load(u)))
        emit_pipeline(b, [x, o], small, [lambda c, i, j: (i, j)] * 2, (3, 3), step)

    b = Builder()
    emit_pipeline(b, refs, windows, [by_row] * 2, (2,), body)
    x = normal(16, 10)
    (got,) = run(Kernel("nested", tuple(refs), b.block(), 1), x)
    np.testing.assert_array_equal(got, -x)


# --- aliases and inputs ---


def test_an_aliased_operand_is_updated_in_place():
    refs = [main_ref("x", 10), main_ref("o", 10)]
    windows = [blocked("in", 4), blocked("out", 4)]
    b = Builder()
    body = lambda b, ids, x, o: b.store(o, b.add(b.load(x), b.load(o)))
    emit_pipeline(b, refs, windows, [lambda b, i: (i,)] * 2, (2,), body)
    kernel = Kernel("double", tuple(refs), b.block(), 1, aliases=((0, 0),))
    x = normal(10)
    (got,) = run(kernel, x)
    # Two of three blocks are visited; the rest is the operand's.
    np.testing.assert_array_equal(got, np.concatenate([2 * x[:8], x[8:]]))


def test_stores_are_seen_through_a_regrouped_alias():
    """A view that wants the block without gaps gets a copy; so does the alias."""
    refs = [main_ref("x", 4, 20), main_ref("out", 4, 20)]

    def body(b: Builder, ids, old: Value, new: Value) -> None:
        b.store(new, b.neg(b.load(old)))
        flat = b.load(b.reshape_view(old, shape=(80,)))
        b.store(new, b.reshape(b.add(flat, flat), shape=(4, 20)))

    b = Builder()
    windows = [blocked("in", 4, 20), blocked("out", 4, 20)]
    emit_pipeline(b, refs, windows, [lambda b, i: (i, b.index(0))] * 2, (1,), body)
    x = normal(4, 20)
    (got,) = run(Kernel("twice", tuple(refs), b.block(), 1, ((0, 0),)), x)
    np.testing.assert_array_equal(got, -2 * x)


def test_writing_to_an_input_block_leaves_the_operand_alone():
    refs = [main_ref("x", 8), main_ref("o", 8)]
    windows = [blocked("in", 4), blocked("out", 4)]

    def body(b, ids, x, o):
        b.store(x, b.neg(b.load(x)))
        b.store(o, b.load(x))

    b = Builder()
    emit_pipeline(b, refs, windows, [lambda b, i: (i,)] * 2, (2,), body)
    kernel = Kernel("scribble", tuple(refs), b.block(), 1)
    x = jax.numpy.asarray(normal(8))
    before = np.array(x)
    (got,) = run(kernel, x)
    np.testing.assert_array_equal(got, -before)
    np.testing.assert_array_equal(x, before)


def test_what_is_written_to_an_operand_is_seen_by_later_programs():
    """The call has the operand for its own; the caller's array stays as it is."""
    x, o = main_ref("x", 4), main_ref("o", 3, 4)

    def body(b, ids, out):
        b.store(x, b.add(b.load(x), b.load(x)))
        b.store(out, b.load(x))

    b = Builder()
    window = Window((BlockDim(1, "squeezed"), BlockDim(4)), "out")
    emit_pipeline(b, [o], [window], [lambda b, i: (i, b.index(0))], (3,), body)
    array = jax.numpy.asarray(normal(4))
    before = np.array(array)
    (got,) = run(Kernel("doubles", (x, o), b.block(), 1), array)
    np.testing.assert_array_equal(got, [2 * before, 4 * before, 8 * before])
    np.testing.assert_array_equal(array, before)


# --- against the evaluator ---


@pytest.mark.parametrize(
    "kernel",
    [
        vector_add(37, 8),
        matmul(30, 20, 24, (16, 16, 8)),
        flash_attention(48, 64, 8, 16),
    ],
    ids=lambda kernel: kernel.name,
)
def test_native_code_agrees_with_the_evaluator(kernel: Kernel):
    arrays = [normal(*p.ref.shape) for p in kernel.inputs]
    for native, defined in zip(
        run(kernel, *arrays), jax.jit(emulate(kernel))(*arrays), strict=True
    ):
        np.testing.assert_allclose(native, defined, rtol=1e-4, atol=1e-5)


def test_windows_of_two_parts_of_an_array_are_two_blocks():
    """The same block number of each part, at the edge too, is another place."""
    kernel = parse_kernel(
        """
        kernel @k(%s: ref<i32[20] any>, %o: ref<i32[20] any>) outputs 1 aliases {0: 0} {
          pipeline {grid=(), windows=(), semantics=()}
            body () {
              %a: ref<i32[7] any> = subview %o[0:+7]
              %b: ref<i32[7] any> = subview %o[10:+7]
              pipeline %a, %b {grid=(2,), windows=(in[4], out[4]),
                  semantics=("arbitrary",)}
                map (%i: i32) { yield %i }
                map (%j: i32) { yield %j }
                body (%p: i32, %ab: ref<i32[4] block>, %bb: ref<i32[4] block>) {
                  %v: i32[4] = load %ab[:]
                  %w: i32[4] = add %v, %v
                  store %bb[:] = %w
                }
            }
        }
        """
    )
    x = np.arange(20, dtype=np.int32)
    (got,) = run(kernel, x)
    np.testing.assert_array_equal(got, [*x[:10], *(2 * x[:7]), *x[17:]])
