"""Tables of tuned configurations: JSON files, exact and nearest lookup.

An entry says which configuration of which kernel is fast for which operands on which
chip, and how it was found. A table is read once per state of its file, so the same
contents are the same object: `choices.py` passes tables to JAX as part of its cache
keys.
"""

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pallasite import config
from pallasite.errors import KernelTypeError, PallasWarning, SpecError, warn
from pallasite.runtime import cache as cache_files
from pallasite.tune.locks import exclusive

FORMAT = 1
FARTHEST = 2.0  # largest factor between a size and the tuned one
SHIPPED = config.PACKAGE / "tune" / "tables"
USER_FILE = "configs.json"
SOURCE = "source"  # the option of a site that identifies an author's function

Config = dict[str, Any]


@dataclass(frozen=True)
class Site:
    """What is configured: a kernel, called with operands of given types.

    Attributes:
        kernel: its name.
        operands: dtype and shape of each array, as "bfloat16[8,128]".
        options: whatever else determines the kernel's code.
    """

    kernel: str
    operands: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options if name != SOURCE]
        return f"{self.kernel}({', '.join((*self.operands, *options))})"


@dataclass(frozen=True)
class Entry:
    """A configuration that was found, and how.

    Attributes:
        site: what it is for.
        chip: the chip's name.
        config: the values.
        seconds, default_seconds: times of the tuned function with this and with the
            default configuration (cycles for a chip that is not present).
        kernels: names of all kernels of that function.
        space: identifies the space searched.
        complete: whether the search ran to its end.
        versions: of the package and of JAX.
        found: when, in seconds since the epoch.
    """

    site: Site
    chip: str
    config: Config = field(hash=False)
    seconds: float = math.nan
    default_seconds: float = math.nan
    kernels: tuple[str, ...] = ()
    space: str = ""
    complete: bool = True
    versions: tuple[tuple[str, str], ...] = ()
    found: float = 0.0

    @property
    def key(self) -> tuple[Any, ...]:
        """The key under which a table holds one entry."""
        return self.site, self.chip, self.kernels, self.versions

    def to_json(self) -> dict[str, Any]:
        known = asdict(self)
        site = known.pop("site")
        site["options"] = dict(site["options"])
        return {**site, **known, "versions": dict(self.versions)}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> "Entry":
        row = dict(row)
        options = tuple(sorted(row.pop("options", {}).items()))
        site = Site(row.pop("kernel"), tuple(row.pop("operands")), options)
        kernels = tuple(row.pop("kernels", ()))
        versions = tuple(sorted(row.pop("versions", {}).items()))
        if not isinstance(row.get("config"), Mapping):
            raise ValueError(f"the config of {site.kernel} is {row.get('config')!r}")
        return Entry(site=site, kernels=kernels, versions=versions, **row)


class Table:
    """Entries, by kernel and chip. Equal only to itself (see the module)."""

    def __init__(self, entries: Iterable[Entry] = (), place: str = "pl.configs"):
        self.entries, self.place = tuple(entries), place
        self._by_kernel: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            key = entry.site.kernel, entry.chip
            self._by_kernel.setdefault(key, []).append(entry)

    def of(self, kernel: str, chip: str) -> list[Entry]:
        return self._by_kernel.get((kernel, chip), [])

    def with_entry(self, entry: Entry) -> "Table":
        """This table with one more entry, which replaces any with the same key."""
        rest = [each for each in self.entries if each.key != entry.key]
        return Table([*rest, entry])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: readers see the old or the new contents."""
        target = Path(path)
        rows = [entry.to_json() for entry in self.entries]
        text = json.dumps({"format": FORMAT, "configs": rows}, indent=1)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix="configs-")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text + "\n")
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def load(path: str | os.PathLike[str]) -> Table:
    """The table in a file.

    Raises:
        SpecError: there is no such file, or it is not a table.
    """
    if not isinstance(path, str | os.PathLike):
        raise KernelTypeError(
            "pl.configs takes the path of a file, or a table",
            [("is of type", type(path).__name__)],
            fix="pass what Tuned.save(file) wrote, or tuned.table",
        )
    target = Path(path)
    try:
        state = target.stat()
    except OSError as error:
        raise SpecError(
            "configuration file not found",
            [("file", target), ("error", error)],
            fix="create one: pallasite tune --output FILE, or Tuned.save(FILE)",
        ) from None
    return _load(target.resolve(), state.st_mtime_ns, state.st_size)


@cache
def _load(path: Path, modified: int, size: int) -> Table:
    del modified, size  # only part of the cache key
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            stated = found.get("format") if isinstance(found, dict) else None
            raise ValueError(f"format {stated}, not {FORMAT}")
        return Table(map(Entry.from_json, found["configs"]), str(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(
            "cannot read configuration file",
            [("file", path), ("error", error)],
            fix="delete it, or write it again with pallasite tune",
        ) from None


def user_path() -> Path | None:
    """The user's own file; None if nothing is kept on disk."""
    place = cache_files.folder()
    return place / USER_FILE if place else None


def user_table() -> Table:
    """What was tuned here; empty if there is nothing readable."""
    path = user_path()
    if path is None or not path.exists():
        return EMPTY
    try:
        return load(path)
    except SpecError:
        return EMPTY


def keep(entry: Entry) -> None:
    """Add an entry to the user's file, if one may be kept.

    Failure to write it is only a warning, as the caller can still use the entry. A file
    that cannot be read (a newer package may have written it) is moved aside.
    """
    path = user_path()
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with exclusive(path.with_suffix(".lock")):
            _put_aside_unreadable(path)
            user_table().with_entry(entry).save(path)
    except OSError as error:
        warn(
            f"tuning results are not stored: {path} cannot be written ({error}). Set "
            "PALLASITE_CACHE_DIR to another directory, or save() them yourself.",
            PallasWarning,
        )


def forget(kernel: str | None = None) -> int:
    """Remove what was tuned here, of one kernel or of all; the number of entries."""
    path, known = user_path(), user_table().entries
    rest = [e for e in known if kernel is not None and e.site.kernel != kernel]
    if path is not None and len(rest) < len(known):
        with exclusive(path.with_suffix(".lock")):
            Table(rest).save(path)
    return len(known) - len(rest)


def _put_aside_unreadable(path: Path) -> None:
    if not path.exists():
        return
    try:
        load(path)
    except SpecError as error:
        aside = path.with_name(f"{path.name}.unreadable")
        os.replace(path, aside)
        warn(f"{error}\nIt is now {aside}.", PallasWarning)


@cache
def shipped() -> Table:
    """The tables shipped with the package, as one."""
    files = sorted(SHIPPED.glob("*.json"))
    entries = (entry for file in files for entry in load(file).entries)
    return Table(entries, "the tables that come with Pallasite")


EMPTY = Table()


def best_entry(
    tables: Iterable[Table], site: Site, chip: str, versions: tuple
) -> tuple[Entry, Table] | None:
    """The entry to use for a call, and its table: for its exact shapes, else for the
    nearest ones within `FARTHEST`, if any.

    Of equally near entries the first table's wins; within a table, that of these
    versions, then the last one found.
    """
    found: list[tuple[Any, tuple[Entry, Table]]] = []
    for number, table in enumerate(tables):
        for entry in table.of(site.kernel, chip):
            far = distance(site, entry.site)
            if far is None:
                continue
            other = entry.versions != versions
            order = (far > 0, number if not far else 0, far, number, other)
            found.append(((*order, -entry.found), (entry, table)))
    return min(found, key=lambda pair: pair[0], default=(None, None))[1]


def distance(a: Site, b: Site) -> float | None:
    """The distance between shapes: the halvings and doublings of all sizes.

    None for other dtypes, ranks or options, or if too far. What is best for four
    sequences says nothing about sixty-four: a split that just fills a chip in one case
    makes too many programs in the other. So no size may differ by more than a factor of
    `FARTHEST`.
    """
    if a.options != b.options or len(a.operands) != len(b.operands):
        return None
    total = 0.0
    for one, other in zip(a.operands, b.operands, strict=True):
        (dtype, shape), (other_dtype, other_shape) = _parts(one), _parts(other)
        if dtype != other_dtype or len(shape) != len(other_shape):
            return None
        for n, m in zip(shape, other_shape, strict=True):
            if max(n, m) > FARTHEST * min(n, m):
                return None
            total += abs(math.log2(n / m)) if n else 0.0
    return total


@cache
def _parts(operand: str) -> tuple[str, tuple[int, ...]]:
    """ "f32[2,3]" as its dtype and shape."""
    dtype, sizes = re.fullmatch(r"(\w+)\[([\d,]*)\]", operand).groups()  # pyright: ignore
    return dtype, tuple(int(n) for n in sizes.split(",") if n)
