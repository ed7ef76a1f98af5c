"""Outlines loops of a function with many; loops with the same code share a function.

Several LLVM passes take time quadratic in the number of a function's loops (each loop
asks what the exits of all previous loops imply). A function with more than `MANY`
therefore keeps the code between its loops, and calls the loops. Values a loop uses from
outside become parameters, including addresses of temporary memory, so that uses of one
op on tiles of one shape are usually calls of one function.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pallasite.backends.cpu.llvm.debug_info import without_marks
from pallasite.backends.cpu.llvm.writer import Function, Span, Val

MANY = 50  # loops in a function; with fewer it stays whole
PIECE = 400  # lines; a longer loop is outlined only if it has no loops inside

_NAME = re.compile(r"%[\w.]+")
_DEFINED = re.compile(r"^  (%[\w.]+) = ", re.MULTILINE)
_LABEL = re.compile(r"^([\w.]+):", re.MULTILINE)
_EITHER = re.compile(r"%[\w.]+|^[\w.]+:", re.MULTILINE)
_STAYS = re.compile(r"^  ret |alloca ", re.MULTILINE)


def cut_at_loops(f: Function) -> None:
    """Move the loops of a function that has many to functions of their own."""
    if len(f.loops) <= MANY:
        return
    places = _places(f)
    lines: list[str] = []
    done = 0
    for span in _chosen(f.loops):
        piece = _piece(f, span, places)
        if piece is not None:
            lines += [*f.lines[done : span.start], *_call(f, span, piece)]
            done = span.end
    f.lines = [*lines, *f.lines[done:]]


@dataclass(frozen=True)
class Piece:
    """An outlined loop: its lines, its live-in and its live-out values."""

    text: str
    uses: list[Val]
    makes: list[Val]


def _chosen(loops: Sequence[Span]) -> Iterator[Span]:
    """The outermost loops that are short or innermost, in order."""
    ordered = sorted(loops, key=lambda span: (span.start, -span.end))
    end = 0
    for span, following in zip(ordered, [*ordered[1:], None], strict=True):
        if span.start < end:
            continue
        has_loops = following is not None and following.start < span.end
        if span.end - span.start <= PIECE or not has_loops:
            end = span.end
            yield span


def _places(f: Function) -> dict[str, tuple[int, int]]:
    """The first and the last line in which each name occurs."""
    places: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(f.lines):
        for name in _NAME.findall(line):
            first, _ = places.get(name, (number, number))
            places[name] = first, number
    return places


def _piece(f: Function, span: Span, places: dict[str, tuple[int, int]]) -> Piece | None:
    """The loop, or None if it has an exit of its own or uses the stack."""
    text = "\n".join(f.lines[span.start : span.end])
    names = dict.fromkeys(_NAME.findall(text))
    labels = {f"%{label}" for label in _LABEL.findall(text)}
    labels |= {f"%{span.before}", f"%{span.after}"}
    if _STAYS.search(text) or any(n not in f.types and n not in labels for n in names):
        return None
    defined = _DEFINED.findall(text)
    inside = range(span.start, span.end)
    known = set(defined)
    uses = [n for n in names if n in f.types and n not in known]
    makes = [n for n in defined if not all(line in inside for line in places[n])]
    values = lambda found: [Val(f.types[n], n) for n in found]
    return Piece(text, values(uses), values(makes))


def _call(f: Function, span: Span, piece: Piece) -> list[str]:
    """Lines that replace a loop."""
    types = [value.type for value in piece.makes]
    returns = "".join(types) or "void"
    if len(types) > 1:
        returns = f"{{ {', '.join(types)} }}"
    name = _function(f, span, piece, returns)
    call = f"call {returns} @{name}({', '.join(map(str, piece.uses))})"
    leave = f"  br label %{span.after}"
    if not piece.makes:
        return [f"  {call}", leave]
    if len(piece.makes) == 1:
        return [f"  {piece.makes[0].text} = {call}", leave]
    whole = f"%made.{span.start}"
    parts = [
        f"  {value.text} = extractvalue {returns} {whole}, {n}"
        for n, value in enumerate(piece.makes)
    ]
    return [f"  {whole} = {call}", *parts, leave]


def _function(f: Function, span: Span, piece: Piece, returns: str) -> str:
    """The name of a function with this code, with names numbered by occurrence."""
    numbers: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        name = found[0]
        if name[0] == "%":
            return "%" + numbers.setdefault(name[1:], f"n{len(numbers)}")
        return numbers.setdefault(name[:-1], f"n{len(numbers)}") + ":"

    lines = [f"{span.before}:", piece.text, f"{span.after}:", *_leave(piece, returns)]
    text = _EITHER.sub(renamed, "\n".join(lines))
    params = [(value.type, numbers[value.text[1:]]) for value in piece.uses]
    code = without_marks(text)
    name = f.module.name_of((code, returns, tuple(params)), "loop")
    if not f.module.defines(name):
        made = Function(f.module, name, params, returns, "internal", "noinline")
        made.lines = [text]
    return name


def _leave(piece: Piece, returns: str) -> Iterator[str]:
    if len(piece.makes) <= 1:
        yield f"  ret {piece.makes[0] if piece.makes else 'void'}"
        return
    whole = f"{returns} poison"
    for n, value in enumerate(piece.makes):
        yield f"  %whole.{n} = insertvalue {whole}, {value}, {n}"
        whole = f"{returns} %whole.{n}"
    yield f"  ret {whole}"
