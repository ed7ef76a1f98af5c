"""Existing kernels unmodified: the import hook, `run`, `doctor` and missing names."""

import re
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
    import sys
    import jax, jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    import jax.experimental.pallas.triton as plt
    import jax.experimental.pallas as again

    assert again is pl
    assert pl.__name__ == "pallasite", pl.__name__
    assert pltpu.__name__ == "pallasite.tpu"

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    x = jnp.arange(4.0)
    print(pl.pallas_call(kernel, out_shape=x, interpret=True)(x).sum(), sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "upstream_style.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def test_run_serves_upstream_imports(run_python: Callable[..., str], script):
    out = run_python("-m", "pallasite", "run", script, "--flag", "7")
    assert "10.0 ['--flag', '7']" in out


def test_install_then_import(run_python: Callable[..., str], script):
    code = "import pallasite; pallasite.install(); import runpy; "
    code += f"runpy.run_path({script!r})"
    assert "10.0" in run_python("-c", code)


def test_install_twice_and_uninstall(run_python: Callable[..., str]):
    code = """
        import pallasite
        from pallasite.install import uninstall
        pallasite.install(); pallasite.install()
        import jax.experimental.pallas as pl
        assert pl is pallasite
        uninstall()
        import sys
        assert "jax.experimental.pallas" not in sys.modules
        assert pallasite.__spec__.name == "pallasite"
    """
    run_python("-c", textwrap.dedent(code))


def test_install_after_upstream_is_refused(run_python: Callable[..., str]):
    code = """
        import jax.experimental.pallas
        import pallasite
        try:
            pallasite.install()
        except pallasite.errors.PallasError as error:
            print(error)
    """
    out = run_python("-c", textwrap.dedent(code))
    assert "is already imported" in out
    assert "python -m pallasite run" in out


def test_missing_submodule_and_name_say_so(run_python: Callable[..., str]):
    code = """
        import pallasite
        pallasite.install()
        from jax.experimental.pallas import tpu as pltpu
        from jax.experimental.pallas.tpu import dma_semaphore
        try:
            dma_semaphore(1, 2)
        except NotImplementedError as error:
            print(error)
        try:
            import jax.experimental.pallas.experimental
        except ModuleNotFoundError as error:
            print(error)
    """
    out = run_python("-c", textwrap.dedent(code))
    assert "pallasite.tpu.dma_semaphore is not supported by Pallasite" in out
    assert "is not part of Pallasite" in out


def test_run_of_a_missing_file_fails_clearly(capsys):
    from pallasite.__main__ import main

    assert main(["run", "no_such_script.py"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_doctor_lists_versions_and_backends(capsys):
    from pallasite.__main__ import main

    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("pallasite", "jax", "interpret", "cpu", "triton", "tpu"):
        assert word in out
    assert "on cuda      cuda, else triton, else the emulation" in out


def test_doctor_says_which_compilers_are_missing(monkeypatch, capsys):
    from pallasite import __main__ as command_line
    from pallasite.backends.cuda import nvrtc
    from pallasite.runtime import aot

    monkeypatch.setattr(nvrtc, "_found", lambda: None)
    monkeypatch.setattr(aot, "missing", lambda: "libtpu is not installed: pip")
    monkeypatch.setattr(command_line, "_present_platforms", lambda: {"cpu"})
    states = dict(command_line.backend_states())
    text = "generates text only; no {} device, and "
    assert states["tpu"] == text.format("tpu") + "libtpu is not installed: pip"
    assert states["cuda"].startswith(text.format("cuda") + "NVRTC, which compiles")
    assert states["triton"].endswith("only where there is a GPU")
    assert states["cpu"].startswith("ready")
    monkeypatch.setattr(command_line, "_present_platforms", lambda: {"cuda", "tpu"})
    states = dict(command_line.backend_states())
    assert states["cuda"].startswith("not available: NVRTC")
    assert states["triton"].startswith("ready") and states["tpu"].startswith("ready")


def test_doctor_says_what_the_knob_has_changed(capsys):
    from pallasite import config
    from pallasite.__main__ import main

    with config.override(backend="triton"):
        main(["doctor"])
    out = capsys.readouterr().out
    assert "on cuda      triton (PALLASITE_BACKEND)" in out
    assert "on cpu       cpu, else the emulation" in out


def test_unknown_names_are_attribute_errors():
    import pallasite as pl

    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        pl.nonsense
    assert "missing" in repr(pl.Indirect)
    # in types it is no use: modules with such annotations can be imported
    assert "missing" in repr(pl.Indirect[int] | None)
    assert not isinstance(3, pl.Indirect)


def test_upstream_names_are_all_here_or_missing_with_a_hint():
    """No name of upstream's public modules is silently absent (installed version)."""
    import importlib

    import pallasite as pl
    from pallasite import tpu, triton

    for ours, name in ((pl, ""), (tpu, ".tpu"), (triton, ".triton")):
        upstream = importlib.import_module(f"jax.experimental.pallas{name}")
        public = [
            n
            for n in dir(upstream)
            if not n.startswith("_") and not hasattr(getattr(upstream, n), "__path__")
        ]
        absent = [n for n in public if not hasattr(ours, n)]
        assert not absent, (name, absent)


def test_every_extra_that_is_recommended_exists():
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    files = [root / "README.md", *(root / "docs").rglob("*.md")]
    files += [*(root / "examples").glob("*.py"), *(root / "pallasite").rglob("*.py")]
    named = {
        extra
        for file in files
        for each in re.findall(r"(?:pallasite|'\.|`\.)\[([a-z,]+)\]", file.read_text())
        for extra in each.split(",")
    }
    assert {"tpu", "cuda", "plot", "torch"} <= named
    assert named <= set(extras["optional-dependencies"])
