"""Parses the printed form of a kernel back into nodes.

In: text as `text.py` prints it, with or without source lines and `//` comments. Out: a
Kernel, not yet verified (`verify.py`). The parser rejects what the grammar does not
allow, and a `%name` used before its definition or defined twice; all other checks are
the verifier's.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

from pallasite.errors import ParseError
from pallasite.ir.nodes import (
    At,
    Block,
    BlockDim,
    Gather,
    Index,
    Kernel,
    Loc,
    Op,
    Span,
    Value,
    Window,
)
from pallasite.ir.opdef import table
from pallasite.ir.types import DTYPES, DType, Layout, RefType, TileType, Type

_Item = TypeVar("_Item")

# One match per token, including the whitespace and comments before it.
_TOKEN = re.compile(
    r"""(?:[ \t\r\n]+|//[^\n]*)*
    (?:(?P<value>%\w+)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<number>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)|-inf\b)
    |(?P<loc>loc\("[^"\\\n]*":\d+(?:[ ]in[ ]"[^"\\\n]*")?\))
    |(?P<word>[A-Za-z_][\w.]*)
    |(?P<mark>[{}()\[\]<>,:=+@])
    |(?P<end>\Z)
    |(?P<unknown>.))""",
    re.VERBOSE | re.ASCII,
)
_LOC_PARTS = re.compile(r'"[^"]*"|(?<=:)\d+')
_NAMES: dict[str, Any] = {
    "True": True,
    "False": False,
    "None": None,
    "inf": float("inf"),
    "nan": float("nan"),
}


def parse_kernel(text: str) -> Kernel:
    """The kernel a text describes.

    Raises:
        ParseError: the text is not the printed form of a kernel; gives the line, what
            was found and what was expected.
    """
    parser = _Parser(text)
    kernel = parser.kernel()
    if parser.token.kind != "end":
        parser.expected("the end of the text")
    return kernel


class _Token(NamedTuple):
    kind: str  # a group name of _TOKEN
    text: str
    position: int


def _tokens(text: str) -> list[_Token]:
    """All tokens; the last appears twice, so that looking one ahead is safe."""
    found: list[_Token] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        assert kind is not None  # "unknown" at least
        if kind == "end":
            break
        found.append(_Token(kind, match[kind], match.start(kind)))
    end = _Token("end", "the end of the text", len(text))
    return [*found, end, end]


class _Parser:
    """Recursive-descent parser, with one method per production of the grammar."""

    def __init__(self, text: str):
        self.source = text
        self.tokens = _tokens(text)
        self.index = 0
        self.token = self.tokens[0]
        self.values: dict[str, Value] = {}
        self.locs: dict[str, Loc] = {}

    # --- tokens ---

    def take(self) -> _Token:
        token = self.token
        self.index += 1
        self.token = self.tokens[self.index]
        return token

    def peek(self) -> str:
        """The text of the token after the current one."""
        return self.tokens[self.index + 1].text

    def at(self, text: str) -> bool:
        """Whether the current token is `text`, a mark or a word of a unique kind."""
        return self.token.text == text

    def accept(self, text: str) -> bool:
        if self.token.text == text:
            self.index += 1
            self.token = self.tokens[self.index]
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.expected(f"'{text}'")

    def take_kind(self, kind: str, what: str) -> str:
        if self.token.kind != kind:
            self.expected(what)
        return self.take().text

    def expected(self, what: str) -> NoReturn:
        found = self.token.text
        self.fail("cannot parse this IR text", ("expected", what), ("found", found))

    def fail(self, what: str, *facts: tuple[str, str]) -> NoReturn:
        number = self.source.count("\n", 0, self.token.position) + 1
        lines = self.source.splitlines()
        line = lines[number - 1].strip() if number <= len(lines) else ""
        raise ParseError(what, [*facts, ("line", f"{number}: {line}")])

    def listed(self, item: Callable[[], _Item], close: str) -> list[_Item]:
        """Items separated by commas, up to and including the closing mark."""
        items: list[_Item] = []
        while not self.accept(close):
            if items:
                self.expect(",")
                if self.accept(close):
                    break
            items.append(item())
        return items

    # --- kernel, blocks, ops ---

    def kernel(self) -> Kernel:
        self.expect("kernel")
        self.expect("@")
        name = self.string() if self.token.kind == "string" else self.word("a name")
        self.expect("(")
        params = self.listed(self.define, ")")
        self.expect("outputs")
        outputs = self.integer()
        aliases = self.aliases() if self.accept("aliases") else ()
        level = self.word("a level") if self.accept("level") else "tile"
        loc = self.loc()
        self.expect("{")
        body = self.block_rest(())
        return Kernel(name, tuple(params), body, outputs, aliases, level, loc)

    def aliases(self) -> tuple[tuple[int, int], ...]:
        def pair() -> tuple[int, int]:
            operand = self.integer()
            self.expect(":")
            return operand, self.integer()

        self.expect("{")
        return tuple(self.listed(pair, "}"))

    def block_rest(self, params: tuple[Value, ...]) -> Block:
        """Ops and the yield, after the opening brace."""
        ops: list[Op] = []
        yields: list[Value] = []
        while not self.accept("}"):
            if self.accept("yield"):
                yields = self.uses()
                self.expect("}")
                break
            ops.append(self.op())
        return Block(params, tuple(ops), tuple(yields))

    def region(self) -> Block:
        self.take()  # the label, which is redundant
        self.expect("(")
        params = tuple(self.listed(self.define, ")"))
        self.expect("{")
        return self.block_rest(params)

    def op(self) -> Op:
        # Results become visible after the op: it cannot use them, not even in a region.
        results: list[tuple[str, Value]] = []
        if self.token.kind == "value":
            results = [self.declare()]
            while self.accept(","):
                results.append(self.declare())
            self.expect("=")
        name = self.word("an operation")
        operands: list[Value] = []
        attrs: dict[str, Any] = {}
        if self.token.kind == "value" and self.peek() == "[":
            operands, attrs = self.indexed(name)
        elif self.token.kind == "value" and self.peek() != ":":
            operands = self.uses()
        if self.accept("{"):
            attrs.update(self.listed(self.attr, "}"))
        row = table().get(name)
        if row and len(results) == 1 and "type" in row.attrs:
            attrs.setdefault("type", results[0][1].type)
        loc = self.loc()
        for label, value in results:
            self.add(label, value)
        regions: list[Block] = []
        while self.token.kind == "word" and self.peek() == "(":
            regions.append(self.region())
        made = tuple(value for _, value in results)
        return Op(name, tuple(operands), made, attrs, tuple(regions), loc)

    def indexed(self, name: str) -> tuple[list[Value], dict[str, Any]]:
        """`%ref[index] = values mask %m other %o`: operands and implied attrs."""
        ref = self.use()
        self.expect("[")
        index: list[At | Span | Gather] = []
        starts: list[Value] = []

        def entry() -> None:
            picked, operand = self.index_entry(ref.type.shape[len(index) :])
            index.append(picked)
            starts.extend([] if operand is None else [operand])

        self.listed(entry, "]")
        stored = self.uses() if self.accept("=") else []
        mask = [self.use()] if self.accept("mask") else []
        other = [self.use()] if self.accept("other") else []
        attrs: dict[str, Any] = {"index": tuple(index)}
        if name in ("load", "store", "atomic_rmw") or mask:
            attrs["mask"] = bool(mask)
        if name == "load" or other:
            attrs["other"] = bool(other)
        return [ref, *stored, *starts, *mask, *other], attrs

    def index_entry(
        self, sizes: tuple[int, ...]
    ) -> tuple[At | Span | Gather, Value | None]:
        """One entry and its operand; `sizes`: the ref's dimensions not yet indexed."""
        if self.at(":") and not sizes:
            self.expected("at most one entry per dimension of the ref")
        if self.accept(":"):
            return Span(0, sizes[0]), None
        if self.accept("gather"):
            return Gather(), self.use()
        operand = self.use() if self.token.kind == "value" else None
        start = None if operand is not None else self.integer()
        if not self.accept(":"):
            return At(start), operand
        self.expect("+")
        size = self.integer()
        stride = self.integer() if self.accept(":") else 1
        return Span(start, size, stride), operand

    def attr(self) -> tuple[str, Any]:
        name = self.word("an attribute name")
        self.expect("=")
        return name, self.data()

    def loc(self) -> Loc | None:
        if self.token.kind == "loc":
            # A kernel has many ops but few source lines: parse each line only once.
            text = self.take().text
            if text not in self.locs:
                file, line, *function = _LOC_PARTS.findall(text)
                name = function[0][1:-1] if function else ""
                self.locs[text] = Loc(file[1:-1], int(line), name)
            return self.locs[text]
        if not (self.at("loc") and self.peek() == "("):
            return None
        self.take()
        self.expect("(")
        file = self.string()
        self.expect(":")
        line = self.integer()
        function = self.string() if self.accept("in") else ""
        self.expect(")")
        return Loc(file, line, function)

    # --- values ---

    def declare(self) -> tuple[str, Value]:
        """`%name: type`, not yet visible."""
        label = self.take_kind("value", "a value '%name: type'")
        self.expect(":")
        hint = "" if label[1:].isdigit() else label[1:]
        return label, Value(self.type(), hint)

    def add(self, label: str, value: Value) -> None:
        if label in self.values:
            self.fail(f"{label} is defined twice")
        self.values[label] = value

    def define(self) -> Value:
        label, value = self.declare()
        self.add(label, value)
        return value

    def use(self) -> Value:
        if self.token.kind != "value":
            self.expected("a value '%name'")
        value = self.values.get(self.token.text)
        if value is None:
            self.fail(f"{self.token.text} is used but not defined above")
        self.take()
        return value

    def uses(self) -> list[Value]:
        values = [self.use()]
        while self.accept(","):
            values.append(self.use())
        return values

    # --- types and attributes ---

    def type(self) -> Type:
        if not self.accept("ref"):
            dtype = self.dtype()
            shape = self.shape() if self.at("[") else ()
            return TileType(shape, dtype, self.layout())
        self.expect("<")
        dtype = self.dtype()
        shape = self.shape() if self.at("[") else ()
        space = self.word("a memory space")
        layout = self.layout()
        self.expect(">")
        return RefType(shape, dtype, space, layout)

    def layout(self) -> Layout | None:
        if not self.accept("@"):
            return None
        kind = self.word("the name of a layout")
        numbers = self.listed(self.integer, ")") if self.accept("(") else []
        return Layout(kind, tuple(numbers))

    def dtype(self) -> DType:
        if self.token.text not in DTYPES:
            self.expected("an element type (f32, i32, bool, ...) or a ref type")
        return DTYPES[self.take().text]

    def shape(self) -> tuple[int, ...]:
        self.expect("[")
        return tuple(self.listed(self.integer, "]"))

    def data(self) -> Any:
        """One attribute value."""
        kind, text = self.token.kind, self.token.text
        if kind == "string":
            return self.string()
        if kind == "number":
            number = self.take().text
            return float(number) if re.search(r"[.en]", number) else int(number)
        if self.accept("("):
            return tuple(self.listed(self.data, ")"))
        if self.accept("{"):
            return dict(self.listed(self.attr, "}"))
        if kind != "word":
            self.expected("an attribute value")
        if text in _NAMES:
            self.take()
            return _NAMES[text]
        if text == "ref":
            return self.type()
        if text in DTYPES:
            dtype = self.dtype()
            if not self.at("["):
                return dtype
            return TileType(self.shape(), dtype, self.layout())
        if text in ("at", "span", "gather"):
            return self.index_data()[0]
        return self.window()

    def index_data(self) -> Index:
        make: dict[str, Callable[..., Any]] = {"at": At, "span": Span, "gather": Gather}
        kind = self.take().text
        self.expect("(")
        return (make[kind](*self.listed(self.data, ")")),)

    def window(self) -> Window:
        mode = self.word("a window")
        self.expect("[")
        dims = tuple(self.listed(self.block_dim, "]"))
        space = self.word("a memory space") if self.accept("space") else "block"
        fill = self.data() if self.accept("fill") else None
        buffers = self.integer() if self.accept("buffers") else None
        return Window(dims, mode, space, fill, buffers)

    def block_dim(self) -> BlockDim:
        kind = self.take().text if self.token.kind == "word" else "blocked"
        size = self.integer()
        if not self.accept("pad"):
            return BlockDim(size, kind)
        self.expect("(")
        padding = self.listed(self.integer, ")")
        if len(padding) != 2:
            self.expected("a padding of two numbers")
        return BlockDim(size, kind, (padding[0], padding[1]))

    def integer(self) -> int:
        if self.token.kind != "number" or not self.token.text.lstrip("-").isdigit():
            self.expected("an integer")
        return int(self.take().text)

    def word(self, what: str) -> str:
        return self.take_kind("word", what)

    def string(self) -> str:
        return json.loads(self.take_kind("string", "a string"))
