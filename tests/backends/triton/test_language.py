"""What authors say in the words of `pallasite.triton`: precision, atomics, and more."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite import triton as plt
from pallasite.errors import FallbackWarning, KernelTypeError, UnsupportedError
from pallasite.passes.run import run as run_passes
from pallasite.sites import kernels_in
from tests.backends.triton import simulate
from tests.backends.triton.harness import compiled, simulated


def only_kernel(call, *operands):
    (kernel,) = kernels_in(call, *operands)
    return run_passes(kernel)


def shape(sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def whole(kernel, *outs, **options):
    return pl.pallas_call(kernel, out_shape=[shape(*out) for out in outs], **options)


# --- precision of products ---

PRESETS = jax.lax.DotAlgorithmPreset
BFLOAT = jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32)

# What is said -> operand type, mode, number of products
PRECISIONS = {
    None: ("f32", "ieee", 1),
    "highest": ("f32", "ieee", 1),
    "high": ("f32", "tf32x3", 1),
    jax.lax.Precision.HIGHEST: ("f32", "ieee", 1),
    (jax.lax.Precision.HIGH, jax.lax.Precision.DEFAULT): ("f32", "tf32x3", 1),
    PRESETS.DEFAULT: ("f32", "ieee", 1),
    PRESETS.F32_F32_F32: ("f32", "ieee", 1),
    PRESETS.TF32_TF32_F32: ("f32", "tf32", 1),
    PRESETS.TF32_TF32_F32_X3: ("f32", "tf32x3", 1),
    PRESETS.BF16_BF16_F32: ("bf16", None, 1),
    PRESETS.BF16_BF16_BF16: ("bf16", None, 1),
    PRESETS.F16_F16_F32: ("f16", None, 1),
    PRESETS.F16_F16_F16: ("f16", None, 1),
    PRESETS.BF16_BF16_F32_X3: ("bf16", None, 3),
    PRESETS.BF16_BF16_F32_X6: ("bf16", None, 6),
    PRESETS.BF16_BF16_F32_X9: ("bf16", None, 9),
    PRESETS.F64_F64_F64: ("f64", None, 1),
    "TF32_TF32_F32": ("f32", "tf32", 1),
    BFLOAT: ("bf16", None, 1),
}
X, Y = (
    np.random.default_rng(s).normal(size=(32, 32)).astype(np.float32) for s in (0, 1)
)


def product(precision):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jax.lax.dot(x_ref[...], y_ref[...], precision=precision)

    return whole(kernel, ((32, 32),))


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision(precision):
    elem, mode, count = PRECISIONS[precision]
    kernel = only_kernel(product(precision), X, Y)
    text, _ = compiled(kernel)
    dots = [line for line in text.splitlines() if "tt.dot" in line]
    assert len(dots) == count
    assert all(f"tensor<32x32x{elem}> *" in line for line in dots)
    modes = [f"inputPrecision = {mode} :" in line for line in dots]
    assert all(modes) if mode else "inputPrecision" not in text
    exact = X.astype(np.float64) @ Y
    allowed = {1: 2e-1 if elem in ("bf16", "f16") else 1e-5, 3: 1e-3}.get(count, 1e-5)
    np.testing.assert_allclose(simulated(kernel, [X, Y])[0], exact, atol=allowed)


def test_pieces_of_numbers_that_are_not_finite():
    x = X.copy()
    x[0, 0], x[1, 0] = np.inf, np.nan
    kernel = only_kernel(product(PRESETS.BF16_BF16_F32_X3), x, np.abs(Y))
    (got,) = simulated(kernel, [x, np.abs(Y)])
    assert np.all(np.isposinf(got[0])) and np.all(np.isnan(got[1]))
    assert np.all(np.isfinite(got[2:]))


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ({}, "ieee"),
        ({"allow_tf32": True}, "tf32"),
        ({"allow_tf32": False}, "ieee"),
        ({"precision": "high"}, "tf32x3"),
    ],
    ids=str,
)
def test_dot_of_upstreams_triton(said, mode):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = plt.dot(x_ref[...], y_ref[...], trans_b=True, **said)

    call = whole(kernel, ((32, 32),))
    text, _ = compiled(only_kernel(call, X, Y))
    assert f"inputPrecision = {mode} :" in text
    np.testing.assert_allclose(jax.jit(call)(X, Y)[0], X @ Y.T, rtol=1e-4, atol=1e-4)


def test_tf32_of_other_types_says_nothing():
    def kernel(x_ref, o_ref):
        o_ref[...] = plt.dot(x_ref[...], x_ref[...], allow_tf32=True)

    text, _ = compiled(only_kernel(whole(kernel, ((32, 32),)), X.astype(jnp.bfloat16)))
    assert "inputPrecision" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision_on_the_gpu(precision):
    if precision is PRESETS.F64_F64_F64:
        pytest.skip("needs 64-bit types in JAX")
    (got,) = jax.jit(product(precision))(X, Y)
    np.testing.assert_allclose(got, X @ Y, atol=2e-1)


# --- atomics ---

ATOMICS = {
    **{("add", d): 1 for d in ("float16", "bfloat16", "float32", "float64")},
    **{(k, d): 1 for k in ("max", "min") for d in ("float32", "float64")},
    **{
        (k, d): 1
        for k in ("add", "max", "min", "and", "or", "xor", "xchg")
        for d in ("int32", "uint32", "int64", "uint64")
    },
    **{("xchg", d): 1 for d in ("float32", "float64")},
}
NARROW = [
    *((k, d) for k in ("max", "min", "xchg") for d in ("float16", "bfloat16")),
    *((k, "float8_e5m2") for k in ("add", "max", "min", "xchg")),
    *(
        (k, d)
        for k in ("add", "max", "min", "and", "or", "xor", "xchg")
        for d in ("int8", "uint8", "int16", "uint16")
    ),
]
MEANING = {
    "add": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "xchg": lambda old, new: new,
}


def numbers(seed, dtype):
    x = np.random.default_rng(seed).integers(-9, 10, (8, 16))
    if np.dtype(dtype).kind == "u":
        x = np.where(x < 0, 2**31 - x, x)
    return x.astype(dtype)


@pytest.fixture
def wide_types():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("scalar", [False, True], ids=["tile", "scalar"])
@pytest.mark.parametrize(("kind", "name"), [*ATOMICS, *NARROW], ids=str)
def test_atomic(kind, name, scalar, wide_types):
    atomic = getattr(plt, f"atomic_{kind}")

    def kernel(x_ref, _, o_ref, old_ref):
        if scalar:
            old_ref[0, 0] = atomic(o_ref, (2, 3), x_ref[2, 3])
        else:
            old_ref[...] = atomic(o_ref, (slice(None), slice(None)), x_ref[...])

    dtype = jnp.dtype(name)
    call = whole(
        kernel, ((8, 16), dtype), ((8, 16), dtype), input_output_aliases={1: 0}
    )
    x, start = numbers(0, dtype), numbers(1, dtype)
    kernel = only_kernel(call, x, start)
    text, _ = compiled(kernel)
    assert ("atomic_cas" in text) == ((kind, name) in NARROW)
    got, old = simulated(kernel, [x, start.copy()])
    want = MEANING[kind](start, x).astype(dtype)
    if scalar:
        want, changed = start.copy(), want
        want[2, 3] = changed[2, 3]
        assert old[0, 0] == start[2, 3]
    else:
        np.testing.assert_array_equal(old, start)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["max", "min"])
def test_atomic_order_of_signs_zeros_and_nan(kind):
    atomic = getattr(plt, f"atomic_{kind}")

    def kernel(x_ref, _, o_ref):
        atomic(o_ref, (slice(None),), x_ref[...])

    call = whole(kernel, ((64,),), input_output_aliases={1: 0})
    some = np.array([-np.inf, -2.5, -0.0, 0.0, 1e-30, 3.0, np.inf, np.nan], np.float32)
    x, start = np.repeat(some, 8), np.tile(some, 8)
    start = np.where(np.isnan(start), 0.5, start).astype(np.float32)
    (got,) = simulated(only_kernel(call, x, start), [x, start.copy()])
    np.testing.assert_array_equal(got, MEANING[kind](start, x))


EVERY_WIDTH = ["int8", "uint8", "int16", "bfloat16", "int32", "float32", "int64"]


@pytest.mark.parametrize("name", EVERY_WIDTH)
def test_atomic_cas(name, wide_types):
    def kernel(_, o_ref, old_ref):
        old_ref[...] = plt.atomic_cas(
            o_ref, jnp.full((16,), 3, o_ref.dtype), jnp.full((16,), 7, o_ref.dtype)
        )

    dtype = jnp.dtype(name)
    call = whole(kernel, ((16,), dtype), ((16,), dtype), input_output_aliases={0: 0})
    start = np.arange(16).astype(dtype)
    kernel = only_kernel(call, start)
    text, _ = compiled(kernel)
    assert "tt.atomic_cas acq_rel" in text
    got, old = simulated(kernel, [start.copy()])
    np.testing.assert_array_equal(old, start)
    np.testing.assert_array_equal(got, np.where(start == 3, 7, start))


@pytest.mark.parametrize("name", EVERY_WIDTH)
def test_atomic_cas_where_lanes_have_no_element(name, wide_types):
    """Padding, and blocks that extend past the array's edge: nothing is touched."""

    def kernel(_, o_ref, old_ref):
        same = jnp.full((5,), 3, o_ref.dtype)
        old_ref[...] = plt.atomic_cas(o_ref, same, jnp.full((5,), 7, o_ref.dtype))

    dtype = jnp.dtype(name)
    block = pl.BlockSpec((5,), lambda i: (i,))
    call = pl.pallas_call(
        kernel,
        out_shape=[shape((18,), dtype)] * 2,
        grid=(4,),
        in_specs=[block],
        out_specs=[block, block],
        input_output_aliases={0: 0},
    )
    start = (np.arange(18) % 5).astype(dtype)
    got, old = simulated(only_kernel(call, start), [start.copy()])
    np.testing.assert_array_equal(old, start)
    np.testing.assert_array_equal(got, np.where(start == 3, 7, start))


@pytest.mark.parametrize("name", ["int8", "uint16", "bfloat16"])
def test_atomics_of_lanes_that_meet_or_are_out_of_range(name):
    """Many lanes change one word; indices outside change nothing."""

    def kernel(i_ref, x_ref, _, o_ref):
        i = i_ref[...]
        plt.atomic_max(o_ref, (i,), x_ref[...], mask=i < 9)

    dtype = jnp.dtype(name)
    i = np.array([0, 1, 0, 1, 5, 5, -3, 8, 9, 77, 4, 4], np.int32)
    x = np.arange(12).astype(dtype)[::-1].copy()
    start = np.full(10, 3, dtype)
    call = whole(kernel, ((10,), dtype), input_output_aliases={2: 0})
    (got,) = simulated(only_kernel(call, i, x, start), [i, x, start.copy()])
    want = start.astype(np.int32)
    for where, value in zip(i, x.astype(np.int32), strict=True):
        if where < 9:  # negative ones count from the end
            want[where] = max(want[where], value)
    np.testing.assert_array_equal(got.astype(np.int32), want)


def test_atomics_on_scratch_of_an_odd_number_of_bytes():
    def kernel(x_ref, o_ref, scratch):
        scratch[...] = jnp.zeros(3, jnp.int8)
        plt.atomic_add(scratch, (slice(1, 3),), x_ref[:2])
        o_ref[...] = scratch[...]

    block = pl.BlockSpec((3,), lambda i: (i,))
    call = pl.pallas_call(
        kernel,
        out_shape=shape((9,), jnp.int8),
        grid=(3,),
        in_specs=[block],
        out_specs=block,
        scratch_shapes=[pltpu.VMEM((3,), jnp.int8)],
    )
    x = np.arange(1, 10, dtype=np.int8)
    (got,) = simulated(only_kernel(call, x), [x])
    np.testing.assert_array_equal(got, [0, 1, 2, 0, 4, 5, 0, 7, 8])


def test_atomic_on_the_last_byte_of_an_odd_array():
    def kernel(x_ref, _, o_ref):
        plt.atomic_max(o_ref, (slice(None),), x_ref[...])

    call = whole(kernel, ((63,), jnp.int8), input_output_aliases={1: 0})
    x = np.zeros(63, np.int8)
    with pytest.raises(UnsupportedError, match="hardware swaps 16 bits"):
        compiled(only_kernel(call, x, x))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "name"), [*ATOMICS, *NARROW], ids=str)
def test_atomic_on_the_gpu(kind, name, wide_types):
    atomic = getattr(plt, f"atomic_{kind}")

    def kernel(x_ref, _, o_ref):
        atomic(o_ref, (slice(None), slice(None)), x_ref[...])

    dtype = jnp.dtype(name)
    call = whole(
        kernel, ((8, 16), dtype), input_output_aliases={1: 0}, backend="triton"
    )
    x, start = numbers(0, dtype), numbers(1, dtype)
    (got,) = jax.jit(call)(x, start)
    np.testing.assert_array_equal(got, MEANING[kind](start, x).astype(dtype))


# --- assembly ---

AVERAGE = "{ add.f32 $0, $1, $2; mul.f32 $0, $0, 0f3F000000; }"
HALVES = "and.b32 $0, $2, 65535;\nshr.u32 $1, $2, 16;"
simulate.ASSEMBLY[AVERAGE] = lambda x, y: (x + y) / 2
simulate.ASSEMBLY[HALVES] = lambda x: (x & 65535, x >> 16)


def average(x, y):
    (result,) = plt.elementwise_inline_asm(
        AVERAGE,
        args=[x, y],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def average_call(**options):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = average(x_ref[...], y_ref[...])

    return whole(kernel, ((32, 32),), **options)


def test_assembly():
    kernel = only_kernel(average_call(), X, Y)
    text, _ = compiled(kernel)
    assert f'tt.elementwise_inline_asm "{AVERAGE}"' in text
    assert 'constraints = "=f,f,f", packed_element = 1 : i32, pure = true' in text
    np.testing.assert_allclose(simulated(kernel, [X, Y])[0], (X + Y) / 2)


def test_assembly_with_two_results_of_an_odd_shape():
    def kernel(x_ref, low_ref, high_ref):
        x = x_ref[...]
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        low_ref[...], high_ref[...] = plt.elementwise_inline_asm(
            HALVES,
            args=[x],
            constraints="=r,=r,r",
            pack=1,
            result_shape_dtypes=[like, like],
        )

    call = whole(kernel, ((5, 7), jnp.int32), ((5, 7), jnp.int32))
    x = np.random.default_rng(0).integers(0, 1 << 30, (5, 7)).astype(np.int32)
    kernel = only_kernel(call, x)
    compiled(kernel)
    low, high = simulated(kernel, [x])
    np.testing.assert_array_equal(low + 65536 * high, x)


@pytest.mark.parametrize("how", [{"interpret": True}, {"interpret": pl.Checked()}, {}])
def test_assembly_elsewhere_says_where_it_runs(how):
    with pytest.raises(UnsupportedError, match="runs on NVIDIA GPUs only") as refusal:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            average_call(**how)(jax.device_put(X, jax.devices("cpu")[0]), Y)
    assert "add.f32" in str(refusal.value) and "test_language.py" in str(refusal.value)


def test_assembly_of_different_shapes():
    def kernel(x_ref, o_ref):
        o_ref[...] = average(x_ref[...], x_ref[0])

    with pytest.raises(KernelTypeError, match="have the same shape") as refusal:
        jax.make_jaxpr(whole(kernel, ((32, 32),)))(X)
    assert "(32, 32), (32,)" in str(refusal.value)


@pytest.mark.gpu
def test_assembly_on_the_gpu():
    (got,) = jax.jit(average_call())(X, Y)
    np.testing.assert_allclose(got, (X + Y) / 2, rtol=1e-6)


# --- integers of 4 bits ---

FOUR_BITS = [jnp.int4, jnp.uint4]
each_four_bits = pytest.mark.parametrize("dtype", FOUR_BITS, ids=["int4", "uint4"])


def four_bit_numbers(seed, sizes, dtype):
    low = -8 if dtype == jnp.int4 else 0
    return np.random.default_rng(seed).integers(low, low + 16, sizes).astype(dtype)


def wrapped(x, dtype):
    """Integers modulo 16, as the type has them."""
    x = np.asarray(x).astype(np.int64) & 15
    return np.where((x > 7) & (dtype == jnp.int4), x - 16, x).astype(dtype)


@each_four_bits
def test_four_bits_are_loaded_by_the_byte_and_stored_again(dtype):
    def kernel(x_ref, o_ref, wide_ref):
        o_ref[...] = x_ref[...]
        wide_ref[...] = x_ref[...].astype(jnp.int32)

    rows = pl.BlockSpec((8, 64), lambda i, j: (i, j))
    call = pl.pallas_call(
        kernel,
        out_shape=[shape((16, 128), dtype), shape((16, 128), jnp.int32)],
        grid=(2, 2),
        in_specs=[rows],
        out_specs=[rows, rows],
    )
    x = four_bit_numbers(0, (16, 128), dtype)
    kernel = only_kernel(call, x)
    text, _ = compiled(kernel)
    assert "tt.join" in text and "tt.split" in text
    same, wide = simulated(kernel, [x])
    np.testing.assert_array_equal(same.astype(np.int32), x.astype(np.int32))
    np.testing.assert_array_equal(wide, x.astype(np.int32))


@each_four_bits
@pytest.mark.parametrize("sizes", [(5, 7), (3, 9), (1, 1)], ids=str)
def test_four_bits_at_odd_places(dtype, sizes):
    def kernel(x_ref, o_ref, corner_ref):
        o_ref[...] = x_ref[...].astype(jnp.int32)
        corner_ref[0] = x_ref[sizes[0] - 1, sizes[1] - 1].astype(jnp.int32)

    call = whole(kernel, (sizes, jnp.int32), ((1,), jnp.int32))
    x = four_bit_numbers(1, sizes, dtype)
    kernel = only_kernel(call, x)
    compiled(kernel)
    got, corner = simulated(kernel, [x])
    np.testing.assert_array_equal(got, x.astype(np.int32))
    assert corner[0] == int(x[-1, -1])


@each_four_bits
def test_four_bits_of_an_overhanging_block_and_a_mask(dtype):
    def kernel(x_ref, o_ref, masked_ref):
        x = x_ref[...]
        o_ref[...] = x.astype(jnp.int32)
        mask = jax.lax.broadcasted_iota(jnp.int32, (4, 6), 1) < 3
        some = pl.load(x_ref, (slice(None), slice(None)), mask=mask, other=dtype(5))
        masked_ref[...] = some.astype(jnp.int32)

    block = pl.BlockSpec((4, 6), lambda i: (0, i), fill=3)
    out = pl.BlockSpec((4, 6), lambda i: (0, i))
    call = pl.pallas_call(
        kernel,
        out_shape=[shape((4, 12), jnp.int32)] * 2,
        grid=2,
        in_specs=[block],
        out_specs=[out, out],
    )
    x = four_bit_numbers(2, (4, 9), dtype)
    (got, masked) = simulated(only_kernel(call, x), [x])
    padded = np.pad(x.astype(np.int32), [(0, 0), (0, 3)], constant_values=3)
    np.testing.assert_array_equal(got, padded)
    want = padded.reshape(4, 2, 6).copy()
    want[:, :, 3:] = 5
    np.testing.assert_array_equal(masked, want.reshape(4, 12))


ARITHMETIC = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": lambda x, y: x & y,
    "xor": lambda x, y: x ^ y,
    "invert": lambda x, y: ~x,
    "shift": lambda x, y: x << (y & 3),
    "select": lambda x, y: jnp.where(x < y, x, y),
}


@each_four_bits
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_of_four_bits(name, dtype):
    body = ARITHMETIC[name]

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = body(x_ref[...], y_ref[...]).astype(dtype).astype(jnp.int32)

    call = whole(kernel, ((8, 32), jnp.int32))
    x, y = (four_bit_numbers(s, (8, 32), dtype) for s in (3, 4))
    kernel = only_kernel(call, x, y)
    compiled(kernel)
    wide = [jnp.asarray(a.astype(np.int32)) for a in (x, y)]
    want = wrapped(body(*wide), dtype).astype(np.int32)
    np.testing.assert_array_equal(simulated(kernel, [x, y])[0], want)


@each_four_bits
def test_conversions_to_four_bits(dtype):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(dtype).astype(jnp.float32)

    x = np.array([-100, -8.7, -1, -0.0, 3.9, 7, 8, 15.5, 16, 1e9, np.inf, np.nan])
    x = np.resize(x, (16,)).astype(np.float32)
    (got,) = simulated(only_kernel(whole(kernel, ((16,),)), x), [x])
    low, high = (-8, 7) if dtype == jnp.int4 else (0, 15)
    want = np.clip(np.trunc(np.nan_to_num(x)), low, high)
    np.testing.assert_array_equal(got, want)


@each_four_bits
@pytest.mark.parametrize("other", [jnp.bfloat16, jnp.int8])
def test_product_with_weights_of_four_bits(other, dtype):
    sums = jnp.int32 if other == jnp.int8 else jnp.float32

    def kernel(x_ref, w_ref, o_ref):
        w = w_ref[...].astype(x_ref.dtype)
        o_ref[...] = jnp.dot(x_ref[...], w, preferred_element_type=sums)

    x = np.random.default_rng(5).integers(-9, 10, (32, 64)).astype(other)
    w = four_bit_numbers(6, (64, 32), dtype)
    kernel = only_kernel(whole(kernel, ((32, 32), sums)), x, w)
    text, _ = compiled(kernel)
    assert "tt.dot" in text and "tt.join" in text
    want = x.astype(np.int32) @ w.astype(np.int32)
    np.testing.assert_array_equal(simulated(kernel, [x, w])[0], want)


def test_a_half_byte_is_not_stored():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    x = four_bit_numbers(7, (3, 5), jnp.int4)
    with pytest.raises(
        UnsupportedError, match="two 4-bit elements share a byte"
    ) as refusal:
        compiled(only_kernel(whole(kernel, ((3, 5), jnp.int4)), x))
    assert "even length" in str(refusal.value)


@pytest.mark.gpu
@each_four_bits
def test_four_bits_on_the_gpu(dtype):
    def kernel(x_ref, o_ref, wide_ref):
        o_ref[...] = x_ref[...] + jnp.ones_like(x_ref)
        wide_ref[...] = x_ref[...].astype(jnp.int32)

    call = whole(kernel, ((16, 64), dtype), ((16, 64), jnp.int32), backend="triton")
    x = four_bit_numbers(0, (16, 64), dtype)
    one, wide = jax.jit(call)(jnp.asarray(x))
    np.testing.assert_array_equal(wide, x.astype(np.int32))
    want = wrapped(x.astype(np.int32) + 1, dtype)
    np.testing.assert_array_equal(
        np.asarray(one).astype(np.int32), want.astype(np.int32)
    )


# --- prints ---


def printing(**options):
    def kernel(x_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        x = x_ref[...]
        pl.debug_print("program {} {}: sum {:.2f}", i, j, x.sum())

        @pl.when((i + j) % 2 == 0)
        def _():
            pl.debug_print("x[0] = {0}, i = {1:03d}, again {1}", x[0, :3], i)
            for value in (x.astype(jnp.bfloat16)[0, 0], x[0, 0] > 0, x[0, 0] * 1000):
                pl.debug_print("value", value)

        o_ref[...] = x

    block = pl.BlockSpec((4, 5), lambda i, j: (i, j))
    return pl.pallas_call(
        kernel,
        out_shape=shape((8, 15)),
        grid=(2, 3),
        in_specs=[block],
        out_specs=block,
        **options,
    )


@pytest.fixture
def as_on_a_cpu(capfd):
    """What the same call prints through checked mode, in the order of the grid."""

    def text(call, *operands):
        call(*operands)
        jax.effects_barrier()
        return capfd.readouterr().out

    return text


def test_prints_are_formatted_as_everywhere_else(as_on_a_cpu, capfd):
    x = np.random.default_rng(0).normal(size=(8, 15)).astype(np.float32)
    want = as_on_a_cpu(printing(interpret=pl.Checked(orders=("early",))), x)
    kernel = only_kernel(printing(), x)
    compiled(kernel)
    (got,) = simulated(kernel, [x])
    np.testing.assert_array_equal(got, x)
    assert capfd.readouterr().out == want and want.count("\n") == 6 + 3 * 4


@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "int16", "float16"])
def test_prints_of_other_widths(name, wide_types, as_on_a_cpu, capfd):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.debug_print("{} and {}", x_ref[...], x_ref[1])

    x = np.array([0, 1, 123]).astype(name) * np.array(91).astype(name)
    options = dict(interpret=pl.Checked(orders=("early",)))
    want = as_on_a_cpu(whole(kernel, ((3,), x.dtype), **options), x)
    simulated(only_kernel(whole(kernel, ((3,), x.dtype)), x), [x])
    assert capfd.readouterr().out == want


def test_prints_beyond_the_log_are_counted(capfd):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        pl.debug_print("short")
        pl.debug_print("row {}", x_ref[...])

    row = pl.BlockSpec((1, 1 << 14), lambda i: (i, 0))
    call = pl.pallas_call(
        kernel,
        out_shape=shape((20, 1 << 14)),
        grid=20,
        in_specs=[row],
        out_specs=row,
    )
    x = np.zeros((20, 1 << 14), np.float32)
    simulated(only_kernel(call, x), [x])
    out = capfd.readouterr().out
    assert out.count("row") == 15 and out.count("short") == 16
    # Five rows, and what three programs say before theirs.
    assert f"{4 * (5 * (2 + (1 << 14)) + 4 * 2)} bytes were dropped" in out


def test_the_log_goes_in_as_zeros_and_out_to_the_host(monkeypatch):
    """The callback itself can only be lowered where there is a GPU."""
    read = []
    monkeypatch.setattr(jax.debug, "callback", lambda f, log: read.append((f, log)))
    traced = jax.jit(printing()).trace(np.zeros((8, 15), np.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    ((_, log),) = read
    assert log.shape == (1 << 18,) and log.dtype == jnp.int32
    call = next(line for line in text.splitlines() if "xla.gpu.triton" in line)
    assert "has_side_effect = true" in call
    assert "output_tuple_indices = [1]" in call and "operand_index = 1" in call
    types = "(tensor<8x15xf32>, tensor<262144xi32>)"
    assert f"{types} -> {types}" in call


@pytest.mark.gpu
def test_prints_on_the_gpu(as_on_a_cpu, capfd):
    x = np.random.default_rng(0).normal(size=(8, 15)).astype(np.float32)
    want = as_on_a_cpu(printing(interpret=pl.Checked(orders=("early",))), x)
    np.testing.assert_array_equal(jax.jit(printing(backend="triton"))(x), x)
    jax.effects_barrier()
    assert capfd.readouterr().out == want
