"""Block indices as code: when two are the same function of grid indices, and copies."""

from collections.abc import Sequence
from functools import cached_property

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Value
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import producers_of
from pallasite.ir.text import attr_text
from pallasite.passes.analysis.affine import Forms

Key = tuple[object, ...]


class IndexCode:
    """Block indices as functions of the grid indices, the parameters of a block."""

    def __init__(self, body: Block):
        self.body = body
        self.ids = {value: axis for axis, value in enumerate(body.params)}
        self.made = producers_of(body)
        self.keys: dict[Value, Key | None] = {}

    def key(self, value: Value) -> Key | None:
        """A key, equal for equal functions; None if loops or memory are involved."""
        if value not in self.keys:
            self.keys[value] = self._key(value)
        return self.keys[value]

    def _key(self, value: Value) -> Key | None:
        if value in self.ids:
            return ("id", self.ids[value])
        op = self.made.get(value)
        if op is None:
            # A ref in main memory is itself; a parameter of a region is unknown.
            return ("ref", id(value)) if value.is_ref else None
        effect = table()[op.name].effect
        reads = op.name == "load" and not op.operands[0].ref.dtype.is_float
        if op.regions or not (effect is Effect.PURE or reads):
            return None
        operands = [self.key(v) for v in op.operands]
        if None in operands:
            return None
        attrs = tuple((k, attr_text(op.attrs[k])) for k in sorted(op.attrs))
        return (op.name, attrs, *operands)

    def reads(self, value: Value) -> set[Value]:
        """The memory that the function of a value reads."""
        op = self.made.get(value)
        found = {v for v in op.operands if v.is_ref} if op is not None else set[Value]()
        return found.union(*(self.reads(v) for v in op.operands)) if op else found

    @cached_property
    def forms(self) -> Forms:
        forms = Forms(self.body.params)
        forms.add_ops(self.body.ops)
        return forms

    def digits(self, value: Value, sizes: Sequence[int]) -> list[int]:
        """The axes whose grid indices are the digits of the value, or nothing.

        An axis has one digit; two, as `backward_axes.py` makes them, combine to
        `outer * sizes[inner] + inner`.
        """
        form = self.forms.of(value)
        if self.key(value) is None or form.affine is None or form.affine.const != 0:
            return []
        coeffs = form.affine.coeffs
        axes = sorted(form.axes, key=lambda a: -coeffs[a])
        unit = 1
        for axis in reversed(axes):
            if coeffs[axis] != unit:
                return []
            unit *= sizes[axis]
        return axes

    def emit(self, b: Builder, value: Value, known: dict[Value, Value]) -> Value:
        """Emit the function; `known` maps grid indices and is extended."""
        if value not in known:
            op = self.made.get(value)
            if op is None:
                return value  # a ref
            operands = tuple(self.emit(b, v, known) for v in op.operands)
            (known[value],) = b.emit(op.name, *operands, **op.attrs)
        return known[value]
