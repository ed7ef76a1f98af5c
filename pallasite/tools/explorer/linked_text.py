"""Texts of stages as lines, each with the source line it comes from.

Every stage records it in its own way: our IR and Mosaic by `loc(...)`, a jaxpr, TTIR
and CUDA C++ by comments, LLVM by debug metadata, PTX and assembly by `.loc`. These
annotations are not shown. A stage without any is shown without links.
"""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pallasite.language.trace import shorten

At = tuple[str, int]  # a file and a line of it
Line = tuple[str, At | None]

MOST_CHARACTERS = 1_000_000  # shown of one stage

_IR = re.compile(r' loc\("((?:[^"\\]|\\.)*)":(\d+)(?::\d+)?(?: in "[^"]*")?\)')
_COMMENT = re.compile(r"\s*(?:#|//) (?:(\S.*?):(\d+)(?::\d+)?(?: \(.*\))?)?$")
_DEBUG = re.compile(r",? !dbg !(\d+)")
_METADATA = re.compile(r"^!(\d+) = (?:distinct )?!(\w+)\((.*)\)$")
_FIELD = re.compile(r'(\w+): (?:"((?:[^"\\]|\\.)*)"|!?([\w.]+))')
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"')
_FILES = re.compile(_FILE.pattern, re.MULTILINE).finditer
_SECTION = re.compile(r"\s*\.(section|text|data)\b")
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)(?:.*inlined_at (\d+) (\d+))?")
# What says how to store and unwind code, not what runs; constants are kept.
_DIRECTIVE = re.compile(
    r"\s*\.(cfi_\w+|p2align|section|type|size|globl|hidden|text|ident|addrsig\w*)\b"
)
_NOT_SOURCES = ("generated", "kernel.cu", "")


@dataclass(frozen=True)
class LinkedText:
    """One stage: its lines with their origins; `note` says what is missing."""

    name: str
    lines: tuple[Line, ...]
    note: str = ""

    @property
    def is_linked(self) -> bool:
        return any(at is not None for _, at in self.lines)


def linked(name: str, text: str) -> LinkedText:
    """A stage's text with the origins that it records."""
    read = _READERS.get(name.split(".")[0], _ir)
    lines = list(read(text))
    note, shown, size = "", len(lines), 0
    for number, (line, _) in enumerate(lines):
        size += len(line) + 1
        if size > MOST_CHARACTERS:
            shown = number
            note = f"the first {shown:,} of {len(lines):,} lines"
            break
    found = LinkedText(name, tuple(lines[:shown]), note)
    if not found.is_linked:
        missing = "this text has no source locations"
        found = LinkedText(name, found.lines, "; ".join(filter(None, [missing, note])))
    return found


def _ir(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        found = _IR.search(line)
        yield _IR.sub("", line), _at(found[1], found[2]) if found else None


def _comments(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        found = _COMMENT.search(line)
        if found is None:
            yield line, None
        else:
            at = _at(found[1], found[2]) if found[1] else None
            yield line[: found.start()], at


def _llvm(text: str) -> Iterator[Line]:
    metadata: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        found = _METADATA.match(line)
        if found:
            fields = {m[1]: m[2] or m[3] for m in _FIELD.finditer(found[3])}
            metadata[found[1]] = fields

    def origin(number: str) -> At | None:
        place = metadata.get(number, {})
        scope = metadata.get(place.get("scope", ""), {})
        file = metadata.get(scope.get("file", ""), {}).get("filename")
        line = place.get("line", "0")
        return _at(file, line) if file and line != "0" else None

    for line in text.splitlines():
        if line.startswith("!"):
            continue
        found = _DEBUG.search(line)
        is_head = line.startswith("define")
        at = origin(found[1]) if found and not is_head else None
        yield _DEBUG.sub("", line), at


def _assembly(text: str) -> Iterator[Line]:
    """Instructions come from the `.loc` before them, until a label or another one."""
    # PTX names its files at the end.
    files = {m[1]: "/".join(filter(None, [m[2], m[3]])) for m in _FILES(text)}
    at: At | None = None
    is_debug = False
    for line in text.splitlines():
        if _SECTION.match(line):
            is_debug = ".debug" in line
        if is_debug:
            continue
        place = _LOC.match(line)
        if place:
            at = _origin(files, place)
        elif _FILE.match(line) or _DIRECTIVE.match(line):
            continue
        elif not line.lstrip().startswith((".Ltmp", "Ltmp", "$L__tmp")):
            is_code = line[:1].isspace() and not line.lstrip().startswith((".", "//"))
            yield line, at if is_code else None


def _origin(files: dict[str, str], place: re.Match[str]) -> At | None:
    """For inlined code, the line where it is inlined."""
    for file, line in ((place[1], place[2]), (place[3], place[4])):
        name = files.get(file, "") if file else ""
        if line != "0" and os.path.basename(name) not in _NOT_SOURCES:
            return _at(name, line)
    return None


def _plain(text: str) -> Iterator[Line]:
    for line in text.splitlines():
        yield line, None


def _at(file: str, line: str) -> At:
    return shorten(file.replace('\\"', '"').replace("\\\\", "\\")), int(line)


_READERS: dict[str, Callable[[str], Iterator[Line]]] = {
    "jaxpr": _comments,
    "ttir": _comments,
    "cuda": _comments,
    "llvm": _llvm,
    "asm": _assembly,
    "ptx": _assembly,
    "ptxas": _plain,
    "llo": _plain,
}
