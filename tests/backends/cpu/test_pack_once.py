"""dot in a grid: operands that are packed once, sums that start from nothing."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallasite as pl
from pallasite import target
from pallasite.backends.cpu import passes_for
from pallasite.backends.cpu.call import kept_memory
from pallasite.backends.cpu.dot.fusion import fuse_dot_sums
from pallasite.backends.cpu.dot.pack_once import PackedOnce, pack_once
from pallasite.backends.cpu.emit import emit_kernel
from pallasite.ir.build import Builder
from pallasite.ir.nodes import BlockDim, Kernel, Op, Value, Window, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import BF16, F16, F32, DType, RefType
from pallasite.passes.run import run as run_passes
from pallasite.sites import kernels_in
from pallasite.target import host
from tests.backends.cpu.running import llvm_of, run
from tests.backends.cpu.test_dot import close, numbers
from tests.ir.kernels import blocked, emit_pipeline, flash_attention, matmul, when

BF16_NP = ml_dtypes.bfloat16
VECTORS = target.Host(64, 32, frozenset({"avx512f", "fma"}))


def product(
    sizes: tuple[int, int, int],
    block: tuple[int, int, int],
    dtype: DType = F32,
    transposed: bool = False,
    aliases: tuple[tuple[int, int], ...] = (),
    between: Callable[[Builder, Value, Value], None] | None = None,
) -> Kernel:
    """x @ y over a grid; `transposed`: x and y are stored transposed.

    `between` writes ops after the zeroing, given the output and what it held.
    """
    (m, n, k), (bm, bn, bk) = sizes, block
    shapes = [(k, m), (n, k)] if transposed else [(m, k), (k, n)]
    blocks = [(bk, bm), (bn, bk)] if transposed else [(bm, bk), (bk, bn)]
    refs = [Value(RefType(s, dtype, "any"), "in") for s in shapes]
    refs.append(Value(RefType((m, n), F32, "any"), "o"))
    windows = [*(blocked("in", *s) for s in blocks), blocked("out", bm, bn)]
    maps = [lambda b, i, j, k: (i, k), lambda b, i, j, k: (k, j)]
    if transposed:
        maps = [lambda b, i, j, k: (k, i), lambda b, i, j, k: (j, k)]
    maps.append(lambda b, i, j, k: (i, j))
    contract = ((0,), (1,)) if transposed else ((1,), (0,))

    def body(b: Builder, ids: tuple[Value, ...], x: Value, y: Value, o: Value):
        first = b.eq(ids[2], b.index(0))
        when(b, first, lambda c: c.store(o, c.constant(0.0, o.ref.tile)))
        old = b.load(o)
        if between is not None:
            between(b, o, old)
        attrs = dict(contract=contract, batch=((), ()), dtype=F32, precision=None)
        b.store(o, b.add(old, b.op("dot", b.load(x), b.load(y), **attrs)))

    b = Builder()
    emit_pipeline(b, refs, windows, maps, (m // bm, n // bn, k // bk), body)
    return Kernel("product", tuple(refs), b.block(), 1, aliases)


def check(kernel: Kernel, dtype, transposed: bool = False) -> None:
    x, y = (numbers(n, v.ref.shape, dtype) for n, v in enumerate(kernel.inputs))
    want = (x.T if transposed else x).astype(np.float64) @ (y.T if transposed else y)
    close(run(kernel, x, y)[0], want, x.size // want.shape[0])


# --- packed once ---


def find_packed_once(kernel: Kernel) -> PackedOnce:
    return PackedOnce.of(pack_once(kernel))


def test_notes_name_the_input_and_its_boxes():
    kernel = pack_once(product((96, 160, 192), (48, 40, 96), BF16))
    (dot,) = [op for op in walk(kernel.body) if op.name == "dot"]
    boxes = ((0, (48, 96), (0, 1)), (1, (96, 40), (0, 1)))
    assert dot.attrs["cpu.packed_once"] == boxes
    assert "cpu.packed_once=((0, (48, 96), (0, 1)), (1, (96, 40), (0, 1)))" in (
        kernel.text
    )
    (again,) = [op for op in walk(parse_kernel(kernel.text).body) if op.name == "dot"]
    assert again.attrs["cpu.packed_once"] == boxes


def test_the_emitter_packs_once_what_is_noted_and_nothing_else():
    kernel = run_passes(product((96, 160, 192), (48, 40, 96), BF16), passes_for(host()))
    assert "@pack_box_1" in emit_kernel(kernel)

    def without_note(op: Op) -> Op:
        notes = op.attrs.keys() - {"cpu.packed_once"}
        regions = tuple(
            replace(r, ops=tuple(map(without_note, r.ops))) for r in op.regions
        )
        return op.with_(attrs={n: op.attrs[n] for n in notes}, regions=regions)

    body = replace(kernel.body, ops=tuple(map(without_note, kernel.body.ops)))
    assert "@pack_box" not in emit_kernel(kernel.with_(body=body))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["tiles or vectors", "vectors", "avx2", "f32"])
def test_blocks_seen_at_several_steps_are_packed_once(kind: str, transposed: bool):
    dtype = F32 if kind == "f32" else BF16
    host = {"vectors": VECTORS, "avx2": target.AVX2}.get(kind, target.host())
    with target.using(host):
        kernel = product((96, 160, 192), (48, 40, 96), dtype, transposed)
        packed = [each.cut.array for each in find_packed_once(kernel).boxes]
        all_stay = kind == "f32" and not transposed
        assert packed == ([] if all_stay else [*kernel.inputs])
        assert ("@pack_box_1" in llvm_of(kernel)) == (not all_stay)
        check(kernel, np.float32 if kind == "f32" else BF16_NP, transposed)


def test_threads_pack_together():
    # Enough work for helpers, who all want the one box of the right side first.
    kernel = product((256, 520, 512), (32, 520, 512))
    (columns,) = find_packed_once(kernel).boxes
    assert columns.cut.count == 1 and columns.parts.count > 8
    for _ in range(8):
        check(kernel, np.float32)


@pytest.mark.parametrize("transposed", [False, True])
def test_parts_of_a_box_meet_without_touching(transposed: bool):
    """Panels that are no multiple of the lanes, packed in parts by several threads."""
    kernel = product((600, 256, 520), (600, 32, 260), F16, transposed=transposed)
    rows = find_packed_once(kernel).boxes[0]
    assert rows.layout.is_rows and rows.layout.panel % 8 and rows.parts.count > 8
    for _ in range(4):
        check(kernel, np.float16, transposed)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_parts_cut_the_dimension_that_memory_does_not_run_along(dtype: DType):
    """Also where blocks of k differ in length, and the last ones have fewer parts."""
    kernel = product((128, 520, 2900), (32, 260, 2900), dtype)
    (columns,) = [b for b in find_packed_once(kernel).boxes if not b.layout.is_rows]
    parts = columns.parts
    assert parts.widths.count == 1 and parts.depths.count > 4
    assert parts.layout.depth.total % parts.layout.depth.block
    check(kernel, np.float32 if dtype == F32 else BF16_NP)
    transposed = product((128, 520, 2900), (32, 260, 2900), dtype, transposed=True)
    (columns,) = [b for b in find_packed_once(transposed).boxes if not b.layout.is_rows]
    assert columns.parts.depths.count == 1 and columns.parts.widths.count > 3
    check(transposed, np.float32 if dtype == F32 else BF16_NP, transposed=True)


@pytest.mark.parametrize("rows", [6, 13])
def test_one_panel_of_rows_reads_columns_where_they_are(rows: int):
    with target.using(VECTORS):
        # Pages apart, so that it would not be done for several panels.
        kernel = product((2 * rows, 1024, 640), (rows, 64, 640))
        packed = [each.cut.array for each in find_packed_once(kernel).boxes]
        assert packed == ([] if rows == 6 else [kernel.inputs[1]])
        check(kernel, np.float32)


def test_memory_for_packed_operands_is_used_again():
    small, large = (
        product((96, 96, 96), (48, 48, 48), transposed=True),
        product((256, 256, 512), (64,) * 3, transposed=True),
    )
    assert all(find_packed_once(kernel).boxes for kernel in (small, large))
    check(large, np.float32, transposed=True)
    kept = kept_memory.slot.value
    assert kept is not None
    for kernel in (small, large):
        check(kernel, np.float32, transposed=True)
        assert kept_memory.slot.value == kept


def test_flash_attention_packs_keys_and_reads_values_where_they_are():
    kernel = flash_attention()
    (keys,) = find_packed_once(kernel).boxes
    assert keys.cut.array is kernel.inputs[1]


@pytest.mark.parametrize(
    "kernel",
    [
        product((96, 160, 192), (96, 160, 192)),  # every block is seen once
        matmul(100, 100, 100, (48, 48, 48)),  # blocks hang over the edge
        product((8, 8, 8), (4, 4, 4)),  # too small for panels
        product((96, 96, 96), (48, 48, 48), aliases=((0, 0),)),
    ],
    ids=["once", "edges", "small", "aliased"],
)
def test_what_is_packed_where_it_is_used(kernel: Kernel):
    assert kernel.inputs[0] not in [b.cut.array for b in find_packed_once(kernel).boxes]


def test_blocks_that_the_body_changes_are_not_kept():
    x = Value(RefType((96, 96), F32, "any"), "x")
    o = Value(RefType((96, 96), F32, "any"), "o")
    windows = [Window((BlockDim(48), BlockDim(96)), "in"), blocked("out", 48, 48)]
    maps = [lambda b, i, j: (i, b.index(0)), lambda b, i, j: (i, j)]

    def body(b: Builder, ids: tuple[Value, ...], x: Value, o: Value):
        b.store(x, b.mul(b.load(x), b.constant(2.0, x.ref.tile)))
        attrs = dict(contract=((1,), (1,)), batch=((), ()), dtype=F32, precision=None)
        b.store(o, b.op("dot", b.load(x), b.load(x), **attrs))

    b = Builder()
    emit_pipeline(b, [x, o], windows, maps, (2, 2), body)
    kernel = Kernel("changing", (x, o), b.block(), 1)
    assert not find_packed_once(kernel).boxes


def sliced(start, view=lambda ref, span: ref[span]):
    """Sums of x @ y.T over slices of 32 rows of x and y, in a loop."""

    def kernel(x_ref, y_ref, o_ref):
        def step(j, total):
            x, y = (view(ref, pl.ds(start(j), 32)) for ref in (x_ref, y_ref))
            return total + jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())))

        o_ref[...] = jax.lax.fori_loop(0, 4, step, jnp.zeros((32, 32), jnp.float32))

    def call(x, y):
        whole = pl.BlockSpec((None, 160, 48), lambda i, n: (i, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((2, 3, 32, 32), jnp.float32),
            grid=(2, 3),
            in_specs=[whole, whole],
            out_specs=pl.BlockSpec((None, None, 32, 32), lambda i, n: (i, n, 0, 0)),
        )(x, y)

    x, y = (numbers(n, (2, 160, 48), np.float32) for n in (1, 2))
    starts = [min(max(int(start(j)), 0), 128) for j in range(4)]
    parts = [(x[:, s : s + 32], y[:, s : s + 32]) for s in starts]
    want = sum(np.einsum("iak,ibk->iab", a, b) for a, b in parts)
    np.testing.assert_allclose(
        call(x, y), np.repeat(want[:, None], 3, 1), rtol=1e-4, atol=1e-4
    )
    (traced,) = kernels_in(call, x, y)
    return [each.cut.sizes for each in find_packed_once(traced).boxes]


@pytest.mark.parametrize(
    "start",
    [
        lambda j: j * 32,
        lambda j: (j + 3) * 32 - 64,
        lambda j: j * 64 - 64,
        lambda j: pl.multiple_of((j * 32) ^ 32, 32),
    ],
    ids=["multiples", "too large", "negative", "promised"],
)
def test_slices_in_a_loop_are_packed_once(start):
    # Rows stay where they are; y is what columns are packed from.
    assert sliced(start) == [(1, 32, 48)]


def test_slices_of_a_part_of_a_block_are_packed_once():
    def second_half(ref, span):
        return ref.at[pl.ds(0, 160)][span]

    assert sliced(lambda j: j * 32, second_half) == [(1, 32, 48)]


@pytest.mark.parametrize("start", [lambda j: j * 16, lambda j: j * 31 + 1])
def test_slices_that_are_no_boxes_are_packed_where_they_are_used(start):
    assert sliced(start) == []


def gridded(body, outputs, x_block, *others):
    """A call over a grid of 2 x 3: rows of blocks of x, columns of the others."""
    across = [pl.BlockSpec(block, lambda i, j: (0, j)) for block in others]
    out = pl.BlockSpec((x_block[0], others[0][1]), lambda i, j: (i, j))
    return pl.pallas_call(
        body,
        out_shape=outputs,
        grid=(2, 3),
        in_specs=[pl.BlockSpec(x_block, lambda i, j: (i, 0)), *across],
        out_specs=[out] * len(outputs),
    )


def test_bytes_that_are_packed_differently_for_two_products():
    """Signed rows are shifted for signed columns, and not for unsigned ones."""
    host = target.Host(64, 32, frozenset({"avx512f", "avx512bw", "avx512vnni", "fma"}))
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-128, 128, s, np.int8) for s in ((64, 96), (96, 120)))
    z = rng.integers(0, 256, (96, 120), np.uint8)

    def body(x_ref, y_ref, z_ref, *outputs):
        x = x_ref[...]
        for ref, o_ref in zip((y_ref, z_ref), outputs, strict=True):
            o_ref[...] = jnp.dot(x, ref[...], preferred_element_type=jnp.int32)

    outputs = [jax.ShapeDtypeStruct((64, 120), jnp.int32)] * 2
    call = gridded(body, outputs, (32, 96), (96, 40), (96, 40))
    with target.using(host):
        (traced,) = kernels_in(call, x, y, z)
        arrays = [each.cut.array for each in find_packed_once(traced).boxes]
    assert arrays.count(traced.inputs[0]) == 2
    missing = host.features - target.host().features
    if missing:
        pytest.skip(f"packed as it should be; to run it this CPU lacks {missing}")
    with target.using(host):
        got = call(x, y, z)
    for each, columns in zip(got, (y, z), strict=True):
        np.testing.assert_array_equal(each, x.astype(int) @ columns.astype(int))


def test_blocks_of_an_array_without_elements():
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] @ y_ref[...]

    x, y = np.ones((64, 64), np.float32), np.ones((0, 192), np.float32)
    outputs = [jax.ShapeDtypeStruct((64, 192), jnp.float32)]
    call = gridded(body, outputs, (32, 64), (64, 64))
    (traced,) = kernels_in(call, x, y)
    assert traced.inputs[1] not in [b.cut.array for b in find_packed_once(traced).boxes]
    np.testing.assert_array_equal(call(x, y)[0], np.zeros((64, 192)))


# --- sums that start from nothing ---


def dots(kernel: Kernel) -> list[Op]:
    """The dots of a kernel's body as they are emitted."""
    fused = fuse_dot_sums(kernel)
    return [op for op in walk(fused.body) if op.name.startswith("dot")]


def test_zeros_are_not_stored_before_a_sum():
    kernel = product((64, 64, 64), (32, 32, 32))
    (dot,) = dots(kernel)
    assert not dot.attrs["addend"] and dot.attrs["overwrite"]
    check(kernel, np.float32)


def use_old(b: Builder, o: Value, old: Value) -> None:
    b.op("reduce", old, kind="sum", axes=(0, 1))


def use_ref(b: Builder, o: Value, old: Value) -> None:
    b.store(o, b.mul(b.load(o), b.constant(1.0, o.ref.tile)))


@pytest.mark.parametrize("between", [use_old, use_ref])
def test_zeros_that_somebody_sees_are_stored(between):
    kernel = product((64, 64, 64), (32, 32, 32), between=between)
    (dot,) = dots(kernel)
    assert not dot.attrs["overwrite"]
    check(kernel, np.float32)


@pytest.mark.parametrize("small", [False, True])
def test_an_operand_that_is_also_the_output_is_not_mistaken(small: bool):
    """The zeroing clears the first operand, too, which must be seen."""
    n = 8 if small else 64
    kernel = product((n, n, n), (n, n, n), aliases=((0, 0),))
    x, y = numbers(1, (n, n), np.float32), numbers(2, (n, n), np.float32)
    np.testing.assert_array_equal(run(kernel, x, y)[0], np.zeros((n, n)))
