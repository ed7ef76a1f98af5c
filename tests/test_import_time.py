"""What keeps `import pallasite` fast: most of it is loaded by its first use.

`benchmarks/import_time.py` measures the time itself.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

HEAVY = [
    "jax.experimental.pallas",
    "jax._src.pallas",
    "jaxlib.mosaic",
    "jaxlib.triton",
    "libtpu",
    "llvmlite",
]
# Rooms that the first kernel, derivative or partitioned call loads.
LATER = [
    "jax._src.checkify",
    "pallasite.autodiff.rules",
    "pallasite.autodiff.backward",
    "pallasite.backends.cpu",
    "pallasite.emulation",
    "pallasite.importer",
    "pallasite.interpret",
    "pallasite.passes.analysis.grid",
    "pallasite.passes.run",
    "pallasite.sharding.custom_call",
]

# In a process of its own, where a derivative of a mapped call is the first thing asked.
FIRST_USE = """
import sys
import jax
before = set(sys.modules)
import pallasite as pl
print(*sorted(set(sys.modules) - before))

def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]

x = jax.numpy.ones((3, 8))
call = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((8,), x.dtype))
print(*jax.grad(lambda x: jax.vmap(call)(x).sum())(x)[0])
"""


@pytest.fixture(scope="module")
def first_use(
    run_python: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[set[str], list[str]]:
    """The modules that `import pallasite` adds to those of jax; a gradient."""
    pytest.importorskip("pallasite")
    script: Path = tmp_path_factory.mktemp("import") / "first_use.py"
    script.write_text(FIRST_USE)
    modules, gradient = run_python(script).splitlines()
    return set(modules.split()), gradient.split()


@pytest.mark.parametrize("unwanted", [HEAVY, LATER], ids=["heavy", "later"])
def test_import_loads_only_what_it_needs(first_use, unwanted: list[str]):
    loaded, _ = first_use
    assert "pallasite" in loaded
    found = {
        module
        for module in loaded
        for name in unwanted
        if module == name or module.startswith(name + ".")
    }
    assert not found


def test_first_use_may_be_a_derivative(first_use):
    _, gradient = first_use
    assert gradient == ["2.0"] * 8
