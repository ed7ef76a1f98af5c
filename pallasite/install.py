"""Run kernels written for upstream unmodified: `jax.experimental.pallas` is Pallasite.

`install()` puts a finder in front of Python's import system that resolves
`jax.experimental.pallas` and its submodules to this package's modules.
"""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence

from pallasite.errors import PallasError

UPSTREAM = "jax.experimental.pallas"
MODULES = {
    UPSTREAM: "pallasite",
    f"{UPSTREAM}.tpu": "pallasite.tpu",
    f"{UPSTREAM}.triton": "pallasite.triton",
    f"{UPSTREAM}.mosaic_gpu": "pallasite.mosaic_gpu",
    f"{UPSTREAM}.tpu_sc": "pallasite.tpu_sc",
    f"{UPSTREAM}.fuser": "pallasite.fuser",
}
# Kernels that JAX ships are user code to us: they are loaded as they are and, like any
# other kernel, get Pallasite where they import Pallas.
KERNELS = f"{UPSTREAM}.ops"


def _kernel_folders() -> list[str]:
    import jax.experimental

    return [os.path.join(folder, "pallas") for folder in jax.experimental.__path__]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Resolves upstream's module names to our modules."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target=None):
        if fullname in MODULES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname == KERNELS or fullname.startswith(KERNELS + "."):
            return importlib.machinery.PathFinder.find_spec(
                fullname, _kernel_folders() if fullname == KERNELS else path
            )
        if fullname.startswith(UPSTREAM + "."):
            raise ModuleNotFoundError(
                f"{fullname} is not part of Pallasite, which replaces {UPSTREAM} "
                f"here; available: {', '.join(n for n in MODULES if n != UPSTREAM)}",
                name=fullname,
            )
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(MODULES[spec.name])
        self._own_spec = module.__spec__, getattr(module, "__loader__", None)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system has just overwritten these with the alias's own.
        module.__spec__, module.__loader__ = self._own_spec
        module.__name__ = (
            self._own_spec[0].name if self._own_spec[0] else module.__name__
        )


_FINDER = _Finder()


def install() -> None:
    """Make `jax.experimental.pallas` mean Pallasite in this process.

    Call it before anything imports upstream Pallas.

    Raises:
        PallasError: if upstream Pallas has been imported already.
    """
    present = sys.modules.get(UPSTREAM)
    if present is not None and present is not sys.modules["pallasite"]:
        raise PallasError(
            f"{UPSTREAM} is already imported",
            [("module", getattr(present, "__file__", present))],
            fix="call pallasite.install() before the first import of it, or run "
            "the script with `python -m pallasite run script.py`",
        )
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    import jax.experimental

    for name in MODULES:
        sys.modules[name] = importlib.import_module(MODULES[name])
    jax.experimental.pallas = sys.modules["pallasite"]  # type: ignore[attr-defined]


def uninstall() -> None:
    """Undo `install()`; modules imported meanwhile keep what they have."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    import jax.experimental

    for name, ours in MODULES.items():
        if sys.modules.get(name) is sys.modules.get(ours):
            sys.modules.pop(name, None)
    if getattr(jax.experimental, "pallas", None) is sys.modules["pallasite"]:
        del jax.experimental.pallas  # type: ignore[attr-defined]
