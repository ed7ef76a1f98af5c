"""No index, however wrong, leaves its memory; too much of anything is an error."""

import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import ResourceError
from tests.conftest import ROOT
from tests.share import SHARE

SHORT_OPERAND = """
import numpy as np
from tests.backends.cpu.direct import Code, Guarded
from tests.ir.kernels import vector_add

memory = Guarded()
code = Code(vector_add(64, 16), optimise=False, memory=memory)
whole = np.zeros(64, np.float32)
code(whole, whole)
print("still here", flush=True)
memory.place = lambda array, place=memory.place: place(array[:63])
code(whole, whole)
print("not noticed")
"""


@pytest.mark.machine_only
def test_more_than_a_hundred_hostile_kernels_stay_inside(run_python):
    printed = run_python("-m", "tests.backends.cpu.hostile").splitlines()
    count = int(printed[-1].split()[0])
    assert count == len(printed) - 1 >= 100 // SHARE


def test_one_element_too_far_is_noticed():
    """The guard pages are where they should be."""
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OPERAND], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "still here\n"
    assert done.returncode == -signal.SIGSEGV


# --- what is too large ---


def scratch_of(n: int):
    def kernel(i_ref, o_ref, scratch):
        scratch[i_ref[0]] = 1.0
        o_ref[...] = jnp.full_like(o_ref, scratch[i_ref[1]])

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        scratch_shapes=[pltpu.VMEM((n,), jnp.float32)],
    )
    return call(jnp.array([3, 5]))


@pytest.mark.parametrize("n", [2**48, 2**50])
def test_scratch_that_no_memory_holds(n: int):
    """More bytes than a process has addresses: a system that promises more memory than
    it has (overcommit) refuses them, too."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory for the kernel's"):
        scratch_of(n)


@pytest.mark.parametrize("n", [2**60, 2**62, 2**70])
def test_scratch_that_cannot_exist(n: int):
    """Its size would wrap around, and the kernel write to what it does not have."""
    with pytest.raises(ResourceError, match="more memory for temporaries than the"):
        scratch_of(n)


def test_a_block_that_no_memory_holds():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[:8] + jnp.sum(x_ref[...])

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        in_specs=[pl.BlockSpec((2**48,), lambda: (0,), fill=0.0)],
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory for the kernel's"):
        call(jnp.ones(8))


@pytest.mark.filterwarnings("ignore::pallasite.errors.PerformanceWarning")
def test_a_grid_that_could_never_run():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((1, 1), lambda i, j, k: (i, j))
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32),
        grid=(2**31 - 1, 2**31 - 1, 4),
        in_specs=[spec],
        out_specs=spec,
    )
    with pytest.raises(ResourceError, match="more programs than the CPU"):
        call(jnp.ones((8, 8)))


def test_a_negative_dynamic_grid_runs_nothing():
    def kernel(x_ref, o_ref):
        o_ref[...] = -x_ref[...]

    spec = pl.BlockSpec((1,), lambda i: (i,))

    @jax.jit
    def run(n, x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
            grid=(n,),
            in_specs=[spec],
            out_specs=spec,
            input_output_aliases={0: 0},
        )(x)

    assert (run(jnp.int32(-(2**31)), jnp.ones(8)) == 1).all()
    assert (run(jnp.int32(4), jnp.ones(8)) == jnp.repeat(jnp.array([-1, 1]), 4)).all()
