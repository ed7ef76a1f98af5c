"""What chips have since Ampere: products of fragments in registers, copies in order.

A product (`dot_add`) is of values that the warps of a role have in registers, each warp
its rows of the left operand and all of the right one (`mma.sync`). A copy to shared
memory without a barrier is made of chunks that each thread copies for itself
(`cp.async`), a group per copy, and a wait for all but the last groups is followed by a
meeting of the role's warps. `in_registers` makes the products of an author's kernel.
"""

from math import gcd

from pallasite.backends.cuda.core import Tile
from pallasite.backends.cuda.explicit import Explicit
from pallasite.backends.cuda.layouts import (
    Spread,
    accumulator,
    left_fragments,
    right_fragments,
    striped,
)
from pallasite.backends.cuda.memory import Number, Place, multiple_of, text_of
from pallasite.backends.cuda.products import TF32
from pallasite.ir.nodes import Access, Kernel, Op, Value, full_index, walk
from pallasite.ir.rewrite import Rewriter, dead_code, map_ops, users_of
from pallasite.ir.roles import Dot
from pallasite.ops.gpu import is_group_load, is_of_warpgroups

CHUNKS = (16, 8, 4)  # bytes that a thread copies at once


def _product(shape: str, inner: str, sums: str, letter: str) -> str:
    kind = {"f": "float", "r": "int"}[letter]
    numbers = [f"%{n}" for n in range(10)]
    left, right = ", ".join(numbers[4:8]), ", ".join(numbers[8:])
    outs = ", ".join(f'"+{letter}"(d[{n}])' for n in range(4))
    ins = [f'"r"(a[{n}])' for n in range(4)] + [f'"r"(b[{n}])' for n in range(2)]
    return (
        f"({kind}* d, const u32* a, const u32* b) {{\n"
        f'  asm volatile("mma.sync.aligned.{shape}.row.col.{sums}.{inner}.{inner}'
        f'.{sums} {{%0, %1, %2, %3}}, {{{left}}}, {{{right}}}, {{%0, %1, %2, %3}};"\n'
        f"    : {outs}\n    : {', '.join(ins)});\n}}\n"
    )


PRODUCTS = {
    "bf16": _product("m16n8k16", "bf16", "f32", "f"),
    "f16": _product("m16n8k16", "f16", "f32", "f"),
    "f32": _product("m16n8k8", "tf32", "f32", "f"),
    "i8": _product("m16n8k32", "s8", "s32", "r"),
    "u8": _product("m16n8k32", "u8", "s32", "r"),
}
FUNCTIONS: dict[str, str] = {
    **{f"mma_{n}": f"DEVICE void mma_{n}{body}" for n, body in PRODUCTS.items()},
    "to_tf32": (
        "DEVICE u32 to_tf32(float x) { u32 r; "
        'asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x)); return r; }\n'
    ),
    "bytes_together": (
        "template <class T> DEVICE u32 bytes_together(const T* x) {\n"
        "  return (u8)x[0] | (u32)(u8)x[1] << 8 | (u32)(u8)x[2] << 16"
        " | (u32)(u8)x[3] << 24;\n}\n"
    ),
    # Zeros where `bytes` are fewer. Past the first level of cache only 16 at once go.
    "copy_chunk": (
        "template <int B> DEVICE void copy_chunk(u32 to, const void* from, u32 bytes) "
        "{\n  if (B == 16)\n"
        '    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"'
        ' :: "r"(to), "l"(from), "r"(bytes) : "memory");\n  else\n'
        '    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"'
        ' :: "r"(to), "l"(from), "n"(B), "r"(bytes) : "memory");\n}\n'
    ),
    "chunks_together": (
        "DEVICE void chunks_together() "
        '{ asm volatile("cp.async.commit_group;" ::: "memory"); }\n'
    ),
    "chunks_left": (
        "template <int N> DEVICE void chunks_left() "
        '{ asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }\n'
    ),
}


def in_registers(kernel: Kernel) -> Kernel:
    """The products of kernels that schedule themselves, each with what it adds to."""
    ops = list(walk(kernel.body))
    is_authored = any(is_of_warpgroups(op) or op.name == "copy_start" for op in ops)
    if not is_authored or not any(op.name == "dot" for op in ops):
        return kernel
    users = users_of(kernel.body)

    def change(op: Op, b: Rewriter) -> Value | None:
        if op.name == "dot" and not _is_added(op, users):
            zeros = b.constant(0, op.result.tile)
            return b.op("dot_add", *op.operands, zeros, **op.attrs, scaled=False)
        if op.name != "add":
            return None
        for value, addend in (op.operands, op.operands[::-1]):
            dot = b.producer(value, "dot")
            if dot is not None and _is_added(dot, users):
                return b.op("dot_add", *dot.operands, addend, **dot.attrs, scaled=False)
        return None

    return dead_code(map_ops(kernel, change))


def _is_added(dot: Op, users: dict[Value, list[Op]]) -> bool:
    return [op.name for op in users.get(dot.result, ())] == ["add"]


class Ampere(Explicit):
    """Emits products of values, and copies that their role waits for."""

    # --- products ---

    def fragments(self, op: Op) -> dict[Value, Spread]:
        """Where a product has its sums and its operands."""
        dot, (rows, columns) = Dot.of(op), op.result.tile.shape
        left, right = dot.sides
        each = max(1, 4 // left.value.tile.dtype.bytes)
        depth = left.value.tile.shape[left.contract[0]]
        step = 8 * each
        if columns % 8 or depth % step:
            self.refuse(
                op,
                f"{columns} columns must be a multiple of 8, and k={depth} of {step}",
            )
        sums = accumulator(rows, columns, self.warpgroups)
        lhs = left_fragments(rows, depth, each, self.warpgroups)
        rhs = right_fragments(depth, columns, each)
        return {
            op.result: sums,
            op.operands[2]: sums,
            left.value: lhs if left.contract[0] == 1 else lhs.permuted((1, 0)),
            right.value: rhs if right.contract[0] == 0 else rhs.permuted((1, 0)),
        }

    def check_fragments(self, op: Op) -> None:
        dot = Dot.of(op)
        names = {side.value.tile.dtype.name for side in dot.sides}
        if any(side.batch or len(side.free) != 1 for side in dot.sides):
            self.refuse(op, "only matmuls of two matrices are supported")
        (name, *others) = names
        sums = "i32" if name in ("i8", "u8") else "f32"
        if others or name not in PRODUCTS or op.result.tile.dtype.name != sums:
            types = " and ".join(sorted(names))
            self.refuse(op, f"a matmul of {types} into {op.result.tile.dtype}")
        if name == "f32" and (op.attrs["precision"] or "").lower() not in TF32:
            self.refuse(op, "f32 matmuls need precision='tf32' (19 bits)")

    def emit_dot_add(self, op: Op) -> None:
        if not self.in_role or op.attrs["scaled"]:
            self.refuse(op)
        self.check_fragments(op)
        found, (lhs, rhs, addend) = self.fragments(op), op.operands
        start = self.get(addend, found[op.result], op)
        left, right = (
            self.fragment_words(self.get(v, found[v], op), found[v], op)
            for v in (lhs, rhs)
        )
        result = self.declare(op.result.tile.dtype, found[op.result], op, "d")
        self.copy(result, start)
        rows, columns = found[op.result].digits[0].count, op.result.tile.shape[1] // 8
        # Two words per row and step are those of a thread's two rows.
        steps = found[rhs].registers * lhs.tile.dtype.bytes // 4 // columns // 2
        row, column = f"i / {columns} % {rows}", f"i % {columns}"
        step = f"i / {rows * columns}"
        self.out.line(
            f"EACH({rows * columns * steps}) mma_{lhs.tile.dtype}("
            f"{result.name} + (({row}) * {columns} + {column}) * 4, "
            f"{left} + (({row}) * {steps} + {step}) * 4, "
            f"{right} + ({column}) * {2 * steps} + {step} * 2);"
        )
        self.env[op.result] = result

    def fragment_words(self, tile: Tile, spread: Spread, op: Op) -> str:
        """An array of the words of a tile, as the instruction takes them."""
        if tile.spread is None or tile.is_computed:
            held = self.declare(tile.dtype, spread, op)
            self.fill(held, tile.element)
            tile = held
        if tile.is_packed:
            return tile.name
        words, each = self.out.fresh("w"), 4 // tile.dtype.bytes
        part = f"to_tf32({tile.name}[i])"
        if each > 1:
            part = f"bytes_together({tile.name} + i * {each})"
        count = tile.registers // each
        self.out.line(f"u32 {words}[{count}];")
        self.out.line(f"EACH({count}) {words}[i] = {part};")
        return words

    # --- copies ---

    def emit_copy_start(self, op: Op) -> None:
        if is_group_load(op):
            self.emit_group_load(op)
        else:
            super().emit_copy_start(op)

    def emit_group_load(self, op: Op) -> None:
        """Each thread copies its chunks; zeros come for what is outside the array."""
        source, target = op.operands
        self.meet_before(op)
        dtype = target.ref.dtype
        place, count = self.chunks(op, source, target)
        spread = place.spread
        assert spread is not None
        pointer = self.based(place, op, const=False)
        offset, test = self.address(place, f"i * {count}")
        from_, inside = self.source_of(op, source, spread, f"i * {count}")
        bytes_ = count * dtype.bytes
        there = f"{inside} ? {bytes_} : 0" if inside else str(bytes_)
        to = f"shared_address({pointer} + {offset or 0})"
        call = f"copy_chunk<{bytes_}>({to}, {from_}, {there});"
        call = f"if ({test}) {call}" if test else call
        only = self.is_first_copy(spread)
        loop = f"EACH({spread.registers // count}) {{ {call} }}"
        self.out.line(f"if ({only}) {loop}" if only else loop)
        self.out.line("chunks_together();")

    def chunks(self, op: Op, source: Value, target: Value) -> tuple[Place, int]:
        """Where threads store, and how many elements at once, the most possible."""
        view, dtype = self.views[source], target.ref.dtype
        root = view.memory
        assert root is not None
        if dtype.bits < 8 or not view.dims or not self.is_plain(source):
            self.refuse(op, "copies without a barrier are of rows of an array")
        steps = [multiple_of(view.starts[-1]), view.dims[-1].size]
        steps += [root.ref.shape[-1]] if root.ref.rank > 1 else []
        known = gcd(*steps) * dtype.bytes
        whole = full_index(target.ref.shape)
        access = Access(target, whole, ())
        for bytes_ in CHUNKS:
            if known % bytes_ or bytes_ < dtype.bytes:
                continue
            count = bytes_ // dtype.bytes
            spread = striped(target.ref.shape, self.threads, count)
            place = self.place(op, access, spread)
            if self.vector(place, masked=False) == count:
                break
        else:
            self.refuse(op, "copies without a barrier are of 4, 8 or 16 bytes at once")
        return place, count

    def is_plain(self, source: Value) -> bool:
        """Whether a view is of a part of an array whose rows are contiguous."""
        view = self.views[source]
        axes, last = [dim.axis for dim in view.dims], len(view.starts) - 1
        dense = axes == sorted(set(axes)) and axes[-1] == last
        made = self.producers.get(source)
        while made is not None and made.name == "subview":
            made = self.producers.get(made.operands[0])
        return dense and view.dims[-1].step == 1 and made is None

    def source_of(
        self, op: Op, source: Value, spread: Spread, i: str
    ) -> tuple[str, str]:
        """The address of an element, and the test that it is in the array."""
        view, root = self.views[source], self.views[source].memory
        assert root is not None
        at: list[str] = [text_of(start) for start in view.starts]
        ends: list[Number] = list(view.starts)
        for n, dim in enumerate(view.dims):
            text = self.coordinate(spread, n, i)
            step = "" if dim.step == 1 else f" * {dim.step}"
            at[dim.axis] = f"{at[dim.axis]} + ({text}){step}"
            last = (dim.size - 1) * dim.step
            start = ends[dim.axis]
            if isinstance(start, int) and start >= 0:
                ends[dim.axis] = start + last
        tests, offset = [], ""
        wide = "(i64)" if view.wide else ""
        for text, end, size in zip(at, ends, root.ref.shape, strict=True):
            if not isinstance(end, int) or not 0 <= end < size:
                tests.append(f"(u32)({text}) < {size}u")
            offset = f"({offset}) * {size} + {text}" if offset else f"{wide}({text})"
        inside, address = " && ".join(tests), f"{view.pointer} + ({offset})"
        if inside:
            address = f"({inside} ? {address} : {view.pointer})"
        return address, inside

    def emit_load_wait(self, op: Op) -> None:
        self.out.line(f"chunks_left<{op.attrs['pending']}>();")
        self.sync()


RULES = {
    "dot_add": Ampere.emit_dot_add,
    "copy_start": Ampere.emit_copy_start,
    "load_wait": Ampere.emit_load_wait,
}
