"""A package outside of the tree adds a backend and a chip by entry points."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from pallasite import plugins, target
from pallasite.backends import base
from pallasite.errors import SpecError

MODULE = """
    from collections.abc import Sequence
    from dataclasses import replace

    from pallasite.backends.base import Compiled, Launch, Options, Resource, Stage
    from pallasite.backends.base import scheduled_kernel
    from pallasite.backends import base
    from pallasite.passes.run import Pass
    from pallasite.target import GPUS

    runs = []


    def counted(kernel):
        runs.append(kernel.name)
        return kernel


    def commented(text):
        return "; by toy\\n" + base.get("cpu").stages(Options())[0].make(text)


    class Toy:
        # The CPU's machine code with a pass and a stage of its own.
        name = "toy"
        platforms = ("cpu",)
        exports = False

        @property
        def native(self):
            return base.get("cpu").native

        def passes(self, options: Options) -> Sequence[Pass]:
            return (Pass("counted", counted), *base.get("cpu").passes(options))

        def stages(self, options: Options) -> Sequence[Stage]:
            first, *rest = base.get("cpu").stages(options)
            return (Stage("llvm", commented), *rest)

        def launch(self, compiled: Compiled) -> Launch:
            assert compiled["llvm"].startswith("; by toy")
            return base.get("cpu").launch(compiled)

        def version(self) -> str:
            return "toy 1"

        def missing(self, has_device: bool) -> str:
            return ""

        def resources(self, compiled: Compiled) -> Sequence[Resource]:
            return ()


    BACKEND = Toy()
    CHIP = replace(GPUS["h200"], name="", device_kinds=("Toy GPU",), cores=33)
    NO_CHIP = "a text"
"""
METADATA = "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n"
ENTRIES = """
    [pallasite.backends]
    toy = toy_backend:BACKEND

    [pallasite.chips]
    toy1 = toy_backend:CHIP
"""


def install_toy(folder: Path, entries: str) -> None:
    """What an installer leaves of a distribution `toy`."""
    info = folder / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(textwrap.dedent(entries))
    (folder / "toy_backend.py").write_text(textwrap.dedent(MODULE))


@pytest.fixture
def toy(tmp_path: Path, run_python: Callable[..., str]) -> Callable[[str], str]:
    """Runs code where the distribution is installed."""
    install_toy(tmp_path, ENTRIES)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    return lambda code: run_python("-c", start + textwrap.dedent(code))


KERNEL = """
    import jax, jax.numpy as jnp
    import pallasite as pl
    from pallasite import config, target

    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    def call(x, **options):
        return pl.pallas_call(double, out_shape=x, **options)(x)

    x = jnp.arange(8.0)
"""


def test_backend_by_name(toy: Callable[[str], str]):
    out = toy(
        textwrap.dedent(KERNEL)
        + textwrap.dedent("""
        assert (jax.jit(lambda x: call(x, backend="toy"))(x) == 2 * x).all()
        import toy_backend
        assert toy_backend.runs, "the backend's own pass has not run"
        toy_backend.runs.clear()
        with config.override(backend="toy"):
            assert (jax.jit(lambda x: call(x))(x) == 2 * x).all()
            assert toy_backend.runs
        toy_backend.runs.clear()
        jax.jit(lambda x: call(x + 1))(x)
        assert not toy_backend.runs, "it is the default nowhere"
        print(pl.lower(call)(x).stages(backend="toy")["llvm"][:8])
        try:
            call(x, backend="tpy")
        except pl.errors.UnknownBackendError as error:
            print(error)
        """)
    )
    assert "; by toy" in out
    assert "cpu, triton, cuda, tpu, toy" in out


def test_backend_in_doctor(toy: Callable[[str], str]):
    out = toy("from pallasite.__main__ import backend_states; print(backend_states())")
    assert "('toy', 'ready: toy 1')" in out


def test_chip_as_target(toy: Callable[[str], str]):
    out = toy(
        textwrap.dedent(KERNEL)
        + textwrap.dedent("""
        named = target.named("gpu:toy1")
        print(named.name, named.platform, named.chip.cores)
        print(target.known()[-1], target.chip_of_device("Toy GPU").name)
        assert target.named("gpu:sm_90").chip.name == "h100", "rows of the table first"
        with config.override(target="gpu:toy1"):
            assert "tt.func" in pl.lower(call)(x).stages(backend="triton")["ttir"]
        """)
    )
    assert "gpu:toy1 cuda 33" in out
    assert "gpu:toy1 toy1" in out


@pytest.fixture
def fresh():
    """Entry points are read anew, in the test and after it."""
    caches = plugins.declared, target.chips
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_members_are_those_of_the_protocol():
    named = [*vars(base.Backend)["__annotations__"], *vars(base.Backend)]
    assert set(base.MEMBERS) == {n for n in named if not n.startswith("_")}


REFUSED = {
    "the name 'cpu' in the entry points 'pallasite.backends' is taken": (
        "[pallasite.backends]\ncpu = toy_backend:BACKEND",
        base.names,
    ),
    "the name 'h200' in the entry points 'pallasite.chips' is taken": (
        "[pallasite.chips]\nh200 = toy_backend:CHIP",
        target.chips,
    ),
    "cannot be loaded: No module named 'missing_here'": (
        "[pallasite.backends]\nlost = missing_here:BACKEND",
        lambda: base.get("lost"),
    ),
    "names an object without platforms, native, exports": (
        "[pallasite.backends]\nbare = toy_backend:CHIP",
        lambda: base.get("bare"),
    ),
    "names a str, not a Chip": (
        "[pallasite.chips]\ntoy1 = toy_backend:NO_CHIP",
        target.chips,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(tmp_path: Path, monkeypatch, fresh, message: str):
    entries, use = REFUSED[message]
    install_toy(tmp_path, entries)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError) as caught:
        use()
    said = str(caught.value)
    assert message in said
    assert "uninstall" in said or "declares it" in said
