"""A rewriting walk that gives tiles and scratch another shape for the same elements.

Base class of passes in this folder that decide the shape in which a value is computed
and stored. A subclass says which values get another shape, how a tile is converted from
one to the other, and how ops compute in the new shapes; what it has no rule for gets
its operands in their own shapes. Loops, branches and accesses to scratch are here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from pallasite.ir.build import Builder, access_operands
from pallasite.ir.nodes import Access, At, Block, Gather, Kernel, Op, Span, Value, walk
from pallasite.ir.opdef import TILE
from pallasite.ir.rewrite import is_elementwise, users_of
from pallasite.ir.roles import Loop, While
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.order import order

Shape = tuple[int, ...]
Entry = At | Span | Gather


class FormWalk(ABC):
    """`formed` are the new values of those that have another shape, `own` of others."""

    def __init__(self) -> None:
        self.formed: dict[Value, Value] = {}
        self.own: dict[Value, Value] = {}

    # --- what a subclass says ---

    RULES: ClassVar[Mapping[str, Callable[..., Value | None]]] = {}

    @abstractmethod
    def shape(self, value: Value) -> Shape | None:
        """The other shape of a tile or of scratch; None: it keeps its own."""
        ...

    @abstractmethod
    def widened(self, b: Builder, formed: Value, value: Value) -> Value:
        """A tile in the shape of `value`, from the one in its other shape."""
        ...

    @abstractmethod
    def narrowed(self, b: Builder, value: Value, shape: Shape) -> Value:
        """A tile in another shape, from the one in its own or in yet another."""
        ...

    # --- values ---

    def full(self, b: Builder, value: Value) -> Value:
        """The new value in the old one's shape."""
        if value in self.formed and not value.is_ref:
            return self.widened(b, self.formed[value], value)
        return self.formed.get(value) or self.own.get(value, value)

    def fitted(self, b: Builder, value: Value) -> Value:
        """The new value in the shape that the old one gets."""
        shape = self.shape(value)
        if shape is None:
            return self.full(b, value)
        return self.formed.get(value) or self.narrowed(b, self.full(b, value), shape)

    def note(self, b: Builder, old: Value, new: Value) -> None:
        """Record the value that an op has now, in whichever shape it is."""
        shape = self.shape(old)
        if shape is None:
            self.own[old] = new
        else:
            same = new.type.shape == shape
            self.formed[old] = new if same else self.narrowed(b, new, shape)

    # --- code ---

    def block(self, block: Block, formed: Sequence[Value] | None = None) -> Block:
        """The block in new shapes.

        Args:
            block: old code.
            formed: the values that its yields become, whose shapes it takes over, as
                its parameters do; None: parameters and yields keep their shapes.
        """
        b = Builder()
        params = [self._param(b, p, formed is not None) for p in block.params]
        for op in block.ops:
            b.loc = op.loc
            self.op(b, op)
        if formed is None:
            yields = [self.full(b, v) for v in block.yields]
        else:
            pairs = zip(block.yields, formed, strict=True)
            yields = [self.yielded(b, v, target) for v, target in pairs]
        return Block(tuple(params), tuple(b.ops), tuple(yields))

    def _param(self, b: Builder, param: Value, is_formed: bool) -> Value:
        shape = self.shape(param)
        if param.is_ref or shape is None:
            return self.own.get(param, param)
        if is_formed:
            self.formed[param] = Value(param.type.with_shape(shape), param.name)
            return self.formed[param]
        self.note(b, param, param)
        return param

    def yielded(self, b: Builder, value: Value, target: Value) -> Value:
        """A value in the shape that `target` gets."""
        shape = self.shape(target)
        if shape is None:
            return self.full(b, value)
        new = self.formed.get(value)
        if new is None:
            new = self.full(b, value)
        return new if new.type.shape == shape else self.narrowed(b, new, shape)

    def op(self, b: Builder, op: Op) -> None:
        if op.name in ("for", "while", "cond"):
            self.control(b, op)
        elif op.name == "alloc" and self.shape(op.result) is not None:
            self.scratch(b, op)
        elif op.name in ("load", "store") and op.operands[0] in self.formed:
            self.access(b, op)
        elif not op.regions and len(op.results) == 1 and self.computed(b, op):
            pass
        else:
            self.kept(b, op)

    def computed(self, b: Builder, op: Op) -> bool:
        """Handle an op that has a rule and whose shapes change."""
        changes = [v for v in (*op.operands, op.result) if self.shape(v) is not None]
        rule = self.RULES.get(op.name)
        if rule is None and is_elementwise(op):
            rule = type(self).elementwise
        if not changes or rule is None or any(v.is_ref for v in op.operands):
            return False
        count = len(b.ops)
        new = rule(self, b, op)
        if new is None:
            del b.ops[count:]
            return False
        self.note(b, op.result, new)
        return True

    def elementwise(self, b: Builder, op: Op) -> Value | None:
        """An elementwise op in the shape of its result."""
        shape = self.shape(op.result)
        if shape is None:
            return None
        operands = [
            self.yielded(b, v, op.result) if v.type.shape else self.full(b, v)
            for v in op.operands
        ]
        return b.op(op.name, *operands, **op.attrs)

    def kept(self, b: Builder, op: Op) -> None:
        """An op in its own shapes."""
        operands = tuple(self.full(b, v) for v in op.operands)
        regions = tuple(self.block(region) for region in op.regions)
        results = tuple(Value(v.type, v.name) for v in op.results)
        b.ops.append(op.with_(operands=operands, regions=regions, results=results))
        for old, new in zip(op.results, results, strict=True):
            self.note(b, old, new)

    def control(self, b: Builder, op: Op) -> None:
        """Loop-carried values and results of branches have their new shapes."""
        results = [Value(self.type(v), v.name) for v in op.results]
        if op.name == "for":
            loop = Loop.of(op)
            bounds = [self.full(b, v) for v in loop.bounds]
            inits = [
                self.yielded(b, v, target)
                for v, target in zip(loop.inits, loop.results, strict=True)
            ]
            operands = (*bounds, *inits)
            regions = (self.block(loop.body, loop.results),)
        elif op.name == "while":
            loop = While.of(op)
            operands = tuple(
                self.yielded(b, v, target)
                for v, target in zip(loop.inits, op.results, strict=True)
            )
            # It is one bool, whatever its operands have become.
            tests = [Value(v.type, v.name) for v in loop.condition.yields]
            condition = self.block(loop.condition, tests)
            regions = (condition, self.block(loop.body, op.results))
        else:
            operands = tuple(self.full(b, v) for v in op.operands)
            regions = tuple(self.block(r, op.results) for r in op.regions)
        changed = op.with_(operands=operands, results=tuple(results), regions=regions)
        b.ops.append(changed)
        for old, new in zip(op.results, results, strict=True):
            self.own[old] = new
            if self.shape(old) is not None:
                self.formed[old] = new

    def type(self, value: Value):
        shape = self.shape(value)
        return value.type if shape is None else value.type.with_shape(shape)

    # --- scratch ---

    def scratch(self, b: Builder, op: Op) -> None:
        new = Value(self.type(op.result), op.result.name)
        b.ops.append(op.with_(results=(new,), attrs={**op.attrs, "type": new.type}))
        self.formed[op.result] = new

    @abstractmethod
    def access(self, b: Builder, op: Op) -> None:
        """A load or store of a ref that has another shape."""
        ...

    def accessed(
        self,
        b: Builder,
        op: Op,
        entries: Sequence[tuple[Entry, Value | None]],
        tile: Callable[[Value], Value],
    ) -> Value | None:
        """The access with another index; `tile` gives its tiles in the new shape."""
        access = Access.of(op)
        new = replace(
            access,
            ref=self.formed[access.ref],
            index=tuple(entry for entry, _ in entries),
            index_operands=tuple(self.full(b, v) for _, v in entries if v is not None),
            value=None if access.value is None else tile(access.value),
            mask=None if access.mask is None else tile(access.mask),
            other=None if access.other is None else tile(access.other),
        )
        attrs = {**op.attrs, "index": new.index}
        made = b.emit(op.name, *access_operands(new), **attrs)
        return made[0] if made else None


def plain_scratch(kernel: Kernel, is_plain: Callable[[Access, Op], bool]) -> set[Value]:
    """Scratch that is used only by loads and stores of which `is_plain` holds."""
    users = users_of(kernel.body)

    def is_access(op: Op, ref: Value) -> bool:
        if op.name not in ("load", "store") or op.operands.count(ref) != 1:
            return False
        access = Access.of(op)
        return access.ref is ref and is_plain(access, op)

    return {
        ref
        for op in walk(kernel.body)
        if op.name == "alloc"
        for ref in op.results
        if all(is_access(user, ref) for user in users[ref])
    }


def reformed(kernel: Kernel, forms: FormWalk) -> Kernel:
    """The kernel in new shapes, canonicalized; the same object if nothing differs."""
    if kernel.level != TILE:
        return kernel
    new = order(canonicalize(kernel.with_(body=forms.block(kernel.body))))
    return kernel if new.text == kernel.text else new
