"""A kernel under vmap (one more grid axis) and shard_map (one part per device)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallasite as pl


def rms_norm_kernel(x_ref: Any, scale_ref: Any, o_ref: Any):
    x = x_ref[...]
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    o_ref[...] = x * jax.lax.rsqrt(mean_square + 1e-6) * scale_ref[...]


def rms_norm(x: jax.Array, scale: jax.Array):
    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        rms_norm_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(x.shape[0], 8),
        in_specs=[rows, pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))],
        out_specs=rows,
        interpret=True,
    )(x, scale)


def reference(x: jax.Array, scale: jax.Array):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def main():
    x = jax.random.normal(jax.random.key(0), (4, 24, 96))
    scale = jnp.linspace(0.5, 1.5, 96)[None]
    want = reference(x, scale)
    mapped = jax.jit(jax.vmap(rms_norm, in_axes=(0, None)))(x, scale)
    np.testing.assert_allclose(mapped, want, rtol=1e-5, atol=1e-5)

    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("rows",), axis_types=(AxisType.Auto,))
    rows = jnp.concatenate([x[0]] * devices)
    sharded = jax.shard_map(
        rms_norm, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows")
    )
    got = jax.jit(sharded)(rows, scale)
    np.testing.assert_allclose(got, reference(rows, scale), rtol=1e-5, atol=1e-5)
    print(f"rms_norm under vmap and on {devices} device(s): agrees")


if __name__ == "__main__":
    main()
