"""Copies and signals between devices, as Mosaic text and compiled by libtpu."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasite as pl
from pallasite import config, kernels
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, get
from pallasite.errors import SpecError
from pallasite.primitive import calls_in
from pallasite.runtime.aot import Job, compile_all
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
    with pytest.raises(SpecError, match="does not use it"):
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
def test_meshes_of_one_and_two_cores_compile():
    made = [on_cores(count) for count in (1, 2)]
    jobs = [Job.of("k", m.kernel, get("tpu").launch(m)) for m in made]
    assert [r.error for r in compile_all(jobs, "v5p")] == ["", ""]
