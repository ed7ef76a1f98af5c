"""`pl.profile(f)(*args)` and `pl.roofline`: where time goes, and what it could be."""

import functools
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.errors import MissingPackageError, SpecError
from pallasite.passes.analysis.work import Traffic, Work
from pallasite.target import Machine, named
from pallasite.tools import device_events, recorded_runs
from pallasite.tools.report import KernelReport
from pallasite.tools.roofline import roofline
from pallasite.tools.roofline_chart import chart_of, reports_in
from pallasite.tools.time_profile import covered

S = jax.ShapeDtypeStruct
F32 = jnp.float32


def weights_kernel(x_ref, o_ref):
    o_ref[...] = jnp.exp(jnp.sin(x_ref[...]))


def product_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...])


def weights(x):
    rows = pl.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        weights_kernel,
        out_shape=S(x.shape, x.dtype),
        grid=x.shape[0] // 8,
        in_specs=[rows],
        out_specs=rows,
    )(x)


def product(x):
    return pl.pallas_call(product_kernel, out_shape=S(x.shape, x.dtype))(x, x)


def model(x):
    """Three calls of one kernel, and one of another."""

    def step(carry, _):
        return weights(carry), None

    x, _ = lax.scan(step, x, None, length=3)
    return product(x)


@pytest.fixture(scope="module")
def found():
    return pl.profile(model, runs=4)(S((256, 256), F32))


def test_kernels_are_sorted_by_their_time(found):
    times = {each.name: each for each in found.kernels}
    assert set(times) == {"weights_kernel", "product_kernel"}
    assert [k.seconds for k in found.kernels] == sorted(
        (k.seconds for k in found.kernels), reverse=True
    )
    assert times["weights_kernel"].calls == 3 and times["product_kernel"].calls == 1
    for each in found.kernels:
        measured = each.report.measured
        assert 0 < each.least <= measured
        assert measured * each.calls == pytest.approx(each.seconds)
    assert len(found.runs) == 4
    mean = np.mean([end - begin for begin, end in found.runs])
    assert sum(k.seconds for k in found.kernels) + found.other == pytest.approx(mean)


def test_every_program_is_in_the_record_of_each_call(found):
    calls = [s for s in found.spans if s.units is None and s.name == "weights_kernel"]
    assert len(calls) == 12
    for call in calls:
        inside = [
            span
            for span in found.spans
            if span.units is not None
            and call.begin <= span.begin
            and span.end <= call.end
        ]
        units = sorted(n for span in inside for n in range(*span.units))
        assert units == list(range(32))
        assert any(b <= call.begin and call.end <= e for b, e in found.runs)


def test_the_table_says_where_a_kernel_is(found):
    text = str(found)
    assert "model  " in text and "(mean of 4 runs), cpu" in text
    assert "test_profile.py" in text and ", in scan, 3 times" in text
    assert text.splitlines()[-1].endswith("everything else")
    assert "<table>" in found._repr_html_() and "weights_kernel" in found._repr_html_()
    assert json.loads(json.dumps(found.as_json()))["kernels"][0]["calls"] in (1, 3)


def test_a_trace_has_a_track_per_thread(found, tmp_path):
    found.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks[0] == "runs" and "thread 0" in tracks.values()
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["cat"] for e in slices} >= {"run", "call", "programs"}
    assert all(e["dur"] >= 0 and e["tid"] in tracks for e in slices)
    assert len([e for e in slices if e["cat"] == "run"]) == 4
    # On one track spans are nested or apart, as the format wants.
    for track in tracks:
        ends = []
        own = sorted((e["ts"], -e["dur"]) for e in slices if e["tid"] == track)
        for begin, length in own:
            while ends and ends[-1] <= begin + 1e-3:
                ends.pop()
            assert not ends or begin - length <= ends[-1] + 1e-3
            ends.append(begin - length)


def test_transformed_kernels_are_found():
    def loss(x):
        return jax.vmap(weights)(x).sum()

    found = pl.profile(jax.grad(loss), runs=1)(jnp.ones((2, 8, 128)))
    assert len(found.kernels) >= 1 and all(k.seconds > 0 for k in found.kernels)


def test_nothing_is_recorded_outside_of_a_profile():
    from pallasite.backends.cpu.call import recording

    x = jnp.ones((8, 128))
    with recording.recorded() as spans:
        weights(x).block_until_ready()
    assert [span.last for span in spans][-1] == recording.WHOLE_CALL
    before = list(spans)
    weights(x).block_until_ready()
    assert spans == before and recording.slot.value is None


def test_emulated_kernels_are_named():
    def both(x):
        call = pl.pallas_call(
            product_kernel, out_shape=S(x.shape, x.dtype), interpret=True
        )
        return weights(call(x, x))

    found = pl.profile(both, runs=1)(jnp.ones((8, 8)))
    assert [k.name for k in found.kernels] == ["weights_kernel"]
    assert found.note == "not recorded: product_kernel (emulated)"


def test_random_keys_are_made_up():
    def noisy(key, x):
        return weights(x + jax.random.uniform(key, x.shape))

    key = jax.eval_shape(lambda: jax.random.key(0))
    found = pl.profile(noisy, runs=1)(key, S((16, 8), F32))
    assert [k.name for k in found.kernels] == ["weights_kernel"]


def test_what_cannot_be_profiled_is_refused():
    with pytest.raises(SpecError, match="calls no kernel"):
        pl.profile(jnp.sin)(1.0)
    for runs in (0, 2.5, "3", True):
        text = re.escape(f"pl.profile: runs={runs!r} is not a number of runs")
        with pytest.raises(SpecError, match=text):
            pl.profile(weights, runs=runs)


@functools.partial(jax.jit, static_argnames=("rows", "mode"))
def by_name(x, rows, *, scale, mode="sin"):
    """Arguments of all kinds: an operand by name, static ones of two types."""
    function = getattr(jnp, mode)

    def kernel(x_ref, s_ref, o_ref):
        o_ref[...] = function(x_ref[...]) * s_ref[...]

    spec = pl.BlockSpec((rows, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=S(x.shape, x.dtype),
        grid=x.shape[0] // rows,
        in_specs=[spec, pl.BlockSpec((1, 128), lambda i: (0, 0))],
        out_specs=spec,
    )(x, scale)


def test_arguments_by_name_and_static_ones():
    x, scale = S((32, 128), F32), jnp.ones((1, 128))
    given = dict(scale=scale, mode="cos")
    found = pl.profile(by_name, runs=2)(x, 16, **given)
    assert [k.calls for k in found.kernels] == [1]
    (kernel,) = pl.lower(by_name)(x, 16, **given).kernels
    assert "cos" in kernel.text and "grid=(2,)" in kernel.text
    for report in (
        pl.explain(by_name, measure=False)(x, 8, **given),
        pl.aot(by_name, x, 8, **given).compile("cpu"),
    ):
        assert [a.size for a in report.kernels[0].axes] == [4]
    assert pl.explain_grad(by_name)(x, 8, **given).operands


def test_times_of_a_device_come_from_its_profiler(monkeypatch):
    """A trace as XLA writes it of a GPU, without one."""

    def event(name, start, end):
        return SimpleNamespace(name=name, start_ns=start, end_ns=end)

    stream = SimpleNamespace(
        name="Stream #13(Compute)",
        events=[event("fill_1", 1000, 1500), event("weights_kernel", 2000, 5000)],
    )
    repeated = SimpleNamespace(name="XLA Ops", events=stream.events)
    device = SimpleNamespace(name="/device:GPU:0", lines=[stream, repeated])
    host = SimpleNamespace(name="/host:CPU", lines=[stream])
    data = SimpleNamespace(planes=[device, host])
    monkeypatch.setattr(
        device_events.jax.profiler,
        "ProfileData",
        SimpleNamespace(from_file=lambda _: data),
    )
    monkeypatch.setattr(
        device_events.Path, "rglob", lambda *_: [device_events.Path("x")]
    )
    kernel = recorded_runs._Recorded([])
    spans, runs, note = recorded_runs._on_device(
        lambda: [(10.0, 11.0)], {"weights_kernel": kernel}
    )
    (call,) = kernel.calls
    assert call.where == "/device:GPU:0 Stream #13(Compute)"
    assert (call.begin, call.end) == pytest.approx((1e-6, 4e-6))
    assert [span.kernel for span in spans] == [False, True]
    assert runs == [(0.0, 1.0)] and not note


def test_xla_numbers_kernels_of_one_name():
    assert recorded_runs._is_called("matmul", "matmul")
    assert recorded_runs._is_called("matmul_1", "matmul")
    assert not recorded_runs._is_called("matmul_grad", "matmul")


def test_seconds_of_spans_count_once():
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.5)]) == 4.0


def test_a_roofline_has_ceilings_and_points():
    report = pl.explain(product, target=["tpu:v5e", "gpu:h200"], measure=False)(
        S((512, 512), F32)
    )
    chart = chart_of(reports_in([report]))
    assert chart.chips == ["tpu:v5e", "gpu:h200"]
    v5e = [c for c in chart.ceilings if c.chip == "tpu:v5e"]
    assert {c.name for c in v5e} == {"f32 as bf16", "vector", "memory"}
    memory = next(c for c in v5e if c.slope)
    assert memory.label == "memory 819 GB/s"
    for point in chart.points:
        slope, level = chart.roof(point.chip)
        assert point.rate <= min(level, slope * point.intensity) * 1.001
        # One operand is given twice: a TPU, which that limits, moves its bytes once.
        assert point.intensity == pytest.approx(512 / 4 if point.cached else 512 / 6)
        assert point.kind == "bound"
    left, right, bottom, top = chart.limits
    assert all(
        left < p.intensity < right and bottom < p.rate < top for p in chart.points
    )


@pytest.mark.parametrize("limit", ["matrix", "vector", "special", "memory"])
@pytest.mark.parametrize("target", ["tpu:v6e", "gpu:h200", "cpu"])
def test_no_point_is_above_the_roof(target: str, limit: str):
    """Of kernels that use all units, whichever is the slowest, also past the edge."""
    often = lambda unit: 1 << 40 if limit == unit else 1 << 20
    size = 1 << 34 if limit == "memory" else 1 << 12
    row = Traffic("x", "in", (128,), "f32", (0,), 1, size, size)
    part = Traffic("o", "out", (128,), "f32", (0,), 2, 4 * 130, 4 * 130)
    products = {"f32": often("matrix"), "bf16": often("matrix")}
    work = Work(products, often("vector"), 1 << 40, often("special"), (row, part))
    bound = roofline(work, Machine.peak(named(target).chip))
    report = KernelReport("f", "", target, "cpu", work=work, bound=bound)
    for slower in (1.0, 3.0):
        given = replace(report, measured=slower * bound.seconds)
        chart = chart_of([given])
        (point,) = chart.points
        slope, level = chart.roof(target)
        roof = min(level, slope * point.intensity)
        assert 0 < point.rate <= roof * (1 + 1e-9)


def test_a_roofline_draws_measured_points(found):
    matplotlib = pytest.importorskip("matplotlib")
    assert matplotlib
    picture = pl.roofline(found)
    labels = [t.get_text() for t in picture.axes[0].get_legend().get_texts()]
    assert any("weights_kernel on cpu (measured)" in text for text in labels)


def test_a_roofline_without_matplotlib_says_what_to_install(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'pallasite\[plot\]'"):
        pl.roofline(found)
    with pytest.raises(SpecError, match="needs reports, not int"):
        pl.roofline(3)
