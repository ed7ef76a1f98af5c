"""Small explicit kernels whose memory traffic is easy to get wrong, with their results.

Copies that blocks of a cluster share, slots that are released late, parts of shared
memory that an integer selects, swizzled memory seen transposed. The host (`host.py`)
and a GPU run the same forms (`test_plgpu_forms.py`).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu

MOST_BLOCKS = 8
Form = tuple[Callable[..., Any], tuple[np.ndarray, ...], np.ndarray]
FORMS: dict[str, Callable[[], Form]] = {}


def form(name: str, *args: Any) -> Callable[[Callable[..., Form]], Callable[..., Form]]:
    def register(make: Callable[..., Form]) -> Callable[..., Form]:
        FORMS[name] = lambda: make(*args)
        return make

    return register


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def out(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# --- copies that the blocks of a cluster share ---


def place_along(axes: str) -> Any:
    place, step = 0, 1
    for axis in axes:
        place += lax.axis_index(axis) * step
        step *= lax.axis_size(axis)
    return place


def multicast(shared: str, others: str, size: int) -> Form:
    """Blocks along `shared` load together, then each stores its rows of the whole."""
    cluster = [size if a in shared else 2 if a in others else 1 for a in "xyz"]
    sharing = size ** len(shared)
    groups = math.prod(cluster) // sharing
    shape = (2 * groups, 8 * sharing, 64)

    def kernel(x_ref, o_ref, buffer, barrier):
        group = lax.axis_index("grid") * groups + place_along(others)
        mine = place_along(shared)
        source = x_ref.at[group]
        plgpu.copy_gmem_to_smem(source, buffer, barrier, collective_axes=tuple(shared))
        plgpu.barrier_wait(barrier)
        rows = pl.ds(8 * mine, 8)
        plgpu.copy_smem_to_gmem(buffer.at[rows], o_ref.at[group, rows, :])
        plgpu.wait_smem_to_gmem(0)

    function = plgpu.kernel(
        kernel,
        out(shape, jnp.float16),
        grid=(2,),
        grid_names=("grid",),
        cluster=tuple(cluster),
        cluster_names=tuple("xyz"),
        scratch_shapes=[
            plgpu.SMEM(
                shape[1:],
                jnp.float16,
                transforms=(
                    plgpu.TilingTransform((8, 64)),
                    plgpu.SwizzleTransform(128),
                ),
            ),
            plgpu.Barrier(),
        ],
    )
    x = numbers(*shape, dtype=np.float16)
    return function, (x,), x


def clusters() -> Iterator[tuple[str, str, int]]:
    parts = ["".join(p) for n in (1, 2, 3) for p in itertools.combinations("xyz", n)]
    for shared in parts:
        rest = set("xyz") - set(shared)
        for others in ("", *(p for p in parts if set(p) <= rest)):
            for size in (1, 2, 4):
                if size ** len(shared) * 2 ** len(others) <= MOST_BLOCKS:
                    yield shared, others, size


for _case in clusters():
    form("multicast {0}={2}_{1}".format(*_case), *_case)(multicast)


# --- slots that are released late ---


def late_release(
    is_static: bool, by_hand: bool, shape: tuple[int, int], slots: int, delay: int = 1
) -> Form:
    """A sum of two arrays; a slot is refilled `delay` steps after it was read."""
    rows, columns = 32, 64

    def body(indices, x_ref, y_ref, o_ref, *consumed):
        mine = pl.ds(lax.axis_index("wg") * rows, rows)
        o_ref[mine] = x_ref[mine] + y_ref[mine]
        if by_hand:
            steps = indices[0] * (shape[1] // columns) + indices[1]

            @pl.when(steps >= delay)
            def _():
                for barrier in consumed:
                    plgpu.barrier_arrive(barrier)

    place = lambda i, j: (i, j)
    spec = plgpu.BlockSpec((rows, columns), place, delay_release=delay)

    def kernel(*refs):
        grid: Any = (shape[0] // rows, shape[1] // columns)
        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=grid if is_static else tuple(map(jnp.int32, grid)),
            in_specs=[spec, spec],
            out_specs=[pl.BlockSpec((rows, columns), place)],
            max_concurrent_steps=slots,
            manual_consumed_barriers=by_hand,
            num_compute_wgs=1,
            memory_registers=40,
            wg_axis="wg",
        )(*refs)

    function = plgpu.kernel(kernel, out(shape), num_threads=2, thread_name="wg")
    x, y = numbers(*shape), np.sqrt(numbers(*shape))
    return function, (x, y), x + y


for _how in itertools.product((True, False), (False, True)):
    for _shape, _slots, _delay in (
        ((64, 64), 2, 1),
        ((96, 128), 2, 1),
        ((96, 128), 3, 1),
        ((96, 128), 3, 2),
        ((32, 64), 4, 1),
        ((256, 256), 4, 1),
    ):
        _words = ["static" if _how[0] else "dynamic", "by hand" if _how[1] else "auto"]
        form(
            f"late release {' '.join(_words)} {_shape} {_slots} slots {_delay} late",
            *_how, _shape, _slots, _delay,
        )(late_release)  # fmt: skip


@form("late release repeated", 1)
@form("release repeated", 0)
def repeated(delay: int) -> Form:
    """The same pipeline three times: each leaves barriers and slots as they were."""
    steps = 4

    def body(_, x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1.0

    def kernel(x_ref, o_ref):
        for _ in range(3):
            plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec((64, 64), lambda i: (0, i), delay_release=delay)
                ],
                out_specs=[plgpu.BlockSpec((64, 64), lambda i: (0, i))],
                max_concurrent_steps=2,
                num_compute_wgs=1,
                memory_registers=40,
                wg_axis="wg",
            )(x_ref, o_ref)

    x = numbers(64, 64 * steps)
    function = plgpu.kernel(kernel, out(x.shape), num_threads=2, thread_name="wg")
    return function, (x,), x + 1


@form("releases of different delays")
def different_delays() -> Form:
    shape = (128, 64)

    def body(_, x_ref, y_ref, z_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...] + z_ref[...]

    def kernel(*refs):
        place = lambda i, j: (i, j)
        plgpu.emit_pipeline(
            body,
            grid=(4, 2),
            in_specs=[
                plgpu.BlockSpec((32, 32), place, delay_release=n) for n in range(3)
            ],
            out_specs=[pl.BlockSpec((32, 32), place)],
            max_concurrent_steps=4,
        )(*refs)

    args = tuple(numbers(*shape) * n for n in (1, 2, 3))
    return plgpu.kernel(kernel, out(shape)), args, args[0] * 6


@form("pipeline shared by a cluster", 2)
@form("pipeline shared by four blocks", 4)
def shared_pipeline(blocks: int) -> Form:
    steps = 4

    def body(_, x_ref, o_ref):
        o_ref[0] = x_ref[...] + 1.0

    def kernel(x_ref, o_ref):
        block = lax.axis_index("cluster")
        for _ in range(2):
            plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec(
                        (64, 64), lambda i: (0, i), collective_axes=("cluster",)
                    )
                ],
                out_specs=[plgpu.BlockSpec((1, 64, 64), lambda i: (block, 0, i))],
                max_concurrent_steps=2,
                num_compute_wgs=1,
                memory_registers=40,
                wg_axis="wg",
            )(x_ref, o_ref)

    x = numbers(64, 64 * steps)
    function = plgpu.kernel(
        kernel,
        out((blocks, *x.shape)),
        num_threads=2,
        thread_name="wg",
        cluster=(1, blocks, 1),
        cluster_names=("before", "cluster", "after"),
    )
    return function, (x,), np.stack([x + 1] * blocks)


# --- parts that several indices select ---

PARTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "start of a slice": ((256,), (slice(0, 128), slice(None, 32))),
    "slice of a slice": ((256,), (slice(32, 96), slice(0, 32))),
    "row": ((64, 64), (4, slice(0, 64))),
    "row of a slice": ((64, 64), (slice(8, 24), 3)),
    "rows of a slice": ((64, 64), (slice(8, 32), slice(8, 16))),
    "columns of rows": ((64, 64), (slice(8, 32), (slice(None), slice(32, 64)))),
    "row of a plane": ((2, 64, 64), (1, 4)),
    "plane": ((3, 64, 1, 128), ((0, slice(0, 32), 0, slice(0, 128)),)),
    "planes": ((3, 16, 64), (slice(1, 3),)),
    "rows of planes": ((3, 64, 64), ((slice(0, 2), slice(8, 24)),)),
}


def part_of(ref: Any, indices: tuple[Any, ...], shift: Any) -> Any:
    for index in indices:
        if shift is not None and isinstance(index, int):
            index = shift + index
        ref = ref.at[index]
    return ref


def parts(shape: tuple[int, ...], indices: tuple[Any, ...], way: str) -> Form:
    """Copies a part one way; what threads store and load is the whole."""
    dtype, is_dynamic = np.float32, "dynamic" in way
    scratch = [plgpu.SMEM(shape, jnp.float32), plgpu.Barrier()]
    x = numbers(*shape, dtype=dtype)
    want = np.full_like(x, -1)
    there, here = want, x
    for index in indices[:-1]:
        there, here = there[index], here[index]
    there[indices[-1]] = here[indices[-1]] + 1

    def kernel(x_ref, fill_ref, o_ref, buffer, barrier):
        shift = lax.axis_index("grid") if is_dynamic else None
        if way.startswith("in"):
            buffer[...] = fill_ref[...]
            plgpu.commit_smem()
            source = part_of(x_ref, indices, shift)
            plgpu.copy_gmem_to_smem(source, part_of(buffer, indices, shift), barrier)
            plgpu.barrier_wait(barrier)
            o_ref[...] = buffer[...] + 1
        else:
            o_ref[...] = fill_ref[...] + 1
            buffer[...] = x_ref[...] + 1
            plgpu.commit_smem()
            target = part_of(o_ref, indices, shift)
            plgpu.copy_smem_to_gmem(part_of(buffer, indices, shift), target)
            plgpu.wait_smem_to_gmem(0)

    function = plgpu.kernel(
        kernel, out(shape), grid=(1,), grid_names=("grid",), scratch_shapes=scratch
    )
    return function, (x, np.full_like(x, -2)), want


for _name, (_of, _indices) in PARTS.items():
    for _way in ("in", "out", "in dynamic", "out dynamic"):
        form(f"copy {_way}: {_name}", _of, _indices, _way)(parts)


# --- swizzled memory that threads see transposed ---


@form("get and swap of swizzled memory", jnp.bfloat16, (64, 64), 128, False)
@form("get and swap of transposed memory", jnp.bfloat16, (64, 64), 128, True)
@form("get and swap of f32 by 64 bytes", jnp.float32, (8, 64), 64, False)
@form("get and swap of transposed f32 by 64 bytes", jnp.float32, (8, 64), 64, True)
@form("get and swap of transposed f32 by 32 bytes", jnp.float32, (64, 24), 32, True)
@form("get and swap of transposed i8", jnp.int8, (64, 64), 64, True)
def get_and_swap(dtype: Any, shape: tuple[int, ...], by: int, transposed: bool) -> Form:
    def kernel(x_ref, o_ref, buffer, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        seen = plgpu.transpose_ref(buffer, (1, 0)) if transposed else buffer
        layout = plgpu.Layout.WGMMA_TRANSPOSED if transposed else plgpu.Layout.WGMMA
        seen[...] = plgpu.load(seen, (), layout=layout) * 2
        plgpu.copy_smem_to_gmem(buffer, o_ref)
        plgpu.wait_smem_to_gmem(0)

    memory = plgpu.SMEM(shape, dtype, transforms=(plgpu.SwizzleTransform(by),))
    function = plgpu.kernel(
        kernel, out(shape, dtype), scratch_shapes=[memory, plgpu.Barrier()]
    )
    x = numbers(*shape, dtype=dtype)
    return function, (x,), (x * np.asarray(2, x.dtype)).astype(x.dtype)


@form("products of transposed memory", True, True)
@form("products of a transposed left side", True, False)
@form("products of a transposed right side", False, True)
def transposed_product(left: bool, right: bool) -> Form:
    m, k, n = 128, 64, 128
    shapes = [(k, m) if left else (m, k), (n, k) if right else (k, n)]

    def kernel(x_ref, y_ref, o_ref, a, b, barrier):
        plgpu.copy_gmem_to_smem(x_ref, a, barrier)
        plgpu.copy_gmem_to_smem(y_ref, b, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            sides = [
                plgpu.transpose_ref(side, (1, 0)) if is_transposed else side
                for side, is_transposed in ((a, left), (b, right))
            ]
            plgpu.wgmma(acc, *sides)
            return acc[...]

        o_ref[...] = pl.run_scoped(multiply, plgpu.ACC((m, n), jnp.float32))

    how = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    memory = [plgpu.SMEM(s, jnp.float16, transforms=how) for s in shapes]
    function = plgpu.kernel(
        kernel,
        out((m, n)),
        scratch_shapes=[*memory, plgpu.Barrier(num_arrivals=2)],
    )
    x, y = (np.sin(numbers(*s)).astype(np.float16) for s in shapes)
    a, b = x.astype(np.float32), y.astype(np.float32)
    return function, (x, y), (a.T if left else a) @ (b.T if right else b)


@form("products of loads from transposed memory", 128)
@form("products of loads from memory swizzled by 64 bytes", 64)
def loaded_product(by: int) -> Form:
    """The left side is loaded into registers from memory that has it transposed."""
    m, k, n = 64, 64, 64

    def kernel(x_ref, y_ref, o_ref, a, b, barrier):
        plgpu.copy_gmem_to_smem(x_ref, a, barrier)
        plgpu.copy_gmem_to_smem(y_ref, b, barrier)
        plgpu.barrier_wait(barrier)
        loaded = plgpu.load(plgpu.transpose_ref(a, (1, 0)), ())

        def multiply(acc):
            plgpu.wgmma(acc, loaded, b)
            return acc[...]

        o_ref[...] = pl.run_scoped(multiply, plgpu.ACC((m, n), jnp.float32))

    memory = [
        plgpu.SMEM((k, m), jnp.float16, transforms=(plgpu.SwizzleTransform(by),)),
        plgpu.SMEM((k, n), jnp.float16, transforms=(plgpu.SwizzleTransform(128),)),
        plgpu.Barrier(num_arrivals=2),
    ]
    function = plgpu.kernel(kernel, out((m, n)), scratch_shapes=memory)
    x, y = (np.sin(numbers(*s)).astype(np.float16) for s in ((k, m), (k, n)))
    return function, (x, y), x.T.astype(np.float32) @ y.astype(np.float32)
