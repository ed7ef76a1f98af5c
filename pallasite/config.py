"""Typed knobs, each with an environment variable, a default and a description.

`config.get("verify")` reads one; `config.override(verify=True)` sets some for a block.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

VERSION = "0.2.0.dev0"  # the only place: pyproject.toml reads it, too
PACKAGE = Path(__file__).resolve().parent  # the package's source folder


@dataclass(frozen=True)
class Knob:
    """One setting."""

    name: str
    env: str
    parse: Callable[[str], Any]
    default: Any
    doc: str


def _flag(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


KNOBS: dict[str, Knob] = {
    k.name: k
    for k in (
        Knob(
            "verify", "PALLASITE_VERIFY", _flag, False, "verify the IR after each pass"
        ),
        Knob(
            "dump", "PALLASITE_DUMP", str, "", "directory for the text of every stage"
        ),
        Knob(
            "target",
            "PALLASITE_TARGET",
            str,
            "",
            "chip to compile for (v5e, h200, ...); default: the one JAX sees",
        ),
        Knob(
            "backend",
            "PALLASITE_BACKEND",
            str,
            "",
            "backend of calls that name none, on platforms where it runs ('interpret': "
            "the emulation, everywhere)",
        ),
        Knob(
            "interpret",
            "PALLASITE_INTERPRET",
            str,
            "",
            "'1' emulates every call, 'checked' runs every call in checked mode",
        ),
        Knob(
            "debug_checks",
            "PALLASITE_DEBUG_CHECKS",
            _flag,
            True,
            "whether pl.debug_check checks anything",
        ),
        Knob(
            "poison_buffers",
            "PALLASITE_POISON_BUFFERS",
            _flag,
            False,
            "whether memory of pl.run_scoped begins with NaNs",
        ),
        Knob(
            "libtpu_python",
            "PALLASITE_LIBTPU_PYTHON",
            str,
            "",
            "Python interpreter that has libtpu, for compiling for TPUs if this one "
            "has none",
        ),
        Knob(
            "cache_dir",
            "PALLASITE_CACHE_DIR",
            str,
            "",
            "cache directory for compiled code ('off': none; default: in the user's "
            "cache)",
        ),
        Knob(
            "cache_bytes",
            "PALLASITE_CACHE_BYTES",
            int,
            256 << 20,
            "size limit of the cache of compiled code; 0 disables it",
        ),
    )
}
_overrides: ContextVar[dict[str, Any] | None] = ContextVar(
    "pallasite_config", default=None
)


# The same as part of the key of JAX's caches: another value traces again.
_in_cache_keys = jax.make_user_context(())


_kept: dict[str, Any] = {}


def get(name: str) -> Any:
    """The value of a knob: override, else the value set by `keep`, else environment,
    else default."""
    knob, overrides = KNOBS[name], _overrides.get() or {}
    for values in (overrides, _kept):
        if name in values:
            return values[name]
    text = os.environ.get(knob.env)
    return knob.default if text is None else knob.parse(text)


def keep(name: str, value: Any) -> None:
    """Set a knob for the rest of the process; None undoes that."""
    assert name in KNOBS
    _kept.pop(name, None)
    if value is not None:
        _kept[name] = value


@contextlib.contextmanager
def override(**values: Any) -> Iterator[None]:
    """Set knobs for the duration of a `with` block (this thread or task only).

    Functions that are called in the block are traced for it.
    """
    unknown = values.keys() - KNOBS.keys()
    if unknown:
        raise ValueError(f"unknown knobs {sorted(unknown)}; known: {sorted(KNOBS)}")
    values = {**(_overrides.get() or {}), **values}
    token = _overrides.set(values)
    try:
        with _in_cache_keys(tuple(sorted(values.items()))):
            yield
    finally:
        _overrides.reset(token)
