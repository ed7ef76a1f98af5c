"""Pieces of blocks that adjoin in their array become one larger window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import sites
from pallasite import tpu as pltpu
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.parse import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.split_accesses import split_accesses
from pallasite.passes.run import run
from pallasite.passes.schedule.joined_windows import joined_windows
from pallasite.passes.schedule.previous_blocks import previous_blocks

F32, BF16 = jnp.float32, jnp.bfloat16
ROWS, WIDTH, KEPT = 8, 16, 3


def carried(start=0.0, dtype=F32, length=5 * ROWS, first=0, join=None, fill=None):
    """A convolution along rows that keeps the last rows of a block for the next."""

    def kernel(x_ref, o_ref, last_ref):
        @pl.when(pl.program_id(1) == first)
        def _():
            last_ref[...] = jnp.full_like(last_ref, start)

        new = x_ref[...].astype(F32)
        x = (join or jnp.concatenate)([last_ref[...], new])
        y = sum(x[n : n + ROWS] * (n + 1.5) for n in range(KEPT + 1))
        o_ref[...] = y.astype(o_ref.dtype)
        last_ref[...] = new[ROWS - KEPT :]

    shape = jax.ShapeDtypeStruct((2, length, WIDTH), dtype)
    spec = pl.BlockSpec((None, ROWS, WIDTH), lambda i, j: (i, j, 0), fill=fill)
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(2, pl.cdiv(length, ROWS)),
        in_specs=[spec],
        out_specs=pl.BlockSpec(spec.block_shape, spec.index_map),
        scratch_shapes=[pltpu.VMEM((KEPT, WIDTH), F32)],
    )
    return previous_blocks(run(sites.kernels_in(call, shape)[0]))


def check(before):
    """The larger window, if there is one; results are the same either way."""
    after = joined_windows(before)
    verify(after)
    shape, dtype = before.inputs[0].ref.shape, before.inputs[0].ref.dtype.np
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    want, got = (
        np.asarray(Walker(k, NumpyNumbers()).run([x.copy()])[0], np.float32)
        for k in (before, after)
    )
    np.testing.assert_array_equal(got, want)
    return after


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("start", [0.0, 2.0])
@pytest.mark.parametrize("length", [5 * ROWS, 2 * ROWS, 3 * ROWS + 5])
def test_rows_before_a_block_are_in_its_window(dtype, start, length):
    after = check(carried(start, dtype, length))
    assert "concatenate" not in after.text and "select_n" not in after.text
    size, past = ROWS + KEPT, -length % ROWS
    window = f"in[squeezed 1, element {size} pad ({KEPT}, {past}), {WIDTH}] fill"
    assert f"{window} {start}" in after.text
    assert split_accesses(after).text.count("= load") == KEPT + 1


def test_rows_after_a_block_and_a_fill_of_its_own():
    after = check(carried(fill=0))
    assert "concatenate" not in after.text
    before = carried(2.0, fill=0)
    assert joined_windows(before) is before


@pytest.mark.parametrize(
    "options",
    [
        {"first": 1},  # the first step shows a block that is not before it
        {"start": 0.1, "dtype": BF16},  # rounded, it would be another number
        {"join": lambda parts: jnp.concatenate(parts[::-1])},
        {"join": lambda parts: jnp.concatenate([parts[0][::-1], parts[1]])},
        {"join": lambda parts: jnp.concatenate([parts[0][:2], parts[1], parts[1][:1]])},
        {"join": lambda parts: jnp.concatenate([parts[0] + 1.0, parts[1]])},
    ],
)
def test_other_pieces_stay(options):
    before = carried(**options)
    check(before)
    assert "concatenate" in joined_windows(before).text


def around(rows, guarded=True, back=1):
    """Blocks above and below, as three windows on one array of the IR."""
    above = "select_n %first, %up, %zero" if guarded else "add %up, %up"
    windows = "windows=(in[4, 4], in[4, 4], in[4, 4], out[4, 4])"
    grid = f"grid=({rows // 4},), {windows}"
    names = ("above", "here", "below", "out")
    blocks = ", ".join(f"%{name}: ref<f32[4,4] block>" for name in names)
    return parse_kernel(f"""
kernel @around(%x: ref<f32[{rows},4] any>, %o: ref<f32[{rows},4] any>) outputs 1 {{
  pipeline %x, %x, %x, %o {{{grid}, semantics=("parallel",)}}
    map (%i0: i32) {{
      %0: i32 = constant {{value={back}}}
      %1: i32 = sub %i0, %0
      %2: i32 = constant {{value=0}}
      %3: i32 = max %1, %2
      yield %3, %2
    }}
    map (%i1: i32) {{
      %4: i32 = constant {{value=0}}
      yield %i1, %4
    }}
    map (%i2: i32) {{
      %5: i32 = constant {{value=1}}
      %6: i32 = add %i2, %5
      %7: i32 = constant {{value=0}}
      yield %6, %7
    }}
    map (%i3: i32) {{
      %8: i32 = constant {{value=0}}
      yield %i3, %8
    }}
    body (%i4: i32, {blocks}) {{
      %last_step: i32 = constant {{value={rows // 4 - 1}}}
      %none: i32 = constant {{value=0}}
      %first: bool = eq %i4, %none
      %last: bool = lt %i4, %last_step
      %number: f32 = constant {{value=0.0}}
      %zero: f32[1,4] = broadcast_in_dim %number {{shape=(1, 4), dims=()}}
      %up: f32[1,4] = load %above[3:+1, :]
      %head: f32[1,4] = {above}
      %x1: f32[4,4] = load %here[:, :]
      %down: f32[2,4] = load %below[0:+2, :]
      %zeros: f32[2,4] = broadcast_in_dim %number {{shape=(2, 4), dims=()}}
      %tail: f32[2,4] = select_n %last, %zeros, %down
      %all: f32[7,4] = concatenate %head, %x1, %tail {{axis=0}}
      %a: f32[4,4] = slice %all {{starts=(0, 0), limits=(4, 4), strides=(1, 1)}}
      %b: f32[4,4] = slice %all {{starts=(3, 0), limits=(7, 4), strides=(1, 1)}}
      %c: f32[4,4] = sub %a, %b
      store %out[:, :] = %c
    }}
}}
""")


@pytest.mark.parametrize("rows", [4, 16])
def test_blocks_above_and_below(rows):
    after = check(around(rows))
    assert "in[element 7 pad (1, 2), 4] fill 0.0" in after.text
    assert "concatenate" not in after.text
    for other in (around(rows, back=2), around(rows, guarded=False)):
        assert rows == 4 or joined_windows(other) is other
