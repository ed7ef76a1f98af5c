"""Which backend runs a call that names none: by the platform it is lowered for."""

import warnings
from functools import partial

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.backends import base
from pallasite.errors import (
    CompileError,
    FallbackWarning,
    SpecError,
    UnknownBackendError,
    UnsupportedError,
)
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments, assert_agrees

TRITON = "__gpu$xla.gpu.triton"
X = np.arange(16 * 128, dtype=np.float32).reshape(16, 128)


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def huge_kernel(x_ref, o_ref):
    """More elements in a block than a Triton tensor may have, and none apart."""
    o_ref[...] = jnp.sort(x_ref[...])


def double(x, **options):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double_kernel, out_shape=shape, **options)(x)


def huge(x, **options):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(huge_kernel, out_shape=shape, **options)(x)


HUGE = jax.ShapeDtypeStruct((1 << 21,), jnp.float32)


def lowered(function, *operands, platforms=("cuda",)):
    # A new function each time: jit keeps what a knob has decided for one.
    traced = jax.jit(lambda *xs: function(*xs)).trace(*operands)
    return traced.lower(lowering_platforms=platforms).as_text()


@pytest.fixture(autouse=True)
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


def test_triton_is_the_default_on_cuda():
    assert TRITON in lowered(double, X)


def product(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...])

    shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    return pl.pallas_call(kernel, out_shape=shape)(x, y)


def column_sums(x):
    """Each program adds a block to the same result."""

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    return pl.pallas_call(
        kernel,
        grid=4,
        in_specs=[pl.BlockSpec((1, 8, 128), lambda i: (i, 0, 0))],
        out_specs=pl.BlockSpec((1, 8, 128), lambda i: (0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((1, 8, 128), x.dtype),
    )(x)


def repeated_norm(x, times):
    """So many reductions of rows."""

    def kernel(x_ref, o_ref):
        rows = x_ref[...]
        for _ in range(times):
            rows = rows - rows.max(axis=-1, keepdims=True)
        o_ref[...] = rows

    spec = pl.BlockSpec((1, 128), lambda i: (i, 0))
    how = dict(grid=x.shape[0], in_specs=[spec], out_specs=spec)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, **how)(x)


@pytest.mark.parametrize(("times", "first"), [(5, "cuda"), (6, "triton")])
def test_rows_of_many_reductions_ask_triton_first(times, first):
    (kernel,) = pl.lower(partial(repeated_norm, times=times))(X).kernels
    assert base.defaults("cuda", kernel)[0] == first


def test_rows_in_parts_ask_as_whole_rows_do():
    def centred(x):
        def kernel(x_ref, o_ref):
            part = lambda j: (slice(None), pl.ds(j * 64, 64))
            add = lambda j, total: total + x_ref[part(j)].sum(-1, keepdims=True)
            total = jax.lax.fori_loop(0, 2, add, jnp.zeros((x.shape[0], 1)))
            o_ref[...] = x_ref[...] - total / x.shape[1]

        return pl.pallas_call(kernel, out_shape=x)(x)

    (kernel,) = pl.lower(centred)(jax.ShapeDtypeStruct((8, 128), jnp.float32)).kernels
    assert base.defaults("cuda", kernel) == ("cuda", "triton")


def test_rows_that_are_only_written_ask_triton_first():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(x_ref[...], o_ref.shape)

    def spread(x):
        row = pl.BlockSpec((8, 128), lambda i: (i, 0))
        out = jax.ShapeDtypeStruct((64, 128), jnp.float32)
        one = pl.BlockSpec(x.shape, lambda i: (0, 0))
        return pl.pallas_call(kernel, out, grid=8, in_specs=[one], out_specs=row)(x)

    numbers = [(1, 1), (8, 1)], ("triton", "cuda")
    rows = [(1, 128), (8, 128)], ("cuda", "triton")
    for shapes, order in (numbers, rows):
        for shape in shapes:
            (made,) = pl.lower(spread)(jnp.ones(shape)).kernels
            assert base.defaults("cuda", made) == order


def test_products_and_rows_ask_cuda_first_and_loops_triton():
    (rows,) = pl.lower(double)(X).kernels
    (odd,) = pl.lower(double)(jnp.ones((8, 127))).kernels
    (sums,) = pl.lower(column_sums)(jnp.ones((4, 8, 128))).kernels
    square = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    (products,) = pl.lower(product)(square, square).kernels
    assert base.defaults("cuda", rows) == ("cuda", "triton")
    assert base.defaults("cuda", sums) == ("triton", "cuda")
    assert base.defaults("cuda", odd) == ("triton", "cuda")  # rows start anywhere
    assert base.defaults("cuda", products) == ("cuda", "triton")
    assert base.defaults("rocm", products) == ("triton",)
    assert base.defaults("cpu", rows) == ("cpu",) and base.defaults("mps", rows) == ()


def test_what_is_compiled_for_a_chip_is_not_the_default_where_there_is_none():
    square = jnp.ones((64, 64), jnp.bfloat16)
    if jax.default_backend() == "cpu":
        assert TRITON in lowered(product, square, square)


def test_code_that_its_compiler_refuses_goes_to_the_next_backend(monkeypatch):
    """It is a bug of ours, which the author should hear of and not suffer from."""
    from pallasite.backends import cuda

    def refuse(self, compiled):
        raise CompileError("NVRTC rejected the code of a kernel", [("nvrtc", "line 1")])

    monkeypatch.setattr(cuda.CudaBackend, "launch", refuse)
    monkeypatch.setattr(cuda.CudaBackend, "exports", True)  # as if a GPU were here
    square = jnp.ones((64, 48), jnp.bfloat16)
    with pytest.warns(FallbackWarning) as caught:
        assert TRITON in lowered(lambda x: product(x, x.T), square)
    (warning,) = caught
    said = str(warning.message)
    assert "kernel 'kernel' runs on backend 'triton'" in said
    assert "NVRTC rejected the code of a kernel" in said and "report" in said


@pytest.mark.gpu
def test_products_take_cuda_on_a_machine_with_a_gpu():
    x = jnp.ones((128, 128), jnp.bfloat16)
    assert "xla.gpu.ptx" in jax.jit(product).lower(x, x).as_text()
    np.testing.assert_array_equal(np.asarray(product(x, x)), np.full((128, 128), 128))


@pytest.mark.gpu
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_zoo_by_default(case):
    args = arguments(case, 0)
    # Some cases multiply outside their kernels too, where XLA would take TF32.
    with jax.default_matmul_precision("highest"):
        want = jax.jit(case.reference)(*args)
        got = jax.jit(lambda *a: case.run(*a, interpret=False))(*args)
    assert_agrees(case, jax.tree.map(np.asarray, got), want)


def test_machine_code_is_the_default_on_cpu():
    text = lowered(double, X, platforms=("cpu",))
    assert "pallasite_cpu_" in text and TRITON not in text


def test_mosaic_is_the_default_on_tpu():
    """Also from a machine without one, and in what is exported there."""
    assert "@tpu_custom_call" in lowered(double, X, platforms=("tpu",))
    exported = jax.export.export(jax.jit(double), platforms=["tpu"])(X)
    assert "@tpu_custom_call" in exported.mlir_module()


def test_derivatives_and_vmap_take_the_default_too():
    def grams(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)

    out = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    loss = lambda x: pl.pallas_call(grams, out_shape=out)(x).sum()
    assert TRITON in lowered(jax.grad(loss), X)
    assert TRITON in lowered(jax.vmap(double), X[None])
    # A derivative that only maps elements is fused with what is around it.
    assert TRITON not in lowered(jax.grad(lambda x: double(x).sum()), X)


@pytest.mark.parametrize("way", [{"interpret": True}, {"backend": "interpret"}])
def test_the_emulation_when_asked_for(way):
    assert "custom_call" not in lowered(lambda x: double(x, **way), X)


def test_what_triton_cannot_run_is_emulated_and_says_why_once():
    with pytest.warns(FallbackWarning) as caught:
        text = lowered(huge, HUGE)
        lowered(lambda x: huge(x) + 1, HUGE)
    assert "custom_call" not in text
    (said,) = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert "kernel 'huge_kernel' falls back to the emulation" in said
    assert "backend 'triton' cannot run load on" in said
    assert "Triton's limit is 1048576" in said and "use smaller blocks" in said


def test_a_backend_named_in_the_call_does_not_fall_back():
    with pytest.raises(UnsupportedError, match="Triton's limit"):
        lowered(lambda x: huge(x, backend="triton"), HUGE)


def test_a_backend_named_in_the_call_must_run_there():
    with pytest.raises(UnsupportedError, match="'cpu' does not run on cuda"):
        lowered(lambda x: double(x, backend="cpu"), X)


def test_the_knob_forces_a_backend_where_it_runs():
    with config.override(backend="triton"):
        with pytest.raises(UnsupportedError, match="Triton's limit"):
            lowered(huge, HUGE)
        assert "pallasite_cpu_" in lowered(double, X, platforms=("cpu",))
    with config.override(backend="interpret"):
        assert "custom_call" not in lowered(double, X)
        assert "custom_call" not in lowered(double, X, platforms=("cpu",))
    with config.override(backend="tritno"), pytest.raises(UnknownBackendError):
        lowered(double, X)


def test_the_knob_reaches_calls_outside_jit():
    np.testing.assert_array_equal(double(X), 2 * X)
    with config.override(backend="tritno"), pytest.raises(UnknownBackendError):
        double(X)


UNCHECKED = [jax.export.DisabledSafetyCheck.custom_call(TRITON)]


def test_one_export_for_several_platforms():
    export = jax.export.export(
        jax.jit(double), platforms=["cpu", "cuda"], disabled_checks=UNCHECKED
    )
    exported = export(X)
    assert TRITON in exported.mlir_module()
    assert "pallasite_cpu_" not in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(X), 2 * X)


def test_a_refused_export_names_the_check_to_disable():
    """In an error that shows neither the kernel nor JAX's advice on custom calls."""
    with pytest.raises(SpecError) as refusal:
        jax.export.export(jax.jit(double), platforms=["cuda"])(X)
    assert "tt.func" not in str(refusal.value)
    check = f"disabled_checks=[jax.export.DisabledSafetyCheck.custom_call('{TRITON}')]"
    assert check in str(refusal.value)


def test_lower_says_the_choice():
    small, large = pl.lower(double)(X), pl.lower(huge)(HUGE)
    assert str(small.choice("cuda")) == "triton"
    assert small.choice("cpu").backend == "cpu"
    refused = large.choice("cuda")
    assert refused.backend == "interpret"
    assert [name for name, _ in refused.refusals] == ["triton"]
    assert "Triton's limit" in str(refused)
    with config.override(backend="interpret"):
        assert str(small.choice("cuda")) == "interpret"


@pytest.mark.gpu
def test_operands_decide_on_a_machine_with_a_gpu():
    on_cpu, on_gpu = (jax.device_put(X, jax.devices(p)[0]) for p in ("cpu", "gpu"))
    assert "pallasite_cpu_" in jax.jit(double).lower(on_cpu).as_text()
    assert "__gpu$xla.gpu." in jax.jit(double).lower(on_gpu).as_text()
    for x in (on_cpu, on_gpu):
        np.testing.assert_array_equal(double(x), 2 * X)
        assert double(x).devices() == x.devices()
