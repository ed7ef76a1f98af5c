"""Forms: kernels spelled as their various authors would, each with its meaning."""

import importlib

from .form import Form as Form

FAMILIES = ("attention", "matmul", "rows", "others")


def all_forms() -> list[Form]:
    """Every form of every family, in a fixed order."""
    found: list[Form] = []
    for name in FAMILIES:
        found += importlib.import_module(f"tests.forms.{name}").family.forms
    return found
