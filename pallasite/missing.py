"""Names of upstream Pallas that Pallasite does not have: an error when used.

A module that re-exports a namespace ends with `__getattr__ = missing.names(...)`, so
that importing a missing name works and using it says what to do instead.
"""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pallasite.errors import UnsupportedError


class Missing:
    """Stands for a name that does not exist here; any use but in a type raises."""

    def __init__(self, module: str, name: str, hint: str):
        self.__dict__.update(_module=module, _name=name, _hint=hint)

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"{self._module}.{self._name} is not available in Pallasite",
            fix=self._hint,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    # Annotations and tests of types are not uses: nothing has a type that is not here.
    def __or__(self, other: Any) -> "Missing":
        return self

    __ror__ = __or__
    __getitem__ = __or__

    def __instancecheck__(self, value: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<missing {self._module}.{self._name}>"


def names(module: str, known: Mapping[str, str]) -> Callable[[str], Any]:
    """A module `__getattr__`: placeholders for `known` (name -> what to do instead)."""

    def getattr_(name: str) -> Any:
        if name in known:
            return Missing(module, name, known[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_


def hints(text: str, hint: str) -> dict[str, str]:
    """One hint for several names, given as words."""
    return dict.fromkeys(text.split(), hint)
