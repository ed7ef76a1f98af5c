"""Names of upstream Pallas that Pallasite does not have: an error when used.

A module that re-exports a namespace ends with `__getattr__ = missing.names(...)`, so
that importing a missing name works and using it raises an error with the replacement.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from pallasite.errors import Facts, UnsupportedError


class Missing:
    """Placeholder for a name that does not exist here; any use but in a type raises.

    `decorates`: the name makes decorators of functions, which are often applied where
    a module is imported. There it is the decorated function whose use raises.
    """

    def __init__(self, module: str, name: str, hint: str, decorates: bool = False):
        self.__dict__.update(
            _module=module, _name=name, _hint=hint, _decorates=decorates
        )

    def _refuse(self, facts: Facts = (), at: Any = None) -> NoReturn:
        raise UnsupportedError(
            f"{self._module}.{self._name} is not supported by Pallasite",
            facts,
            at,
            self._hint,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._decorates:
            self._refuse()
        return self._decorate

    def _decorate(self, fn: Any) -> Callable[..., NoReturn]:
        code = getattr(fn, "__code__", None)
        if code is None:
            self._refuse()

        @functools.wraps(fn)
        def unusable(*args: Any, **kwargs: Any) -> NoReturn:
            where = f"{code.co_filename}:{code.co_firstlineno}"
            self._refuse([("function", fn.__name__)], where)

        return unusable

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    # Python asks the class for these, so `__getattr__` does not see them; without
    # `__iter__` it would iterate over `__getitem__` forever.
    def _protocol(self, *args: Any) -> NoReturn:
        self._refuse()

    __iter__ = __next__ = __reversed__ = __len__ = __contains__ = _protocol
    __setitem__ = __delitem__ = __bool__ = __index__ = _protocol
    __enter__ = __exit__ = _protocol

    # Annotations and `isinstance` are not uses: nothing has a type that is missing.
    def __or__(self, other: Any) -> "Missing":
        return self

    __ror__ = __or__

    def __getitem__(self, item: Any) -> "Missing":
        parameters = item if isinstance(item, tuple) else (item,)
        if not all(callable(p) or isinstance(p, TypeVar) for p in parameters):
            self._refuse()
        return self

    def __instancecheck__(self, value: Any) -> bool:
        return False

    def __subclasscheck__(self, value: Any) -> bool:
        return False

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """What a class derives from instead: a class that has no objects."""
        return (type(self._name, (), {"__new__": lambda cls, *a, **k: self._refuse()}),)

    def __repr__(self) -> str:
        return f"<missing {self._module}.{self._name}>"


# By module: the names that it refuses, and what to do instead.
REFUSED: dict[str, Mapping[str, str]] = {}


def names(
    module: str, known: Mapping[str, str], decorators: Collection[str] = ()
) -> Callable[[str], Any]:
    """A module `__getattr__`: placeholders for `known` (name -> what to do instead).

    `decorators`: those that make decorators of functions.
    """

    REFUSED[module] = known

    def getattr_(name: str) -> Any:
        if name in known:
            return Missing(module, name, known[name], name in decorators)
        where = _elsewhere(module, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{where}")

    return getattr_


def _elsewhere(module: str, name: str) -> str:
    """Names are often looked for in the wrong namespace, such as `pl.VMEM`."""
    if name[0] == "_" or importlib.util.find_spec(f"pallasite.{name}"):
        return ""  # a protocol's, or a module that is being imported
    for sibling in ("", ".tpu", ".triton", ".mosaic_gpu", ".kernels"):
        found = importlib.import_module(f"pallasite{sibling}")
        if found.__name__ != module and name in found.__dict__:
            return f": it is {found.__name__}.{name}"
    return ""


def hints(text: str, hint: str) -> dict[str, str]:
    """One hint for several names, given as words."""
    return dict.fromkeys(text.split(), hint)


def listed(module: str) -> Callable[[], list[str]]:
    """A module's `__dir__`: what authors use, without the package's own modules."""

    def names() -> list[str]:
        public = sys.modules[module].__dict__.items()
        own = [n for n, x in public if not isinstance(x, ModuleType) or n == "masks"]
        return sorted(n for n in own if n[0] != "_" or n[:2] == "__")

    return names
