"""Import rules for `plgpu`: warpgroups become roles, barriers get parities.

A kernel of several warpgroups is imported once per warpgroup, each a region of one
`roles` op. Shared memory and barriers are those of all of them: allocated once, before
the roles. Which phase a warpgroup waits for next, it keeps in a bit per barrier.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import jax

from pallasite.errors import KernelTypeError
from pallasite.importer import gpu_checks as checks
from pallasite.importer.importer import Importer, tile_type
from pallasite.importer.memory import outside_warpgroups
from pallasite.importer.views import view
from pallasite.ir import types as T
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Access, At, Block, Op, Span, Value, walk
from pallasite.ir.rule_table import Rule, RuleTable
from pallasite.ops.gpu import NOT_OUTSIDE, SEMAPHORES
from pallasite.passes.analysis.cost import bytes_of
from pallasite.passes.analysis.memory import VIEWS

RULES = RuleTable()


def _rule(primitive: str) -> Callable[[Rule], Rule]:
    """A rule for a primitive that only exists in `plgpu` kernels."""

    def add(fn: Rule) -> Rule:
        @RULES.rule(f"pallasite_{primitive}")
        def checked(im: Importer, eqn: Any, *operands: Value) -> Any:
            if im.threads is None:
                raise outside_warpgroups(im, f"plgpu.{primitive}")
            return fn(im, eqn, *operands)

        return fn

    return add


PARITIES = 32  # bits of a word
SWIZZLED_ROWS = 8  # rows that a chip swizzles together
WARPS = 4  # of a warpgroup
WARPGROUP = 128  # threads
MEETING = 15  # the named barrier at which all warpgroups meet
FIRST_NAMED = 9  # those of authors; the ones before are warpgroups' own
ONCE = ("cond", "custom")  # ops whose regions run at most once
# What blocks of a cluster may do to each other, if it has axes.
IN_CLUSTER = ("cluster_copy", "cluster_arrive", "tensor_mma", "tensor_copy")
IN_CLUSTER = (*IN_CLUSTER, "tensor_commit", "peer_block")


@dataclass
class Threads:
    """The warpgroups of a kernel while it is imported."""

    shared: Builder  # ops before the roles
    names: Iterator[str]  # of what is allocated first
    name: Hashable  # of the axis of the warpgroups
    # Axes of the cluster: which of the grid's they are, -1 being the last.
    cluster: Mapping[Hashable, int] = field(default_factory=dict[Hashable, int])
    memory: dict[Any, Value] = field(default_factory=dict[Any, Value])
    own: Builder = field(default_factory=Builder)  # at the start of the current role
    # By warp, -1 for the whole warpgroup: the parities of arrays of barriers.
    parities: dict[int, dict[Value, Value]] = field(
        default_factory=dict[int, dict[Value, Value]]
    )
    count: int = 1  # of warpgroups
    number: int = 0  # of the current warpgroup
    warp: int = -1

    def allocate(
        self, im: Importer, variable: Any, type_: T.RefType, own: bool
    ) -> Value:
        """Memory of all warpgroups, the same for each that allocates it, or of one."""
        variable = (variable, self.number if own else None)
        if self.count > 1 and not own:
            self._meet(im)
        if variable not in self.memory:
            held = [v.ref for v in self.memory.values()]
            checks.room(im, held, type_)
            names, before = [next(self.names, "")], self.shared.loc
            self.shared.loc = im.where
            (ref,) = self.shared.emit("alloc", type=type_, names=names)
            self.shared.loc = before
            self.memory[variable] = ref
        return self.memory[variable]

    def _meet(self, im: Importer) -> None:
        """All warpgroups allocate together: what was there before is no longer used.

        Once for what is allocated at once; `_only_again` removes the first time.
        """
        last = im.builder.ops[-1] if im.builder.ops else None
        if last is None or not _is_meeting(last):
            threads = self.count * WARPGROUP
            attrs: Any = dict(id=MEETING, threads=threads, arrive_only=False)
            im.builder.emit("named_barrier", **attrs)

    def semaphore(self, im: Importer, variable: Any, type_: T.RefType) -> Value:
        """Semaphores of all programs, of one, or of one of its warpgroups."""
        axes = getattr(variable.aval.memory_space, "axes", ())
        type_ = T.RefType(type_.shape, type_.dtype, SEMAPHORES)
        blocks = {n for n, place in im.mesh_axes.items() if place in im.grid.ids}
        if axes is not None and not (blocks and blocks <= set(axes)):
            if blocks & set(axes):
                raise KernelTypeError(
                    "semaphores are shared by all thread blocks, or by none",
                    [
                        ("kernel", im.kernel_name),
                        ("collective_axes", axes),
                        ("axes of thread blocks", tuple(blocks)),
                    ],
                    im.where,
                    "name all axes of the grid, or only that of the warpgroups; "
                    "pl.get_global(...) is of all",
                )
            own = self.name is not None and self.name not in axes
            return self.allocate(im, variable, type_, own)
        if not all(isinstance(n, int) for n in im.grid.sizes):
            raise KernelTypeError(
                "semaphores of all thread blocks need a grid whose sizes are known",
                [("kernel", im.kernel_name), ("grid", tuple(im.grid.sizes))],
                im.where,
                "use a grid of ints, and loop over what is known only at run time",
            )
        key = (variable, None)
        if key not in self.memory:
            name = f"semaphores{len(im.hidden)}"
            self.memory[key] = im.hidden_scratch(name, type_)
        return self.memory[key]

    def axes_of(self, im: Importer, names: Sequence[Hashable]) -> tuple[int, ...]:
        """The grid's axes that a cluster's axes are, of those with several blocks."""
        for name in names:
            if name not in self.cluster:
                raise KernelTypeError(
                    f"{name!r} is not an axis of the cluster",
                    [
                        ("kernel", im.kernel_name),
                        ("cluster_names", tuple(self.cluster) or "none"),
                    ],
                    im.where,
                    "pass cluster= and cluster_names= to plgpu.kernel",
                )
        axes = (self.cluster[name] for name in names)
        return tuple(a for a in axes if im.grid.sizes[a] != 1)

    def blocks_along(self, im: Importer, names: Sequence[Hashable]) -> int:
        return prod(_size(im, a) for a in self.axes_of(im, names))

    def parity(self, barriers: Value) -> Value:
        """The parities that the warpgroup or warp waits for, one bit per barrier."""
        known = self.parities.setdefault(self.warp, {})
        if barriers not in known:
            type_ = T.RefType((), T.I32, "regs")
            (ref,) = self.own.emit("alloc", type=type_, names=["parity"])
            self.own.store(ref, self.own.index(0))
            known[barriers] = ref
        return known[barriers]

    def check_waits(self, im: Importer, barriers: Value) -> None:
        """Each warp counts the phases it waited for, and so does the warpgroup."""
        by_warps = [n for n, known in self.parities.items() if barriers in known]
        if (-1 in by_warps and self.warp != -1) or (
            self.warp == -1 and any(n != -1 for n in by_warps)
        ):
            raise KernelTypeError(
                "both a warpgroup and its warps wait for one barrier",
                [("kernel", im.kernel_name), ("barrier", barriers.type)],
                im.where,
                "use two barriers",
            )


def import_threads(
    im: Importer,
    name: Hashable,
    count: int,
    scratch: Sequence[str],
    cluster: Sequence[Hashable],
    import_body: Callable[[], object],
) -> None:
    """Import a body once per warpgroup, as concurrent roles."""
    ids = im.grid.ids
    axes = {name: ids.index(im.mesh_axes[name]) - len(ids) for name in cluster}
    im.threads = threads = Threads(im.builder, iter(scratch), name, axes, count=count)
    regions = []
    for number in range(count):
        threads.own, threads.parities = Builder(im.where), {}
        threads.number = number
        with im.nested() as builder:
            if name is not None:
                im.mesh_axes[name] = builder.index(number)
            import_body()
            block = builder.block()
        ops = _only_again(block.ops)
        regions.append(Block((), (*threads.own.ops, *ops)))
    im.threads = None
    # Nothing may reach a block before it has started, nor after it has ended.
    ops = [op for region in regions for op in walk(region)]
    meets = any(op.name in IN_CLUSTER and op.attrs["axes"] for op in ops)
    if meets:
        im.builder.emit("cluster_barrier")
    if count == 1:
        im.builder.ops += regions[0].ops
    else:
        # A name that is no text may hold an address, which changes from run to run.
        each = name if isinstance(name, str) else "warpgroup"
        names = tuple(f"{each} {number}" for number in range(count))
        notes = {"cuda.names": names, "cuda.warpgroups": (1,) * count}
        im.builder.ops.append(
            Op("roles", attrs=notes, regions=tuple(regions), loc=im.where)
        )
    if meets:
        im.builder.emit("cluster_barrier")


def _is_meeting(op: Op) -> bool:
    return op.name == "named_barrier" and op.attrs["id"] == MEETING


def _only_again(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Without the meetings for memory that nothing was in before: not in a loop."""
    kept = (op for op in ops if not _is_meeting(op))
    return tuple(_not_first(op) if op.name in ONCE else op for op in kept)


def _not_first(op: Op) -> Op:
    regions = tuple(replace(r, ops=_only_again(r.ops)) for r in op.regions)
    return op if regions == op.regions else op.with_(regions=regions)


def _parts(im: Importer, eqn: Any, first: int = 0) -> list[tuple[Value, Any]]:
    parts = jax.tree.unflatten(eqn.params["tree"], eqn.invars[first:])
    return [(im.value(ref), transforms) for ref, transforms in parts]


def _one(im: Importer, ref: Value, transforms: Any) -> Value:
    """One element of an array of barriers."""
    found = view(im, ref, transforms)
    while found.ref.shape and found.ref.size == 1:
        found = im.builder.subview(found, (At(0),) * found.ref.rank, [])
    return found


def _barrier(im: Importer, ref: Value, transforms: Any) -> Value:
    found = _one(im, ref, transforms) if ref.is_ref else ref
    if not ref.is_ref or ref.ref.space != "mbarrier" or found.ref.shape:
        raise KernelTypeError(
            "expected a single barrier",
            [("kernel", im.kernel_name), ("got", found.type)],
            im.where,
            "allocate plgpu.Barrier(...); index an array of them: barriers.at[i]",
        )
    return found


@_rule("barrier_arrive")
def _barrier_arrive(im: Importer, eqn: Any, *_: Value) -> None:
    ((ref, transforms),) = _parts(im, eqn)
    barrier, space = _barrier(im, ref, transforms), eqn.invars[0].aval.memory_space
    axes = im.threads.axes_of(im, space.collective_axes)
    if axes:
        to = "first" if space.is_first_only else "all"
        im.builder.emit("cluster_arrive", barrier, axes=axes, to=to)
    else:  # one arrival of a warpgroup, not of each warp
        im.builder.emit("barrier_expect", barrier, bytes=0)


@_rule("barrier_wait")
def _barrier_wait(im: Importer, eqn: Any, *_: Value) -> None:
    barrier, parity, flip = _phase(im, eqn)
    im.builder.emit("barrier_wait", barrier, parity)
    flip(None)


@_rule("barrier_test")
def _barrier_test(im: Importer, eqn: Any, *_: Value) -> Value:
    """It is the wait for the phase if that is over."""
    barrier, parity, flip = _phase(im, eqn)
    is_over = im.builder.op("barrier_test", barrier, parity)
    flip(im.builder.cast(is_over, T.I32))
    return is_over


def _phase(
    im: Importer, eqn: Any
) -> tuple[Value, Value, Callable[[Value | None], None]]:
    """A barrier, the parity of the phase to wait for, and how to note that its end was
    seen: always, or where a value is 1."""
    ((ref, transforms),) = _parts(im, eqn)
    b, barrier = im.builder, _barrier(im, ref, transforms)
    assert im.threads is not None
    _look_at_waits(im, ref, barrier)
    kept, number = im.threads.parity(ref), _number(b, ref, barrier)
    parities = b.load(kept)
    parity = b.op("and", b.op("shift_right_logical", parities, number), b.index(1))

    def flip(times: Value | None) -> None:
        bit = b.op("shift_left", b.index(1) if times is None else times, number)
        b.store(kept, b.op("xor", parities, bit))

    return barrier, parity, flip


def _look_at_waits(im: Importer, ref: Value, barrier: Value) -> None:
    """Reject waits for another block's barrier, and for too many barriers."""
    made = {op.result: op for op in im.builder.ops if op.name in VIEWS}
    step: Value | None = barrier
    while step is not None and step is not ref:
        if made[step].name == "peer_block":
            raise KernelTypeError(
                "a thread block can wait for its own barriers only",
                [("kernel", im.kernel_name), ("barrier", ref.type)],
                im.where,
                "wait in the block whose barrier it is; arrive at this block's from "
                "there",
            )
        step = made[step].operands[0]
    if ref.ref.size > PARITIES:
        raise KernelTypeError(
            f"waiting for an array of more than {PARITIES} barriers is not supported",
            [("kernel", im.kernel_name), ("got", ref.type)],
            im.where,
            "allocate several smaller arrays",
        )
    assert im.threads is not None
    im.threads.check_waits(im, ref)


def _number(b: Builder, barriers: Value, one: Value) -> Value:
    """The number of a barrier in its array."""
    made = {op.result: op for op in b.ops if op.name == "subview"}
    places: list[Value] = []  # along the dimensions of the view that `one` is in
    while one is not barriers:
        access, inner = Access.of(made[one]), iter(places)
        places = []
        for entry, operand in access.split_index():
            assert isinstance(entry, (At, Span))
            start = b.index(entry.start or 0) if operand is None else operand
            if isinstance(entry, Span):
                step = b.mul(next(inner), b.index(entry.stride))
                start = b.add(start, step)
            places.append(start)
        one = access.ref
    number = b.index(0)
    for place, size in zip(places, barriers.ref.shape, strict=True):
        number = b.add(b.mul(number, b.index(size)), place)
    return number


@_rule("copy_gmem_to_smem")
def _load_to_smem(im: Importer, eqn: Any, *_: Value) -> None:
    source, target, *barrier = _parts(im, eqn)
    if not barrier:
        source, target = _ends(im, ("gmem", "smem"), source, target)
        im.builder.emit("copy_start", source, target, priority=0)
        return
    ((ref, transforms),) = barrier
    axes = im.threads.axes_of(im, eqn.params["axes"])
    if axes and eqn.params["first"] is not None:
        _load_counted_by_first(im, source, target, (ref, transforms), axes, eqn)
        return
    source, target = _ends(im, ("gmem", "smem"), source, target)
    barrier, b = _barrier(im, ref, transforms), im.builder
    b.emit("barrier_expect", barrier, bytes=bytes_of(target.type))
    notes: dict[str, Any] = {NOT_OUTSIDE: True} if eqn.params["inside"] else {}
    if not axes:
        b.emit("copy_start", source, target, barrier, priority=0, **notes)
        return
    blocks, place = _place(im, axes)
    dim = _shared_dim(im, target.ref, blocks)
    source, target = (_part(b, ref, dim, blocks, place) for ref in (source, target))
    b.emit("cluster_copy", source, target, barrier, axes=axes, to="all", **notes)


def _load_counted_by_first(
    im: Importer,
    source: tuple[Value, Any],
    target: tuple[Value, Any],
    barrier: tuple[Value, Any],
    axes: tuple[int, ...],
    eqn: Any,
) -> None:
    """Each block copies for itself; the first one's barrier counts all bytes."""
    b, (blocks, place) = im.builder, _place(im, axes)
    from_, to = _box(im, *source), _box(im, *target)
    along = eqn.params["first"].axis
    if along is not None and from_.ref.shape[along] == blocks * to.ref.shape[along]:
        from_ = _part(b, from_, along, blocks, place)
    checks.ends(im, ("gmem", "smem"), from_, to)
    counted = _barrier(im, *barrier)
    with im.nested() as inner:
        inner.emit("barrier_expect", counted, bytes=blocks * bytes_of(to.type))
        expected = inner.block()
    which = b.cast(b.op("eq", place, b.index(0)), T.I32)
    b.emit("cond", which, regions=(Block(), expected))
    b.emit("cluster_copy", from_, to, counted, axes=axes, to="first")


def _size(im: Importer, axis: int) -> int:
    """Of an axis of a cluster, which is always known."""
    return cast(int, im.grid.sizes[axis])


def _place(im: Importer, axes: Sequence[int]) -> tuple[int, Value]:
    """How many blocks there are along axes of the cluster, and which one this is."""
    b, blocks, place = im.builder, 1, None
    for axis in axes:
        size, number = _size(im, axis), im.grid.ids[axis]
        place = number if place is None else b.add(b.mul(place, b.index(size)), number)
        blocks *= size
    assert place is not None
    return blocks, place


def _shared_dim(im: Importer, target: T.RefType, blocks: int) -> int:
    """The dimension along which blocks share a copy: whole rows if they can."""
    dims = [d for d, n in enumerate(target.shape) if n % blocks == 0]
    if not dims:
        raise KernelTypeError(
            f"{blocks} blocks cannot share a copy of {target.tile}: no dimension is a "
            f"multiple of {blocks}",
            [("kernel", im.kernel_name)],
            im.where,
            "use a larger block, or remove collective_axes",
        )
    rows = target.rank - 2
    whole_rows = rows in dims and target.shape[rows] // blocks % SWIZZLED_ROWS == 0
    return rows if whole_rows else dims[0]


def _part(b: Builder, ref: Value, dim: int, blocks: int, place: Value) -> Value:
    """The part of a ref along a dimension that belongs to a block."""
    shape = ref.ref.shape
    size = shape[dim] // blocks
    index = [Span(0, n) for n in shape]
    index[dim] = Span(None, size)
    return b.subview(ref, tuple(index), [b.mul(place, b.index(size))])


@_rule("copy_smem_to_gmem")
def _store_to_gmem(im: Importer, eqn: Any, *_: Value) -> None:
    source, target = _ends(im, ("smem", "gmem"), *_parts(im, eqn))
    im.builder.emit("copy_start", source, target, priority=0)


def _ends(
    im: Importer, spaces: tuple[str, str], *ends: tuple[Value, Any]
) -> tuple[Value, Value]:
    source, target = (_box(im, ref, transforms) for ref, transforms in ends)
    checks.ends(im, spaces, source, target)
    return source, target


def _box(im: Importer, ref: Value, transforms: Any) -> Value:
    """One end of a copy: a single view, of an array, whatever views it is made of.

    So only what is copied has to be inside the array, not what it is a part of.
    """
    b, before = im.builder, len(im.builder.ops)
    found = view(im, ref, transforms)
    made = [op for op in b.ops[before:] if op.name in VIEWS]
    if made and made[0].name == "peer_device":
        ref = made.pop(0).result
    chain = [op for op in made if op.name == "subview"]
    if ref.ref.space != "gmem" or len(made) < 2 or len(chain) < len(made):
        return found
    index: list[At | Span] = [Span(0, n) for n in found.ref.shape]
    operands: list[Value | None] = [None] * found.ref.rank
    for op in reversed(chain):
        index, operands = _inside(b, Access.of(op), index, operands)
    b.ops[before:] = [op for op in b.ops[before:] if op not in chain]
    return b.subview(ref, tuple(index), [v for v in operands if v is not None])


def _inside(
    b: Builder, outer: Access, index: Sequence[At | Span], operands: Sequence[Any]
) -> tuple[list[At | Span], list[Value | None]]:
    """The index of a view of a view."""
    inner, entries, starts = iter(zip(index, operands, strict=True)), [], []
    for entry, operand in outer.split_index():
        assert isinstance(entry, (At, Span))
        if isinstance(entry, Span):
            part, start = next(inner)
            first, more = _plus(
                b, entry.start, operand, part.start, start, entry.stride
            )
            step = entry.stride
            entry = (
                replace(part, start=first, stride=step * part.stride)
                if isinstance(part, Span)
                else At(first)
            )
            operand = more
        entries.append(entry)
        starts.append(operand)
    return entries, starts


def _plus(
    b: Builder,
    x: int | None,
    dynamic_x: Value | None,
    y: int | None,
    dynamic_y: Value | None,
    step: int,
) -> tuple[int | None, Value | None]:
    """x + y * step, of starts that are known or values."""
    if dynamic_x is None and dynamic_y is None:
        assert x is not None and y is not None
        return x + y * step, None
    left = b.index(x or 0) if dynamic_x is None else dynamic_x
    right = b.index(y or 0) if dynamic_y is None else dynamic_y
    return None, b.add(left, b.mul(right, b.index(step)))


@_rule("async_store_smem")
def _async_store(im: Importer, eqn: Any, value: Value, *_: Value) -> None:
    (ref, transforms), barrier = _parts(im, eqn, 1)
    target, counted = view(im, ref, transforms), _barrier(im, *barrier)
    checks.store(im, value, target)
    atomic = eqn.params["atomic"]
    im.builder.emit("async_store", value, target, counted, atomic=atomic)


@_rule("wait_gmem_to_smem")
def _wait_loads(im: Importer, eqn: Any) -> None:
    im.builder.emit("load_wait", pending=eqn.params["pending"])


@_rule("named_barrier")
def _named_barrier(im: Importer, eqn: Any) -> None:
    number, threads = eqn.params["number"] + FIRST_NAMED, eqn.params["threads"]
    arrives = not eqn.params["wait"]
    im.builder.emit("named_barrier", id=number, threads=threads, arrive_only=arrives)


@_rule("inline_cuda")
def _inline_cuda(im: Importer, eqn: Any, *values: Value) -> Sequence[Value]:
    p, types = eqn.params, [tile_type(v.aval, im.where) for v in eqn.outvars]
    params = [Value(v.type) for v in values]
    code = p["jaxpr"]
    regions = [] if code is None else [im.region(code, params, params)]
    notes = dict(text=p["text"], symbols=p["names"], types=tuple(types))
    return im.builder.emit("inline_cuda", *values, regions=regions, **notes)


@_rule("wait_smem_to_gmem")
def _wait_stores(im: Importer, eqn: Any) -> None:
    pending, read = eqn.params["pending"], eqn.params["read"]
    im.builder.emit("bulk_wait", pending=pending, read=read)


@_rule("commit_smem_to_gmem_group")
def _commit_stores(im: Importer, eqn: Any) -> None:
    im.builder.emit("bulk_commit")


@_rule("commit_smem")
def _commit_smem(im: Importer, eqn: Any) -> None:
    im.builder.emit("fence_async")


@_rule("wgmma")
def _wgmma(im: Importer, eqn: Any, *flat: Value) -> None:
    is_tile = eqn.params["is_tile"]
    (acc, at), *rest = _parts(im, eqn, int(is_tile))
    sums = view(im, acc, at)
    if sums.ref.space != "regs":
        raise KernelTypeError(
            "wgmma needs an accumulator as its first operand",
            [("kernel", im.kernel_name), ("got", sums.type)],
            im.where,
            "allocate plgpu.ACC((m, n), jnp.float32)",
        )
    sides = [_side(im, *part) for part in reversed(rest)]
    if is_tile:
        sides.insert(0, (flat[0], False))
    (lhs, left), (rhs, right) = sides
    contract = ((0 if left else 1,), (1 if right else 0,))
    checks.product(im, sums, (lhs, left), (rhs, right))
    b = im.builder
    result = b.op("wgmma", b.load(sums), lhs, rhs, contract=contract)
    b.store(sums, result)


def _side(im: Importer, ref: Value, transforms: Any) -> tuple[Value, bool]:
    """An operand of a matmul, and whether it is stored transposed."""
    last: Any = transforms[-1] if transforms else None
    turned = type(last).__name__ == "TransposeTransform" and last.permutation == (1, 0)
    return view(im, ref, transforms[:-1] if turned else transforms), turned


@_rule("wgmma_wait")
def _wgmma_wait(im: Importer, eqn: Any) -> None:
    im.builder.emit("wgmma_wait", pending=eqn.params["pending"])


# --- single warps, tensor memory ---


@_rule("warps")
def _warps(im: Importer, eqn: Any, *captured: Value) -> None:
    jaxpr, axis, threads = eqn.params["jaxpr"], eqn.params["axis"], im.threads
    regions = []
    for number in range(WARPS):
        threads.warp = number
        with im.nested() as builder:
            im.mesh_axes[axis] = builder.index(number)
            for var, value in zip(jaxpr.constvars, captured, strict=True):
                im.env[var] = value
            im.run(jaxpr.replace(constvars=()), ())
            regions.append(builder.block())
    threads.warp = -1
    im.builder.ops.append(Op("warps", regions=tuple(regions), loc=im.where))


@_rule("tcgen05_mma")
def _tensor_mma(im: Importer, eqn: Any, adds: Value, *_: Value) -> None:
    (acc, at), *rest = _parts(im, eqn, 1)
    sums = view(im, acc, at)
    (lhs, left), (rhs, right) = (_side(im, *part) for part in rest[:2])
    scales = [view(im, *part) for part in rest[2:]]
    places = [scales.pop()] if len(scales) % 2 else []
    contract = ((0 if left else 1,), (1 if right else 0,))
    axes = _pair(im, eqn)
    columns = rhs.ref.shape[0 if right else 1] * (2 if axes else 1)
    problem = None
    if sums.ref.space != "tmem":
        problem = "tcgen05_mma needs an accumulator in tensor memory"
    elif (lhs.ref.shape[1 if left else 0], columns) != sums.ref.shape or lhs.ref.shape[
        contract[0][0]
    ] * (1 + len(places)) != rhs.ref.shape[contract[1][0]]:
        problem = "the shapes of the operands and the accumulator do not match"
    if problem is not None:
        sides = [("accumulator", sums.type), ("left", lhs.type), ("right", rhs.type)]
        facts = [("kernel", im.kernel_name), *sides]
        fix = "accumulator plgpu.TMEM((m, n), jnp.float32), operands (m, k) and (k, n)"
        raise KernelTypeError(problem, facts, im.where, fix)
    checks.scales(im, sums.ref.shape, rhs.ref.shape[contract[1][0]], scales)
    checks.places(im, lhs, left, places)
    operands = (sums, lhs, rhs, adds, *scales, *places)
    im.builder.emit("tensor_mma", *operands, contract=contract, axes=axes)


def _pair(im: Importer, eqn: Any) -> tuple[int, ...]:
    """The axis of the cluster along which two blocks work together."""
    axes = im.threads.axes_of(im, eqn.params["axes"])
    sizes = [im.grid.sizes[a] for a in axes]
    if axes and sizes != [2]:
        raise KernelTypeError(
            f"a collective tcgen05_mma needs 2 blocks of a cluster, not {sizes[0]}",
            [("kernel", im.kernel_name), ("collective_axis", eqn.params["axes"][0])],
            im.where,
            "give that cluster axis size 2",
        )
    return axes


@_rule("tcgen05_commit_arrive")
def _tensor_commit(im: Importer, eqn: Any, *_: Value) -> None:
    (part,) = _parts(im, eqn)
    barrier = _barrier(im, *part)
    if not eqn.invars[0].aval.memory_space.orders_tensor_core:
        raise KernelTypeError(
            "a barrier that the tensor core arrives at needs orders_tensor_core=True",
            [("kernel", im.kernel_name), ("barrier", barrier.type)],
            im.where,
            "plgpu.Barrier(orders_tensor_core=True)",
        )
    im.builder.emit("tensor_commit", barrier, axes=_pair(im, eqn))


@_rule("async_copy_smem_to_tmem")
def _tensor_copy(im: Importer, eqn: Any, *_: Value) -> None:
    source, target = _ends(im, ("smem", "tmem"), *_parts(im, eqn))
    im.builder.emit("tensor_copy", source, target, axes=_pair(im, eqn))


@_rule("wait_tmem")
def _tensor_wait(im: Importer, eqn: Any) -> None:
    im.builder.emit("tensor_wait", what=eqn.params["what"])


@_rule("set_max_registers")
def _set_registers(im: Importer, eqn: Any) -> None:
    count, more = eqn.params["count"], eqn.params["more"]
    im.builder.emit("set_registers", count=count, more=more)
