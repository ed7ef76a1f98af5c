"""Matmuls of matrices split across devices: `all_gather_matmul` and
`matmul_reduce_scatter`, each the backward pass of the other.

Blocks travel around the ring of devices while those that have arrived are multiplied.
Both operations and their gradients are built from three matmuls, `_gathered`,
`_scattered` and `_outer`; `remote_matmul.py` has the first two as kernels that copy
between devices themselves.
"""

import dataclasses
import functools
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax

from pallasite.kernels import common, remote_matmul
from pallasite.kernels.devices import Ring, Transport, by_remote_copies, check_divides
from pallasite.kernels.matmul import MatmulConfig, matmul


@dataclasses.dataclass(frozen=True)
class CollectiveMatmulConfig:
    """How each device multiplies, and how rows travel between devices.

    Attributes:
        blocks: block sizes of a matmul; by default those `matmul` or the kernels with
            remote copies would choose.
        transport: "remote": copies between devices inside the kernel (TPUs only).
            "collective": XLA collectives. "auto": "remote" on a TPU.
    """

    blocks: MatmulConfig | None = None
    transport: Transport = "auto"


def all_gather_matmul(
    x: jax.Array,
    y: jax.Array,
    *,
    axis: str,
    out_dtype: Any = None,
    implementation: common.Implementation = "pallasite",
    config: CollectiveMatmulConfig | None = None,
) -> jax.Array:
    """`all_gather(x) @ y` in `shard_map`, multiplying rows while others travel.

    Args:
        x: (..., rows, k), floating point: this device's rows of the whole x.
        y: (k, n), usually this device's columns of the whole y.
        axis: the mesh axis along which the rows of x are split.
        out_dtype: the result's dtype; by default x's.

    Returns:
        (..., devices * rows, n): all rows of x times this device's y.
    """
    k, n = common.check_rank("all_gather_matmul", "y", y, "k, n")
    config = config or CollectiveMatmulConfig()
    *batch, rows, _ = _check("all_gather_matmul", x, y, config)
    ring = Ring.of("all_gather_matmul", axis)
    compute = common.choose(implementation, _ring_gathered, _plain_gathered)
    out = compute(
        x.reshape(math.prod(x.shape[:-1]), k),
        y,
        ring=ring,
        out_dtype=common.result_dtype(out_dtype, x),
        config=config,
    )
    # From (devices, batch * rows, n), make the devices' rows adjacent.
    out = out.reshape(ring.size, math.prod(batch), rows, n)
    return out.swapaxes(0, 1).reshape(*batch, ring.size * rows, n)


def matmul_reduce_scatter(
    x: jax.Array,
    y: jax.Array,
    *,
    axis: str,
    out_dtype: Any = None,
    implementation: common.Implementation = "pallasite",
    config: CollectiveMatmulConfig | None = None,
) -> jax.Array:
    """This device's rows of the sum of `x @ y` over devices, in `shard_map`.

    Rows are multiplied while the sums of other rows travel in float32.

    Args:
        x: (..., devices * rows, k), floating point, usually this device's columns of
            the whole x.
        y: (k, n), usually this device's rows of the whole y.
        axis: the mesh axis over which products are summed and along which the rows of
            the result are split.
        out_dtype: the result's dtype; by default x's.

    Returns:
        (..., rows, n).
    """
    operation = "matmul_reduce_scatter"
    k, n = common.check_rank(operation, "y", y, "k, n")
    config = config or CollectiveMatmulConfig()
    *batch, all_rows, _ = _check(operation, x, y, config)
    ring = Ring.of(operation, axis)
    check_divides(operation, "x", x, x.ndim - 2, ring.size, f"devices along {axis!r}")
    rows = all_rows // ring.size
    by_device = x.reshape(math.prod(batch), ring.size, rows, k).swapaxes(0, 1)
    compute = common.choose(implementation, _ring_scattered, _plain_scattered)
    out = compute(
        by_device.reshape(ring.size, math.prod(batch) * rows, k),
        y,
        ring=ring,
        out_dtype=common.result_dtype(out_dtype, x),
        config=config,
    )
    return out.reshape(*batch, rows, n)


def _check(operation: str, x, y, config: CollectiveMatmulConfig) -> tuple[int, ...]:
    """Checks the operands and returns the shape of x."""
    known = get_args(Transport)
    common.check_option(operation, "transport", config.transport, known)
    common.check_floats(operation, x=x, y=y)
    if x.ndim < 2:
        common.check_rank(operation, "x", x, "rows, k")
    common.check_shape(operation, "x", x, (*x.shape[:-1], y.shape[0]))
    return x.shape


# --- plain ---


def _plain_gathered(x, y, *, ring, out_dtype, config):
    del config  # only kernels have blocks
    everyone = lax.all_gather(x, ring.axis)
    wide = common.statistics_dtype(x.dtype)
    return jnp.dot(everyone, y, preferred_element_type=wide).astype(out_dtype)


def _plain_scattered(x, y, *, ring, out_dtype, config):
    del config  # only kernels have blocks
    wide = common.statistics_dtype(x.dtype)
    partial = jnp.dot(x, y, preferred_element_type=wide)
    return lax.psum_scatter(partial, ring.axis).astype(out_dtype)


# --- rings, with their backward ---


@dataclasses.dataclass(frozen=True)
class _How:
    """What determines the code of a matmul besides its operands."""

    ring: Ring
    out_dtype: Any
    config: CollectiveMatmulConfig

    def with_dtype(self, dtype: Any) -> "_How":
        return dataclasses.replace(self, out_dtype=jnp.dtype(dtype))


def _ring_gathered(x, y, *, ring, out_dtype, config):
    return _gathered(*ring.varying(x, y), _How(ring, out_dtype, config))


def _ring_scattered(x, y, *, ring, out_dtype, config):
    return _scattered(*ring.varying(x, y), _How(ring, out_dtype, config))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gathered(x, y, how: _How):
    """Every device's x (rows, k) times y (k, n): (devices, rows, n)."""
    ring = how.ring
    if _remote(how, x, y):
        return remote_matmul.gathered(x, y, ring, how.out_dtype, how.config.blocks)
    out = jnp.zeros((ring.size, x.shape[0], y.shape[1]), how.out_dtype)

    def step(number, carry):
        x, out = carry
        arriving = ring.pass_on(x)  # while this block is multiplied
        return arriving, _placed(out, x, number)

    def _placed(out, x, number):
        product = _product(x, y, how.out_dtype, how)
        return lax.dynamic_update_index_in_dim(out, product, ring.source(number), 0)

    out, x = ring.varying(out, x)
    x, out = lax.fori_loop(0, ring.size - 1, step, (x, out))
    return _placed(out, x, ring.size - 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _scattered(x, y, how: _How):
    """Sum over devices of `x[this device] @ y`: (devices, rows, k) to (rows, n)."""
    ring = how.ring
    if _remote(how, x, y):
        return remote_matmul.scattered(x, y, ring, how.out_dtype, how.config.blocks)
    wide = common.statistics_dtype(x.dtype)

    def partial(number):
        # The sum now on this device belongs to the device where it ends up.
        block = lax.dynamic_index_in_dim(x, ring.source(number), 0, keepdims=False)
        return _product(block, y, wide, how)

    def step(number, total):
        # The product does not depend on what arrives.
        return ring.pass_on(total) + partial(number + 1)

    (first,) = ring.varying(partial(1))
    total = lax.fori_loop(1, ring.size, step, first)
    return total.astype(how.out_dtype)


def _outer(x, y, how: _How):
    """The sum over devices of their `x.T @ y[device]`, computed while x travels.

    Takes (rows, k) and (devices, rows, n), returns (k, n).
    """
    ring = how.ring
    wide = common.statistics_dtype(x.dtype)

    def partial(x, number):
        block = lax.dynamic_index_in_dim(y, ring.source(number), 0, keepdims=False)
        return _product(x.T, block, wide, how)

    def step(number, carry):
        x, total = carry
        return ring.pass_on(x), total + partial(x, number)

    total = jnp.zeros((x.shape[1], y.shape[2]), wide)
    x, total = ring.varying(x, total)
    x, total = lax.fori_loop(0, ring.size - 1, step, (x, total))
    return (total + partial(x, ring.size - 1)).astype(how.out_dtype)


def _product(x, y, out_dtype, how: _How):
    return matmul(x, y, out_dtype=out_dtype, config=how.config.blocks)


def _remote(how: _How, x, y) -> bool:
    """Whether a kernel with its own remote copies computes the matmul."""
    has_work = how.ring.size > 1 and x.size > 0 and y.size > 0
    return has_work and by_remote_copies(how.config.transport)


def _gathered_fwd(x, y, how):
    return _gathered(x, y, how), (x, y)


def _gathered_bwd(how, kept, cotangent):
    x, y = kept
    d_x = _scattered(cotangent.astype(x.dtype), y.T, how.with_dtype(x.dtype))
    return d_x, _outer(x, cotangent.astype(x.dtype), how.with_dtype(y.dtype))


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _scattered_fwd(x, y, how):
    return _scattered(x, y, how), (x, y)


def _scattered_bwd(how, kept, cotangent):
    x, y = kept
    d_x = _gathered(cotangent.astype(x.dtype), y.T, how.with_dtype(x.dtype))
    return d_x, _outer(cotangent.astype(x.dtype), x, how.with_dtype(y.dtype)).T


_scattered.defvjp(_scattered_fwd, _scattered_bwd)
