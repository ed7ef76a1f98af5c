"""No access of the Mosaic text is outside, whatever data say (`bounds.py`).

Every module that a test simulates is proved, too: `simulate.py` asks the same.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pallasite as pl
from pallasite import config, kernels
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, Options, get
from pallasite.backends.tpu.memory import Memory
from pallasite.ir.types import I32
from pallasite.kernels import masks
from pallasite.passes.lower import place_windows as windows
from pallasite.passes.run import run as run_passes
from pallasite.sites import calls_in
from pallasite.target import TPUS
from tests.backends.tpu.bounds import (
    Range,
    _and,
    _or,
    _quotient,
    _remainder,
    _xor,
    outside,
)
from tests.backends.tpu.hostile import CASES as HOSTILE
from tests.backends.tpu.test_hostile import FINE
from tests.backends.tpu.test_remote import CASES as REMOTE
from tests.backends.tpu.test_remote import DEVICES
from tests.backends.tpu.test_remote import compiled as compiled_remote

S, F32 = jax.ShapeDtypeStruct, jnp.float32
ANY, SMEM, DMA = pl.ANY, pltpu.SMEM, pltpu.SemaphoreType.DMA
NUMBERS, ROWS = S((8,), jnp.int32), S((64, 256), F32)
OUT = S((8, 128), F32)
ROOT = Path(__file__).parents[3]


def called(kernel, *scratch, spaces=(SMEM, None), out=OUT, grid=(2,)):
    specs = [pl.BlockSpec(memory_space=s) for s in spaces]
    options = {"out_shape": out, "scratch_shapes": scratch, "grid": grid}
    return pl.pallas_call(kernel, in_specs=specs, **options), NUMBERS, ROWS


# --- indices that data decide, each in another kind of access ---


def scalar_load():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = x_ref[:8, :128] * n_ref[n_ref[0]].astype(F32)

    return called(kernel)


def scalar_store():
    def kernel(n_ref, x_ref, o_ref, s_ref):
        s_ref[n_ref[0], 1] = n_ref[1]
        o_ref[...] = x_ref[:8, :128] * s_ref[0, n_ref[2]].astype(F32)

    return called(kernel, SMEM((4, 4), jnp.int32))


def row_of_vectors():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(x_ref[n_ref[0], :128], (8, 128))

    return called(kernel)


def rows_and_lanes():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(n_ref[0], 8), pl.ds(n_ref[1], 128)]

    return called(kernel)


def rows_with_a_stride():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(n_ref[0], 8, stride=2), :128]

    return called(kernel)


def stored_rows():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = x_ref[:8, :128]
        o_ref[pl.ds(n_ref[0], 3), :] = x_ref[:3, :128]

    return called(kernel)


def added_rows():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        pl.atomic_add(o_ref, (n_ref[0], slice(None)), x_ref[0, :128])

    return called(kernel)


def views_of_views():
    def kernel(n_ref, x_ref, o_ref):
        part = x_ref.at[pl.ds(8 * n_ref[0], 32)].at[pl.ds(8 * n_ref[1], 8)]
        o_ref[...] = part[:, :128]

    return called(kernel)


def rounds_of_data():
    """A loop as long as data say, and one whose index is carried."""

    def kernel(n_ref, x_ref, o_ref):
        def step(i, row):
            o_ref[i, :] = x_ref[row, :128]
            return row + n_ref[i]

        lax.fori_loop(0, n_ref[0], step, n_ref[1])

    return called(kernel)


def until_data_say():
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        def step(i):
            o_ref[0, :] += x_ref[i, :128]
            return 2 * i + n_ref[i]

        lax.while_loop(lambda i: i != n_ref[0], step, n_ref[1])

    return called(kernel)


def copied_rows():
    def kernel(n_ref, x_ref, o_ref, buffer, semaphore):
        rows = x_ref.at[pl.ds(8 * n_ref[0], 8)]
        pltpu.sync_copy(rows, buffer.at[n_ref[1]])
        o_ref[...] = buffer[n_ref[2], :, :128]

    return called(kernel, pltpu.VMEM((3, 8, 256), F32), DMA, spaces=(SMEM, ANY))


def semaphores_of_data():
    def kernel(n_ref, x_ref, o_ref, buffer, semaphores):
        rows = x_ref.at[pl.ds(0, 8)]
        copy = pltpu.make_async_copy(rows, buffer, semaphores.at[n_ref[0]])
        copy.start()
        copy.wait()
        o_ref[...] = buffer[:, :128]

    return called(kernel, pltpu.VMEM((8, 256), F32), DMA((2,)), spaces=(SMEM, ANY))


def signals_of_data():
    def kernel(n_ref, x_ref, o_ref, semaphores):
        semaphore = semaphores.at[n_ref[0]]
        pl.semaphore_signal(semaphore, 1)
        pl.semaphore_wait(semaphore, 1)
        o_ref[...] = x_ref[:8, :128]

    return called(kernel, pltpu.SemaphoreType.REGULAR((3,)))


def prefetched(index_map, **options):
    def kernel(n_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1.0

    block = pl.BlockSpec((8, 128), index_map, **options)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2,),
        in_specs=[block],
        out_specs=pl.BlockSpec((8, 128), lambda i, n: (i, 0)),
    )
    out = S((16, 128), F32)
    return pl.pallas_call(kernel, out_shape=out, grid_spec=spec), NUMBERS, ROWS


def prefetched_blocks():
    return prefetched(lambda i, n: (n[i], n[i + 1]))


def prefetched_twice():
    """A number of data says which number says which block."""
    return prefetched(lambda i, n: (n[n[i]], 0))


def inner_pipeline():
    def kernel(n_ref, x_ref, o_ref):
        def body(x_block, o_block):
            o_block[...] = x_block[...] + 1.0

        pltpu.emit_pipeline(
            body,
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (n_ref[i], 0))],
            out_specs=[pl.BlockSpec((8, 128), lambda i: (n_ref[i + 4], 0))],
        )(x_ref, o_ref)

    call, *operands = called(kernel, spaces=(SMEM, ANY), out=S((64, 128), F32), grid=())
    return call, *operands


IN_BODIES = (
    scalar_load,
    scalar_store,
    row_of_vectors,
    rows_and_lanes,
    rows_with_a_stride,
    stored_rows,
    added_rows,
    views_of_views,
    rounds_of_data,
    until_data_say,
    copied_rows,
    semaphores_of_data,
    signals_of_data,
    prefetched_twice,
)
IN_WINDOWS = (prefetched_blocks, prefetched_twice, inner_pipeline)
each_case = pytest.mark.parametrize(
    "case", dict.fromkeys((*IN_BODIES, *IN_WINDOWS)), ids=lambda case: case.__name__
)


def all_outside(function, *operands, chip=None) -> list[str]:
    with config.override(target=chip):
        calls = calls_in(function, *operands)
    assert calls
    options = Options(chip=None if chip is None else TPUS[chip])
    found = []
    for call in calls:
        compiled = Compiled(get("tpu"), run_passes(call.kernel), options, shared=())
        found += outside(compiled)
    return found


@each_case
@pytest.mark.parametrize("chip", [None, "v6e"])
def test_what_data_decide_is_inside(case, chip):
    assert all_outside(*case(), chip=chip) == []


def unclamped(self, operand, limit):
    return self.convert(self.name(operand), self.tile_type(operand), I32)


@pytest.mark.parametrize("case", IN_BODIES, ids=lambda case: case.__name__)
def test_an_index_that_is_not_clamped_is_found(case, monkeypatch):
    monkeypatch.setattr(Memory, "_clamped", unclamped)
    found = all_outside(*case())
    assert any("-2147483648" in each for each in found), found


@pytest.mark.parametrize("case", IN_WINDOWS, ids=lambda case: case.__name__)
def test_a_block_that_is_not_clamped_is_found(case, monkeypatch):
    monkeypatch.setattr(windows, "place_windows", lambda kernel: kernel)
    monkeypatch.setattr(Memory, "_clamped", unclamped)
    assert all_outside(*case()) != []


@pytest.mark.filterwarnings("ignore::pallasite.errors.PallasWarning")
@pytest.mark.parametrize("name", sorted(FINE))
def test_what_only_looks_hostile_stays_inside(name):
    with jax.enable_x64(True):
        assert all_outside(*HOSTILE[name]()) == []


@pytest.mark.parametrize("name", REMOTE)
def test_copies_between_devices_stay_inside(name):
    assert outside(compiled_remote(*REMOTE[name]), DEVICES) == []


def test_kernels_that_read_tables_stay_inside():
    """Pages by a table, groups by their sizes, and versions of a causal mask."""
    i32, bf16 = (partial(S, dtype=dtype) for dtype in (jnp.int32, jnp.bfloat16))
    causal = partial(kernels.attention, mask=masks.Causal())
    rows = bf16((1, 1536, 1, 128))
    pages, table = bf16((64, 16, 2, 128)), i32((4, 8))
    cases = [
        (kernels.grouped_matmul, bf16((512, 256)), bf16((4, 256, 256)), i32((4,))),
        (kernels.paged_attention, bf16((4, 8, 128)), pages, pages, i32((4,)), table),
        (causal, rows, rows, rows),
    ]  # fmt: skip
    for function, *operands in cases:
        assert all_outside(function, *operands, chip="v6e") == []


def test_ranges():
    assert _and(Range(0, 100), Range(-8, -8)) == Range(0, 100)
    assert _and(Range(-5, 100), Range(0, 7)) == Range(0, 7)
    assert _and(Range(-5, 100), Range(-8, -8)) is None
    assert _or(Range(4, 5), Range(0, 9)) == Range(4, 15)
    assert _or(Range(-8, -8), Range(3, 3)) == Range(-5, -5)
    assert _xor(Range(4, 5), Range(0, 9)) == Range(0, 15)
    assert _xor(Range(1, 1), Range(1, 1)) == Range(0, 0)
    assert _quotient(Range(-9, 9), Range(2, 4)) == Range(-4, 4)
    assert _quotient(Range(0, 9), Range(0, 4)) is None
    assert _remainder(Range(-9, 3), Range(4, 4)) == Range(-3, 3)
    assert _remainder(Range(9, 10), Range(4, 4)) == Range(1, 2)
    assert _remainder(Range(7, 8), Range(4, 4)) == Range(0, 3)


LIBRARY = """
import sys
from pallasite.backends.tpu import TpuBackend
from tests.backends.tpu.bounds import outside
import benchmarks.tpu_library as library

launch = TpuBackend.launch

def proved(self, compiled):
    assert outside(compiled, devices=4) == [], compiled.kernel.name
    print("proved", file=sys.stderr)
    return launch(self, compiled)

TpuBackend.launch = proved
library.main("ours", "v6e")
"""


@pytest.mark.slow
def test_kernels_that_jax_ships_stay_inside():
    """In a process of its own: they are run as they are, after `install`."""
    command = [sys.executable, "-W", "ignore", "-c", LIBRARY]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert made.stderr.count("proved") >= 14
