"""Kernel calls under sharded jit: right results, and no collective nobody needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallasite as pl
from benchmarks.partitioning import (
    attention,
    cases,
    collectives,
    matmul,
    mesh,
    normal,
    put,
    rms_norm,
    rms_norm_reference,
)
from pallasite import tpu as pltpu
from pallasite.errors import PartitionWarning, SpecError
from pallasite.passes.analysis.partition import derive
from pallasite.sites import kernels_in

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

X, Y = normal(0, 32, 64), normal(1, 64, 32)
ROWS = pl.BlockSpec((4, 16), lambda i: (i, 0))


def check(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def is_sharded(x, where, *spec):
    return x.sharding.is_equivalent_to(NamedSharding(where, P(*spec)), x.ndim)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_case_of_the_table(case):
    error, found, result = case.run()
    assert error < 1e-4
    assert found == case.collectives
    assert is_sharded(result, mesh(*case.shape), *case.result)


# --- program ids ---


def rows_call(kernel, x, **options):
    return pl.pallas_call(
        kernel,
        out_shape=x,
        grid=x.shape[0] // 4,
        in_specs=[ROWS],
        out_specs=ROWS,
        **options,
    )(x)


def count_up(x_ref, o_ref):
    i, n = pl.program_id(0), pl.num_programs(0)
    o_ref[...] = x_ref[...] + (i * 10 + n).astype(jnp.float32)


@pytest.mark.parametrize("interpret", [False, True])
def test_program_ids_are_those_of_the_whole_grid(interpret):
    x = normal(2, 32, 16)
    placed = put(x, mesh(8), "a")
    f = lambda x: rows_call(count_up, x, interpret=interpret)
    check(jax.jit(f)(placed), x + np.repeat(np.arange(8) * 10 + 8, 4)[:, None])
    assert collectives(f, placed) == {}


def test_replicated_operands_move_by_global_ids():
    def pick(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    x, y = normal(3, 32, 16), normal(4, 4, 16)
    picked = pl.BlockSpec((1, 16), lambda i: ((7 - i) // 2, 0))
    f = pl.pallas_call(
        pick, out_shape=x, grid=8, in_specs=[ROWS, picked], out_specs=ROWS
    )
    want = x + np.repeat(np.asarray(y)[(7 - np.arange(8)) // 2], 4, axis=0)
    check(jax.jit(f)(put(x, mesh(8), "a"), y), want)


def test_masks_along_a_summed_axis_see_global_ids():
    def total(x_ref, o_ref):
        k = pl.program_id(0)

        @pl.when(k == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        rows = k * 4 + jax.lax.broadcasted_iota(jnp.int32, (4, 16), 0)
        masked = jnp.where(rows < 21, x_ref[...], 0)
        o_ref[...] += masked.sum(axis=0, keepdims=True)

    x = normal(5, 32, 16)
    f = lambda x: pl.pallas_call(
        total,
        out_shape=jax.ShapeDtypeStruct((1, 16), x.dtype),
        grid=8,
        in_specs=[ROWS],
        out_specs=pl.BlockSpec((1, 16), lambda k: (0, 0)),
    )(x)
    placed = put(x, mesh(8), "a")
    check(jax.jit(f)(placed), np.asarray(x)[:21].sum(0, keepdims=True))
    assert collectives(f, placed) == {"all-reduce": 1}


# --- contexts ---


def test_eager_calls_are_cut_too():
    where = mesh(4, 2)
    got = matmul(put(X, where, "a"), put(Y, where, None, "b"))
    check(got, X @ Y)
    assert is_sharded(got, where, "a", "b")


def test_scan_and_remat():
    where = mesh(8)
    weights, x = normal(6, 3, 16, 16) / 4, normal(7, 64, 16)

    def network(x, weights):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(matmul(x, w)), None))
        return jax.lax.scan(layer, x, weights)[0]

    placed = put(x, where, "a")
    want = x
    for w in weights:
        want = np.tanh(want @ w)
    check(jax.jit(network)(placed, weights), want)
    assert collectives(network, placed, weights) == {}


def test_explicit_mesh_types_show_the_result():
    with jax.set_mesh(mesh(4, 2, kind=AxisType.Explicit)):
        x, y = jax.device_put(X, P("a", None)), jax.device_put(Y, P(None, "b"))
        got = jax.jit(matmul)(x, y)
        assert jax.typeof(got).sharding.spec == P("a", "b")
        check(got, X @ Y)
        assert collectives(matmul, x, y) == {}


def test_explicit_mesh_types_of_derivatives():
    """Tangents and cotangents are sharded like what they belong to."""
    loss = lambda f: lambda x, y: jnp.sum(jnp.sin(f(x, y)))
    want = jax.grad(loss(jnp.matmul), argnums=(0, 1))(X, Y)
    with jax.set_mesh(mesh(4, 2, kind=AxisType.Explicit)):
        x, y = jax.device_put(X, P("a", None)), jax.device_put(Y, P(None, "b"))
        gradient = jax.grad(loss(matmul), argnums=(0, 1))
        got = jax.jit(gradient)(x, y)
        assert [jax.typeof(g) for g in got] == [jax.typeof(x), jax.typeof(y)]
        assert collectives(gradient, x, y) == {"all-reduce": 2}
        value, tangent = jax.jvp(matmul, (x, y), (x, y))
        assert jax.typeof(value) == jax.typeof(tangent)
    check(got[0], want[0], 1e-4)
    check(got[1], want[1], 1e-4)


def test_partial_sums_of_a_backward_kernel_do_not_keep_rows_together():
    """Enough rows that the weights' gradient is summed in parts."""
    x, w = normal(19, 384, 16), normal(20, 1, 16)
    loss = lambda f: lambda x, w: jnp.sum(jnp.sin(f(x, w)))
    gradient = jax.grad(loss(rms_norm), argnums=(0, 1))
    placed = put(x, mesh(8), "a")
    want = jax.grad(loss(rms_norm_reference), argnums=(0, 1))(x, w)
    for got, wanted in zip(jax.jit(gradient)(placed, w), want, strict=True):
        check(got, wanted, 1e-4)
    assert collectives(gradient, placed, w) == {"all-reduce": 1}


def test_gradients_of_heads_that_share_keys_stay_where_the_heads_are():
    """Two heads of q share one of k and v, and a device has whole groups."""
    q, k, v = normal(22, 8, 16, 8), normal(23, 4, 16, 8), normal(24, 4, 16, 8)
    gradient = jax.grad(lambda *qkv: jnp.sum(attention(*qkv) ** 2), argnums=(0, 1, 2))
    placed = [put(x, mesh(4), "a") for x in (q, k, v)]
    for got, want in zip(jax.jit(gradient)(*placed), gradient(q, k, v), strict=True):
        check(got, want, 1e-5)
    assert collectives(gradient, *placed) == {}


@pytest.mark.filterwarnings("ignore::pallasite.errors.PartitionWarning")
@pytest.mark.parametrize("kernel", ["matmul", "count_up"])
def test_shard_map_over_a_part_of_the_mesh(kernel):
    """The rest of the mesh is cut where no device must know its number."""
    where = mesh(4, 2)
    if kernel == "matmul":
        mapped = jax.shard_map(
            matmul,
            mesh=where,
            in_specs=(P("a"), P()),
            out_specs=P("a"),
            axis_names={"a"},
        )
        operands = put(X, where, "a"), put(Y, where, None, "b")
        check(jax.jit(mapped)(*operands), X @ Y)
        assert collectives(mapped, *operands) == {}
    else:
        x = normal(8, 32, 16)
        mapped = jax.shard_map(
            lambda x: rows_call(count_up, x),
            mesh=where,
            in_specs=P("a"),
            out_specs=P("a"),
            axis_names={"a"},
        )
        want = x + np.tile(np.repeat(np.arange(2) * 10 + 2, 4), 4)[:, None]
        check(jax.jit(mapped)(put(x, where, ("a", "b"))), want)


def test_shard_map_forward_and_backward_add_no_collective():
    """jax#21855: a kernel with a derivative of its own, data and weights apart."""
    where = mesh(8)

    @jax.custom_vjp
    def layer(x, w):
        return matmul(x, w)

    layer.defvjp(
        lambda x, w: (matmul(x, w), (x, w)),
        lambda kept, g: (
            matmul(g, kept[1].T),
            jax.lax.psum(matmul(kept[0].T, g), "a"),
        ),
    )
    x, w = normal(9, 64, 16), normal(10, 16, 16)
    mapped = jax.shard_map(layer, mesh=where, in_specs=(P("a"), P()), out_specs=P("a"))
    loss = lambda x, w: jnp.sum(mapped(x, w) ** 2)
    operands = put(x, where, "a"), w
    found = jax.jit(jax.grad(loss))(*operands)
    check(found, jax.grad(lambda x, w: jnp.sum((x @ w) ** 2))(x, w), 1e-3)
    assert collectives(jax.grad(loss), *operands) == {}
    # Weights are the same everywhere, so their gradient, and only it, is a sum.
    assert collectives(jax.grad(loss, 1), *operands) == {"all-reduce": 1}
    want = jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), 1)(x, w)
    check(jax.jit(jax.grad(loss, 1))(*operands), want, 1e-3)


def has_derivative():
    try:
        jax.jvp(matmul, (X, Y), (X, Y))
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("mapped", [True, False], ids=["shard_map", "sharded jit"])
def test_derivative_of_a_kernel_is_cut_too(mapped):
    if not has_derivative():
        pytest.skip("kernel calls have no derivative yet")
    where = mesh(8)
    x, w = normal(9, 64, 16), normal(10, 16, 16)
    f = matmul
    if mapped:
        f = jax.shard_map(matmul, mesh=where, in_specs=(P("a"), P()), out_specs=P("a"))
    loss = lambda x, w: jnp.sum(f(x, w) ** 2)
    want = jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), (0, 1))(x, w)
    operands = put(x, where, "a"), w
    for got, expected in zip(jax.grad(loss, (0, 1))(*operands), want, strict=True):
        check(got, expected, 1e-3)
    assert collectives(jax.grad(loss), *operands) == {}
    assert collectives(jax.grad(loss, 1), *operands) == {"all-reduce": 1}


# --- what cannot be cut ---


def test_gathered_operands_are_named_once():
    x, scale = normal(11, 32, 48), normal(12, 1, 48)
    placed = put(x, mesh(8), None, "a")
    with pytest.warns(PartitionWarning) as caught:
        check(jax.jit(rms_norm)(placed, scale), rms_norm_reference(x, scale))
        jax.jit(lambda x, s: rms_norm(x, s))(placed, scale)
    (message,) = (str(w.message) for w in caught)
    assert "kernel 'rms_norm': sharded operands are gathered" in message
    assert (
        "x_ref  dimension 1 is split into 8 parts: every program gets all of it"
        in message
    )
    assert "partitioning.py" in message


def test_scans_stay_whole_and_say_why():
    def cumulative(x_ref, o_ref, carry_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            carry_ref[...] = jnp.zeros_like(carry_ref)

        total = carry_ref[...] + jnp.cumsum(x_ref[...], axis=0)
        o_ref[...] = total
        carry_ref[...] = total[-1:]

    x = normal(13, 32, 16)
    scratch = [pltpu.VMEM((1, 16), jnp.float32)]
    f = lambda x: rows_call(cumulative, x, scratch_shapes=scratch)
    with pytest.warns(PartitionWarning, match="carry_ref carries values along it"):
        got = jax.jit(f)(put(x, mesh(8), "a"))
    check(got, np.cumsum(x, axis=0), 1e-4)


def test_edge_blocks_keep_an_axis_whole():
    x = normal(14, 24, 16)  # blocks of 5 hang over the edge

    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    spec = pl.BlockSpec((5, 16), lambda i: (i, 0))
    f = pl.pallas_call(double, out_shape=x, grid=5, in_specs=[spec], out_specs=spec)
    with pytest.warns(PartitionWarning, match="does not follow a grid axis"):
        check(jax.jit(f)(put(x, mesh(8), "a")), 2 * x)


def test_more_devices_than_blocks():
    x = normal(15, 16, 16)  # four blocks for eight devices
    f = lambda x: rows_call(count_up, x)
    with pytest.warns(PartitionWarning, match="4 kept: grid axis 0 has 4 blocks"):
        got = jax.jit(f)(put(x, mesh(8), "a"))
    check(got, x + np.repeat(np.arange(4) * 10 + 4, 4)[:, None])


def test_nothing_is_wrapped_for_one_device():
    text = jax.jit(matmul).lower(X, Y).as_text()
    assert "pallasite_partition" not in text


# --- partition= ---


def test_partition_can_be_switched_off():
    where = mesh(8)
    f = lambda x, y: matmul(x, y, partition=False)
    operands = put(X, where, None, "a"), put(Y, where, "a")
    check(jax.jit(f)(*operands), X @ Y)
    assert collectives(f, *operands) == {"all-gather": 2}


def test_partition_rule_limits_the_cuts():
    where = mesh(4, 2)
    f = lambda x, y: matmul(x, y, partition="m *, * * -> m *")
    operands = put(X, where, "a", "b"), put(Y, where, "b")
    with pytest.warns(PartitionWarning, match="partition= keeps it whole"):
        got = jax.jit(f)(*operands)
    check(got, X @ Y)
    assert is_sharded(got, where, "a")


def whole_sum(x):
    """A sum over the first dimension that shows no grid: one program."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum(axis=0)

    def local(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
            partition=False,
        )(x)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        partition=pl.Partition("k n -> n", local, sums=("k",)),
    )(x)


def test_partition_with_a_function_of_its_own():
    where, x = mesh(4, 2), normal(16, 32, 16)
    placed = put(x, where, "a", "b")
    check(jax.jit(whole_sum)(placed), np.asarray(x).sum(0))
    assert collectives(whole_sum, placed) == {"all-reduce": 1}
    stack = normal(17, 8, 8, 16)
    batched = put(stack, mesh(8), "a")
    check(jax.jit(jax.vmap(whole_sum))(batched), np.asarray(stack).sum(1))
    assert collectives(jax.vmap(whole_sum), batched) == {}


SQUARE = normal(21, 32, 32)
ONE_DEVICE = lambda x, y: matmul(x, y, partition=False)


@pytest.mark.filterwarnings("ignore::pallasite.errors.PartitionWarning")
@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        ("m *, * * -> m *", {"all-gather": 1, "all-reduce": 1}),
        (
            pl.Partition("m k, k n -> m n", ONE_DEVICE, ("k",)),
            {"all-reduce": 2},
        ),
    ],
    ids=["names", "function"],
)
def test_partition_rules_of_derivatives(rule, kinds):
    """Square operands: nothing but the rule tells a derivative's arrays apart."""
    where = mesh(4, 2)
    operands = put(SQUARE, where, "a"), put(SQUARE, where, None, "b")
    f = lambda x, y: matmul(x, y, partition=rule)
    loss = lambda f: lambda x, y: jnp.sum(jnp.sin(f(x, y)))
    gradient = lambda f: jax.grad(loss(f), argnums=(0, 1))
    again = lambda f: lambda x, y: jax.jvp(gradient(f), (x, y), (x, y))[1]
    for order in (gradient, again, lambda f: lambda x, y: jax.jvp(f, (x, y), (x, y))):
        got, want = jax.jit(order(f))(*operands), order(jnp.matmul)(SQUARE, SQUARE)
        for mine, wanted in zip(got, want, strict=True):
            check(mine, wanted, 2e-3)
    assert collectives(gradient(f), *operands) == kinds


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("m k, k n", "needs one '->'"),
        ("m k -> m n", "a name or \\* per dimension of each operand"),
        ("m k, k n -> m", "a name or \\* per dimension of each result"),
        ("m k, n n -> m n", "'n' stands for grid axes 2 and 1"),
        (3, "must be None, False or a pl.Partition"),
        (pl.Partition("m k, k n -> m n", matmul, ("q",)), "sums= names 'q'"),
        (pl.Partition("m k, k n -> m n", matmul), "a result does not have 'k'"),
    ],
)
def test_wrong_partition_rules_are_refused(rule, message):
    with pytest.raises(SpecError, match=message):
        matmul(X, Y, partition=rule)


def test_a_rule_the_kernel_cannot_follow_is_refused_with_the_reason():
    with pytest.raises(SpecError, match="cannot be partitioned along 'j'") as caught:
        rows_call(count_up, normal(18, 32, 16), partition="i j -> i j")
    assert "every program gets all of it" in str(caught.value)


def test_the_rule_is_printed():
    (kernel,) = kernels_in(matmul, X, Y)
    assert str(derive(kernel)).splitlines() == [
        "x_ref[i0, i2], y_ref[i2, i1] -> o_ref[i0, i1]",
        "  axis 0  own    each step writes its own blocks",
        "  axis 1  own    each step writes its own blocks",
        "  axis 2  sum    o_ref is a sum over it",
    ]
