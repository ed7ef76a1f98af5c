"""dot in a grid: operands packed before it, sums that start from nothing."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from pallasite import target
from pallasite.backends.cpu import spare
from pallasite.backends.cpu.dot_ahead import find_ahead
from pallasite.backends.cpu.dot_fusion import fuse_addends
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, BlockDim, Kernel, Op, Value, Window, walk
from pallasite.ir.types import BF16, F32, DType, RefType
from tests.backends.cpu.running import llvm_of, run
from tests.backends.cpu.test_dot import close, numbers
from tests.ir.kernels import blocked, emit_pipeline, flash_attention, matmul, when

BF16_NP = ml_dtypes.bfloat16
VECTORS = target.Host(64, 32, frozenset({"avx512f", "fma"}))


def product(
    sizes: tuple[int, int, int],
    block: tuple[int, int, int],
    dtype: DType = F32,
    turned: bool = False,
    aliases: tuple[tuple[int, int], ...] = (),
    between: Callable[[Builder, Value, Value], None] | None = None,
) -> Kernel:
    """x @ y over a grid; `turned`: x and y are stored transposed.

    `between` writes ops after the zeroing, given the output and what it held.
    """
    (m, n, k), (bm, bn, bk) = sizes, block
    shapes = [(k, m), (n, k)] if turned else [(m, k), (k, n)]
    blocks = [(bk, bm), (bn, bk)] if turned else [(bm, bk), (bk, bn)]
    refs = [Value(RefType(s, dtype, "any"), "in") for s in shapes]
    refs.append(Value(RefType((m, n), F32, "any"), "o"))
    windows = [*(blocked("in", *s) for s in blocks), blocked("out", bm, bn)]
    maps = [lambda b, i, j, k: (i, k), lambda b, i, j, k: (k, j)]
    if turned:
        maps = [lambda b, i, j, k: (k, i), lambda b, i, j, k: (j, k)]
    maps.append(lambda b, i, j, k: (i, j))
    contract = ((0,), (1,)) if turned else ((1,), (0,))

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


def check(kernel: Kernel, dtype, turned: bool = False) -> None:
    x, y = (numbers(n, v.ref.shape, dtype) for n, v in enumerate(kernel.inputs))
    want = (x.T if turned else x).astype(np.float64) @ (y.T if turned else y)
    close(run(kernel, x, y)[0], want, x.size // want.shape[0])


# --- packed ahead ---


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["tiles or vectors", "vectors", "avx2", "f32"])
def test_blocks_seen_at_several_steps_are_packed_ahead(kind: str, turned: bool):
    dtype = F32 if kind == "f32" else BF16
    host = {"vectors": VECTORS, "avx2": target.AVX2}.get(kind, target.host())
    with target.using(host):
        kernel = product((96, 160, 192), (48, 40, 96), dtype, turned)
        assert "@prepare" in llvm_of(kernel)
        check(kernel, np.float32 if kind == "f32" else BF16_NP, turned)


def test_threads_pack_together():
    # Enough work for helpers, and more parts than threads.
    kernel = product((256, 256, 512), (64, 64, 64))
    assert find_ahead(kernel).parts > 16
    for _ in range(8):
        check(kernel, np.float32)


def test_memory_for_packed_operands_is_used_again():
    small, large = (
        product((96, 96, 96), (48, 48, 48)),
        product((256, 256, 512), (64,) * 3),
    )
    check(large, np.float32)
    kept = spare.slot.value
    assert kept is not None
    for kernel in (small, large):
        check(kernel, np.float32)
        assert spare.slot.value == kept


def test_flash_attention_packs_keys_and_values():
    found = find_ahead(flash_attention())
    assert [each.window for each in found.windows] == [1, 2]


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
    packed = [each.array for each in find_ahead(kernel).windows]
    assert 0 not in packed


def test_blocks_that_the_body_changes_are_not_packed_ahead():
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
    assert not find_ahead(kernel).windows


# --- sums that start from nothing ---


def dots(kernel: Kernel) -> list[Op]:
    """The dots of a kernel's body as they are emitted, with no ref known to alias."""
    (pipeline,) = [op for op in kernel.body.ops if op.name == "pipeline"]
    roots = {v: v for v in pipeline.regions[-1].params}
    fused: Block = fuse_addends(pipeline.regions[-1], roots.get)
    return [op for op in walk(fused) if op.name == "dot"]


def test_zeros_are_not_stored_before_a_sum():
    kernel = product((64, 64, 64), (32, 32, 32))
    (dot,) = dots(kernel)
    assert dot.attrs["in_place"] and "fresh_if" in dot.attrs
    check(kernel, np.float32)


def use_old(b: Builder, o: Value, old: Value) -> None:
    b.op("reduce", old, kind="sum", axes=(0, 1))


def use_ref(b: Builder, o: Value, old: Value) -> None:
    b.store(o, b.mul(b.load(o), b.constant(1.0, o.ref.tile)))


@pytest.mark.parametrize("between", [use_old, use_ref])
def test_zeros_that_somebody_sees_are_stored(between):
    kernel = product((64, 64, 64), (32, 32, 32), between=between)
    (dot,) = dots(kernel)
    assert "fresh_if" not in dot.attrs
    check(kernel, np.float32)


@pytest.mark.parametrize("small", [False, True])
def test_an_operand_that_is_also_the_output_is_not_mistaken(small: bool):
    """The zeroing clears the first operand, too, which must be seen."""
    n = 8 if small else 64
    kernel = product((n, n, n), (n, n, n), aliases=((0, 0),))
    x, y = numbers(1, (n, n), np.float32), numbers(2, (n, n), np.float32)
    np.testing.assert_array_equal(run(kernel, x, y)[0], np.zeros((n, n)))
