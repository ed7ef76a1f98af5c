"""Strips: blocks of rows in a loop over a few rows each. Text in, text out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.schedule.row_strips import row_strips
from pallasite.sites import kernels_in
from tests.passes.test_promote import expect, program
from tests.passes.test_same_meaning import outputs
from tests.zoo import all_cases


def kernel(body: str) -> Kernel:
    """A kernel with blocks x[8,4], b[1,4] and o[8,4], and the given code."""
    text = f"""
    kernel @k(%x: ref<f32[16,4] any>, %b: ref<f32[1,4] any>, %o: ref<f32[16,4] any>)
        outputs 1 {{
      pipeline %x, %b, %o {{grid=(2,), windows=(in[8, 4], in[1, 4], out[8, 4]),
          semantics=("arbitrary",)}}
        map (%i: i32) {{ %z: i32 = constant {{value=0}} yield %i, %z }}
        map (%i1: i32) {{ %z1: i32 = constant {{value=0}} yield %z1, %z1 }}
        map (%i2: i32) {{ %z2: i32 = constant {{value=0}} yield %i2, %z2 }}
        body (%i3: i32, %xb: ref<f32[8,4] block>, %bb: ref<f32[1,4] block>,
              %ob: ref<f32[8,4] block>) {{
          {body}
        }}
    }}"""
    made = parse_kernel(text)
    verify(made)
    return made


def code(kernel: Kernel) -> str:
    """The body's ops."""
    lines = program(kernel).split("\n")
    start = next(n for n, line in enumerate(lines) if line.lstrip().startswith("body"))
    return expect("\n".join(lines[start + 1 : -1]))


NORM = """
%v: f32[8,4] = load %xb[:, :]
%w: f32[1,4] = load %bb[:, :]
%s: f32[8] = reduce %v {kind="sum", axes=(1,)}
%c: f32[8,1] = broadcast_in_dim %s {shape=(8, 1), dims=(0,)}
%d: f32[8,4] = broadcast_in_dim %c {shape=(8, 4), dims=(0, 1)}
%e: f32[8,4] = div %v, %d
%f: f32[8,4] = broadcast_in_dim %w {shape=(8, 4), dims=(0, 1)}
%g: f32[8,4] = mul %e, %f
store %ob[:, :] = %g
"""


def test_rows_are_cut_and_what_all_share_comes_first():
    cut = row_strips(kernel(NORM), 32)
    verify(cut)
    assert code(cut) == expect(
        """
        %w: f32[1,4] = load %bb[:, :]
        %0: i32 = constant {value=0}
        %1: i32 = constant {value=8}
        %2: i32 = constant {value=2}
        for %0, %1, %2
          body (%row: i32) {
            %3: f32[2,4] = load %xb[%row:+2, :]
            %4: f32[2] = reduce %3 {kind="sum", axes=(1,)}
            %5: f32[2,1] = broadcast_in_dim %4 {shape=(2, 1), dims=(0,)}
            %6: f32[2,4] = broadcast_in_dim %5 {shape=(2, 4), dims=(0, 1)}
            %7: f32[2,4] = div %3, %6
            %8: f32[2,4] = broadcast_in_dim %w {shape=(2, 4), dims=(0, 1)}
            %9: f32[2,4] = mul %7, %8
            store %ob[%row:+2, :] = %9
          }
        """
    )


STORE = "store %ob[:, :] = "
LEFT_ALONE = {
    "nothing is reduced": f"%v: f32[8,4] = load %xb[:, :] {STORE}%v",
    "small already": NORM,
    "columns are reduced": f"""
        %v: f32[8,4] = load %xb[:, :]
        %r: f32[8] = reduce %v {{kind="sum", axes=(1,)}}
        %s: f32[4] = reduce %v {{kind="sum", axes=(0,)}}
        %d: f32[8,4] = broadcast_in_dim %s {{shape=(8, 4), dims=(1,)}}
        {STORE}%d""",
    "the output is read": f"""
        %v: f32[8,4] = load %ob[:, :]
        %s: f32[8] = reduce %v {{kind="max", axes=(1,)}}
        %d: f32[8,4] = broadcast_in_dim %s {{shape=(8, 4), dims=(0,)}}
        {STORE}%d""",
    "rows are transposed": f"""
        %v: f32[8,4] = load %xb[:, :]
        %s: f32[8] = reduce %v {{kind="max", axes=(1,)}}
        %t: f32[8] = rev %s {{axes=(0,)}}
        %d: f32[8,4] = broadcast_in_dim %t {{shape=(8, 4), dims=(0,)}}
        {STORE}%d""",
    "rows are numbered": f"""
        %v: f32[8,4] = load %xb[:, :]
        %s: f32[8] = reduce %v {{kind="max", axes=(1,)}}
        %n: f32[8] = iota {{type=f32[8], dim=0}}
        %t: f32[8] = add %s, %n
        %d: f32[8,4] = broadcast_in_dim %t {{shape=(8, 4), dims=(0,)}}
        {STORE}%d""",
}


@pytest.mark.parametrize("body", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_left_as_it_is(body: str):
    old = kernel(body)
    assert row_strips(old, 128 if body is NORM else 32).text == old.text


def test_the_zoo_means_the_same_in_strips():
    changed = 0
    for case in all_cases():
        args = case.make_args(np.random.default_rng([3, *case.name.encode()]))
        for old in kernels_in(case.run, *args):
            new = row_strips(old, 64)
            if new.text == old.text:
                continue
            changed += 1
            verify(new)
            rng = np.random.default_rng(changed)
            arrays = [_array(rng, p.ref) for p in old.inputs]
            for a, b in zip(outputs(old, arrays), outputs(new, arrays), strict=True):
                np.testing.assert_array_equal(a, b, err_msg=case.name)
    jax.clear_caches()
    assert changed >= 8


def norm(x, scale):
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    least = jnp.argmin(x, -1, keepdims=True).astype(jnp.float32)
    return centred * scale + e / e.sum(-1, keepdims=True) + least


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_large_blocks_of_rows_as_machine_code(dtype):
    """Also where the last block hangs over the edge."""
    x = jax.random.normal(jax.random.key(0), (50, 700), dtype)
    scale = jax.random.normal(jax.random.key(1), (1, 700), jnp.float32)

    def body(x_ref, scale_ref, o_ref):
        o_ref[...] = norm(x_ref[...], scale_ref[...])

    rows = pl.BlockSpec((24, 700), lambda i: (i, 0))
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        grid=(3,),
        in_specs=[rows, pl.BlockSpec((1, 700), lambda i: (0, 0))],
        out_specs=rows,
    )
    assert "for %" in pl.lower(call)(x, scale).stages(backend="cpu")["scheduled"]
    np.testing.assert_allclose(call(x, scale), norm(x, scale), rtol=1e-5, atol=1e-5)


def _array(rng: np.random.Generator, ref) -> np.ndarray:
    return rng.integers(0, 9, ref.shape).astype(ref.dtype.np)
