"""The kernels that JAX ships for TPUs, as calls for libtpu: see `tpu.py`.

Unmodified, by upstream's backend or by this package's (`pallasite.install()`). One
process has only one of them: this is the script that `tpu.py` starts for each.

    python benchmarks/tpu_library.py ours v5e splash    # prints jobs, a line each
"""

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from pallasite.runtime.aot import Job
from pallasite.target import TPUS

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
HEADS, LENGTH, WIDTH = 8, 2048, 128
SCALE = WIDTH**-0.5

Case = tuple[Callable[..., Any], Sequence[Shape]]  # a function and its operands
CASES: dict[str, Callable[[], Case]] = {}
DEVICES: dict[str, int] = {}  # that run a case at once, where they are several


def case(
    name: str, devices: int = 1
) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        CASES[name] = make
        if devices > 1:
            DEVICES[name] = devices
        return make

    return add


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    def total(*arrays: Any) -> Any:
        return function(*arrays).astype(F32).sum()

    return jax.grad(total, (0, 1, 2))


# --- the library ---


@case("library: matmul")
def matmul() -> Case:
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    square = Shape((2048, 2048), BF16)
    run = functools.partial(matmul, block_shape=(512, 512), block_k=512)
    return run, (square, square)


def flash(causal: bool) -> Case:
    from jax.experimental.pallas.ops.tpu import flash_attention as library

    names = library.BlockSizes.__dataclass_fields__
    sizes = library.BlockSizes(**{n: 1 if n == "block_b" else 512 for n in names})
    run = functools.partial(
        library.flash_attention, causal=causal, sm_scale=SCALE, block_sizes=sizes
    )
    return run, (Shape((1, HEADS, LENGTH, WIDTH), BF16),) * 3


@case("library: flash attention")
def flash_attention() -> Case:
    return flash(causal=False)


@case("library: flash attention, causal, with its gradient")
def flash_attention_gradient() -> Case:
    run, operands = flash(causal=True)
    return gradient(run), operands


@case("library: splash attention, with its gradient")
def splash_attention() -> Case:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as library,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq")
    sizes: dict[str, Any] = {f"block_{name}": 512 for name in (*names, "kv_dq")}
    run = library.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=library.BlockSizes(**sizes),
    )
    return gradient(run), (Shape((HEADS, LENGTH, WIDTH), BF16),) * 3


@case("library: grouped matmul, with its gradient")
def megablox() -> Case:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    def run(x: Any, y: Any, sizes: Any) -> Any:
        total = lambda x, y: gmm(x, y, sizes, tiling=(512, 512, 512)).sum()
        return jax.grad(total, (0, 1))(x, y)

    shapes = Shape((4096, 2048), BF16), Shape((8, 2048, 2048), BF16), Shape((8,), I32)
    return run, shapes


@case("library: paged attention")
def paged_attention() -> Case:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    sequences, heads, pages, page = 8, 4, 128, 16
    run = functools.partial(paged_attention, pages_per_compute_block=8)
    pool = Shape((heads, sequences * pages, page, WIDTH), BF16)
    table = Shape((sequences, pages), I32)
    queries = Shape((sequences, 8 * heads, WIDTH), BF16)
    return run, (queries, pool, pool, Shape((sequences,), I32), table)


@case("library: ragged paged attention")
def ragged_paged_attention() -> Case:
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as library

    sequences, heads, pages, page = 8, 4, 128, 16
    run = functools.partial(
        library.ragged_paged_attention,
        num_kv_pages_per_block=8,
        num_queries_per_block=32,
    )
    shapes = (
        Shape((512, 4 * heads, WIDTH), BF16),
        Shape((sequences * pages, page, 2 * heads, WIDTH), BF16),
        Shape((sequences,), I32),
        Shape((sequences, pages), I32),
        Shape((sequences + 1,), I32),
        Shape((1,), I32),
    )
    return run, shapes


@case("library: threefry")
def threefry() -> Case:
    from jax.experimental.pallas.ops.tpu.random import threefry

    def run(key: Any) -> Any:
        return threefry.plthreefry_random_bits(key, 32, (1024, 1024))

    return run, (Shape((2,), jnp.uint32),)


@case("library: all-gather", devices=4)
def all_gather() -> Case:
    from jax.experimental.pallas.ops.tpu.all_gather import all_gather

    def run(x: Any) -> Any:
        mesh: Any = jax.sharding.get_abstract_mesh()  # annotated as a concrete one
        return all_gather(x, mesh=mesh, axis_name="x")

    return run, (Shape((4 * 256, 128), F32),)


# --- what a program calls ---


def jobs_in(function: Callable, operands: Sequence[Shape]) -> Iterator[Job]:
    """The kernel calls in a function, as it is lowered for TPUs."""
    traced = jax.jit(function).trace(*operands)
    module = traced.lower(lowering_platforms=("tpu",)).compiler_ir()
    assert module is not None
    for call in _custom_calls(module.operation):
        yield Job(
            _name(call),
            "tpu_custom_call",
            call.attributes["backend_config"].value,
            tuple(_array(o.type) for o in call.operands),
            tuple(_array(r.type) for r in call.results),
            1,
            _aliases(call),
            "true" in _attribute(call, "has_side_effect"),
        )


def _attribute(call: Any, name: str) -> str:
    return str(call.attributes[name]) if name in call.attributes else ""


def _name(call: Any) -> str:
    """What the kernel is called, where the call says so."""
    found = re.search(r'kernel_name = "([^"]*)"', str(call.attributes))
    return found.group(1) if found else ""


def _custom_calls(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block:
                called = _attribute(inner.operation, "call_target_name")
                if called == '"tpu_custom_call"':
                    yield inner.operation
                yield from _custom_calls(inner.operation)


def _aliases(call: Any) -> tuple[tuple[int, int], ...]:
    pattern = r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)"
    text = _attribute(call, "output_operand_aliases")
    return tuple((int(i), int(o or 0)) for o, i in re.findall(pattern, text))


NAMES = {
    "bf16": "bfloat16",
    "f32": "float32",
    "i32": "int32",
    "ui32": "uint32",
    "i8": "int8",
}


def _array(type_: Any) -> tuple[tuple[int, ...], str]:
    found = re.fullmatch(r"tensor<(.*)>", str(type_))
    assert found is not None
    *shape, element = found.group(1).split("x")
    return tuple(map(int, shape)), NAMES[element]


def lowering_for(chip: str, devices: int = 1) -> Any:
    """A context in which upstream lowers for chips that are not there."""
    row = TPUS[chip]
    device = jax.sharding.AbstractDevice(
        device_kind=row.device_kinds[0], num_cores=row.cores, platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((devices,), ("x",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def main(who: str, chip: str, *chosen: str) -> None:
    if who == "ours":
        import pallasite

        pallasite.install()
        os.environ["PALLASITE_TARGET"] = chip
        os.environ["PALLASITE_BACKEND"] = "tpu"
    for name, make in CASES.items():
        if chosen and not any(each in name for each in chosen):
            continue
        devices = DEVICES.get(name, 1)
        lowering: Any = contextlib.nullcontext()
        if who == "upstream" or devices > 1:
            lowering = lowering_for(chip, devices)
        try:
            function, operands = make()
            with lowering:
                jobs = list(jobs_in(function, operands))
        except Exception as error:
            text = str(error).strip() or repr(error)
            print(f"{name}, {who}, {chip}: {text[:600]}", file=sys.stderr, flush=True)
            continue
        for number, job in enumerate(jobs):
            called = f"{name}, call {number + 1}" if len(jobs) > 1 else name
            told = {"name": called, "devices": devices}
            print(json.dumps(asdict(job) | told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
