"""`interpret=pltpu.InterpretParams(...)`: what each of its fields does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import CheckError, SpecError, UnsupportedError

S, F32 = jax.ShapeDtypeStruct, jnp.float32
X = np.arange(32, dtype=np.float32).reshape(4, 8)
LIKE_X = S((4, 8), F32)
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
PARALLEL = pltpu.CompilerParams(dimension_semantics=("parallel",))


def run(kernel, params, *args, out=LIKE_X, **call):
    return np.asarray(pl.pallas_call(kernel, out, interpret=params, **call)(*args))


def overtaken(x_ref, o_ref, buffer, semaphore):
    """Reads a buffer before the copy to it is waited for."""
    buffer[...] = jnp.zeros_like(buffer)
    copy = pltpu.make_async_copy(x_ref, buffer, semaphore)
    copy.start()
    copy.wait()
    o_ref[...] = buffer[...] + 1


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
@pytest.mark.parametrize("seed", [None, 3])
def test_copies_move_early_late_or_at_random(mode, seed):
    params = pltpu.InterpretParams(dma_execution_mode=mode, random_seed=seed)
    scratch = [pltpu.VMEM((4, 8), F32), pltpu.SemaphoreType.DMA]
    got = run(overtaken, params, X, in_specs=[ANYWHERE], scratch_shapes=scratch)
    np.testing.assert_array_equal(got, X + 1)


def test_a_copy_that_is_not_waited_for_is_reported():
    def kernel(x_ref, o_ref, semaphore):
        pltpu.make_async_copy(x_ref, o_ref, semaphore).start()

    specs = dict(in_specs=[ANYWHERE], out_specs=ANYWHERE)
    dma = [pltpu.SemaphoreType.DMA]
    with pytest.raises(CheckError, match=r"a copy is .*(never waited|in flight)"):
        run(kernel, pltpu.InterpretParams(), X, scratch_shapes=dma, **specs)


def unwritten(x_ref, o_ref, memory_ref):
    memory_ref[0] = x_ref[0]
    o_ref[...] = memory_ref[...]


@pytest.mark.parametrize(("word", "value"), [("nan", np.nan), ("zero", 0)])
def test_what_unwritten_memory_holds(word, value):
    params = pltpu.InterpretParams(uninitialized_memory=word)
    got = run(unwritten, params, X, scratch_shapes=[pltpu.VMEM((4, 8), F32)])
    np.testing.assert_array_equal(got[0], X[0])
    np.testing.assert_array_equal(got[1:], np.full((3, 8), value))


def shifted(x_ref, o_ref):
    o_ref[...] = x_ref[pl.ds(pl.program_id(0) + 2, 4)]


def test_reads_past_the_end_are_reported_or_give_what_unwritten_memory_holds():
    with pytest.raises(CheckError, match="an index is out of bounds"):
        run(shifted, pltpu.InterpretParams(), X, grid=1)
    for word, value in (("nan", np.nan), ("zero", 0)):
        params = pltpu.InterpretParams(
            out_of_bounds_reads="uninitialized", uninitialized_memory=word
        )
        got = run(shifted, params, X, grid=1)
        np.testing.assert_array_equal(got[:2], X[2:])
        np.testing.assert_array_equal(got[2:], np.full((2, 8), value))


def test_gathers_past_the_end_give_what_unwritten_memory_holds():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = x_ref[i_ref[...]]

    params = pltpu.InterpretParams(out_of_bounds_reads="uninitialized")
    got = run(kernel, params, np.array([3, 9, 0, 4], np.int32), X)
    np.testing.assert_array_equal(got[[0, 2]], X[[3, 0]])
    assert np.isnan(got[[1, 3]]).all()


def test_floats_are_not_computed_where_that_is_asked_for():
    def kernel(x_ref, o_ref, count_ref):
        o_ref[...] = jnp.sin(x_ref[...]) @ x_ref[...].T
        count_ref[...] = lax.broadcasted_iota(jnp.int32, (4, 8), 0) + 1

    params = pltpu.InterpretParams(skip_floating_point_ops=True)
    call = pl.pallas_call(
        kernel, [S((4, 4), F32), S((4, 8), jnp.int32)], interpret=params
    )
    floats, integers = call(X)
    assert np.isinf(floats).all()
    np.testing.assert_array_equal(integers[:, 0], [1, 2, 3, 4])


def test_programs_are_recorded_with_their_core_and_shuffled_along_parallel_axes():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    rows = pl.BlockSpec((1, 8), lambda i, j: (i, 0))

    def programs(**fields):
        seen = []
        params = pltpu.InterpretParams(
            grid_point_recorder=lambda ids, core: seen.append((*ids, core)), **fields
        )
        semantics = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
        call = dict(grid=(4, 2), in_specs=[rows], out_specs=rows)
        got = run(kernel, params, X, compiler_params=semantics, **call)
        np.testing.assert_array_equal(got, X)
        return [tuple(map(int, program)) for program in seen]

    in_order = [(i, j) for i in range(4) for j in range(2)]
    assert programs() == [(i, j, 0) for i, j in in_order]
    assert programs(num_cores_or_threads=2) == [(i, j, i // 2) for i, j in in_order]
    shuffled = programs(random_seed=1)
    assert sorted(shuffled) == [(i, j, 0) for i, j in in_order] != shuffled
    assert shuffled == programs(random_seed=1) != programs(random_seed=2)


def racing(x_ref, o_ref):
    o_ref[0] = x_ref[0]


@pytest.mark.filterwarnings("ignore")
def test_races_are_reported_where_that_is_asked_for():
    rows = pl.BlockSpec((1, 8), lambda i: (i, 0))
    first = pl.BlockSpec((1, 8), lambda i: (0, 0))
    call = dict(grid=4, in_specs=[rows], out_specs=first, compiler_params=PARALLEL)
    run(racing, pltpu.InterpretParams(), X, out=S((1, 8), F32), **call)
    params = pltpu.InterpretParams(detect_races=True)
    with pytest.raises(CheckError, match="data race") as raised:
        run(racing, params, X, out=S((1, 8), F32), **call)
    assert raised.value.kind == "races"
    params = pltpu.InterpretParams(detect_races=True, on_race="warn")
    with pytest.warns(RuntimeWarning, match="data race"):
        got = run(racing, params, X, out=S((1, 8), F32), **call)
    np.testing.assert_array_equal(got, X[3:])


def test_a_field_is_one_of_its_values():
    with pytest.raises(SpecError, match="does not support this dma_execution_mode"):
        pltpu.InterpretParams(dma_execution_mode="later")
    with pytest.raises(SpecError, match="at least one core"):
        pltpu.InterpretParams(num_cores_or_threads=0)
    with pytest.raises(UnsupportedError, match="padded"):
        pltpu.InterpretParams(buffer_bounds="padded")


def test_under_jit_vmap_and_grad():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * x_ref[...]

    call = pl.pallas_call(kernel, S((8,), F32), interpret=pltpu.InterpretParams())
    np.testing.assert_array_equal(jax.jit(call)(X[0]), X[0] ** 2)
    np.testing.assert_array_equal(jax.vmap(call)(X), X**2)
    gradient = jax.grad(lambda x: call(x).sum())(X[1])
    np.testing.assert_array_equal(gradient, 2 * X[1])
