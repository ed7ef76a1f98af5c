"""A kernel call under every transformation and context JAX has."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallasite as pl
from pallasite.backends.cpu.llvm import scalars
from pallasite.errors import FallbackWarning, UnsupportedError

ROWS = pl.BlockSpec((8, 128), lambda i: (i, 0))


def kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...] + pl.program_id(0).astype(jnp.float32)


def double(x):
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // 8,),
        in_specs=[ROWS],
        out_specs=ROWS,
        interpret=True,
    )(x)


def expected(x):
    return 2 * x + np.repeat(np.arange(x.shape[0] // 8), 8)[:, None]


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(0).standard_normal((64, 128)), jnp.float32)


def check(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_eager_and_jit(x):
    check(double(x), expected(x))
    check(jax.jit(double)(x), expected(x))


def test_repeated_calls_share_one_trace_and_one_compilation(x):
    from pallasite.primitive import _jitted

    call = pl.pallas_call(
        kernel, out_shape=x, grid=8, in_specs=[ROWS], out_specs=ROWS, interpret=True
    )
    call(x)
    before = _jitted.cache_info().misses
    call(x)
    double(x)
    assert _jitted.cache_info().misses - before <= 1


@pytest.mark.parametrize("in_axes", [0, 1, 2])
def test_vmap_over_any_axis(x, in_axes):
    stacked = jnp.stack([x, x + 1, x + 2])
    moved = jnp.moveaxis(stacked, 0, in_axes)
    got = jax.jit(jax.vmap(double, in_axes))(moved)
    check(got, np.stack([expected(v) for v in stacked]))


def test_nested_vmap(x):
    stacked = jnp.stack([x, x + 1, x + 2, x + 3]).reshape(2, 2, 64, 128)
    got = jax.vmap(jax.vmap(double))(stacked)
    want = np.stack([expected(v) for v in stacked.reshape(4, 64, 128)])
    check(got.reshape(4, 64, 128), want)


def test_vmap_leaves_unbatched_operands_unbatched(x):
    def add(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    def call(a, b):
        return pl.pallas_call(
            add,
            out_shape=a,
            grid=8,
            in_specs=[ROWS, ROWS],
            out_specs=ROWS,
            interpret=True,
        )(a, b)

    stacked = jnp.stack([x, 2 * x])
    jaxpr = jax.make_jaxpr(jax.vmap(call, (0, None)))(stacked, x)
    (eqn,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "pallasite_call"]
    assert [v.aval.shape for v in eqn.invars] == [(2, 64, 128), (64, 128)]
    check(jax.vmap(call, (0, None))(stacked, x), stacked + x)


@pytest.mark.parametrize("interpret", [True, False])
def test_vmap_gives_each_element_its_own_copy_of_an_operand_that_is_written(interpret):
    def kernel(x_ref, y_ref, o_ref):
        x_ref[...] += y_ref[...]
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((4,), jnp.float32), interpret=interpret
    )
    x, y = jnp.arange(4.0), jnp.arange(12.0).reshape(3, 4)
    got = jax.vmap(call, in_axes=(None, 0))(x, y)
    np.testing.assert_array_equal(got, x + y)


def test_vmap_over_a_grid_size_runs_one_call_after_another(x):
    def count(o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += pl.num_programs(0)

    def call(n):
        out = jax.ShapeDtypeStruct((8,), jnp.int32)
        return pl.pallas_call(count, out_shape=out, grid=(n,))()

    got = jax.jit(jax.vmap(call))(jnp.array([1, 3]))
    np.testing.assert_array_equal(got[:, 0], [1, 9])


def test_scan_cond_remat_and_eval_shape(x):
    twice, _ = jax.lax.scan(lambda c, _: (double(c), None), x, None, length=2)
    check(twice, expected(expected(x)))
    check(jax.jit(lambda p: jax.lax.cond(p, double, lambda v: v, x))(True), expected(x))
    check(jax.checkpoint(double)(x), expected(x))
    assert jax.eval_shape(double, x).shape == x.shape


def test_no_tracers_leak(x):
    with jax.checking_leaks():
        check(jax.jit(double)(x), expected(x))


def test_internal_checks_of_jax_pass(x):
    with jax.enable_checks(True):
        check(jax.jit(jax.vmap(double))(x[None])[0], expected(x))


def test_dynamic_grid(x):
    def call(n, v):
        return pl.pallas_call(
            kernel,
            out_shape=v,
            grid=(n,),
            in_specs=[ROWS],
            out_specs=ROWS,
            interpret=True,
        )(v)

    got = jax.jit(call)(5, x)
    check(got[:40], expected(x)[:40])


def test_dynamic_grid_shows_in_num_programs():
    def count(o_ref):
        o_ref[0] = pl.num_programs(0)

    def call(n):
        return pl.pallas_call(
            count,
            out_shape=jax.ShapeDtypeStruct((1,), jnp.int32),
            grid=(n,),
            interpret=True,
        )()

    assert jax.jit(call)(7)[0] == 7


def test_captured_values_become_operands(x):
    row, number, table = jnp.arange(128.0), jnp.float32(3), np.ones(128, np.float32)

    def call(v):
        def add(x_ref, o_ref):
            o_ref[...] = x_ref[...] + row + number + table

        return pl.pallas_call(
            add, out_shape=v, grid=8, in_specs=[ROWS], out_specs=ROWS, interpret=True
        )(v)

    want = x + row + 4
    check(call(x), want)
    check(jax.jit(call)(x), want)
    check(jax.vmap(call)(x[None])[0], want)


def test_export_round_trip(x):
    exported = jax.export.export(jax.jit(double))(x)
    again = jax.export.deserialize(exported.serialize())
    check(again.call(x), expected(x))


def test_lowering_is_deterministic(x):
    texts = {jax.jit(lambda v: double(v)).lower(x).as_text() for _ in range(2)}
    assert len(texts) == 1


# --- meshes ---


def mesh(kind):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


@pytest.mark.parametrize("jit", [True, False])
def test_shard_map_with_default_checks(x, jit):
    mapped = jax.shard_map(
        double, mesh=mesh(AxisType.Auto), in_specs=P("d"), out_specs=P("d")
    )
    got = (jax.jit(mapped) if jit else mapped)(x)
    check(got, 2 * x)


def test_axis_index_of_an_enclosing_shard_map(x):
    def which(v):
        def add(x_ref, o_ref):
            o_ref[...] = x_ref[...] + jax.lax.axis_index("d").astype(jnp.float32)

        return pl.pallas_call(add, out_shape=v, interpret=True)(v)

    mapped = jax.shard_map(
        which, mesh=mesh(AxisType.Auto), in_specs=P("d"), out_specs=P("d")
    )
    check(jax.jit(mapped)(x), x + np.repeat(np.arange(8), 8)[:, None])


@pytest.mark.parametrize("spec", [P(), P("d")])
def test_explicit_mesh(x, spec):
    with jax.set_mesh(mesh(AxisType.Explicit)) as explicit:
        placed = jax.device_put(
            x, NamedSharding(explicit or mesh(AxisType.Explicit), spec)
        )
        check(jax.jit(double)(placed), expected(x))


def test_explicit_mesh_inside_shard_map(x):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        mapped = jax.shard_map(double, in_specs=P("d"), out_specs=P("d"))
        check(jax.jit(mapped)(jax.device_put(x, P("d"))), 2 * x)


def test_sharded_operands_of_plain_jit(x):
    placed = jax.device_put(x, NamedSharding(mesh(AxisType.Auto), P("d")))
    check(jax.jit(double)(placed), expected(x))


# --- prints and checks ---


def test_debug_print_prints_once_per_program(x, capfd):
    def talk(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.debug_print("program {} of {}", pl.program_id(0), pl.num_programs(0))

    call = pl.pallas_call(
        talk, out_shape=x, grid=8, in_specs=[ROWS], out_specs=ROWS, interpret=True
    )
    jax.block_until_ready(jax.jit(call)(x))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"program {i} of 8" for i in range(8)]


def test_debug_check_fails_the_call_with_its_message(x):
    def picky(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.debug_check(x_ref[0, 0] > 1e9, "too small")

    call = pl.pallas_call(picky, out_shape=x, interpret=True)
    with pytest.raises(Exception, match="too small"):
        jax.block_until_ready(jax.jit(call)(x))
        jax.effects_barrier()


# --- the default backend ---

on_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="the default elsewhere is the emulation"
)


@on_cpu
def test_machine_code_is_the_default_on_cpu(x):
    call = pl.pallas_call(kernel, out_shape=x, grid=8, in_specs=[ROWS], out_specs=ROWS)
    assert "pallasite_cpu_" in jax.jit(call).lower(x).as_text()
    check(call(x), expected(x))
    check(jax.jit(call)(x), expected(x))


@pytest.fixture
def no_four_bits(monkeypatch):
    """Machine code has every element type; here one is missing."""
    monkeypatch.delitem(scalars.SPELLINGS, "f4e2m1fn")


def in_four_bits(x_ref, o_ref):
    o_ref[...] = (0 * x_ref[...]).astype(jnp.float4_e2m1fn).astype(x_ref.dtype)


@on_cpu
def test_fallback_names_the_kernel_and_the_reason_once(x, no_four_bits):
    call = pl.pallas_call(in_four_bits, out_shape=x)
    with pytest.warns(FallbackWarning) as caught:
        check(jax.jit(call)(x), 0 * x)
        check(jax.jit(lambda v: call(v))(x), 0 * x)
    (message,) = (str(w.message) for w in caught)
    assert "kernel 'in_four_bits' falls back to the emulation" in message
    assert "backend 'cpu' does not support element type f4e2m1fn" in message
    assert "cast(" in message
    assert "test_transforms.py" in message


def test_asking_for_the_backend_does_not_fall_back(x, no_four_bits):
    call = pl.pallas_call(in_four_bits, out_shape=x, backend="cpu")
    with pytest.raises(
        UnsupportedError, match="does not support element type f4e2m1fn"
    ):
        jax.jit(call)(x)


def test_export_is_portable(x):
    """Machine code belongs to this process, so exports hold the emulation."""
    call = pl.pallas_call(kernel, out_shape=x, grid=8, in_specs=[ROWS], out_specs=ROWS)
    exported = jax.export.export(jax.jit(call), platforms=("cpu", "tpu"))(x)
    assert "pallasite_cpu_" not in exported.mlir_module()
    assert exported.mlir_module().count("custom_call @tpu_custom_call") == 1
    check(exported.call(x), expected(x))


def test_lowering_for_several_platforms_chooses_per_platform(x):
    call = pl.pallas_call(kernel, out_shape=x, grid=8, in_specs=[ROWS], out_specs=ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        traced = jax.jit(call).trace(x)
        text = traced.lower(lowering_platforms=("cpu", "cuda", "tpu")).as_text()
    assert text.count("custom_call @pallasite_cpu_") == 1
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 1
    assert text.count("custom_call @tpu_custom_call") == 1
    assert "stablehlo.case" in text
