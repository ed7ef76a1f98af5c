"""The kernels that JAX ships (`jax.experimental.pallas.ops`), run unmodified.

A script for `python -m pallasite run`: it imports upstream's names and prints a line
per kernel, `name<TAB>ok` or `name<TAB>what went wrong`, compared with plain JAX.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CASES: dict[str, Callable[[], None]] = {}


FOR_LIBTPU: dict[str, Callable[[], None]] = {}  # run only if they are named


def case(run: Callable[[], None]) -> Callable[[], None]:
    CASES[run.__name__] = run
    return run


def case_for_libtpu(run: Callable[[], None]) -> Callable[[], None]:
    FOR_LIBTPU[run.__name__] = run
    return run


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def assert_close(got: Any, wanted: Any, tolerance: float = 2e-3) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def gradients(function: Callable[..., Any], *arguments: Any) -> Any:
    def loss(*args: Any) -> Any:
        return jnp.sin(function(*args)).sum()

    return jax.jit(jax.grad(loss, tuple(range(len(arguments)))))(*arguments)


def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Heads first: [..., length, head]."""
    scores = jnp.where(mask, q @ jnp.swapaxes(k, -1, -2), -1e30)
    return jax.nn.softmax(scores, axis=-1) @ v


def causal(n: int) -> jax.Array:
    return jnp.tril(jnp.ones((n, n), bool))


# --- kernels written for GPUs ---


@case
def softmax_of_rows_that_are_no_power_of_two() -> None:
    from jax.experimental.pallas.ops.gpu.softmax import softmax

    x = normal(4, 300)
    assert_close(softmax(x), jax.nn.softmax(x))


def check_norm(norm: Callable[..., Any], plain: Callable[..., Any]) -> None:
    arguments = normal(2, 64, 96), normal(96, seed=1), normal(96, seed=2)
    assert_close(gradients(norm, *arguments), gradients(plain, *arguments), 1e-2)


@case
def layer_norm() -> None:
    from jax.experimental.pallas.ops.gpu import layer_norm as library

    check_norm(library.layer_norm, library.layer_norm_reference)


@case
def rms_norm() -> None:
    from jax.experimental.pallas.ops.gpu import rms_norm as library

    check_norm(library.rms_norm, library.rms_norm_reference)


@case
def attention_with_segments_and_its_gradient() -> None:
    from jax.experimental.pallas.ops.gpu import attention as library

    q, k, v = (normal(1, 128, 2, 32, seed=n) for n in range(3))
    segments = (jnp.arange(128) // 50).astype(jnp.int32)[None]
    sizes = library.BlockSizes(
        block_q=64, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64,
        block_kv_dq=64,
    )  # fmt: skip

    def ours(q: Any, k: Any, v: Any) -> Any:
        return library.mha(q, k, v, segments, 0.2, True, block_sizes=sizes)

    def plain(q: Any, k: Any, v: Any) -> Any:
        return library.mha_reference(q, k, v, segments, 0.2, True)

    assert_close(ours(q, k, v), plain(q, k, v))
    assert_close(gradients(ours, q, k, v), gradients(plain, q, k, v), 1e-2)


@case
def decode_attention() -> None:
    from jax.experimental.pallas.ops.gpu import decode_attention as library

    q, k, v = normal(1, 8, 32), normal(1, 128, 2, 32, seed=1), normal(1, 128, 2, 32)
    run = library.gqa
    assert_close(run(q, k, v, k_splits=2, block_k=32), library.gqa_reference(q, k, v))


def paged_case() -> tuple[Any, ...]:
    """Queries, pages of keys and values, page table, lengths, and the result."""
    q, k, v = normal(2, 8, 128), normal(2, 16, 16, 128, seed=1), normal(2, 16, 16, 128)
    # The kernel for TPUs rounds pages to bf16.
    k, v = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (k, v))
    table = jax.random.permutation(jax.random.key(3), 16)[:8].reshape(2, 4)
    lengths = jnp.array([20, 50], jnp.int32)
    keys, values = (  # [sequence, kv head, position, head]
        jnp.moveaxis(x[:, table], 0, 1).reshape(2, 2, 64, 128) for x in (k, v)
    )
    grouped = q.reshape(2, 2, 4, 128)
    mask = jnp.arange(64) < lengths[:, None, None, None]
    wanted = attention(grouped, keys, values, mask).reshape(q.shape)
    return q, k, v, table.astype(jnp.int32), lengths, wanted


@case
def paged_attention_for_gpus() -> None:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    q, k, v, table, lengths, wanted = paged_case()
    got = paged_attention(
        q, k, v, table, lengths, block_h=16, pages_per_compute_block=2, k_splits=2
    )
    assert_close(got, wanted)


# --- kernels written for TPUs ---


@case
def matmul() -> None:
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    x, y = normal(256, 128), normal(128, 384, seed=1)
    assert_close(matmul(x, y, block_shape=(128, 128), block_k=128), x @ y, 1e-2)


@case
def flash_attention_with_bias_and_its_gradient() -> None:
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    q, k, v = (normal(1, 2, 256, 128, seed=n) for n in range(3))
    bias = normal(1, 2, 256, 256, seed=4)
    sizes = library.BlockSizes(
        **{name: 128 for name in library.BlockSizes.__dataclass_fields__}
        | {"block_b": 1}
    )

    def ours(q: Any, k: Any, v: Any) -> Any:
        return library.flash_attention(
            q, k, v, ab=bias, causal=True, sm_scale=0.1, block_sizes=sizes
        )

    def plain(q: Any, k: Any, v: Any) -> Any:
        scores = (q @ jnp.swapaxes(k, -1, -2) + bias) * 0.1
        return jax.nn.softmax(jnp.where(causal(256), scores, -1e30), axis=-1) @ v

    assert_close(gradients(ours, q, k, v), gradients(plain, q, k, v), 1e-2)


@case
def splash_attention_and_its_gradient() -> None:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as library,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    q, k, v = (normal(2, 256, 128, seed=n) for n in range(3))
    q = q * 0.09
    heads = [masks.CausalMask((256, 256)), masks.LocalMask((256, 256), (60, 0), 0)]
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq")
    sizes = {f"block_{name}": 128 for name in (*names, "kv_dq")}
    ours = library.make_splash_mha(
        masks.MultiHeadMask(heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=library.BlockSizes(**sizes),
    )
    mask = jnp.stack([jnp.asarray(head[:, :]) for head in heads])
    assert_close(
        gradients(ours, q, k, v),
        gradients(lambda q, k, v: attention(q, k, v, mask), q, k, v),
        1e-2,
    )


@case
def grouped_matmul_and_its_gradient() -> None:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    x, y = normal(256, 128), normal(4, 128, 128, seed=1)
    sizes = jnp.array([50, 4, 146, 56], jnp.int32)
    assert_close(
        gradients(lambda x, y: gmm(x, y, sizes, tiling=(128, 128, 128)), x, y),
        gradients(lambda x, y: jax.lax.ragged_dot(x, y, sizes), x, y),
        2e-2,
    )


@case
def paged_attention_for_tpus() -> None:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    q, k, v, table, lengths, wanted = paged_case()
    got = paged_attention(q, k, v, lengths, table, pages_per_compute_block=2)
    assert_close(got, wanted)


@case
def ragged_paged_attention() -> None:
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as library

    q, pages = normal(24, 4, 128), normal(8, 16, 4, 128, seed=1)
    arguments = (
        q,
        pages,
        jnp.array([20, 30], jnp.int32),  # lengths of keys
        jnp.arange(4, dtype=jnp.int32).reshape(2, 2),  # pages of each sequence
        jnp.array([0, 8, 24], jnp.int32),  # first query of each sequence
        jnp.array([2], jnp.int32),
    )
    got = library.ragged_paged_attention(
        *arguments, num_kv_pages_per_block=1, num_queries_per_block=8
    )
    assert_close(got, library.ref_ragged_paged_attention(*arguments), 1e-2)


@case
def random_bits_of_threefry() -> None:
    from jax.experimental.pallas.ops.tpu.random import threefry

    words = jnp.array([1, 2], jnp.uint32)
    with jax.threefry_partitionable(True):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        wanted = jax.random.bits(key, (256, 256), jnp.uint32)
        got = threefry.plthreefry_random_bits(words, 32, (256, 256))
    np.testing.assert_array_equal(got, wanted)


# --- kernels that copy between devices ---


def gathered(count: int, space: Any, x: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.all_gather import all_gather

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), "x")
    return all_gather(x, mesh=mesh, axis_name="x", memory_space=space)


@case
def all_gather_around_rings() -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    with pltpu.force_tpu_interpret_mode():
        for count, space in ((4, pltpu.VMEM), (8, pl.ANY)):
            x = normal(count * 4, 128)
            np.testing.assert_array_equal(gathered(count, space, x), x)


@case_for_libtpu
def all_gather_compiles() -> None:
    import dataclasses

    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    from pallasite.backends.base import Compiled, get
    from pallasite.runtime.aot import Job, compile_all
    from pallasite.sites import calls_in

    jobs = []
    for space in (pltpu.VMEM, pl.ANY):
        (call,) = calls_in(lambda x, s=space: gathered(4, s, x), normal(64, 128))
        made = Compiled(get("tpu"), call.kernel, call.options)
        job = Job.of(str(space), made.kernel, get("tpu").launch(made))
        jobs.append(dataclasses.replace(job, devices=4))
    assert [result.error for result in compile_all(jobs, "v5e")] == ["", ""]


def main() -> None:
    from pallasite.errors import FallbackWarning

    warnings.simplefilter("error", FallbackWarning)
    jax.config.update("jax_default_matmul_precision", "highest")
    named = {n: run for n, run in (CASES | FOR_LIBTPU).items() if n in sys.argv[1:]}
    for name, run in (named or CASES).items():
        try:
            run()
            print(name, "ok", sep="\t", flush=True)
        except Exception as error:
            what = f"{type(error).__name__}: {error}".replace("\n", " | ")
            print(name, what, sep="\t", flush=True)


if __name__ == "__main__":
    main()
