"""Pipelines one after another, and those whose body waits for its copies."""

from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite import tpu as pltpu
from pallasite.errors import CheckError, KernelTypeError, SpecError
from tests.xla import put

F32 = jnp.float32
BLOCK = plgpu.BlockSpec((8, 32), lambda i: (i, 0))
GROUPS: Any = dict(num_threads=2, thread_name="group")


def run(kernel, *arrays, out=None, **options):
    return plgpu.kernel(kernel, arrays[0] if out is None else out, **GROUPS)(*arrays)


def pipeline(body, **options):
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(4,),
        memory_registers=40,
        in_specs=[BLOCK],
        out_specs=[BLOCK],
        wg_axis="group",
        num_compute_wgs=1,
        **options,
    )


def operand():
    return put(np.random.default_rng(0).normal(size=(32, 32)), F32)


@pytest.mark.parametrize("dynamic", (False, True))
def test_the_state_of_a_pipeline_changes_no_result(dynamic):
    P = plgpu.PipelinePipeline

    def kernel(x, o):
        def add(_, source, target):
            target[...] = source[...] + 1

        def inner(*memory):
            states = (P.START, P.STEADY, P.STOP)
            if dynamic:
                states = [jnp.int32(n) for n in states]
            for n, state in enumerate(states):
                run = pipeline(add, pipeline_state=state)
                run(x, o.at[n], allocations=memory)

        memory = pipeline(add).get_allocations(x, o.at[0])
        pl.run_scoped(inner, *memory, collective_axes="group")

    x = operand()
    out = jnp.zeros((3, 32, 32), F32)
    np.testing.assert_array_equal(run(kernel, x, out=out), jnp.stack([x + 1] * 3))


def test_another_state_is_refused():
    with pytest.raises(SpecError, match="pipeline_state is none of"):
        pipeline(lambda *_: None, pipeline_state="start")


def produced(waits=True):
    def kernel(x, o):
        def body(_, source, target, arrived):
            if waits:
                plgpu.barrier_wait(arrived)
            target[...] = source[...] * 2

        pipeline(body, manual_produced_barriers=True)(x, o)

    return kernel


def test_a_body_may_wait_for_its_copies():
    x = operand()
    np.testing.assert_array_equal(run(produced(), x), 2 * x)


def test_a_body_that_does_not_is_found():
    with pytest.raises((CheckError, KernelTypeError)):
        run(produced(waits=False), operand())


def test_a_view_is_made_of_transforms():
    def kernel(x, o):
        group = lax.axis_index("group")
        turned = x.transpose((1, 0))
        same = plgpu.transform_ref(x, turned.transforms[-1])
        same = plgpu.transform_ref(same, plgpu.SwizzleTransform(128))
        pl.when(group == 0)(lambda: o.at[...].set(same[...]))

    x = operand()
    np.testing.assert_array_equal(run(kernel, x), x.T)


def test_a_transform_that_is_none_is_refused():
    def kernel(x, o):
        plgpu.transform_ref(x, plgpu.TilingTransform((8, 32)))

    with pytest.raises(KernelTypeError, match="needs a transform of views"):
        run(kernel, operand())


@pytest.mark.parametrize("interpret", (None, True))
def test_scoped_floats_are_nans_if_asked_for(interpret):
    def kernel(o):
        def inner(floats, numbers):
            numbers[...] = jnp.ones_like(numbers)
            o[...] = floats[...] + numbers[...]

        pl.run_scoped(inner, pltpu.VMEM(o.shape, F32), pltpu.VMEM(o.shape, F32))

    out = put(np.zeros((8, 128)), F32)
    call = pl.pallas_call(kernel, out, interpret=interpret)
    with pl.enable_poison_buffers(True):
        assert np.isnan(call()).all()
    with pl.enable_poison_buffers(False):
        call()


def test_a_memory_ref_takes_an_array_type():
    made = pl.MemoryRef(inner_aval=operand(), memory_space=pl.ANY)
    assert (made.shape, made.dtype) == ((32, 32), np.dtype("float32"))
    assert made == pl.MemoryRef(operand(), pl.ANY)


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed")
def test_a_torch_kernel_needs_torch():
    with pytest.raises(ModuleNotFoundError, match="needs PyTorch"):
        plgpu.as_torch_kernel(lambda x: x)
