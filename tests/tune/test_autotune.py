"""`pl.autotune` on tiny kernels: what it finds, keeps, refuses and survives."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.__main__ import main
from pallasite.errors import CompileError, PerformanceWarning, SpecError
from pallasite.runtime import aot
from pallasite.tune import measure, table

X = jnp.arange(64.0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path):
    with config.override(cache_dir=str(tmp_path / "cache")):
        yield


@pytest.fixture
def clock(monkeypatch):
    """Candidates take what the test says instead of being timed.

    `clock.seconds(n)` is for the candidate that is the nth to be timed; `clock.batches`
    are the numbers of those that were timed together.
    """
    clock = types.SimpleNamespace(seconds=lambda n: 1.0, batches=[])
    seen = []

    def timings(runs, rounds=0):
        del rounds
        seen.extend(run for run in runs if run not in seen)
        clock.batches.append([seen.index(run) for run in runs])
        return [[clock.seconds(seen.index(run))] * 3 for run in runs]

    monkeypatch.setattr(measure, "timings", timings)
    return clock


def scaled(x, block, factor):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * factor

    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], block),),
        in_specs=[spec],
        out_specs=spec,
        interpret=True,  # not scheduled: every configuration is another program
        name="scaled",
    )(x)


@pl.tunable(block=(8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 64))
def doubled(x, *, block=8):
    return scaled(x, block, 2.0)


@pl.tunable(fault=("none", "wrong", "raises"))
def faulty(x, *, fault="none"):
    if fault == "raises":
        raise ValueError("this one cannot be traced")
    return scaled(x, 8, 3.0 if fault == "wrong" else 2.0)


def block_of(function, *args) -> int:
    """The block that a call made now has."""
    (kernel,) = pl.lower(lambda *xs: function(*xs))(*args).kernels
    return kernel.body.ops[-1].attrs["windows"][0].dims[0].size


def test_a_second_run_does_no_work_where_configurations_are_other_kernels(clock):
    """A sum in parts is a kernel of another name."""
    clock.seconds = lambda n: 0.5 if n else 1.0

    @pl.tunable(parts=(1, 2))
    def f(x, *, parts=1):
        return scaled(x, 8, 2.0) if parts == 1 else scaled(scaled(x, 8, 4.0), 16, 0.5)

    first = pl.autotune(f, workers=0, progress=False)(X)
    assert first.sites[0].entry.config == {"parts": 2}
    assert pl.autotune(f, workers=0, progress=False)(X).sites[0].compiled == 0


def test_the_fastest_is_found_and_the_second_run_does_no_work(clock):
    clock.seconds = lambda n: 0.5 if n == 2 else 1.0
    found = pl.autotune(doubled, workers=0)(X)
    (site,) = found.sites
    assert (site.considered, site.compiled) == (12, 4)
    assert clock.batches == [[0], [1, 2, 0], [3, 2]]  # the best again in each
    best = found.config("doubled")["block"]
    assert best != 8 and site.entry.seconds == 0.5 and site.entry.default_seconds == 1.0
    np.testing.assert_allclose(found(X), 2 * X)

    clock.batches.clear()
    again = pl.autotune(doubled, workers=0)(X)
    assert (again.compiled, clock.batches) == (0, [])
    assert again.config("doubled") == found.config("doubled")
    assert block_of(doubled, X) == best  # a call outside takes it, too
    assert pl.autotune(doubled, workers=0, again=True)(X).compiled == 4


def test_wrong_candidates_are_refused(clock):
    clock.seconds = lambda n: 1.0 / (1 + n)
    found = pl.autotune(faulty, workers=0)(X)
    wrong, raised = found.sites[0].refused
    assert (
        wrong[0] == "fault=wrong"
        and "result 0 has a root-mean-square error of" in wrong[1]
    )
    assert raised == ("fault=raises", "ValueError: this one cannot be traced")
    assert found.config("faulty") == {"fault": "none"}


def test_the_default_stays_where_nothing_is_clearly_better(clock):
    clock.seconds = lambda n: 0.99 if n else 1.0
    found = pl.autotune(doubled, workers=0)(X)
    assert found.config("doubled") == {"block": 8}


def test_those_near_the_best_are_measured_again_side_by_side(clock):
    """The best of each batch was the least of more times than the others had."""
    first, last = [1.0, 0.54, 0.52, 0.9], [1.0, 0.55, 0.6, 0.9]
    clock.seconds = lambda n: (last if len(clock.batches) > 3 else first)[n]
    found = pl.autotune(doubled, workers=0)(X)
    assert clock.batches[3:] == [[2, 1, 0]]
    assert found.sites[0].entry.seconds == 0.55
    assert found.sites[0].entry.default_seconds == 1.0


def test_times_on_a_loaded_computer_are_not_stored_without_a_word(monkeypatch):
    def tune(*rows):
        monkeypatch.setattr(measure, "timings", lambda runs, **_: rows_of(runs))
        seen = []

        def rows_of(runs):
            seen.extend(run for run in runs if run not in seen)
            return [list(rows[min(seen.index(run), 1)]) for run in runs]

        return pl.autotune(doubled, workers=0, again=True)(X)

    with pytest.warns(PerformanceWarning, match="varied by 50% .* not stored") as said:
        found = tune((1.0, 1.0, 1.5, 1.5), (0.9, 0.9, 1.3, 1.4))
    assert said[0].filename == __file__ and "not to be trusted: times varied" in str(
        found
    )
    assert not table.user_table().entries
    tune((1.0, 1.0, 1.5, 1.5), (0.5, 0.5, 0.7, 0.7))  # far better all the same
    assert len(table.user_table().entries) == 1
    tune((1.0, 1.0, 1.01, 1.05), (0.9, 0.9, 0.91, 0.92))
    assert measure.spread([9.0, 1.0, 1.2]) == pytest.approx(0.1)
    assert measure.spread([1.0, 2.0]) == 0.0  # too few to say


def test_an_interruption_keeps_what_was_found(clock, tmp_path):
    def seconds(n):
        if len(clock.batches) == 3:
            raise KeyboardInterrupt
        return 1.0 / (1 + n)

    clock.seconds = seconds
    found = pl.autotune(doubled, workers=0)(X)
    assert found.interrupted
    (entry,) = table.user_table().entries
    assert entry == found.sites[0].entry and not entry.complete
    assert entry.config != {"block": 8}
    clock.seconds = lambda n: 1.0 / (1 + n)
    found = pl.autotune(doubled, workers=0)(X)  # not complete: it searches again
    assert found.compiled and not found.interrupted
    found.save(tmp_path / "found.json")
    with config.override(cache_dir=str(tmp_path / "empty")):
        assert block_of(doubled, X) == 8
        with pl.configs(tmp_path / "found.json"):
            assert block_of(doubled, X) == found.config("doubled")["block"]


def test_every_kernel_of_a_step_is_tuned_with_its_gradient(clock):
    @pl.tunable(block=(8, 16))
    def cubed(x, *, block=8):
        return scaled(x, block, 2.0) ** 3

    @jax.jit
    def step(x):
        return jax.grad(lambda x: jnp.sum(doubled(cubed(cubed(x)))))(x)

    step(X)  # traced already: it is traced again
    found = pl.autotune(step, workers=0)(X)
    assert [f.entry.site.kernel for f in found.sites] == ["cubed", "doubled"]
    kernels = found.sites[0].entry.kernels
    assert len(kernels) > 3  # backward ones among them
    np.testing.assert_allclose(found(X), step(X))


def test_a_space_can_be_given_in_place(clock):
    def f(x, n=1):
        return doubled(x, block=8) * n / n

    found = pl.autotune(f, space={"n": (1, 2)}, workers=0)(X)
    assert found.config("f") == {"n": 1}
    with pytest.raises(SpecError, match="no site of the kernel 'g'"):
        found.config("g")


def test_what_cannot_be_tuned_says_why():
    with pytest.raises(SpecError, match="'f' has nothing to tune"):

        def f(x):
            return x

        pl.autotune(f, workers=0)(X)
    with pytest.raises(SpecError, match="no h200 to measure on"):
        pl.autotune(doubled, target="h200", workers=0)(X)

    def late(x):
        return jax.pure_callback(_fails, x, x) + doubled(x)

    with pytest.raises(CompileError, match="default configuration of 'doubled'"):
        pl.autotune(late, workers=0)(X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": -1}, "limit is -1"),
        ({"workers": -2}, "workers is -2"),
        ({"share": 0}, "above 0 and up to 1"),
        ({"share": 3}, "above 0 and up to 1"),
        ({"tolerance": -0.1}, "tolerance is -0.1"),
        ({"space": {}}, "no argument of 'doubled' has values"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        pl.autotune(doubled, **options)


def test_what_is_tuned_is_a_function():
    with pytest.raises(TypeError, match=r"not pl\.autotune"):
        pl.autotune(doubled(X))


def test_what_was_tuned_is_used_in_place_of_the_function(clock):
    clock.seconds = lambda n: 1 / (n + 1)

    def shifted(x, *, by=0.0, other=None):
        return doubled(x) + by + (0 if other is None else other)

    found = pl.autotune(shifted, workers=0)(X, by=1.0, other=X)
    assert found.config("doubled")["block"] != 8
    want = 3 * X + 1
    np.testing.assert_array_equal(found(X, by=1.0, other=X), want)
    np.testing.assert_array_equal(jax.jit(found)(X, by=1.0, other=X), want)
    assert block_of(found, X) == found.config("doubled")["block"]
    exported = jax.export.export(jax.jit(found))(X)
    np.testing.assert_array_equal(exported.call(X), 2 * X)


def _fails(x):
    raise RuntimeError("not today")


@pytest.mark.parametrize("hangs", [False, True])
def test_a_tpu_that_is_not_here_is_tuned_by_estimates(monkeypatch, hangs: bool):
    asked = []

    def compile_all(jobs, chip, cycles, timeout):
        done = []
        for job in jobs:
            asked.append(chip)
            if hangs and len(asked) == 2:
                done.append(aot.Compiled(job.name, False, f"late: {timeout:g} s"))
            else:
                done.append(aot.Compiled(job.name, True, cycles=10_000 - len(asked)))
        return done

    monkeypatch.setattr(aot, "compile_all", compile_all)
    monkeypatch.setattr(aot, "missing", lambda: "")

    @pl.tunable(parts=(1, 2, 4, 5))
    def whole(x, *, parts=1):
        def kernel(x_ref, o_ref):
            o_ref[...] = sum(x_ref[...] / parts for _ in range(parts))

        return pl.pallas_call(kernel, out_shape=x)(x)

    found = pl.autotune(whole, target="v5e")(jax.ShapeDtypeStruct((8, 128), X.dtype))
    assert found.unit == "cycles" and "cycles" in str(found)
    assert set(asked) == {"v5e"}
    refused = {reason for _, reason in found.sites[0].refused}
    assert refused == ({"late: 60 s"} if hangs else set())
    (entry,) = table.user_table().of("whole", "v5e")
    assert entry.config == found.config("whole") != {"parts": 1}


def test_without_a_tpu_or_its_compiler_nothing_is_tuned(monkeypatch):
    lacking = "libtpu is not installed: pip install 'pallasite[tpu]'"
    monkeypatch.setattr("pallasite.runtime.aot.missing", lambda: lacking)
    with pytest.raises(SpecError, match="no compiler to ask for estimates") as refused:
        pl.autotune(doubled, target="tpu:v6e", keep=False)(X)
    text = str(refused.value)
    assert "Traceback" not in text and "where libtpu is" in text and lacking in text


def test_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "timings", lambda runs, **_: [[1.0]] * len(runs))
    output = tmp_path / "found.json"
    place = f"{__file__}:faulty"
    assert main(["tune", place, "f32[64]", "--workers=0", f"--output={output}"]) == 0
    said = capsys.readouterr().out
    assert "faulty(float32[64])" in said and "2 of 3 compiled" in said
    assert "rejected fault=raises: ValueError" in said
    assert len(table.load(output).entries) == 1
    assert main(["tune"]) == 0
    assert "1 configurations" in capsys.readouterr().out
    for wrong, message in [
        ("nothing", "has no function 'nothing'"),
        ("no/file.py:f", "no such file"),
        ("no.module:f", "no such module"),
    ]:
        assert main(["tune", wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["tune", "softmax", "f32(8)"]) == 2
    assert "cannot parse operands" in capsys.readouterr().err
    for operands in ([], ["f32[8]", "f32[8]"]):
        assert main(["tune", "softmax", *operands]) == 2
        assert "does not accept" in capsys.readouterr().err
