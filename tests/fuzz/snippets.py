"""Lines of ordinary kernel code: jnp on (4, 8) tiles, and accesses to refs.

Each snippet is one function: tiles to a tile, or refs, a tile and a row number to a
tile. `python_kernels.py` strings them together at random.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROWS, COLUMNS = 4, 8
Tile = Any


def _layer_norm(x: Tile) -> Tile:
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / jnp.sqrt(centred.var(axis=1, keepdims=True) + 0.1)


def _running_sum(x: Tile) -> Tile:
    def step(carry: Tile, row: Tile) -> tuple[Tile, Tile]:
        carry = carry * 0.5 + row
        return carry, carry

    return lax.scan(step, jnp.zeros(COLUMNS), x, reverse=True)[1]


def _halved(x: Tile) -> Tile:
    state = lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 0.5 + x), (jnp.int32(0), x)
    )
    return state[1]


def _by_sign(x: Tile) -> Tile:
    return lax.cond(x[0, 0] > 0.1, lambda v: v + 1, lambda v: jnp.flip(v, 1), x)


def _by_place(x: Tile) -> Tile:
    branches = [lambda v: v * 2, jnp.tanh, lambda v: v[::-1]]
    return lax.switch(jnp.argmax(x[:, 0]), branches, x)


ONE: dict[str, Callable[[Tile], Tile]] = {
    "affine": lambda x: x * 0.5 - 1,
    "softmax": lambda x: jax.nn.softmax(x, axis=1),
    "layer_norm": _layer_norm,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "relu": jax.nn.relu,
    "erf": lax.erf,
    "power": lambda x: jnp.abs(x) ** 1.5 * 0.1,
    "cumsum": lambda x: jnp.cumsum(x, axis=1) * 0.3,
    "sort": lambda x: jnp.sort(x, axis=0),
    "roll": lambda x: jnp.roll(x, 3, axis=1),
    "flip": jnp.flip,
    "gram": lambda x: x @ x.T @ x * 0.02,
    "einsum": lambda x: jnp.einsum("ij,kj->ki", x, x) @ x * 0.02,
    "reshape": lambda x: x.reshape(8, 4).T,
    "rows": lambda x: jnp.concatenate([x[2:], x[:2] * 2]),
    "take": lambda x: x[:, jnp.arange(COLUMNS)[::-1]],
    "set row": lambda x: x.at[1].set(0.5),
    "add columns": lambda x: x.at[:, 2:4].add(1.0),
    "scale diagonal": lambda x: x.at[jnp.arange(4), jnp.arange(4)].multiply(2.0),
    "mask": lambda x: jnp.where(jnp.arange(COLUMNS) < 5, x, 0.0),
    "tril": jnp.tril,
    "pad": lambda x: jnp.pad(x, 1)[2:, :COLUMNS],
    "clip": lambda x: jnp.clip(x, -1, 1),
    "bf16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "log_softmax": lambda x: x - jax.nn.logsumexp(x, axis=1, keepdims=True),
    "scan": _running_sum,
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, v: v * 0.5 + x / (i + 1), x),
    "while": _halved,
    "cond": _by_sign,
    "switch": _by_place,
    "inner jit": jax.jit(lambda x: jnp.sin(x) + 1),
    "inner vmap": jax.vmap(lambda row: row / (1 + jnp.abs(row).sum())),
    "inner grad": jax.grad(lambda x: jnp.sum(jnp.sin(x) ** 2)),
    "top_k": lambda x: jnp.concatenate([lax.top_k(x, 3)[0], x[:, 3:]], axis=1),
    "one hot": lambda x: x + jax.nn.one_hot(jnp.argmax(x, axis=1), COLUMNS),
    "max": lambda x: x - x.max(axis=0, keepdims=True),
    "update": lambda x: lax.dynamic_update_slice(x, x[:2, :3], (1, 4)),
    "integers": lambda x: (jnp.arange(COLUMNS) // 3 % 2).astype(jnp.float32) * x,
    "broadcast": lambda x: jnp.broadcast_to(x[:, :1], x.shape) + x,
}
TWO: dict[str, Callable[[Tile, Tile], Tile]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - 2 * y,
    "mul": lambda x, y: x * y * 0.5,
    "div": lambda x, y: x / (1 + jnp.abs(y)),
    "max": jnp.maximum,
    "where": lambda x, y: jnp.where(x[:, :1] > y[:, :1], x, y),
    "dot": lambda x, y: jnp.dot(x, y.T) @ x * 0.02,
    "atan2": jnp.arctan2,
    "stack": lambda x, y: jnp.stack([x, y]).sum(axis=0),
    "outer": lambda x, y: x[:, :1] * y[:1, :],
    "select": lambda x, y: lax.select(x > 0.05, x, y),
}

# --- refs: `s` is scratch or an output block, `v` a tile, `i` a row number ---


def _put(s: Any, v: Tile, i: Tile, api: Any) -> None:
    s[...] = v


def _add(s: Any, v: Tile, i: Tile, api: Any) -> None:
    s[...] += v


def _put_row(s: Any, v: Tile, i: Tile, api: Any) -> None:
    s[1, :] = v[0]


def _put_dynamic_row(s: Any, v: Tile, i: Tile, api: Any) -> None:
    s[i] = v[2] + 1


def _put_rows(s: Any, v: Tile, i: Tile, api: Any) -> None:
    s[api.ds(i, 2), :] = v[:2]


def _put_strided(s: Any, v: Tile, i: Tile, api: Any) -> None:
    s[::2, 1:5] = v[:2, :4]


def _put_columns(s: Any, v: Tile, i: Tile, api: Any) -> None:
    s[:, jnp.array([5, 0, 2])] = v[:, :3]


def _put_masked(s: Any, v: Tile, i: Tile, api: Any) -> None:
    api.store(s, (slice(None), slice(None)), v, mask=jnp.arange(COLUMNS) < i + 2)


def _add_atomically(s: Any, v: Tile, i: Tile, api: Any) -> None:
    api.atomic_add(s, (i, slice(None)), v[3])


def _put_in_a_loop(s: Any, v: Tile, i: Tile, api: Any) -> None:
    def step(k: Tile, _: Tile) -> Tile:
        s[k] = s[k] * 0.5 + v[k]
        return _

    lax.fori_loop(0, jnp.minimum(i, ROWS - 1) + 1, step, 0)


PUT = (
    _put,
    _add,
    _put_row,
    _put_dynamic_row,
    _put_rows,
    _put_strided,
    _put_columns,
    _put_masked,
    _add_atomically,
    _put_in_a_loop,
)
GET: tuple[Callable[[Any, Tile, Any], Tile], ...] = (
    lambda s, i, api: s[...],
    lambda s, i, api: s[:, :] * 2,
    lambda s, i, api: jnp.broadcast_to(s[2, :], (ROWS, COLUMNS)),
    lambda s, i, api: s[...] + s[i][None, :],
    lambda s, i, api: jnp.concatenate([s[api.ds(i, 2)], s[2:]]),
    lambda s, i, api: s[:, ::2].sum(axis=1, keepdims=True) + s[...],
    lambda s, i, api: s[jnp.array([3, 0, 0, 2])],
    lambda s, i, api: s[jnp.array([0, 1, 2, 3]), i][:, None] * s[...],
    lambda s, i, api: api.load(
        s, (slice(None), slice(None)), mask=jnp.arange(COLUMNS) > i, other=-1.0
    ),
    lambda s, i, api: jnp.full((ROWS, COLUMNS), s[i, 3]),
)
