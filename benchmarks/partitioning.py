"""Kernels under sharded jit on eight devices: error, and the collectives XLA needs.

`python benchmarks/partitioning.py` prints one line per case. The model code has no mesh
in it: operands are sharded, `jax.jit` does the rest. The tests of partitioning run the
same cases.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallasite as pl
from pallasite import tpu as pltpu

COLLECTIVES = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


def mesh(*shape: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """The first devices, as axes a and b."""
    axes = tuple("ab"[: len(shape)])
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, axes, (kind,) * len(shape), devices=devices)


def put(x, where: Mesh, *spec):
    return jax.device_put(x, NamedSharding(where, P(*spec)))


def collectives(f, *args) -> dict[str, int]:
    """Which collectives the compiled program has, and how many of each."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return dict(Counter(COLLECTIVES.findall(text or "")))


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def matmul_kernel(x_ref, y_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(
        x_ref[...], y_ref[...], preferred_element_type=jnp.float32
    ).astype(o_ref.dtype)


def scratch_matmul_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = (acc_ref[...] * 0.5).astype(o_ref.dtype)


def matmul(x, y, kernel=matmul_kernel, block=8, **options):
    (m, k), n = x.shape, y.shape[1]
    scratch = []
    if kernel is not matmul_kernel:
        scratch = [pltpu.VMEM((block, block), jnp.float32)]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        grid=(m // block, n // block, k // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        scratch_shapes=scratch,
        **options,
    )(x, y)


def rms_norm(x, scale, block=4):
    def kernel(x_ref, scale_ref, o_ref):
        x = x_ref[...]
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        o_ref[...] = x * jax.lax.rsqrt(mean + 1e-6) * scale_ref[...]

    rows = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // block,),
        in_specs=[rows, pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))],
        out_specs=rows,
        name="rms_norm",
    )(x, scale)


def rms_norm_reference(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention(q, k, v, block=8):
    """Causal flash attention; several heads of q share one of k and v."""
    heads, length, width = q.shape
    group = heads // k.shape[0]

    def kernel(q_ref, k_ref, v_ref, o_ref):
        start = pl.program_id(1) * block
        q = q_ref[...] * width**-0.5

        def step(n, carry):
            m, l, acc = carry
            s = jnp.dot(q, k_ref[pl.ds(n * block, block), :].T)
            rows = start + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
            columns = n * block + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
            s = jnp.where(rows >= columns, s, -1e30)
            new = jnp.maximum(m, s.max(axis=-1))
            p = jnp.exp(s - new[:, None])
            scale = jnp.exp(m - new)
            acc = acc * scale[:, None] + jnp.dot(p, v_ref[pl.ds(n * block, block), :])
            return new, l * scale + p.sum(axis=-1), acc

        empty = jnp.full(block, -1e30), jnp.zeros(block), jnp.zeros((block, width))
        _, l, acc = jax.lax.fori_loop(0, pl.program_id(1) + 1, step, empty)
        o_ref[...] = acc / l[:, None]

    rows = pl.BlockSpec((None, block, width), lambda h, i: (h, i, 0))
    whole = pl.BlockSpec((None, length, width), lambda h, i: (h // group, 0, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(heads, length // block),
        in_specs=[rows, whole, whole],
        out_specs=rows,
        name="attention",
    )(q, k, v)


def attention_reference(q, k, v):
    group = q.shape[0] // k.shape[0]
    k, v = (jnp.repeat(x, group, axis=0) for x in (k, v))
    s = jnp.einsum("hqd,hkd->hqk", q * q.shape[-1] ** -0.5, k)
    s = jnp.where(np.tri(q.shape[1], dtype=bool), s, -1e30)
    return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(s, axis=-1), v)


# --- the cases ---


@dataclass(frozen=True)
class Case:
    """A function, its operands with their shardings, and what it should need."""

    name: str
    shape: tuple[int, ...]  # of the mesh, whose axes are a and b
    function: Callable[..., Any]
    reference: Callable[..., Any]
    operands: tuple[Any, ...]
    specs: tuple[P, ...]
    result: P
    collectives: dict[str, int] = field(default_factory=dict)

    def placed(self) -> list[Any]:
        where = mesh(*self.shape)
        pairs = zip(self.operands, self.specs, strict=True)
        return [put(x, where, *spec) for x, spec in pairs]

    def run(self) -> tuple[float, dict[str, int], Any]:
        """The largest error, the collectives, and the result."""
        operands = self.placed()
        got = jax.jit(self.function)(*operands)
        want = self.reference(*self.operands)
        error = float(jnp.max(jnp.abs(got - want)))
        return error, collectives(self.function, *operands), got


def cases() -> list[Case]:
    x, y = normal(0, 32, 64), normal(1, 64, 32)
    rows, scale = normal(2, 32, 48), normal(3, 1, 48)
    q, k, v = normal(4, 8, 32, 16), normal(5, 4, 32, 16), normal(6, 4, 32, 16)
    bx, by = normal(7, 8, 16, 16), normal(8, 8, 16, 16)
    product = lambda x, y: x @ y
    summed = {"all-reduce": 1}

    def on(name, shape, specs, result, needed=None, function=matmul, scale=1.0):
        want = lambda x, y: scale * (x @ y)
        return Case(name, shape, function, want, (x, y), specs, result, needed or {})

    half = lambda x, y: matmul(x, y, scratch_matmul_kernel)
    batched = jax.vmap(matmul)
    qkv, heads = (q, k, v), (attention, attention_reference)
    norm = (rms_norm, rms_norm_reference)
    return [
        on("matmul, rows", (4, 2), (P("a"), P()), P("a")),
        on("matmul, columns", (4, 2), (P(), P(None, "a")), P(None, "a")),
        on("matmul, rows and columns", (4, 2), (P("a"), P(None, "b")), P("a", "b")),
        on("matmul, reduction", (8,), (P(None, "a"), P("a")), P(), summed),
        on("matmul, rows and sum", (4, 2), (P("a", "b"), P("b")), P("a"), summed),
        on("scratch, sum", (4, 2), (P("a", "b"), P("b")), P("a"), summed, half, 0.5),
        on("matmul, nothing sharded", (8,), (P(), P()), P()),
        Case("vmap, batch", (8,), batched, product, (bx, by), (P("a"), P("a")), P("a")),
        Case("attention, heads", (4,), *heads, qkv, (P("a"),) * 3, P("a")),
        Case(
            "attention, heads and rows",
            (4, 2),
            *heads,
            qkv,
            (P("a", "b"), P("a"), P("a")),
            P("a", "b"),
        ),
        Case("rms norm, rows", (8,), *norm, (rows, scale), (P("a"), P()), P("a")),
    ]


def main() -> None:
    if "device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    print(f"{'case':<28}{'devices':>8}{'error':>11}  collectives")
    for case in cases():
        error, found, _ = case.run()
        needed = ", ".join(f"{n} {name}" for name, n in found.items()) or "none"
        devices = int(np.prod(case.shape))
        print(f"{case.name:<28}{devices:>8}{error:>11.1e}  {needed}")


if __name__ == "__main__":
    main()
