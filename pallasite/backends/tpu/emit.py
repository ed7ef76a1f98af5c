"""Kernel -> Mosaic module: the function, its windows and their index maps.

A kernel whose body is one pipeline becomes a function that Mosaic calls once per grid
step: program ids, scalar-prefetch refs, blocks, scratch. Each window's index map is a
function of its own. Any other kernel is a function called once. `control.py` and the
files it builds on emit the ops.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import takewhile

from pallasite.backends.tpu.control import RULES, Control
from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.backends.tpu.sparse_core import SparseOps
from pallasite.backends.tpu.views import Edge, Fill, Start, View
from pallasite.backends.tpu.windows import (
    by_element,
    check_left_once,
    check_window,
    fits,
    hangs_over,
    is_whole,
    memref_shape,
    operand_name,
    touching,
)
from pallasite.backends.tpu.writer import ELEMENTS, array
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Block, BlockDim, Kernel, Op, Value, Window, walk
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import RefType
from pallasite.passes.analysis.intervals import HIGHEST, Fact

DYNAMIC = -(2**63)  # an iteration bound known only at run time
SEMANTICS = ("arbitrary", "parallel", "core_parallel", "subcore_parallel")


def emit_module(
    kernel: Kernel,
    with_locations: bool = False,
    core: str = "tc",
    turns_columns: bool = False,
) -> str:
    """The text of the Mosaic module for `kernel`, which runs on that kind of core.

    `turns_columns`: columns become rows by transposes, for cores without a sublane
    gather.
    """
    return _Module(_KernelPlan(kernel, turns_columns), with_locations, core).text()


def _is_mask(value: Value) -> bool:
    is_tile = not value.is_ref and bool(value.tile.shape)
    return is_tile and value.tile.dtype.is_bool


@dataclass(frozen=True)
class _KernelPlan:
    """A kernel, decomposed: the grid, and what each parameter is to Mosaic."""

    kernel: Kernel
    turns_columns: bool = False

    @cached_property
    def pipeline(self) -> Pipeline | None:
        op = main_pipeline(self.kernel)
        return Pipeline.of(op) if op is not None else None

    @cached_property
    def scratch(self) -> tuple[Value, ...]:
        """Memory the kernel allocates before its pipeline."""
        if self.pipeline is None:
            return ()
        ops = self.kernel.body.ops
        return tuple(op.result for op in ops if op.name == "alloc")

    @cached_property
    def grid(self) -> tuple[int | None, ...]:
        return self.pipeline.grid if self.pipeline else ()

    @cached_property
    def grid_sizes(self) -> dict[Value, int]:
        """The axis each dynamic size belongs to."""
        dynamic = [axis for axis, n in enumerate(self.grid) if n is None]
        sizes = self.pipeline.dynamic_sizes if self.pipeline else ()
        return dict(zip(sizes, dynamic, strict=True))

    @cached_property
    def grid_params(self) -> frozenset[Value]:
        """Parameters that hold dynamic grid sizes; Mosaic takes them separately."""
        loads = {op.result: op for op in self.kernel.body.ops if op.name == "load"}
        return frozenset(loads[v].operands[0] for v in self.grid_sizes if v in loads)

    @cached_property
    def windows(self) -> dict[Value, tuple[int, Window]]:
        """Each windowed parameter's position among the windows, and its window."""
        if self.pipeline is None:
            return {}
        return {s.array: (k, s.window) for k, s in enumerate(self.pipeline.shown)}

    @cached_property
    def prefetched(self) -> tuple[Value, ...]:
        """Leading whole arrays in scalar memory: index maps may read them."""
        rest = [p for p in self.kernel.params if p not in self.grid_params]
        scalars = takewhile(self._is_whole_scalar_memory, rest)
        return () if self.is_called_once else tuple(scalars)

    def _is_whole_scalar_memory(self, param: Value) -> bool:
        return param not in self.windows and param.ref.space == "smem"

    @cached_property
    def late_scalars(self) -> tuple[Value, ...]:
        """Later whole arrays in scalar memory: windows that never move."""
        return tuple(p for p in self.blocks if self._is_whole_scalar_memory(p))

    @cached_property
    def blocks(self) -> tuple[Value, ...]:
        """The other parameters: windowed, or whole arrays in main memory."""
        apart = {*self.grid_params, *self.prefetched}
        return tuple(p for p in self.kernel.params if p not in apart)

    @cached_property
    def varies_starts(self) -> bool:
        """Whether there are tiles of positions or masks, see `Control._starts`."""
        return any(
            op.name == "iota" or any(map(_is_mask, op.results))
            for op in walk(self.kernel.body)
        )

    @property
    def is_called_once(self) -> bool:
        """Mosaic needs no grid: each block is a whole array."""
        if self.pipeline is None:
            return True
        whole = all(is_whole(w, ref.ref) for ref, (_, w) in self.windows.items())
        return not self.grid and whole

    @property
    def steps(self) -> tuple[int | None, ...]:
        """The grid Mosaic runs: a single step where there is no real grid."""
        return self.grid if self.grid or self.is_called_once else (1,)


class _Module:
    def __init__(self, plan: _KernelPlan, with_locations: bool, core: str):
        self.kernel, self.core = plan.kernel, core
        self.plan = plan
        self.with_locations = with_locations

    def text(self) -> str:
        self._check()
        functions = [self._main()]
        if not self.plan.is_called_once:
            functions += [
                self._index_map(position, ref, window)
                for ref, (position, window) in self.plan.windows.items()
            ]
            functions += map(self._fixed_map, self.plan.late_scalars)
        name = re.sub(r"\W", "_", self.kernel.name) or "kernel"
        body = "\n".join(functions)
        return f"module @{name} {{\n{body}}}\n"

    # --- what Mosaic rejects ---

    def _check(self) -> None:
        plan, kernel = self.plan, self.kernel
        sizes = [p in plan.grid_params for p in kernel.params]
        scalars = [] if plan.is_called_once else plan.late_scalars
        if sizes != sorted(sizes, reverse=True) or any(
            not p.ref.shape for p in scalars
        ):
            raise UnsupportedError(
                "backend 'tpu' needs dynamic grid sizes and scalars before all other "
                "operands",
                [("kernel", kernel.name), ("order", _listed(kernel.params))],
                at=kernel.loc,
                fix="pass them first (PrefetchScalarGridSpec), or as arrays of one "
                "element",
            )
        for param in kernel.params:
            self._check_param(param)
        self._check_windowed()
        loc = plan.pipeline.op.loc if plan.pipeline else kernel.loc
        for ref, (_, window) in plan.windows.items():
            # A block of an empty array is fine where one of a larger array would be.
            has_no_block = 0 in ref.ref.shape and not fits(ref.ref, window)
            if has_no_block or 0 in memref_shape(window):
                raise UnsupportedError(
                    "backend 'tpu' does not support empty arrays",
                    [
                        ("operand", f"{operand_name(kernel, ref)}, {ref.ref.tile}"),
                        ("block", window.block_shape),
                    ],
                    at=loc or kernel.loc,
                    fix="remove the operand from the call, or use interpret=True",
                )
            if not plan.is_called_once:
                check_window(kernel, ref, window, loc or kernel.loc)
        if plan.pipeline is not None:
            check_left_once(kernel, plan.pipeline)

    def _check_windowed(self) -> None:
        """Each window must show a parameter of its own."""
        plan = self.plan
        count = len(plan.pipeline.windows) if plan.pipeline else 0
        known = {*self.kernel.params}
        if len(plan.windows) != count or not known.issuperset(plan.windows):
            raise UnsupportedError(
                "backend 'tpu' needs one window per operand",
                [("kernel", self.kernel.name)],
                at=self.kernel.loc,
                fix="pass an array with two windows as two operands",
            )

    def _check_param(self, param: Value) -> None:
        dtype = param.ref.dtype
        if param.ref.is_semaphore or (dtype.name in ELEMENTS and not dtype.is_bool):
            return
        as_ints = "pass it as int32 and compare with 0 in the kernel"
        raise UnsupportedError(
            f"backend 'tpu' does not support {dtype} arrays",
            [("operand", f"{operand_name(self.kernel, param)}, {param.ref.tile}")],
            at=self.kernel.loc,
            fix=as_ints if dtype.is_bool else "cast it to a type the chip has",
        )

    # --- functions ---

    def _main(self) -> str:
        plan = self.plan
        kind = _Function if self.core == "tc" else _SparseFunction
        function = kind(plan, self.with_locations)
        arguments = function.grid_arguments()
        arguments += function.bind_prefetched()
        arguments += [function.bind_param(p) for p in plan.blocks]
        arguments += [function.bind_scratch(v) for v in plan.scratch]
        if plan.pipeline is None:
            function.emit_block(self.kernel.body)
        else:
            function.emit_body(plan.pipeline)
        function.out.line("func.return")
        attributes = ", ".join(f"{k} = {v}" for k, v in self._attributes())
        opening = (
            f"  func.func @main({', '.join(arguments)})\n"
            f"      attributes {{{attributes}}} {{"
        )
        return function.text(opening)

    def _attributes(self) -> list[tuple[str, str]]:
        plan = self.plan
        semantics = plan.pipeline.semantics if plan.pipeline else ()
        if len(semantics) != len(plan.steps):
            semantics = ("arbitrary",) * len(plan.steps)
        # A mesh of one core runs on one core of a chip that has two.
        semantics = [
            "arbitrary" if size == 1 else word
            for word, size in zip(semantics, plan.steps, strict=True)
        ]
        rows = [
            ("dimension_semantics", f"[{', '.join(map(self._semantics, semantics))}]"),
            ("scalar_prefetch", f"{len(plan.prefetched)} : i64"),
            ("scratch_operands", f"{len(plan.scratch)} : i64"),
            ("tpu.core_type", f"#tpu.core_type<{self.core}>"),
        ]
        if not plan.is_called_once:
            bounds = [DYNAMIC if n is None else n for n in plan.steps]
            windows = ",\n        ".join(self._window(p) for p in plan.blocks)
            rows.insert(1, ("iteration_bounds", array("i64", bounds)))
            rows.append(("window_params", f"[\n        {windows}]"))
        return rows

    def _semantics(self, name: str) -> str:
        name = "arbitrary" if name == "sequential" else name  # no other order here
        if name not in SEMANTICS:
            raise UnsupportedError(
                f"backend 'tpu' does not support dimension semantics {name!r}",
                [("kernel", self.kernel.name), ("known", ", ".join(SEMANTICS))],
                at=self.kernel.loc,
                fix="use 'arbitrary' or 'parallel'",
            )
        return f"#tpu.dimension_semantics<{name}>"

    def _window(self, param: Value) -> str:
        if param in self.plan.late_scalars:
            bounds = array("i64", param.ref.shape)
            name = self._fixed_name(param)
            return f"{{transform_indices = @{name}, window_bounds = {bounds}}}"
        if param not in self.plan.windows:
            return "{}" if self.core == "tc" else self._origin(param)
        position, window = self.plan.windows[param]
        bounds = array("i64", memref_shape(window))
        text = f"transform_indices = @map_{position}, window_bounds = {bounds}"
        if window.buffers == 1:
            text += ", pipeline_mode = #tpu.pipeline_mode<synchronous>"
        if by_element(window):
            low, high = ([d.padding[side] for d in window.dims] for side in (0, 1))
            text += f", window_kind = #tpu.element_window<{low}, {high}>"
        return f"{{{text}}}"

    def _origin(self, param: Value) -> str:
        """The constant block index of a whole array."""
        steps = ", ".join(f"d{axis}" for axis in range(len(self.plan.steps)))
        place = ", ".join("0" * param.ref.rank)
        return f"{{transform_indices = affine_map<({steps}) -> ({place})>}}"

    def _index_map(self, position: int, ref: Value, window: Window) -> str:
        plan = self.plan
        assert plan.pipeline is not None
        function = _Function(plan, self.with_locations)
        arguments = function.grid_arguments() + function.bind_prefetched()
        names = function.emit_map(plan.pipeline.maps[position], ref, window)
        return self._returning(function, f"map_{position}", arguments, names)

    def _fixed_name(self, param: Value) -> str:
        return f"fixed_{self.plan.blocks.index(param)}"

    def _fixed_map(self, param: Value) -> str:
        """The index map of an array that is present as a whole at every step."""
        function = _Function(self.plan, self.with_locations)
        arguments = function.grid_arguments() + function.bind_prefetched()
        names = [function.out.i32(0)] * param.ref.rank
        return self._returning(function, self._fixed_name(param), arguments, names)

    def _returning(
        self,
        function: "_Function",
        name: str,
        arguments: Sequence[str],
        names: Sequence[str],
    ) -> str:
        types = ", ".join(["i32"] * len(names))
        function.out.line(f"func.return {', '.join(names)} : {types}")
        opening = f"  func.func @{name}({', '.join(arguments)}) -> ({types}) {{"
        return function.text(opening)


class _Function(Control):
    """One function of the module."""

    def __init__(self, plan: _KernelPlan, with_locations: bool):
        super().__init__(with_locations)
        self.plan = plan
        self.varies_starts = plan.varies_starts
        self.turns_columns = plan.turns_columns
        self.grid_names = [f"%i{axis}" for axis in range(len(plan.steps))]
        self._taken: set[str] = set()
        self._outer = {r: op for op in plan.kernel.body.ops for r in op.results}

    def view(self, ref: Value) -> View:
        if ref not in self.views and ref in self._outer:
            self.emit(self._outer[ref])
        if ref not in self.views:
            self.refuse(
                f"an index map reads {ref.name or 'a ref'} ({ref.ref}), which is not "
                "a scalar-prefetch operand",
                fix="pass it as one (PrefetchScalarGridSpec)",
            )
        return self.views[ref]

    def name(self, value: Value) -> str:
        """Values from before the pipeline are emitted at their first use."""
        if value not in self.names and value in self._outer:
            if value in self.plan.grid_sizes:
                axis = self.plan.grid_sizes[value]
                bound = self.out.value(f"tpu.iteration_bound {axis} : i32")
                self.names[value] = bound
                self.facts.note(value, Fact(low=0))
            else:
                self.emit(self._outer[value])
        return self.names[value]

    def text(self, opening: str) -> str:
        lines = [opening, *self.out.prologue, *self.out.lines]
        return "\n".join([*lines, "  }", ""])

    # --- arguments ---

    def grid_arguments(self) -> list[str]:
        return [f"{name}: i32" for name in self.grid_names]

    def bind_prefetched(self) -> list[str]:
        return [self.bind_param(p) for p in self.plan.prefetched]

    def bind_param(self, param: Value) -> str:
        """An argument for a parameter: its block, or the whole array."""
        name, ref = self._argument(param), param.ref
        if param in self.plan.windows:
            _, window = self.plan.windows[param]
            space = "smem" if window.space == "smem" else "vmem"
            view = View.whole(name, ref, memref_shape(window), space=space)
        else:
            view = View.whole(name, ref)
        self.views[param] = view
        return f"{name}: {view.type}"

    def bind_scratch(self, value: Value) -> str:
        name, ref = self._argument(value), value.ref
        shape = ref.shape if ref.shape or ref.is_semaphore else (1,)
        self.views[value] = View.whole(name, ref, shape, range(ref.rank))
        return f"{name}: {self.views[value].type}"

    def _argument(self, value: Value) -> str:
        """`%name`, from the author's name for it if still free."""
        hint = value.name if re.fullmatch(r"[A-Za-z_]\w*", value.name or "") else "ref"
        base, count = hint, 0
        while hint in self._taken or re.fullmatch(r"[ic]\d+", hint):
            count += 1
            hint = f"{base}_{count}"
        self._taken.add(hint)
        return f"%{hint}"

    # --- the pipeline ---

    def emit_body(self, pipeline: Pipeline) -> None:
        """One grid step: bind ids and blocks, then emit the body's ops."""
        self._bind_ids(pipeline.ids)
        for ref, window, index_map, block in pipeline.shown:
            self.views[block] = self._block_view(ref, block.ref, window, index_map)
        self.emit_block(pipeline.body)

    def _bind_ids(self, ids: Sequence[Value]) -> None:
        for value, name, size in zip(
            ids, self.grid_names, self.plan.grid, strict=False
        ):
            self.names[value] = name
            self.facts.note(value, Fact(0, (size or HIGHEST) - 1))

    def _block_view(
        self, ref: Value, block: RefType, window: Window, index_map: Block
    ) -> View:
        whole = self.views[ref]
        dims = [d for d, b in enumerate(window.dims) if b.kind != "squeezed"]
        fill = None
        if window.fill is not None:
            fill = self._fill(ref, window, index_map)
        view = View.whole(whole.memref, block, whole.shape, dims, whole.space)
        return replace(view, fill=fill)

    def _fill(self, ref: Value, window: Window, index_map: Block) -> Fill | None:
        """The edges of a window with fill, if any; needs its block indices here."""
        self._bind_ids(index_map.params)
        names = self.emit_block(index_map)
        facts = [self.facts.of(v) for v in index_map.yields]
        edges = []
        for d, (dim, size) in enumerate(zip(window.dims, ref.ref.shape, strict=True)):
            if hangs_over(dim, size, facts[d]):
                edges.append(self._edge(d, dim, size, names[d], facts[d]))
        return Fill(window.fill, tuple(edges)) if edges else None  # type: ignore[arg-type]

    def _edge(self, d: int, dim: BlockDim, size: int, name: str, fact: Fact) -> Edge:
        low = dim.padding[0]
        if dim.kind == "blocked":
            name = self._times(name, dim.size)
        # Elements are counted from the start of the padding.
        return Edge(d, Start(0, name, 1), low if fact.low < low else None, low + size)

    def _times(self, name: str, factor: int) -> str:
        by = self.out.i32(factor)
        return name if factor == 1 else self.out.value(f"arith.muli {name}, {by} : i32")

    def emit_map(self, index_map: Block, ref: Value, window: Window) -> list[str]:
        """The block indices of an index map."""
        self._bind_ids(index_map.params)
        if any(d.kind == "bounded" for d in window.dims):
            raise UnsupportedError(
                "backend 'tpu' does not support blocks of varying length "
                "(BoundedSlice)",
                [("operand", operand_name(self.plan.kernel, ref))],
                at=self.plan.kernel.loc,
                fix="use pl.Element or a fixed block and mask",
            )
        self.emit_block(index_map)
        if not by_element(window):
            return [self.name(v) for v in index_map.yields]
        pairs = zip(index_map.yields, window.dims, ref.ref.shape, strict=True)
        return [self._first_element(v, d, n, ref, window) for v, d, n in pairs]

    def _first_element(
        self, value: Value, dim: BlockDim, size: int, ref: Value, window: Window
    ) -> str:
        name, fact = self.name(value), self.facts.of(value)
        if dim.kind == "blocked":
            return self._times(name, dim.size)
        if dim.kind == "element" and not fact.within(*touching(dim, size)):
            return self._touching(name, dim, size, ref, window)
        if fact.multiple > 1:
            name = self.out.value(f"tpu.assume_multiple {name}, {fact.multiple} : i32")
        return name

    def _touching(
        self, name: str, dim: BlockDim, size: int, ref: Value, window: Window
    ) -> str:
        """The nearest block that overlaps the array: no other is copied.

        Reads cannot tell: a block entirely in the padding gives the fill value, or is
        undefined.
        """
        if window.mode == "out":
            raise UnsupportedError(
                "backend 'tpu': an output block may lie entirely in the padding",
                [
                    ("operand", operand_name(self.plan.kernel, ref)),
                    ("block", f"{dim.size} of {size}, padding {dim.padding}"),
                ],
                at=self.plan.kernel.loc,
                fix="make the padding smaller than the block, with none at the end",
            )
        first, last = map(self.out.i32, touching(dim, size))
        name = self.out.value(f"arith.maxsi {name}, {first} : i32")
        return self.out.value(f"arith.minsi {name}, {last} : i32")


class _SparseFunction(SparseOps, _Function):
    """The function of a kernel for SparseCores: arrays are in main memory."""

    def bind_param(self, param: Value) -> str:
        name = self._argument(param)
        space = "hbm" if param.ref.space in ("any", "hbm") else None
        self.views[param] = View.whole(name, param.ref, space=space)
        return f"{name}: {self.views[param].type}"

    def is_used(self, value: Value) -> bool:
        return any(value in op.operands for op in walk(self.plan.kernel.body))


def _listed(params: Sequence[Value]) -> str:
    return ", ".join(f"{p.name or '?'}: {p.ref}" for p in params)


# Ops that the emitter has only for some operands: the exceptions.
_GAPS: dict[str, Callable[[Op], bool]] = {
    "pow": lambda op: not (op.result.tile.shape and op.result.tile.dtype.is_float),
    "integer_pow": lambda op: op.attrs["y"] < 0 and not op.result.tile.dtype.is_float,
    "population_count": lambda op: not op.result.tile.shape,
    "scan": lambda op: op.attrs["kind"] == "logsumexp",
    "pad": lambda op: any(op.attrs["interior"]),
}


@cache
def native_ops() -> frozenset[str]:
    """The ops that this emitter has, at least for some operands."""
    return frozenset({*RULES, "alloc", "pipeline"})


def is_native(op: Op) -> bool:
    """Whether this emitter has an op with these operands."""
    gap = _GAPS.get(op.name)
    return op.name in native_ops() and not (gap and gap(op))
