"""Random `plgpu` kernels: rings that a warpgroup fills and others empty, and pipelines.

Shapes do not fit the blocks, slots and steps are any number, indices wander. `Ring`
has the synchronisation that it needs and can leave out one place of it: checked mode
has to report that, unless the result is right all the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from tests.fuzz.choices import Choices

DTYPES = (np.float32, np.int32, np.float16, np.int8)


def integers(choices: Choices, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Small integers: sums are exact in any order and dtype."""
    rng = np.random.default_rng(choices.integer(0, 2**16))
    return rng.integers(-3, 4, size=shape).astype(dtype)


@dataclass
class Left:
    """Counts the places of synchronisation, and leaves out one of them."""

    place: int | None = None
    count: int = 0

    def __call__(self, sync: Callable[..., None], *args: Any, **options: Any) -> None:
        self.count += 1
        if self.count - 1 != self.place:
            sync(*args, **options)


@dataclass(frozen=True)
class Ring:
    """One warpgroup copies rows into slots, each of the others doubles its part."""

    rows: int  # of the array
    block: int  # rows of a step
    columns: int
    slots: int
    readers: int
    dtype: Any
    programs: int
    data: np.ndarray

    @staticmethod
    def draw(choices: Choices) -> "Ring":
        readers = choices.integer(1, 3)
        block = readers * choices.integer(1, 4)
        rows, columns = block + choices.integer(0, 20), 16 * choices.integer(1, 3)
        programs = choices.integer(1, 3)
        dtype = DTYPES[choices.integer(0, len(DTYPES) - 1)]
        data = integers(choices, (programs, rows, columns), dtype)
        slots = choices.integer(1, 4)
        return Ring(rows, block, columns, slots, readers, dtype, programs, data)

    @property
    def steps(self) -> int:
        return -(-self.rows // self.block)

    @property
    def want(self) -> np.ndarray:
        return self.data * self.data.dtype.type(2)

    def run(self, left: Left) -> jax.Array:
        slots, readers, block, part = (
            self.slots,
            self.readers,
            self.block,
            self.block // self.readers,
        )

        def kernel(x: Any, o: Any, ring: Any, out: Any, full: Any, free: Any) -> None:
            program, number = lax.axis_index("g"), lax.axis_index("wg")

            @pl.when(number == readers)
            def _() -> None:
                @pl.loop(0, self.steps)
                def _(step: Any) -> None:
                    slot = lax.rem(step, slots)
                    pl.when(step >= slots)(
                        lambda: left(plgpu.barrier_wait, free.at[slot])
                    )
                    rows = x.at[program, pl.ds(step * block, block)]
                    plgpu.copy_gmem_to_smem(rows, ring.at[slot], full.at[slot])

            @pl.when(number < readers)
            def _() -> None:
                mine = pl.ds(number * part, part)

                @pl.loop(0, self.steps)
                def _(step: Any) -> None:
                    slot = lax.rem(step, slots)
                    left(plgpu.barrier_wait, full.at[slot])
                    value = ring[slot, mine] * 2
                    left(plgpu.barrier_arrive, free.at[slot])
                    left(plgpu.wait_smem_to_gmem, 0, wait_read_only=True)
                    out[mine] = value.astype(out.dtype)
                    left(plgpu.commit_smem)
                    to = pl.ds(step * block + number * part, part)
                    # Parts that are wholly past the end are not copied.
                    inside = step * block + number * part < self.rows
                    plgpu.copy_smem_to_gmem(out.at[mine], o.at[program, to], inside)

                left(plgpu.wait_smem_to_gmem, 0)

        memory = [
            plgpu.SMEM((slots, block, self.columns), self.dtype),
            plgpu.SMEM((block, self.columns), self.dtype),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_arrivals=readers, num_barriers=slots),
        ]
        return plgpu.kernel(
            kernel,
            jax.ShapeDtypeStruct(self.data.shape, self.dtype),
            scratch_shapes=memory,
            grid=(self.programs,),
            grid_names=("g",),
            num_threads=readers + 1,
            thread_name="wg",
            interpret=pl.Checked(),
        )(self.data)


@dataclass(frozen=True)
class Pipe:
    """`emit_pipeline` over blocks of up to three dimensions, some of one element, with
    sums along the last axis of the grid that blocks of the result do not move with."""

    data: np.ndarray
    blocks: tuple[int | None, ...]
    slots: int
    adds_up: bool

    @staticmethod
    def draw(choices: Choices) -> "Pipe":
        rank = choices.integer(1, 3)
        shape = tuple(choices.integer(1, 12) for _ in range(rank - 1))
        shape = (*shape, 16 * choices.integer(1, 4) + choices.integer(0, 1) * 8)
        blocks: list[int | None] = [choices.integer(1, min(5, n)) for n in shape[:-1]]
        if blocks and choices.integer(0, 3) == 0:
            blocks[0] = None
        dtype = DTYPES[choices.integer(0, 1)]
        data = integers(choices, shape, dtype)
        adds_up = bool(choices.integer(0, 1))
        return Pipe(data, (*blocks, 16), choices.integer(1, 4), adds_up)

    @property
    def grid(self) -> tuple[int, ...]:
        pairs = zip(self.data.shape, self.blocks, strict=True)
        return tuple(-(-n // (b or 1)) for n, b in pairs)

    @property
    def want(self) -> np.ndarray:
        if not self.adds_up:
            return self.data * self.data.dtype.type(2)
        width = self.grid[-1] * 16
        wide = np.zeros((*self.data.shape[:-1], width), self.data.dtype)
        wide[..., : self.data.shape[-1]] = self.data
        parts = wide.reshape(*self.data.shape[:-1], self.grid[-1], 16)
        return parts.sum(-2, dtype=self.data.dtype)

    def run(self, interpret: Any) -> jax.Array:
        kept = tuple(b for b in self.blocks if b is not None)

        def add_up(indices: Any, x: Any, o: Any, sums: Any) -> Any:
            first = indices[-1] == 0
            sums = x[...] + jnp.where(first, jnp.zeros_like(sums), sums)
            o[...] = sums
            return sums

        def double(indices: Any, x: Any, o: Any) -> None:
            o[...] = x[...] * 2

        def kernel(x: Any, o: Any) -> None:
            last = (lambda *i: (*i[:-1], 0)) if self.adds_up else (lambda *i: i)
            carry = jnp.zeros(kept, self.data.dtype) if self.adds_up else None
            plgpu.emit_pipeline(
                add_up if self.adds_up else double,
                grid=self.grid,
                in_specs=[plgpu.BlockSpec(self.blocks, lambda *i: i)],
                out_specs=[plgpu.BlockSpec(self.blocks, last)],
                max_concurrent_steps=self.slots,
                init_carry=carry,
            )(x, o)

        out = jax.ShapeDtypeStruct(self.want.shape, self.data.dtype)
        return plgpu.kernel(kernel, out, interpret=interpret)(self.data)
