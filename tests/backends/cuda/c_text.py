"""Reads the C++ of emitted kernels: the part of the language that the emitter uses.

A tree is tuples: `("call", name, templates, arguments)`, `("if", condition, then,
other)`. What this does not know is an error with the text at that place, so that a
new construct of the emitter is met, not skipped.
"""

import re
from dataclasses import dataclass
from typing import Any

Tree = tuple
TYPES = ("void", "bool", "char", "float", "double", "int", "short", "long")
TYPES += ("i8", "u8", "i16", "u16", "u32", "i64", "u64", "uint4", "uint2")
TYPES += ("bf16", "f16", "f8e4m3fn", "f8e5m2")
BEFORE_TYPES = ("const", "volatile", "unsigned", "static", "extern", "__shared__")
TOKEN = re.compile(
    r"""\s+|//[^\n]*
    |(?P<token>"(?:\\.|[^"\\])*"
    |0[xX][0-9a-fA-F]+[uUlL]*
    |(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[fFuUlL]*
    |[A-Za-z_]\w*
    |<<=|>>=|&&|\|\||<<|>>|[<>=!+\-*/%&|^]=|\+\+|--|->|::|.)""",
    re.X | re.S,
)
LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">="),
    ("<<", ">>"), ("+", "-"), ("*", "/", "%"),
)  # fmt: skip
ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "|=", "&=", "^=", "<<=", ">>=", "%=")


@dataclass(frozen=True)
class Code:
    """A kernel function: `(type, name)` of its parameters, and its body."""

    name: str
    params: tuple[tuple[str, str], ...]
    body: tuple[Tree, ...]


def read(text: str) -> Code:
    """The kernel of an emitted text."""
    start = text.index('extern "C" __global__')
    helpers = re.findall(r"template <[^{;]*?>\s*DEVICE\s+\S+\s+(\w+)\(", text[:start])
    return _Reader(text[start:], set(helpers)).kernel()


class _Reader:
    def __init__(self, text: str, templates: set[str]):
        found = [m for m in TOKEN.finditer(text) if m["token"]]
        self._tokens = [m["token"] for m in found]
        self._starts = [m.start() for m in found]
        self._text = text
        self._at = 0
        self._templates = templates | {"reinterpret_cast", "static_cast"}

    # --- tokens ---

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ""

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _skip(self, *tokens: str) -> bool:
        if all(self._peek(n) == t for n, t in enumerate(tokens)):
            self._at += len(tokens)
            return True
        return False

    def _need(self, token: str) -> None:
        if not self._skip(token):
            near = " ".join(self._tokens[max(self._at - 12, 0) : self._at + 12])
            raise SyntaxError(f"expected {token!r}, not {self._peek()!r}: {near}")

    def _parentheses(self) -> list[str]:
        """The tokens between parentheses, which may nest."""
        self._need("(")
        depth, found = 1, []
        while depth:
            token = self._next()
            depth += {"(": 1, ")": -1}.get(token, 0)
            found.append(token)
        return found[:-1]

    # --- the function ---

    def kernel(self) -> Code:
        while not (self._peek(1) == "(" and self._peek() not in _ATTRIBUTES):
            if self._next() in _ATTRIBUTES:
                self._parentheses()
        name, params = self._next(), []
        for part in " ".join(self._parentheses()).split(","):
            words = part.replace("__restrict__", "").replace("const", "").split()
            params.append(("".join(words[:-1]), words[-1]))
        return Code(name, tuple(params), self._block())

    def _block(self) -> tuple[Tree, ...]:
        self._need("{")
        body: list[Tree] = []
        while not self._skip("}"):
            body.append(self._statement())
        return tuple(body)

    def _body(self) -> tuple[Tree, ...]:
        return self._block() if self._peek() == "{" else (self._statement(),)

    # --- statements ---

    def _statement(self) -> Tree:
        """With the line it stands in."""
        start = self._starts[self._at]
        line = self._text[self._text.rfind("\n", 0, start) + 1 :].split("\n", 1)[0]
        return ("at", line.strip(), self._plain_statement())

    def _plain_statement(self) -> Tree:
        token = self._peek()
        if token == "{":
            return ("block", self._block())
        if token == ";":
            self._next()
            return ("block", ())
        if token == "EACH":
            self._next()
            self._need("(")
            count = self._expression()
            self._need(")")
            return ("for", "i", ("number", 0, "int"), count, 1, self._body())
        if token == "_Pragma":
            self._next()
            self._parentheses()
            return self._plain_statement()
        if token == "for":
            return self._for()
        if token == "while":
            self._next()
            self._need("(")
            condition = self._expression()
            self._need(")")
            return ("while", condition, self._body())
        if token == "if":
            self._next()
            self._need("(")
            condition = self._expression()
            self._need(")")
            then = self._body()
            return ("if", condition, then, self._body() if self._skip("else") else ())
        if token in ("break", "continue", "return"):
            self._next()
            self._need(";")
            return (token,)
        if token == "asm":
            self._next()
            self._skip("volatile")
            words = self._parentheses()
            self._need(";")
            return ("asm", " ".join(words))
        if self._is_declaration():
            return self._declaration()
        return self._simple(";")

    def _for(self) -> Tree:
        self._need("for")
        self._need("(")
        self._type()
        name = self._next()
        self._need("=")
        start = self._expression()
        self._need(";")
        self._need(name)
        self._need("<")
        stop = self._expression()
        self._need(";")
        if self._skip("++", name) or self._skip(name, "++"):
            step: Any = 1
        else:
            self._need(name)
            self._need("+=")
            step = self._expression()
        self._need(")")
        return ("for", name, start, stop, step, self._body())

    def _is_declaration(self) -> bool:
        if self._peek() in (*BEFORE_TYPES, "__align__"):
            return True
        after = self._peek(1)
        return self._peek() in TYPES and (after == "*" or after[0].isalpha())

    def _declaration(self) -> Tree:
        while self._peek() in ("__align__", "extern", "__shared__", "static"):
            if self._next() == "__align__":
                self._parentheses()
        kind, made = self._type(), []
        while True:
            self._skip("__restrict__")
            name = self._next()
            if self._skip("["):
                count = None if self._peek() == "]" else self._expression()
                self._need("]")
                made.append(("array", kind, name, count))
            elif self._skip("="):
                made.append(("declare", kind, name, self._expression()))
            else:
                made.append(("declare", kind, name, None))
            if not self._skip(","):
                break
        self._need(";")
        return made[0] if len(made) == 1 else ("declarations", tuple(made))

    def _simple(self, end: str) -> Tree:
        target = self._expression()
        if self._peek() in ASSIGNMENTS:
            operator = self._next()
            value = self._expression()
            if operator != "=":
                value = ("binary", operator[:-1], target, value)
            target = ("assign", target, value)
        else:
            target = ("do", target)
        self._need(end)
        return target

    def _type(self) -> str:
        words = []
        while self._peek() in (*BEFORE_TYPES, *TYPES, "*"):
            token = self._next()
            if token in TYPES or token == "*":
                words.append(token)
        return "".join(words).replace("longlong", "i64")

    # --- expressions ---

    def _expression(self) -> Tree:
        condition = self._binary(0)
        if not self._skip("?"):
            return condition
        then = self._expression()
        self._need(":")
        return ("select", condition, then, self._expression())

    def _binary(self, level: int) -> Tree:
        if level == len(LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while self._peek() in LEVELS[level]:
            operator = self._next()
            left = ("binary", operator, left, self._binary(level + 1))
        return left

    def _unary(self) -> Tree:
        token = self._peek()
        if token in ("-", "!", "~", "*", "&", "+"):
            self._next()
            return ("unary", token, self._unary())
        if token == "(" and (self._peek(1) in TYPES or self._peek(1) in BEFORE_TYPES):
            self._next()
            kind = self._type()
            self._need(")")
            return ("cast", kind, self._unary())
        return self._postfix(self._primary())

    def _postfix(self, tree: Tree) -> Tree:
        while True:
            if self._skip("["):
                tree = ("index", tree, self._expression())
                self._need("]")
            elif self._peek() == "." and self._peek(1).isidentifier():
                self._next()
                tree = ("field", tree, self._next())
            else:
                return tree

    def _primary(self) -> Tree:
        token = self._next()
        if token == "(":
            inner = self._expression()
            self._need(")")
            return inner
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return _number(token)
        is_template = token in self._templates or (
            # What has no body in this text, `f<16>(x)`.
            self._peek() == "<" and self._peek(2) == ">" and self._peek(3) == "("
        )
        if is_template and self._skip("<"):
            templates = self._template_arguments()
            if token in ("reinterpret_cast", "static_cast"):
                self._need("(")
                inner = self._expression()
                self._need(")")
                return ("cast", templates[0], inner)
            return ("call", token, templates, self._arguments())
        if self._peek() == "(":
            return ("call", token, (), self._arguments())
        if token in ("true", "false"):
            return ("bool", token == "true")
        if token.isidentifier():
            return ("name", token)
        self._at -= 1
        self._need("an expression")
        raise AssertionError

    def _template_arguments(self) -> tuple[str, ...]:
        found, part = [], []
        while (token := self._next()) != ">":
            if token == ",":
                found.append("".join(part))
                part = []
            elif token not in BEFORE_TYPES:
                part.append(token)
        return (*found, "".join(part))

    def _arguments(self) -> tuple[Tree, ...]:
        self._need("(")
        found: list[Tree] = []
        while not self._skip(")"):
            found.append(self._expression())
            self._skip(",")
        return tuple(found)


_ATTRIBUTES = ("__launch_bounds__", "__cluster_dims__", "__maxnreg__")


def _number(token: str) -> Tree:
    text = token.lower()
    if not text.startswith("0x") and re.search(r"[.e]|f$", text):
        return ("real",)
    digits = text.rstrip("ul")
    suffix = text[len(digits) :]
    kind = ("u" if "u" in suffix else "i") + ("64" if "ll" in suffix else "32")
    return ("number", int(digits, 0), {"i32": "int"}.get(kind, kind))
