"""Source lines of LLVM code as debug metadata, which the assembly then also has.

While code is emitted, a line ends in a mark with the number of its origin. At the end,
marks become `!dbg` where the origin is unique: a function called by ops of several
source lines has none. Only texts for reading have any of this.
"""

import re
from collections.abc import Sequence

from pallasite.ir.nodes import Loc

_MARK = re.compile(r" ;@(\d+)$", re.MULTILINE)
_CALL = re.compile(r"\bcall\b.*?@([\w.]+)\(")
_NAME = re.compile(r"^define .*?@([\w.]+)\(")


def mark(origin: int) -> str:
    return f" ;@{origin}"


def without_marks(text: str) -> str:
    return _MARK.sub("", text)


class Origins:
    """Numbers of source lines, and the metadata that describes them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._metadata: dict[str, int] = {}

    def number(self, loc: Loc) -> int:
        """From 1."""
        at = (loc.file, loc.line)
        return self._numbers.setdefault(at, len(self._numbers) + 1)

    def as_debug_info(self, functions: Sequence[str]) -> list[str]:
        """The functions with `!dbg` instead of marks, and the metadata after them."""
        if not self._numbers:
            return [without_marks(text) for text in functions]
        shared = _called_from_several(functions)
        found = []
        for text in functions:
            name = _name(text)
            text = without_marks(text) if name in shared else text
            found.append(self._described(text, name))
        return [*found, self._text()]

    def _described(self, text: str, name: str) -> str:
        """One function. Each gets a location even without lines of its own: otherwise
        those of inlined code would be lost. So must calls, if only "line 0"."""
        places = {number: at for at, number in self._numbers.items()}
        marks = _MARK.findall(text)
        file, line = places[int(marks[0]) if marks else 1]
        scope = self._subprogram(name, file, line)
        head, *lines = text.splitlines()
        described = [f"{head.removesuffix('{')}!dbg !{scope} {{"]
        for line in lines:
            found = _MARK.search(line)
            if found is not None:
                place = self._place(scope, file, *places[int(found[1])])
                line = f"{line[: found.start()]}, !dbg !{place}"
            elif _CALL.search(line) or " call " in line:
                line = f"{line}, !dbg !{self._place(scope, file, file, 0)}"
            described.append(line)
        return "\n".join(described)

    # --- nodes, each written once ---

    def _node(self, text: str) -> int:
        return self._metadata.setdefault(text, len(self._metadata))

    def _file(self, file: str) -> int:
        quoted = file.replace("\\", "\\5C").replace('"', "\\22")
        return self._node(f'!DIFile(filename: "{quoted}", directory: "")')

    def _subprogram(self, name: str, file: str, line: int) -> int:
        number = self._file(file)
        unit = self._node(
            f"distinct !DICompileUnit(language: DW_LANG_C99, file: !{number}, "
            'producer: "pallasite", isOptimized: true, runtimeVersion: 0, '
            "emissionKind: LineTablesOnly)"
        )
        kind = self._node(f"!DISubroutineType(types: !{self._node('!{}')})")
        return self._node(
            f'distinct !DISubprogram(name: "{name}", scope: !{number}, '
            f"file: !{number}, line: {line}, type: !{kind}, unit: !{unit}, "
            "spFlags: DISPFlagDefinition | DISPFlagOptimized)"
        )

    def _place(self, scope: int, own_file: str, file: str, line: int) -> int:
        if file != own_file:
            number = self._file(file)
            scope = self._node(
                f"!DILexicalBlockFile(scope: !{scope}, file: !{number}, "
                "discriminator: 0)"
            )
        return self._node(f"!DILocation(line: {line}, scope: !{scope})")

    def _text(self) -> str:
        units = [n for text, n in self._metadata.items() if "!DICompileUnit" in text]
        flags = [
            self._node('!{i32 2, !"Debug Info Version", i32 3}'),
            self._node('!{i32 2, !"Dwarf Version", i32 4}'),
        ]
        lines = [f"!{number} = {text}" for text, number in self._metadata.items()]
        named = lambda numbers: ", ".join(f"!{n}" for n in numbers)
        return "\n".join(
            [
                f"!llvm.dbg.cu = !{{{named(units)}}}",
                f"!llvm.module.flags = !{{{named(flags)}}}",
                *lines,
            ]
        )


def _name(function: str) -> str:
    found = _NAME.match(function)
    assert found is not None, function[:80]
    return found[1]


def _called_from_several(functions: Sequence[str]) -> set[str]:
    """Functions of the module that code of more than one origin calls."""
    origins: dict[str, set[str]] = {}
    for text in functions:
        for line in text.splitlines():
            call = _CALL.search(line)
            if call is not None:
                found = _MARK.search(line)
                origins.setdefault(call[1], set()).add(found[1] if found else "")
    return {name for name, known in origins.items() if len(known) > 1}
