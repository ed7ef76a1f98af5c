"""Larger blocks on a TPU: where programs are many and small."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, Options, get
from pallasite.errors import ResourceError
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.run import run
from pallasite.passes.schedule.tpu_blocks import _Estimate, for_tpu
from pallasite.sites import kernels_in
from pallasite.target import TPUS, Memory
from tests.backends.tpu.harness import (
    CASES,
    emulated,
    kernel_of,
    random_arrays,
    run_compiled,
)
from tests.backends.triton.test_blocks import matmul
from tests.forms import all_forms
from tests.forms.form import SIZES
from tests.passes.test_reblock import COPY, head, rows
from tests.passes.test_same_meaning import outputs
from tests.zoo.attention import flash_scratch_call

# A chip that takes so long to start a program that all blocks are too small for it.
BLOCKS = "pallasite.passes.schedule.tpu_blocks"
SLOW_STARTS = replace(TPUS["v5e"], step_seconds=1.0)


FITS = {
    "v5e": "grid=(4, 8, 8), windows=(in[1024, 512], in[512, 512], out[1024, 512])",
    "v6e": "grid=(4, 4, 4), windows=(in[1024, 1024], in[1024, 1024], out[1024, 1024])",
}


@pytest.mark.parametrize("block", [128, 256, 512])
@pytest.mark.parametrize("chip, windows", FITS.items(), ids=FITS)
def test_small_blocks_become_what_fits(block: int, chip: str, windows: str):
    new = for_tpu(matmul(4096, block, block, block), TPUS[chip])
    verify(new)
    estimate = _Estimate.of(new, TPUS[chip])
    assert estimate is not None and estimate.vmem <= TPUS[chip].scoped_vmem
    assert windows in head(new)


def test_a_limit_on_memory_holds():
    kernel = matmul(4096, 128, 128, 128)
    for limit in (2 << 20, 8 << 20, 64 << 20):
        estimate = _Estimate.of(for_tpu(kernel, TPUS["v5e"], limit), TPUS["v5e"])
        assert estimate is not None and limit / 4 < estimate.vmem <= limit


@pytest.mark.parametrize("block", [(1024, 1024, 512), (512, 512, 1024)])
def test_large_blocks_stay(block):
    kernel = matmul(4096, *block)
    assert for_tpu(kernel, TPUS["v5e"]) is kernel


def attention(length: int, block: int) -> Kernel:
    shape = jax.ShapeDtypeStruct((8, length, 128), "bfloat16")
    call = partial(flash_scratch_call, is_causal=False, block_q=block, block_kv=block)
    (kernel,) = kernels_in(call, shape, shape, shape)
    return run(kernel)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_steps_of_a_running_softmax_are_gathered(chip: str):
    new = for_tpu(attention(2048, 512), TPUS[chip])
    verify(new)
    keys = "in[squeezed 1, 2048, 128]"
    windows = f"windows=(in[squeezed 1, 1024, 128], {keys}, {keys}"
    assert f"grid=(8, 2, 1), {windows}" in head(new)


def test_parts_of_windows_are_whole_tiles():
    """Steps of eight rows can be gathered, steps of four cannot."""
    for size, is_gathered in ((8, True), (4, False)):
        text = RUNNING_SUM.replace("[8,", f"[{size},").replace("[8, 4]", f"[{size}, 4]")
        new = for_tpu(parse_kernel(text), TPUS["v5e"])
        assert (f"windows=(in[{size * 8}, 4]" in head(new)) == is_gathered


RUNNING_SUM = """
kernel @k(%x: ref<f32[64,4] any>, %o: ref<f32[8,4] any>) outputs 1 {
  pipeline %x, %o {grid=(8,), windows=(in[8, 4], out[8, 4]), semantics=("arbitrary",)}
    map (%i: i32) { %z: i32 = constant {value=0} yield %i, %z }
    map (%i1: i32) { %z1: i32 = constant {value=0} yield %z1, %z1 }
    body (%s: i32, %xb: ref<f32[8,4] block>, %ob: ref<f32[8,4] block>) {
      %new: f32[8,4] = load %xb[:, :]
      %old: f32[8,4] = load %ob[:, :]
      %sum: f32[8,4] = add %new, %old
      store %ob[:, :] = %sum
    }
}
"""


def test_heads_that_share_pages_run_side_by_side():
    """Blocks of heads cannot grow: the body has no such dimension."""
    pages, heads = 4, 2

    def kernel(table_ref, x_ref, o_ref, sum_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] = jnp.maximum(sum_ref[...], x_ref[...])
        o_ref[...] = sum_ref[...]

    def function(table, x):
        page = pl.BlockSpec((None, None, 8, 128), lambda h, p, t: (t[p], h, 0, 0))
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, pages),
            in_specs=[page],
            out_specs=pl.BlockSpec((None, 8, 128), lambda h, p, t: (h, 0, 0)),
            scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)],
        )
        out = jax.ShapeDtypeStruct((heads, 8, 128), jnp.float32)
        return pl.pallas_call(kernel, out_shape=out, grid_spec=grid_spec)(table, x)

    x = np.random.default_rng(0).normal(size=(pages, heads, 8, 128)).astype("f4")
    arrays = [np.array([2, 0, 3, 1], "i4"), x]
    (before,) = map(run, kernels_in(function, *arrays))
    new = for_tpu(before, TPUS["v5e"])
    verify(new)
    assert "grid=(1, 4), windows=(in[squeezed 1, 2, 8, 128], out[2, 8, 128])" in head(
        new
    )
    (got,), (want,) = outputs(new, arrays), outputs(before, arrays)
    np.testing.assert_array_equal(got, want)


def test_blocks_without_room_are_cut():
    new = for_tpu(matmul(8192, 4096, 4096, 4096), TPUS["v5e"])
    verify(new)
    estimate = _Estimate.of(new, TPUS["v5e"])
    assert estimate is not None
    assert 4 << 20 < estimate.vmem <= TPUS["v5e"].scoped_vmem
    sizes = [d.size for w in estimate.blocks.found.pipeline.windows for d in w.dims]
    assert all(n % 128 == 0 for n in sizes)


def test_blocks_for_which_there_is_no_room_say_how_much_they_need():
    scan = '%b: f32[8,4] = scan %a {kind="sum", axis=0, reverse=False}'
    body = f"%a: f32[8,4] = load %xb[:, :] {scan} store %ob[:, :] = %b"
    text = rows(body, n=1 << 20, grid="(1,)").text
    text = text.replace("[8,4]", "[1048576,4]").replace("[8, 4]", "[1048576, 4]")
    with pytest.raises(ResourceError) as error:
        for_tpu(parse_kernel(text), TPUS["v5e"])
    assert str(error.value) == "\n".join(
        [
            "the blocks of a program do not fit in the VMEM of a core of v5e",
            "  kernel          k",
            "  needed          1073741824 bytes",
            "  available       134217728 bytes",
            "  x, dimension 0  'scan' runs along it",
            "  fix             use smaller blocks along the dimensions that are "
            "kept whole",
        ]
    )


def test_every_core_keeps_a_program():
    kernel = rows(COPY, n=32)
    assert "grid=(2,), windows=(in[16, 4]" in head(for_tpu(kernel, TPUS["v5p"]))
    assert "grid=(1,), windows=(in[32, 4]" in head(for_tpu(kernel, TPUS["v5e"]))


def test_most_kernels_have_larger_blocks():
    """So that the test below tests something."""
    kernels = [kernel_of(name) for name in CASES]
    changed = [for_tpu(k, SLOW_STARTS) is not k for k in kernels]
    assert sum(changed) > len(changed) / 4, dict(zip(CASES, changed, strict=True))


def simulated(kernel: Kernel, arrays) -> list[np.ndarray]:
    memories = {**SLOW_STARTS.memories, "vmem": Memory(1 << 30)}
    chip = replace(SLOW_STARTS, memories=memories)
    compiled = Compiled(get("tpu"), kernel, Options(chip=chip), shared=())
    return run_compiled(compiled, arrays)


@pytest.mark.parametrize("name", CASES)
def test_kernels_with_larger_blocks_are_right(name: str):
    kernel = kernel_of(name)
    arrays = random_arrays(kernel)
    for got, want in zip(
        simulated(kernel, arrays), emulated(kernel, arrays), strict=True
    ):
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=2e-2, atol=2e-2
        )


def test_statistics_in_results_are_kept_as_those_in_scratch():
    """Columns in all lanes, and one lane is stored to the results in the last step."""

    def kernel(x_ref, top_ref, total_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
            total_ref[...] = jnp.zeros_like(total_ref)

        x, old = x_ref[...].astype(jnp.float32), top_ref[...]
        top = jnp.maximum(old, x.max(-1, keepdims=True))
        grown = total_ref[...] * jnp.exp(old - top)
        total_ref[...] = grown + jnp.exp(x - top).sum(-1, keepdims=True)
        top_ref[...] = top

    column = jax.ShapeDtypeStruct((24, 1), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=(column, column),
        grid=(3, 3),
        in_specs=[pl.BlockSpec((8, 128), lambda i, j: (i, j))],
        out_specs=[pl.BlockSpec((8, 1), lambda i, j: (i, 0))] * 2,
    )
    x = jax.ShapeDtypeStruct((24, 384), jnp.bfloat16)
    (found,) = kernels_in(call, x)
    old = run(found)
    new = Compiled(get("tpu"), old, Options(chip=TPUS["v6e"])).scheduled
    assert "f32[32,128] = max" in new.text and "f32[32,1] = max" not in new.text
    arrays = random_arrays(old)
    for got, want in zip(simulated(old, arrays), emulated(old, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def second_differences(rows: int, n: int, width: int) -> Kernel:
    """Of the block above, this one and the one below."""
    last = n // rows - 1

    def kernel(above_ref, here_ref, below_ref, o_ref):
        i = pl.program_id(0)
        above = jnp.where(i > 0, above_ref[rows - 1 :, :], 0.0)
        below = jnp.where(i < last, below_ref[:1, :], 0.0)
        x = here_ref[...]
        up = jnp.concatenate([above, x[:-1]], axis=0)
        o_ref[...] = up - 2.0 * x + jnp.concatenate([x[1:], below], axis=0)

    block = (rows, width)
    specs = [
        pl.BlockSpec(block, lambda i: (jnp.maximum(i - 1, 0), 0)),
        pl.BlockSpec(block, lambda i: (i, 0)),
        pl.BlockSpec(block, lambda i: (jnp.minimum(i + 1, last), 0)),
    ]
    x = jax.ShapeDtypeStruct((n, width), jnp.float32)
    call = pl.pallas_call(
        kernel, out_shape=x, grid=(n // rows,), in_specs=specs, out_specs=specs[1]
    )
    (found,) = kernels_in(lambda x: call(x, x, x), x)
    return run(found)


def test_programs_that_see_their_neighbours_blocks_are_joined():
    """Windows of overlapping rows show the blocks of several programs."""
    kernel = second_differences(8, 4096, 2048)
    assert "grid=(64,)" in head(for_tpu(kernel, TPUS["v5e"]))
    kernel = second_differences(8, 256, 128)
    assert for_tpu(kernel, SLOW_STARTS) is not kernel
    arrays = random_arrays(kernel)
    (got,), (want,) = simulated(kernel, arrays), emulated(kernel, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name, whole",
    [
        ("softmax online over a grid", "softmax rows of 8"),
        ("rms norm in vector scratch over a grid", "rms norm rows of 16"),
    ],
)
def test_rows_in_parts_are_rows(name: str, whole: str):
    """Two turns along rows read them once, as whole rows are read."""
    forms = {form.name: form for form in all_forms()}
    grids = []
    for form in (forms[name], forms[whole]):
        structs = form.problem.structs(SIZES["part"])
        (made,) = kernels_in(form.make(SIZES["part"]), *structs)
        new = for_tpu(run(made), TPUS["v6e"])
        verify(new)
        grids.append(head(new).split(", semantics")[0])
    assert grids[0] == grids[1]


def test_rows_that_do_not_fit_stay_in_parts():
    columns = 1 << 22

    def kernel(x_ref, o_ref, sum_ref):
        turn, j = pl.program_id(0), pl.program_id(1)

        @pl.when((turn == 0) & (j == 0))
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(turn == 0)
        def _():
            sum_ref[...] += x_ref[...].sum(axis=1, keepdims=True)

        @pl.when(turn == 1)
        def _():
            o_ref[...] = x_ref[...] / sum_ref[...]

    shape = jax.ShapeDtypeStruct((8, columns), jnp.float32)
    spec = pl.BlockSpec((8, 2048), lambda t, j: (0, j))
    out = pl.BlockSpec((8, 2048), lambda t, j: (0, j * t))
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(2, columns // 2048),
        in_specs=[spec],
        out_specs=out,
        scratch_shapes=[pltpu.VMEM((8, 1), jnp.float32)],
    )
    (made,) = kernels_in(call, shape)
    estimate = _Estimate.of(for_tpu(run(made), TPUS["v6e"]), TPUS["v6e"])
    assert estimate is not None and estimate.vmem <= TPUS["v6e"].scoped_vmem
    assert len(estimate.grid) == 2
