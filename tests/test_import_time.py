"""What keeps `import pallasite` fast: nothing heavy is loaded by it.

`benchmarks/import_time.py` measures the time itself.
"""

from collections.abc import Callable

import pytest

LISTING = "import sys; print('\\n'.join(sys.modules))"
HEAVY = [
    "jax.experimental.pallas",
    "jax._src.pallas",
    "jaxlib.mosaic",
    "jaxlib.triton",
    "libtpu",
    "llvmlite",
]


@pytest.fixture
def loaded_by_pallasite(run_python: Callable[..., str]) -> set[str]:
    """The modules that `import pallasite` loads and `import jax` alone does not."""
    pytest.importorskip("pallasite")
    jax = run_python("-c", f"import jax; {LISTING}").split()
    both = run_python("-c", f"import jax, pallasite; {LISTING}").split()
    return set(both) - set(jax)


def test_import_loads_nothing_heavy(loaded_by_pallasite: set[str]):
    assert "pallasite" in loaded_by_pallasite
    found = {
        module
        for module in loaded_by_pallasite
        for heavy in HEAVY
        if module == heavy or module.startswith(heavy + ".")
    }
    assert not found
