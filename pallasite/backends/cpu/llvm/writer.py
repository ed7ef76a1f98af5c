"""A small writer of LLVM IR text: typed values, fresh names, blocks, loops with phis.

A `Module` holds functions and the declarations they need; a `Function` appends lines.
Text is several times faster to make than an object model and is itself the stage that
is dumped, hashed and cached. Nothing here depends on kernels; `emit.py` uses it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from pallasite.backends.cpu.llvm.debug_info import Origins, mark
from pallasite.backends.cpu.llvm.values import (
    FALSE,
    NULL,
    TRUE,
    Lanes,
    Pointers,
    Val,
    bytes_of,
    integer,
    lane_type,
    mangled,
    steps,
    vector,
)
from pallasite.ir.nodes import Loc

__all__ = ["FALSE", "NULL", "TRUE", "Function", "Loop", "Module", "Val", "integer"]

# Intrinsics whose second argument is a flag, the same for all lanes.
_FLAGGED = ("abs", "ctlz", "cttz")


class Module:
    """One LLVM module: functions, declarations of what they call, constant texts."""

    def __init__(self) -> None:
        self.functions: list[Function] = []
        self._declared: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._constants: dict[str, str] = {}
        self._externals: dict[str, str] = {}
        self.called: frozenset[Hashable] = (
            frozenset()
        )  # kinds of ops, see `called_functions.py`
        self._names: dict[Hashable, str] = {}
        self._counts: Counter[Hashable] = Counter()
        self.origins: Origins | None = None  # if set, lines are marked with theirs
        self.origin = 0  # of the lines being written

    def origin_of(self, loc: Loc | None) -> int:
        """The number of a source line; 0 if unknown or not wanted."""
        return self.origins.number(loc) if self.origins and loc else 0

    def declare(self, name: str, returns: str, params: Sequence[str]) -> None:
        line = f"declare {returns} @{name}({', '.join(params)})"
        self._declared[name] = line

    def defines(self, name: str) -> bool:
        return any(function.name == name for function in self.functions)

    def count(self, kind: Hashable) -> int:
        """How often this was called for this kind of code, including this time."""
        self._counts[kind] += 1
        return self._counts[kind]

    def name_of(self, key: Hashable, hint: str) -> str:
        """The name of the function identified by `key`, the same each time."""
        return self._names.setdefault(key, f"{hint}.{len(self._names)}")

    def text_constant(self, text: str) -> Val:
        """A pointer to a zero-terminated constant."""
        name = self._texts.setdefault(text, f"@text.{len(self._texts)}")
        return Val("ptr", name)

    def constant(self, name: str, value: str) -> Val:
        """A pointer to a constant, defined once; `value` is written with its type."""
        self._constants[name] = value
        return Val("ptr", f"@{name}")

    def external(self, name: str, type: str) -> None:
        """A variable of this process, whose address is `@name`."""
        self._externals[name] = type

    @property
    def text(self) -> str:
        constants = (
            [
                f"@{name} = external global {type}"
                for name, type in self._externals.items()
            ]
            + [
                f"@{name} = private unnamed_addr constant {value}"
                for name, value in self._constants.items()
            ]
            + [
                f"{name} = private unnamed_addr constant {_c_string(text)}"
                for text, name in self._texts.items()
            ]
        )
        declared = [self._declared[name] for name in sorted(self._declared)]
        bodies = [function.text for function in self.functions]
        if self.origins is not None:
            bodies = self.origins.as_debug_info(bodies)
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
        attributes: str = "",
    ):
        self.module = module
        self.name = name
        self.block = "entry"
        self.params = [Val(_without_attributes(type), f"%{n}") for type, n in params]
        listed = ", ".join(f"{type} %{name}" for type, name in params)
        words = ["define", linkage, returns, f"@{name}({listed})", attributes, "{"]
        self._head = " ".join(filter(None, words))
        self.lines = ["entry:"]
        self.types = {value.text: value.type for value in self.params}
        self.loops: list[Span] = []
        self._names = 0
        self._known: dict[str, Val] = {}
        self.encoded: dict[tuple[str, str], Val] = {}  # of decoded bytes (`float8.py`)
        self.mask: Val | None = None  # lanes that may access memory; None: all
        self._writes = 0
        self._first_read: dict[str, str] = {}  # its basic block, by pointer
        module.functions.append(self)

    @property
    def text(self) -> str:
        return "\n".join([self._head, *self.lines, "}"])

    @property
    def moment(self) -> tuple[str, int, Val | None]:
        """While this stays the same, a repeated load gives the same value."""
        return self.block, self._writes, self.mask

    # --- instructions ---

    def line(self, text: str) -> None:
        origin = self.module.origin
        self.lines.append(f"  {text}{mark(origin)}" if origin else f"  {text}")

    def write(self, text: str) -> None:
        """Append lines and labels of LLVM text."""
        for line in map(str.strip, text.splitlines()):
            if line.endswith(":"):
                self.label(line[:-1])
            elif line:
                self.line(line)

    def value(self, type: str, instruction: str) -> Val:
        """The result of an instruction that must run each time (load, call)."""
        result = Val(type, self._fresh("v"))
        self.types[result.text] = type
        self.line(f"{result.text} = {instruction}")
        return result

    def pure(self, type: str, instruction: str) -> Val:
        """The result of an instruction without effects; emitted once per block."""
        if instruction not in self._known:
            self._known[instruction] = self.value(type, instruction)
        return self._known[instruction]

    def call(self, name: str, returns: str, *args: Val, pure: bool = False) -> Val:
        if any(a.count for a in args) and not name.startswith("llvm."):
            return self._call_per_lane(name, returns, args)
        self._writes += not pure
        self.module.declare(name, returns, [a.type for a in args])
        instruction = f"call {returns} @{name}({', '.join(map(str, args))})"
        if returns == "void":
            self.line(instruction)
            return Val("void", "")
        return (self.pure if pure else self.value)(returns, instruction)

    def call_pure(self, name: str, returns: str, *args: Val) -> Val:
        """The result of a function of the same module that accesses no memory."""
        return self.pure(
            returns, f"call {returns} @{name}({', '.join(map(str, args))})"
        )

    def call_defined(self, name: str, *args: Val) -> None:
        """Call a function of the same module, which needs no declaration."""
        self._writes += 1
        self.line(f"call void @{name}({', '.join(map(str, args))})")

    def _call_per_lane(self, name: str, returns: str, args: Sequence[Val]) -> Val:
        """Library functions take scalars: one call per lane."""
        args = self.alike(*args)
        count, scalar = args[0].count, lane_type(returns)
        result = Val(vector(scalar, count), "poison")
        for n in range(count):
            lane = [self.lane(a, n) for a in args]
            value = self.call(name, scalar, *lane, pure=True)
            result = self.pure(result.type, f"insertelement {result}, {value}, i64 {n}")
        return result

    def intrinsic(
        self, name: str, *args: Val, returns: str | None = None, flags: str = ""
    ) -> Val:
        """`llvm.<name>.<type of the first argument>`, which has no effects.

        `returns` is the type for one lane; by default that of the argument. `flags`
        are fast-math flags.
        """
        scalar = args[1:] if name in _FLAGGED else ()
        args = (*self.alike(*args[: len(args) - len(scalar)]), *scalar)
        result = vector(lane_type(returns or args[0].type), args[0].count)
        overloaded = f"llvm.{name}.{mangled(args[0].type)}"
        if flags:
            self.module.declare(overloaded, result, [a.type for a in args])
            listed = ", ".join(map(str, args))
            return self.pure(result, f"call {flags} {result} @{overloaded}({listed})")
        return self.call(overloaded, result, *args, pure=True)

    def binary(self, name: str, a: Val, b: Val) -> Val:
        a, b = self.alike(a, b)
        return self.pure(a.type, f"{name} {a}, {b.text}")

    def fneg(self, a: Val) -> Val:
        return self.pure(a.type, f"fneg {a}")

    def compare(self, name: str, a: Val, b: Val) -> Val:
        """`name` is an LLVM predicate with its instruction: "icmp slt", "fcmp oeq"."""
        a, b = self.alike(a, b)
        return self.pure(vector("i1", a.count), f"{name} {a}, {b.text}")

    def convert(self, name: str, a: Val, type: str) -> Val:
        """`type` may be that of one lane."""
        type = lane_type(type)
        if lane_type(a.type) == type:
            return a
        if isinstance(a, Lanes) and (name, type) in _KEEPING:
            return Lanes(self.convert(name, a.base, type), a.count, a.step)
        number = a.constant
        if number is not None and (name, type) in _KEEPING and abs(number) < 2**31:
            return integer(number, type)
        a, type = self.written(a), vector(type, a.count)
        return self.pure(type, f"{name} {a} to {type}")

    def select(self, which: Val, on_true: Val, on_false: Val) -> Val:
        if on_true == on_false or which == TRUE:
            return on_true
        if which == FALSE:
            return on_false
        if which.count:
            which, on_true, on_false = self.alike(which, on_true, on_false)
        else:
            on_true, on_false = self.alike(on_true, on_false)
        return self.pure(on_true.type, f"select {which}, {on_true}, {on_false}")

    # --- memory ---

    def load(self, type: str, pointer: Val) -> Val:
        """`type` is that of one lane."""
        if not pointer.count:
            return self.value(type, f"load {type}, {pointer}")
        count, size = pointer.count, bytes_of(type)
        wide = vector(type, count)
        if isinstance(pointer, Pointers) and pointer.step == 1:
            if self.mask is None:
                return self.value(wide, f"load {wide}, {pointer.base}, align {size}")
            name, where = f"llvm.masked.load.{mangled(wide)}.p0", pointer.base
        else:
            where = self.written(pointer)
            name = f"llvm.masked.gather.{mangled(wide)}.v{count}p0"
        rest = Val(wide, "zeroinitializer")
        args = (where, integer(size, "i32"), self._on(count), rest)
        self.module.declare(name, wide, [a.type for a in args])
        return self.value(wide, f"call {wide} @{name}({', '.join(map(str, args))})")

    def store(self, value: Val, pointer: Val) -> None:
        self._writes += 1
        if not pointer.count:
            self.line(f"store {self.written(value)}, {pointer}")
            return
        count, size = pointer.count, bytes_of(lane_type(value.type))
        value = self.splat(value, count)
        if isinstance(pointer, Pointers) and pointer.step == 1:
            if self.mask is None:
                self.line(f"store {value}, {pointer.base}, align {size}")
                return
            name, where = f"llvm.masked.store.{mangled(value.type)}.p0", pointer.base
        else:
            where = self.written(pointer)
            name = f"llvm.masked.scatter.{mangled(value.type)}.v{count}p0"
        self.call(name, "void", value, where, integer(size, "i32"), self._on(count))

    def is_first_read(self, pointer: Val) -> bool:
        """Whether the innermost loop reads there, and no earlier code does."""
        return self._first_read.setdefault(pointer.text, self.block) == self.block

    def prefetch(self, pointer: Val, distance: Val) -> None:
        """Prefetch what is `distance` bytes past a vector, into L2.

        Unmapped addresses are ignored.
        """
        if isinstance(pointer, Pointers) and pointer.step == 1:
            place = self.element(pointer.base, "i8", distance)
            self._prefetch(place, writes=0, nearness=2)

    def prefetch_to_write(self, pointer: Val) -> None:
        """Prefetch the cache line of an address that will be written soon.

        Unmapped addresses are ignored.
        """
        self._prefetch(pointer, writes=1, nearness=3)

    def _prefetch(self, place: Val, writes: int, nearness: int) -> None:
        numbers = [integer(n, "i32") for n in (writes, nearness, 1)]
        self.call("llvm.prefetch.p0", "void", place, *numbers, pure=True)

    def _on(self, count: int) -> Val:
        """The lanes that may access memory."""
        return self.mask or Val(vector("i1", count), "splat (i1 true)")

    def element(self, pointer: Val, type: str, offset: Val) -> Val:
        """The address `offset` elements of `type` after `pointer`."""
        if offset.constant == 0:
            return pointer
        if isinstance(offset, Lanes):
            base = self.element(pointer, type, offset.base)
            return Pointers(base, offset.count, offset.step, type)
        place = f"getelementptr inbounds {type}, {pointer}, {offset}"
        return self.pure(vector("ptr", offset.count), place)

    # --- lanes ---

    def written(self, a: Val) -> Val:
        """The value in a form that instructions accept."""
        if isinstance(a, Lanes):
            offsets = steps(lane_type(a.type), a.count, a.step)
            if a.base.constant == 0:
                return offsets
            return self.pure(
                a.type, f"add {self.splat(a.base, a.count)}, {offsets.text}"
            )
        if isinstance(a, Pointers):
            offsets = steps("i64", a.count, a.step)
            place = f"getelementptr inbounds {a.of}, {a.base}, {offsets}"
            return self.pure(a.type, place)
        return a

    def splat(self, a: Val, count: int) -> Val:
        """A scalar in every lane; a vector unchanged."""
        if a.count or not count:
            return self.written(a)
        type = vector(a.type, count)
        if a.is_literal:
            return Val(type, f"splat ({a})")
        one = self.pure(type, f"insertelement {type} poison, {a}, i64 0")
        mask = f"<{count} x i32> zeroinitializer"
        return self.pure(type, f"shufflevector {one}, {type} poison, {mask}")

    def alike(self, *values: Val) -> list[Val]:
        """Broadcast scalars among vectors."""
        count = max(v.count for v in values)
        return [self.splat(v, count) for v in values]

    def shuffle(self, a: Val, b: Val | None, picks: Sequence[int]) -> Val:
        """Lanes of `a` followed by those of `b`, by number."""
        count, other = len(picks), f"{a.type} poison" if b is None else b
        mask = f"<{count} x i32> <{', '.join(f'i32 {n}' for n in picks)}>"
        type = vector(lane_type(a.type), count)
        return self.pure(type, f"shufflevector {a}, {other}, {mask}")

    def lane(self, a: Val, n: int) -> Val:
        if not a.count:
            return a
        return self.pure(
            lane_type(a.type), f"extractelement {self.written(a)}, i64 {n}"
        )

    # --- index arithmetic, with constants folded ---

    def add(self, a: Val, b: Val) -> Val:
        if a.constant is not None and b.constant is not None:
            return integer(a.constant + b.constant, a.type)
        if a.constant == 0:
            return b
        if b.constant == 0:
            return a
        return self._in_steps(self.add, a, b) or self.binary("add nsw", a, b)

    def sub(self, a: Val, b: Val) -> Val:
        if a.constant is not None and b.constant is not None:
            return integer(a.constant - b.constant, a.type)
        if b.constant == 0:
            return a
        return self._in_steps(self.sub, a, b) or self.binary("sub nsw", a, b)

    def _in_steps(
        self, combine: Callable[[Val, Val], Val], a: Val, b: Val
    ) -> Val | None:
        """The sum or difference of stepped lanes, stepped too (or a scalar)."""
        lanes = [v for v in (a, b) if isinstance(v, Lanes)]
        if not lanes or any(v.count and not isinstance(v, Lanes) for v in (a, b)):
            return None
        bases = [v.base if isinstance(v, Lanes) else v for v in (a, b)]
        widths = [v.step if isinstance(v, Lanes) else 0 for v in (a, b)]
        step = combine(*(integer(n) for n in widths)).constant or 0
        base = combine(*bases)
        return Lanes(base, lanes[0].count, step) if step else base

    def mul(self, a: Val, b: Val) -> Val:
        if a.constant is not None and b.constant is not None:
            return integer(a.constant * b.constant, a.type)
        if 0 in (a.constant, b.constant):
            return integer(0, a.type)
        if a.constant == 1:
            return b
        if b.constant == 1:
            return a
        for lanes, factor in ((a, b), (b, a)):
            if isinstance(lanes, Lanes) and factor.constant is not None:
                base = self.mul(lanes.base, factor)
                return Lanes(base, lanes.count, lanes.step * factor.constant)
        return self.binary("mul nsw", a, b)

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
        self.lines.append(f"{name}:")
        self.block = name
        # What the previous block computed need not dominate this one.
        self._known, self.encoded = {}, {}

    def branch(self, target: str) -> None:
        self.line(f"br label %{target}")

    def branch_if(self, which: Val, on_true: str, on_false: str) -> None:
        assert not which.count, "lanes cannot part"
        self.line(f"br {which}, label %{on_true}, label %{on_false}")

    def phi(self, type: str, incoming: Sequence[tuple[Val, str]]) -> Val:
        arms = ", ".join(f"[ {value.text}, %{label} ]" for value, label in incoming)
        return self.value(type, f"phi {type} {arms}")

    @contextmanager
    def when(self, condition: Val) -> Iterator[None]:
        """The lines inside run only if `condition` holds."""
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
    def where(self, condition: Val) -> Iterator[None]:
        """As `when`; a condition with lanes says which may access memory."""
        if not condition.count:
            with self.when(condition):
                yield
            return
        outer = self.mask
        self.mask = condition if outer is None else self.both(outer, condition)
        yield
        self.mask = outer

    @contextmanager
    def loop(self, count: Val, carries: Sequence[Val] = ()) -> Iterator["Loop"]:
        """Runs the lines inside for index 0 up to `count`, with loop-carried values.

        The body sets `loop.carries` to the values for the next iteration; after the
        loop `loop.carries` holds the last ones.
        """
        if count.constant == 1:
            yield Loop(integer(0), list(carries))
            return
        before, start = self.block, len(self.lines)
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
        self.loops.append(Span(start, len(self.lines), before, done))
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
        """Phis whose incoming values are not known yet: see `close_phi`."""
        opened = []
        for type in types:
            opened.append((Val(type, self._fresh("p")), len(self.lines)))
            self.types[opened[-1][0].text] = type
            self.lines.append("")
        return opened

    def close_phi(
        self, phi: tuple[Val, int], incoming: Sequence[tuple[Val, str]]
    ) -> None:
        value, place = phi
        arms = ", ".join(f"[ {v.text}, %{label} ]" for v, label in incoming)
        self.lines[place] = f"  {value.text} = phi {value.type} {arms}"

    def _fresh(self, hint: str) -> str:
        self._names += 1
        return f"%{hint}{self._names}"


def _without_attributes(type: str) -> str:
    return type if type[0] == "<" else type.split()[0]


class Span(NamedTuple):
    """The lines of a loop, from the branch into it up to the label after it."""

    start: int
    end: int
    before: str  # the block that the first line belongs to
    after: str


class Loop:
    """The inside of `Function.loop`."""

    def __init__(self, index: Val, carries: list[Val]):
        self.index, self.carries = index, carries

    def __iter__(self) -> Iterator[Val]:
        return iter((self.index, *self.carries))


# Conversions that leave a small constant as it is written.
_KEEPING = {("sext", "i64"), ("sext", "i32"), ("trunc", "i32")}
