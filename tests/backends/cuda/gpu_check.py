"""Checks and times of the `cuda` backend on a GPU: `python -m tests.backends.cuda.gpu_check`.

Every check runs even if an earlier one fails; each prints one line. Names on the command
line select checks by their beginning.
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
    wanted = sys.argv[1:]
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
