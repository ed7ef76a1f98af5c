"""Kernel calls under sharded `jit`: partitioned across devices instead of gathered.

When XLA compiles for several devices, a kernel call is lowered to a custom call that
carries a Shardy rule, so shardings propagate through it. XLA then calls back here with
the shardings of operands and results; the callback splits the grid axes that the rule
allows (`passes/analysis/partition.py`), and returns the kernel of one device
(`passes/transform/shard.py`), with a sum over devices if the rule has one. Lowering
needs no mesh and no devices.
"""

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallasite import jaxcompat
from pallasite.errors import PartitionWarning, compose, warn
from pallasite.passes.analysis.partition import WHOLE, PartitionRule
from pallasite.passes.transform.shard import local_shape, shard
from pallasite.sharding.rule import Partition, local_of, rule_of

TARGET = "pallasite_partition"
DEVICES = "pallasite_devices"  # the axis name over all devices
_THIS_PROCESS = secrets.token_hex(8)


# --- lowering ---


class Compute(Protocol):
    """Makes the function one device runs, given how the grid is split: it takes the
    device's parts of the operands, then its first step along each axis that it
    names."""

    def __call__(
        self, splits: Mapping[int, int]
    ) -> "tuple[Function, Sequence[int]]": ...


Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Task:
    """Something XLA may ask to partition.

    Args:
        name: the kernel's name.
        key: text that identifies the task.
        rule: how it may be partitioned.
        compute: what one device runs.
        loc: the author's line.
    """

    name: str
    key: str
    rule: PartitionRule
    compute: Compute
    loc: Any = None


def call_task(call: Any, bind: Callable[..., Any]) -> Task:
    """A kernel call as a task; `bind` binds the call's primitive."""
    rule, local = rule_of(call), local_of(call)

    def split_kernel(splits: Mapping[int, int]) -> tuple[Function, Sequence[int]]:
        part = shard(rule, splits)
        one = replace(call, kernel=part.kernel, partition=False, equal=())
        return lambda *operands: bind(one, operands), part.offset_axes

    compute = split_kernel if local is None else _given(local)
    return Task(call.kernel.name, call_key(call), rule, compute, call.kernel.loc)


def _given(local: Callable[..., Any]) -> Compute:
    """The author's function for one device, however the call is partitioned."""
    return lambda splits: (lambda *operands: jax.tree.leaves(local(*operands)), ())


_locals: dict[Any, int] = {}  # authors' functions, numbered in order of first use


def call_key(call: Any) -> str:
    """Text that is equal for equal calls, in any process."""
    rule: Any = call.partition
    if isinstance(rule, Partition):
        rule = (rule.rule, rule.sums, _locals.setdefault(rule.local, len(_locals)))
    options = (call.interpret, call.backend, call.compiler_params, rule, call.flowing)
    return repr((call.kernel.text, options))


@dataclass(frozen=True)
class Pending:
    """A task and where it is being compiled."""

    task: Task
    platforms: tuple[str, ...]
    x64: bool
    devices: int

    @property
    def config(self) -> str:
        """The custom call's backend config, which names the task."""
        parts = (self.task.key, self.platforms, self.x64, self.devices)
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        text = f"{self.task.name} {digest[:20]}"
        if "cpu" in self.platforms and jaxcompat.flag("jax_compilation_cache_dir"):
            # The callback registers machine code, so another process must not reuse
            # the compiled program and skip the callback.
            text += f" {_THIS_PROCESS}"
        return text


_pending: dict[str, Pending] = {}  # XLA may call back at any later time


def lower_partitioned(ctx: Any, operands: Sequence[Any], task: Task) -> Any:
    """Emit the custom call that XLA partitions by calling `_partition`."""
    _register()
    platforms = tuple(ctx.module_context.platforms)
    x64, devices = jaxcompat.flag("jax_enable_x64"), jaxcompat.auto_devices(ctx)
    pending = Pending(task, platforms, bool(x64), devices)
    config = pending.config
    _pending[config] = pending
    rule = jaxcompat.sharding_rule_attribute(shardy_text(task.rule))
    lower = jax.ffi.ffi_lowering(
        TARGET,
        api_version=2,
        backend_config=config,
        extra_attributes={"sdy.sharding_rule": rule},
    )
    return lower(ctx, *operands)


@lru_cache(maxsize=1)
def _register() -> None:
    jaxcompat.register_partitioner(TARGET, _partition, _infer)


def shardy_text(rule: PartitionRule) -> str:
    """The rule as Shardy's text: one factor per axis that may be split.

    A dimension that follows an axis is that axis's factor times what stays together;
    any other dimension is its own factor, so that its sharding is kept, reaches the
    callback and can be warned about.
    """
    sizes: list[int] = []

    def factor(size: int) -> str:
        sizes.append(size)
        return _symbol(len(sizes) - 1)

    of_axis = {a: factor(rule.axes[a].parts) for a in rule.splittable}

    def dimension(size: int, axis: int | None) -> str:
        if axis is None or axis not in of_axis:
            return factor(size)
        rest = size // rule.axes[axis].parts
        return of_axis[axis] + (factor(rest) if rest > 1 else "")

    arrays = [
        f"[{', '.join(map(dimension, array.shape, array.axes))}]"
        for array in rule.arrays
    ]
    count = len(rule.inputs)
    listed = ", ".join(f"{_symbol(f)}={n}" for f, n in enumerate(sizes))
    summed = [
        of_axis[a]
        for a in rule.splittable
        if all(rule.is_summed(o, a) for o in rule.outputs)
    ]
    reduction = f" reduction={{{', '.join(summed)}}}" if summed else ""
    text = f"({', '.join(arrays[:count])})->({', '.join(arrays[count:])})"
    return f"{text} {{{listed}}}{reduction}, custom"


def _symbol(factor: int) -> str:
    """Shardy's name for a factor: i to z, then z_1 and so on."""
    last = ord("z") - ord("i")
    return chr(ord("i") + factor) if factor <= last else f"z_{factor - last}"


# --- which device has which part ---


@dataclass(frozen=True)
class AxisSplit:
    """A grid axis split into parts, and the part of each device."""

    axis: int
    parts: int
    part_of: np.ndarray


@dataclass(frozen=True)
class Placement:
    """How devices share a call."""

    devices: int
    splits: tuple[AxisSplit, ...]

    @property
    def parts(self) -> dict[int, int]:
        return {c.axis: c.parts for c in self.splits}

    def sharding(self, axes: Sequence[int | None]) -> Any:
        """The XLA sharding of an array whose dimensions follow these axes."""
        by_axis = {c.axis: c for c in self.splits}
        splits = [by_axis.get(a) if a is not None else None for a in axes]
        shape = [1 if c is None else c.parts for c in splits]
        keys = [np.zeros(self.devices, int) if c is None else c.part_of for c in splits]
        order = np.lexsort([np.arange(self.devices), *reversed(keys)])
        copies = self.devices // math.prod(shape)
        tiles = [*shape, copies] if copies > 1 else shape
        return jaxcompat.tiled_sharding(order.reshape(tiles), len(shape))

    def groups(self, axes: Sequence[int]) -> list[list[int]]:
        """Devices that differ only in their part of these axes."""
        keys = [c.part_of for c in self.splits if c.axis not in axes]
        parts = [c.part_of for c in self.splits if c.axis in axes]
        everything = np.stack([c.part_of for c in self.splits])
        number = _rank_within(everything)
        groups: dict[Any, list[int]] = {}
        order = np.lexsort([*parts, np.arange(self.devices)])
        for device in map(int, order):
            key = (int(number[device]), *(int(k[device]) for k in keys))
            groups.setdefault(key, []).append(device)
        return [sorted(group) for group in groups.values()]


def _rank_within(keys: np.ndarray) -> np.ndarray:
    """For each column: the number of equal columns before it."""
    seen: dict[tuple[int, ...], int] = {}
    ranks = []
    for column in keys.T:
        key = tuple(map(int, column))
        ranks.append(seen.get(key, 0))
        seen[key] = ranks[-1] + 1
    return np.asarray(ranks)


def place(
    rule: PartitionRule, tiles: Mapping[int, np.ndarray], devices: int
) -> Placement:
    """Split axes the way the arrays are sharded, as far as blocks and devices allow.

    Args:
        rule: the kernel's rule.
        tiles: from array numbers to tile assignments, for sharded arrays.
        devices: how many there are.
    """
    found: dict[int, tuple[tuple[int, int], AxisSplit]] = {}
    for number, assignment in tiles.items():
        array = rule.arrays[number]
        for dim, axis in enumerate(array.axes):
            if axis is None or axis not in rule.splittable:
                continue
            parts = math.gcd(assignment.shape[dim], rule.axes[axis].parts)
            part_of = _part_of(assignment, dim) // (assignment.shape[dim] // parts)
            worth = (
                parts,
                math.prod(array.shape),
            )  # the largest array is not resharded
            if parts > 1 and (axis not in found or worth > found[axis][0]):
                found[axis] = (worth, AxisSplit(axis, parts, part_of))
    splits: list[AxisSplit] = []
    for split in sorted(
        (c for _, c in found.values()), key=lambda c: (-c.parts, c.axis)
    ):
        if _is_even([*splits, split], devices):
            splits.append(split)
    return Placement(devices, tuple(sorted(splits, key=lambda c: c.axis)))


def _part_of(assignment: np.ndarray, dim: int) -> np.ndarray:
    """Each device's part along a dimension."""
    parts = np.zeros(assignment.size, int)
    parts[assignment.ravel()] = np.indices(assignment.shape)[dim].ravel()
    return parts


def _is_even(splits: Sequence[AxisSplit], devices: int) -> bool:
    """Whether every combination of parts is on the same number of devices."""
    _, counts = np.unique(
        np.stack([c.part_of for c in splits]), axis=1, return_counts=True
    )
    combinations = math.prod(c.parts for c in splits)
    return len(counts) == combinations and set(counts) == {devices // combinations}


# --- what XLA calls ---


def _partition(
    shapes: Sequence[Any],
    shardings: Sequence[Any],
    result_shape: Any,
    result_sharding: Any,
    config: bytes,
) -> tuple[bytes, list[Any], Any]:
    """The module of one device, and the shardings it expects."""
    pending = _pending[config.decode()]
    rule = pending.task.rule
    results = _elements(result_shape, result_sharding)
    tiles = _tiles([*shardings, *results])
    devices = max(
        (s.num_devices() for s in [*shardings, *results] if s.is_tiled()), default=1
    )
    placement = place(rule, tiles, devices)
    if devices < pending.devices:
        placement = _without_numbers(pending.task, placement)
    _warn_gathered(pending.task, tiles, placement)
    module = jaxcompat.module_of_one_device(
        _one_device(pending.task, placement),
        [
            jax.ShapeDtypeStruct(local_shape(array, placement.parts), s.numpy_dtype())
            for array, s in zip(rule.inputs, shapes, strict=True)
        ],
        (DEVICES, devices),
        pending.platforms,
        pending.x64,
    )
    made = [placement.sharding(a.axes) for a in rule.arrays]
    count = len(rule.inputs)
    return (
        module,
        made[:count],
        jaxcompat.tuple_sharding(result_shape, made[count:]),
    )


def _without_numbers(task: Task, placement: Placement) -> Placement:
    """Keeps only splits for which no device needs to know its number.

    In a shard_map over some axes of a mesh, XLA shows only the devices of one group,
    numbered from zero; their numbers in the whole mesh are not known here.
    """
    rule = task.rule
    splits = [
        c
        for c in placement.splits
        if not any(rule.is_summed(output, c.axis) for output in rule.outputs)
    ]
    _, told = task.compute({c.axis: c.parts for c in splits})
    return replace(placement, splits=tuple(c for c in splits if c.axis not in told))


def _infer(
    shapes: Sequence[Any], shardings: Sequence[Any], result_shape: Any, config: bytes
) -> Any:
    """The results' shardings from the operands' (without Shardy)."""
    rule = _pending[config.decode()].task.rule
    devices = max((s.num_devices() for s in shardings if s.is_tiled()), default=1)
    placement = place(rule, _tiles(shardings), devices)
    made = [placement.sharding(a.axes) for a in rule.outputs]
    return jaxcompat.tuple_sharding(result_shape, made)


def _elements(shape: Any, sharding: Any) -> list[Any]:
    return list(sharding.tuple_elements()) if shape.is_tuple() else [sharding]


def _tiles(shardings: Sequence[Any]) -> dict[int, np.ndarray]:
    found = enumerate(map(jaxcompat.tile_assignment, shardings))
    return {n: tiles for n, tiles in found if tiles is not None}


def _one_device(task: Task, placement: Placement) -> Callable[..., list[Any]]:
    """What one device computes from its parts of the operands."""
    rule, by_axis = task.rule, {c.axis: c for c in placement.splits}
    function, told = task.compute(placement.parts)

    def first_step(axis: int) -> Any:
        split = by_axis[axis]
        steps = (rule.axes[axis].size or 0) // split.parts
        table = jnp.asarray(split.part_of * steps, jnp.int32)
        return table[jax.lax.axis_index(DEVICES)]

    def run(*operands: Any) -> list[Any]:
        results = function(*operands, *map(first_step, told))
        return [
            _summed(result, placement, [a for a in by_axis if rule.is_summed(array, a)])
            for result, array in zip(results, rule.outputs, strict=True)
        ]

    return run


def _summed(result: Any, placement: Placement, axes: Sequence[int]) -> Any:
    if not axes:
        return result
    groups = placement.groups(axes)
    return jax.lax.psum(result, DEVICES, axis_index_groups=groups)


# --- meshes with explicit axes ---


def result_specs(call: Any, avals: Sequence[Any]) -> list[tuple[Any, ...] | None]:
    """Shardings of results over explicit mesh axes, in the form of types; or None."""
    specs = [jaxcompat.explicit_spec(a) for a in avals]
    if call.partition is False or not any(any(spec) for spec in specs):
        return [None] * call.kernel.num_outputs
    rule, sizes = rule_of(call), jaxcompat.mesh_sizes(avals[0])
    of_axis: dict[int, tuple[str, ...]] = {}
    for array, spec in zip(rule.inputs, specs, strict=True):
        for axis, names in zip(array.axes, spec, strict=True):
            count = math.prod(sizes[name] for name in names)
            taken = {n for used in of_axis.values() for n in used}
            fits = axis in rule.splittable and rule.axes[axis].parts % count == 0
            if axis is not None and fits and not taken & set(names):
                of_axis.setdefault(axis, names)
    return [
        tuple((of_axis.get(a) if a is not None else None) or None for a in array.axes)
        for array in rule.outputs
    ]


# --- warnings about what is gathered ---

_warned: set[str] = set()


def _warn_gathered(task: Task, tiles: Mapping[int, np.ndarray], at: Placement) -> None:
    """Warn once per kernel about gathered operands, of which devices need more."""
    facts, rule = [], task.rule
    for number, array in enumerate(rule.inputs):
        if number not in tiles:
            continue
        for dim, axis in enumerate(array.axes):
            came = tiles[number].shape[dim]
            kept = 1 if axis is None else at.parts.get(axis, 1)
            if kept < came:
                facts.append((array.name, _why_gathered(rule, number, dim, came, kept)))
    if not facts or task.key in _warned:
        return
    _warned.add(task.key)
    message = compose(
        f"kernel '{task.name}': sharded operands are gathered",
        facts,
        task.loc,
        "shard them along dimensions that follow the grid, or call it in a shard_map",
    )
    warn(message, PartitionWarning, task.loc)


def _why_gathered(
    rule: PartitionRule, number: int, dim: int, came: int, kept: int
) -> str:
    axis = rule.arrays[number].axes[dim]
    left = f", {kept} kept" if kept > 1 else ""
    text = f"dimension {dim} is split into {came} parts{left}: "
    if axis is None or rule.axes[axis].kind == WHOLE:
        named = "" if axis is None else f"grid axis {axis} stays whole, "
        return text + named + rule.why_whole(number, dim)
    parts = rule.axes[axis].parts
    if math.gcd(parts, came) < came:
        return text + f"grid axis {axis} has {parts} blocks to split"
    return text + f"the devices that split grid axis {axis} already split another"
