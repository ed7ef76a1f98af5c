"""The backend as XLA sees it: stages, caches, errors, concurrent and nested calls."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallasite import config, target
from pallasite.backends import base
from pallasite.backends.cpu.call import compile as compiler
from pallasite.backends.cpu.tiles.arena import Arena
from pallasite.errors import CompileError
from pallasite.ir.nodes import Loc, Span
from pallasite.ir.opdef import table
from pallasite.ir.types import F32, RefType
from tests.backends.cpu.running import (
    call,
    kernel_p,
    launch_of,
    run,
    tile_type,
    with_refs,
)
from tests.ir.kernels import matmul, vector_add

# `arg_reduce` becomes two reductions; drop_rules takes away what only derivatives see;
# `block_view` comes from a pass this backend does not use.
MISSING = {"arg_reduce", "exchange", "block_view", "stop_gradient", "custom"}
MISSING |= {"reduce_precision"}  # is operations on bits
MISSING |= {"roles", "barrier", "sem_signal_core", "fetch_and_add", "inline_asm"}
MISSING |= {"barrier_expect", "barrier_arrive", "barrier_wait", "wgmma", "wgmma_wait"}
MISSING |= {"named_barrier", "fence_async", "bulk_commit", "bulk_wait", "set_registers"}
MISSING |= {"cluster_barrier", "cluster_arrive", "cluster_copy", "warps"}
MISSING |= {"tensor_mma", "tensor_copy", "tensor_commit", "tensor_wait"}
MISSING |= {"remote_copy_start", "sem_signal_device", "barrier_semaphore"}
MISSING |= {"indexed_copy_start", "indexed_copy_wait", "device_number"}
MISSING |= {"inline_cuda"}
MISSING |= {"barrier_test", "load_wait", "async_store", "peer_block", "peer_device"}
MISSING |= {"sem_reach"}  # between roles of a GPU program
MISSING |= {"scaled"}  # of Blackwell's matmuls
MISSING |= {"matrix_unit"}  # written out by the first pass


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_stages_are_text_and_then_object_code():
    backend, kernel = base.get("cpu"), vector_add()
    outputs = base.Compiled(backend, kernel, base.Options())
    assert list(outputs) == ["scheduled", "llvm", "asm", "object"]
    assert outputs["scheduled"].startswith("kernel @vector_add")
    assert "define ptr @handler(ptr %frame)" in outputs["llvm"]
    assert isinstance(outputs["object"], bytes)


def test_object_code_at_hand_spares_the_stages_before(tmp_path: Path):
    with config.override(cache_dir=str(tmp_path)):
        written = []
        make = object_maker(written)
        first = compiler.stored_object("a kernel", make)
        assert compiler.stored_object("a kernel", make) == first and len(written) == 1
        compiler._objects.clear()  # as in another process
        assert compiler.stored_object("a kernel", make) == first and len(written) == 1
        assert compiler.stored_object("another", make) and len(written) == 2


def object_maker(written: list[str]):
    def make() -> bytes:
        written.append("define void @handler() { ret void }")
        return compiler.make_object(written[-1])

    return make


def test_identity_tells_apart_what_is_compiled_differently():
    text = vector_add().text
    here = compiler.identity(text)
    assert here == compiler.identity(text) != compiler.identity(vector_add(512).text)
    with target.using(target.AVX2):
        assert compiler.identity(text) != here


def test_lines_of_checks_belong_to_the_identity():
    def kernel(line: int):
        def emit(b, out):
            b.store(out, b.constant(0.0, tile_type(F32, 1)))
            good = b.op("lt", b.index(1), b.index(2))
            b.loc = Loc("f.py", line)
            b.emit("debug_check", good, message="no")

        return with_refs(emit, [], [tile_type(F32, 1)])

    first, second = launch_of(kernel(1)), launch_of(kernel(2))
    assert first.has_side_effect and first.target != second.target
    assert first.target == launch_of(kernel(1)).target


def test_equal_kernels_are_compiled_once():
    first, second = launch_of(vector_add()), launch_of(vector_add())
    assert (first.target, first.handler) == (second.target, second.handler)
    assert first.target.startswith("pallasite_cpu_")
    assert first.target != launch_of(vector_add(512)).target


def test_version_names_the_tools_and_the_cpu():
    version = base.get("cpu").version()
    assert "llvmlite" in version and "LLVM" in version


def test_native_ops_are_ops_and_the_rest_is_known():
    native = base.get("cpu").native
    assert native <= table().keys()
    assert table().keys() - native == MISSING


def test_refused_code_is_a_compile_error():
    with pytest.raises(CompileError, match="LLVM rejected the code of a kernel"):
        compiler.make_object("define void @f() { ret i32 }")


def test_memory_that_cannot_be_had_is_an_error():
    def emit(b, out):
        scratch = b.op("alloc", type=RefType((2**52,), F32, "vmem"))
        b.store(out, b.load(scratch, (Span(0, 1),)))

    kernel = with_refs(emit, [], [tile_type(F32, 1)])
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="out of memory for the kernel"
    ):
        run(kernel)


def test_kernels_inside_loops_of_xla():
    add = call(vector_add(64, 16))

    @jax.jit
    def run_many(x):
        return jax.lax.fori_loop(0, 10, lambda _, y: add(y, x)[0], jnp.zeros_like(x))

    x = normal(64)
    np.testing.assert_allclose(run_many(x), 10 * x, rtol=1e-5)


def test_kernels_on_several_devices_at_once():
    devices = jax.devices("cpu")
    kernel = matmul(32, 48, 64, (16, 16, 16))
    mesh = Mesh(np.array(devices), ("d",))
    x, y = normal(32 * len(devices), 64), normal(64, 48)

    def each(part, whole):
        (product,) = kernel_p.bind(part, whole, kernel=kernel)
        return product + 0 * jax.lax.psum(product, "d")

    spread = jax.shard_map(
        each,
        mesh=mesh,
        in_specs=(PartitionSpec("d"), PartitionSpec()),
        out_specs=PartitionSpec("d"),
        check_vma=False,
    )
    run_all = jax.jit(spread)
    for _ in range(20):
        got = run_all(x, y)
    np.testing.assert_allclose(got, x @ y, rtol=1e-4, atol=1e-4)


def test_arena_shares_what_is_not_needed_together():
    arena = Arena()
    first, second = arena.take(100), arena.take(64)
    assert (first, second, arena.size) == (0, 128, 192)
    arena.give_back(first)
    assert arena.take(64) == 0
    assert arena.take(128) == 192
    assert arena.size == 320
