"""Every operation tells XLA what its kernels cost, and has a configuration to tune."""

import dataclasses
import functools
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import config, kernels
from pallasite.kernels import masks
from pallasite.primitive import call_p
from pallasite.tune import choices

from .test_operations import CASES, Case, case, normal

# One row per program, whatever it is: there are no blocks to choose.
WITHOUT_BLOCKS = {"update pages", "embedding bag", "embedding bag, weighted mean"}
# Nothing to compute, so that there is no kernel.
WITHOUT_KERNELS = {"matmul sum of nothing", "grouped matmul of no rows"}

ALL: dict[str, Case] = {
    **CASES,
    "attention": case(
        kernels.attention, *[normal(1, 9, 2, 8)] * 3, mask=masks.Causal()
    ),
    "decode attention": case(
        kernels.decode_attention,
        normal(1, 2, 8),
        *[normal(1, 9, 2, 8)] * 2,
        jnp.array([5]),
    ),
    "rms norm": case(kernels.rms_norm, normal(3, 8)),
    "layer norm": case(kernels.layer_norm, normal(3, 8)),
    "softmax": case(kernels.softmax, normal(3, 8)),
    "gated linear unit": case(kernels.gated_linear_unit, *[normal(3, 8)] * 2),
}


def calls(jaxpr):
    """The kernel calls of a jaxpr, also in what it calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is call_p:
            yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from calls(inner)


@pytest.mark.parametrize("name", ALL)
def test_every_kernel_has_a_cost_and_every_operation_a_configuration(name):
    operation, operands = ALL[name].operation, ALL[name].operands
    given = {k: v for k, v in operation.keywords.items() if k != "config"}
    with choices.recorded() as questions:
        traced = jax.make_jaxpr(functools.partial(operation.func, **given))(*operands)
    found = [eqn.params["call"] for eqn in calls(traced.jaxpr)]
    assert found or name in WITHOUT_KERNELS
    for call in found:
        assert call.cost_estimate is not None, call.kernel.name
        assert call.cost_estimate.bytes_accessed > 0
    assert questions or name in WITHOUT_BLOCKS


@pytest.mark.parametrize(
    "name, sizes", [("attention", {512}), ("grouped matmul", {256, 512})]
)
def test_blocks_are_larger_on_a_tpu(name, sizes):
    """Whatever the mask is: tables of tuned configurations know few of them."""
    operation, operands = ALL[name].operation, ALL[name].operands
    given = {k: v for k, v in operation.keywords.items() if k != "config"}
    with config.override(target="v5e"), choices.recorded() as questions:
        jax.make_jaxpr(functools.partial(operation.func, **given))(*operands)
    assert {*questions[0].default.values()} == sizes


def test_configurations_are_frozen_dataclasses():
    operations = [f for f in vars(kernels).values() if inspect.isfunction(f)]
    found = 0
    for operation in operations:
        hints = typing.get_type_hints(operation)
        if "config" not in hints:
            continue
        config, _ = typing.get_args(hints["config"])
        assert dataclasses.is_dataclass(config)
        assert config.__hash__ is not None, "frozen, so that it is a static argument"
        found += 1
    assert found >= 20


def default_of(operation, *shapes):
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with choices.recorded() as questions:
        jax.eval_shape(operation, *operands)
    return questions[0].default


def test_blocks_of_rows_are_others_on_a_cpu():
    def grouped(rows, groups):
        x, y = ((rows, 32), jnp.float32), ((groups, 32, 64), jnp.float32)
        sizes = ((groups,), jnp.int32)
        return default_of(kernels.grouped_matmul, x, y, sizes)["block_m"]

    def loss():
        x, weights = ((512, 32), jnp.float32), ((32, 512), jnp.float32)
        operation = kernels.linear_softmax_cross_entropy_loss
        return default_of(operation, x, ((512,), jnp.int32), weights)["block_tokens"]

    assert [grouped(1024, g) for g in (64, 8, 1)] == [8, 16, 128]
    assert loss() == 256
    with config.override(target="h200"):
        assert grouped(1024, 64) == loss() == 128


@pytest.mark.parametrize(
    "batch, keys, splits", [(4, 8192, 8), (16, 8192, 2), (64, 8192, 1), (1, 1024, 2)]
)
def test_few_sequences_are_divided_on_a_gpu(batch, keys, splits):
    """There are too few programs for all multiprocessors otherwise."""
    query, lengths = ((batch, 32, 64), jnp.bfloat16), ((batch,), jnp.int32)
    cache = ((batch, keys, 8, 64), jnp.bfloat16)
    pages = ((batch * keys // 128, 128, 8, 64), jnp.bfloat16)
    table = ((batch, keys // 128), jnp.int32)

    def defaults():
        plain = default_of(kernels.decode_attention, query, cache, cache, lengths)
        paged = default_of(kernels.paged_attention, query, pages, pages, lengths, table)
        return plain["splits"], paged["splits"]

    assert defaults() == (1, 1)
    with config.override(target="h200"):
        assert defaults() == (splits, splits)


@pytest.mark.parametrize(
    "tokens, sequences, blocks", [(64, 64, 1), (96, 64, 2), (512, 8, 16), (0, 1, 1)]
)
def test_a_block_of_ragged_attention_has_no_more_tokens_than_a_sequence(
    tokens, sequences, blocks
):
    pages = ((32, 16, 2, 64), jnp.bfloat16)
    lengths = ((sequences,), jnp.int32)

    def default():
        return default_of(
            kernels.ragged_paged_attention,
            ((tokens, 8, 64), jnp.bfloat16),
            *(pages, pages, lengths, ((sequences, 4), jnp.int32), lengths),
        )["block_q"]

    assert default() == blocks
    with config.override(target="v5e"):
        assert default() == 16


@pytest.mark.parametrize("extras", [(), ("bias",), ("bias", "residual")])
@pytest.mark.parametrize("gate", ["gate", None])
def test_a_finished_product_for_a_gpu_has_derivatives_of_both_modes(gate, extras):
    """There they are those of its sums; the second derivative is of a kernel."""
    shapes = {"x": (20, 48), "y": (48, 40)}
    sizes = {"gate": (48, 40), "bias": (40,), "residual": (20, 40)}
    shapes |= {n: sizes[n] for n in (gate, *extras) if n is not None}
    # Without a gate, products of float32 are the kernel's own.
    dtype = jnp.float32 if gate else jnp.float16
    keys = jax.random.split(jax.random.key(0), len(shapes))
    args = {
        n: 0.1 * jax.random.normal(k, s, dtype)
        for k, (n, s) in zip(keys, shapes.items(), strict=True)
    }

    def loss(implementation, args):
        out = kernels.matmul(
            **args,
            activation="swish",
            implementation=implementation,
            config=kernels.MatmulConfig(16, 32, 32),
        )
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    with config.override(target="h200"):
        ours, plain = (functools.partial(loss, each) for each in ("pallasite", "xla"))
        text = str(jax.make_jaxpr(jax.grad(ours))(args))
        assert text.count("pallasite_call") == 1 and "dot_general" in text
        for of in (
            jax.grad,
            lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
            lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1]),
        ):
            got, want = of(ours)(args), of(plain)(args)
            far = 1e-4 if gate else 4e-3
            near = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=far)
            jax.tree.map(near, got, want)


@pytest.mark.parametrize(
    "shape, rows", [((12, 4096), 6), ((13, 2048), 1), ((8191, 64), 120), ((0, 8), 1)]
)
def test_a_cpu_has_blocks_that_divide_wide_rows(shape, rows):
    with choices.recorded() as questions:
        jax.eval_shape(kernels.softmax, jax.ShapeDtypeStruct(shape, jnp.float32))
    assert questions[0].default == {"block_rows": rows}
