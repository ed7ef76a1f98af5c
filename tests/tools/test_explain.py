"""`pl.explain(f)(*args)`: every kernel of a function, and what is said of it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import pallasite as pl
from pallasite import config, kernels
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.passes.analysis.grid import Axis
from pallasite.passes.analysis.work import Traffic, Work, short
from pallasite.target import CHIPS, TPUS, Machine, named
from pallasite.tools.hints import Facts, hints
from pallasite.tools.report import duration
from pallasite.tools.roofline import roofline
from pallasite.tools.timing import this_computer
from tests.zoo import all_cases

S = jax.ShapeDtypeStruct
F32 = jnp.float32


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def double(x):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    shape = S(x.shape, x.dtype)
    grid = x.shape[0] // 8
    return pl.pallas_call(
        double_kernel, out_shape=shape, grid=grid, in_specs=[rows], out_specs=rows
    )(x)


def total_kernel(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...].sum(keepdims=True)


def total(x, **call):
    """One sum of all elements: its only axis is sequential."""
    return pl.pallas_call(
        total_kernel,
        out_shape=S((1, 1), x.dtype),
        grid=x.shape[0] // 8,
        in_specs=[pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 1), lambda i: (0, 0)),
        **call,
    )(x)


X = S((64, 128), F32)


def only(function, *args, **options):
    report = pl.explain(function, measure=False, **options)(*args)
    assert len(report.kernels) == 1
    return report.kernels[0]


def test_a_report_prints_all_there_is():
    found = pl.explain(double)(jnp.ones((64, 128))).kernels[0]
    assert found.backend == "cpu" and found.ok and found.measured
    text = str(found)
    assert "double_kernel" in text and "test_explain.py" in text
    assert "i0  parallel    each step writes its own blocks" in text
    assert "in  x_ref  f32[8,128]  moves along i0, 8 times, 32.8 kB" in text
    assert "8.19 kflop; 65.5 kB moved; 0.125 flop per byte" in text
    assert "<table>" in found._repr_html_() and "double_kernel" in found._repr_html_()
    data = json.loads(json.dumps(found.as_json()))
    assert data["work"]["flops"] == 64 * 128 and data["ok"]
    assert data["bound"]["seconds"] <= data["measured"]


def test_kernels_inside_transformations():
    step = lambda carry, _: (jax.vmap(double)(carry), None)
    scanned = jax.jit(lambda x: lax.scan(step, x, None, length=5)[0])
    found = only(scanned, S((3, 64, 128), F32))
    assert (found.inside, found.times) == (("scan",), 5)
    assert found.axes[0].size == 3 and found.work.flops == 3 * 64 * 128
    assert "in scan, 5 times" in found.title

    searched = lambda x: lax.while_loop(lambda c: c.sum() > 0, double, x)
    assert only(searched, X).times is None

    report = pl.explain(jax.grad(lambda x: double(x).sum()), measure=False)(X)
    assert [kernel.name for kernel in report.kernels][-1] == "double_kernel_d_x"
    pushed = lambda x, t: jax.jvp(double, (x,), (t,))
    report = pl.explain(pushed, measure=False)(X, X)
    assert [kernel.name for kernel in report.kernels][-1] == "double_kernel_jvp"
    assert report.kernels[-1].inside == ()

    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    spec = PartitionSpec("d")
    mapped = jax.shard_map(double, mesh=mesh, in_specs=spec, out_specs=spec)
    found = only(mapped, X)
    assert found.inside == ("shard_map",)
    assert found.work.flops == 64 * 128 // 4  # of one device


def test_targets_without_the_chip():
    report = pl.explain(double, target=["tpu:v5e", "gpu:h200"], measure=False)(X)
    tpu, gpu = report.kernels
    assert (tpu.target, tpu.backend) == ("tpu:v5e", "tpu")
    assert tpu.resources[0].name == "VMEM" and "VMEM" in str(tpu)
    assert tpu.bound.limit == "memory"
    assert gpu.target == "gpu:h200" and gpu.bound.limit in ("memory", "vector")


def test_a_kernel_that_no_backend_takes():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    huge = S((1 << 13, 1 << 13), F32)
    table = pl.BlockSpec((1 << 13, 1 << 13), lambda i: (0, 0))
    call = pl.pallas_call(
        kernel, out_shape=huge, grid=2, in_specs=[table], out_specs=table
    )
    found = only(call, huge, target="tpu:v5e")
    assert not found.ok and "VMEM of a core of v5e" in found.error
    assert "test_explain.py" in found.error


def test_unknown_targets_and_functions_without_kernels():
    with pytest.raises(SpecError, match="unknown target 'tpu:v9'"):
        pl.explain(double, target="tpu:v9")(X)
    for target in (3, ["cpu", 3]):
        with pytest.raises(SpecError, match="a target must be a name, not 3"):
            pl.explain(double, target=target)(X)
    with pytest.raises(SpecError, match="'sin' calls no kernel"):
        pl.explain(jnp.sin)(X)


def test_the_emulation_is_named():
    found = only(
        lambda x: pl.pallas_call(double_kernel, out_shape=X, interpret=True)(x), X
    )
    assert (found.backend, found.why) == ("interpret", "the call asks for it")
    with config.override(backend="interpret"):
        assert only(double, X).backend == "interpret"


def test_no_run_is_faster_than_the_bound():
    names = ("row_softmax", "matmul_accumulate")
    for case in (case for case in all_cases() if case.name in names):
        arguments = case.make_args(np.random.default_rng(0))
        run = lambda *xs, case=case: case.run(*xs, interpret=False)
        for kernel in pl.explain(run)(*arguments).kernels:
            assert kernel.measured >= kernel.bound.seconds > 0, case.name


def test_what_is_repeated_counts_once_for_the_bound():
    three = lambda x: pl.pallas_call(
        lambda a, b, c, o: o.__setitem__(..., a[...] + b[...] + c[...]), out_shape=X
    )(x, x, x)
    once = only(three, X, target="tpu:v5e")
    assert once.work.distinct_bytes == 4 * 64 * 128 * 4
    seconds = 2 * 64 * 128 * 4 / TPUS["v5e"].main.bytes_per_second
    assert once.bound.units["memory"] == pytest.approx(seconds)


def test_what_is_outside_the_array_is_not_in_the_bound():
    whole = Traffic("o_ref", "out", (128,), "f32", (0,), 2, 4 * 256, 4 * 256)
    edge = Traffic("o_ref", "out", (128,), "f32", (0,), 2, 4 * 130, 4 * 130)
    counts = {"arithmetic": 1 << 30}
    peaks = Machine.peak(TPUS["v5e"])
    bounds = [roofline(work_of(t, **counts), peaks) for t in (whole, edge)]
    assert bounds[1].seconds == pytest.approx(bounds[0].seconds * 130 / 256)


# --- hints ---


def work_of(*traffic: Traffic, **counts) -> Work:
    counts = {
        "products": {},
        "arithmetic": 0,
        "other": 0,
        "transcendentals": 0,
    } | counts
    return Work(traffic=traffic, **counts)


def facts(target: str, work: Work, **more) -> Facts:
    chosen = named(target)
    peaks = Machine.peak(chosen.chip)
    bound = roofline(work, peaks)
    more = {"axes": (), **more}
    return Facts(chosen.platform, chosen.chip, peaks, work=work, bound=bound, **more)


def test_hint_about_a_sequential_axis():
    asked = pltpu.CompilerParams(dimension_semantics=("sequential",))
    in_order = functools.partial(total, compiler_params=asked)
    found = only(in_order, S((1 << 15, 512), F32))
    assert found.hints and "because i0 is sequential" in found.hints[0]
    assert "dimension_semantics says sequential" in found.hints[0]


def test_hint_about_steps_that_stay_small():
    def kernel(last_ref, o_ref):
        o_ref[...] = 2.0 * last_ref[...]

    def doubled(x):
        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=(512,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (i ^ 1, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
        )(x)

    found = only(doubled, S((4096, 128), F32), target="tpu:v5e")
    reason = "last_ref does not follow the axis block by block"
    assert f"fewer steps; the backend cannot merge them: {reason}" in found.hints[0]


def test_hint_about_steps_without_work():
    block = pl.BlockSpec((8, 128), lambda i: (0, 0))

    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 4095)
        def _():
            o_ref[...] = x_ref[...]

    def idle(x):
        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=(4096,),
            in_specs=[block],
            out_specs=block,
        )(x)

    found = only(idle, S((8, 128), F32), target="tpu:v5e")
    assert "steps with hardly any work each" in found.hints[0]


def test_hint_about_blocks_that_come_again():
    again = Traffic("x_ref", "in", (8, 128), "f32", (1,), 1000, 1 << 30, 1 << 20)
    work = work_of(again)
    (hint,) = hints(facts("tpu:v5e", work, scheduled_work=work))
    assert "x_ref is copied 1.02e+03 times" in hint and "i0 last" in hint


def test_hint_about_wide_products():
    many = (Axis(1000, True, ""),)
    hint = lambda chip, kind: hints(
        facts(chip, work_of(products={kind: 1 << 40}), axes=many)
    )
    assert "f32 on the vector units: in bf16" in hint("gpu:h200", "f32")[0]
    assert "take 1/14.6 of" in hint("gpu:h200", "f32")[0]
    assert "f32 as tf32: in bf16" in hint("gpu:h200", "f32:tf32")[0]
    assert "f32 as 6 times bf16" in hint("tpu:v5e", "f32:highest")[0]
    assert hint("tpu:v5e", "f32") == ()  # rounded to bf16 already


def test_bounds_use_the_rates_of_what_will_run():
    h200, v5e = (Machine.peak(CHIPS[name]) for name in ("h200", "v5e"))
    assert h200.kind_rate("f32") == h200.vector < h200.kind_rate("f32:tf32")
    assert h200.kind_rate("f32:high") == h200.kind_rate("f32:tf32") / 3
    assert v5e.kind_rate("f32") == v5e.kind_rate("bf16")
    assert v5e.kind_rate("f32:highest") == v5e.kind_rate("bf16") / 6
    one = S((1024, 1024), F32)

    def product(precision):
        def kernel(x_ref, o_ref):
            o_ref[...] = jnp.dot(x_ref[...], x_ref[...], precision=precision)

        return lambda x: pl.pallas_call(kernel, out_shape=x)(x)

    found = only(product(None), one, target="gpu:h200")
    assert found.bound.units["matrix"] == 0 < found.bound.units["vector"]
    found = only(product("highest"), one, target="tpu:v5e")
    assert found.work.products == {"f32:highest": 2 << 30}
    assert "matmuls 2.15 Gf32 highest" in str(found)


def test_one_program_and_a_lost_path_are_the_first_hints():
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] = 0.9 * o_ref[...] + x_ref[...]

    def decayed(x):
        row = pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=S((1, x.shape[1]), x.dtype),
            grid=x.shape[0],
            in_specs=[row],
            out_specs=pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0)),
        )(x)

    found = only(decayed, S((4096, 256), F32), target="gpu:h200")
    assert found.hints[0].startswith("1 program can run concurrently on 132 cores")
    assert "because i0 is sequential" in found.hints[0]

    def product(x):
        return kernels.matmul(x, x)

    found = only(product, S((2048, 2048), F32), target="gpu:h200")
    assert found.backend == "triton" and found.hints[0].startswith(
        "it runs on triton, because cuda refuses: backend 'cuda' cannot run dot"
    )
    assert "fix" not in found.hints[0]
    emulated = lambda x: pl.pallas_call(double_kernel, out_shape=x, interpret=True)(x)
    assert "without interpret=" in only(emulated, X).hints[0]


def test_hint_about_edges():
    out = Traffic("o_ref", "out", (128,), "f32", (0,), 2, 4 * 130, 4 * 130)
    many = (Axis(1000, True, ""),)
    (hint,) = hints(facts("gpu:h200", work_of(out, arithmetic=1 << 30), axes=many))
    assert "49% of what is computed is dropped" in hint


def test_hint_about_spills():
    (hint,) = hints(facts("tpu:v6e", work_of(arithmetic=1 << 20), spills=500))
    assert "500 vector registers are spilled" in hint


def test_numbers_as_text():
    assert [short(n) for n in (12, 4096, 3.2e9)] == ["12 ", "4.1 k", "3.2 G"]
    assert [duration(s) for s in (2.0, 3e-3, 4e-6, 5e-9)] == [
        "2 s",
        "3 ms",
        "4 us",
        "5 ns",
    ]


def test_this_computer_follows_the_knob():
    with config.override(target="v6e"):
        assert this_computer().name == "tpu:v6e"
    assert this_computer().name == "cpu"


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_function_is_traced_for_each_target(wrapped):
    """The library splits k for few rows on a GPU, and not on a CPU."""
    function = wrapped(lambda x, y: kernels.matmul(x, y))
    operands = S((16, 16384), jnp.bfloat16), S((16384, 1024), jnp.bfloat16)
    targets = ["cpu", "gpu:h200", "cpu"]
    report = pl.explain(function, targets, measure=False)(*operands)
    assert [k.name for k in report.kernels] == ["matmul", "matmul_splits", "matmul"]
    report = pl.aot(function, *operands).compile("gpu:h200")
    assert [kernel.name for kernel in report.kernels] == ["matmul_splits"]


def test_a_jitted_function_is_traced_again_for_other_knobs():
    traced = []

    @jax.jit
    def function(x):
        traced.append(config.get("target"))
        return x + 1

    for target in ("", "v5e", "", "v5e"):
        with config.override(target=target):
            function(1.0)
    function(2.0)
    assert traced == ["", "v5e", ""]


def test_what_no_unit_limits_has_no_bound():
    """A GPU's cache may hold what a small kernel copies; no unit is named then."""

    def copies(x):
        copy = lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...])
        return pl.pallas_call(copy, out_shape=S(x.shape, x.dtype))(x)

    assert "\n  bound     none: " in str(only(copies, X, target="gpu:h200"))
    assert "ns by vector" in str(only(double, X, target="gpu:h200"))
