"""What other packages add to this one: their entry points, loaded on first use.

A distribution that declares an entry point in the group `pallasite.backends` adds a
backend (`backends/base.py`), and one in `pallasite.chips` a chip (`target/chip.py`).
"""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pallasite.errors import SpecError

BACKENDS = "pallasite.backends"
CHIPS = "pallasite.chips"


@cache
def declared(group: str, own: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name.

    Args:
        group: one of this module's names.
        own: names that belong to this package.

    Raises:
        SpecError: a name is taken.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.get(entry.name)
        # An editable installation may be listed twice.
        if entry.name in own or (other and other.value != entry.value):
            package = entry.dist.name if entry.dist else entry.value
            raise SpecError(
                f"the name {entry.name!r} in the entry points {group!r} is taken",
                [("package", package), ("object", entry.value)],
                fix=f"rename it in {package}, or uninstall {package}",
            )
        found[entry.name] = entry
    return found


def loaded(
    entry: EntryPoint, kind: type | None = None, members: Iterable[str] = ()
) -> Any:
    """The object that an entry point names.

    Raises:
        SpecError: it cannot be imported, is not of `kind`, or lacks one of `members`.
    """
    where = [("entry point", f"{entry.name} = {entry.value}"), ("group", entry.group)]
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"an entry point of another package cannot be loaded: {error}",
            where,
            fix="reinstall or uninstall the package that declares it",
        ) from error
    if kind is not None and not isinstance(found, kind):
        raise SpecError(
            f"an entry point names a {type(found).__name__}, not a {kind.__name__}",
            where,
            fix=f"name a {kind.__name__} in the package that declares it",
        )
    lacking = [name for name in members if not hasattr(found, name)]
    if lacking:
        raise SpecError(
            f"an entry point names an object without {', '.join(lacking)}",
            where,
            fix="update the package that declares it",
        )
    return found
