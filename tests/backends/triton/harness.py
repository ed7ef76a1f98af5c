"""Kernels through the Triton backend and the simulator, for this folder's tests."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pallasite.backends import base
from pallasite.ir.build import Builder
from pallasite.ir.nodes import BlockDim, Kernel, Value, Window
from pallasite.ir.types import RefType, TileType
from pallasite.target import GPUS, Chip, Gpu
from tests.backends.triton import simulate

BACKEND = base.get("triton")


def with_shared(size: int) -> Gpu:
    """An H200 with so many bytes of shared memory."""
    chip = GPUS["h200"]
    shared = replace(chip.shared, bytes=size)
    return replace(chip, memories={**chip.memories, "shared": shared})


def compiled(kernel: Kernel, **params: Any) -> tuple[str, base.Launch]:
    """TTIR and launch of a kernel, verified by Triton."""
    options = base.Options(compiler_params=params)
    outputs = base.Compiled(BACKEND, kernel, options, shared=())
    simulate.verify_ttir(outputs["ttir"])
    return outputs["ttir"], BACKEND.launch(outputs)


def simulated(
    kernel: Kernel, operands: Sequence[Any], seed: int = 0, chip: Chip | None = None
) -> list[np.ndarray]:
    """The outputs of a kernel, run on numpy in a random order of programs."""
    options = base.Options(chip=chip)
    outputs = base.Compiled(BACKEND, kernel, options, shared=())
    launch = BACKEND.launch(outputs)
    inputs = [np.array(x) for x in operands]
    rng = np.random.default_rng(seed)
    results = [
        rng.integers(1, 100, p.ref.shape).astype(p.ref.dtype.np) for p in kernel.outputs
    ]
    scratch = [np.full(shape, 77).astype(d) for shape, d in launch.scratch_results]
    made = [*results, *scratch]
    for source, target in launch.aliases:
        made[target] = inputs[source]
    programs = int(launch.config["grid_x"])  # type: ignore[index,call-overload]
    # What a log starts as and the log are one array.
    log = [np.zeros(launch.log_words, np.int32)] if launch.log_words else []
    arrays = [*inputs, *log, *made, *log]
    simulate.run(outputs["ttir"], arrays, programs, seed)
    if launch.read_log is not None:
        launch.read_log(log[0])
    return made[: len(results)]


def whole_kernel(body, inputs: Sequence[TileType], *outputs: TileType) -> Kernel:
    """A kernel without a grid: `body(builder, *tiles)` gives the tiles to store."""
    types = [*inputs, *outputs]
    params = [
        Value(RefType(t.shape, t.dtype, "any"), f"p{n}") for n, t in enumerate(types)
    ]
    blocks = [Value(RefType(t.shape, t.dtype, "block")) for t in types]
    builder = Builder()
    made = body(builder, *(builder.load(b) for b in blocks[: len(inputs)]))
    made = (made,) if isinstance(made, Value) else made
    for block, value in zip(blocks[len(inputs) :], made, strict=True):
        builder.store(block, value)
    maps = []
    for tile in types:
        inside = Builder()
        maps.append(inside.block((), [inside.index(0) for _ in tile.shape]))
    modes = ["in"] * len(inputs) + ["out"] * len(outputs)
    windows = tuple(
        Window(tuple(BlockDim(n) for n in t.shape), mode)
        for t, mode in zip(types, modes, strict=True)
    )
    outer = Builder()
    outer.emit(
        "pipeline",
        *params,
        regions=(*maps, builder.block(blocks)),
        grid=(),
        windows=windows,
        semantics=(),
    )
    return Kernel("test", tuple(params), outer.block(), len(outputs))
