"""Looks up a kernel's configuration at trace time.

`choose` is the only entry point. Tables of a `with pl.configs(...)` come first, then
the user's own, then the ones shipped. A table is part of the key of JAX's caches, so a
jitted function is retraced with another table. The tuner uses the same mechanism to try
a configuration, and `recorded` to find what there is to tune.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from pallasite import config, configured, target
from pallasite.placement import chip_for
from pallasite.tune import table as tables
from pallasite.tune.space import Space
from pallasite.tune.table import Config, Entry, Site, Table

_active = jax.make_user_context(())  # tables, innermost first


@dataclass(frozen=True)
class Question:
    """One call of `choose`: what is configured, and its possible values."""

    site: Site
    default: Config
    space: Space


_recording: ContextVar[list[Question] | None] = ContextVar("recording", default=None)


def choose(site: Site, default: Config, space: Space) -> Config:
    """The configuration of a call: tuned if there is one, else the default.

    While questions are recorded it is always the default: what is to be tuned must not
    depend on what was tuned before.
    """
    questions = _recording.get()
    if questions is not None:
        questions.append(Question(site, default, space))
        return dict(default)
    sources = (*_active.value, tables.user_table(), tables.shipped())
    sources = [each for each in sources if each.entries]
    found = None
    if sources:
        found = tables.best_entry(sources, site, chip_name(), versions())
    if found is not None and not _suits(found[0], site, default, space):
        found = None
    answer = default if found is None else found[0].config
    configured.tell(_in_words(site, answer, found))
    return dict(answer)


def _in_words(
    site: Site, config: Config, found: tuple[Entry, Table] | None
) -> configured.Configured:
    values = ", ".join(f"{name}={value}" for name, value in config.items())
    if found is None:
        text = f"{values}: the default, not tuned for these shapes on this chip"
        return configured.Configured(text)
    entry, table = found
    gain = entry.default_seconds / entry.seconds if entry.seconds else math.nan
    times = "" if math.isnan(gain) else f", {gain:.3g} times the default's speed"
    if entry.site == site:
        text = f"{values}: tuned for these shapes{times}, from {table.place}"
        return configured.Configured(text, tuned=True)
    near = ", ".join(entry.site.operands)
    return configured.Configured(f"{values}: tuned for {near}, from {table.place}")


def _suits(entry: Entry, site: Site, default: Config, space: Space) -> bool:
    """Whether an entry still has this kernel's parameters, with accepted values."""
    if entry.config.keys() != default.keys():
        return False
    return entry.site == site or entry.config in space.configs


@contextlib.contextmanager
def configs(source: Table | str | os.PathLike[str]) -> Iterator[Table]:
    """Look up configurations in this table first, in a `with` block.

    Functions traced in the block use them; functions traced outside are retraced.

    Args:
        source: a file written by `save` or `pallasite tune --output`, or a table.
    """
    table = source if isinstance(source, Table) else tables.load(source)
    with _active((table, *_active.value)):
        yield table


@contextlib.contextmanager
def recorded() -> Iterator[list[Question]]:
    """Collects every question asked in the block, even by cached functions."""
    questions: list[Question] = []
    token = _recording.set(questions)
    try:
        with configs(Table()):  # a new table, so that everything is retraced
            yield questions
    finally:
        _recording.reset(token)


def describe(x: Any) -> str:
    """An array as a site names it: "float32[8,128]"."""
    return f"{np.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def site_of(kernel: str, operands: Sequence[Any], options: Mapping[str, Any]) -> Site:
    """The site of a call; operands that are None are omitted."""
    arrays = tuple(describe(x) for x in operands if x is not None)
    named = sorted((name, str(value)) for name, value in options.items())
    return Site(kernel, arrays, tuple(named))


def chip_name() -> str:
    """The chip for which calls are currently traced, as tables name it."""
    chip = chip_for(None)
    if isinstance(chip, target.Host):
        return f"{chip.architecture}-{8 * chip.vector_bytes}x{chip.threads}"
    return chip.name


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """The versions of JAX and of this package, which need not be installed."""
    return ("jax", jax.__version__), ("pallasite", config.VERSION)
