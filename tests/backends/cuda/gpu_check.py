"""Checks and times of the `cuda` backend on a GPU.

`python -m tests.backends.cuda.gpu_check` runs every check even if an earlier one fails;
each prints one line. Names on the command line select checks by their beginning.
"""

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from pallasite import tpu as pltpu

CHECKS: dict[str, Callable[[], str]] = {}
bf16, f32 = jnp.bfloat16, jnp.float32


def check(name: str, *args, **kw):
    def register(function):
        CHECKS[name] = partial(function, *args, **kw)
        return function

    return register


def shape(x, dtype=None):
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)


def normal(*size, dtype=f32, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=size) * scale, dtype)


def error(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return float("nan")
    return float(np.nanmax(np.abs(got - want)) / max(np.nanmax(np.abs(want)), 1e-30))


def seconds(function, *args, calls=20, rounds=5) -> float:
    """The best round of queued calls, per call."""
    jax.block_until_ready(function(*args))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - start) / calls)
    return best


# --- rows ---


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...].astype(f32)
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    o_ref[...] = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(o_ref.dtype)


def softmax_reference(x):
    return jax.nn.softmax(x.astype(f32), axis=-1).astype(x.dtype)


def rmsnorm_kernel(x_ref, o_ref):
    x = x_ref[...].astype(f32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    o_ref[...] = (x * scale).astype(o_ref.dtype)


def rmsnorm_reference(x):
    y = x.astype(f32)
    scale = jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def layernorm_kernel(x_ref, o_ref):
    x = x_ref[...].astype(f32)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    var = jnp.mean(centred * centred, axis=-1, keepdims=True)
    o_ref[...] = (centred * jax.lax.rsqrt(var + 1e-6)).astype(o_ref.dtype)


def layernorm_reference(x):
    y = x.astype(f32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    var = jnp.mean(y * y, axis=-1, keepdims=True)
    return (y * jax.lax.rsqrt(var + 1e-6)).astype(x.dtype)


def gelu_kernel(x_ref, o_ref):
    o_ref[...] = jax.nn.gelu(x_ref[...].astype(f32)).astype(o_ref.dtype)


def gelu_reference(x):
    return jax.nn.gelu(x.astype(f32)).astype(x.dtype)


def rows(kernel, x, block, backend="cuda"):
    spec = pl.BlockSpec(block, lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=shape(x),
        grid=(pl.cdiv(x.shape[0], block[0]),),
        in_specs=[spec],
        out_specs=spec,
        backend=backend,
    )(x)


def add_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]


@check("add")
def vector_add():
    worst = []
    for n, block in ((1000, 128), (4096, 1024), (7, 16), (100003, 1000)):
        x, y = normal(n), normal(n, seed=1)
        spec = pl.BlockSpec((block,), lambda i: (i,))
        got = pl.pallas_call(
            add_kernel,
            out_shape=shape(x),
            grid=(pl.cdiv(n, block),),
            in_specs=[spec, spec],
            out_specs=spec,
            backend="cuda",
        )(x, y)
        worst.append(error(got, x + y))
    return f"error {max(worst):.1e}"


ROWS = {
    "softmax": (softmax_kernel, softmax_reference),
    "rmsnorm": (rmsnorm_kernel, rmsnorm_reference),
    "layernorm": (layernorm_kernel, layernorm_reference),
    "gelu": (gelu_kernel, gelu_reference),
}


def row_errors(kernel, reference):
    found = []
    for size, block, dtype in (
        ((300, 1000), (1, 1000), bf16),
        ((300, 1001), (4, 1001), f32),
        ((37, 8192), (8, 8192), bf16),
        ((64, 128), (16, 128), jnp.float16),
        ((5, 7), (3, 7), f32),
    ):
        x = normal(*size, dtype=dtype)
        found.append(error(rows(kernel, x, block), reference(x)))
    return "errors " + " ".join(f"{e:.1e}" for e in found)


def row_times(kernel, reference):
    x = normal(16384, 8192, dtype=bf16)
    moved = 2 * x.size * 2 / 1e12
    found = []
    for block in ((1, 8192), (2, 8192), (4, 8192)):
        f = jax.jit(partial(rows, kernel, block=block))
        found.append(f"{block[0]}: {moved / seconds(f, x):.2f}")
    t = jax.jit(partial(rows, kernel, block=(1, 8192), backend="triton"))
    triton = moved / seconds(t, x)
    xla = moved / seconds(jax.jit(reference), x)
    return f"TB/s {' '.join(found)}; triton {triton:.2f}, XLA {xla:.2f}"


for _name, _pair in ROWS.items():
    check(_name, *_pair)(row_errors)
    check(f"time {_name}", *_pair)(row_times)


# --- products ---


def matmul_kernel(x_ref, y_ref, *refs, dims, finish):
    *extra, o_ref, sums = refs

    @pl.when(pl.program_id(2) == 0)
    def start():
        sums[...] = jnp.zeros_like(sums)

    sums[...] += jax.lax.dot_general(
        x_ref[...], y_ref[...], (dims, ((), ())), preferred_element_type=sums.dtype
    )

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def end():
        o_ref[...] = finish(sums[...], *(r[...] for r in extra)).astype(o_ref.dtype)


def matmul(
    x, y, *rest, block=(128, 256, 64), left="mk", right="kn", out=None, finish=None,
    backend="cuda",
):  # fmt: skip
    """`left` and `right` say how the operands are stored."""
    bm, bn, bk = block
    sizes = dict(zip((*left, *right), (*x.shape, *y.shape), strict=True))
    blocks = {"m": bm, "n": bn, "k": bk}
    index = {"m": 0, "n": 1, "k": 2}

    def spec(dims):
        return pl.BlockSpec(
            tuple(blocks[d] for d in dims),
            lambda *ids: tuple(ids[index[d]] for d in dims),
        )

    sums = jnp.int32 if x.dtype == jnp.int8 else f32
    grid = tuple(pl.cdiv(sizes[d], blocks[d]) for d in "mnk")
    bias = [pl.BlockSpec((1, bn), lambda i, j, k: (0, j)) for _ in rest]
    return pl.pallas_call(
        partial(
            matmul_kernel,
            dims=((left.index("k"),), (right.index("k"),)),
            finish=finish or (lambda acc: acc),
        ),
        out_shape=jax.ShapeDtypeStruct((sizes["m"], sizes["n"]), out or x.dtype),
        grid=grid,
        in_specs=[spec(left), spec(right), *bias],
        out_specs=spec("mn"),
        scratch_shapes=[pltpu.VMEM((bm, bn), sums)],
        backend=backend,
    )(x, y, *rest)


def reference(x, y, left, right, out):
    sums = jnp.int32 if x.dtype == jnp.int8 else f32
    if x.dtype.itemsize == 1 and sums == f32:
        x, y = x.astype(f32), y.astype(f32)
    dims = (((left.index("k"),), (right.index("k"),)), ((), ()))
    exact = "highest" if x.dtype == f32 else None
    return jax.lax.dot_general(
        x, y, dims, preferred_element_type=sums, precision=exact
    ).astype(out)


def operand(sizes, dims, dtype, seed):
    size = [sizes[d] for d in dims]
    rng = np.random.default_rng(seed)
    if dtype == jnp.int8:
        return jnp.asarray(rng.integers(-100, 100, size), dtype)
    return jnp.asarray(rng.normal(size=size), dtype)


def one_product(m, n, k, dtype=bf16, left="mk", right="kn", out=None, **options):
    sizes = {"m": m, "n": n, "k": k}
    x, y = operand(sizes, left, dtype, 0), operand(sizes, right, dtype, 1)
    out = out or (jnp.int32 if dtype == jnp.int8 else f32)
    got = matmul(x, y, left=left, right=right, out=out, **options)
    return f"error {error(got, reference(x, y, left, right, out)):.1e}"


f8 = jnp.float8_e4m3fn
check("product", 512, 512, 256)(one_product)
check("product small", 128, 256, 64)(one_product)
check("product bf16 out", 512, 512, 256, out=bf16)(one_product)
check("product nk", 512, 512, 256, right="nk")(one_product)
check("product km", 512, 512, 256, left="km")(one_product)
check("product km nk", 512, 512, 256, left="km", right="nk")(one_product)
check("product odd", 1000, 520, 328)(one_product)
check("product odd nk", 1000, 520, 328, right="nk")(one_product)
check("product odd out", 1001, 517 + 3, 200, right="nk", out=bf16)(one_product)
check("product f16", 512, 512, 256, dtype=jnp.float16)(one_product)
check("product f8", 512, 512, 512, dtype=f8, right="nk", block=(128, 128, 128))(
    one_product
)
check("product e5m2", 512, 512, 512, dtype=jnp.float8_e5m2, right="nk",
      block=(128, 128, 128))(one_product)  # fmt: skip
check("product i8", 512, 512, 512, dtype=jnp.int8, right="nk", block=(128, 128, 128))(
    one_product
)
for _block in ((128, 128, 64), (256, 128, 64), (64, 64, 64), (64, 256, 128),
               (128, 64, 128), (192, 128, 64), (128, 192, 64)):  # fmt: skip
    check(f"product {_block}", 768, 768, 512, block=_block)(one_product)


@check("product bias gelu")
def bias_gelu():
    x, y = normal(700, 512, dtype=bf16), normal(512, 520, dtype=bf16, seed=1)
    bias = normal(1, 520, dtype=bf16, seed=2)
    finish = lambda acc, b: jax.nn.gelu(acc * 0.05 + b.astype(f32))
    got = matmul(x, y, bias, finish=finish)
    want = finish(jnp.dot(x, y, preferred_element_type=f32), bias).astype(bf16)
    return f"error {error(got, want):.1e}"


def product_times(m, n, k, dtype=bf16, right="kn", blocks=((128, 256, 64),), out=None):
    sizes = {"m": m, "n": n, "k": k}
    x, y = operand(sizes, "mk", dtype, 0), operand(sizes, right, dtype, 1)
    out = out or (jnp.int32 if dtype == jnp.int8 else bf16)
    work = 2 * m * n * k / 1e12
    found = []
    for block in blocks:
        f = jax.jit(partial(matmul, right=right, block=block, out=out))
        found.append(f"{block} {work / seconds(f, x, y):.0f}")
    line = "TFLOP/s " + ", ".join(found)
    if dtype in (bf16, jnp.float16, jnp.int8):
        plain = jax.jit(partial(reference, left="mk", right=right, out=out))
        line += f"; XLA {work / seconds(plain, x, y):.0f}"
    return line


_BLOCKS = ((128, 256, 64), (256, 128, 64), (128, 128, 64), (64, 64, 64))
check("time product 4096", 4096, 4096, 4096, blocks=_BLOCKS)(product_times)
check("time product 8192", 8192, 8192, 8192, blocks=_BLOCKS[:2])(product_times)
check("time product nk", 4096, 4096, 4096, right="nk")(product_times)
check("time product f8", 4096, 4096, 4096, dtype=f8, right="nk",
      blocks=((128, 256, 128), (128, 128, 128)))(product_times)  # fmt: skip
check("time product i8", 4096, 4096, 4096, dtype=jnp.int8, right="nk",
      blocks=((128, 256, 128),))(product_times)  # fmt: skip


# --- attention ---

MASKED = -1e30


def absorb(q, k, v, state, scale, keep=None):
    """One block of keys into the running maximum, sum and result; in powers of 2."""
    high, total, out = state
    scores = jax.lax.dot_general(
        q, k, (((1,), (1,)), ((), ())), preferred_element_type=f32
    )
    if keep is not None:
        scores = jnp.where(keep, scores, MASKED)
    new = jnp.maximum(high, jnp.max(scores, axis=1, keepdims=True))
    p = jnp.exp2(scores * scale - new * scale)
    decay = jnp.exp2((high - new) * scale)
    total = total * decay + jnp.sum(p, axis=1, keepdims=True)
    out = out * decay + jnp.dot(p.astype(v.dtype), v, preferred_element_type=f32)
    return new, total, out


def positions(first, size, dim):
    return first + jax.lax.broadcasted_iota(jnp.int32, size, dim)


def grid_kernel(q_ref, k_ref, v_ref, o_ref, high, total, out, *, scale, causal):
    """Steps along the grid, state in scratch."""
    step, steps = pl.program_id(2), pl.num_programs(2)
    rows, columns = q_ref.shape[0], k_ref.shape[0]
    first = pl.program_id(1) * rows

    @pl.when(step == 0)
    def start():
        high[...] = jnp.full_like(high, MASKED)
        total[...] = jnp.zeros_like(total)
        out[...] = jnp.zeros_like(out)

    def move():
        keep = None
        if causal:
            size = (rows, columns)
            keep = positions(first, size, 0) >= positions(step * columns, size, 1)
        state = absorb(
            q_ref[...], k_ref[...], v_ref[...], (high[...], total[...], out[...]),
            scale, keep,
        )  # fmt: skip
        high[...], total[...], out[...] = state

    if causal:
        pl.when(step * columns < first + rows)(move)
    else:
        move()

    @pl.when(step == steps - 1)
    def end():
        o_ref[...] = (out[...] / total[...]).astype(o_ref.dtype)


def loop_kernel(q_ref, k_ref, v_ref, o_ref, *, scale, causal, columns):
    """A loop over the keys inside the kernel, state carried."""
    rows, width = q_ref.shape
    first = pl.program_id(1) * rows
    q = q_ref[...]

    def move(n, state):
        at = pl.ds(n * columns, columns)
        keep = None
        if causal:
            size = (rows, columns)
            keep = positions(first, size, 0) >= positions(n * columns, size, 1)
        return absorb(q, k_ref[at, :], v_ref[at, :], state, scale, keep)

    steps = k_ref.shape[0] // columns
    if causal:
        steps = jax.lax.div(first + rows + columns - 1, columns)
    state = (
        jnp.full((rows, 1), MASKED, f32),
        jnp.zeros((rows, 1), f32),
        jnp.zeros((rows, width), f32),
    )
    _, total, out = jax.lax.fori_loop(0, steps, move, state)
    o_ref[...] = (out / total).astype(o_ref.dtype)


def attention(q, k, v, style="grid", block=(128, 128), causal=False, backend="cuda"):
    """q, k, v: (batch and heads, length, width)."""
    heads, length, width = q.shape
    rows, columns = block
    scale = float(np.log2(np.e)) * width**-0.5
    here = pl.BlockSpec((None, rows, width), lambda h, i, *_: (h, i, 0))
    common = dict(out_shape=shape(q), out_specs=here, backend=backend)
    if style == "grid":
        there = pl.BlockSpec((None, columns, width), lambda h, i, j: (h, j, 0))
        scratch = [(rows, 1), (rows, 1), (rows, width)]
        return pl.pallas_call(
            partial(grid_kernel, scale=scale, causal=causal),
            grid=(heads, pl.cdiv(length, rows), pl.cdiv(length, columns)),
            in_specs=[here, there, there],
            scratch_shapes=[pltpu.VMEM(s, f32) for s in scratch],
            **common,
        )(q, k, v)
    whole = pl.BlockSpec((None, length, width), lambda h, i: (h, 0, 0))
    return pl.pallas_call(
        partial(loop_kernel, scale=scale, causal=causal, columns=columns),
        grid=(heads, pl.cdiv(length, rows)),
        in_specs=[here, whole, whole],
        **common,
    )(q, k, v)


def attention_reference(q, k, v, causal):
    scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=f32)
    scores *= q.shape[-1] ** -0.5
    if causal:
        length = q.shape[1]
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("hqk,hkd->hqd", weights, v.astype(f32)).astype(q.dtype)


def one_attention(heads, length, width, dtype=bf16, **options):
    q, k, v = (normal(heads, length, width, dtype=dtype, seed=n) for n in range(3))
    got = attention(q, k, v, **options)
    want = attention_reference(q, k, v, options.get("causal", False))
    return f"error {error(got, want):.1e}"


for _style in ("grid", "loop"):
    for _causal in (False, True):
        _name = f"attention {_style}{' causal' if _causal else ''}"
        _how = dict(style=_style, causal=_causal)
        check(f"{_name} 128", 3, 512, 128, **_how)(one_attention)
        check(f"{_name} 64", 3, 512, 64, **_how)(one_attention)
        check(f"{_name} 64x64", 2, 256, 64, block=(64, 64), **_how)(one_attention)


def attention_times(batch, heads, length, width, causal, blocks=((128, 128),)):
    size = (batch * heads, length, width)
    q, k, v = (normal(*size, dtype=bf16, seed=n) for n in range(3))
    work = 4 * batch * heads * length * length * width / (2 if causal else 1) / 1e12
    found = []
    for style in ("grid", "loop"):
        for block in blocks:
            f = jax.jit(partial(attention, style=style, causal=causal, block=block))
            found.append(f"{style} {block} {work / seconds(f, q, k, v):.0f}")
    four = [x.reshape(batch, heads, length, width).swapaxes(1, 2) for x in (q, k, v)]
    try:
        cudnn = jax.jit(
            partial(
                jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
            )
        )
        rival = f"{work / seconds(cudnn, *four):.0f}"
    except Exception as failure:
        rival = type(failure).__name__
    return f"TFLOP/s {', '.join(found)}; cuDNN {rival}"


check("time attention 4k", 4, 16, 4096, 128, False)(attention_times)
check("time attention causal 4k", 4, 16, 4096, 128, True)(attention_times)
check("time attention causal 16k", 1, 16, 16384, 128, True)(attention_times)
check("time attention D64", 4, 32, 4096, 64, False)(attention_times)
check("time attention D64 causal", 4, 32, 4096, 64, True)(attention_times)


@check("zoo")
def zoo():
    """Kernels of the zoo that the backend takes."""
    from pallasite.errors import UnsupportedError
    from tests.zoo import all_cases
    from tests.zoo.test_zoo import arguments

    good, refused, bad = 0, 0, []
    for case in all_cases():
        try:
            args = arguments(case, 0)
            got = case.run(*args, interpret=False, backend="cuda")
            want = case.reference(*args)
            for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
                np.testing.assert_allclose(
                    np.asarray(g, np.float64),
                    np.asarray(w, np.float64),
                    rtol=max(case.rtol, 1e-3),
                    atol=max(case.atol, 1e-3),
                )
            good += 1
        except UnsupportedError:
            refused += 1
        except Exception as failure:
            reason = str(failure).strip().splitlines()
            bad.append(f"{case.name} ({type(failure).__name__} {reason[:3]})")
    return f"{good} right, {refused} refused, {len(bad)} wrong: {'; '.join(bad)}"[:3000]


def main() -> None:
    print(jax.__version__, jax.devices(), flush=True)
    from pallasite.backends.cuda import nvrtc

    print(nvrtc.version(), flush=True)
    wanted = [w for w in sys.argv[1:] if not w.startswith("--")]
    if "--plain-stores" in sys.argv:
        from pallasite.backends.cuda.explicit import Explicit

        Explicit.can_copy_out = lambda self, access: False
    for name, run in CHECKS.items():
        if wanted and not any(name.startswith(w) for w in wanted):
            continue
        start = time.perf_counter()
        try:
            said = run()
        except Exception:
            said = (
                "FAILED " + " | ".join(traceback.format_exc().splitlines()[-6:])[:1500]
            )
        print(f"{name:20} {said}  [{time.perf_counter() - start:.1f} s]", flush=True)


if __name__ == "__main__":
    main()
