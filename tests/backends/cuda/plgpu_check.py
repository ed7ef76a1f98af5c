"""Upstream's own kernels for Hopper on a GPU: by `cuda`, and by upstream itself.

`python -m tests.backends.cuda.plgpu_check` checks and times both in one process; each
check prints a line, and those after one that fails are run, too. Names on the command
line select checks by their beginning. Kernels are loaded twice from the files that JAX
ships: as they are, and with `pallasite` in the place of Pallas. `--docs FOLDER`, the
folder docs/pallas/gpu of JAX's sources, adds the products of its guides.
"""

import argparse
import functools
import importlib.util
import pathlib
import re
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import Timer

FOLDER = pathlib.Path(jax.__file__).parent / "experimental/pallas/ops/gpu"
CHECKS: dict[str, Callable[[], str]] = {}


def for_pallasite(text: str) -> str:
    """A program of upstream's with Pallasite in the place of Pallas."""
    text = text.replace("jax.experimental.pallas.mosaic_gpu", "pallasite.mosaic_gpu")
    text = text.replace("import jax.experimental.pallas as", "import pallasite as")
    text = text.replace("from jax.experimental import pallas as", "import pallasite as")
    text = text.replace(
        "from jax.experimental.pallas import mosaic_gpu as",
        "import pallasite.mosaic_gpu as",
    )
    return text


def ours(name: str) -> types.ModuleType:
    """A file of upstream's with Pallasite in the place of Pallas."""
    module = types.ModuleType(f"ours_{name}")
    module.__file__ = str(FOLDER / f"{name}.py")
    sys.modules[module.__name__] = module
    text = for_pallasite((FOLDER / f"{name}.py").read_text())
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def upstreams(name: str) -> types.ModuleType:
    return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")


def normal(seed: int, *shape: int, dtype=jnp.float16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def error(got, want) -> float:
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    return float(np.abs(got - want).max() / np.abs(want).max())


timer = functools.cache(Timer)


def compare(
    name, make, args, want, work: float, calls: int = 6, loaders=(ours, upstreams)
) -> str:
    """`make(module)` is the function to run; `want` its result."""
    said, functions = [], {}
    for label, load in zip(("ours", "upstream"), loaders, strict=True):
        try:
            start = time.perf_counter()
            function = jax.jit(make(load(name)))
            got = jax.block_until_ready(function(*args))
            took = time.perf_counter() - start
            said.append(f"{label} {error(got, want):.0e} ({took:.1f} s)")
            functions[label] = function
        except Exception as e:
            lines = traceback.format_exc().splitlines()
            said.append(
                f"{label}: {type(e).__name__} {str(e)[:700]} | {lines[-3][:120]}"
            )
    rounds: dict[str, list[float]] = {label: [] for label in functions}
    for _ in range(5):
        for label, function in functions.items():
            rounds[label].append(timer()(function, args, calls))
    times = {label: statistics.median(took) for label, took in rounds.items()}
    said += [
        f"{k} {1e6 * t:.0f} us = {work / t / 1e12:.0f} T" for k, t in times.items()
    ]
    if len(times) == 2:
        said.append(f"ratio {times['upstream'] / times['ours']:.3f}")
    return "; ".join(said)


def check(name: str):
    def register(function):
        CHECKS[name] = function
        return function

    return register


def matmul(size: int, **options):
    m, k, n = size, size, size
    a, b = normal(0, m, k), normal(1, k, n)
    want = jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)

    def make(module):
        given = {
            key: getattr(module.MatmulDimension, value)
            if key.endswith("dimension") or key == "grid_minor_dim"
            else value
            for key, value in options.items()
        }
        config = module.TuningConfig(**given)
        return lambda a, b: module.matmul(a, b, None, config)

    return compare("hopper_matmul_mgpu", make, (a, b), want, 2.0 * m * n * k)


TILES = dict(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)


@check("matmul")
def matmul_128():
    more = dict(grid_minor_dim="M", grid_tile_width=8, wg_dimension="N")
    return matmul(4096, **TILES, **more)


@check("matmul_m")
def matmul_along_m():
    more = dict(grid_minor_dim="N", grid_tile_width=8, wg_dimension="M")
    return matmul(4096, **TILES, **more)


@check("matmul_cluster")
def matmul_of_clusters():
    more = dict(grid_minor_dim="M", grid_tile_width=8, wg_dimension="N")
    return matmul(4096, **TILES, **more, cluster_dimension="M")


@check("matmul_cluster_n")
def matmul_of_wide_clusters():
    more = dict(grid_minor_dim="N", grid_tile_width=8, wg_dimension="M")
    return matmul(4096, **TILES, **more, cluster_dimension="N")


def attention(causal: bool, depth: int = 128, entry: str = "attention"):
    batch, length, heads = 4, 4096, 16
    q, k, v = (normal(n, batch, length, heads, depth) for n in range(3))
    q = q * depth**-0.5
    small = [x[:1, :, :2] for x in (q, k, v)]
    reference = upstreams("attention_mgpu").attention_reference
    want = reference(*small, causal=causal)
    config = dict(block_q=64 if depth > 64 else 128, block_kv=128, causal=causal)

    def make(module):
        options = module.TuningConfig(max_concurrent_steps=2, **config)
        return lambda *args: getattr(module, entry)(*args, options)

    work = 4.0 * batch * heads * length**2 * depth * (0.5 if causal else 1)
    whole = compare("attention_mgpu", make, (q, k, v), 1.0, work)
    part = jax.jit(make(ours("attention_mgpu")))(*small)
    return f"error {error(part, want):.0e}; {whole}"


@check("attention")
def attention_128():
    return attention(False)


@check("attention_causal")
def attention_causal():
    return attention(True)


@check("attention_64")
def attention_64():
    return attention(False, 64)


@check("attention_emitter")
def attention_by_pipeline():
    return attention(False, entry="attention_with_pipeline_emitter")


@check("attention_backward")
def attention_backward():
    batch, length, heads, depth = 1, 2048, 8, 128
    q, k, v = (normal(n, batch, length, heads, depth) for n in range(3))
    q = q * depth**-0.5
    blocks = dict(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)

    def gradient(function):
        loss = lambda *args: function(*args).astype(jnp.float32).sum()
        return lambda *args: jnp.stack(jax.grad(loss, (0, 1, 2))(*args))

    def make(module):
        config = module.TuningConfig(64, 128, 2, **blocks)
        return gradient(lambda *args: module.attention(*args, config))

    want = gradient(upstreams("attention_mgpu").attention_reference)(q, k, v)
    work = 14.0 * batch * heads * length**2 * depth
    return compare("attention_mgpu", make, (q, k, v), want, work)


@check("ragged")
def ragged():
    m, k, n, groups = 8192, 2048, 8192, 8
    lhs, rhs = normal(0, m, k), normal(1, groups, k, n)
    cuts = jnp.asarray([0, 700, 1900, 3000, 4196, 5100, 6000, 7321, m])
    sizes = jnp.diff(cuts).astype(jnp.int32)
    want = jax.jit(jax.lax.ragged_dot)(lhs, rhs, sizes)
    blocks = dict(block_m=128, block_n=128, block_k=64, grid_block_n=4)

    def make(module):
        return lambda lhs, rhs, sizes: module.ragged_dot(
            lhs, rhs, group_sizes=sizes, max_concurrent_steps=4, **blocks
        )

    return compare("ragged_dot_mgpu", make, (lhs, rhs, sizes), want, 2.0 * m * n * k)


@check("transposed_ragged")
def transposed_ragged():
    m, k, n, _groups = 8192, 2048, 2048, 8
    lhs, rhs = normal(0, m, k), normal(1, m, n)
    cuts = jnp.asarray([0, 700, 1900, 3000, 4196, 5100, 6000, 7321, m])
    sizes = jnp.diff(cuts).astype(jnp.int32)
    module = upstreams("transposed_ragged_dot_mgpu")
    want = module.ref_transposed_ragged_dot(lhs, rhs, sizes)
    blocks = dict(block_m=128, block_n=128, block_k=64, grid_block_n=4)

    def make(module):
        return lambda lhs, rhs, sizes: module.transposed_ragged_dot(
            lhs, rhs, group_sizes=sizes, max_concurrent_steps=4, **blocks
        )

    args = lhs, rhs, sizes
    return compare("transposed_ragged_dot_mgpu", make, args, want, 2.0 * m * n * k)


@check("mixed")
def mixed():
    m, k, n = 4096, 4096, 4096
    a = jax.random.randint(jax.random.key(0), (m, k), -8, 8, jnp.int8)
    b = normal(1, k, n, dtype=jnp.bfloat16)
    module = upstreams("hopper_mixed_type_matmul_mgpu")
    want = module.reference(a, b, out_dtype=jnp.bfloat16)

    def make(module):
        options = dict(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
        config = module.TuningConfig(**options)
        return lambda a, b: module.mixed_matmul_kernel(
            a, b, out_dtype=jnp.bfloat16, config=config
        )

    return compare("hopper_mixed_type_matmul_mgpu", make, (a, b), want, 2.0 * m * n * k)


# --- the guides ---


def guide(path: pathlib.Path, change: Callable[[str], str]) -> types.ModuleType:
    """The program that a guide's blocks of Python make; one that fails is left out."""
    module = types.ModuleType(path.stem)
    for block in re.findall(
        r"^```python[^\n]*\n(.*?)^```", path.read_text(), re.S | re.M
    ):
        try:
            exec(compile(change(block), str(path), "exec"), vars(module))
        except (SyntaxError, AssertionError) as e:
            # A signature that is shown, or float16 sums compared for equality.
            print(f"  {path.name}: {type(e).__name__} {str(e).strip()[:80]!r}")
    return module


def of_guide(path: pathlib.Path, function: str) -> str:
    loaders = [functools.partial(guide, change=c) for c in (for_pallasite, str)]
    m, n, k = 132 * 128, 4 * 128, 10 * 64  # what the guide's globals say, too
    a, b = normal(0, m, k), normal(1, k, n)
    want = jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)
    make = lambda module: getattr(module, function)
    work = 2.0 * m * n * k
    return compare(path, make, (a, b), want, work, loaders=loaders)


def add_guides(folder: pathlib.Path) -> None:
    for file, function in (
        ("quickstart.md", "matmul"),
        ("pipelining.md", "matmul"),
        ("pipelining.md", "matmul_warp_specialized"),
    ):
        CHECKS[f"{file}: {function}"] = functools.partial(
            of_guide, folder / file, function
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--docs", type=pathlib.Path, help="JAX's docs/pallas/gpu")
    given = parser.parse_args()
    if given.docs:
        add_guides(given.docs)
    names = given.names
    for name, function in CHECKS.items():
        if names and not any(
            name == n or (n.endswith("*") and name.startswith(n[:-1])) for n in names
        ):
            continue
        try:
            print(f"{name}: {function()}", flush=True)
        except Exception:
            print(f"{name}: FAILED\n{traceback.format_exc()[-1200:]}", flush=True)


if __name__ == "__main__":
    main()
