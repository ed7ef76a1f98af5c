"""The author's own CUDA C++ (`plgpu.inline_cuda`): a function of one element each.

A `#line` directive before the text lets the compiler say which of its lines it rejects,
and `rejected` finds that in its log.
"""

import re
from collections.abc import Sequence

from pallasite.backends.cuda.ampere import Ampere
from pallasite.backends.cuda.core import Tile
from pallasite.errors import CompileError
from pallasite.ir.nodes import Kernel, Loc, Op, Value
from pallasite.ir.rewrite import Rewriter, map_ops

PLACE = "inline_cuda at "
_ERROR = re.compile(rf"{PLACE}(.+):(\d+)\((\d+)\): (?:catastrophic )?error: (.*)")


def without_references(kernel: Kernel) -> Kernel:
    """The author's texts without what runs in their place elsewhere."""

    def change(op: Op, b: Rewriter) -> Sequence[Value] | None:
        if op.name != "inline_cuda" or not op.regions:
            return None
        b.ops.append(op.with_(regions=()))
        return op.results

    return map_ops(kernel, change)


class AuthorText(Ampere):
    """Emits `inline_cuda`."""

    def emit_inline_cuda(self, op: Op) -> None:
        shapes = [v.tile.shape for v in (*op.operands, *op.results)]
        tiles = [v for v in (*op.operands, *op.results) if v.tile.shape]
        spread = self.spread(tiles[0], op) if any(shapes) else None
        given = [self.get(v, spread if v.tile.shape else None, op) for v in op.operands]
        made = [self.type(v.tile.dtype, op) for v in op.results]
        raw = [self.out.fresh("r") for _ in op.results]
        count = 1 if spread is None else spread.registers
        for kind, name in zip(made, raw, strict=True):
            self.out.line(f"{kind} {name}" + (f"[{count}];" if spread else ";"))
        at = "[i]" if spread else ""
        arguments = [*(x.held() for x in given), *(f"{name}{at}" for name in raw)]
        call = f"{self.author_function(op)}({', '.join(arguments)});"
        self.out.line(f"EACH({count}) {call}" if spread else call)
        for value, name in zip(op.results, raw, strict=True):
            if spread is None:
                self.env[value] = Tile(name, value.tile.dtype)
                continue
            self.env[value] = self.declare(value.tile.dtype, spread, op)
            self.put(self.env[value], lambda i, name=name: f"{name}[{i}]")

    def author_function(self, op: Op) -> str:
        """A function with the text, by its name."""
        kinds = [self.type(v.tile.dtype, op) for v in (*op.operands, *op.results)]
        names, first = op.attrs["symbols"], len(op.operands)
        params = [
            f"const {kind} {name}" if n < first else f"{kind}& {name}"
            for n, (kind, name) in enumerate(zip(kinds, names, strict=True))
        ]
        where = op.loc or Loc("?", 0)
        place = f"{PLACE}{where.file}:{where.line}".replace("\\", "/")
        body = (
            f"({', '.join(params)}) {{\n"
            f'#line 1 "{place}"\n{op.attrs["text"]}\n#line 1 "generated"\n}}\n'
        )
        known = {text: name for name, text in self.instructions.items()}
        name = known.get(body, f"author_text_{len(self.instructions)}")
        self.instructions[name] = f"DEVICE void {name}{body}"
        return name


def rejected(text: str, log: str) -> CompileError | None:
    """The error for an author's text that the compiler rejects, from its log."""
    found = _ERROR.search(log)
    if found is None:
        return None
    file, line, number, why = found.groups()
    after = text[text.index(f'#line 1 "{PLACE}{file}:{line}"') :].splitlines()
    return CompileError(
        "NVRTC rejected the text of plgpu.inline_cuda",
        [(f"line {number}", after[int(number)]), ("why", why)],
        Loc(file, int(line)),
        "the text is statements of CUDA C++; NVRTC has no headers to #include",
    )


RULES = {"inline_cuda": AuthorText.emit_inline_cuda}
