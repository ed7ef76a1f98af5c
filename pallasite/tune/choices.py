"""What a kernel asks while it is traced: which configuration to take.

`choose` is the one question. Tables that a `with pl.configs(...)` names come first,
then the user's own, then the ones shipped; a table is part of the key of JAX's caches,
so that a jitted function is traced again with another one. The tuner tries a
configuration by the same means, and finds what there is to tune by `recorded`.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from pallasite import config, target
from pallasite.primitive import chip_for
from pallasite.tune import table as tables
from pallasite.tune.space import Space
from pallasite.tune.table import Config, Entry, Site, Table

_active = jax.make_user_context(())  # tables, innermost first


@dataclass(frozen=True)
class Question:
    """One call of `choose`: what is configured, and with which values it can be."""

    site: Site
    default: Config
    space: Space


_recording: ContextVar[list[Question] | None] = ContextVar("recording", default=None)


def choose(site: Site, default: Config, space: Space) -> Config:
    """The configuration of a call: tuned if there is one, else the default.

    While questions are recorded it is the default: what is to be tuned must not depend
    on what was tuned before.
    """
    questions = _recording.get()
    if questions is not None:
        questions.append(Question(site, default, space))
        return dict(default)
    sources = (*_active.value, tables.user_table(), tables.shipped())
    sources = [each for each in sources if each.entries]
    answer = default
    if sources:
        entry = tables.best_entry(sources, site, chip_name(), versions())
        if entry is not None and _suits(entry, site, default, space):
            answer = entry.config
    return dict(answer)


def _suits(entry: Entry, site: Site, default: Config, space: Space) -> bool:
    """Whether an entry still names this kernel's parameters, with values it takes."""
    if entry.config.keys() != default.keys():
        return False
    return entry.site == site or entry.config in space.configs


@contextlib.contextmanager
def configs(source: Table | str | os.PathLike[str]) -> Iterator[Table]:
    """Take configurations from a table first, in a `with` block.

    Args:
        source: a file that `save` or `pallasite tune --output` wrote, or a table.

    Functions that JAX traces in the block take them; what was traced outside of it is
    traced again.
    """
    table = source if isinstance(source, Table) else tables.load(source)
    with _active((table, *_active.value)):
        yield table


@contextlib.contextmanager
def recorded() -> Iterator[list[Question]]:
    """Collects every question asked in the block, of cached functions too."""
    questions: list[Question] = []
    token = _recording.set(questions)
    try:
        with configs(Table()):  # a table of its own: nothing is traced already
            yield questions
    finally:
        _recording.reset(token)


def describe(x: Any) -> str:
    """An array as a site names it: "float32[8,128]"."""
    return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def site_of(kernel: str, operands: Sequence[Any], options: Mapping[str, Any]) -> Site:
    """The site of a call; operands that are None are left out."""
    arrays = tuple(describe(x) for x in operands if x is not None)
    named = sorted((name, str(value)) for name, value in options.items())
    return Site(kernel, arrays, tuple(named))


def chip_name() -> str:
    """The chip that calls traced now are for, as tables name it."""
    chip = chip_for(None)
    if isinstance(chip, target.Host):
        return f"{chip.architecture}-{8 * chip.vector_bytes}x{chip.threads}"
    return chip.name


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """Of JAX and of this package, which need not be installed."""
    return ("jax", jax.__version__), ("pallasite", config.VERSION)
