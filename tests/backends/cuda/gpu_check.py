"""Checks and times of the `cuda` backend on a GPU.

`python -m tests.backends.cuda.gpu_check` runs every check even if an earlier one fails;
each prints one line. Names on the command line select checks by their beginning.
"""

import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallasite as pl
from tests.backends.cuda.kernels import (
    add_kernel,
    attention,
    attention_reference,
    bf16,
    error,
    f32,
    gelu_kernel,
    gelu_reference,
    layernorm_kernel,
    layernorm_reference,
    matmul,
    normal,
    operand,
    plain_attention,
    plain_attention_reference,
    reference,
    rmsnorm_kernel,
    rmsnorm_reference,
    rows,
    shape,
    softmax_kernel,
    softmax_reference,
)

CHECKS: dict[str, Callable[[], str]] = {}


def check(name: str, *args, **kw):
    def register(function):
        CHECKS[name] = partial(function, *args, **kw)
        return function

    return register


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


def plain_cases():
    """Width, block, length, and what is not plain."""
    for width in (32, 64, 80, 96, 128, 192, 256):
        for block in ((128, 128), (64, 64)):
            yield from ((width, block, length, "") for length in (512, 333))
    for block in ((128, 64), (64, 128), (192, 128)):
        yield from ((width, block, 1000, "") for width in (64, 128))
    for width, block in ((64, (64, 64)), (128, (128, 128))):
        for kind in ("loop", "heads", "bias", "ids", "cap"):
            yield width, block, 768, kind


def plain_attention_error(causal, case):
    width, block, length, kind = case
    some = lambda seed, n: normal(n, length, width, dtype=bf16, seed=seed)
    q, k, v = some(0, 4), *(some(n, 2 if kind == "heads" else 4) for n in (1, 2))
    ids = jnp.asarray(np.arange(length)[None] // 100, jnp.int32)
    more = {"bias": [normal(4, length, length, seed=3)], "ids": [None, ids, ids]}
    operands = (q, k, v, *more.get(kind, ()))
    how = dict(causal=causal, softcap=20.0 if kind == "cap" else None)
    style = "loop" if kind == "loop" else "grid"
    try:
        got = plain_attention(*operands, block=block, style=style, **how)
        found = error(got, plain_attention_reference(*operands, **how))
        return found, "" if found < 2e-2 else f"{case} {found:.1e}"
    except Exception as failure:
        lines = str(failure).splitlines()
        why = [line for line in lines if " why " in line] or lines[:1]
        return 0.0, f"{case} {why}"[:200]


def plain_attention_errors(causal):
    """Widths, blocks, odd lengths, shared heads, bias, segments, soft cap."""
    with ThreadPoolExecutor(12) as pool:
        run = partial(plain_attention_error, causal)
        found = list(pool.map(run, plain_cases()))
    wrong = [what for _, what in found if what]
    return f"error {max(e for e, _ in found):.1e} in {len(found)}; wrong: {wrong}"


check("plain attention", False)(plain_attention_errors)
check("plain attention causal", True)(plain_attention_errors)


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
