"""Every refusal says what is wrong, the operand and its numbers, the line, the fix.

The expected texts are in messages.txt, one section per case; run with
`PALLASITE_UPDATE_GOLDEN=1` to rewrite the file, then read the difference.
"""

import os
import re
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import PallasError, one_of
from pallasite.ir.nodes import Loc
from pallasite.language.trace import user_location

S = jax.ShapeDtypeStruct
TABLE = jnp.array([1, 0])
x = jnp.ones((16, 128))
out = S((16, 128), jnp.float32)


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


spec = pl.BlockSpec((8, 128), lambda i: (i, 0))


def leaked():
    """The ref of a kernel that has ended."""
    found = []
    pl.pallas_call(
        lambda x_ref, o_ref: (found.append(x_ref), copy(x_ref, o_ref))[0],
        out_shape=out,
        interpret=True,
    )(x)
    return found[0]


def swap_refs(a_ref, b_ref):
    jax.lax.fori_loop(0, 4, lambda i, refs: refs[::-1], (a_ref, b_ref))


def call(k=copy, args=(x,), **kw):
    kw = {**dict(out_shape=out, interpret=True), **kw}
    return pl.pallas_call(k, **kw)(*args)


def in_map(index_map):
    """A call whose input has this index map."""
    return call(grid=2, in_specs=[pl.BlockSpec((8, 128), index_map)], out_specs=spec)


def with_when(x_ref, o_ref):
    with pl.when(x_ref[0, 0] > 0):
        o_ref[...] = x_ref[...]


def over_loop(x_ref, o_ref):
    for i in pl.loop(0, 16):
        o_ref[i] = x_ref[i]


def rounded(x_ref, o_ref):
    o_ref[...] = x_ref[...] * int(x_ref[0, 0])


def counted(x_ref, o_ref):
    for i in range(pl.program_id(0)):
        o_ref[i] = x_ref[i]


def branch_in_when(x_ref, o_ref):
    @pl.when(x_ref[0, 0] > 0)
    def _():
        if x_ref[0, 1] > 0:
            o_ref[...] = x_ref[...]


def branch_in_pipeline(x_ref, o_ref):
    def inner(a_ref, b_ref):
        if a_ref[0, 0] > 0:
            b_ref[...] = a_ref[...]

    run = pltpu.emit_pipeline(inner, grid=2, in_specs=[spec], out_specs=[spec])
    run(x_ref, o_ref)


def use_kept_value():
    """A kernel uses a value of one that has ended."""
    found = []
    call(lambda x_ref, o_ref: (found.append(x_ref[...]), copy(x_ref, o_ref))[1])
    return call(lambda x_ref, o_ref: o_ref.__setitem__(..., found[0]))


def slope_on_a_mesh(v):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("d")

    def by_rows(x_ref, o_ref):  # a store by an array of indices: no backward kernel
        count = x_ref.shape[0]  # indices that could be equal: 0, 1, 2, ...
        o_ref[jnp.arange(count) * (count + 1) % count] = x_ref[...]

    run = jax.shard_map(
        lambda a: call(by_rows, (a,)), mesh=mesh, in_specs=rows, out_specs=rows
    )
    return jax.grad(lambda a: (run(a) ** 2).sum())(v)


def scaled_by_closure(scale):
    @jax.custom_jvp
    def scaled(x):
        return x * scale

    scaled.defjvp(lambda p, t: (scaled(*p), t[0] * scale))
    return call(lambda x_ref, o_ref: o_ref.__setitem__(..., scaled(x_ref[...]))).sum()


def doubled(x_ref, o_ref):
    o_ref[...] = jax.lax.while_loop(lambda v: v[0, 0] < 9, lambda v: 2 * v, x_ref[...])


def add_up(x_ref, o_ref):
    for row in x_ref:
        o_ref[0] += row


def rebind(x_ref, o_ref):
    o_ref += x_ref[...]


def with_scratch(shapes):
    return call(lambda x_ref, o_ref, s_ref: copy(x_ref, o_ref), scratch_shapes=shapes)


def pipeline(*refs, **options):
    """A kernel that runs a pipeline with these refs (default: its own) and options."""

    def kernel(x_ref, o_ref):
        given = dict(grid=2, in_specs=[spec], out_specs=[spec]) | options
        pltpu.emit_pipeline(copy, **given)(*(refs or (x_ref, o_ref)))

    return call(kernel)


def stored(make):
    """A kernel that stores what `make` gives for its input."""
    return call(lambda x_ref, o_ref: o_ref.__setitem__(..., make(x_ref)))


BAD = {
    "block rank": lambda: call(
        grid=2, in_specs=[pl.BlockSpec((8,), lambda i: (i,))], out_specs=spec
    ),
    "block rank of the last dimensions": lambda: call(
        args=(jnp.ones((2, 16, 128)),), grid=2, in_specs=[spec], out_specs=spec
    ),
    "block size 0": lambda: call(
        grid=2, in_specs=[pl.BlockSpec((0, 128), lambda i: (i, 0))], out_specs=spec
    ),
    "block float": lambda: call(
        grid=2, in_specs=[pl.BlockSpec((8.0, 128), lambda i: (i, 0))], out_specs=spec
    ),
    "map arity": lambda: call(
        grid=(2, 1),
        in_specs=[spec],
        out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, 0)),
    ),
    "map without grid": lambda: call(in_specs=[spec], out_specs=spec),
    "map count": lambda: call(
        grid=2, in_specs=[pl.BlockSpec((8, 128), lambda i: i)], out_specs=spec
    ),
    "map float": lambda: call(
        grid=2, in_specs=[pl.BlockSpec((8, 128), lambda i: (i / 2, 0))], out_specs=spec
    ),
    "map text": lambda: in_map(lambda i: ("i", 0)),
    "map none": lambda: in_map(lambda i: (None, 0)),
    "map nothing": lambda: in_map(lambda i: None),
    "map array": lambda: in_map(lambda i: jnp.stack([i, 0])),
    "map not fn": lambda: in_map((0, 0)),
    "map without parameters": lambda: in_map(lambda: (0, 0)),
    "map by a float prefetch": lambda: call(
        lambda s_ref, x_ref, o_ref: copy(x_ref, o_ref),
        args=(jnp.ones(2), x),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=2,
            in_specs=[pl.BlockSpec((8, 128), lambda i, s_ref: (s_ref[i], 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i, s_ref: (i, 0)),
        ),
    ),
    "out specs forgotten": lambda: call(grid=2, in_specs=[spec]),
    "in specs forgotten": lambda: call(grid=2, out_specs=spec),
    "out specs for one result": lambda: call(
        grid=2, in_specs=[spec], out_specs=[spec, spec]
    ),
    "specs count": lambda: call(grid=2, in_specs=[spec, spec], out_specs=spec),
    "out specs count": lambda: call(
        grid=2, in_specs=[spec], out_specs=[spec, spec], out_shape=(out,)
    ),
    "spec type": lambda: call(grid=2, in_specs=[(8, 128)], out_specs=spec),
    "grid float": lambda: call(grid=(16 / 8,), in_specs=[spec], out_specs=spec),
    "grid negative": lambda: call(grid=(-1,), in_specs=[spec], out_specs=spec),
    "grid huge": lambda: call(grid=(2, 2**31), in_specs=[spec], out_specs=spec),
    "grid str": lambda: call(grid="a", in_specs=[spec], out_specs=spec),
    "out_shape missing": lambda: pl.pallas_call(copy)(x),
    "out_shape bad": lambda: call(out_shape=(16, 128)),
    "both outs": lambda: call(out_type=out),
    "kernel arity": lambda: call(lambda x_ref: None),
    "kernel arity, too many": lambda: call(lambda x_ref, y_ref, o_ref: None),
    "kernel not fn": lambda: call(3),
    "kernel returns": lambda: call(lambda x_ref, o_ref: x_ref[...]),
    "alias range": lambda: call(input_output_aliases={3: 0}),
    "alias shape": lambda: call(
        input_output_aliases={0: 0}, out_shape=S((8, 128), jnp.float32)
    ),
    "alias twice": lambda: call(
        lambda a, b, o: None, args=(x, x), input_output_aliases={0: 0, 1: 0}
    ),
    "static index": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] + x_ref[20, 0])
    ),
    "static slice": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(slice(0, 8), x_ref[pl.ds(12, 8)])
    ),
    "bool index": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(0, x_ref[jnp.arange(16) > 3][0])
    ),
    "bool index, numpy": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[np.arange(16) > 3])
    ),
    "bool index, list": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[[True, False] * 8])
    ),
    "bool index, store": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(x_ref[:, 0] > 3, x_ref[...])
    ),
    "bool index, store of a number": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(x_ref[:, 0] > 3, 0.0)
    ),
    "bool index, pl.store": lambda: call(
        lambda x_ref, o_ref: pl.store(o_ref, x_ref[:, 0] > 3, x_ref[...])
    ),
    "bool index, True": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(0, x_ref[True])
    ),
    "bool index, numpy False": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(np.bool_(False), x_ref[0])
    ),
    "bool index, traced": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(0, x_ref[x_ref[0, 0] > 3])
    ),
    "bool index, start": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(slice(0, 2), x_ref[pl.ds(True, 2)])
    ),
    "store shape": lambda: call(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[0])),
    "store scalar": lambda: call(lambda x_ref, o_ref: o_ref.__setitem__(-1, 0.0)),
    "store too large": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(-1, x_ref[...])
    ),
    "store by mask": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(x_ref[...] > 0, 0.0)
    ),
    "add shape": lambda: call(
        lambda x_ref, o_ref: jax.ref.addupdate(o_ref, ..., x_ref[0])
    ),
    "negative index": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(-17, x_ref[0])
    ),
    "negative size": lambda: stored(lambda x_ref: x_ref[pl.ds(0, -2)]),
    "negative size, written": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(pl.ds(0, -2), x_ref[...])
    ),
    "negative size, not stored": lambda: stored(
        lambda x_ref: x_ref[pl.ds(0, -2)].sum()
    ),
    "negative size, masked": lambda: stored(
        lambda x_ref: pl.load(x_ref, (pl.ds(9, -2), 0), mask=True)
    ),
    "negative size, copied": lambda: call(
        lambda x_ref, o_ref: pltpu.sync_copy(
            x_ref.at[pl.ds(0, -2)], o_ref.at[pl.ds(0, -2)]
        )
    ),
    "stride 0, written": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(pl.ds(3, 16, 0), x_ref[...])
    ),
    "stride 0, added to": lambda: stored(
        lambda x_ref: pl.atomic_add(x_ref, (pl.ds(3, 16, 0),), jnp.ones((16, 128)))
    ),
    "stride 0, copied": lambda: call(
        lambda x_ref, o_ref: pltpu.sync_copy(x_ref.at[pl.ds(3, 16, 0)], o_ref)
    ),
    "view as index": lambda: stored(lambda x_ref: x_ref[x_ref.at[0]]),
    "ref of floats as index": lambda: stored(lambda x_ref: x_ref[x_ref]),
    "store dtype": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...].astype(jnp.int32))
    ),
    "dtype operand": lambda: call(args=(x.astype(jnp.complex64),)),
    "primitive": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., jnp.linalg.qr(x_ref[...])[1])
    ),
    "fft": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., jnp.fft.fft(x_ref[...]).real)
    ),
    "backend": lambda: call(interpret=False, backend="cuba"),
    "program_id axis": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] + pl.program_id(3))
    ),
    "program_id outside": lambda: pl.program_id(0),
    "program_id in map": lambda: call(
        grid=2,
        in_specs=[pl.BlockSpec((8, 128), lambda i: (pl.program_id(0), 0))],
        out_specs=spec,
    ),
    "interpret": lambda: call(interpret="yes"),
    "interpret with parameters": lambda: call(
        interpret=pltpu.CompilerParams(vmem_limit_bytes=4096)
    ),
    "parameters of the emulation": lambda: call(
        compiler_params=pltpu.InterpretParams(num_cores_or_threads=2)
    ),
    "parameters of another kind": lambda: call(compiler_params=spec),
    "semantics count": lambda: call(
        grid=2,
        in_specs=[spec],
        out_specs=spec,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
    ),
    "semantics name": lambda: call(
        grid=2,
        in_specs=[spec],
        out_specs=spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("serial",)),
    ),
    "semantics string": lambda: call(
        grid=2,
        in_specs=[spec],
        out_specs=spec,
        compiler_params=pltpu.CompilerParams(dimension_semantics="parallel"),
    ),
    "any with block": lambda: call(
        grid=2,
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0), memory_space=pl.ANY)],
        out_specs=spec,
    ),
    "space": lambda: call(
        grid=2,
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0), memory_space="nowhere")],
        out_specs=spec,
    ),
    "fill type": lambda: call(
        grid=2,
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0), fill="x")],
        out_specs=spec,
    ),
    "fill int": lambda: call(
        grid=2,
        args=(x.astype(jnp.int8),),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0), fill=1000)],
        out_specs=spec,
        out_shape=S((16, 128), jnp.int8),
    ),
    "fill nan": lambda: call(
        grid=2,
        args=(x.astype(jnp.int32),),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0), fill=float("nan"))],
        out_specs=spec,
        out_shape=S((16, 128), jnp.int32),
    ),
    "scratch": lambda: call(scratch_shapes=[(8, 128)]),
    "grid_spec both": lambda: call(grid=2, grid_spec=pl.GridSpec(grid=2)),
    "prefetch count": lambda: call(
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=3, grid=2)
    ),
    "not array": lambda: call(args=("hello",)),
    "list of numbers": lambda: call(args=([1.0, 2.0],)),
    "operand none": lambda: call(args=(None,)),
    "operand dict": lambda: call(args=({"x": x},)),
    "mask shape": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(
            ..., pl.load(x_ref, ..., mask=jnp.ones((3, 3), bool))
        )
    ),
    "mask dtype": lambda: call(
        lambda x_ref, o_ref: pl.store(o_ref, ..., x_ref[...], mask=x_ref[...])
    ),
    "other without mask": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., pl.load(x_ref, ..., other=0.0))
    ),
    "load non ref": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., pl.load(x_ref[...], ..., mask=True))
    ),
    "copy shapes": lambda: call(
        lambda x_ref, o_ref: pltpu.sync_copy(x_ref.at[0:4], o_ref)
    ),
    "when array": lambda: call(
        lambda x_ref, o_ref: pl.when(x_ref[...] > 0)(lambda: None)
    ),
    "when as context": lambda: call(with_when),
    "loop as iterator": lambda: call(over_loop),
    "debug fmt": lambda: call(lambda x_ref, o_ref: pl.debug_print("{} {}", 1)),
    "missing name": lambda: pltpu.matmul_pop_fifo(0),
    "params": lambda: call(compiler_params=3),
    "kernel mesh": lambda: pl.kernel(copy, out)(x),
    "bounded no ds": lambda: call(
        grid=2,
        in_specs=[pl.BlockSpec((pl.BoundedSlice(8), 128), lambda i: (i, 0))],
        out_specs=spec,
    ),
    "callback": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(
            ..., jax.pure_callback(lambda v: v, out, x_ref[...])
        )
    ),
    "dynamic slice size": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(
            0, x_ref[pl.ds(0, pl.program_id(0) + 1)][0]
        ),
        grid=1,
    ),
    "kernel trace error": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...] @ x_ref[...])
    ),
    "map captures array": lambda: call(
        grid=2,
        in_specs=[pl.BlockSpec((8, 128), lambda i: (TABLE[i], 0))],
        out_specs=spec,
    ),
    "index newaxis": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[None, 0][0])
    ),
    "index list": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(slice(0, 2), x_ref[[0, 1]])
    ),
    "index step": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[::-1])
    ),
    "index traced slice": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(
            slice(0, 2), x_ref[pl.program_id(0) : pl.program_id(0) + 2]
        ),
        grid=1,
    ),
    "index float": lambda: call(lambda x_ref, o_ref: o_ref.__setitem__(0, x_ref[1.5])),
    "index too many": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(0, x_ref[0, 0, 0])
    ),
    "ref arithmetic": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref + 1)
    ),
    "ref as array": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., jnp.exp(x_ref))
    ),
    "ref of another kernel": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., leaked()[...])
    ),
    "ref operand": lambda: call(args=(jax.new_ref(x),)),
    "ref from run_scoped": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(
            ..., pl.run_scoped(lambda a: a, pltpu.VMEM((16, 128), jnp.float32))[...]
        )
    ),
    "refs swapped in a loop": lambda: call(
        lambda x_ref, o_ref: swap_refs(x_ref, o_ref)
    ),
    "kernel in kernel": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., call(args=(x_ref[...],)))
    ),
    "kernel returns text": lambda: call(lambda x_ref, o_ref: "done"),
    "program_id in jit": lambda: jax.jit(lambda: pl.program_id(0))(),
    "program_id unused": lambda: jax.jit(lambda: (pl.program_id(0), 1)[1])(),
    "num_programs outside": lambda: jax.eval_shape(lambda: pl.num_programs(0)),
    "run_scoped outside": lambda: pl.run_scoped(
        lambda ref: None, pltpu.VMEM((8,), jnp.float32)
    ),
    "other shape": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(
            ..., pl.load(x_ref, ..., mask=x_ref[...] > 0, other=jnp.zeros(5))
        )
    ),
    "store value": lambda: call(
        lambda x_ref, o_ref: pl.store(o_ref, (0, slice(None)), jnp.zeros(5))
    ),
    "store nothing": lambda: call(lambda x_ref, o_ref: pl.store(o_ref)),
    "semaphore none": lambda: call(
        lambda x_ref, o_ref: pltpu.make_async_copy(x_ref, o_ref, None).start()
    ),
    "semaphore kind": lambda: call(lambda x_ref, o_ref: pl.semaphore_signal(o_ref)),
    "no buffers": lambda: pl.BlockSpec((8, 128), pipeline_mode=pl.Buffered(0)),
    "semaphore several": lambda: call(
        lambda x_ref, o_ref, sems: pltpu.make_async_copy(x_ref, o_ref, sems).start(),
        scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
    ),
    "copy never started": lambda: call(
        lambda x_ref, o_ref, sem: pltpu.make_async_copy(x_ref, o_ref, sem).wait(),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    ),
    "copy started with another semaphore": lambda: call(
        lambda x_ref, o_ref, one, other: (
            pltpu.make_async_copy(x_ref, o_ref, one).start(),
            pltpu.make_async_copy(x_ref, o_ref, other.at[1]).wait(),
        )[0],
        scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA((2,))],
    ),
    "semaphore never signalled": lambda: call(
        lambda x_ref, o_ref: pl.run_scoped(
            lambda sem: pl.semaphore_wait(sem, 2), pltpu.SemaphoreType.REGULAR
        )
    ),
    "semaphore as memory": lambda: call(
        lambda x_ref, o_ref, sem: o_ref.__setitem__((0, 0), sem[...] * 1.0),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    ),
    "loop float": lambda: call(lambda x_ref, o_ref: pl.loop(0, 2.5)(lambda i: None)),
    "loop step": lambda: call(
        lambda x_ref, o_ref: pl.loop(0, 2, step=0)(lambda i: None)
    ),
    "loop returns": lambda: call(
        lambda x_ref, o_ref: pl.loop(0, 2)(lambda i: x_ref[i])
    ),
    "loop loses carry": lambda: call(
        lambda x_ref, o_ref: pl.loop(0, 2, init_carry=0.0)(lambda i, total: None)
    ),
    "multiple_of float": lambda: call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., pl.multiple_of(1.5, 2))
    ),
    "map writes": lambda: call(
        lambda s_ref, x_ref, o_ref: None,
        args=(jnp.arange(2), x),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=2,
            in_specs=[
                pl.BlockSpec((8, 128), lambda i, s: (s.__setitem__(0, 1) or 0, 0))
            ],
        ),
    ),
    "padding": lambda: call(
        grid=2,
        in_specs=[pl.BlockSpec((pl.Element(8, 3), 128), lambda i: (i, 0))],
        out_specs=spec,
    ),
    "alias list": lambda: call(input_output_aliases=[(0, 0)]),
    "alias text": lambda: call(input_output_aliases={"x": 0}),
    "out_shape of 64 bits": lambda: call(out_shape=S((16, 128), jnp.float64)),
    "out_shape negative": lambda: call(out_shape=S((-1, 128), jnp.float32)),
    "scratch negative": lambda: call(scratch_shapes=[pltpu.VMEM((-1,), jnp.float32)]),
    "cost": lambda: call(cost_estimate=3),
    "metadata": lambda: call(metadata="fast"),
    "grid traced float": lambda: jax.jit(lambda n: call(grid=(n,)))(2.0),
    "grad of grad on a mesh": lambda: jax.grad(lambda v: slope_on_a_mesh(v).sum())(x),
    "rule with a closure": lambda: jax.grad(scaled_by_closure)(jnp.float32(2)),
    "backend platform": lambda: call(interpret=False, backend="triton"),
    "pipeline arity": lambda: call(
        lambda x_ref, o_ref: pltpu.emit_pipeline(
            lambda a_ref: None, grid=2, in_specs=[spec], out_specs=[spec]
        )(x_ref, o_ref)
    ),
    "pipeline returns": lambda: call(
        lambda x_ref, o_ref: pltpu.emit_pipeline(
            lambda a_ref, b_ref: a_ref[...], grid=2, in_specs=[spec], out_specs=[spec]
        )(x_ref, o_ref)
    ),
    "symbolic shape of a backend": lambda: jax.export.export(
        jax.jit(lambda v: call(args=(v,), out_shape=v, interpret=False, backend="tpu")),
        platforms=["tpu"],
    )(S(jax.export.symbolic_shape("n, 128"), jnp.float32)),
    "symbolic block": lambda: jax.export.export(
        jax.jit(lambda v: call(grid=v.shape[0], out_specs=pl.BlockSpec(v.shape)))
    )(S(jax.export.symbolic_shape("n, 128"), jnp.float32)),
    "partition kind": lambda: call(partition=3),
    "partition arrow": lambda: call(partition="m n"),
    "partition rank": lambda: call(partition="m n -> m"),
    "partition axis": lambda: call(
        grid=2, in_specs=[spec], out_specs=spec, partition="m n -> m n"
    ),
    "partition name": lambda: call(
        grid=(2, 2),
        in_specs=[pl.BlockSpec((8, 64), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((8, 64), lambda i, j: (i, j)),
        partition="m m -> m m",
    ),
    "partition sums": lambda: call(partition=pl.Partition("m n -> m n", copy, ("k",))),
    "partition without sums": lambda: call(partition=pl.Partition("m n -> * n", copy)),
    "print field": lambda: call(
        lambda x_ref, o_ref: pl.debug_print("x is {x}", x_ref[0, 0])
    ),
    "python if": lambda: call(
        lambda x_ref, o_ref: (
            o_ref.__setitem__(..., x_ref[...]) if x_ref[0, 0] > 0 else None
        )
    ),
    "python int": lambda: call(rounded),
    "python range": lambda: call(counted, grid=2),
    "python if in when": lambda: call(branch_in_when),
    "python if in pipeline": lambda: call(branch_in_pipeline),
    "python if in map": lambda: in_map(lambda i: (0 if i > 0 else 1, 0)),
    "value of another kernel": use_kept_value,
    "index float, all stored": lambda: stored(lambda x_ref: x_ref[1.5]),
    "index float, traced": lambda: stored(lambda x_ref: x_ref[x_ref[0, 0]]),
    "bool index of rank 2": lambda: stored(lambda x_ref: x_ref[x_ref[...] > 3]),
    "bool index of rank 2, numpy": lambda: stored(
        lambda x_ref: x_ref[np.ones((16, 128), bool)]
    ),
    "bool index of rank 2, used": lambda: stored(
        lambda x_ref: x_ref[x_ref[...] > 3] @ x_ref[...]
    ),
    "operands by name": lambda: pl.pallas_call(copy, out_shape=out)(x=x),
    "one operand by name": lambda: pl.pallas_call(copy, out_shape=out)(x, y=3),
    "ref iterated": lambda: call(add_up),
    "ref unpacked": lambda: stored(lambda x_ref: jnp.stack([*x_ref])),
    "ref attribute": lambda: stored(lambda x_ref: x_ref.foo),
    "ref method of arrays": lambda: stored(lambda x_ref: x_ref.sum()),
    "ref truth": lambda: stored(lambda x_ref: 1.0 if x_ref else 0.0),
    "ref float": lambda: stored(lambda x_ref: x_ref[...] * float(x_ref)),
    "ref to numpy": lambda: stored(np.exp),
    "ref to a function of numpy": lambda: stored(np.sum),
    "ref to lax": lambda: stored(lambda x_ref: jax.lax.add(x_ref, x_ref)),
    "ref stored": lambda: stored(lambda x_ref: x_ref),
    "view stored": lambda: stored(lambda x_ref: x_ref.T),
    "ref rebound": lambda: call(rebind),
    "store list": lambda: stored(lambda x_ref: [1.0] * 128),
    "store none": lambda: stored(lambda x_ref: None),
    "store text": lambda: stored(lambda x_ref: "x"),
    "kernel returns a ref": lambda: call(lambda x_ref, o_ref: o_ref),
    "kernel arity, scratch by name": lambda: call(
        lambda x_ref, o_ref, s_ref: None,
        scratch_shapes={"acc_ref": pltpu.VMEM((8,), jnp.float32)},
    ),
    "kernel arity, results in a dict": lambda: call(
        lambda x_ref, a_ref, b_ref: None, out_shape={"a": out, "b": out}
    ),
    "scratch number": lambda: with_scratch(3),
    "scratch tuple": lambda: with_scratch([((8, 128), 4)]),
    "scratch without dtype": lambda: with_scratch([pltpu.VMEM((8, 128))]),
    "scratch float": lambda: with_scratch([pltpu.VMEM((16 / 2, 128), "float32")]),
    "scratch dtype": lambda: with_scratch([pltpu.VMEM((8, 128), "flot32")]),
    "grid nested": lambda: call(grid=((2,),), in_specs=[spec], out_specs=spec),
    "grid_spec kind": lambda: call(grid_spec=(2,)),
    "prefetch text": lambda: pltpu.PrefetchScalarGridSpec(num_scalar_prefetch="1"),
    "specs nested": lambda: call(grid=2, in_specs=[[spec]], out_specs=spec),
    "specs dict": lambda: call(grid=2, in_specs={"x": spec}, out_specs=spec),
    "spec of a mesh": lambda: call(
        grid=2, in_specs=[jax.sharding.PartitionSpec("i")], out_specs=spec
    ),
    "block traced": lambda: jax.jit(
        lambda n: call(
            grid=2, in_specs=[pl.BlockSpec((n, 128), lambda i: (i, 0))], out_specs=spec
        )
    )(8),
    "out_shape traced": lambda: jax.jit(
        lambda n: call(out_shape=S((n, 128), jnp.float32))
    )(16),
    "out_shape pair": lambda: call(out_shape=((16, 128), "float32")),
    "dtype result": lambda: call(out_shape=S((16, 128), jnp.complex64)),
    "operand objects": lambda: call(args=(np.array(["a"], dtype=object),)),
    "program_id negative": lambda: call(
        lambda x_ref, o_ref: pl.program_id(-1), grid=2, in_specs=[spec], out_specs=spec
    ),
    "when with a value": lambda: call(
        lambda x_ref, o_ref: pl.when(x_ref[0, 0] > 0)(lambda: x_ref[...])
    ),
    "params key": lambda: call(compiler_params={"dimension_semantic": ("parallel",)}),
    "params key like none": lambda: call(compiler_params={"mosaic": {"xyz": 1}}),
    "complex": lambda: stored(lambda x_ref: abs(x_ref[...] * 1j)),
    "when text": lambda: call(lambda x_ref, o_ref: pl.when("a")(lambda: None)),
    "pipeline option": lambda: pipeline(foo=3),
    "pipeline refs": lambda: pipeline(x),
    "pipeline values": lambda: pipeline(x, x),
    "lower without kernel": lambda: pl.lower(jnp.sin)(x),
    "explain of a result": lambda: pl.explain(x)(x),
    "explain_grad without kernel": lambda: pl.explain_grad(jnp.sin)(x),
    "hessian of a loop": lambda: jax.jvp(
        jax.grad(lambda v: call(doubled, (v,)).sum()), (x,), (x,)
    ),
    "traced shape": lambda: stored(lambda x_ref: jnp.zeros((x_ref[0, 0], 128))),
    "traced arange": lambda: stored(lambda x_ref: jnp.arange(x_ref[0, 0])),
    "traced count": lambda: stored(lambda x_ref: jnp.nonzero(x_ref[...])[0]),
    "formatted": lambda: stored(lambda x_ref: f"{x_ref[0, 0]:.3f}"),
}

GOLDEN = Path(__file__).with_name("messages.txt")
# Raised by JAX itself while the kernel is traced; only notes are ours: the fix.
FROM_JAX = {
    "kernel trace error": None,
    "python if": "pl.when, jax.lax.cond",
    "python int": ".astype(jnp.int32)",
    "python range": "jax.lax.fori_loop or pl.loop",
    "python if in when": "pl.when, jax.lax.cond",
    "python if in pipeline": "pl.when, jax.lax.cond",
    "python if in map": "pl.when, jax.lax.cond",
    "value of another kernel": "store it to an output",
    "traced shape": "use the largest size",
    "traced arange": "use the largest size",
    "traced count": "use the largest size",
    "formatted": "pl.debug_print",
}


def message(name: str) -> str:
    with pytest.raises(PallasError) as raised:
        BAD[name]()
    text = f"{type(raised.value).__name__}: {raised.value}"
    assert re.search(r"^  at +\S*test_messages.py:\d+ in ", text, re.M) or name in {
        "missing name",
    }, text
    here = re.sub(r"(?m)^(  at +)\S+ in .*$", r"\1here", text)
    return re.sub(r"\w+Tracer", "Tracer", here)


def sections() -> dict[str, str]:
    parts = re.split(r"(?m)^--- (.*)\n", GOLDEN.read_text())
    return {n: t.rstrip("\n") for n, t in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.skipif(not os.environ.get("PALLASITE_UPDATE_GOLDEN"), reason="asked for")
def test_update_golden():
    ours = [n for n in BAD if n not in FROM_JAX]
    GOLDEN.write_text("".join(f"--- {n}\n{message(n)}\n" for n in ours))


@pytest.mark.parametrize("name", [n for n in BAD if n not in FROM_JAX])
def test_message(name):
    assert message(name) == sections()[name]


def test_every_message_has_a_case():
    assert sections().keys() == BAD.keys() - FROM_JAX.keys()


@pytest.mark.parametrize("name", sorted(FROM_JAX))
def test_errors_of_jax_name_the_kernel_and_line(name):
    with pytest.raises(Exception) as raised:
        BAD[name]()
    where, *more = raised.value.__notes__
    kind = "index map of in_specs[0] ('x_ref')" if "map" in name else "kernel"
    assert kind in where and "test_messages.py" in where
    assert "pallasite/frontend" not in str(raised.value)
    fixes = [n for n in more if n.startswith("fix: ")]
    assert len(fixes) == (FROM_JAX[name] is not None)
    assert not fixes or FROM_JAX[name] in fixes[0]


def test_a_similar_name_is_not_hidden_in_a_long_list():
    names = [f"name_{n}" for n in range(30)]
    assert one_of("nam_7", names) == "did you mean 'name_7'?"
    assert one_of("nam_7", names[:9]).startswith("did you mean 'name_7'? one of name_0")
    assert one_of("other", names).startswith("one of name_0, name_1")


def test_a_warning_where_no_code_of_the_user_runs_names_the_given_line():
    """As when XLA calls: `sys:1` would be neither the user's line nor of use."""
    code = "from pallasite.errors import *\nwarn('text', KernelWarning, at)"
    own = {"__name__": "pallasite.x", "at": Loc("train.py", 7)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=exec, args=(code, own))
        thread.start()
        thread.join()
    (found,) = caught
    assert (found.filename, found.lineno) == ("train.py", 7)


def test_the_script_that_pip_installs_for_our_commands_is_no_line_of_the_user():
    script = compile("found = user_location()", "/usr/bin/pallasite", "exec")
    names = {"__name__": "__main__", "user_location": user_location}
    exec(script, names)
    found = names["found"]
    assert isinstance(found, Loc) and Path(found.file).name == Path(__file__).name
