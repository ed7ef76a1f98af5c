"""Operations over several devices against the same on one device.

Each device's part has the same size whatever their number, so that kernels are compiled
once. Results and cotangents come from one compilation per case.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallasite import config, kernels
from pallasite.kernels import masks
from tests.xla import put

from .agreement import _close as close

BY_COPIES = kernels.CollectiveMatmulConfig(kernels.MatmulConfig(8, 8, 32), "remote")
BLOCKS = kernels.CollectiveMatmulConfig(kernels.MatmulConfig(16, 16, 16))


def normal(*shape, dtype="float32", seed=0):
    return put(np.random.default_rng(seed).normal(size=shape), dtype)


def integers(low, high, *shape):
    return put(np.random.default_rng(0).integers(low, high, shape), "int32")


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod([*axes.values()]))]
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=devices)


def on_devices(operation: Callable, size: int, specs: Any, out: Any, **options):
    """`operation` on the parts of whole arrays that `size` devices have."""
    each = functools.partial(operation, axis="x", **options)
    return jax.shard_map(each, mesh=mesh_of(x=size), in_specs=specs, out_specs=out)


def with_cotangents(function: Callable, wanted: bool = True) -> Callable:
    """The results of a function and, if wanted, the cotangents of all its operands."""

    def both(*operands):
        out, pull = jax.vjp(function, *operands)
        weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return out, pull(weights.astype(out.dtype))

    return jax.jit(both if wanted else function)


# --- products ---

ROWS, COLUMNS = P("x"), P(None, "x")


def products(size, dtype="float32", rows=5):
    """Each operation with whole operands, of which devices have parts."""
    gathers = functools.partial(
        on_devices, kernels.all_gather_matmul, size, (ROWS, COLUMNS), COLUMNS
    )
    scatters = functools.partial(
        on_devices, kernels.matmul_reduce_scatter, size, (COLUMNS, ROWS), ROWS
    )
    x, y = normal(size * rows, 37, dtype=dtype), normal(37, size * 3, dtype=dtype)
    yield gathers, (x, y)
    x, y = normal(size * rows, size * 5, dtype=dtype), normal(size * 5, 11, dtype=dtype)
    yield scatters, (x, y)


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, "float32"), (4, "bfloat16"), (8, "float32")]
)
def test_products_and_their_gradients(size, dtype):
    for operation, operands in products(size, dtype):
        both = functools.partial(with_cotangents, wanted=dtype == "float32")
        close(both(operation(config=BLOCKS))(*operands), both(jnp.dot)(*operands))
        want = operands[0].astype(jnp.float32) @ operands[1].astype(jnp.float32)
        for name in ("xla", "reference") if size == 4 else ():
            plain = jax.jit(operation(implementation=name))(*operands)
            close(plain, want.astype(dtype))


@pytest.mark.parametrize(("size", "rows"), [(2, 5), (4, 10)])
def test_products_by_copies_between_devices(size, rows):
    for operation, operands in products(size, rows=rows):
        with config.override(interpret="checked"):
            got = jax.jit(operation(config=BY_COPIES))(*operands)
        close(got, jnp.dot(*operands))


def test_products_of_batches_with_operands_in_common():
    """Batch dimensions; an operand that all devices of another axis share."""
    mesh = mesh_of(data=2, x=2)
    x, y = normal(2, 4, 6, 7), normal(7, 10)
    specs = (P("data", None, "x"), P(None, "x")), P("data", None, None, "x")
    each = functools.partial(kernels.all_gather_matmul, axis="x", config=BLOCKS)
    whole = jax.shard_map(each, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
    close(with_cotangents(whole)(x, y), with_cotangents(jnp.matmul)(x, y))


# --- attention ---

LENGTH = 10  # of a device's part
TILES = kernels.AttentionConfig(16, 16)
IDS = jnp.array([[0] * 15 + [1] * 9 + [2] * 56, [0] * 42 + [3] * 38], jnp.int32)
MASKS = {
    "everything, one device": (1, "contiguous", "bfloat16", lambda ids: None),
    "window": (4, "contiguous", "float32", lambda ids: masks.Window(13, 2)),
    "zigzag": (
        8,
        "zigzag",
        "float32",
        lambda ids: (
            masks.Causal()
            & masks.Segments(ids, ids)
            & masks.Prefix(jnp.array([71, 0], jnp.int32))
        ),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_and_its_gradient(name):
    size, order, dtype, mask = MASKS[name]
    length = size * LENGTH
    shapes = (2, length, 4, 8), (2, length, 2, 8), (2, length, 2, 6)
    operands = [normal(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes)]
    ids = IDS[:, :length]
    places = np.arange(length)
    if order == "zigzag":
        places = kernels.zigzag_order(length, size)

    def over_ring(implementation="pallasite"):
        def each(query, key, value, ids, **how):
            how |= {"implementation": implementation, "config": TILES}
            return kernels.ring_attention(query, key, value, mask(ids), **how)

        ring = on_devices(each, size, COLUMNS, COLUMNS, order=order)

        def whole(*operands):
            in_order = [x[:, places] for x in (*operands, ids)]
            return ring(*in_order)[:, np.argsort(places)]

        return whole

    def reference(*operands):
        how: Any = {"mask": mask(ids), "implementation": "reference"}
        return kernels.attention(*operands, **how)

    both = functools.partial(with_cotangents, wanted=size == 8)
    want = both(reference)(*operands)
    close(both(over_ring())(*operands), want)
    if size == 8:
        close(jax.jit(over_ring("xla"))(*operands), want[0])


# --- experts ---


@pytest.mark.parametrize(
    ("size", "dtype", "chosen"),
    [
        (1, "bfloat16", lambda tokens: integers(0, 3, tokens, 2)),
        (4, "float32", lambda tokens: jnp.full((tokens, 2), 7)),  # all to one
        (8, "float32", lambda tokens: integers(-2, 24, tokens, 2)),
    ],
)
def test_experts_on_devices_and_their_gradient(size, dtype, chosen):
    tokens, experts = 6 * size, 3 * size
    shapes = (tokens, 12), (tokens, 2), (experts, 12, 9), (experts, 12, 9)
    made = [normal(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes)]
    operands = [*made, normal(experts, 9, 12, dtype=dtype, seed=9)]
    config = kernels.MatmulConfig(16, 16, 16)

    def mixture(operation, **how):
        def each(x, weights, chosen, *layers, **also):
            routing = kernels.Routing(weights, chosen)
            return operation(x, routing, *layers, **how, **also)

        return each

    def given(whole):
        all_chosen = chosen(tokens)
        function = lambda x, w, *rest: whole(x, w, all_chosen, *rest)
        return with_cotangents(function, wanted=size == 8)

    over = lambda **how: on_devices(
        mixture(kernels.expert_parallel_mixture, **how), size, ROWS, ROWS
    )
    alone = mixture(kernels.mixture_of_experts, implementation="reference")
    want = given(alone)(*operands)
    close(given(over(config=config))(*operands), want)
    if size == 4:
        # With room for few rows, some are left out: the same ones by either way.
        few = [
            given(over(capacity=5, **how))(*operands)
            for how in ({"config": config}, {"implementation": "reference"})
        ]
        close(*few)
        assert not np.allclose(few[0], want)


def ring(x, mask):
    x = x[None, :, :, None]
    return kernels.ring_attention(x, x, x, mask, axis="x")


UNKNOWN = kernels.CollectiveMatmulConfig(transport="telepathy")  # pyright: ignore
REFUSALS = [
    (
        lambda x: kernels.all_gather_matmul(x, x, axis="x", config=UNKNOWN),
        "all_gather_matmul has no transport 'telepathy'",
    ),
    (
        lambda x: kernels.all_gather_matmul(x, x, axis="y"),
        "there is no mesh axis 'y' here\n  axes  'x'",
    ),
    (
        lambda x: kernels.matmul_reduce_scatter(x[:, :, None], x[:1], axis="x"),
        "dimension 1 of x cannot be divided into 2 equal parts",
    ),
    (
        lambda x: kernels.ring_attention(x, x, x, axis="x"),
        "query has 2 dimensions",
    ),
    (
        lambda x: ring(x, masks.Causal() & masks.Blocks(np.ones((9, 9), bool))),
        "a table of pairs cannot be shifted\n  mask  Causal&Blocks",
    ),
]


@pytest.mark.parametrize(("each", "message"), REFUSALS)
def test_refusals(each, message):
    mapped = jax.shard_map(each, mesh=mesh_of(x=2), in_specs=ROWS, out_specs=ROWS)
    with pytest.raises(ValueError) as error:
        mapped(normal(6, 3))
    assert message in str(error.value)


def test_outside_of_shard_map_there_is_no_axis():
    with pytest.raises(ValueError, match="there is no mesh axis 'x' here"):
        kernels.all_gather_matmul(normal(3, 3), normal(3, 3), axis="x")
