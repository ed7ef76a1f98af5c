"""Atomics: Triton's own, and for narrow types loops that compare and swap.

Hardware swaps 16 bits at least. A narrower element, or one of 16 bits for which there
is no instruction, is changed in its 16-bit word: swap if the word is as last seen, else
try again with what was found. A lane that has nothing to do swaps a word for itself,
which changes nothing.
"""

from collections.abc import Callable, Mapping

from pallasite.backends.triton.core import FLOAT_BITS
from pallasite.backends.triton.memory import Memory, Place
from pallasite.backends.triton.text import Val
from pallasite.ir.nodes import Access, Op, Value
from pallasite.ir.types import DType

WORD = "i16"


class Atomics(Memory):
    """Emits atomics."""

    scratch: Mapping[Value, Val]  # of an even number of bytes

    def emit_atomic_rmw(self, op: Op) -> None:
        access = Access.of(op)
        assert access.value is not None
        dtype, kind = access.ref.ref.dtype, op.attrs["kind"]
        by_sign = dtype.is_float and kind in ("max", "min") and dtype.bits >= 32
        name = _ATOMICS.get((kind, dtype.kind))
        narrow = dtype.bits < 16 or (dtype.bits == 16 and name != "fadd")
        if not by_sign and not narrow and name is None:
            self.refuse(op, f"Triton does not support atomic {kind} of {dtype}")
        place = self.place(op, access, access.value.tile.shape)
        user = None if access.mask is None else self.env[access.mask]
        value = self.env[access.value]
        mask = self.both(place.mask, user)
        mask = self.spread(mask or self.const(True, "i1"), place.shape)
        with self.between_fences(place.view):
            if narrow:
                change = lambda now: self.after(op, now, value, dtype)
                old = self.swapped(op, place, mask, dtype, change)
            elif by_sign:
                old = self.float_extreme(kind, place, value, mask)
            else:
                assert name is not None
                old = self.atomic(name, place.pointers, value, mask, self.order(place))
        self.env[op.result] = self.past_edge_filled(place, old)

    def order(self, place: Place) -> str:
        """Where nobody reads, nothing else needs to be visible before or after."""
        return "relaxed" if place.view.memory in self.merged else "acq_rel"

    def atomic(
        self, name: str, pointers: Val, value: Val, mask: Val, order: str = "acq_rel"
    ) -> Val:
        types = f"({pointers.type}, {value.type}, {mask.type}) -> {value.type}"
        text = f"tt.atomic_rmw {name}, {order}, gpu, {pointers}, {value}, {mask}"
        return self.let(f"{text} : {types}", value.shape, value.elem, shared=False)

    def float_extreme(self, kind: str, place: Place, value: Val, mask: Val) -> Val:
        """The maximum or minimum of floats, by integer atomics.

        The bits of floats without sign are ordered like the floats; with sign, in
        reverse. So the sign of the new value determines which of two integer atomics is
        right. NaN gets the sign with which it wins; a NaN in memory wins only with that
        sign.
        """
        whole = f"i{FLOAT_BITS[value.elem]}"
        sign = 1 << (FLOAT_BITS[value.elem] - 1)
        numbers = self.bits(value, whole)
        is_nan = self.compare("uno", value, value)
        nan = self.bits(self.like(float("nan"), value), whole)
        if kind == "min":
            nan = self.apply("arith.ori", nan, self.like(sign, nan))
        numbers = self.select(is_nan, nan, numbers)
        negative = self.compare("slt", numbers, self.like(0, numbers))
        positive = self.apply("arith.xori", negative, self.like(True, negative))
        places = self.retyped(place.pointers, whole)
        names = ("max", "umin") if kind == "max" else ("min", "umax")
        masks = (self.apply("arith.andi", mask, x) for x in (positive, negative))
        old = [
            self.atomic(name, places, numbers, each, self.order(place))
            for name, each in zip(names, masks, strict=True)
        ]
        return self.bits(self.select(negative, old[1], old[0]), value.elem)

    def emit_atomic_cas(self, op: Op) -> None:
        access = Access.of(op)
        assert access.value is not None and access.compare is not None
        dtype = access.ref.ref.dtype
        place = self.place(op, access, access.value.tile.shape)
        self.check_memory(op, place, dtype)
        value, old = self.env[access.value], self.env[access.compare]
        whole = f"i{dtype.bits}"  # floats are compared bit by bit
        pointers = self.retyped(place.pointers, whole)
        new, seen = self.bits(value, whole), self.bits(old, whole)
        if place.mask is not None and dtype.bits >= 16:
            first = self.retyped(place.view.pointer, whole)
            numbers = self.chosen(self.numbers(place), place.mask)
            pointers = self.elements_at(first, numbers)
            new, seen = (self.chosen(x, place.mask) for x in (new, seen))

        def change(now: Val) -> Val:
            return self.select(
                self.compare("eq", self.bits(now, whole), seen), value, now
            )

        with self.between_fences(place.view):
            if dtype.bits < 16:
                found = self.swapped(op, place, place.mask, dtype, change)
            else:
                found = self.bits(self.swap(pointers, seen, new), value.elem)
        self.env[op.result] = self.past_edge_filled(place, found)

    def past_edge_filled(self, place: Place, old: Val) -> Val:
        """What an atomic returns: the fill value past the array's edge."""
        if place.view.edges and place.view.fill is not None and place.mask is not None:
            return self.select(place.mask, old, self.like(place.view.fill, old))
        return old

    def swap(self, pointers: Val, seen: Val, new: Val) -> Val:
        types = f"({pointers.type}, {seen.type}, {new.type}) -> {new.type}"
        text = f"tt.atomic_cas acq_rel, gpu, {pointers}, {seen}, {new}"
        return self.let(f"{text} : {types}", new.shape, new.elem, shared=False)

    def chosen(self, x: Val, mask: Val) -> Val:
        """`x`, and 0 where the mask is off."""
        return self.select(mask, x, self.like(0, x))

    # --- narrow types ---

    def swapped(
        self,
        op: Op,
        place: Place,
        mask: Val | None,
        dtype: DType,
        change: Callable[[Val], Val],
    ) -> Val:
        """Change elements of 8 or 16 bits; what they were."""
        self.check_memory(op, place, dtype)
        pending = self.spread(mask or self.const(True, "i1"), place.shape)
        number = self.chosen(self.numbers(place), pending)
        shift = None
        if dtype.bits == 8:
            odd = self.apply("arith.andi", number, self.like(1, number))
            shift = self.scaled(
                "arith.muli", self.convert("arith.trunci", odd, WORD), 8
            )
            number = self.apply("arith.shrui", number, self.like(1, number))
        pointers = self.elements_at(self.retyped(place.view.pointer, WORD), number)
        elem = self.elem(dtype, op)
        guess = self.const(0, WORD, place.shape)
        name = self.out.fresh()
        both = f"({guess.type}, {pending.type})"
        word, left = (Val(self.out.fresh(), place.shape, e) for e in (WORD, "i1"))
        head = f"{name}:2 = scf.while ({word} = {guess}, {left} = {pending})"
        self.out.line(f"{head} : {both} -> {both} {{")
        with self.out.region():
            goes_on = self.any(left)
            types = f"{word.type}, {left.type}"
            self.out.line(f"scf.condition({goes_on}) {word}, {left} : {types}")
        self.out.line("} do {")
        word, left = (Val(self.out.fresh(), place.shape, e) for e in (WORD, "i1"))
        self.out.line(f"^bb0({word}: {word.type}, {left}: {left.type}):")
        with self.out.region():
            new = change(self.read_part(word, shift, elem))
            new = self.select(left, self.with_part(word, shift, new), word)
            found = self.swap(pointers, word, new)
            missed = self.compare("ne", found, word)
            missed = self.apply("arith.andi", missed, left)
            word = self.select(missed, found, word)
            types = f"{word.type}, {missed.type}"
            self.out.line(f"scf.yield {word}, {missed} : {types}")
        self.out.line("}")
        return self.read_part(Val(f"{name}#0", place.shape, WORD), shift, elem)

    def check_memory(self, op: Op, place: Place, dtype: DType) -> None:
        """Every element has a word, and a lane without an element has the first."""
        memory = place.view.memory
        assert memory is not None
        size = memory.ref.size * memory.ref.dtype.bits // 8
        if dtype.bits < 8 or dtype.is_bool:
            self.refuse(op, f"there are no atomics on {dtype}")
        if not size:
            self.refuse(op, "the array has no elements")
        if dtype.bits == 8 and size % 2 and memory not in self.scratch:
            self.refuse(
                op,
                f"hardware swaps 16 bits, and the last of the array's {size} bytes has "
                "no such word to itself",
                "use an array of an even size, or 32-bit elements",
            )

    def any(self, mask: Val) -> Val:
        if not mask.shape:
            return mask
        ones = self.convert("arith.extui", mask, "i32")
        ones = self.flattened(ones) if len(ones.shape) > 1 else ones
        combine = lambda a, b: [self.apply("arith.ori", a[0], b[0])]
        (some,) = self.fold("tt.reduce", [ones], 0, combine)
        return self.compare("ne", some, self.like(0, some))

    def read_part(self, word: Val, shift: Val | None, elem: str) -> Val:
        """The element in a word, `shift` bits from its lowest."""
        if shift is not None:
            word = self.apply("arith.shrui", word, shift)
            word = self.convert("arith.trunci", word, "i8")
        return self.bits(word, elem)

    def with_part(self, word: Val, shift: Val | None, part: Val) -> Val:
        part = self.bits(part, WORD if shift is None else "i8")
        if shift is None:
            return part
        byte = self.apply("arith.shli", self.like(255, word), shift)
        others = self.apply("arith.xori", byte, self.like(-1, byte))
        part = self.apply("arith.shli", self.convert("arith.extui", part, WORD), shift)
        return self.apply("arith.ori", self.apply("arith.andi", word, others), part)

    def after(self, op: Op, old: Val, new: Val, dtype: DType) -> Val:
        """What an atomic leaves in memory."""
        kind = op.attrs["kind"]
        if kind == "xchg":
            return new
        name = self.combiner(op, "sum" if kind == "add" else kind, dtype)
        (x, narrow), (y, _) = self.wide(old), self.wide(new)
        return self.narrowed(self.apply(name, x, y), narrow)


RULES = {
    "atomic_rmw": Atomics.emit_atomic_rmw,
    "atomic_cas": Atomics.emit_atomic_cas,
}

_ATOMICS = {
    ("add", "float"): "fadd",
    ("add", "int"): "add",
    ("add", "uint"): "add",
    ("max", "int"): "max",
    ("max", "uint"): "umax",
    ("min", "int"): "min",
    ("min", "uint"): "umin",
    **{(k, n): k for k in ("and", "or", "xor") for n in ("int", "uint")},
    **{("xchg", n): "exch" for n in ("float", "int", "uint")},
}
