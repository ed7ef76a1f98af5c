"""Proves that an emitted kernel touches no memory outside, whatever its operands hold.

From the text alone: of every access to an operand, result, scratch or shared memory,
every copy, tensor map, descriptor of a matmul and array in registers, the bytes must be
inside by what is known of the integers at that place. Data are any number. Integers are
linear forms (`linear.py`); loops are entered with ranges that their bodies keep. What
is not known here and has an address as argument is a complaint, too.

Not looked at: alignment, tensor memory, and whether a thread block that is addressed in
a cluster exists.
"""

import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from pallasite.backends.cuda import emit
from pallasite.backends.cuda.repack import Packing
from pallasite.ir.nodes import Kernel
from pallasite.passes.lower.own_inputs import own_inputs
from tests.backends.cuda.c_numbers import (
    BYTES,
    RANGES,
    REAL,
    Descriptor,
    Integer,
    Numbers,
    Pointer,
    Real,
    common_type,
    compared,
    plain_type,
)
from tests.backends.cuda.c_text import Tree, read
from tests.backends.cuda.host import blocks_in_cluster
from tests.backends.cuda.linear import (
    ALWAYS,
    FAR,
    NEVER,
    Condition,
    Linear,
    Path,
    Symbol,
    constant,
    symbol,
)

MOST_EVALUATIONS = 64  # of arrays that one element is made of
MOST_PASSES = 16  # over a loop, until its ranges stay
MAP_BYTES = 128
# Instructions and functions that touch no memory by an address.
WITHOUT_MEMORY = re.compile(
    r"__syncthreads|__syncwarp|__nanosleep|__trap|meet|pass_by|barriers_made|elected"
    r"|(fewer|more)_registers|products_\w+|settled|copies_\w+|stores_before_copies"
    r"|writes_before_arrival|blocks_meet|changed|__threadfence\w*"
)
# Functions of numbers whose results are small integers.
SMALL = {"__popc": 32, "__popcll": 64, "__clz": 32, "__clzll": 64, "__ffs": 32}
VALUES = re.compile(
    r"__(float|double)2\w+_r[zn]|__\w+_sync|__\w+_as_\w+|bits_as|called_\w+|sign_of"
    r"|negated|float_of"
    r"|(to|from)_\w+|pack_\w+|pairs_\w+|(max|min)_f\d+|reciprocal\w*|divide_fast"
    r"|exp2_fast|f?abs[fl]?|\w*(exp|log|sin|cos|tan|sqrt|erf|gamma|cbrt|pow|mod|ceil"
    r"|floor|rint|round|trunc|fma|max|min|hypot|copysign|ldexp|isnan|isinf|nextafter"
    r"|isfinite|signbit|remainder|brev|mulhi|umul\w*)\w*"
)


@dataclass(frozen=True, eq=False)
class Registers:
    """An array in registers: what its elements can be."""

    kind: str
    count: int
    low: int = 0
    high: int = 0
    # `EACH(count) x[i] = tree`, and the values at that time.
    tree: Tree | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class TensorMap:
    array: Pointer
    rank: int
    bytes: int  # of an element
    sizes: dict[int, int] = field(default_factory=dict)
    boxes: dict[int, int] = field(default_factory=dict)
    strides: dict[int, int] = field(default_factory=dict)


@dataclass
class Report:
    """Accesses of a text: how many there are, and those not known to be inside."""

    accesses: int = 0
    guarded: int = 0  # inside because of a condition around them
    outside: list[str] = field(default_factory=list)


def check(text: str, kernel: Kernel) -> Report:
    """The accesses of an emitted kernel; `kernel` is what `cuda` was given."""
    launched = emit.Launched.of(text)
    kernel = own_inputs(kernel)
    packings = {note[0]: Packing(*note) for note in launched.repacked}
    refs = [
        packings[n].type(p.ref) if n in packings else p.ref
        for n, p in enumerate(kernel.inputs)
    ]
    refs += [p.ref for p in kernel.outputs]
    sizes = [ref.size * ref.dtype.bytes for ref in refs]
    sizes += launched.scratch
    return check_text(
        text,
        sizes,
        programs=launched.programs,
        threads=launched.threads,
        shared_bytes=launched.shared_bytes,
        cluster=blocks_in_cluster(text),
    )


def check_text(
    text: str,
    sizes: Sequence[int],
    programs: int,
    threads: int,
    shared_bytes: int = 0,
    cluster: int = 1,
) -> Report:
    """The same of a text alone; `sizes` are the bytes of the parameters' memory."""
    code = read(text)
    assert len(code.params) == len(sizes), (code.params, sizes)
    memory = {n: size for (_, n), size in zip(code.params, sizes, strict=True)}
    walk = _Walk({**memory, "shared": shared_bytes}, _parts(text))
    values: dict[str, Any] = {
        name: Pointer(name, constant(0), plain_type(kind.removesuffix("*")))
        for kind, name in code.params
    }
    values["shared"] = Pointer("shared", constant(0), "char")
    for name, count in (
        ("threadIdx.x", threads),
        ("blockIdx.x", programs),
        ("cluster_ctarank", cluster),
    ):
        values[name] = Integer(symbol(0, max(count - 1, 0)), "u32")
    for name, count in (("blockDim.x", threads), ("gridDim.x", programs)):
        values[name] = Integer(constant(count), "u32")
    walk.run(code.body, values, Path(dead=not programs))
    return walk.report


def _parts(text: str) -> list[int]:
    """Where the parts of shared memory start that declarations name."""
    starts = re.findall(
        r"= (?:shared_address\(shared\)|\(\w+ ?\*\)\(shared) \+ (\d+)", text
    )
    return sorted({0, *map(int, starts)})


class _Walk(Numbers):
    """Runs a kernel for all threads, programs and data at once.

    `values` are by name and never changed in place but by assignments; a path says what
    holds. Passes over loops that only find ranges are silent.
    """

    def __init__(self, memory: dict[str, int], parts: Sequence[int] = (0,)):
        super().__init__()
        self.memory = memory
        # Of shared memory, by where they start: a symbol that is always this number,
        # so that an address says which part it is in.
        self._parts = parts
        self._starts: dict[int, Symbol] = {}
        self.report = Report()
        self._silent = 0
        self._nested, self._evaluations = 0, 0  # of elements of other elements
        self._line = ""
        self._maps: dict[tuple, TensorMap] = {}
        self._breaks: list[list[tuple[dict, Path]]] = []
        self._complained: set[tuple] = set()

    # --- statements ---

    def run(self, body: Iterable[Tree], values: dict, path: Path) -> Path:
        """Names that a block declares are forgotten at its end."""
        hidden: dict[str, Any] = {}
        for statement in body:
            if path.dead:
                break
            path = self._statement(statement, values, path, hidden)
        for name, value in hidden.items():
            values.pop(name, None)
            if value is not None:
                values[name] = value
        return path

    def _statement(self, tree: Tree, values: dict, path: Path, hidden: dict) -> Path:
        _, line, tree = tree
        self._line = line
        kind = tree[0]
        if kind == "block":
            return self.run(tree[1], values, path)
        if kind == "declarations":
            for part in tree[1]:
                path = self._statement(("at", line, part), values, path, hidden)
            return path
        if kind == "array" and tree[3] is None:  # shared memory
            return path
        if kind in ("declare", "array"):
            hidden.setdefault(tree[2], values.get(tree[2]))
            values[tree[2]] = self._declared(tree, values, path)
        elif kind == "assign":
            self._assign(tree[1], tree[2], values, path)
        elif kind == "do":
            self.value(tree[1], values, path)
        elif kind == "asm":
            if re.search(r"\b(ld|st|red|atom|cp|mbarrier|wgmma)\.", tree[1]):
                self._complain("an instruction that is not known here")
        elif kind == "if":
            return self._if(tree, values, path)
        elif kind == "for":
            self._for(tree, values, path)
        elif kind == "while":
            return self._while(tree, values, path)
        elif kind == "break":
            self._breaks[-1].append((dict(values), path))
            return Path(dead=True)
        elif kind == "return":
            return Path(dead=True)
        else:
            self._complain(f"{kind} is not known here")
        return path

    def _declared(self, tree: Tree, values: dict, path: Path) -> Any:
        form, kind, _, given = tree
        if form == "array":
            count = self.integer(given, values, path).form.number
            low, high = RANGES.get(plain_type(kind), (0, 0))
            return Registers(plain_type(kind), count, low, high)
        if given is not None:
            return self.cast(kind, self.value(given, values, path), path)
        if kind.endswith("*"):
            return REAL
        return self.any_of(plain_type(kind))

    def _assign(self, target: Tree, given: Tree, values: dict, path: Path) -> None:
        if target[0] == "name":
            name, old = target[1], values[target[1]]
            value = self.value(given, values, path)
            if isinstance(old, Integer):
                value = self.cast(old.kind, value, path)
            elif isinstance(old, Condition):
                value = self.condition(value)
            values[name] = value
            return
        if target[0] == "index" and target[1][0] == "name":
            array = values[target[1][1]]
            if isinstance(array, Registers):
                value = self.value(given, values, path)
                self._element(array, target, values, path)
                values[target[1][1]] = self._written(array, value, path)
                return
        if target[0] == "unary" and target[1] == "*":
            pointer = self.value(target[2], values, path)
        else:
            pointer = self._place(target, values, path)
        self.value(given, values, path)
        self._access(pointer, BYTES.get(getattr(pointer, "kind", ""), 1), path)

    def _written(self, array: Registers, value: Any, path: Path) -> Registers:
        """An array after one of its elements was set."""
        if array.kind not in RANGES:
            return replace(array, tree=None)
        low, high = RANGES[array.kind]
        if isinstance(value, Integer):
            low, high = path.range(self.plain(self.cast(array.kind, value, path), path))
        elif isinstance(value, Condition):
            low, high = 0, 1
        low, high = min(low, array.low), max(high, array.high)
        return replace(array, tree=None, low=low, high=high)

    def _if(self, tree: Tree, values: dict, path: Path) -> Path:
        _, given, then, other = tree
        condition = self.condition(self.value(given, values, path))
        first, second = dict(values), dict(values)
        one = self.run(then, first, path.assume(condition))
        two = self.run(other, second, path.assume(condition.negated))
        if one.dead or two.dead:
            values.update(second if one.dead else first)
            return two if one.dead else one
        for name in values:
            values[name] = self._joined(first[name], one, second[name], two)
        return path

    def _joined(self, a: Any, one: Path, b: Any, two: Path) -> Any:
        if a is b:
            return a
        if isinstance(a, Integer) and isinstance(b, Integer):
            x, y = self.plain(a, one), self.plain(b, two)
            if x.key == y.key:
                return Integer(x, a.kind)
            (low, high), (least, most) = one.range(x), two.range(y)
            return Integer(symbol(min(low, least), max(high, most)), a.kind)
        if isinstance(a, Registers) and isinstance(b, Registers):
            return replace(
                a, tree=None, low=min(a.low, b.low), high=max(a.high, b.high)
            )
        if isinstance(a, Condition):
            return Condition("any")
        if isinstance(a, Pointer) and isinstance(b, Pointer) and a.memory == b.memory:
            (low, high), (least, most) = one.range(a.offset), two.range(b.offset)
            return replace(a, offset=symbol(min(low, least), max(high, most)))
        return REAL

    # --- loops ---

    def _for(self, tree: Tree, values: dict, path: Path) -> None:
        _, name, start, stop, step, body = tree
        first = self.plain(self.integer(start, values, path), path)
        end = self.plain(self.integer(stop, values, path), path)
        by = step
        if not isinstance(step, int):
            by = self.plain(self.integer(step, values, path), path).number
        if by is None or by <= 0:
            return self._complain("a loop's step is not known")
        low, high = path.range(first)[0], path.range(end)[1] - 1
        if high < low:
            return None
        if first.number is not None:
            counter = symbol(0, (high - low) // by) * by + low
        else:
            counter = symbol(low, high)
        inside = path.assume(Condition("least", (counter - first,)))
        inside = inside.assume(Condition("least", (end - 1 - counter,)))
        if name == "i" and self._each(values, body, end.number, counter, inside):
            return None
        hidden = values.get(name)

        def enter(values: dict) -> Path:
            values[name] = Integer(counter)
            return inside

        if self._loop(enter, body, values, path):
            self._complain("a break out of a counted loop")
        values.pop(name, None)
        if hidden is not None:
            values[name] = hidden
        return None

    def _each(
        self,
        values: dict,
        body: Sequence[Tree],
        count: int | None,
        i: Linear,
        path: Path,
    ) -> bool:
        """`EACH(n) x[i] = tree`: all elements of an array are set."""
        statement = body[0][2] if len(body) == 1 else ("block",)
        if statement[0] != "assign" or statement[1][0] != "index":
            return False
        _, (_, base, index), tree = statement
        if base[0] != "name" or index != ("name", "i"):
            return False
        array = values[base[1]]
        if not isinstance(array, Registers) or array.count != count:
            return False
        inner = {**values, "i": Integer(i)}
        value = self.value(tree, inner, path)
        self.report.accesses += not self._silent
        if array.kind not in RANGES:
            return True
        fresh = self._written(replace(array, low=FAR, high=-FAR), value, path)
        if _is_pure(tree, values):
            fresh = replace(fresh, tree=tree, values=dict(values))
        values[base[1]] = fresh
        return True

    def _while(self, tree: Tree, values: dict, path: Path) -> Path:
        _, given, body = tree

        def enter(values: dict) -> Path:
            return path.assume(self.condition(self.value(given, values, path)))

        breaks = self._loop(enter, body, values, path)
        if given != ("bool", True):
            if breaks:
                self._complain("a break out of a loop with a condition")
            return path
        if not breaks:
            return Path(dead=True)
        (found, one), *others = breaks
        for name in list(values):
            joined = found[name]
            for other, two in others:
                joined = self._joined(joined, one, other[name], two)
            values[name] = joined
        return one if not others else path

    def _loop(
        self,
        enter: Callable[[dict], Path],
        body: Sequence[Tree],
        values: dict,
        path: Path,
    ) -> list[tuple[dict, Path]]:
        """Runs a body with ranges that it keeps, and leaves its names so."""
        names = [n for n in _assigned(body) if n in values]
        ranges = {n: self._range_of(values[n], path) for n in names}
        limits = sorted(self._limits(body, values, path))
        line = self._line
        for n in range(MOST_PASSES):
            self._silent += 1
            trial = self._entered(values, ranges)
            self._breaks.append([])
            end = self.run(body, trial, enter(trial))
            self._breaks.pop()
            self._silent -= 1
            wider = dict(ranges)
            if not end.dead:
                for name in names:
                    found = self._range_of(trial[name], end)
                    wider[name] = _wider(ranges[name], found)
            if wider == ranges:
                break
            for name in names:
                if n and wider[name] != ranges[name] and wider[name] is not None:
                    wider[name] = _widened(
                        ranges[name],
                        wider[name],
                        limits if n < MOST_PASSES // 2 else [],
                    )
            ranges = wider
        else:
            ranges = dict.fromkeys(names)
        self._line = line
        values.update(self._entered(values, ranges))
        last = dict(values)
        self._breaks.append([])
        self.run(body, last, enter(last))
        return self._breaks.pop()

    def _range_of(self, value: Any, path: Path) -> Any:
        if isinstance(value, Integer):
            return path.range(self.plain(value, path))
        if isinstance(value, Registers):
            return (value.low, value.high) if value.kind in RANGES else (0, 0)
        if isinstance(value, Pointer):
            return (value.memory, value.offset.key)
        return None

    def _entered(self, values: dict, ranges: Mapping[str, Any]) -> dict:
        """The values with which a loop's body starts, in any round."""
        made = dict(values)
        for name, found in ranges.items():
            old = values[name]
            if isinstance(old, Integer):
                low, high = found or RANGES[old.kind]
                least, most = RANGES[old.kind]
                form = symbol(max(low, least), min(high, most))
                made[name] = Integer(form, old.kind)
            elif isinstance(old, Registers):
                low, high = found or RANGES.get(old.kind, (0, 0))
                made[name] = replace(old, tree=None, low=low, high=high)
            elif isinstance(old, Condition):
                made[name] = Condition("any")
            elif isinstance(old, Pointer) and found != (old.memory, old.offset.key):
                made[name] = REAL
        return made

    def _limits(self, body: Any, values: dict, path: Path) -> Iterator[int]:
        """Numbers that a body compares with: likely ends of ranges."""
        constants = dict(_constants(body))
        yield from (-1, 0)
        for tree in _trees(body):
            if tree[0] == "binary" and tree[1] in ("==", "!=", "<", ">", "<=", ">="):
                for side in tree[2:]:
                    n = None
                    if side[0] == "number":
                        n = side[1]
                    elif side[0] == "name" and side[1] in constants:
                        n = constants[side[1]]
                    elif side[0] == "name" and isinstance(values.get(side[1]), Integer):
                        n = values[side[1]].form.number
                    if n is not None:
                        yield from (n - 1, n, n + 1)

    # --- expressions ---

    def value(self, tree: Tree, values: dict, path: Path) -> Any:
        kind = tree[0]
        if kind == "number":
            return Integer(constant(tree[1]), tree[2])
        if kind == "real":
            return REAL
        if kind == "bool":
            return ALWAYS if tree[1] else NEVER
        if kind == "name":
            return values.get(tree[1], REAL)
        if kind == "field":
            return values[f"{tree[1][1]}.{tree[2]}"]
        if kind == "cast":
            return self.cast(tree[1], self.value(tree[2], values, path), path)
        if kind == "select":
            return self._select(tree, values, path)
        if kind == "unary":
            return self._unary(tree, values, path)
        if kind == "binary":
            return self._binary(tree, values, path)
        if kind == "index":
            return self._index(tree, values, path)
        assert kind == "call", tree
        return self._call(tree, values, path)

    def integer(self, tree: Tree, values: dict, path: Path) -> Integer:
        return self.as_integer(self.value(tree, values, path))

    def _select(self, tree: Tree, values: dict, path: Path) -> Any:
        condition = self.condition(self.value(tree[1], values, path))
        one, two = path.assume(condition), path.assume(condition.negated)
        a = None if one.dead else self.value(tree[2], values, one)
        b = None if two.dead else self.value(tree[3], values, two)
        if a is None or b is None:
            return b if a is None else a
        if isinstance(a, Condition) and isinstance(b, Condition):
            yes = Condition("and", (condition, a))
            return Condition("or", (yes, Condition("and", (condition.negated, b))))
        if isinstance(a, Integer) and isinstance(b, Integer):
            kind = common_type(a.kind, b.kind)
            a, b = self.cast(kind, a, one), self.cast(kind, b, two)
        return self._joined(a, one, b, two)

    def _unary(self, tree: Tree, values: dict, path: Path) -> Any:
        _, operator, given = tree
        if operator == "&":
            return self._place(given, values, path)
        value = self.value(given, values, path)
        if operator == "*":
            return self._loaded(value, path)
        if operator == "!":
            return self.condition(value).negated
        if operator == "+":
            return value
        value = value if value is REAL else self.as_integer(value)
        if value is REAL:
            return REAL
        form = value.form * -1 - (operator == "~")
        kind = common_type(value.kind, "int")
        return self.cast(kind, Integer(form, kind), path)

    def _part(self, tree: Tree) -> Any:
        """`shared_address(shared) + 1024` and `shared + 1024`, or None."""
        _, operator, left, right = tree
        is_address = left == ("call", "shared_address", (), (("name", "shared"),))
        if operator != "+" or right[0] != "number":
            return None
        if not is_address and left != ("name", "shared"):
            return None
        start = self._starts.setdefault(right[1], Symbol(right[1], right[1]))
        form = Linear({start: 1})
        return Integer(form, "u32") if is_address else Pointer("shared", form, "char")

    def _binary(self, tree: Tree, values: dict, path: Path) -> Any:
        if (part := self._part(tree)) is not None:
            return part
        _, operator, left, right = tree
        a = self.value(left, values, path)
        if operator in ("&&", "||"):
            a = self.condition(a)
            under = path.assume(a if operator == "&&" else a.negated)
            if under.dead:
                return a
            b = self.condition(self.value(right, values, under))
            return Condition("and" if operator == "&&" else "or", (a, b))
        b = self.value(right, values, path)
        if isinstance(a, Pointer) or isinstance(b, Pointer):
            return self._moved(a, operator, b, path)
        if isinstance(a, Descriptor):
            return replace(a, at=a.at + self.plain(self.as_integer(b), path) * 16)
        is_comparison = operator in ("==", "!=", "<", ">", "<=", ">=")
        if isinstance(a, Condition) and isinstance(b, Condition) and operator in "&|":
            return Condition("and" if operator == "&" else "or", (a, b))
        if isinstance(a, Real) or isinstance(b, Real):
            return Condition("any") if is_comparison else REAL
        a, b = self.as_integer(a), self.as_integer(b)
        kind = common_type(a.kind, b.kind)
        if operator in ("<<", ">>"):
            kind = common_type(a.kind, "int")
        a, b = self.cast(kind, a, path), self.cast(kind, b, path)
        if is_comparison:
            return compared(operator, self.plain(a, path), self.plain(b, path))
        form = self.computed(operator, a, b, kind, path)
        return self.cast(kind, Integer(form, kind), path)

    # --- memory ---

    def _moved(self, a: Any, operator: str, b: Any, path: Path) -> Any:
        if isinstance(b, Pointer):
            a, b = b, a
        if isinstance(b, Pointer) or operator not in "+-":
            return Condition("any")
        by = self.plain(self.as_integer(b), path) * BYTES[a.kind]
        return replace(a, offset=a.offset + by * (-1 if operator == "-" else 1))

    def _place(self, tree: Tree, values: dict, path: Path) -> Any:
        """The address of `base[index]`, or of a name."""
        if tree[0] != "index":
            value = values.get(tree[1]) if tree[0] == "name" else None
            return self._pointed(tree, value)
        base = self._pointed(tree[1], self.value(tree[1], values, path))
        index = self.integer(tree[2], values, path)
        return self._moved(base, "+", index, path) if base is not REAL else REAL

    def _pointed(self, tree: Tree, value: Any) -> Any:
        """An array in registers as a pointer to its first element."""
        if isinstance(value, Registers):
            self.memory[f"{tree[1]} in registers"] = value.count * BYTES[value.kind]
            return Pointer(f"{tree[1]} in registers", constant(0), value.kind)
        return value if isinstance(value, Pointer) else REAL

    def _index(self, tree: Tree, values: dict, path: Path) -> Any:
        base = self.value(tree[1], values, path)
        if isinstance(base, Registers):
            return self._element(base, tree, values, path)
        return self._loaded(self._place(tree, values, path), path)

    def _may_evaluate(self) -> bool:
        """What is made of elements of many arrays is known by ranges only."""
        if not self._nested:
            self._evaluations = MOST_EVALUATIONS
        self._evaluations -= 1
        return self._evaluations > 0

    def _element(self, array: Registers, tree: Tree, values: dict, path: Path) -> Any:
        place = self.plain(self.integer(tree[2], values, path), path)
        size = BYTES[array.kind]
        name = f"{tree[1][1]} in registers"
        self.memory[name] = array.count * size
        self._access(Pointer(name, place * size, array.kind), size, path)
        if array.kind not in RANGES:
            return REAL
        key = ("element", id(array), place.key)
        if array.tree is not None and self._may_evaluate():
            # What was found where less is known holds here, and is the same number.
            found = self._seen.get(key)
            if found is None or path.facts[: len(found[2])] != found[2]:
                self._silent += 1
                self._nested += 1
                inner = {**array.values, "i": Integer(place)}
                value = self.value(array.tree, inner, path)
                self._nested -= 1
                self._silent -= 1
                found = (self.cast(array.kind, value, path), array, path.facts)
                self._seen[key] = found
            return found[0]
        if array.kind == "bool":
            return self.kept(key, array, lambda: Condition("any"))
        low, high = array.low, max(array.low, array.high)
        form = self.kept(key, array, lambda: symbol(low, high))
        return Integer(form, array.kind)

    def _loaded(self, pointer: Any, path: Path) -> Any:
        if not isinstance(pointer, Pointer):
            self._complain("an access by a pointer that is not known")
            return REAL
        self._access(pointer, BYTES[pointer.kind], path)
        return self.any_of(pointer.kind)

    def _access(self, pointer: Any, count: int, path: Path) -> None:
        if not isinstance(pointer, Pointer):
            return self._complain("an access by a pointer that is not known")
        if self._silent or path.dead:
            return None
        self.report.accesses += 1
        start, end = self._part_of(pointer)
        low, high = Path().range(pointer.offset)
        if low >= start and high + count <= end:
            return None
        offset = self.unwrapped(pointer.offset, path)
        if path.at_least(offset, start) and path.at_most(offset, end - count):
            self.report.guarded += 1
            return None
        low, high = path.range(pointer.offset)
        self._complain(
            f"bytes {low} to {high + count} of {pointer.memory}: {start} to {end}"
        )
        return None

    def _number(self, form: Linear) -> Linear:
        """An address without the part that it is in."""
        for start, symbol_of_start in self._starts.items():
            if n := form.terms.get(symbol_of_start):
                form = form - Linear({symbol_of_start: n}) + n * start
        return form

    def _part_of(self, pointer: Pointer) -> tuple[int, int]:
        """The bytes that an access may touch."""
        size = self.memory[pointer.memory]
        if pointer.memory == "shared":
            for start, symbol_of_start in self._starts.items():
                if pointer.offset.terms.get(symbol_of_start) == 1:
                    n = bisect(self._parts, start)
                    return self._parts[n - 1], [*self._parts, size][n]
        return 0, size

    def shared(self, value: Any, count: int, path: Path) -> None:
        """An access at an address in shared memory."""
        form = self.plain(self.as_integer(value), path)
        self._access(Pointer("shared", form, "u8"), count, path)

    def _complain(self, what: str) -> None:
        if not self._silent and (what, self._line) not in self._complained:
            self._complained.add((what, self._line))
            self.report.outside.append(f"{what}: {self._line}")

    # --- functions ---

    def _call(self, tree: Tree, values: dict, path: Path) -> Any:
        _, name, templates, given = tree
        if name in ("get", "get_once", "put_once"):
            return self._moved_bytes(int(templates[0]), given, values, path)
        args = [self.value(a, values, path) for a in given]
        known = getattr(self, f"_call_{name}", None)
        if known is not None:
            return known(args, templates, path)
        if name in ("min", "least", "max", "greatest"):
            return self._extreme_of(args, 1 if name in ("min", "least") else -1, path)
        if name in ("divide", "remainder_of"):
            return self._divide(args, name == "remainder_of", path)
        if name.startswith("__shfl"):
            return self._shuffled(args[1], path)
        if name in ("__all_sync", "__any_sync"):
            return Condition("any")
        if name in SMALL:
            return Integer(symbol(0, SMALL[name]))
        if re.fullmatch(r"copy_(in|out|to_blocks)_\d", name):
            return self._copied(name, args, path)
        if name.startswith("barrier_"):
            return self.shared(args[0], 8, path)
        if name.startswith("product_"):
            return self._multiplied(name, given, args, values, path)
        if name.startswith("atomic") or name in ("__ldg", "__ldcg", "__stcs", "__stcg"):
            return self._loaded(args[0], path)
        if WITHOUT_MEMORY.fullmatch(name):
            return Condition("any") if name == "elected" else REAL
        has_address = any(isinstance(a, Pointer | Registers | Descriptor) for a in args)
        if has_address or not VALUES.fullmatch(name):
            self._complain(f"{name} is not known here")
        return REAL

    def _moved_bytes(
        self, count: int, given: Sequence[Tree], values: dict, path: Path
    ) -> None:
        """`get<count>(to, from)` and its like."""
        for tree in given:
            pointer = self._argument(tree, values, path)
            self._access(pointer, count, path)
        target = given[0]
        while target[0] == "binary":
            target = target[2]
        array = values.get(target[1]) if target[0] == "name" else None
        if isinstance(array, Registers):
            low, high = RANGES.get(array.kind, (0, 0))
            values[target[1]] = replace(array, tree=None, low=low, high=high)

    def _argument(self, tree: Tree, values: dict, path: Path) -> Any:
        """A pointer argument, of which the first part may be an array in registers."""
        if tree[0] == "binary":
            base = self._argument(tree[2], values, path)
            return self._moved(base, tree[1], self.integer(tree[3], values, path), path)
        if tree[0] == "unary" and tree[1] == "&":
            return self._place(tree[2], values, path)
        return self._pointed(tree, self.value(tree, values, path))

    def _extreme_of(self, args: Sequence[Any], sign: int, path: Path) -> Any:
        if any(isinstance(a, Real) for a in args):
            return REAL
        a, b = (self.as_integer(x) for x in args)
        kind = common_type(a.kind, b.kind)
        a, b = self.cast(kind, a, path), self.cast(kind, b, path)
        form = self.extreme(self.plain(a, path), self.plain(b, path), sign, path)
        return Integer(form, kind)

    def _divide(self, args: Sequence[Any], is_remainder: bool, path: Path) -> Any:
        if any(isinstance(a, Real) for a in args):
            return REAL
        a, b = (self.as_integer(x) for x in args)
        x, y = self.plain(a, path), self.plain(b, path)
        n = y.number
        if n is not None and n > 0:
            form = self.computed(
                "%" if is_remainder else "/", Integer(x, a.kind), b, a.kind, path
            )
            return Integer(form, a.kind)
        return self.any_of(a.kind)

    def _shuffled(self, value: Any, path: Path) -> Any:
        """Another thread's value, which is at the same place of the program."""
        if not isinstance(value, Integer | Condition):
            return REAL
        value = self.as_integer(value)
        return Integer(symbol(*path.range(self.plain(value, path))), value.kind)

    def _call_shared_address(self, args: Sequence[Any], _: Any, path: Path) -> Any:
        return Integer(args[0].offset, "u32")

    def _call_operand(self, args: Sequence[Any], templates: Any, path: Path) -> Any:
        at, apart = (self.plain(self.as_integer(a), path) for a in args)
        return Descriptor(at, apart, int(templates[0]) if templates else 128)

    def _call_put_shared(self, args: Sequence[Any], _: Any, path: Path) -> None:
        self.shared(args[0], 4 * (len(args) - 1), path)

    def _call_put_matrices(self, args: Sequence[Any], _: Any, path: Path) -> None:
        self.shared(args[0], 16, path)

    def _call_arrive_at(self, args: Sequence[Any], _: Any, path: Path) -> None:
        self.shared(args[0], 8, path)

    def _call_prefetch(self, args: Sequence[Any], _: Any, path: Path) -> None:
        self._line_of(args[0], args[1], path)

    def _call_copy_line(self, args: Sequence[Any], _: Any, path: Path) -> None:
        to, source, count, barrier = args
        self._line_of(source, count, path)
        form = self.plain(self.as_integer(count), path)
        self.shared(to, path.range(form)[1], path)
        self.shared(barrier, 8, path)

    def _line_of(self, source: Any, count: Any, path: Path) -> None:
        form = self.plain(self.as_integer(count), path)
        self._access(source, path.range(form)[1], path)

    def _call_swizzled(self, args: Sequence[Any], templates: Any, path: Path) -> Any:
        """In its row, of SWIZZLE bytes, another line of 16 bytes, at its place."""
        by, size, rows = map(int, templates)
        row, column = (self.plain(self.as_integer(a), path) for a in args)
        panel, inner = self.divided(column * size, by, path)
        _, rest = self.divided(inner, 16, path)
        at = panel * (rows * by) + row * by + symbol(0, by // 16 - 1) * 16 + rest
        return Integer(self.divided(at, size, path)[0])

    def _call_swizzled_part(self, args: Sequence[Any], given: Any, path: Path) -> Any:
        by, size = map(int, given)
        column = self.plain(self.as_integer(args[1]), path)
        block, inner = self.divided(column, by // size, path)
        _, rest = self.divided(inner, 16 // size, path)
        lines = symbol(0, by // 16 - 1) * (16 // size)
        return Integer(block * (by // size) + lines + rest)

    # --- tensor maps, copies, matmuls ---

    def _call_map_array(self, args: Sequence[Any], templates: Any, path: Path) -> None:
        at = self.plain(self.as_integer(args[0]), path)
        rank, code, _ = map(int, templates)
        element = {0: 1, 1: 2, 2: 4, 3: 4, 6: 2, 7: 4, 10: 2, 11: 4}[code]
        self.shared(args[0], MAP_BYTES, path)
        self._maps[("made", at.key)] = TensorMap(args[1], rank, element)

    def _call_map_dim(self, args: Sequence[Any], templates: Any, path: Path) -> None:
        at, size, box = (self.plain(self.as_integer(a), path) for a in args)
        made = self._maps[("made", at.key)]
        made.sizes[int(templates[0])] = size.number
        made.boxes[int(templates[0])] = box.number

    def _call_map_stride(self, args: Sequence[Any], templates: Any, path: Path) -> None:
        at, stride = (self.plain(self.as_integer(a), path) for a in args)
        self._maps[("made", at.key)].strides[int(templates[0])] = stride.number

    def _call_map_publish(self, args: Sequence[Any], _: Any, path: Path) -> None:
        at = self.plain(self.as_integer(args[0]), path)
        made = self._maps[("made", at.key)]
        self._access(args[1], MAP_BYTES, path)
        self._maps[(args[1].memory, args[1].offset.key)] = made
        strides = [made.bytes, *(made.strides[n] for n in range(made.rank - 1))]
        reach = sum((made.sizes[n] - 1) * s for n, s in enumerate(strides))
        if all(made.sizes.values()):
            self._access(made.array, reach + made.bytes, path)

    def _call_map_seen(self, args: Sequence[Any], _: Any, path: Path) -> None:
        self._map_at(args[0])

    def _map_at(self, pointer: Any) -> TensorMap | None:
        found = None
        if isinstance(pointer, Pointer):
            found = self._maps.get((pointer.memory, pointer.offset.key))
        if found is None:
            self._complain("a tensor map that was not published")
        return found

    def _copied(self, name: str, args: Sequence[Any], path: Path) -> None:
        """Boxes are clipped to their arrays; in shared memory they are whole."""
        is_out = name.startswith("copy_out")
        made = self._map_at(args[0 if is_out else 1])
        if made is not None:
            count = made.bytes * prod(made.boxes.values())
            self.shared(args[1 if is_out else 0], count, path)
            if len(args) - made.rank != (2 if is_out else 3 + ("blocks" in name)):
                self._complain("a box of another rank than its tensor map")
        if not is_out:
            self.shared(args[2], 8, path)

    def _multiplied(
        self,
        name: str,
        given: Sequence[Tree],
        args: Sequence[Any],
        values: dict,
        path: Path,
    ) -> None:
        """The patterns of shared memory that a matmul's operands are in."""
        columns, dtype, how, *turned = name.removeprefix("product_").split("_")
        turned = turned[0] if turned else ""
        size = {"bf16": 2, "f16": 2, "f32": 4, "i8": 1}.get(dtype, 1)
        sides = [("b", args[-2], int(columns))]
        if how == "shared":
            sides.append(("a", args[1], 64))
        for side, operand, rows in sides:
            if not isinstance(operand, Descriptor):
                self._complain("an operand that is not known")
                continue
            by = operand.swizzle
            start = operand.at - self.divided(self._number(operand.at), 8 * by, path)[1]
            if side in turned:  # panels of `depth` rows
                panels = -(-rows * size // by)
                last = operand.apart * (panels - 1) + 32 // size * by
            else:
                last = constant(-(-rows // 8) * 8 * by)
            self._access(Pointer("shared", start, "u8"), 1, path)
            self._access(Pointer("shared", start + last - 1, "u8"), 1, path)
        count = int(columns) // 2
        sums = self._argument(given[0], values, path)
        self._access(sums, count * 4, path)


def _wider(a: Any, b: Any) -> Any:
    if a is None or b is None or a == b:
        return a if a == b else None
    if isinstance(a[0], str) or isinstance(b[0], str):
        return None
    return (min(a[0], b[0]), max(a[1], b[1]))


def _widened(old: Any, new: Any, limits: Sequence[int]) -> Any:
    """A range that grew, extended to the next likely end."""
    if old is None or isinstance(new[0], str):
        return new
    low, high = new
    if low < old[0]:
        low = max((n for n in limits if n <= low), default=-FAR)
    if high > old[1]:
        high = min((n for n in limits if n >= high), default=FAR)
    return (low, high)


def _trees(tree: Any) -> Iterator[Tree]:
    if isinstance(tree, tuple):
        if tree and isinstance(tree[0], str):
            yield tree
        for part in tree:
            yield from _trees(part)


def _constants(body: Any) -> Iterator[tuple[str, int]]:
    for tree in _trees(body):
        if tree[0] == "declare" and tree[3] is not None and tree[3][0] == "number":
            yield tree[2], tree[3][1]


def _assigned(body: Any) -> list[str]:
    """Names that a body sets, or of which it sets elements."""
    names: dict[str, None] = {}
    for tree in _trees(body):
        target = None
        if tree[0] == "assign":
            target = tree[1]
        elif tree[0] == "call" and tree[1] in ("get", "get_once", "put_once"):
            target = tree[3][0]
        while target is not None and target[0] in ("index", "binary"):
            target = target[1] if target[0] == "index" else target[2]
        if target is not None and target[0] == "name":
            names[target[1]] = None
    return list(names)


def _is_pure(tree: Tree, values: Mapping[str, Any]) -> bool:
    """Whether a tree gives the same whenever it is asked: it loads nothing."""
    for part in _trees(tree):
        if part[0] == "unary" and part[1] == "*":
            return False
        is_named = part[0] == "index" and part[1][0] == "name"
        if is_named and not isinstance(values.get(part[1][1]), Registers):
            return False
        if part[0] == "call" and part[1].startswith(("__shfl", "atomic", "__ld")):
            return False
    return True
