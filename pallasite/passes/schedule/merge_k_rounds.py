"""merge_k_rounds: gives loops that only accumulate matmuls fewer, deeper iterations.

In: a loop whose iterations each load the next part of rows and columns along k,
multiply them and add the product to a carried accumulator. Out: one matmul of all
parts, or the same loop with a larger step. `merge_k_steps.py` does the same for grids;
loops that do anything else are left as they are.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, Block, Gather, Kernel, Op, Span, Value
from pallasite.ir.opdef import Effect, table
from pallasite.ir.rewrite import Rewriter, inline, map_ops, users_of
from pallasite.ir.roles import Loop
from pallasite.passes.analysis.affine import Affine, Form, Forms
from pallasite.passes.schedule.widen_k import (
    Deeper,
    Depths,
    adds_up,
    only_user,
)


def merge_k_rounds(kernel: Kernel, most_bytes: int) -> Kernel:
    """Merge all iterations, or as many as keep computed tiles within `most_bytes`."""
    return map_ops(kernel, partial(_merged, most_bytes))


def _merged(most_bytes: int, op: Op, b: Rewriter) -> Sequence[Value] | None:
    if op.name != "for":
        return None
    loop = Loop.of(op)
    found = _Rounds(loop, b)
    if not found.rounds or not found.only_sums():
        return None
    # Matmuls are blocked for the caches, whatever their depth.
    factor = found.depths.factor(len(found.rounds), sys.maxsize, most_bytes)
    if factor == 1:
        return None
    body = found.deeper(factor)
    if factor == len(found.rounds):
        return inline(b, body, [loop.first, *loop.inits])
    step = b.like(found.rounds.step * factor, loop.step)
    bounds = (loop.first, loop.limit, step)
    return b.emit("for", *bounds, *loop.inits, regions=(body,))


class _Rounds:
    """What a loop's body does, as a function of the iteration."""

    def __init__(self, loop: Loop, b: Rewriter):
        self.body = loop.body
        made = {**b.producers, **{v: o for o in self.body.ops for v in o.results}}
        self.depths, self.users = Depths(made), users_of(self.body)
        self.index, self.params, self.starts = loop.index, loop.carried, loop.inits
        limits = [n for n in map(self._integer, loop.bounds) if n is not None]
        known = len(limits) == 3 and limits[2] > 0
        self.rounds = range(*limits) if known else range(0)
        self.counters = dict[Value, int]()  # carried numbers: their increments
        self.totals: set[Op] = set()
        self.products: set[Op] = set()
        for param, end in zip(self.params, self.body.yields, strict=True):
            self._sort_out(param, end)

    def _sort_out(self, param: Value, end: Value) -> None:
        """Classify a carried value as a counter or an accumulator."""
        add = self.depths.made.get(end)
        if add is None or add.name != "add" or param not in add.operands:
            return
        others = [v for v in add.operands if v is not param]
        if len(others) != 1:
            return
        step, product = self._integer(others[0]), self.depths.made.get(others[0])
        if step is not None and not param.tile.rank:
            self.counters[param] = step
        elif product is not None and product.name == "dot" and adds_up(product):
            alone = (only_user(self.users, v, "add") for v in add.operands)
            if all(alone) and not self.users[end]:
                self.totals.add(add)
                self.products.add(product)

    def _integer(self, value: Value) -> int | None:
        number = self.depths.number(value)
        return number if type(number) is int else None

    def only_sums(self) -> bool:
        self.forms = self._forms()
        ends = zip(self.params, self.body.yields, strict=True)
        carried = all(
            p in self.counters or p is end or self.depths.made.get(end) in self.totals
            for p, end in ends
        )
        return (
            carried
            and bool(self.totals)
            and all(map(self._only_adds_products, self.body.ops))
        )

    def _forms(self) -> Forms:
        """How numbers depend on the iteration number."""
        forms = Forms([Value(self.index.type)])
        forms.known[self.index] = _line(self.rounds.step, self.rounds.start)
        for param, start in zip(self.params, self.starts, strict=True):
            if param in self.counters:
                forms.known[param] = _line(self.counters[param], self._integer(start))
            else:
                forms.known[param] = forms.anything()
        for value in self.users:
            number = self._integer(value)
            if number is not None:
                forms.known[value] = forms.fixed(number)
        forms.add_ops(self.body.ops, loads_vary=False)
        return forms

    def _only_adds_products(self, op: Op) -> bool:
        if op.regions or any(v.is_ref for v in op.results):
            return False
        if op.name == "load":
            return not self._changes(op) or self._is_part(op)
        if table()[op.name].effect is not Effect.PURE:
            return False
        if op in self.products:
            return self.depths.are_summed(op)
        if self.depths.touches(op):
            return op in self.totals or self.depths.follow(op)
        # Numbers may vary between iterations if only loads use them.
        form = self.forms.of(op.results[0])
        return not self._changes(op) or op in self.totals or form.affine is not None

    def _changes(self, op: Op) -> bool:
        return any(self.forms.of(v).axes for v in op.operands)

    def _is_part(self, op: Op) -> bool:
        """Whether an op loads the part right after the previous iteration's."""
        access = Access.of(op)
        if access.mask is not None or Gather() in access.index:
            return False
        moving = [
            (entry, span, self.forms.of(start))
            for entry, (span, start) in enumerate(access.split_index())
            if start is not None and self.forms.of(start).axes
        ]
        if len(moving) != 1:
            return False
        ((entry, span, form),) = moving
        if not isinstance(span, Span) or span.stride != 1 or form.affine is None:
            return False
        first, last = form.affine.range([len(self.rounds)])
        inside = first >= 0 and last + span.size <= access.ref.ref.shape[entry]
        if form.spread or form.affine.coeffs != (span.size,) or not inside:
            return False
        self.depths.add_load(op, entry)
        return True

    def deeper(self, factor: int) -> Block:
        b, deeper = Builder(), Deeper(self.depths, factor)
        for op in self.body.ops:
            deeper.emit(b, op)
        ends = list(self.body.yields)
        for n, param in enumerate(self.params):
            if param in self.counters:
                ends[n] = b.add(param, b.like(self.counters[param] * factor, param))
        return replace(self.body, ops=tuple(b.ops), yields=tuple(ends))


def _line(step: int, start: int | None) -> Form:
    return Form(frozenset([0]), Affine((step,), start))
