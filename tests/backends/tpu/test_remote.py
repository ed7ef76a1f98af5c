"""Copies and signals between devices, as Mosaic text and compiled by libtpu."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import config, kernels
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, get
from pallasite.errors import SpecError
from pallasite.interpret.checked import run_devices
from pallasite.passes.lower.device_numbers import ask_for_device_numbers
from pallasite.runtime.aot import Job, compile_all
from pallasite.sites import calls_in
from tests.remote import collectives
from tests.remote.collectives import ANYWHERE, DMA, REGULAR, meet, neighbours, over_mesh

S, F32, DEVICES = jax.ShapeDtypeStruct, jnp.float32, 4
BLOCK = (8, 128)
CASES = {
    "all_gather": (collectives.all_gather, [BLOCK]),
    "reduce_scatter": (collectives.reduce_scatter, [(DEVICES, *BLOCK)]),
    "all_to_all": (collectives.all_to_all, [(DEVICES, *BLOCK)]),
    "gathered_matmul": (collectives.gathered_matmul, [BLOCK, (128, 128)]),
}


def compiled(function, shapes) -> Compiled:
    shapes = [S((DEVICES, *shape), F32) for shape in shapes]
    (call,) = calls_in(over_mesh(function, DEVICES), *shapes)
    return Compiled(get("tpu"), call.kernel, call.options)


@pytest.mark.parametrize("name", CASES)
def test_copies_and_signals_name_the_device(name):
    made = compiled(*CASES[name])
    text = made["mosaic"]
    assert "source_semaphore(" in text
    assert "device_id(" in text
    assert "tpu.sem_barrier" in text
    config = json.loads(get("tpu").launch(made).config)["custom_call_config"]
    assert config["has_communication"] is True
    assert config["collective_id"] == list(CASES).index(name)


def places(x):
    """Where each device of a mesh is along both axes, told to itself by a copy."""

    def kernel(x_ref, o_ref, send_sem, recv_sem):
        i, j = lax.axis_index("a"), lax.axis_index("b")
        o_ref[...] = jnp.zeros_like(o_ref)
        me = 2 * i + j
        pltpu.async_remote_copy(
            x_ref.at[10 * i + j], o_ref.at[0], send_sem, recv_sem, device_id=(i, j)
        ).wait()
        o_ref[1] = jnp.full((8, 128), me, F32)

    return pl.pallas_call(
        kernel, S((2, 8, 128), F32), scratch_shapes=[DMA, DMA], name="places"
    )(x)


def test_a_core_is_asked_for_its_place_in_the_mesh():
    """It is no operand: nothing has to be copied before a neighbour is known."""
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    x = jnp.broadcast_to(jnp.arange(12.0)[:, None, None], (12, 8, 128))
    whole, split = (jax.sharding.PartitionSpec(*n) for n in ((), (("a", "b"),)))
    mapped = jax.shard_map(
        places, mesh=mesh, in_specs=whole, out_specs=split, check_vma=False
    )
    (call,) = calls_in(mapped, x)
    made = Compiled(get("tpu"), call.kernel, call.options)
    assert "tpu.device_id" in made["mosaic"]
    assert "captured" not in made["mosaic"]
    launch = get("tpu").launch(made)
    assert [source for source, _ in launch.operands] == [0]
    assert len(Job.of("", made.kernel, launch).operands) == 1
    # The same, if all devices have the number, whatever operands say.
    asked = ask_for_device_numbers(call.kernel)
    operands = [np.asarray(x), *[np.int32(9)] * (len(asked.inputs) - 1)]
    found = run_devices(asked, [operands] * 4, [None] * 4, pl.Checked())
    assert [int(o[0, 0, 0]) for (o,) in found] == [0, 1, 10, 11]
    assert [int(o[1, 0, 0]) for (o,) in found] == [0, 1, 2, 3]


def test_kernels_that_talk_to_nobody_take_their_place_as_an_operand():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + lax.axis_index("x")

    def add(x, axis, size):
        return pl.pallas_call(kernel, S(x.shape, x.dtype))(x)

    assert "tpu.device_id" not in compiled(add, [BLOCK])["mosaic"]


def shift(x, axis, size, barrier, **params):
    def kernel(x_ref, o_ref, send_sem, recv_sem):
        _, left, right = neighbours(axis, size)
        if barrier:
            meet(axis, left, right)
        pltpu.async_remote_copy(
            x_ref, o_ref, send_sem, recv_sem, device_id=(right,)
        ).wait()

    return pl.pallas_call(
        kernel,
        S(x.shape, x.dtype),
        in_specs=[ANYWHERE],
        out_specs=ANYWHERE,
        scratch_shapes=[DMA, DMA],
        compiler_params=pltpu.CompilerParams(**params),
    )(x)


def test_the_barrier_semaphore_needs_a_collective_id_and_nothing_else_does():
    def launch(**options):
        made = compiled(lambda x, **mesh: shift(x, **mesh, **options), [BLOCK])
        return get("tpu").launch(made)

    launch(barrier=False)
    with pytest.raises(SpecError, match="needs a collective_id"):
        launch(barrier=True)
    with pytest.raises(SpecError, match="does not use"):
        launch(barrier=False, collective_id=2)


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v5e", "7x"])
def test_collectives_compile(chip):
    jobs = []
    for name, case in CASES.items():
        made = compiled(*case)
        job = Job.of(name, made.kernel, get("tpu").launch(made))
        jobs.append(replace(job, devices=DEVICES))
    assert {r.name: r.error for r in compile_all(jobs, chip) if not r.ok} == {}


# --- products of the library, by copies of their own ---


def product(operation):
    blocks = kernels.CollectiveMatmulConfig(kernels.MatmulConfig(64, 128, 128))
    return lambda x, y, axis, size: operation(x, y, axis=axis, config=blocks)


# Two halves of whole blocks; sizes that are padded; too few rows for two halves.
PRODUCTS = {
    "all_gather_matmul": [(128, 256), (100, 300), (5, 37)],
    "matmul_reduce_scatter": [(4 * 128, 256), (4 * 100, 300), (4 * 5, 37)],
}


def products(dtype, columns=200):
    """With config.override(target=...), a TPU: there they are kernels of this kind."""
    for name, shapes in PRODUCTS.items():
        for shape in shapes:
            given = [S((DEVICES, *s), dtype) for s in (shape, (shape[1], columns))]
            each = over_mesh(product(getattr(kernels, name)), DEVICES)
            with config.override(target="v5e"):
                (call,) = calls_in(each, *given)
            yield f"{name} {shape}", Compiled(get("tpu"), call.kernel, call.options)


def test_products_copy_in_both_directions():
    texts = {name: made["mosaic"] for name, made in products("bfloat16")}
    copies = {name: text.count("source_semaphore(") for name, text in texts.items()}
    for name, rows in PRODUCTS.items():
        few = f"{name} {rows[2]}"
        assert all(copies[f"{name} {r}"] == 2 * copies[few] > 0 for r in rows[:2])


@pytest.mark.tpu
def test_products_compile():
    jobs = []
    for name, made in products("bfloat16"):
        job = Job.of(name, made.kernel, get("tpu").launch(made))
        jobs.append(replace(job, devices=DEVICES))
    assert {r.name: r.error for r in compile_all(jobs, "v5e") if not r.ok} == {}


# --- cores of one chip ---


def on_cores(count: int) -> Compiled:
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=count)

    def kernel(x_ref, o_ref, buffer, semaphore):
        core = lax.axis_index("core")
        pltpu.sync_copy(x_ref.at[core], buffer)
        pltpu.core_barrier(semaphore, core_axis_name="core")
        pltpu.sync_copy(buffer, o_ref.at[core])

    like = S((count, *BLOCK), F32)
    scratch = [pltpu.VMEM(BLOCK, F32), REGULAR]
    call = pl.kernel(kernel, like, mesh=mesh, scratch_shapes=scratch)
    (found,) = calls_in(call, like)
    return Compiled(get("tpu"), found.kernel, found.options)


def test_cores_are_signalled_by_number():
    text = on_cores(2)["mosaic"]
    assert "dimension_semantics<core_parallel>" in text
    assert "core_id" in text
    assert "core_parallel" not in on_cores(1)["mosaic"]


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v4", "v5p"])
def test_meshes_of_one_and_two_cores_compile(chip):
    made = [on_cores(count) for count in (1, 2)]
    jobs = [Job.of("k", m.kernel, get("tpu").launch(m)) for m in made]
    assert [r.error for r in compile_all(jobs, chip)] == ["", ""]
