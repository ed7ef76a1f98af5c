"""Operations of `pallasite.kernels` beside the kernels that JAX ships for TPUs.

Each row is one problem, in both cases by the library's own function with what it takes
by default here, and with blocks of 512 there. A function of several calls, such as a
gradient, counts as their sum; what XLA puts around them does not count. See `tpu.py`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Shape

from benchmarks.tpu_library import (
    BF16,
    CASES,
    HEADS,
    I32,
    LENGTH,
    SCALE,
    WIDTH,
    Case,
    flash,
    gradient,
)

WINDOW = 512  # keys that a query of sliding attention sees


@dataclass(frozen=True)
class Operation:
    """One problem: a function of this package and one that JAX ships."""

    name: str
    ours: Callable[[], Case]
    rival: Callable[[], Case]


def attention(mask: str = "", backward: bool = False) -> Case:
    from pallasite import kernels
    from pallasite.kernels import masks

    kinds = {"": None, "causal": masks.Causal(), "window": masks.Window(WINDOW - 1, 0)}
    run = functools.partial(kernels.attention, mask=kinds[mask], scale=SCALE)
    shapes: Sequence[Shape] = (Shape((1, LENGTH, HEADS, WIDTH), BF16),) * 3
    return gradient(run) if backward else run, shapes


def splash(mask: str, backward: bool = False, counted: bool = False) -> Case:
    """`counted`: in a form whose branches libtpu's estimate counts, see below."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as library,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq")
    sizes: dict[str, Any] = {f"block_{name}": 512 for name in (*names, "kv_dq")}
    square = (LENGTH, LENGTH)
    kinds = {
        "causal": masks.CausalMask(square),
        "window": masks.LocalMask(square, (WINDOW - 1, 0), 0),
    }
    run = library.make_splash_mha(
        masks.MultiHeadMask([kinds[mask]] * HEADS),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=library.BlockSizes(**sizes),
    )
    shapes = (Shape((HEADS, LENGTH, WIDTH), BF16),) * 3
    function = gradient(run) if backward else run
    if counted:
        function = _with_known_tables(library, run, function)
    return function, shapes


def _with_known_tables(
    library: Any, run: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function of splash attention `run` with tables of blocks that are numbers.

    Whether a block has an allowed pair is read from scalar memory there, of which
    libtpu's estimate knows nothing: it counts such a branch as not taken, so that all
    but the copies of a forward kernel are left out. The same table as the bits of a
    number, shifted by the place in the grid, it follows.
    """
    infos = {False: run.fwd_mask_info, True: run.dkv_mask_info}
    known = library._next_nonzero

    def next_nonzero(h, i, j, data, block, mask, next_i=False):
        tables = infos[next_i]
        if data is None or tables is None or mask is not None:
            return known(h, i, j, data, block, mask, next_i)
        find = functools.partial(_found, i, j)
        return find(tables.data_next), None, find(tables.block_mask) > 0, True

    return _patched(library, "_next_nonzero", next_nonzero, function)


def _patched(
    library: Any, name: str, value: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that sees another `value` under a name of the library."""
    known = getattr(library, name)

    def run(*operands: Any) -> Any:
        setattr(library, name, value)
        jax.clear_caches()  # of its jitted functions, traced with the other
        try:
            return function(*operands)
        finally:
            setattr(library, name, known)
            jax.clear_caches()

    return run


def _found(i: Any, j: Any, table: Any) -> Any:
    """An element of a table of one head, from a number that holds all of them."""
    (rows,) = np.unique(np.asarray(table), axis=0)  # every head has the same
    bits = max(int(rows.max()).bit_length(), 1)
    if rows.size * bits > 32:
        raise ValueError(f"a table of {rows.shape} is too large for one number")
    places = range(0, rows.size * bits, bits)
    word = sum(int(n) << at for n, at in zip(rows.flat, places, strict=True))
    place = (i * rows.shape[1] + j) * bits
    shifted = jax.lax.shift_right_logical(
        jnp.int32(np.uint32(word).view(np.int32)), place
    )
    return shifted & (2**bits - 1)


def flash_gradient() -> Case:
    run, shapes = flash(causal=True)
    return gradient(run), shapes


def grouped(backward: bool) -> Case:
    from pallasite import kernels

    return _grouped(kernels.grouped_matmul, backward)


def megablox(backward: bool) -> Case:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    return _grouped(functools.partial(gmm, tiling=(512, 512, 512)), backward)


def _grouped(product: Callable[..., Any], backward: bool) -> Case:
    def both(x: Any, y: Any, sizes: Any) -> Any:
        total = lambda x, y: product(x, y, sizes).astype(jnp.float32).sum()
        return jax.grad(total, (0, 1))(x, y)

    shapes = Shape((4096, 2048), BF16), Shape((8, 2048, 2048), BF16), Shape((8,), I32)
    return both if backward else lambda *xs: product(*xs), shapes


def paged_attention() -> Case:
    from pallasite import kernels

    sequences, heads, pages, page = 8, 4, 128, 16
    pool = Shape((sequences * pages, page, heads, WIDTH), BF16)
    shapes = (
        Shape((sequences, 8 * heads, WIDTH), BF16),
        pool,
        pool,
        Shape((sequences,), I32),
        Shape((sequences, pages), I32),
    )
    return kernels.paged_attention, shapes


def paged_counted() -> Case:
    """JAX's kernel with lengths that are numbers: all sequences fill their pages.

    From lengths in scalar memory libtpu's estimate does not know how often the loop
    over pages goes round, and counts it once.
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import (
        paged_attention_kernel as library,
    )

    run, shapes = CASES["library: paged attention"]()
    _, pool, _, _, table = shapes
    length = table.shape[1] * pool.shape[2]
    name = "paged_flash_attention_kernel_inline_seq_dim"
    kernel = getattr(library, name)

    class Lengths:
        def __getitem__(self, sequence: Any) -> Any:
            return jnp.int32(length)

    @functools.wraps(kernel)
    def with_lengths(lengths_ref: Any, *others: Any, **options: Any) -> None:
        kernel(Lengths(), *others, **options)

    return _patched(library, name, with_lengths, run), shapes


def matmul() -> Case:
    from pallasite import kernels

    return kernels.matmul, (Shape((2048, 2048), BF16),) * 2


def operations() -> Iterator[Operation]:
    of = functools.partial
    yield Operation("operation: matmul", matmul, CASES["library: matmul"])
    yield Operation("operation: attention", attention, of(flash, causal=False))
    yield Operation(
        "operation: attention, causal", of(attention, "causal"), of(flash, causal=True)
    )
    yield Operation(
        "operation: attention, causal, with its gradient",
        of(attention, "causal", backward=True),
        flash_gradient,
    )
    for mask, backward in (
        ("causal", False),
        ("causal", True),
        ("window", False),
        ("window", True),
    ):
        yield Operation(
            f"operation: attention, {mask}{', with its gradient' * backward} (splash)",
            of(attention, mask, backward=backward),
            of(splash, mask, backward=backward),
        )
        yield Operation(
            f"operation: attention, {mask}{', with its gradient' * backward} "
            "(splash, counted)",
            of(attention, mask, backward=backward),
            of(splash, mask, backward=backward, counted=True),
        )
    for backward in (False, True):
        yield Operation(
            f"operation: grouped matmul{', with its gradient' * backward}",
            of(grouped, backward),
            of(megablox, backward),
        )
    yield Operation(
        "operation: paged attention", paged_attention, CASES["library: paged attention"]
    )
    yield Operation(
        "operation: paged attention (counted)", paged_attention, paged_counted
    )
