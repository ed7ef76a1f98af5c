"""Forms: kernels spelled as their various authors would, each with its meaning."""

import importlib

from .form import Form as Form

FAMILIES = ("attention", "matmul", "rows", "others")
_THIRD = ("training", "serving", "scans", "pipelines", "science", "vision")
# Written without a look at the forms above, and by these no pass is tuned: they say
# what the next user's kernel costs.
HELD_OUT = tuple(
    f"held-out {name}"
    for name in (*FAMILIES, "second", *(f"third {name}" for name in _THIRD))
)


def all_forms(held_out: bool = False) -> list[Form]:
    """Every form of every family, in a fixed order; those held out if asked for."""
    found: list[Form] = []
    for name in FAMILIES + HELD_OUT * held_out:
        module = name.replace("held-out", "heldout").replace(" ", "_")
        found += importlib.import_module(f"tests.forms.{module}").family.forms
    return found
