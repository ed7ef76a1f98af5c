"""Several programs on a block of threads, one after another (`authored.rounds`)."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.backends import base, cuda
from pallasite.backends.cuda import emit
from pallasite.target import GPUS
from tests.backends.cuda import host
from tests.backends.cuda.test_plgpu import (
    F32,
    needs_compiler,
    needs_nvrtc,
    operands,
    out,
    ring,
    run,
    text,
)
from tests.share import share_of


@pytest.fixture
def two_cores(monkeypatch):
    chip = replace(GPUS["h100"], cores=2)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)


# --- of one warpgroup ---


def tiles_of_programs(x_ref, o_ref, buffer, barrier, steps=2):
    """Each program doubles some tiles; barriers are in another phase at the end."""

    @pl.loop(0, steps)
    def _(i):
        height = buffer.shape[0]
        rows = pl.ds((pl.program_id(0) * 3 + i) * height, height)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], buffer, barrier)
        plgpu.barrier_wait(barrier)
        buffer[...] = buffer[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, o_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)


def of_programs(x, kernel=tiles_of_programs, rows=160):
    memory = [plgpu.SMEM((rows, 128), F32), plgpu.Barrier()]
    grid = dict(grid=(x.shape[0] // 480,), grid_names=("i",))
    return plgpu.kernel(kernel, out(*x.shape), scratch_shapes=memory, **grid)(x)


@needs_compiler
def test_blocks_of_threads_run_several_programs(tmp_path, two_cores):
    """As many blocks as run at a time, of whose programs each has fresh barriers."""
    (x,) = operands((9 * 480, 128), dtype=F32)
    three = partial(tiles_of_programs, steps=3)
    found = text(partial(of_programs, kernel=three), x)
    assert "for (int number = blockIdx.x;; number += 4)" in found
    assert emit.Launched.of(found).programs == 4
    got = run(partial(of_programs, kernel=three), x, folder=tmp_path)
    np.testing.assert_array_equal(got, 2 * x)


def longer_later(*refs):
    tiles_of_programs(*refs, steps=pl.program_id(0) % 3)


@pytest.mark.parametrize(
    "programs, options",
    [
        (4, {}),  # all of them run at a time
        (9, {"kernel": longer_later}),  # the chip balances them
        (9, {"rows": 80}),  # how many run at a time is for ptxas to say
    ],
)
def test_other_programs_have_blocks_of_their_own(programs, options, two_cores):
    (x,) = operands((programs * 480, 128), dtype=F32)
    found = text(partial(of_programs, **options), x)
    assert "number" not in found
    assert emit.Launched.of(found).programs == programs


def test_programs_without_shared_memory_have_blocks_of_their_own(two_cores):
    def doubled_rows(x_ref, o_ref):
        rows = pl.ds(pl.program_id(0) * 128, 128)
        o_ref[rows] = x_ref[rows] * 2
        plgpu.wait_smem_to_gmem(0)

    grid = dict(grid=(300,), grid_names=("i",))
    function = plgpu.kernel(doubled_rows, out(300 * 128), **grid)
    found = text(function, *operands((300 * 128,), dtype=F32))
    assert emit.Launched.of(found).programs == 300


# --- of several ---


ALL_TIMINGS = (*host.TIMINGS, *host.LATE_WARPGROUPS)
BETWEEN_PROGRAMS = re.compile(
    r"      if \(number >= 3\) break;\n"
    r"(      stores_before_copies\(\);\n)?"
    r"      meet\(0, 384\);\n"
    r"(      if \(thread == 0\) \{\n(?:        barrier_\w+\(.*\n){8}"
    r"        barriers_made\(\);\n      \}\n)?"
    r"      meet\(0, 384\);\n    \}\n"
)


@needs_compiler
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_roles_run_several_programs(steps, tmp_path, two_cores):
    """Five programs on two blocks of threads. With an odd number of steps, barriers of
    the ring are left in different phases, some of which nobody has waited for."""
    x, y = operands((5 * 128, steps * 64), (steps * 64, 128))
    function = partial(ring, steps=steps)
    assert emit.Launched.of(text(function, x, y)).programs == 2
    (kernel,) = pl.lower(function)(x, y).kernels
    given = [np.asarray(x), np.asarray(y)]
    first, *others = ALL_TIMINGS
    timings = (first, *share_of(others, steps))
    (got,) = host.run(kernel, given, tmp_path, timings=timings)
    want = x.astype(F32) @ y.astype(F32)
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=5e-2)


def test_what_roles_do_between_programs(two_cores):
    """All meet, one makes the barriers anew, all meet: in each role's own loop."""
    found = text(ring, *operands((5 * 128, 192), (192, 128)))
    ends = BETWEEN_PROGRAMS.findall(found)
    assert [bool(fence) for fence, _ in ends] == [True, True, False]
    assert [bool(made) for _, made in ends] == [True, False, False]
    roles = found[found.index("const u32 role") :].split("const u32 thread = ")[1:]
    assert len(roles) == 3
    for role in roles:
        before, loop, after = role.partition("for (int number = blockIdx.x;; number")
        assert loop and before.count("_registers<") == 1
        assert "_registers<" not in after and "map_seen(" not in after
        assert "map_seen(" in before and "__syncthreads" not in role


@needs_nvrtc
def test_roles_of_several_programs_are_compiled(two_cores):
    """Registers are exchanged once, and suffice."""
    (kernel,) = pl.lower(ring)(*operands((5 * 128, 192), (192, 128))).kernels
    compiled = base.Compiled(base.get("cuda"), kernel, base.Options())
    assert compiled["ptx"].count("\tsetmaxnreg.") == 3
    if "ptxas is not installed" not in compiled["ptxas"]:
        assert "0 bytes spill stores" in compiled["ptxas"]


MEET = "      meet(0, 384);\n"
MADE = r"((?:      if \(thread == 0\) \{\n(?:        .*\n)*      \}\n)?)"
BOTH = re.compile(re.escape(MEET) + MADE + re.escape(MEET))
MISTAKES = {
    "one role misses a meeting": lambda found: found.replace(MEET, "", 1),
    "no first meeting": lambda found: BOTH.sub(rf"\1{MEET}", found),
    "no second meeting": lambda found: BOTH.sub(rf"{MEET}\1", found),
    "old barriers": lambda found: re.sub(r" {8}barrier_\w+\(shared_.*", "", found),
    "no waits": lambda found: found.replace("copies_reading<0>();", "{}"),
}


@needs_compiler
@pytest.mark.parametrize("change", MISTAKES.values(), ids=MISTAKES)
def test_the_host_sees_what_goes_wrong_between_programs(change, tmp_path, two_cores):
    x, y = operands((5 * 128, 192), (192, 128))
    (kernel,) = pl.lower(ring)(x, y).kernels
    code = host.Code(kernel, tmp_path, edit=change)
    want = np.asarray(x.astype(F32) @ y.astype(F32))

    def run_all():
        for timing in ALL_TIMINGS:
            (got,) = code(np.asarray(x), np.asarray(y), timing=timing)
            np.testing.assert_allclose(got, want, rtol=1e-2, atol=5e-2)

    with pytest.raises(AssertionError):
        run_all()
