"""`benchmarks/gpu.py` without a GPU: it runs, and its kernels become Triton's IR."""

import json

import jax
import pytest

from benchmarks import gpu
from pallasite.passes.run import run as run_passes
from pallasite.primitive import call_p
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated
from tests.xla import put

SMALL = gpu.Options(small=True, more=False, warps=(None,), stages=(None,))
PROBLEMS = {problem.name: problem for problem in gpu.problems(SMALL)}
LABELS = ("128x128", "1 rows")


def is_tested(problem, contender):
    if problem == "attention gradient d128 causal" and "loop" in contender:
        return False  # there is no backward kernel of a loop of unknown length
    return contender.startswith("ours") and any(x in contender for x in LABELS)


def test_the_chart_compares_the_chosen_backend_with_the_rivals():
    row = lambda name, rate, **more: dict(
        contender=name, rate=rate, ms=6 / rate, unit="TB/s", **more
    )
    rows = [row("XLA", 2.0), row("ours a", 5.0), row("ours b", 3.0, chosen=True)]
    made = gpu.chart({"p": rows, "failed": [{"contender": "XLA", "failed": "no"}]})
    assert "p: ours b, 3 TB/s" in made and ">1.50<" in made
    assert "ours a" not in made and "failed" not in made


@pytest.mark.parametrize("name", PROBLEMS)
def test_our_kernels_are_emitted(name, monkeypatch):
    monkeypatch.setattr(gpu, "_backends", lambda: ("triton",))
    (problem,) = (p for p in gpu.problems(SMALL) if p.name == name)
    for contender, make in problem.contenders.items():
        if is_tested(name, contender):
            run, operands = make()
            for kernel in kernels_in(run, *operands):
                compiled(run_passes(kernel))


@pytest.mark.parametrize("name", PROBLEMS)
def test_our_kernels_are_right_on_the_simulator(name, monkeypatch):
    """Forward and backward: every kernel of a call, in a random order of programs."""
    if name in ("matmul bfloat16 8192", "attention d128 causal long"):
        pytest.skip("the same kernels as others, for other sizes")

    def run(*operands, call):
        return [put(x, x.dtype) for x in simulated(run_passes(call.kernel), operands)]

    monkeypatch.setattr(gpu, "_backends", lambda: ("triton",))
    (problem,) = (p for p in gpu.problems(SMALL) if p.name == name)
    plain, operands = problem.contenders[problem.reference]()
    want = plain(*operands)
    monkeypatch.setattr(call_p, "impl", run)
    for contender, make in problem.contenders.items():
        if is_tested(name, contender):
            ours, operands = make()
            assert gpu.distance(ours(*operands), want) <= problem.allowed


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a look at the script")
def test_numbers_are_written_and_failures_do_not_stop_it(tmp_path, capsys, monkeypatch):
    def no_torch():
        raise RuntimeError("torch sees no GPU")

    monkeypatch.setattr(gpu, "_torch", no_torch)
    path = tmp_path / "chip.json"
    short = ["--small", "--rounds", "1", "--calls", "1", "--json", str(path)]
    assert gpu.main(["rmsnorm", *short]) == 0
    out = capsys.readouterr().out
    assert "rmsnorm gradient" in out and "failed" in out
    found = json.loads(path.read_text())
    assert set(found["problems"]) == {"rmsnorm", "rmsnorm gradient"}
    rows = {row["contender"]: row for row in found["problems"]["rmsnorm"]}
    assert rows["ours cpu 1 rows"]["error"] < 1e-2 and rows["XLA"]["ms"] > 0


def test_problems_are_selected_by_name(capsys):
    assert gpu.main(["--list", "gradient"]) == 0
    assert capsys.readouterr().out.split("\n")[0] == "attention gradient d128 full"
