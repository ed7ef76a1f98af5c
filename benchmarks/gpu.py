"""Kernels on this GPU against cuBLAS, cuDNN, XLA, upstream Pallas and torch.

Each problem is one piece of work; its contenders run interleaved in one process, and
the median kernel time of each is printed with its rate and its distance from the
problem's reference; a star marks our backend that a call gets which names none. Kernel
times come from CUPTI where that works, else from many queued calls. A contender that
fails prints its error and the others go on.

    python benchmarks/gpu.py                     # all problems, under 4 minutes
    python benchmarks/gpu.py matmul softmax      # problems with these in their names
    python benchmarks/gpu.py rms --only ours --warps 4 8 16 --stages 1 3
    python benchmarks/gpu.py --more variants rows   # other sizes, layouts and types
    python benchmarks/gpu.py --list

Numbers go to benchmarks/results/<chip>.json, bars to <chip>.svg; those of problems that
were not run stay. `compile` and `dispatch` are times of the host: until a function can
run, in a new process with empty and with filled caches, and of one call of a tiny
kernel.
"""

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

# Torch needs memory of its own beside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite import triton as plt
from pallasite.backends import base
from pallasite.primitive import choose
from pallasite.sites import calls_in
from pallasite.target import chip_of_device

RESULTS = Path(__file__).parent / "results"
LOG2_E = 1.4426950408889634
MASKED = -1e30  # finite, so that differences of masked scores stay finite
Maker = Callable[[], tuple[Callable, Sequence[Any]]]  # a function and its operands


@dataclass
class Problem:
    """One piece of work and who does it.

    Args:
        name: what is selected on the command line.
        work: operations, or bytes moved, in all.
        unit: "TFLOP/s" or "TB/s".
        contenders: by name; each makes its function and operands when its turn comes.
        reference: whose result the others' are compared with.
        allowed: the largest relative distance from it.
    """

    name: str
    work: float
    unit: str
    contenders: dict[str, Maker]
    reference: str
    allowed: float = 1e-2
    times: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Options:
    """What the command line says about our own kernels."""

    small: bool
    more: bool  # problems beside the usual ones
    warps: tuple[int | None, ...]
    stages: tuple[int | None, ...]

    def size(self, full: int, small: int) -> int:
        return small if self.small else full


def ours(options: Options, label: str, make: Callable[..., Maker]) -> dict[str, Maker]:
    """A kernel on every backend of this platform, with every launch asked for."""
    found: dict[str, Maker] = {}
    for name in _backends():
        for warps in options.warps:
            for stages in options.stages:
                how: dict[str, Any] = {"backend": name}
                text = f"ours {name} {label}"
                if warps or stages:
                    params = plt.CompilerParams(num_warps=warps, num_stages=stages)
                    how["compiler_params"] = params
                    text += f" w{warps or '-'} s{stages or '-'}"
                found[text.rstrip()] = make(**how)
    return found


@functools.cache
def _backends() -> tuple[str, ...]:
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    return tuple(n for n in base.names() if platform in base.get(n).platforms)


# --- our kernels ---


def matmul(
    blocks: tuple[int, ...],
    out: Any,
    finish: Any = None,
    stored: tuple[str, str] = ("mk", "kn"),
    start: Callable = lambda x, y: (x, y),
    precision: Any = None,
) -> Callable:
    """A product that accumulates over the third grid axis into scratch.

    Args:
        blocks: along m, n and k.
        out: the result's dtype.
        finish: applied to the sums, with blocks of further operands of one row.
        stored: the dimensions of both operands, in the order they are stored in.
        start: applied to blocks of both operands before they are multiplied.
        precision: of the product.
    """
    sizes = dict(zip("mnk", blocks, strict=True))
    rows, columns, _ = blocks
    left, right = stored
    contracted = (left.index("k"),), (right.index("k"),)

    def kernel(x_ref, y_ref, *rest):
        *more, o_ref, acc_ref = rest

        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        x, y = start(x_ref[...], y_ref[...])
        acc_ref[...] += jax.lax.dot_general(
            x,
            y,
            (contracted, ((), ())),
            precision=precision,
            preferred_element_type=acc_ref.dtype,
        )

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            result = acc_ref[...]
            if finish is not None:
                result = finish(result, *(ref[...] for ref in more))
            o_ref[...] = result.astype(o_ref.dtype)

    def call(x, y, *more, **how):
        whole = dict(zip(left + right, (*x.shape, *y.shape), strict=True))

        def spec(dims, **more):
            along = ["mnk".index(d) for d in dims]
            block = tuple(sizes[d] for d in dims)
            return pl.BlockSpec(block, lambda *ids: (*(ids[a] for a in along),), **more)

        # What is past the end along k must not count.
        edge = {"fill": 0} if whole["k"] % sizes["k"] else {}
        sums = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((whole["m"], whole["n"]), out),
            grid=tuple(pl.cdiv(whole[d], sizes[d]) for d in "mnk"),
            in_specs=[
                spec(left, **edge),
                spec(right, **edge),
                *(pl.BlockSpec((1, columns), lambda i, j, k: (0, j)) for _ in more),
            ],
            out_specs=spec("mn"),
            scratch_shapes=[pltpu.VMEM((rows, columns), sums)],
            **how,
        )(x, y, *more)

    return call


def attention_step(q, k, v, state, scale, mask):
    """One block of keys: the new maximum, sum and accumulator of each row."""
    m, l, acc = state
    scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * scale
    if mask is not None:
        rows = mask[0] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        columns = mask[1] + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(rows >= columns, scores, MASKED)
    new = jnp.maximum(m, scores.max(1, keepdims=True))
    p, alpha = jnp.exp(scores - new), jnp.exp(m - new)
    l = alpha * l + p.sum(1, keepdims=True)
    product = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new, l, alpha * acc + product


def grid_attention(blocks: tuple[int, int], causal: bool) -> Callable:
    """Keys along the last grid axis, state in scratch, as on a TPU."""
    block_q, block_k = blocks

    def call(q, k, v, **how):
        heads, length, depth = q.shape

        def kernel(q_ref, k_ref, v_ref, o_ref, *state_refs):
            i, j = pl.program_id(1), pl.program_id(2)

            @pl.when(j == 0)
            def _():
                for ref, start in zip(state_refs, (-jnp.inf, 0.0, 0.0), strict=True):
                    ref[...] = jnp.full_like(ref, start)

            def step():
                mask = (i * block_q, j * block_k) if causal else None
                state = [ref[...] for ref in state_refs]
                new = attention_step(
                    q_ref[0], k_ref[0], v_ref[0], state, depth**-0.5, mask
                )
                for ref, value in zip(state_refs, new, strict=True):
                    ref[...] = value

            if causal:
                pl.when(j * block_k < (i + 1) * block_q)(step)
            else:
                step()

            @pl.when(j == pl.num_programs(2) - 1)
            def _():
                _, l_ref, acc_ref = state_refs
                o_ref[0] = (acc_ref[...] / l_ref[...]).astype(o_ref.dtype)

        row = pl.BlockSpec((1, block_q, depth), lambda h, i, j: (h, i, 0))
        column = pl.BlockSpec((1, block_k, depth), lambda h, i, j: (h, j, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(heads, pl.cdiv(length, block_q), length // block_k),
            in_specs=[row, column, column],
            out_specs=row,
            scratch_shapes=[
                pltpu.VMEM((block_q, n), jnp.float32) for n in (1, 1, depth)
            ],
            **how,
        )(q, k, v)

    return call


def loop_attention(blocks: tuple[int, int], causal: bool) -> Callable:
    """One program per block of queries, a loop over the keys inside, as on a GPU."""
    block_q, block_k = blocks

    def call(q, k, v, **how):
        heads, length, depth = q.shape

        def kernel(q_ref, k_ref, v_ref, o_ref):
            i = pl.program_id(1)
            q = q_ref[0]

            def step(j, state):
                keys = pl.ds(j * block_k, block_k)
                mask = (i * block_q, j * block_k) if causal else None
                k, v = k_ref[0, keys, :], v_ref[0, keys, :]
                return attention_step(q, k, v, state, depth**-0.5, mask)

            steps = length // block_k
            if causal:
                steps = jnp.minimum(steps, pl.cdiv((i + 1) * block_q, block_k))
            start = (
                jnp.full((block_q, 1), -jnp.inf),
                jnp.zeros((block_q, 1)),
                jnp.zeros((block_q, depth)),
            )
            _, l, acc = jax.lax.fori_loop(0, steps, step, start)
            o_ref[0] = (acc / l).astype(o_ref.dtype)

        row = pl.BlockSpec((1, block_q, depth), lambda h, i: (h, i, 0))
        whole = pl.BlockSpec((1, length, depth), lambda h, i: (h, 0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid=(heads, pl.cdiv(length, block_q)),
            in_specs=[row, whole, whole],
            out_specs=row,
            **how,
        )(q, k, v)

    return call


def softmax_rows(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rmsnorm_rows(x, w):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w


def layernorm_rows(x, w, b):
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)
    return centred * scale * w + b


def rowwise(body: Callable, block: int) -> Callable:
    """A function of rows in f32, on blocks of so many; weights are the same for all."""

    def kernel(x_ref, *refs):
        *weights, o_ref = refs
        values = [ref[...].astype(jnp.float32) for ref in (x_ref, *weights)]
        o_ref[...] = body(*values).astype(o_ref.dtype)

    def call(x, *weights, **how):
        rows, columns = x.shape
        part = pl.BlockSpec((block, columns), lambda i: (i, 0))
        weight = pl.BlockSpec((1, columns), lambda i: (0, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(pl.cdiv(rows, block),),
            in_specs=[part, *(weight for _ in weights)],
            out_specs=part,
            **how,
        )(x, *weights)

    return call


# --- problems ---


def problems(options: Options) -> Iterator[Problem]:
    for full in (4096, 8192):
        yield matmul_problem(options, full, jnp.bfloat16, FLOAT_BLOCKS)
    yield matmul_problem(options, 8192, jnp.float16, FLOAT_BLOCKS[:1])
    yield matmul_problem(options, 8192, jnp.float8_e4m3fn, BYTE_BLOCKS)
    yield matmul_problem(options, 8192, jnp.int8, BYTE_BLOCKS)
    yield gelu_problem(options)
    for name, *shape, causal in ATTENTION:
        yield attention_problem(options, name, tuple(shape), causal, backward=False)
    for name, *shape, causal in ATTENTION[:2]:
        yield attention_problem(options, name, tuple(shape), causal, backward=True)
    yield copy_problem(options)
    for name in ROWS:
        yield rows_problem(options, name, backward=False)
    for name in ROWS:
        yield rows_problem(options, name, backward=True)
    if options.more:
        for variant in VARIANTS:
            yield variant_problem(options, variant)
        for name in ROWS:
            for columns, dtype, block in ROW_SHAPES:
                yield rows_problem(options, name, False, columns, dtype, block)


FLOAT_BLOCKS = [
    (128, 256, 64),
    (256, 128, 64),
    (128, 128, 64),
    (64, 64, 64),
    (512, 512, 512),
]
BYTE_BLOCKS = [(128, 256, 128), (128, 128, 128)]
# batch, heads, length, depth
ATTENTION = [
    ("d128 full", 4, 16, 4096, 128, False),
    ("d128 causal", 4, 16, 4096, 128, True),
    ("d128 causal long", 1, 16, 16384, 128, True),
    ("d64 causal", 4, 32, 4096, 64, True),
]


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(jax.random.key(seed), shape, -100, 100, jnp.int8)
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def matmul_problem(options, full, dtype, blocks) -> Problem:
    size = options.size(full, 256)
    operands = functools.cache(
        lambda: [normal(s, size, size, dtype=dtype) for s in range(2)]
    )
    integer = jnp.issubdtype(dtype, jnp.integer)
    sums = jnp.int32 if integer else jnp.float32
    out = sums if jnp.dtype(dtype).itemsize == 1 else dtype

    def plain(x, y):
        return jnp.dot(x, y, preferred_element_type=sums).astype(out)

    contenders: dict[str, Maker] = {"cuBLAS": lambda: (plain, operands())}
    for block in blocks:
        block = tuple(min(n, size) for n in block)
        call = matmul(block, out)
        label = "x".join(map(str, block))
        make = lambda call=call, **how: (
            lambda: (functools.partial(call, **how), operands())
        )
        contenders |= ours(options, label, make)
    if jnp.dtype(dtype).itemsize == 2:
        contenders["Pallas Mosaic GPU"] = lambda: (mosaic_matmul(), operands())
    contenders["torch"] = lambda: torch_matmul(size, jnp.dtype(dtype).name)
    name = f"matmul {jnp.dtype(dtype).name} {full}"
    return Problem(name, 2.0 * size**3, "TFLOP/s", contenders, "cuBLAS")


@dataclass(frozen=True)
class Variant:
    """A product of other sizes, layouts or types than those above."""

    name: str
    sizes: tuple[int, ...]  # m, n, k
    dtype: Any = jnp.bfloat16
    stored: tuple[str, str] = ("mk", "kn")
    batch: int = 0
    block: tuple[int, int, int] = (128, 128, 64)
    precision: Any = None
    weights: Any = None  # the right side's type, where it is another
    scaled: bool = False  # whether the kernel multiplies weights by 0.5


def cube(n: int) -> tuple[int, int, int]:
    return n, n, n


TURNED = [("km", "kn"), ("mk", "nk")]
DEEP = (128, 128, 128)
TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
VARIANTS = [
    *(Variant(" ".join(s), cube(4096), stored=s) for s in TURNED),
    Variant("batch 16", cube(1024), batch=16),
    Variant("m 16", (16, 8192, 8192), block=(16, 128, 128)),
    Variant("m 64", (64, 8192, 8192), block=(64, 128, 64)),
    Variant("odd by 8", (4000, 4104, 4072)),
    Variant("odd", (4001, 4103, 4071)),
    Variant("long k", (512, 512, 65536)),
    Variant("e4m3 4096", cube(4096), jnp.float8_e4m3fn, block=DEEP),
    Variant("e5m2 8192", cube(8192), jnp.float8_e5m2, block=DEEP),
    Variant("e4m3 mk nk", cube(8192), jnp.float8_e4m3fn, TURNED[1], block=DEEP),
    Variant("int8 4096", cube(4096), jnp.int8, block=DEEP),
    Variant("int8 mk nk", cube(8192), jnp.int8, TURNED[1], block=DEEP),
    Variant("tf32", cube(4096), jnp.float32, precision=TF32),
    Variant("tf32 mk nk", cube(4096), jnp.float32, TURNED[1], precision=TF32),
    Variant("f32", cube(4096), jnp.float32, precision="highest"),
    Variant("int8 weights", cube(4096), weights=jnp.int8),
    Variant("scaled int8 weights", cube(4096), weights=jnp.int8, scaled=True),
]


def variant_problem(options: Options, variant: Variant) -> Problem:
    m, n, k = (options.size(size, min(size, 256)) for size in variant.sizes)
    lead = (variant.batch,) if variant.batch else ()
    sizes = {"m": m, "n": n, "k": k}
    narrow = jnp.dtype(variant.dtype).itemsize == 1
    integer = jnp.issubdtype(variant.dtype, jnp.integer)
    sums = jnp.int32 if integer else jnp.float32
    out = sums if narrow else variant.dtype

    @functools.cache
    def operands():
        types = (variant.dtype, variant.weights or variant.dtype)
        pairs = zip(variant.stored, types, strict=True)
        return [
            normal(seed, *lead, *(sizes[d] for d in dims), dtype=dtype)
            for seed, (dims, dtype) in enumerate(pairs)
        ]

    def start(x, y):
        y = y.astype(variant.dtype)
        return x, y * jnp.asarray(0.5, y.dtype) if variant.scaled else y

    def plain(x, y):
        left, right = ((dims.index("k"),) for dims in variant.stored)
        x, y = start(x, y)
        product = jax.lax.dot_general(
            x,
            y,
            ((left, right), ((), ())),
            precision=variant.precision,
            preferred_element_type=sums,
        )
        return product.astype(out)

    call = matmul(
        variant.block,
        out,
        stored=variant.stored,
        start=start,
        precision=variant.precision,
    )

    def mapped(f):
        return jax.vmap(f) if variant.batch else f

    make = lambda **how: lambda: (mapped(functools.partial(call, **how)), operands())
    contenders: dict[str, Maker] = {"XLA": lambda: (mapped(plain), operands())}
    contenders |= ours(options, "x".join(map(str, variant.block)), make)
    work = 2.0 * max(variant.batch, 1) * m * n * k
    return Problem(f"variants: {variant.name}", work, "TFLOP/s", contenders, "XLA")


def mosaic_matmul() -> Callable:
    module = importlib.import_module(
        "jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu"
    )
    config = module.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        grid_minor_dim=module.MatmulDimension.M,
        grid_tile_width=8,
        wg_dimension=module.MatmulDimension.N,
        cluster_dimension=module.MatmulDimension.M,
    )
    return lambda x, y: module.matmul(x, y, None, config)


def gelu_problem(options) -> Problem:
    size = options.size(4096, 256)
    operands = functools.cache(
        lambda: [normal(0, size, size), normal(1, size, size), normal(2, 1, size)]
    )

    def finish(x, bias):
        return jax.nn.gelu(x + bias.astype(jnp.float32))

    def plain(x, y, bias):
        product = jnp.dot(x, y, preferred_element_type=jnp.float32)
        return finish(product, bias).astype(x.dtype)

    contenders: dict[str, Maker] = {"XLA": lambda: (plain, operands())}
    for block in FLOAT_BLOCKS[:3]:
        block = tuple(min(n, size) for n in block)
        call = matmul(block, jnp.bfloat16, finish)
        make = lambda call=call, **how: (
            lambda: (functools.partial(call, **how), operands())
        )
        contenders |= ours(options, "x".join(map(str, block)), make)
    return Problem("matmul+bias+gelu 4096", 2.0 * size**3, "TFLOP/s", contenders, "XLA")


def attention_problem(options, name, shape, causal, backward) -> Problem:
    batch, heads, length, depth = shape
    if options.small:
        batch, heads, length = 1, 2, 256
    flat = (batch * heads, length, depth)
    operands = functools.cache(lambda: [normal(s, *flat) for s in range(4)])

    def apart(x):
        """(batch, length, heads, depth), as cuDNN and upstream want it."""
        return x.reshape(batch, heads, length, depth).swapaxes(1, 2)

    @functools.cache
    def separate():
        return [jnp.copy(apart(x)) for x in operands()]

    def differentiated(f):
        return lambda q, k, v, g: jax.vjp(f, q, k, v)[1](g)

    def entry(f, arrays) -> tuple[Callable, Sequence[Any]]:
        if backward:
            return differentiated(f), arrays()
        return f, arrays()[:3]

    def our_entry(f) -> tuple[Callable, Sequence[Any]]:
        run, arrays = entry(f, operands)
        if backward and len(calls_in(run, *arrays)) < 2:
            raise RuntimeError("its gradient is no kernel (pl.explain_grad says why)")
        return run, arrays

    def library(implementation):
        return functools.partial(
            jax.nn.dot_product_attention,
            is_causal=causal,
            implementation=implementation,
        )

    contenders: dict[str, Maker] = {"cuDNN": lambda: entry(library("cudnn"), separate)}
    if options.small:
        contenders = {"XLA": lambda: entry(library("xla"), separate)}
    blocks = [(128, 128), (64, 64)]
    if depth <= 64 and not backward:
        blocks.append((192, 128))  # three warpgroups have room
    for style, maker in (("grid", grid_attention), ("loop", loop_attention)):
        for block in blocks:
            call = maker(block, causal)
            make = lambda call=call, **how: (
                lambda: our_entry(functools.partial(call, **how))
            )
            contenders |= ours(options, f"{style} {block[0]}x{block[1]}", make)
    contenders["Pallas Triton"] = lambda: entry(
        triton_attention(causal, depth), separate
    )
    contenders["Pallas Mosaic GPU f16"] = lambda: entry(
        mosaic_attention(causal), lambda: [x.astype(jnp.float16) for x in separate()]
    )
    contenders["torch"] = lambda: torch_attention(
        (batch, heads, length, depth), causal, backward
    )
    work = 4.0 * batch * heads * length**2 * depth * (0.5 if causal else 1.0)
    title = f"attention {name}"
    if backward:
        work, title = 3.5 * work, f"attention gradient {name}"
    reference = next(iter(contenders))
    return Problem(title, work, "TFLOP/s", contenders, reference, allowed=3e-2)


def triton_attention(causal: bool, depth: int) -> Callable:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
    sizes = dict(block_q=128, block_k=64 if depth == 128 else 128)
    backward = {f"block_{n}": 64 for n in ("q_dkv", "kv_dkv", "q_dq", "kv_dq")}
    blocks = module.BlockSizes(**sizes, **backward)
    return functools.partial(_named_attention, module.mha, causal, blocks, depth**-0.5)


def _named_attention(mha, causal, blocks, scale, q, k, v):
    return mha(
        q,
        k,
        v,
        segment_ids=None,
        sm_scale=scale,
        causal=causal,
        block_sizes=blocks,
    )


def mosaic_attention(causal: bool) -> Callable:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    config = module.TuningConfig(
        block_q=64,
        block_kv=128,
        max_concurrent_steps=2,
        use_schedule_barrier=True,
        causal=causal,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )

    def call(q, k, v):
        # It has no scale of its own.
        return module.attention(q * q.shape[-1] ** -0.5, k, v, config)

    return call


ROWS: dict[str, tuple[Callable, int]] = {
    "softmax": (softmax_rows, 0),
    "rmsnorm": (rmsnorm_rows, 1),
    "layernorm": (layernorm_rows, 2),
}


ELEMENTS = 1 << 27  # of the arrays of rows
BF16, F32 = jnp.bfloat16, jnp.float32
# columns, dtype, rows of a block
ROW_SHAPES = [
    *((columns, BF16, 1) for columns in (1024, 2048, 4096, 16384, 32768, 65536, 8191)),
    *((columns, F32, 1) for columns in (1024, 8192, 32768)),
    *((8192, BF16, rows) for rows in (8, 16, 64)),
    (64, BF16, 1),
    (128, BF16, 16),
]


def rows_problem(
    options, name, backward, columns=8192, dtype=BF16, block: int | None = None
) -> Problem:
    body, weights = ROWS[name]
    title = f"{name} gradient" if backward else name
    if block is not None:
        title = f"rows: {name} {columns} {jnp.dtype(dtype).name}, {block} rows"
    rows = options.size(ELEMENTS // columns, 64)
    columns = options.size(columns, min(columns, 512))
    operands = functools.cache(
        lambda: [
            normal(0, rows, columns, dtype=dtype),
            *(normal(1 + n, 1, columns, dtype=dtype) for n in range(weights)),
            normal(9, rows, columns, dtype=dtype),
        ]
    )

    def plain(*values):
        wide = (x.astype(jnp.float32) for x in values)
        return body(*wide).astype(dtype)

    def entry(f) -> tuple[Callable, Sequence[Any]]:
        if backward:
            return lambda *xs: jax.vjp(f, *xs[:-1])[1](xs[-1]), operands()
        return f, operands()[:-1]

    contenders: dict[str, Maker] = {"XLA": lambda: entry(plain)}
    for count in (1, 4) if block is None else (block,):
        call = rowwise(body, count)
        make = lambda call=call, **how: lambda: entry(functools.partial(call, **how))
        contenders |= ours(options, f"{count} rows", make)
    if not backward and block is None:
        contenders["torch"] = lambda: torch_rows(name, rows, columns)
    moved = (3.0 if backward else 2.0) * rows * columns * jnp.dtype(dtype).itemsize
    return Problem(title, moved, "TB/s", contenders, "XLA", allowed=2e-2)


def copy_problem(options) -> Problem:
    rows, columns = options.size(16384, 64), options.size(8192, 512)
    operands = functools.cache(lambda: [normal(0, rows, columns)])
    # XLA would hand back the operand of a plain copy.
    contenders: dict[str, Maker] = {"XLA (negated)": lambda: (jnp.negative, operands())}
    for block in (1, 4):
        call = rowwise(jnp.negative, block)
        make = lambda call=call, **how: (
            lambda: (functools.partial(call, **how), operands())
        )
        contenders |= ours(options, f"{block} rows, negated", make)
    contenders["torch clone"] = lambda: torch_rows("copy", rows, columns)
    moved = 2 * rows * columns * 2.0
    return Problem("copy", moved, "TB/s", contenders, "XLA (negated)")


# --- torch ---


def _torch() -> Any:
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    return torch


def torch_matmul(size: int, dtype: str) -> tuple[Callable, Sequence[Any]]:
    torch = _torch()
    x, y = torch.randn(2, size, size, device="cuda").unbind()
    if dtype == "int8":
        x, y = ((100 * z).clamp(-100, 100).to(torch.int8) for z in (x, y))
        return torch._int_mm, (x, y)
    if dtype.startswith("float8"):
        one = torch.ones((), device="cuda")
        x, y = (z.to(torch.float8_e4m3fn) for z in (x, y.t().contiguous()))
        scaled = lambda a, b: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
        return scaled, (x, y)
    kind = getattr(torch, dtype)
    return torch.matmul, (x.to(kind), y.to(kind))


def torch_attention(shape, causal, backward) -> tuple[Callable, Sequence[Any]]:
    torch = _torch()
    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v, g = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    if not backward:
        return lambda q, k, v: attend(q, k, v, is_causal=causal), (q, k, v)

    def both(q, k, v, g):
        out = attend(q, k, v, is_causal=causal)
        return torch.autograd.grad(out, (q, k, v), g)

    return both, (*(x.requires_grad_() for x in (q, k, v)), g)


def torch_rows(name, rows, columns) -> tuple[Callable, Sequence[Any]]:
    torch = _torch()
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    functions = {
        "copy": torch.clone,
        "softmax": lambda x: torch.softmax(x, -1),
        "rmsnorm": lambda x: torch.nn.functional.rms_norm(x, (columns,), w, 1e-6),
        "layernorm": lambda x: torch.nn.functional.layer_norm(x, (columns,), w, w),
    }
    return functions[name], (x,)


# --- time ---


class Timer:
    """Seconds of one call: CUPTI's kernel times where they can be had."""

    def __init__(self) -> None:
        self.kind = "queued calls"
        if jax.default_backend() != "gpu":
            return
        try:
            profiler = importlib.import_module("jax.experimental.mosaic.gpu.profiler")
            self.measure = profiler.measure
            found = self._cupti(jax.jit(jnp.negative), [jnp.ones((1024, 1024))], 3)
            if found and min(found) > 0:
                self.kind = "CUPTI kernel times"
        except Exception as error:
            print(f"CUPTI cannot be used: {_first_line(error)}", file=sys.stderr)

    def __call__(self, run: Callable, operands: Sequence[Any], calls: int) -> float:
        if type(operands[0]).__module__.startswith("torch"):
            return self._torch(run, operands, calls)
        if self.kind.startswith("CUPTI"):
            try:
                return statistics.median(self._cupti(run, operands, calls))
            except (RuntimeError, statistics.StatisticsError):
                pass  # launches that differ from call to call
        return self._queued(run, operands, calls)

    def _cupti(self, run, operands, calls) -> list[float]:
        _, times = self.measure(run, iterations=calls)(*operands)
        times = [times] if isinstance(times, float) else times or []
        return [1e-3 * t for t in times]

    def _queued(self, run, operands, calls) -> float:
        start = time.perf_counter()
        results = [run(*operands) for _ in range(calls)]
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / calls

    def _torch(self, run, operands, calls) -> float:
        torch = _torch()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run(*operands)
        end.record()
        torch.cuda.synchronize()
        return 1e-3 * start.elapsed_time(end) / calls


@dataclass
class Entry:
    """A contender that runs."""

    run: Callable
    operands: Sequence[Any]
    is_chosen: bool = False  # ours, by the backend that a call without one gets
    error: float | None = None
    times: list[float] = field(default_factory=list[float])


def measure(
    problem: Problem, timer: Timer, only: Sequence[str], rounds: int, calls: int
) -> list[dict[str, Any]]:
    """Times of a problem's contenders, interleaved; prints a line for each."""
    print(f"\n{problem.name}", flush=True)
    rows: list[dict[str, Any]] = []
    entries: dict[str, Entry] = {}
    reference: Any = None
    for name, maker in problem.contenders.items():
        if only and name != problem.reference and not any(o in name for o in only):
            continue
        try:
            entries[name], result = _prepared(maker)
            entries[name].is_chosen = name.startswith("ours") and _is_chosen(maker)
            if name == problem.reference:
                reference = result
            elif reference is not None and not _is_torch(result):
                entries[name].error = distance(result, reference)
        except Exception as error:
            rows.append({"contender": name, "failed": _first_line(error)})
            print(f"  {name:<36} failed: {_first_line(error)}", flush=True)
    reference = None
    for _ in range(rounds):
        for name, entry in list(entries.items()):
            try:
                entry.times.append(timer(entry.run, entry.operands, calls))
            except Exception as error:
                del entries[name]
                rows.append({"contender": name, "failed": _first_line(error)})
                print(f"  {name:<36} failed: {_first_line(error)}", flush=True)
    for name, entry in entries.items():
        rows.append(_line(problem, name, entry))
    return rows


def _prepared(maker: Maker) -> tuple[Entry, Any]:
    run, operands = maker()
    if not _is_torch(operands[0]):
        run = jax.jit(run)
    result = run(*operands)
    if not _is_torch(operands[0]):
        jax.block_until_ready(result)
    return Entry(run, operands), result


def _is_chosen(maker: Maker) -> bool:
    """Whether the backends a contender names are those its calls would get."""
    run, operands = maker()
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    calls = calls_in(run, *operands)
    return all(
        choose(replace(call, backend=None), platform).backend == call.backend
        for call in calls
    )


def _is_torch(x: Any) -> bool:
    first = x[0] if isinstance(x, (tuple, list)) else x
    return type(first).__module__.startswith("torch")


def _line(problem: Problem, name: str, entry: Entry) -> dict[str, Any]:
    seconds = statistics.median(entry.times)
    rate = problem.work / seconds / 1e12
    far = entry.error is not None and not entry.error <= problem.allowed
    error = "" if entry.error is None else f"error {entry.error:.1e}"
    label = f"{name:<35}{'*' if entry.is_chosen else ' '}"
    print(
        f"  {label} {1e3 * seconds:9.3f} ms {rate:8.2f} {problem.unit}  {error}"
        f"{'  WRONG' if far else ''}",
        flush=True,
    )
    return {
        "contender": name,
        "ms": round(1e3 * seconds, 5),
        "rate": round(rate, 3),
        "unit": problem.unit,
        "error": entry.error,
        "wrong": far,
        **({"chosen": True} if entry.is_chosen else {}),
    }


@jax.jit
def _relative(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def distance(got: Any, want: Any) -> float:
    """The largest relative distance of a result from the reference's."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(_relative(_like(a, b), b)) for a, b in pairs)


def _like(x: jax.Array, other: jax.Array) -> jax.Array:
    """(batch * heads, length, depth) as (batch, length, heads, depth)."""
    if x.ndim == 3 and other.ndim == 4:
        batch, length, heads, depth = other.shape
        return x.reshape(batch, heads, length, depth).swapaxes(1, 2)
    return x.reshape(other.shape)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:200]


# --- times of the host ---


HOST_PROBLEMS = ("dispatch", "compile")


def first_call(style: str) -> tuple[Callable, Sequence[Any]]:
    """What `--first-call` compiles: attention, by us or by a rival."""
    shape = jax.ShapeDtypeStruct((4, 4096, 16, 128), BF16)
    flat = jax.ShapeDtypeStruct((64, 4096, 128), BF16)
    if style == "cuDNN":
        library = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
        return library, [shape] * 3
    if style == "Pallas Triton":
        return triton_attention(True, 128), [shape] * 3
    backend = style.split()[1] if " " in style else None
    call = grid_attention((128, 128), causal=True)
    return functools.partial(call, backend=backend), [flat] * 3


def time_first_call(style: str) -> None:
    """In a process of its own: seconds until the function could run, as JSON."""
    jax.block_until_ready(jnp.ones(8) + 1)
    run, shapes = first_call(style)
    start = time.perf_counter()
    lowered = jax.jit(run).lower(*shapes)
    middle = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    print(json.dumps({"lower": middle - start, "compile": end - middle}))


def compile_rows() -> list[dict[str, Any]]:
    """First calls with empty caches on disk (cold), and with those they have left."""
    rows = []
    for style in ("ours cuda", "ours triton", "Pallas Triton", "cuDNN"):
        with tempfile.TemporaryDirectory(prefix="pallasite-bench-") as folder:
            kept = {
                "PALLASITE_CACHE_DIR": f"{folder}/pallasite",
                "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "PYTHONPYCACHEPREFIX": f"{folder}/modules",  # as after installation
                "PYTHONDONTWRITEBYTECODE": "",
            }
            command = [sys.executable, "-W", "ignore", __file__, "--first-call", style]
            for state in ("cold", "warm"):
                done = subprocess.run(
                    command,
                    env=os.environ | kept,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                name = f"{style}, {state}"
                if done.returncode:
                    said = done.stderr.strip().splitlines()[-1:]
                    rows.append({"contender": name, "failed": "".join(said)[:200]})
                    print(f"  {name:<36} failed: {''.join(said)[:200]}", flush=True)
                    continue
                parts = json.loads(done.stdout.splitlines()[-1])
                total = sum(parts.values())
                shown = ", ".join(f"{k} {v:.2f}" for k, v in parts.items())
                print(f"  {name:<36} {total:9.2f} s ({shown})", flush=True)
                rows.append({"contender": name, "seconds": round(total, 3), **parts})
    return rows


def dispatch_rows(calls: int = 2000) -> list[dict[str, Any]]:
    """Microseconds of the host per call of a tiny kernel: the queue is never empty."""
    x = jnp.ones((8, 128), F32)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1.0

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    contenders = {
        "XLA": jax.jit(lambda x: x + 1.0),
        "ours, jitted": jax.jit(call),
        "ours, not jitted": call,
        "jnp, not jitted": lambda x: x + 1.0,
    }
    rows = []
    for name, run in contenders.items():
        jax.block_until_ready(run(x))
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(calls):
                result = run(x)
            best = min(best, (time.perf_counter() - start) / calls)
            jax.block_until_ready(result)
        print(f"  {name:<36} {1e6 * best:9.2f} us", flush=True)
        rows.append({"contender": name, "us": round(1e6 * best, 2)})
    return rows


# --- the whole ---


def chart(found: dict[str, list[dict[str, Any]]]) -> str:
    """Bars of each problem's rates, as parts of its first rival's; longer is faster."""
    bars: list[tuple[str, float, bool]] = []
    for name, rows in found.items():
        rated = [row for row in rows if "rate" in row]
        rivals = [row for row in rated if not row["contender"].startswith("ours")]
        if not rivals or len(rivals) == len(rated):
            continue
        ours = [row for row in rated if row not in rivals]
        chosen = [row for row in ours if row.get("chosen")] or ours
        best = min(chosen, key=lambda row: row["ms"])
        for row in (best, *rivals):
            label = f"{name}: {row['contender']}, {row['rate']:.4g} {row['unit']}"
            bars.append((label, rivals[0]["ms"] / row["ms"], row is best))
    unit, left, height = 160, 470, 16
    parts = []
    for n, (label, value, is_ours) in enumerate(bars):
        y, length = height * n + 20, unit * min(value, 3.0)
        parts.append(
            f'<text x="{left - 6}" y="{y + 10}" text-anchor="end">{label}</text>'
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="12" '
            f'fill="{"#c33" if is_ours else "#88a"}"/>'
            f'<text x="{left + length + 4:.1f}" y="{y + 10}">{value:.2f}</text>'
        )
    total = height * len(bars) + 30
    line = f'<path d="M{left + unit} 10V{total}" stroke="black" stroke-dasharray="3"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 3 * unit + 60}" '
        f'height="{total}" font-family="sans-serif" font-size="11">'
        f'<text x="{left}" y="10">times as fast as the first rival</text>'
        f"{''.join(parts)}{line}</svg>\n"
    )


def report(rows: dict[str, list[dict[str, Any]]], path: Path, timer: Timer) -> None:
    """Write the numbers; problems that were not run keep theirs."""
    device = jax.devices()[0]
    packages = (
        "jax",
        "jaxlib",
        "torch",
        "triton",
        "nvidia-cublas",
        "nvidia-cudnn-cu13",
    )
    versions = {name: _version(name) for name in packages}
    old = json.loads(path.read_text())["problems"] if path.exists() else {}
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "device": device.device_kind,
        "timer": timer.kind,
        "versions": {k: v for k, v in versions.items() if v},
        "problems": {**old, **rows},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".svg").write_text(chart(found["problems"]))
    print(f"\nwritten to {path}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of problems' names")
    parser.add_argument("--only", nargs="*", default=[], help="parts of contenders'")
    parser.add_argument("--more", action="store_true", help="other sizes and types")
    parser.add_argument("--list", action="store_true", help="print the problems")
    parser.add_argument("--warps", type=int, nargs="*", default=[], help="of ours")
    parser.add_argument("--stages", type=int, nargs="*", default=[], help="of ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=10, help="per round")
    parser.add_argument("--seconds", type=float, default=230, help="to start within")
    parser.add_argument("--small", action="store_true", help="tiny, on any platform")
    parser.add_argument("--first-call", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="default: results/<chip>.json")
    asked = parser.parse_args(argv)
    if asked.first_call:
        time_first_call(asked.first_call)
        return 0
    options = Options(
        asked.small,
        asked.more,
        tuple(asked.warps) or (None,),
        tuple(asked.stages) or (None,),
    )
    chosen = [
        p
        for p in problems(options)
        if not asked.names or any(name in p.name for name in asked.names)
    ]
    hosts = [
        name
        for name in HOST_PROBLEMS
        if (not asked.names and not asked.small)
        or any(part in name for part in asked.names)
    ]
    if asked.list:
        print("\n".join([*(p.name for p in chosen), *hosts]))
        return 0
    if jax.default_backend() != "gpu" and not asked.small:
        print(f"gpu: jax runs on {jax.default_backend()} here, not on a GPU")
        return 0
    started, timer = time.perf_counter(), Timer()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {timer.kind}")
    rows: dict[str, list[dict[str, Any]]] = {}
    for problem in chosen:
        if time.perf_counter() - started > asked.seconds:
            print(f"\n{problem.name}\n  not run: out of time")
            continue
        rows[problem.name] = measure(
            problem, timer, asked.only, asked.rounds, asked.calls
        )
    for name, measured in (("dispatch", dispatch_rows), ("compile", compile_rows)):
        if name in hosts and time.perf_counter() - started < asked.seconds:
            print(f"\n{name}", flush=True)
            rows[name] = measured()
    chip = chip_of_device(jax.devices()[0].device_kind)
    path = asked.json or (RESULTS / f"{chip.name}.json" if chip else None)
    if path is not None and not (asked.small and asked.json is None):
        report(rows, path, timer)
    wrong = [r for found in rows.values() for r in found if r.get("wrong")]
    print(f"{time.perf_counter() - started:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
