"""Emitted kernels run on the CPU (`host.py`): rows, products and attention."""

import re
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import kernels as library
from pallasite import tpu as pltpu
from pallasite.autodiff.backward import keeping_plan
from pallasite.backends import cuda
from pallasite.emulation.emulate import emulate
from pallasite.errors import UnsupportedError
from pallasite.kernels import masks
from pallasite.passes.run import run as run_passes
from pallasite.passes.schedule.join_rows import join_rows
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine
from pallasite.target.chip import Memory
from tests.autodiff.test_gather_overlaps import convolved
from tests.backends.cuda import host, kernels
from tests.backends.cuda.kernels import bf16, f32
from tests.xla import pull_back
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

pytestmark = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)


def run(function, *operands, folder: Path, **how) -> list[np.ndarray]:
    """The results of the one kernel that a function calls with its own operands."""
    (kernel,) = pl.lower(function)(*operands).kernels
    return host.run(kernel, [np.asarray(x) for x in operands], folder, **how)


ROWS = [
    ((30, 1000), (1, 1000), bf16),
    ((13, 201), (4, 201), f32),
    ((20, 128), (16, 128), jnp.float16),
    ((5, 7), (3, 7), f32),
    ((14, 4100), (4, 4100), bf16),  # a strip at a time, and the last block hangs over
]


@pytest.mark.parametrize(("size", "block", "dtype"), ROWS)
@pytest.mark.parametrize(
    ("kernel", "reference"),
    [
        (kernels.softmax_kernel, kernels.softmax_reference),
        (kernels.layernorm_kernel, kernels.layernorm_reference),
    ],
)
def test_rows(kernel, reference, size, block, dtype, tmp_path):
    x = kernels.normal(*size, dtype=dtype)
    function = lambda x: kernels.rows(kernel, x, block)
    (got,) = run(function, x, folder=tmp_path)
    limit = 1e-2 if dtype == bf16 else 2e-3 if dtype == jnp.float16 else 1e-5
    assert kernels.error(got, reference(x)) < limit


def test_blocks_of_every_second_element(tmp_path):
    """The edge of such a view is counted in its own elements, not in the array's."""

    def kernel(x_ref, o_ref):
        def double(a_ref, b_ref):
            b_ref[...] = 2 * a_ref[...]

        block = pl.BlockSpec((4,), lambda i: (i,))
        every_second = x_ref.at[pl.ds(0, 6, stride=2)]
        pltpu.emit_pipeline(double, grid=(2,), in_specs=[block], out_specs=block)(
            every_second, o_ref
        )

    def function(x):
        whole = pl.BlockSpec(memory_space=pl.ANY)
        result = jax.ShapeDtypeStruct((6,), x.dtype)
        return pl.pallas_call(kernel, result, in_specs=[whole], out_specs=whole)(x)

    (got,) = run(function, jnp.arange(12), folder=tmp_path)
    assert got.tolist() == [0, 4, 8, 12, 16, 20]


@pytest.mark.parametrize("new", ["int8", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("old", ["float32", "float64"])
def test_floats_that_are_no_integers(old, new, tmp_path):
    """NaN is 0; what is too large or too small is the end of the type."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(new)

    def function(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, new))(x)

    with jax.enable_x64(True):
        x = jnp.array([np.nan, np.inf, -np.inf, 1e30, -1e30, -1.5, 2.5], old)
        (got,) = run(function, x, folder=tmp_path)
    ends = np.iinfo(new)
    low, one = ends.min, -1 if ends.min else 0
    assert got.tolist() == [0, ends.max, low, ends.max, low, one, 2]


def uniform_kernel(x_ref, o_ref):
    """Reductions of tiles whose elements are all the same."""
    number = x_ref[0, pl.program_id(0)]
    tile = jnp.full((4, 16), number)
    sums = (
        jnp.sum(tile, axis=1, keepdims=True)
        + jnp.max(tile)
        + jnp.sum(jnp.full((1, 1), number))
    )
    o_ref[...] = jnp.broadcast_to(sums, o_ref.shape)


def test_reductions_of_one_number(tmp_path):
    x = kernels.normal(3, 16)
    call = lambda x: pl.pallas_call(
        uniform_kernel,
        grid=3,
        in_specs=[pl.BlockSpec(x.shape, lambda i: (0, 0))],
        out_specs=pl.BlockSpec((4, 16), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((12, 16), f32),
        backend="cuda",
    )(x)
    (got,) = run(call, x, folder=tmp_path)
    want = np.repeat(18 * np.asarray(x)[0, :3], 4)[:, None]
    np.testing.assert_allclose(got, np.broadcast_to(want, (12, 16)), rtol=1e-6)


ZOO = ["two_pass_softmax", "mandelbrot", "loop_with_when", "gcd_pairs", "collatz"]
ZOO += ["residual_rms_norm", "no_grid_two_outputs", "four_dimensional_blocks"]
ZOO += ["scale_by_group"]


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name, tmp_path):
    (case,) = [case for case in all_cases() if case.name == name]
    args = arguments(case, 0)
    (call,) = calls_in(partial(case.run, interpret=False, backend="cuda"), *args)
    if len(jax.tree.leaves(args)) != len(call.kernel.inputs):
        pytest.skip("its operands are computed before the call")
    got = host.run(call.kernel, [np.asarray(x) for x in args], tmp_path)
    want = jax.tree.leaves(case.reference(*args))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(g, np.float64).reshape(w.shape),
            np.asarray(w, np.float64),
            rtol=max(case.rtol, 1e-4),
            atol=max(case.atol, 1e-4),
        )


@pytest.fixture
def small_chip(monkeypatch):
    """A chip of three multiprocessors, so that each runs several programs."""
    chip = replace(GPUS["h100"], cores=3)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)


PRODUCTS = {
    "kn": dict(m=128, n=128, k=256, block=(128, 128, 64)),
    "odd": dict(m=200, n=136, k=136, block=(64, 64, 64)),
    "turned": dict(m=128, n=136, k=136, left="km", right="nk", out=bf16),
    "i8": dict(m=128, n=64, k=256, dtype=jnp.int8, right="nk", block=(64, 64, 128)),
    "unaligned": dict(m=64, n=64, k=71, block=(64, 64, 64)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, tmp_path, small_chip):
    how = {"left": "mk", "right": "kn", "dtype": bf16, "out": f32, **PRODUCTS[name]}
    sizes = {d: how.pop(d) for d in "mnk"}
    dtype = how.pop("dtype")
    how["out"] = jnp.int32 if dtype == jnp.int8 else how["out"]
    how.setdefault("block", (128, 128, 64))
    x, y = (
        kernels.operand(sizes, how[side], dtype, n)
        for n, side in enumerate(("left", "right"))
    )
    (got,) = run(partial(kernels.matmul, **how), x, y, folder=tmp_path)
    want = kernels.reference(x, y, how["left"], how["right"], how["out"])
    assert kernels.error(got, want) < (1e-2 if how["out"] == bf16 else 1e-5)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("columns", [64, 256])
def test_sums_over_rows_of_a_product(rows, columns, tmp_path, small_chip):
    """Warps and warpgroups share them; of a warp's lanes, eight agree."""

    def kernel(x_ref, y_ref, o_ref, s_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32)
        s_ref[...] = jnp.sum(o_ref[...], axis=0, keepdims=True)

    def call(x, y):
        shapes = [(rows, columns), (1, columns)]
        results = [jax.ShapeDtypeStruct(s, f32) for s in shapes]
        return pl.pallas_call(kernel, out_shape=results)(x, y)

    shapes = enumerate(((rows, 64), (64, columns)))
    x, y = (kernels.normal(*s, dtype=bf16, seed=n) for n, s in shapes)
    out, sums = run(call, x, y, folder=tmp_path)
    want = np.asarray(x, np.float32) @ np.asarray(y, np.float32)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(sums[0], want.sum(0), rtol=1e-4, atol=1e-2)


def test_warpgroups_that_start_a_step_apart(tmp_path, small_chip):
    """Where four programs follow each other on three multiprocessors."""
    x, y = (
        kernels.operand({"m": 256, "k": 512}, d, bf16, n)
        for n, d in enumerate(("mk", "km"))
    )
    blocks = library.MatmulConfig(128, 128, 64)
    fused = partial(library.matmul, activation="gelu", out_dtype=f32)
    (got,) = run(partial(fused, config=blocks), x, y, folder=tmp_path)
    assert kernels.error(got, fused(x, y, implementation="reference")) < 1e-3


TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
REPACKED = {
    "i8 kn": dict(m=128, n=64, k=256, dtype=jnp.int8, block=(64, 64, 128)),
    "i8 km": dict(m=128, n=72, k=256, dtype=jnp.int8, left="km", block=(64, 64, 128)),
    "i8 odd": dict(m=67, n=70, k=130, dtype=jnp.int8, block=(64, 64, 128)),
    "tf32 kn": dict(m=128, n=72, k=64, dtype=f32, block=(64, 64, 32), precision=TF32),
    "bf16 odd": dict(m=67, n=71, k=65, block=(64, 64, 64)),
    "bf16 odd turned": dict(
        m=67, n=71, k=65, left="km", right="nk", block=(64, 64, 64)
    ),
}


@pytest.mark.parametrize("name", REPACKED)
def test_operands_are_repacked_for_products(name, tmp_path, small_chip, monkeypatch):
    """However small: these would not pay for it."""
    module = import_module("pallasite.backends.cuda.repack")
    monkeypatch.setattr(module, "_pays", lambda *_: True)
    how = {"left": "mk", "right": "kn", "dtype": bf16, "out": f32, **REPACKED[name]}
    sizes, dtype = {d: how.pop(d) for d in "mnk"}, how.pop("dtype")
    how["out"] = jnp.int32 if dtype == jnp.int8 else f32
    x, y = (
        kernels.operand(sizes, how[side], dtype, n)
        for n, side in enumerate(("left", "right"))
    )
    (got,) = run(partial(kernels.matmul, **how), x, y, folder=tmp_path)
    want = kernels.reference(x, y, how["left"], how["right"], how["out"])
    assert kernels.error(got, want) < 1e-5


def test_right_operands_are_multiplied_by_numbers_before_the_call(
    tmp_path, small_chip, monkeypatch
):
    """As left operands they are not: those are multiplied in registers."""
    module = import_module("pallasite.backends.cuda.repack")
    monkeypatch.setattr(module, "_pays", lambda *_: True)

    def kernel(x_ref, y_ref, o_ref):
        x, y = x_ref[...] * 0.3, y_ref[...] * 0.3
        o_ref[...] = jnp.dot(x, y, preferred_element_type=f32)

    def function(x, y):
        spec = lambda rows, place: pl.BlockSpec((rows, 64), place)
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((67, 64), f32),
            grid=(2,),
            in_specs=[spec(64, lambda i: (i, 0)), spec(64, lambda i: (0, 0))],
            out_specs=spec(64, lambda i: (i, 0)),
        )(x, y)

    x, y = (kernels.normal(n, 64, dtype=bf16, seed=n) for n in (67, 64))
    (kernel_of,) = pl.lower(function)(x, y).kernels
    normal = run_passes(kernel_of)
    scheduled = run_passes(normal, cuda.passes_for(GPUS["h100"]))
    assert "cuda.repacked=((1, False, 0, 0.30078125),)" in scheduled.text
    (got,) = host.run(normal, [np.asarray(x), np.asarray(y)], tmp_path)
    scaled = [np.asarray(a * 0.3).astype("f4") for a in (x, y)]
    assert kernels.error(got, scaled[0] @ scaled[1]) < 1e-5


def scaled_rows(x, weights, block=(1, 1024)):
    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[...]
        o_ref[...] = (x - x.max(axis=-1, keepdims=True)) * w_ref[...]

    spec = pl.BlockSpec(block, lambda i: (i, 0))
    whole = pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=kernels.shape(x),
        grid=(pl.cdiv(x.shape[0], block[0]),),
        in_specs=[spec, whole],
        out_specs=spec,
    )(x, weights)


@pytest.mark.parametrize("cache", [64, 1 << 20])
def test_arrays_larger_than_the_cache_go_past_it(cache, tmp_path, monkeypatch):
    """But not the weights, which every program reads."""
    memories = {**GPUS["h100"].memories, "l2": Memory(cache)}
    chip = replace(GPUS["h100"], memories=memories)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)
    x, weights = kernels.normal(9, 1024), kernels.normal(1, 1024, seed=1)
    (kernel,) = pl.lower(scaled_rows)(x, weights).kernels
    once = [line for line in host.scheduled_text(kernel).splitlines() if "once" in line]
    assert [line.split()[0] == "store" for line in once] == [False, True] * (cache < 99)
    text = host.cuda_text(kernel)
    assert ("get_once<16>" in text) == ("put_once<16>" in text) == (cache < 99)
    assert text.count(" prefetch(a0 + later") == (cache < 99)
    (got,) = host.run(kernel, [np.asarray(x), np.asarray(weights)], tmp_path)
    want = (x - x.max(axis=-1, keepdims=True)) * weights
    assert kernels.error(got, want) < 1e-6


def block_sums(x, y, block, backwards):
    """Blocks of x in the order of programs, and those of y, or from the last on."""

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    grid = tuple(pl.cdiv(n, b) for n, b in zip(x.shape, block, strict=True))
    plain = pl.BlockSpec(block, lambda *ids: ids)
    other = pl.BlockSpec(block, lambda i: grid[0] - 1 - i) if backwards else plain
    how = dict(in_specs=[plain, other], out_specs=plain)
    return pl.pallas_call(kernel, out_shape=kernels.shape(x), grid=grid, **how)(x, y)


@pytest.mark.parametrize(
    ("shape", "block", "prefetched"),
    [
        ((20000,), (4096,), ["a0", "a1"]),  # the last block hangs over the end
        ((16384,), (4096,), ["a0"]),  # backwards
        ((3, 4, 2048), (1, 1, 2048), ["a0", "a1"]),
        ((64, 512), (64, 256), []),  # rows of a block are not next to each other
    ],
)
def test_blocks_of_later_programs_are_prefetched(shape, block, prefetched, monkeypatch):
    """Where they follow each other in memory as programs do; never past the end."""
    memories = {**GPUS["h100"].memories, "l2": Memory(1 << 14)}
    chip = replace(GPUS["h100"], memories=memories)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)
    x, y = (kernels.normal(*shape, seed=n) for n in range(2))
    backwards = prefetched == ["a0"]
    function = partial(block_sums, block=block, backwards=backwards)
    (kernel,) = pl.lower(function)(x, y).kernels
    text = host.cuda_text(kernel)
    assert re.findall(r" prefetch\((a\d) \+ later", text) == prefetched
    (got,) = host.simulated(kernel, [np.asarray(x), np.asarray(y)])
    if backwards:
        y = y.reshape(-1, *block)[::-1].reshape(shape)
    assert kernels.error(got, x + y) < 1e-6


def test_one_stage_is_enough(tmp_path, monkeypatch):
    """Where shared memory has room for no more."""
    memories = {**GPUS["h100"].memories, "shared": Memory(60 << 10)}
    chip = replace(GPUS["h100"], cores=2, memories=memories)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)
    x, y = (kernels.normal(256, 256, dtype=bf16, seed=n) for n in range(2))
    how = dict(block=(64, 128, 64), out=f32)
    function = partial(kernels.matmul, **how)
    (kernel,) = pl.lower(function)(x, y).kernels
    assert "bf16[1,64,64] smem" in host.scheduled_text(kernel)
    (got,) = host.run(kernel, [np.asarray(x), np.asarray(y)], tmp_path)
    assert kernels.error(got, kernels.reference(x, y, "mk", "kn", f32)) < 1e-5


def gram_kernel(x_ref, o_ref):
    """Products of one block of rows with all blocks of the same array."""
    rows, width = o_ref.shape
    here = x_ref[pl.ds(pl.program_id(0) * rows, rows), :]

    def step(n, sums):
        there = x_ref[pl.ds(n * rows, rows), :]
        dims = (((1,), (1,)), ((), ()))
        return sums + jax.lax.dot_general(here, there, dims, preferred_element_type=f32)

    steps = x_ref.shape[0] // rows
    o_ref[...] = jax.lax.fori_loop(0, steps, step, jnp.zeros((rows, width), f32))


def test_an_operand_that_stays_is_not_in_the_way_of_the_next(tmp_path, small_chip):
    x = kernels.normal(512, 64, dtype=bf16)

    def function(x):
        return pl.pallas_call(
            gram_kernel,
            out_shape=jax.ShapeDtypeStruct((512, 64), f32),
            grid=(8,),
            out_specs=pl.BlockSpec((64, 64), lambda i: (i, 0)),
        )(x)

    (got,) = run(function, x, folder=tmp_path)
    parts = x.astype(f32).reshape(8, 64, 64).sum(axis=0)
    want = jnp.dot(x.astype(f32), parts.T, precision="highest")
    assert kernels.error(got, want) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("style", ["grid", "loop"])
def test_attention(style, causal, tmp_path, small_chip):
    q, k, v = (kernels.normal(2, 192, 64, dtype=bf16, seed=n) for n in range(3))
    how = dict(style=style, causal=causal, block=(64, 64))
    function = partial(kernels.attention, **how)
    (got,) = run(function, q, k, v, folder=tmp_path, timings=list(host.TIMINGS))
    assert kernels.error(got, kernels.attention_reference(q, k, v, causal)) < 2e-2


def attention_operands(heads, length, width, groups=1, bias=False, segments=False):
    sizes = [(heads, length, width), *[(heads // groups, length, width)] * 2]
    found = [kernels.normal(*s, dtype=bf16, seed=n) for n, s in enumerate(sizes)]
    if bias or segments:
        found.append(kernels.normal(heads, length, length, seed=3) if bias else None)
    if segments:
        found += [jnp.asarray(np.arange(length)[None] // 50, jnp.int32)] * 2
    return found


PLAIN = {
    "grid": (dict(), dict(block=(64, 64))),
    "grid causal": (dict(), dict(causal=True, block=(64, 64))),
    "loop": (dict(), dict(style="loop", block=(64, 64))),
    "loop causal": (dict(), dict(style="loop", causal=True, block=(64, 64))),
    "two warpgroups": (dict(length=256), dict(causal=True)),
    "three warpgroups": (dict(length=300), dict(causal=True, block=(192, 128))),
    "odd length": (dict(length=150), dict(block=(64, 64))),
    "odd length, more steps": (dict(length=300), dict(block=(64, 64))),
    "odd length causal": (dict(length=150), dict(causal=True, block=(64, 64))),
    "groups of heads": (dict(heads=4, groups=2), dict(block=(64, 64))),
    "soft cap": (dict(), dict(softcap=20.0, block=(64, 64))),
    "bias": (dict(bias=True), dict(block=(64, 64))),
    "segments": (dict(segments=True), dict(block=(64, 64))),
    "width 96": (dict(width=96), dict(block=(64, 64))),
    "width 32": (dict(width=32), dict(block=(64, 64))),
    "width 192": (dict(width=192), dict(block=(64, 64))),
    "width 256": (dict(width=256), dict(block=(64, 64))),
    "mask of -inf": (dict(), dict(causal=True, mask=-jnp.inf, block=(64, 64))),
    "finite start": (dict(), dict(causal=True, start=-1e30, block=(64, 64))),
    # Steps of 256 keys are two each.
    "wide steps": (
        dict(heads=1, length=512, width=128),
        dict(causal=True, start=-1e30, block=(128, 256)),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_attention(name, tmp_path, small_chip):
    sizes, how = PLAIN[name]
    operands = attention_operands(**{"heads": 2, "length": 192, "width": 64, **sizes})
    given = [x for x in operands if x is not None]

    def function(*given):
        rest = iter(given)
        all_ = [None if x is None else next(rest) for x in operands]
        return kernels.plain_attention(*all_, **how)

    (got,) = run(function, *given, folder=tmp_path)
    want = jax.jit(partial(kernels.plain_attention_reference, **how))(*operands)
    assert kernels.error(got, want) < 2e-2


@pytest.mark.parametrize("is_numpy", [False, True])
def test_all_keys_at_once(is_numpy, tmp_path, small_chip):
    """Neither scores nor keys of a block fit; a loop goes over the keys."""
    q, k, v = (kernels.normal(n, 128, dtype=bf16, seed=n) for n in (256, 1024, 1025))
    v = v[:1024]

    def kernel(q_ref, k_ref, v_ref, o_ref):
        if is_numpy:
            s = (q_ref[...] @ k_ref[...].T).astype(f32) / jnp.sqrt(f32(128))
            p = jnp.exp(s - jnp.max(s, axis=-1, keepdims=True))
            p /= jnp.sum(p, axis=-1, keepdims=True)
        else:
            s = jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=f32)
            p = jax.nn.softmax(s * 128**-0.5, axis=-1)
        o_ref[...] = (p.astype(bf16) @ v_ref[...]).astype(bf16)

    def function(q, k, v):
        whole = pl.BlockSpec((1024, 128), lambda i: (0, 0))
        rows = pl.BlockSpec((128, 128), lambda i: (i, 0))
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(q.shape, bf16), grid=(2,),
                              in_specs=[rows, whole, whole],
                              out_specs=rows)(q, k, v)  # fmt: skip

    (got,) = run(function, q, k, v, folder=tmp_path, timings=list(host.TIMINGS))
    want = kernels.attention_reference(q[None], k[None], v[None], False)[0]
    assert kernels.error(got, want) < 2e-2


def gradients(function, operands, seeds, folder: Path, others=()) -> list[np.ndarray]:
    """Cotangents of the operands, by the kernels that a large GPU would run.

    Integers are operands that the function makes. Kernels whose number is in `others`
    may be another backend's.
    """
    (call,) = calls_in(function, *(x for x in operands if x.dtype != jnp.int32))
    machine = replace(
        Machine.usual(GPUS["h200"]), launch=0.0
    )  # as if there were more work
    keeping = keeping_plan(call.kernel, (True,) * len(operands), machine)
    assert keeping is not None
    made = keeping.backward
    arrays = dict(zip(made.primals, operands, strict=True))
    arrays |= {made.seeds[n]: seed for n, seed in enumerate(seeds)}
    for number, step in enumerate((keeping.forward, *made.steps)):
        here = folder / str(number)
        here.mkdir()
        given = [np.asarray(arrays[ref]) for ref in step.operands]
        try:
            found = host.run(step.kernel, given, here)
        except UnsupportedError:
            if number not in others:
                raise
            found = jax.jit(emulate(step.kernel))(*given)
        for ref, x in zip(step.results, map(np.asarray, found), strict=True):
            parts = tuple(range(x.ndim - ref.ref.rank))
            # Sums in parts are added up and rounded outside of kernels.
            arrays[ref] = x.sum(parts).astype(bf16) if parts else x
    return [arrays[target] for target in made.targets.values()]


@pytest.mark.parametrize(
    ("style", "causal", "heads", "width", "block"),
    [
        ("grid", False, 1, 128, (128, 128)),  # steps of half a block of queries
        ("loop", True, 1, 128, (128, 128)),
        ("grid", True, 2, 64, (64, 64)),
        ("grid", True, 1, 64, (128, 128)),  # warpgroups take turns in two loops
    ],
)
def test_gradient_of_attention(
    style, causal, heads, width, block, tmp_path, small_chip
):
    *operands, seed = (
        kernels.normal(heads, 256, width, dtype=bf16, seed=n) for n in range(4)
    )
    run = partial(kernels.attention, style=style, causal=causal, block=block)
    got = gradients(run, operands, (seed,), tmp_path)
    reference = partial(kernels.attention_reference, causal=causal)
    want = pull_back(reference, (x.astype(f32) for x in operands), seed.astype(f32))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == bf16 and kernels.error(x, y) < 1e-2


def test_gradient_of_grouped_heads(tmp_path, small_chip):
    """The keys' kernel sums over queries and over the heads of a group."""
    shapes = [(1, 256, heads, 64) for heads in (2, 1, 1, 2)]
    *operands, seed = (
        kernels.normal(*shape, dtype=bf16, seed=n) for n, shape in enumerate(shapes)
    )
    run = partial(library.attention, mask=masks.Causal())
    both = partial(run, return_log_sum_exp=True)
    lse = np.zeros((1, 2, 256, 1), np.float32)  # a result without a cotangent
    got = gradients(both, operands, (seed, lse), tmp_path)
    reference = partial(run, implementation="reference")
    want = pull_back(reference, (x.astype(f32) for x in operands), seed.astype(f32))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == bf16 and kernels.error(x, y) < 1e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_gradient_where_the_last_queries_hang_over(width, causal, tmp_path, small_chip):
    """What is loaded past the end is replaced: left sides are computed once."""
    *operands, seed = (
        kernels.normal(1, 200, width, dtype=bf16, seed=n) for n in range(4)
    )
    run = partial(kernels.plain_attention, causal=causal, block=(128, 128))
    got = gradients(run, operands, (seed,), tmp_path, others=(1, 2, 3))
    reference = partial(kernels.plain_attention_reference, causal=causal)
    want = pull_back(reference, (x.astype(f32) for x in operands), seed.astype(f32))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == bf16 and kernels.error(x, y) < 1e-2


@pytest.mark.parametrize("mask", [None, masks.Causal()])
def test_gradient_of_an_odd_length(mask, tmp_path, small_chip):
    """The library's queries past the end are zeros, which the copy engine brings."""
    q, k, v, seed = (
        kernels.normal(1, 200, 1, 64, dtype=bf16, seed=n) for n in range(4)
    )
    run = partial(library.attention, mask=mask)
    got = gradients(run, (jnp.asarray([200]), q, k, v), (seed,), tmp_path)
    reference = partial(run, implementation="reference")
    want = pull_back(reference, (x.astype(f32) for x in (q, k, v)), seed.astype(f32))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == bf16 and kernels.error(x, y) < 1e-2


def test_two_computed_products_of_one_sum(tmp_path, small_chip):
    """The second is added to the first, and not each to the other."""

    def kernel(x_ref, y_ref, o_ref):
        x = x_ref[...]
        first = jnp.dot(x + x, y_ref[:64], preferred_element_type=f32)
        o_ref[...] = first + jnp.dot(x * x, y_ref[64:], preferred_element_type=f32)

    def function(x, y):
        out = jax.ShapeDtypeStruct((64, 64), f32)
        return pl.pallas_call(kernel, out_shape=out, backend="cuda")(x, y)

    x, y = (kernels.normal(*s, dtype=bf16) for s in ((64, 64), (128, 64)))
    (got,) = run(function, x, y, folder=tmp_path)
    want = jnp.concatenate([x + x, x * x], 1).astype(f32) @ y.astype(f32)
    assert kernels.error(got, want) < 1e-2


@pytest.mark.parametrize(("dtype", "bits"), [(bf16, 4), (jnp.float16, 8)])
def test_weights_made_floats_of(dtype, bits, tmp_path, small_chip):
    """All that 4 or 8 bits can be, in both halves of bytes."""
    values = np.arange(256).astype(np.uint8).view(np.int8).reshape(2, 128)
    values = jnp.asarray(np.resize(values, (128, 128)))
    shape = (256 if bits == 4 else 128, 128)
    scales = kernels.normal(shape[0] // 64, 128, dtype=dtype, seed=1)
    weights = library.QuantizedWeights(values, scales, bits)
    assert weights.shape == shape
    x = kernels.normal(16, shape[0], dtype=dtype)
    (call,) = calls_in(lambda x: library.weight_only_matmul(x, weights), x)
    parts = 8 // bits
    operands = [*[x] * parts, values, *[scales[:, None]] * parts]
    (got,) = host.run(call.kernel, [np.asarray(a) for a in operands], tmp_path)
    want = x.astype(f32) @ weights.dequantize().astype(f32)
    assert kernels.error(got.sum(axis=0), want) < 1e-2
    # Two bytes per load, of two rows of the left side.
    text = host.cuda_text(call.kernel)
    assert re.search(r"u32 (w\d+)\[.*\n.* \1\[i\] = \*\(const u16\*\)", text)
    assert f"pairs_of_{'low_i4' if bits == 4 else 'i8'}_" in text


def test_full_blocks_of_latent_attention(tmp_path, small_chip):
    """Keys are the right side of both products, as they are in memory."""
    shapes = (2, 64, 128), (2, 64, 64), (5, 64, 128), (5, 64, 64)
    operands = [kernels.normal(*s, dtype=bf16, seed=n) for n, s in enumerate(shapes)]
    lengths, table = jnp.array([100, 33]), jnp.array([[3, 1], [4, 0]])
    config = library.LatentAttentionConfig(64, 32, 1, block_latent=64, apart=True)
    scaled = partial(library.latent_attention, scale=0.1)
    full, _ = calls_in(partial(scaled, config=config), *operands, lengths, table)
    q, rotary, latent, rotary_pages = operands
    shared = [q, q, rotary, latent, latent, rotary_pages]
    given = [lengths.astype(jnp.int32), table.astype(jnp.int32), *shared]
    acc, _, total = host.run(full.kernel, [np.asarray(x) for x in given], tmp_path)
    whole = jnp.array([96, 32])  # keys of full blocks
    reference = partial(scaled, implementation="reference")
    want = jax.jit(reference)(*operands, whole, table)
    assert kernels.error(acc[:, 0] / total[:, 0, 0], want) < 2e-2
    # Products of the parts of keys may be added in another order.
    np.testing.assert_allclose(total[:, 0], total[:, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("side", "depth", "columns", "taps", "dtype"),
    [(9, 32, 64, 3, bf16), (10, 64, 48, 1, jnp.float16)],
)
def test_sums_of_shifted_products(side, depth, columns, taps, dtype, tmp_path):
    """A convolution: rows in two dimensions, as many as no instruction has."""

    def kernel(x_ref, w_ref, o_ref):
        total = jnp.zeros((side * side, columns), f32)
        for dy in range(taps):
            for dx in range(taps):
                x = x_ref[0, dy : dy + side, dx : dx + side, :]
                x = x.reshape(side * side, depth)
                total += jnp.dot(x, w_ref[dy, dx], preferred_element_type=f32)
        total = jnp.maximum(total.reshape(o_ref.shape[1:]), 0)
        o_ref[0] = total.astype(o_ref.dtype)

    def call(x, w):
        spec = pl.BlockSpec((1, *x.shape[1:]), lambda i: (i, 0, 0, 0))
        whole = pl.BlockSpec(w.shape, lambda i: (0, 0, 0, 0))
        out = jax.ShapeDtypeStruct((2, side, side, columns), dtype)
        block = pl.BlockSpec((1, *out.shape[1:]), lambda i: (i, 0, 0, 0))
        return pl.pallas_call(
            kernel, out, grid=(2,), in_specs=[spec, whole], out_specs=block
        )(x, w)

    wide = side + taps - 1
    x = kernels.normal(2, wide, wide, depth, dtype=dtype)
    w = kernels.normal(taps, taps, depth, columns, dtype=dtype, seed=1)
    (given,) = pl.lower(call)(x, w).kernels
    (got,) = host.run(run_passes(given), [np.asarray(v) for v in (x, w)], tmp_path)
    want = jax.lax.conv_general_dilated(
        x.astype(f32),
        w.astype(f32),
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",
    )
    assert kernels.error(got, jnp.maximum(want, 0)) < 1e-2


@pytest.mark.parametrize(
    ("rows", "width", "depth", "columns", "taps"),
    [(4, 9, 64, 64, 3), (5, 8, 32, 48, 2)],
)
def test_shifted_rows_side_by_side(rows, width, depth, columns, taps, tmp_path):
    """A convolution as one product: no tile of all shifted rows is made."""
    height = 2 * rows

    def kernel(x_ref, w_ref, o_ref):
        first = pl.program_id(1) * rows
        x = x_ref[0, pl.ds(first, rows + taps - 1), :, :]
        parts = [
            x[dy : dy + rows, dx : dx + width].reshape(rows * width, depth)
            for dy in range(taps)
            for dx in range(taps)
        ]
        x = jnp.concatenate(parts, axis=1)
        total = jnp.dot(x, w_ref[...], preferred_element_type=f32)
        o_ref[0] = total.reshape(rows, width, columns).astype(bf16)

    def call(x, w):
        spec = pl.BlockSpec((1, *x.shape[1:]), lambda i, j: (i, 0, 0, 0))
        whole = pl.BlockSpec(w.shape, lambda i, j: (0, 0))
        out = jax.ShapeDtypeStruct((2, height, width, columns), bf16)
        block = pl.BlockSpec((1, rows, width, columns), lambda i, j: (i, j, 0, 0))
        return pl.pallas_call(
            kernel, out, grid=(2, 2), in_specs=[spec, whole], out_specs=block
        )(x, w)

    x = kernels.normal(2, height + taps - 1, width + taps - 1, depth, dtype=bf16)
    w = kernels.normal(taps * taps * depth, columns, dtype=bf16, seed=1)
    (given,) = pl.lower(call)(x, w).kernels
    (got,) = host.run(run_passes(given), [np.asarray(v) for v in (x, w)], tmp_path)
    want = jax.lax.conv_general_dilated(
        x.astype(f32),
        w.astype(f32).reshape(taps, taps, depth, columns),
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",
    )
    assert kernels.error(got, want) < 1e-2


@pytest.mark.parametrize(
    ("shape", "start", "dtype"),
    [
        ((8, 14), 1, bf16),  # 112 rows are a multiple of an instruction's
        ((7, 7), 2, bf16),  # 49 are not
        ((5, 1), 0, jnp.float16),
        ((1, 28), 1, bf16),
        ((28, 28), 2, bf16),  # in parts of 112
        ((27, 9), 1, bf16),  # in parts of 81
    ],
)
def test_contracted_rows_of_a_shifted_part(shape, start, dtype, tmp_path, small_chip):
    """A convolution's weights: zeros follow the rows in shared memory."""
    images = 4

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        x = x_ref[start : start + shape[0], start : start + shape[1], :]
        x, y = (v.reshape(-1, v.shape[-1]) for v in (x, y_ref[...]))
        o_ref[...] += jnp.dot(x.T, y, preferred_element_type=f32)

    def call(x, y):
        block = lambda v: pl.BlockSpec((None, *v.shape[1:]), lambda i: (i, 0, 0, 0))
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((64, 128), f32),
            grid=(images,),
            in_specs=[block(x), block(y)],
            out_specs=pl.BlockSpec((64, 128), lambda i: (0, 0)),
        )(x, y)

    x = kernels.normal(images, shape[0] + 2, shape[1] + 2, 64, dtype=dtype)
    y = kernels.normal(images, *shape, 128, dtype=dtype, seed=1)
    # What is beside the rows is not multiplied, not even by zero.
    x = x.at[:, : start + 0].set(jnp.nan).at[:, start + shape[0] :].set(jnp.inf)
    (given,) = pl.lower(call)(x, y).kernels
    given, arrays = run_passes(given), [np.asarray(v) for v in (x, y)]
    (got,) = host.run(given, arrays, tmp_path, timings=list(host.TIMINGS))
    part = x[:, start : start + shape[0], start : start + shape[1]]
    want = np.einsum("nyxc,nyxd->cd", part.astype(f32), y.astype(f32))
    assert kernels.error(got, want) < 1e-5


@pytest.mark.parametrize("by_rows", [False, True])
def test_gradient_of_a_convolution(by_rows, tmp_path, small_chip):
    """Every tap is a program's; a few rows of an image are one tile."""
    x = kernels.normal(3, 9, 9, 64, dtype=bf16)
    w = kernels.normal(3, 3, 64, 64, dtype=bf16, seed=1)
    seed = kernels.normal(3, 7, 7, 64, dtype=bf16, seed=2)
    run = partial(convolved, by_rows=by_rows)
    with config.override(target="gpu:h200"):
        backward = partial(pull_back, run)
        _, *calls = calls_in(backward, (x, w), seed)
    assert len(calls) == 2
    got = {}
    for call in calls:
        kernel, given = run_passes(call.kernel), {v.shape: v for v in (x, w, seed)}
        arrays = [np.asarray(given[ref.ref.shape]) for ref in kernel.inputs]
        (found,) = host.run(kernel, arrays, tmp_path)
        found = found.astype(np.float32)
        wanted = w if found.shape[-4:] == w.shape else x
        got[wanted.shape] = found.sum(tuple(range(found.ndim - 4)))
    dims = ("NHWC", "HWIO", "NHWC")
    reference = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=dims, precision="highest"
    )
    want = pull_back(reference, (x.astype(f32), w.astype(f32)), seed.astype(f32))
    for expected in want:
        assert kernels.error(got[expected.shape], expected) < 1e-2


def test_rows_that_are_no_multiple_of_an_instructions(tmp_path):
    x, y = (kernels.normal(200, 64, dtype=bf16), kernels.normal(64, 80, dtype=bf16))

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32)

    def call(x, y):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((200, 80), f32),
            grid=(2,),
            in_specs=[
                pl.BlockSpec((100, 64), lambda i: (i, 0)),
                pl.BlockSpec((64, 80), lambda i: (0, 0)),
            ],
            out_specs=pl.BlockSpec((100, 80), lambda i: (i, 0)),
        )(x, y)

    (got,) = run(call, x, y, folder=tmp_path)
    want = np.asarray(x, np.float32) @ np.asarray(y, np.float32)
    assert kernels.error(got, want) < 1e-5


def test_rows_of_images_that_few_programs_make(tmp_path):
    """Four programs of 20 rows are one, whose windows start at any row."""
    side, depth = 20, 32

    def kernel(a_ref, b_ref, w_ref, o_ref):
        total = jnp.zeros(o_ref.shape, f32)
        for n, ref in enumerate((a_ref, b_ref)):
            total += jnp.dot(
                ref[pl.ds(n, side), :], w_ref[n], preferred_element_type=f32
            )
        o_ref[...] = total

    def call(x, w):
        row = lambda d: pl.BlockSpec((None, side + 1, depth), lambda y: (y + d, 0, 0))
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((8, side, 64), f32),
            grid=(8,),
            in_specs=[row(0), row(1), pl.BlockSpec(w.shape, lambda y: (0, 0, 0))],
            out_specs=pl.BlockSpec((None, side, 64), lambda y: (y, 0, 0)),
        )(x, x, w)

    x = kernels.normal(9, side + 1, depth, dtype=bf16)
    w = kernels.normal(2, depth, 64, dtype=bf16, seed=1)
    (given,) = pl.lower(call)(x, w).kernels
    joined = join_rows(run_passes(given), 0, 4)
    (got,) = host.run(joined, [np.asarray(v) for v in (x, x, w)], tmp_path)
    x, w = (np.asarray(v, np.float32) for v in (x, w))
    want = x[:-1, :-1] @ w[0] + x[1:, 1:] @ w[1]
    assert kernels.error(got, want) < 1e-5
