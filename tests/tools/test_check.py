"""`pl.aot(f, x).compile(...)`, `pallasite check` and `pallasite explain`."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import __main__ as command_line
from pallasite import config, kernels
from pallasite.errors import SpecError
from pallasite.tools import command, measure
from pallasite.tools.report import KernelReport
from pallasite.tools.sources import arrays, function_of, split, trace_of
from tests.runtime.test_aot import answer, stand_in

S = jax.ShapeDtypeStruct
X = S((64, 128), jnp.float32)


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def double(x):
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        double_kernel,
        out_shape=S(x.shape, x.dtype),
        grid=x.shape[0] // 8,
        in_specs=[rows],
        out_specs=rows,
    )(x)


def judged(folder: Path, **answered) -> KernelReport:
    """The report of `double` where libtpu answers so."""
    line = answer("double_kernel", **answered)
    python = stand_in(folder, "echo ready", "read a", f"echo '{line}'")
    with config.override(libtpu_python=python):
        return pl.aot(double, X).compile("tpu:v5e").kernels[0]


def test_what_libtpu_says_is_in_the_report(tmp_path):
    code = {"cycles": 100, "busy": {"VALU": 75.0, "SALU": 1.0}}
    code |= {"spills": 3, "fills": 4, "vmem": 9000}
    found = judged(tmp_path, cycles=1500, bundles=code)
    assert found.ok and found.estimate.cycles == 1500
    assert found.estimate.seconds == pytest.approx(1e-6)
    assert found.estimate.busy["vector"] == pytest.approx(75 / 1500)
    assert found.resources[0].used == 9000
    text = str(found)
    assert "1,500 cycles, 1 us" in text and "vector 5%" in text
    assert "3 vector registers" in text


def test_an_estimate_is_not_below_the_bound(tmp_path):
    found = judged(tmp_path, cycles=1)
    assert found.estimate.seconds == found.bound.seconds


@pytest.mark.parametrize(
    ("said", "what", "fix"),
    [
        (
            "E1001: CompileTimeScopedVmemOom: size 32.00M and limit 16.00M",
            "more vector memory (VMEM) than its limit",
            "use smaller blocks",
        ),
        (
            "E2002: CompileTimeMosaicMisalignedBlockAndTiling: Operand of shape",
            "a block is not made of whole tiles",
            "multiples of (8, 128)",
        ),
        (
            "E2003: cannot statically prove that index in dimension 0 is a multiple",
            "a dynamic index is not known to be aligned to a tile",
            "pl.multiple_of(index, 8)",
        ),
        (
            'Mosaic failed: unsupported shape cast at location: loc(\\"k.py\\":7:0)',
            "a reshape mixes rows and lanes",
            "reshape before the call",
        ),
        ("INTERNAL: something new", "rejects the code generated for", "please report"),
    ],
)
def test_an_error_of_libtpu_in_our_words(said, what, fix, tmp_path):
    found = judged(tmp_path, ok=False, error=json.loads(f'"{said}"'))
    assert not found.ok and what in found.error and fix in found.error
    line = "k.py:7" if "k.py" in said else "test_check.py"
    assert line in found.error and "libtpu" in found.error


def without(monkeypatch, package: str) -> None:
    """Makes a package look as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == package else find(n, *a)
    )


def test_without_libtpu_nothing_is_called_compiled(monkeypatch):
    without(monkeypatch, "libtpu")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    report = pl.aot(double, X).compile("tpu:v6e", "cpu")
    assert not report.ok and not report.compiled and not report.refused
    tpu, cpu = report.kernels
    assert cpu.ok and cpu.compiled and not tpu.ok and tpu.compiled is False
    assert tpu.note == (
        "not compiled, only the text for the compiler was generated: libtpu is not "
        "installed: pip install 'pallasite[tpu]'"
    )
    monkeypatch.setattr("platform.machine", lambda: "aarch64")  # which has no wheel
    note = pl.aot(double, X).compile("tpu:v6e").kernels[0].note
    assert "only for Linux on x86_64: compile there" in note and "pip" not in note


def test_explain_needs_no_compiler(monkeypatch):
    without(monkeypatch, "libtpu")
    report = pl.explain(double, target="tpu:v6e")(X)
    assert report.ok and "no estimate: libtpu is not" in report.kernels[0].note


def test_a_named_python_that_does_not_exist_compiles_nothing(tmp_path):
    with config.override(libtpu_python=str(tmp_path / "python")):
        report = pl.aot(double, X).compile("tpu:v6e")
    assert report.kernels[0].compiled is False
    assert "python: no such program" in report.kernels[0].note


def test_without_nvrtc_or_a_gpu_nothing_is_called_compiled(monkeypatch):
    def scaled(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = 1.015625 * x_ref[...]  # whose code no cache has

        return pl.pallas_call(kernel, out_shape=x)(x)

    monkeypatch.setattr("pallasite.backends.cuda.nvrtc._found", lambda: None)
    with config.override(cache_dir="off"):
        (kernel,) = pl.aot(scaled, X).compile("gpu:h200").kernels
    assert kernel.backend == "triton" and kernel.compiled is False
    assert "only where there is a GPU" in kernel.note


def test_what_xla_refuses_on_the_device_itself_is_refused(monkeypatch):
    monkeypatch.setattr("pallasite.tools.check.is_here", lambda target: True)
    monkeypatch.setattr("pallasite.tools.check.refusal", lambda call: "no room")
    with config.override(backend="triton"):
        report = pl.aot(double, X).compile("gpu:h200")
    assert report.refused and report.kernels[0].error == "no room"
    monkeypatch.setattr("pallasite.tools.check.refusal", lambda call: "")
    with config.override(backend="triton"):
        assert pl.aot(double, X).compile("gpu:h200").compiled
    (site,) = pl.aot(double, X).sites
    assert measure.refusal(site.call) == ""  # of this computer


def test_a_kernel_that_asks_for_the_emulation_is_judged_all_the_same(monkeypatch):
    monkeypatch.setattr("pallasite.runtime.aot.missing", lambda: "no libtpu")
    call = pl.pallas_call(double_kernel, out_shape=X, interpret=True)
    assert pl.aot(call, X).compile("tpu:v5e").kernels[0].backend == "tpu"


def test_dumps_of_every_stage(tmp_path, monkeypatch):
    monkeypatch.setattr("pallasite.runtime.aot.missing", lambda: "no libtpu")
    pl.aot(double, X).compile("tpu:v5e", "tpu:v6e", dump=tmp_path)
    for chip in ("tpu-v5e", "tpu-v6e"):
        names = {p.name for p in tmp_path.glob(f"{chip}/double_kernel-*/*")}
        assert any(name.endswith("mosaic.txt") for name in names), names


# --- files and commands ---

SCRIPT = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def double(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double_kernel, out_shape=shape)(x)


def share_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] / x_ref[...].sum()


def huge():
    whole = pl.BlockSpec((8192, 8192), lambda i: (0, 0))
    x = jnp.zeros((8192, 8192))
    return pl.pallas_call(
        share_kernel, out_shape=x, grid=2, in_specs=[whole], out_specs=whole
    )(x)


if __name__ == "__main__":
    print(double(jnp.ones((8, 128))).sum())
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "_install", lambda: None)
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT.replace("from jax.experimental import pallas", "import pallasite")
    )
    return path


def test_operands_as_text():
    assert arrays("f32[8,128], bf16[] ;i32[4]") == [
        S((8, 128), jnp.float32),
        S((), jnp.bfloat16),
        S((4,), jnp.int32),
    ]
    assert arrays("") == []
    with pytest.raises(SpecError, match="cannot parse operands from 'q7"):
        arrays("f32[8], q7[2]")


def test_one_syntax_names_a_function_everywhere(script):
    for source in (f"{script}::double", f"{script}:double"):
        assert split(source) == (str(script), "double")
    assert split("softmax") == ("pallasite.kernels", "softmax")
    assert split("a.b::f") == split("a.b:f") == ("a.b", "f")
    assert split("train.py") == ("train.py", "")
    function, operands = function_of("softmax", "f32[8,128]")
    assert function is kernels.softmax and operands[0].shape == (8, 128)
    for wrong, meant in [
        (f"{script}::duoble", "'double'"),
        ("sotfmax", "'softmax'"),
        (str(script.with_name("scripts.py")) + "::double", repr(str(script))),
    ]:
        with pytest.raises(SpecError, match="did you mean") as refused:
            function_of(wrong)
        assert f"did you mean {meant}?" in str(refused.value)
    with pytest.raises(SpecError, match=r"did you mean 'f32'\? write"):
        arrays("float32[8]")
    with pytest.raises(SpecError, match=r"fix +write 'f32"):
        arrays("f32[8,128")
    with pytest.raises(SpecError, match="did you mean 'tpu:v6e'"):
        pl.aot(double, X).compile("tpu:v6")


COMMANDS = ["check", "explain", "explore", "profile", "prove", "tune"]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_take_the_same_arguments(name, script, capsys, tmp_path):
    """Operands by --args or one by one; a wrong name ends with what was meant."""
    given = [name, f"{script}::duoble", "--args", "f32[8,128]"]
    in_child = [] if name == "tune" else ["--in-child"]
    assert command_line.main([*given, *in_child]) == command.USAGE
    assert "did you mean 'double'?" in capsys.readouterr().err
    given = [name, f"{script}::double", "f32[8,128]", "q7[1]"]
    assert command_line.main([*given, *in_child]) == command.USAGE
    assert "cannot parse operands from 'q7[1]'" in capsys.readouterr().err
    own = {"profile": ["--runs", "1"], "prove": ["--claims", "sync"]}
    given = [name, f"{script}::double", *own.get(name, ["--target", "cpu"]), "q8[1]"]
    assert command_line.main([*given, *in_child]) == command.USAGE
    assert "cannot parse operands from 'q8[1]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["profle"], "did you mean 'profile'?"),
        (["explain", "f.py", "--targets", "cpu"], "did you mean '--target'?"),
        (["prove", "f.py", "--claim=bounds", "--asume"], "did you mean '--assume'?"),
        (["doctor", "more"], "unrecognized arguments: more"),
    ],
)
def test_a_wrong_command_is_said_with_what_was_meant(given, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(given)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "option"),
    [("explore", "--output"), ("profile", "--trace"), ("tune", "--output")],
)
def test_a_place_no_file_can_have_is_said_before_anything_runs(
    name, option, script, capsys, tmp_path
):
    for place, why in [(tmp_path, "is a directory"), (tmp_path / "no" / "a", "in a")]:
        given = [name, f"{script}::double", "f32[8,128]", option, str(place)]
        in_child = [] if name == "tune" else ["--in-child"]
        assert command_line.main([*given, *in_child]) == command.USAGE
        assert why in capsys.readouterr().err


def test_profile_as_a_command(script, capsys, tmp_path):
    trace = tmp_path / "trace.json"
    given = ("profile", f"{script}::double", "--args", "f32[8,128]", "--runs", "2")
    status, out, _ = run(capsys, *given, "--trace", str(trace))
    assert status == command.OK and "double_kernel" in out and trace.exists()
    status, out, _ = run(capsys, *given, "--json")
    assert status == command.OK and json.loads(out)["kernels"]
    status, _, err = run(capsys, "profile", str(script))
    assert status == command.USAGE and "FILE.py::FUNCTION" in err


def resize(script, shape: str) -> str:
    """A size of its own: JAX does not lower the same call twice in a process."""
    return script.read_text().replace("jnp.ones((8, 128))", f"jnp.ones({shape})")


def test_a_script_that_exits_and_reads_its_own_arguments(script):
    ending = "import sys\nassert sys.argv == [__file__], sys.argv\nsys.exit()\n"
    script.write_text(resize(script, "(5, 77)") + ending)
    (site,) = trace_of(str(script))()
    assert site.call.kernel.inputs[0].ref.shape == (5, 77)


def test_kernels_of_a_file(script, capfd):
    (site,) = trace_of(f"{script}::double", "f32[8,128]")()
    assert site.call.kernel.name == "double_kernel"
    script.write_text(resize(script, "(6, 77)"))
    (site,) = trace_of(str(script))()
    assert site.call.kernel.inputs[0].ref.shape == (6, 77)
    assert capfd.readouterr().out == ""  # what the script prints is no result


@pytest.mark.parametrize(
    ("source", "operands", "message"),
    [
        ("no.py", "", "no such file: no.py"),
        ("{}::nothing", "", "has no function 'nothing'"),
        ("{}::double", "", "does not accept 0 operands: missing a required argument"),
        ("{}::double", "f32[8], f32[8]", "does not accept 2 operands: too many"),
    ],
)
def test_wrong_sources(source, operands, message, script):
    with pytest.raises(SpecError, match=message):
        trace_of(source.format(script), operands)()


@pytest.mark.parametrize(
    ("text", "source", "message", "line"),
    [
        ("x = (1,\n", "{}", "is not Python: '[(]' was never closed", 1),
        ("x = 1\n1 / 0\n", "{}", "raises ZeroDivisionError: division by zero", 2),
        ("def f(x):\n    return x @ x\n", "{}::f", "raises TypeError: dot_general", 2),
    ],
)
def test_what_a_file_raises_is_said_with_its_line(
    text, source, message, line, tmp_path
):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(SpecError, match=message) as raised:
        trace_of(source.format(path), "f32[3,4]" if "::" in source else "")()
    assert f"{path}:{line}" in str(raised.value)


def test_a_folder_that_cannot_be_written_is_reported(script, capsys):
    place = script / "texts"  # in a file
    given = ("check", f"{script}::double", "--args", "f32[8,128]", "--target", "cpu")
    status, _, err = run(capsys, *given, "--dump", str(place))
    assert status == command.USAGE and "Not a directory" in err


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = command_line.main([*arguments, "--in-child"])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_check_as_a_command(script, capsys, monkeypatch):
    monkeypatch.setattr("pallasite.runtime.aot.missing", lambda: "no libtpu")
    given = ("check", f"{script}::double", "--args", "f32[8,128]")
    status, out, _ = run(capsys, *given, "--target", "cpu")
    assert status == command.OK and out.count("double_kernel") == 1
    status, out, _ = run(capsys, *given, "--target", "tpu:v5e,cpu")
    assert status == command.NOT_COMPILED and out.count("double_kernel") == 2
    status, out, _ = run(capsys, *given, "--json")
    data = json.loads(out)
    assert status == command.NOT_COMPILED and not data["ok"] and not data["compiled"]
    assert [k["target"] for k in data["kernels"]] == ["tpu:v5e", "tpu:v6e"]
    assert [k["compiled"] for k in data["kernels"]] == [False, False]
    status, out, _ = run(capsys, "check", f"{script}::huge", "--json")
    assert status == command.REFUSED and not json.loads(out)["ok"]
    status, out, err = run(capsys, *given, "--target", "tpu:v99", "--json")
    assert status == command.USAGE and "unknown target 'tpu:v99'" in err
    assert json.loads(out)["kernels"] == []


def test_explain_as_a_command(script, capsys):
    given = ("explain", f"{script}::double", "--args", "f32[8,128]", "--no-measure")
    status, out, _ = run(capsys, *given)
    assert status == command.OK and "backend   cpu" in out


def test_a_function_without_kernels_is_named_with_its_line(tmp_path):
    file = tmp_path / "plain.py"
    file.write_text("import jax.numpy as jnp\n\n\ndef f(x):\n    return jnp.sin(x)\n")
    given = ("-m", "pallasite", "explain", f"{file}::f", "--args", "f32[8]")
    done = subprocess.run(
        [sys.executable, *given, "--in-child"], capture_output=True, text=True
    )
    assert done.returncode == command.USAGE
    assert "'f' calls no kernel" in done.stderr and "plain.py:4 in f" in done.stderr


def test_a_process_that_is_ended_is_reported(script, capsys, monkeypatch):
    ended = "import os, signal; os.kill(os.getpid(), signal.SIGABRT)"
    python = script.parent / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{ended}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    status = command_line.main(["check", str(script), "--json"])
    output = capsys.readouterr()
    assert status == command.ENDED and "killed by SIGABRT" in output.err
    assert not json.loads(output.out)["ok"]


def test_version_and_help(capsys):
    for arguments in (["--version"], ["check", "--help"]):
        with pytest.raises(SystemExit) as status:
            command_line.main(arguments)
        assert status.value.code == 0
    out = capsys.readouterr().out
    assert f"pallasite {pl.__version__}" in out
    assert "exit status:" in out and "pallasite check train.py" in out
