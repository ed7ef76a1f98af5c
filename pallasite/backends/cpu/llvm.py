"""A small writer of LLVM IR text: typed values, fresh names, blocks, loops with phis.

A `Module` holds functions and the declarations they need; a `Function` appends lines.
Text is several times faster to make than an object model and is itself the stage that
is dumped, hashed and cached. Nothing here knows about kernels; `emit.py` uses it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple


class Val(NamedTuple):
    """An LLVM value or constant with its type; prints as an operand with type."""

    type: str
    text: str

    @property
    def constant(self) -> int | None:
        """The number an integer constant stands for, else None."""
        return int(self.text) if self.text.lstrip("-").isdigit() else None

    def __str__(self) -> str:
        return f"{self.type} {self.text}"


def integer(value: int, type: str = "i64") -> Val:
    return Val(type, str(value))


TRUE, FALSE, NULL = Val("i1", "1"), Val("i1", "0"), Val("ptr", "null")


class Module:
    """One LLVM module: functions, declarations of what they call, constant texts."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self._declared: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._constants: dict[str, str] = {}

    def declare(self, name: str, returns: str, params: Sequence[str]) -> None:
        line = f"declare {returns} @{name}({', '.join(params)})"
        self._declared[name] = line

    def text_constant(self, text: str) -> Val:
        """A pointer to a zero-terminated constant."""
        name = self._texts.setdefault(text, f"@text.{len(self._texts)}")
        return Val("ptr", name)

    def constant(self, name: str, value: str) -> Val:
        """A pointer to a constant, defined once; `value` is written with its type."""
        self._constants[name] = value
        return Val("ptr", f"@{name}")

    @property
    def text(self) -> str:
        constants = [
            f"@{name} = private unnamed_addr constant {value}"
            for name, value in self._constants.items()
        ] + [
            f"{name} = private unnamed_addr constant {_c_string(text)}"
            for text, name in self._texts.items()
        ]
        declared = [self._declared[name] for name in sorted(self._declared)]
        bodies = [function.text for function in self.functions]
        return (
            "\n\n".join(filter(None, ["\n".join(constants), *bodies, *declared])) + "\n"
        )


def _c_string(text: str) -> str:
    data = text.encode() + b"\0"
    plain = "".join(
        chr(b) if 32 <= b < 127 and chr(b) not in '"\\' else f"\\{b:02X}" for b in data
    )
    return f'[{len(data)} x i8] c"{plain}"'


class Function:
    """One function under construction. Lines go to the current basic block."""

    def __init__(
        self,
        module: Module,
        name: str,
        params: Sequence[tuple[str, str]] = (),  # type with attributes, name
        returns: str = "void",
        linkage: str = "",
    ):
        self.module = module
        self.block = "entry"
        self.params = [Val(type.split()[0], f"%{name}") for type, name in params]
        listed = ", ".join(f"{type} %{name}" for type, name in params)
        words = ["define", linkage, returns, f"@{name}({listed})", "{"]
        self._lines = [" ".join(filter(None, words)), "entry:"]
        self._names = 0
        self._known: dict[str, Val] = {}
        module.functions.append(self)

    @property
    def text(self) -> str:
        return "\n".join([*self._lines, "}"])

    # --- instructions ---

    def line(self, text: str) -> None:
        self._lines.append(f"  {text}")

    def value(self, type: str, instruction: str) -> Val:
        """The result of an instruction that must run each time (load, call)."""
        result = Val(type, self._fresh("v"))
        self.line(f"{result.text} = {instruction}")
        return result

    def pure(self, type: str, instruction: str) -> Val:
        """The result of an instruction without effects; written once per block."""
        if instruction not in self._known:
            self._known[instruction] = self.value(type, instruction)
        return self._known[instruction]

    def call(self, name: str, returns: str, *args: Val, pure: bool = False) -> Val:
        self.module.declare(name, returns, [a.type for a in args])
        instruction = f"call {returns} @{name}({', '.join(map(str, args))})"
        if returns == "void":
            self.line(instruction)
            return Val("void", "")
        return (self.pure if pure else self.value)(returns, instruction)

    def intrinsic(self, name: str, *args: Val, returns: str | None = None) -> Val:
        """`llvm.<name>.<type of the first argument>`, which has no effects."""
        overloaded = f"llvm.{name}.{_mangled(args[0].type)}"
        return self.call(overloaded, returns or args[0].type, *args, pure=True)

    def binary(self, name: str, a: Val, b: Val) -> Val:
        return self.pure(a.type, f"{name} {a}, {b.text}")

    def compare(self, name: str, a: Val, b: Val) -> Val:
        """`name` is an LLVM predicate with its instruction: "icmp slt", "fcmp oeq"."""
        return self.pure("i1", f"{name} {a}, {b.text}")

    def convert(self, name: str, a: Val, type: str) -> Val:
        if a.type == type:
            return a
        number = a.constant
        if number is not None and (name, type) in _KEEPING and abs(number) < 2**31:
            return integer(number, type)
        return self.pure(type, f"{name} {a} to {type}")

    def select(self, which: Val, on_true: Val, on_false: Val) -> Val:
        if on_true == on_false or which == TRUE:
            return on_true
        if which == FALSE:
            return on_false
        return self.pure(on_true.type, f"select {which}, {on_true}, {on_false}")

    def load(self, type: str, pointer: Val) -> Val:
        return self.value(type, f"load {type}, {pointer}")

    def store(self, value: Val, pointer: Val) -> None:
        self.line(f"store {value}, {pointer}")

    def element(self, pointer: Val, type: str, offset: Val) -> Val:
        """The address `offset` elements of `type` after `pointer`."""
        if offset.constant == 0:
            return pointer
        return self.pure("ptr", f"getelementptr inbounds {type}, {pointer}, {offset}")

    # --- index arithmetic, with constants folded ---

    def add(self, a: Val, b: Val) -> Val:
        if a.constant is not None and b.constant is not None:
            return integer(a.constant + b.constant, a.type)
        if a.constant == 0:
            return b
        return a if b.constant == 0 else self.binary("add nsw", a, b)

    def sub(self, a: Val, b: Val) -> Val:
        if a.constant is not None and b.constant is not None:
            return integer(a.constant - b.constant, a.type)
        return a if b.constant == 0 else self.binary("sub nsw", a, b)

    def mul(self, a: Val, b: Val) -> Val:
        if a.constant is not None and b.constant is not None:
            return integer(a.constant * b.constant, a.type)
        if 0 in (a.constant, b.constant):
            return integer(0, a.type)
        if a.constant == 1:
            return b
        return a if b.constant == 1 else self.binary("mul nsw", a, b)

    def least(self, a: Val, b: Val) -> Val:
        if a.constant is not None and b.constant is not None:
            return integer(min(a.constant, b.constant), a.type)
        return self.intrinsic("smin", a, b)

    def greatest(self, a: Val, b: Val) -> Val:
        if a.constant is not None and b.constant is not None:
            return integer(max(a.constant, b.constant), a.type)
        return self.intrinsic("smax", a, b)

    def clamp(self, a: Val, low: Val, high: Val) -> Val:
        return self.greatest(self.least(a, high), low)

    def both(self, a: Val, b: Val) -> Val:
        if FALSE in (a, b):
            return FALSE
        if a == TRUE:
            return b
        return a if b == TRUE else self.binary("and", a, b)

    def negate(self, a: Val) -> Val:
        if a in (TRUE, FALSE):
            return FALSE if a == TRUE else TRUE
        return self.binary("xor", a, TRUE)

    def inner(self, indices: Sequence[Val], strides: Sequence[Val]) -> Val:
        """The sum of index times stride."""
        total = integer(0)
        for index, stride in zip(indices, strides, strict=True):
            total = self.add(total, self.mul(index, stride))
        return total

    # --- blocks, branches, loops ---

    def labels(self, *hints: str) -> list[str]:
        self._names += 1
        return [f"{hint}.{self._names}" for hint in hints]

    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self.block = name
        # What the block before computed need not dominate this one.
        self._known = {}

    def branch(self, target: str) -> None:
        self.line(f"br label %{target}")

    def branch_if(self, which: Val, on_true: str, on_false: str) -> None:
        self.line(f"br {which}, label %{on_true}, label %{on_false}")

    def phi(self, type: str, incoming: Sequence[tuple[Val, str]]) -> Val:
        arms = ", ".join(f"[ {value.text}, %{label} ]" for value, label in incoming)
        return self.value(type, f"phi {type} {arms}")

    @contextmanager
    def when(self, condition: Val) -> Iterator[None]:
        """The lines inside run only where `condition` holds."""
        if condition == TRUE:
            yield
            return
        inside, done = self.labels("then", "done")
        self.branch_if(condition, inside, done)
        self.label(inside)
        yield
        self.branch(done)
        self.label(done)

    @contextmanager
    def loop(self, count: Val, carries: Sequence[Val] = ()) -> Iterator["Loop"]:
        """Runs the lines inside for index 0 up to `count`, handing values along.

        The body sets `loop.carries` to the values for the next round; after the loop
        `loop.carries` holds the last ones.
        """
        if count.constant == 1:
            yield Loop(integer(0), list(carries))
            return
        before = self.block
        head, body, done = self.labels("head", "body", "next")
        self.branch(head)
        self.label(head)
        heads = self.open_phis([count.type, *(c.type for c in carries)])
        index, *carried = (value for value, _ in heads)
        self.branch_if(self.compare("icmp slt", index, count), body, done)
        self.label(body)
        loop = Loop(index, list(carried))
        yield loop
        following = [self.binary("add nuw nsw", index, integer(1)), *loop.carries]
        firsts = [integer(0), *carries]
        for phi, first, after in zip(heads, firsts, following, strict=True):
            self.close_phi(phi, [(first, before), (after, self.block)])
        self.branch(head)
        self.label(done)
        loop.carries = carried

    @contextmanager
    def nest(self, counts: Sequence[Val | int]) -> Iterator[list[Val]]:
        """Nested loops, the last one innermost; gives the indices."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    self.loop(n if isinstance(n, Val) else integer(int(n)))
                ).index
                for n in counts
            ]

    def open_phis(self, types: Sequence[str]) -> list[tuple[Val, int]]:
        """Values of phis whose arms are not known yet; `close_phi` names them."""
        opened = []
        for type in types:
            opened.append((Val(type, self._fresh("p")), len(self._lines)))
            self._lines.append("")
        return opened

    def close_phi(
        self, phi: tuple[Val, int], incoming: Sequence[tuple[Val, str]]
    ) -> None:
        value, place = phi
        arms = ", ".join(f"[ {v.text}, %{label} ]" for v, label in incoming)
        self._lines[place] = f"  {value.text} = phi {value.type} {arms}"

    def _fresh(self, hint: str) -> str:
        self._names += 1
        return f"%{hint}{self._names}"


class Loop:
    """The inside of `Function.loop`."""

    def __init__(self, index: Val, carries: list[Val]):
        self.index, self.carries = index, carries

    def __iter__(self) -> Iterator[Val]:
        return iter((self.index, *self.carries))


# Conversions that leave a small constant as it is written.
_KEEPING = {("sext", "i64"), ("sext", "i32"), ("trunc", "i32")}
_MANGLED = {
    "float": "f32",
    "double": "f64",
    "half": "f16",
    "bfloat": "bf16",
    "ptr": "p0",
}


def _mangled(type: str) -> str:
    return _MANGLED.get(type, type)
