"""dot against numpy in f64: shapes, layouts, types, and lesser CPUs."""

import contextlib
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite import target
from pallasite.ir.types import BF16, F32, F64, I32, DType, TileType
from tests.backends.cpu.running import compute, llvm_of, run, tiles_kernel, with_refs

BF16_NP = ml_dtypes.bfloat16
HOSTS = {
    "this": None,
    "avx512": target.Host(64, 32, frozenset({"avx512f", "fma"})),
    "groups": target.Host(
        64, 32, frozenset({"avx512f", "fma", "avx512bf16", "avx512vnni"})
    ),
    "avx2": target.AVX2,
    "neon": target.NEON,
    "sse": target.SSE,
}
LAYOUTS = {
    "nn": ((1,), (0,)),
    "nt": ((1,), (1,)),
    "tn": ((0,), (0,)),
    "tt": ((0,), (1,)),
}


def on(name: str):
    host = HOSTS[name]
    return target.using(host) if host else contextlib.nullcontext()


def numbers(seed: int, shape: tuple[int, ...], dtype) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape)
    if np.dtype(dtype).kind in "iu":
        values = np.abs(values * 40) if np.dtype(dtype).kind == "u" else values * 40
    return values.astype(dtype)


def dot(b, x, y, result: DType, contract, batch=((), ())):
    return b.op(
        "dot", x, y, contract=contract, batch=batch, dtype=result, precision=None
    )


def close(got: np.ndarray, want: np.ndarray, depth: int) -> None:
    """Within the error of adding up `depth` products in any order."""
    assert got.shape == want.shape
    if got.dtype.kind in "iu":
        np.testing.assert_array_equal(got, want.astype(got.dtype))
        return
    eps = {8: 2.3e-16, 4: 1.2e-7}.get(got.dtype.itemsize, 8e-3)
    largest = max(1.0, float(np.abs(want).max(initial=0)))
    error = np.abs(got.astype(np.float64) - want).max(initial=0)
    assert error <= 4 * eps * np.sqrt(depth + 1) * largest, error


def check(rows, columns, depth, layout="nn", dtype=np.float32, result=F32) -> None:
    x = numbers(1, (rows, depth) if layout[0] == "n" else (depth, rows), dtype)
    y = numbers(2, (depth, columns) if layout[1] == "n" else (columns, depth), dtype)
    got = compute(lambda b, v, w: dot(b, v, w, result, LAYOUTS[layout]), x, y)
    left = (x if layout[0] == "n" else x.T).astype(np.float64)
    right = (y if layout[1] == "n" else y.T).astype(np.float64)
    close(got, left @ right, depth)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("host", HOSTS)
def test_odd_sizes_in_every_layout(host: str, layout: str):
    with on(host):
        check(37, 53, 71, layout)


@pytest.mark.parametrize(
    "sizes",
    [
        *((1, 1, 1), (1, 64, 300), (300, 1, 64), (64, 300, 1), (2, 97, 61)),
        *((16, 16, 16), (12, 32, 256), (97, 101, 103), (5, 3, 700), (64, 64, 2000)),
        *((700, 40, 20), (20, 1500, 260), (0, 4, 4), (4, 4, 0)),
    ],
)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_sizes(sizes: tuple[int, int, int], layout: str):
    rows, columns, depth = sizes
    check(rows, columns, depth, layout)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("host", ["this", "groups", "avx2", "neon"])
def test_few_rows(host: str, rows: int):
    if host == "groups":
        needs(host)
    with on(host):
        for layout in ("nn", "nt"):
            check(rows, 43, 301, layout)
            check(rows, 43, 301, layout, BF16_NP)
        check(rows, 37, 150, "nt", np.float64, F64)


@pytest.mark.parametrize("host", ["this", "avx2"])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (np.float64, F64),
        (np.float16, F32),
        (BF16_NP, F32),
        (BF16_NP, BF16),
        (ml_dtypes.float8_e4m3fn, F32),
        (np.int8, I32),
        (np.uint8, I32),
        (np.int16, I32),
        (np.int32, I32),
    ],
)
@pytest.mark.parametrize("layout", ["nn", "tt"])
def test_types(host: str, layout: str, dtype, result: DType):
    with on(host):
        check(40, 50, 70, layout, dtype, result)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16_NP, np.int8])
@pytest.mark.parametrize("sizes", [(32, 32, 64), (37, 53, 71), (48, 16, 130)])
def test_narrow_types_in_every_layout(sizes, dtype, layout: str):
    rows, columns, depth = sizes
    check(rows, columns, depth, layout, dtype, F32 if dtype == BF16_NP else I32)


def needs(host: str) -> None:
    chosen, here = HOSTS[host], target.host()
    if chosen is not None and not chosen.features <= here.features:
        pytest.skip(f"this CPU has no {sorted(chosen.features - here.features)}")


@pytest.mark.parametrize("host", ["this", "groups", "avx2"])
@pytest.mark.parametrize("left", [np.uint8, np.int8])
@pytest.mark.parametrize("right", [np.uint8, np.int8])
def test_signs_of_bytes(host: str, left, right):
    needs(host)
    x, y = numbers(1, (33, 69), left), numbers(2, (69, 35), right)
    x[0], y[:, 0] = np.iinfo(left).min, np.iinfo(right).max
    with on(host):
        got = compute(lambda b, v, w: dot(b, v, w, I32, ((1,), (0,))), x, y)
    np.testing.assert_array_equal(got, x.astype(np.int64) @ y.astype(np.int64))


@pytest.mark.parametrize("layout", ["nt", "tn"])
@pytest.mark.parametrize("dtype", [BF16_NP, np.int8])
def test_groups_in_both_directions(dtype, layout: str):
    needs("groups")
    with on("groups"):
        check(29, 40, 600, layout, dtype, F32 if dtype == BF16_NP else I32)
        text = llvm_of(product_kernel(dtype))
    assert ("dpbf16ps.512" if dtype == BF16_NP else "vpdpbusd.512") in text


def product_kernel(dtype, size: int = 64):
    result = I32 if dtype == np.int8 else F32
    x = numbers(1, (size, size), dtype)
    return tiles_kernel(lambda b, v: dot(b, v, v, result, ((1,), (0,))), [x])


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 70)] * 3),
    batch=st.integers(1, 3),
    left=st.permutations(range(3)),
    right=st.permutations(range(3)),
    kind=st.sampled_from(["f32", "bf16", "f64"]),
)
def test_batches_in_any_order_of_dimensions(sizes, batch, left, right, kind):
    rows, columns, depth = sizes
    dtype, result = {
        "f32": (np.float32, F32),
        "bf16": (BF16_NP, F32),
        "f64": (np.float64, F64),
    }[kind]
    x, y = (
        numbers(1, (batch, rows, depth), dtype),
        numbers(2, (batch, depth, columns), dtype),
    )
    contract = ((left.index(2),), (right.index(1),))
    shared = ((left.index(0),), (right.index(0),))
    got = compute(
        lambda b, v, w: dot(b, v, w, result, contract, shared),
        np.ascontiguousarray(x.transpose(left)),
        np.ascontiguousarray(y.transpose(right)),
    )
    close(got, x.astype(np.float64) @ y.astype(np.float64), depth)


def test_several_contracted_dimensions():
    x, y = numbers(1, (20, 5, 9), np.float32), numbers(2, (9, 30, 5), np.float32)
    got = compute(lambda b, v, w: dot(b, v, w, F32, ((1, 2), (2, 0))), x, y)
    close(got, np.einsum("mab,bna->mn", x, y, dtype=np.float64), 45)


@pytest.mark.parametrize("host", ["this", "sse"])
def test_infinities_and_nans_go_where_they_belong(host: str):
    x, y = numbers(1, (40, 33), np.float32), numbers(2, (33, 50), np.float32)
    x[3, 5], x[17, 0], y[2, 41] = np.inf, np.nan, -np.inf
    with on(host):
        got = compute(lambda b, v, w: dot(b, v, w, F32, ((1,), (0,))), x, y)
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float64) @ y.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


def test_same_result_every_time():
    x, y = numbers(1, (70, 90), np.float32), numbers(2, (90, 110), np.float32)
    kernel = tiles_kernel(lambda b, v, w: dot(b, v, w, F32, ((1,), (0,))), [x, y])
    first = run(kernel, x, y)[0]
    for _ in range(5):
        np.testing.assert_array_equal(run(kernel, x, y)[0], first)


# --- sums ---


@pytest.mark.parametrize("dtype", [np.float32, BF16_NP])
@pytest.mark.parametrize("small", [False, True])
def test_sum_is_added_to_a_ref_in_place(dtype, small: bool):
    m, n, k = (4, 5, 6) if small else (45, 50, 70)
    x, y = numbers(1, (m, k), dtype), numbers(2, (k, n), dtype)

    def emit(b, x_ref, y_ref, o_ref):
        ones = b.constant(1.0, TileType((m, n), F32))
        b.store(o_ref, ones)
        for _ in range(2):
            old = b.load(o_ref)
            product = dot(b, b.load(x_ref), b.load(y_ref), F32, ((1,), (0,)))
            b.store(o_ref, b.add(old, product))

    kernel = with_refs(emit, [x, y], [TileType((m, n), F32)])
    want = 1 + 2 * (x.astype(np.float64) @ y.astype(np.float64))
    close(run(kernel, x, y)[0], want, 2 * k)


def test_scaled_sum_is_added_to_in_its_ref():
    x, y = numbers(1, (45, 70), np.float32), numbers(2, (70, 50), np.float32)
    start = numbers(3, (45, 50), np.float32)

    def emit(b, x_ref, y_ref, s_ref, o_ref):
        b.store(o_ref, b.load(s_ref))
        old = b.load(o_ref)
        half = b.mul(old, b.constant(0.5, TileType((45, 50), F32)))
        product = dot(b, b.load(x_ref), b.load(y_ref), F32, ((1,), (0,)))
        b.store(o_ref, b.add(product, half))

    kernel = with_refs(emit, [x, y, start], [TileType((45, 50), F32)])
    want = x.astype(np.float64) @ y + 0.5 * start
    close(run(kernel, x, y, start)[0], want, 70)


def test_operand_that_is_the_target_is_read_before():
    x = numbers(1, (40, 40), np.float32)

    def emit(b, x_ref, o_ref):
        b.store(o_ref, b.load(x_ref))
        old = b.load(o_ref)
        product = dot(b, old, b.transpose(old, perm=(1, 0)), F32, ((1,), (0,)))
        b.store(o_ref, b.add(old, product))

    kernel = with_refs(emit, [x], [TileType((40, 40), F32)])
    wide = x.astype(np.float64)
    close(run(kernel, x)[0], wide + wide @ wide.T, 40)


def test_old_value_that_is_used_again_is_kept():
    x, y = numbers(1, (40, 40), np.float32), numbers(2, (40, 40), np.float32)

    def emit(b, x_ref, y_ref, o_ref, p_ref):
        b.store(o_ref, b.load(x_ref))
        old = b.load(o_ref)
        product = dot(b, b.load(x_ref), b.load(y_ref), F32, ((1,), (0,)))
        b.store(o_ref, b.add(old, product))
        b.store(p_ref, old)

    type = TileType((40, 40), F32)
    got = run(with_refs(emit, [x, y], [type, type]), x, y)
    close(got[0], x.astype(np.float64) @ y + x, 40)
    np.testing.assert_array_equal(got[1], x)


def test_sum_of_two_dots():
    x, y = numbers(1, (40, 50), np.float32), numbers(2, (50, 60), np.float32)

    def emit(b, v, w):
        first, second = (dot(b, v, w, F32, ((1,), (0,))) for _ in range(2))
        return b.add(first, second)

    close(compute(emit, x, y), 2 * (x.astype(np.float64) @ y), 100)


# --- code ---


def test_microkernels_are_shared_and_fit_the_cpu():
    x = numbers(1, (96, 96), np.float32)

    def emit(b, v):
        return dot(b, dot(b, v, v, F32, ((1,), (0,))), v, F32, ((1,), (0,)))

    for name, lanes in (("avx512", 16), ("avx2", 8), ("sse", 4)):
        with on(name):
            text = llvm_of(tiles_kernel(emit, [x]))
        assert f"<{lanes} x float>" in text
        assert f"@dot_f32_{lanes}_" in text
        defined = [
            line for line in text.splitlines() if line.startswith("define internal")
        ]
        assert len([line for line in defined if "@dot_f32" in line]) <= 4


@pytest.mark.parametrize("name", ["avx512", "neon"])
def test_a_few_rows_read_a_far_operand_once_in_place(name: str):
    x, y = numbers(1, (16, 2048), np.float32), numbers(2, (2048, 512), np.float32)
    with on(name):
        kernel = tiles_kernel(lambda b, v, w: dot(b, v, w, F32, LAYOUTS["nn"]), [x, y])
        text = llvm_of(kernel)
    products = set(re.findall(r"@dot_f32_\d+_(\d+)x\d+(of|in)", text))
    assert products == {("16", "of")}  # all rows at once, of columns where they are


def test_a_few_rows_read_pages_apart_once_in_place():
    """Nothing else reads the columns again: they are not packed."""
    x, y = numbers(1, (16, 300), np.float32), numbers(2, (300, 1024), np.float32)
    emit = lambda b, v, w: dot(b, v, w, F32, LAYOUTS["nn"])
    with on("avx512"):
        text = llvm_of(tiles_kernel(emit, [x, y]))
    assert set(re.findall(r"@dot_f32_\d+_(\d+)x\d+(of|in)", text)) == {("16", "of")}
    np.testing.assert_allclose(compute(emit, x, y), x @ y, rtol=1e-4, atol=1e-4)


def test_features_decide_the_host():
    assert target.host_of(frozenset({"avx512f"})).lanes(32) == 16
    assert target.host_of(frozenset({"avx2"})).lanes(64) == 4
    assert target.host_of(frozenset({"neon"})).registers == 32
    with target.using(target.SSE):
        assert target.host() is target.SSE
    assert target.host() is not target.SSE


def test_neon_code_for_an_arm_machine():
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        arm = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this LLVM has no AArch64 target")
    with on("neon"):
        text = llvm_of(product_kernel(np.float32, 48))
    module = llvm.parse_assembly(text)
    module.triple = "aarch64-unknown-linux-gnu"
    module.verify()
    assembly = arm.create_target_machine(opt=2).emit_assembly(module)
    assert "fmla\tv" in assembly and ".4s" in assembly
