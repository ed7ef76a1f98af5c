"""Deepen: steps along k become fewer and deeper. Text in, text out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.schedule.merge_k_steps import merge_k_rounds, merge_k_steps
from pallasite.sites import kernels_in
from tests.passes.test_promote import expect
from tests.passes.test_row_strips import code
from tests.passes.test_same_meaning import outputs
from tests.zoo import all_cases

BYTES = 1 << 10  # of computed tiles, unless a test is about them


def kernel(body: str, y_map: str = "yield %k, %z1", depth: int = 64) -> Kernel:
    """Sums o[4,4] of products of x[4,8] and y[8,4], eight steps, and the given code."""
    text = f"""
    kernel @k(%x: ref<f32[4,{depth}] any>, %y: ref<f32[{depth},4] any>,
        %o: ref<f32[4,4] any>) outputs 1 {{
      %acc: ref<f32[4,4] vmem> = alloc {{type=ref<f32[4,4] vmem>}}
      pipeline %x, %y, %o {{grid=(8,), windows=(in[4, 8], in[8, 4], out[4, 4]),
          semantics=("arbitrary",)}}
        map (%k0: i32) {{ %z0: i32 = constant {{value=0}} yield %z0, %k0 }}
        map (%k: i32) {{ %z1: i32 = constant {{value=0}} {y_map} }}
        map (%k2: i32) {{ %z2: i32 = constant {{value=0}} yield %z2, %z2 }}
        body (%s: i32, %xb: ref<f32[4,8] block>, %yb: ref<f32[8,4] block>,
              %ob: ref<f32[4,4] block>) {{
          {body}
        }}
    }}"""
    made = parse_kernel(text)
    verify(made)
    return made


def when(number: int, code: str, name: str = "c") -> str:
    return f"""
    %{name}0: i32 = constant {{value={number}}}
    %{name}1: bool = eq %s, %{name}0
    %{name}2: i32 = cast %{name}1 {{dtype=i32}}
    cond %{name}2
      branch () {{}}
      branch () {{ {code} }}
    """


CONTRACT = "{contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}"
PARTS = "%a: f32[4,8] = load %xb[:, :] %b: f32[8,4] = load %yb[:, :]"
ZERO = "%zero: f32[4,4] = constant {value=0.0} store %acc[:, :] = %zero"
FINISH = "%done: f32[4,4] = load %acc[:, :] store %ob[:, :] = %done"
PRODUCT = f"%p: f32[4,4] = dot %a, %b {CONTRACT}"
SUM = f"""
%old: f32[4,4] = load %acc[:, :]
{PRODUCT}
%new: f32[4,4] = add %old, %p
store %acc[:, :] = %new
"""
WHOLE = f"{when(0, ZERO)} {PARTS} {SUM} {when(7, FINISH, 'd')}"


def test_steps_between_the_first_and_the_last_branch_are_merged():
    new = merge_k_steps(kernel(WHOLE), 32, BYTES)
    verify(new)
    assert "grid=(2,), windows=(in[4, 32], in[32, 4], out[4, 4])" in new.text
    assert code(new) == expect(
        """
        %0: i32 = constant {value=0}
        %1: bool = eq %s, %0
        %2: i32 = cast %1 {dtype=i32}
        cond %2
          branch () {}
          branch () {
            %3: f32[4,4] = constant {value=0.0}
            store %acc[:, :] = %3
          }
        %a: f32[4,32] = load %xb[:, :]
        %b: f32[32,4] = load %yb[:, :]
        %old: f32[4,4] = load %acc[:, :]
        %p: f32[4,4] = dot %a, %b {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
        %new: f32[4,4] = add %old, %p
        store %acc[:, :] = %new
        %4: i32 = constant {value=1}
        %5: bool = eq %s, %4
        %6: i32 = cast %5 {dtype=i32}
        cond %6
          branch () {}
          branch () {
            %done: f32[4,4] = load %acc[:, :]
            store %ob[:, :] = %done
          }
        """  # noqa: E501
    )


COMPUTED = f"""
{PARTS}
%two: f32[4,8] = constant {{value=2.0}}
%a2: f32[4,8] = mul %a, %two
%t: f32[8,4] = transpose %a2 {{perm=(1, 0)}}
%old: f32[4,4] = load %acc[:, :]
%p: f32[4,4] = dot %t, %b {CONTRACT.replace("(1,)", "(0,)")}
%new: f32[4,4] = add %old, %p
store %acc[:, :] = %new
"""


@pytest.mark.parametrize("most_bytes, depth", [(1 << 10, 64), (511, 16), (255, 8)])
def test_what_is_computed_on_the_way_gets_deeper_within_bounds(most_bytes, depth):
    new = merge_k_steps(kernel(COMPUTED), 1000, most_bytes)
    verify(new)
    assert f"f32[4,{depth}] = mul" in new.text
    assert f"f32[{depth},4] = transpose" in new.text
    assert f"grid=({64 // depth},)" in new.text


LEFT_ALONE = {
    "nothing is added": PARTS + PRODUCT + "store %acc[:, :] = %p",
    "the sum comes before it is begun": PARTS + SUM + when(0, ZERO),
    "the sum goes on after its end": when(7, FINISH) + PARTS + SUM,
    "a branch in the middle": PARTS + SUM + when(3, FINISH),
    "an else": PARTS + SUM + when(7, "").replace("() {}", f"() {{{FINISH}}}"),
    "the step's number is stored": WHOLE
    + "%f: f32 = cast %s {dtype=f32} %g: f32[4,4] = broadcast_in_dim %f"
    + " {shape=(4, 4), dims=()} store %ob[:, :] = %g",
    "the product is used twice": PARTS + SUM + when(7, "store %ob[:, :] = %p"),
    "a term is used twice": PARTS
    + SUM
    + "%n: f32[4,4] = neg %p"
    + when(7, "store %ob[:, :] = %n"),
    "the parts are used by a branch": PARTS
    + SUM
    + when(7, f"%q: f32[4,4] = dot %a, %b {CONTRACT} store %ob[:, :] = %q"),
    "a block is used by a branch": PARTS
    + SUM
    + when(7, "%q: f32[4,4] = load %xb[:, 0:+4] store %ob[:, :] = %q"),
    "only some is loaded": """
        %a: f32[4,4] = load %xb[:, 0:+4] %b: f32[4,4] = load %yb[0:+4, :]"""
    + SUM,
    "another product is not over what moves": WHOLE
    + "%r: f32[8,8] = dot %a, %b {contract=((0,), (1,)), batch=((), ()), dtype=f32,"
    + " precision=None}",
    "what is added is no product of parts": PARTS
    + "%c: f32[4,4] = load %ob[:, :]"
    + SUM.replace("%a, %b", "%c, %c"),
    "it is printed": WHOLE + 'debug_print {format="step"}',
}


@pytest.mark.parametrize("body", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_left_as_it_is(body: str):
    old = kernel(body)
    assert merge_k_steps(old, 64, BYTES).text == old.text


def test_blocks_that_do_not_move_along_or_are_past_the_edge():
    """Past the edge, a block is the nearest that there is, again."""
    for old in (kernel(WHOLE, y_map="yield %z1, %z1"), kernel(WHOLE, depth=56)):
        assert merge_k_steps(old, 64, BYTES).text == old.text


def test_sums_that_are_rounded_at_each_step_are_left_alone():
    old = parse_kernel(kernel(WHOLE).text.replace("f32", "bf16"))
    assert merge_k_steps(old, 64, BYTES).text == old.text


def test_memory_that_is_read_and_written_is_left_alone():
    old = kernel(WHOLE).with_(aliases=((0, 0),))
    assert merge_k_steps(old, 64, BYTES) is old


# --- loops ---


def loop(body: str, limit: int = 8, carried: str = "%sum1") -> Kernel:
    """A loop over parts of x[4,64] and y[64,4] with a sum."""
    text = f"""
    kernel @k(%x: ref<f32[4,64] any>, %y: ref<f32[64,4] any>, %o: ref<f32[4,4] any>)
        outputs 1 {{
      pipeline %x, %y, %o {{grid=(), windows=(in[4, 64], in[64, 4], out[4, 4]),
          semantics=()}}
        map () {{ %z0: i32 = constant {{value=0}} yield %z0, %z0 }}
        map () {{ %z1: i32 = constant {{value=0}} yield %z1, %z1 }}
        map () {{ %z2: i32 = constant {{value=0}} yield %z2, %z2 }}
        body (%xb: ref<f32[4,64] block>, %yb: ref<f32[64,4] block>,
              %ob: ref<f32[4,4] block>) {{
          %zero: i32 = constant {{value=0}}
          %one: i32 = constant {{value=1}}
          %eight: i32 = constant {{value=8}}
          %limit: i32 = constant {{value={limit}}}
          %none: f32[4,4] = constant {{value=0.0}}
          %r: f32[4,4] = for %zero, %limit, %one, %none
            body (%n: i32, %sum: f32[4,4]) {{
              {body}
              yield {carried}
            }}
          store %ob[:, :] = %r
        }}
    }}"""
    made = parse_kernel(text)
    verify(made)
    return made


ROUND_PARTS = """
%k: i32 = mul %n, %eight
%a: f32[4,8] = load %xb[:, %k:+8]
%b: f32[8,4] = load %yb[%k:+8, :]
"""
ROUND = f"{ROUND_PARTS} {PRODUCT} %sum1: f32[4,4] = add %sum, %p"


def test_a_loop_of_products_is_one_product():
    new = merge_k_rounds(loop(ROUND), BYTES)
    verify(new)
    assert "for " not in new.text
    assert "f32[4,64] = load %xb[:, :]" in new.text
    assert "f32[64,4] = load %yb[:, :]" in new.text


def test_a_loop_that_computes_takes_larger_steps():
    product = f"%e: f32[8,4] = exp %b {PRODUCT.replace('%b', '%e')}"
    computed = ROUND.replace(PRODUCT, product)
    new = merge_k_rounds(loop(computed), 256)
    verify(new)
    assert "constant {value=4}" in new.text  # iterations
    assert "f32[16,4] = exp" in new.text
    assert "f32[4,16] = load %xb[:, %" in new.text


LOOPS_LEFT_ALONE = {
    "parts overlap": ROUND.replace("mul %n, %eight", "add %n, %one"),
    "only one side moves": ROUND.replace("%yb[%k:+8, :]", "%yb[0:+8, :]"),
    "the sum is used": ROUND.replace("add %sum, %p", "add %e, %p").replace(
        PRODUCT, f"{PRODUCT} %e: f32[4,4] = exp %sum"
    ),
    "the product is used": ROUND.replace("add %sum, %p", "add %sum, %e").replace(
        PRODUCT, f"{PRODUCT} %e: f32[4,4] = exp %p"
    ),
    "something is stored": ROUND + " store %ob[:, :] = %sum",
}


@pytest.mark.parametrize("body", LOOPS_LEFT_ALONE.values(), ids=LOOPS_LEFT_ALONE)
def test_loops_that_are_left_as_they_are(body: str):
    old = loop(body)
    assert merge_k_rounds(old, BYTES).text == old.text


def test_numbers_of_iterations_become_those_of_positions():
    numbered = (
        ROUND_PARTS
        + "%f: f32 = cast %k {dtype=f32}"
        + "%g: f32[4,8] = broadcast_in_dim %f {shape=(4, 8), dims=()}"
        + "%h: f32[4,8] = add %a, %g"
        + PRODUCT.replace("%a", "%h")
        + "%sum1: f32[4,4] = add %sum, %p"
    )
    old = loop(numbered)
    new = merge_k_rounds(old, BYTES)
    verify(new)
    assert "for " not in new.text
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s).astype("f4") for s in ((4, 64), (64, 4))]
    for a, b in zip(outputs(old, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-3)


def test_parts_outside_the_array_are_left_alone():
    """Their starts would be moved back inside, each on its own."""
    old = loop(ROUND, limit=9)
    assert merge_k_rounds(old, BYTES).text == old.text


def test_the_zoo_means_the_same_with_deeper_steps():
    changed = 0
    for case in all_cases():
        args = case.make_args(np.random.default_rng([3, *case.name.encode()]))
        for old in map(canonicalize, kernels_in(case.run, *args)):
            new = merge_k_rounds(merge_k_steps(old, 4096, 1 << 20), 1 << 20)
            if new.text == old.text:
                continue
            changed += 1
            verify(new)
            rng = np.random.default_rng(changed)
            ints = [rng.integers(0, 9, p.ref.shape) for p in old.inputs]
            pairs = zip(ints, old.inputs, strict=True)
            arrays = [a.astype(p.ref.dtype.np) for a, p in pairs]
            for a, b in zip(outputs(old, arrays), outputs(new, arrays), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=case.name)
    jax.clear_caches()
    assert changed >= 9


# --- as machine code ---


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def gated(x_ref, y_ref, z_ref, o_ref, up_ref, gate_ref):
    step, last = pl.program_id(3), pl.num_programs(3) - 1

    @pl.when(step == 0)
    def _():
        up_ref[...] = jnp.zeros_like(up_ref)
        gate_ref[...] = jnp.zeros_like(gate_ref)

    x = x_ref[...]
    up_ref[...] += jnp.dot(x, y_ref[...], preferred_element_type=jnp.float32)
    gate_ref[...] += jnp.dot(x, z_ref[...].T, preferred_element_type=jnp.float32)

    @pl.when((step == last) & (pl.program_id(1) < 7))
    def _():
        o_ref[...] = (up_ref[...] * jnp.tanh(gate_ref[...])).astype(o_ref.dtype)


def test_two_sums_with_a_batch_and_an_epilogue():
    x = normal(0, 3, 40, 96, dtype=jnp.bfloat16)
    y, z = (
        normal(n, *s, dtype=jnp.bfloat16) for n, s in ((1, (96, 24)), (2, (24, 96)))
    )
    call = pl.pallas_call(
        gated,
        out_shape=jax.ShapeDtypeStruct((3, 40, 24), jnp.bfloat16),
        grid=(3, 2, 3, 6),
        in_specs=[
            pl.BlockSpec((None, 20, 16), lambda b, i, j, k: (b, i, k)),
            pl.BlockSpec((16, 8), lambda b, i, j, k: (k, j)),
            pl.BlockSpec((8, 16), lambda b, i, j, k: (j, k)),
        ],
        out_specs=pl.BlockSpec((None, 20, 8), lambda b, i, j, k: (b, i, j)),
        scratch_shapes=[pltpu.VMEM((20, 8), jnp.float32)] * 2,
    )
    scheduled = pl.lower(call)(x, y, z).stages(backend="cpu")["scheduled"]
    assert "grid=(3, 2, 3, 1)" in scheduled
    wide = [a.astype(jnp.float32) for a in (x, y, z)]
    expected = (wide[0] @ wide[1]) * jnp.tanh(wide[0] @ wide[2].T)
    np.testing.assert_allclose(
        call(x, y, z).astype(jnp.float32), expected, rtol=2e-2, atol=2e-2
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("depth", [1, 5, 35, 105])
def test_loops_as_machine_code(dtype, depth):
    x, y = (
        (normal(n, *s) * 9).astype(dtype) for n, s in ((0, (19, 105)), (1, (105, 33)))
    )
    sums = jnp.int32 if dtype == jnp.int8 else jnp.float32

    def body(x_ref, y_ref, o_ref):
        def add(k, total):
            part = pl.ds(k * depth, depth)
            product = jnp.dot(x_ref[:, part], y_ref[part], preferred_element_type=sums)
            return total + product

        start = jnp.ones(o_ref.shape, sums)
        o_ref[...] = jax.lax.fori_loop(0, 105 // depth, add, start)

    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((19, 33), sums))
    scheduled = pl.lower(call)(x, y).stages(backend="cpu")["scheduled"]
    assert "for %" not in scheduled
    expected = np.asarray(x, np.float64) @ np.asarray(y, np.float64) + 1
    np.testing.assert_allclose(call(x, y), expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("deepest", [16, 64])
def test_steps_past_the_edge_of_filled_blocks_are_merged(deepest: int):
    text = kernel(WHOLE, depth=60).text
    for window in ("in[4, 8]", "in[8, 4]"):
        text = text.replace(window, window + " fill 0.0")
    made = parse_kernel(text)
    new = merge_k_steps(made, deepest, 1 << 20)
    verify(new)
    assert f"in[4, {deepest}] fill 0.0, in[{deepest}, 4] fill 0.0" in new.text
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=n).astype("f4") for n in ((4, 60), (60, 4))]
    for a, b in zip(outputs(made, arrays), outputs(new, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
