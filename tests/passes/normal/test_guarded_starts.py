"""Accumulators started by a select become guarded stores. Text in, text out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
import pallasite.tpu as pltpu
from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.guarded_starts import guarded_starts
from pallasite.passes.normal.normalize import normalize
from pallasite.sites import kernels_in
from tests.passes.normal.meaning import assert_same_meaning

KERNEL = """\
kernel @k(%x: ref<f32[4,8] any>, %o: ref<f32[4] any>) outputs 1 {
  %acc: ref<f32[4] vmem> = alloc
  pipeline %x, %o {grid=(8,), windows=(in[4, 1], out[4]), semantics=("arbitrary",)}
    map (%j: i32) {
      %z: i32 = constant {value=0}
      yield %z, %j
    }
    map (%j_1: i32) {
      %z_1: i32 = constant {value=0}
      yield %z_1
    }
    body (%i: i32, %b: ref<f32[4,1] block>, %r: ref<f32[4] block>) {
      %0: i32 = constant {value=0}
      %start: f32[4] = constant {value=1.0}
      %first: bool = eq %i, %0
      %old: f32[4] = load %acc[:]
      %s: f32[4] = select_n %first, CASES
      %v: f32[4] = load %b[:, 0]
      %t: f32[4] = add %s, %v
      AFTER
      store %r[:] = %t
    }
}
"""
STORED = "store %acc[:] = %t"


def kernel(cases: str = "%old, %start", after: str = STORED):
    made = parse_kernel(KERNEL.replace("CASES", cases).replace("AFTER", after))
    verify(made)
    return made


def test_a_select_becomes_a_guarded_store():
    text = guarded_starts(kernel()).text
    verify(parse_kernel(text))
    assert "select_n" not in text
    start = text.index("cond ")
    assert "store %acc[:] = %start" in text[start : text.index("load %acc[:]")]


MERGED = KERNEL.replace(
    """\
      %s: f32[4] = select_n %first, CASES
      %v: f32[4] = load %b[:, 0]
      %t: f32[4] = add %s, %v
""",
    """\
      %v: f32[4] = load %b[:, 0]
      %s: f32[4] = OP
      %t: f32[4] = select_n %first, CASES
""",
)


@pytest.mark.parametrize(
    ("op", "cases", "nothing"),
    [
        ("add %old, %v", "%s, %v", "-0.0"),
        ("add %v, %old", "%v, %s", "-0.0"),
        ("max %old, %v", "%s, %v", "-inf"),
        ("min %v, %old", "%s, %v", "inf"),
    ],
)
def test_the_first_of_what_is_merged_starts_from_nothing(op, cases, nothing):
    text = MERGED.replace("OP", op).replace("CASES", cases).replace("AFTER", STORED)
    before = parse_kernel(text)
    verify(before)
    after = guarded_starts(before)
    verify(after)
    assert "select_n" not in after.text
    assert f"constant {{value={nothing}}}" in after.text
    x = np.random.default_rng(0).standard_normal((4, 8), np.float32)
    x[1] = -0.0
    one, two = (
        np.asarray(Walker(k, NumpyNumbers()).run([x.copy()])[0]).view(np.int32)
        for k in (before, after)
    )
    np.testing.assert_array_equal(one, two)  # minus zeros stay what they are


@pytest.mark.parametrize(
    ("op", "cases"), [("sub %old, %v", "%s, %v"), ("add %old, %old", "%s, %v")]
)
def test_other_starts_stay(op, cases):
    text = MERGED.replace("OP", op).replace("CASES", cases).replace("AFTER", STORED)
    before = parse_kernel(text)
    assert guarded_starts(before) is before


def test_an_element_that_is_all_of_a_ref():
    made = """\
kernel @k(%o: ref<f32[8] any>) outputs 1 {
  %acc: ref<f32[1] smem> = alloc
  pipeline %o {grid=(8,), windows=(out[1],), semantics=("arbitrary",)}
    map (%j: i32) {
      yield %j
    }
    body (%i: i32, %r: ref<f32[1] block>) {
      %0: i32 = constant {value=0}
      %start: f32 = constant {value=1.0}
      %first: bool = eq %i, %0
      %old: f32 = load %acc[0]
      %s: f32 = select_n %first, %old, %start
      %t: f32 = add %s, %s
      store %acc[0] = %t
      store %r[0] = %t
    }
}
"""
    text = guarded_starts(parse_kernel(made)).text
    verify(parse_kernel(text))
    assert "select_n" not in text and "store %acc[0] = %start" in text
    other = guarded_starts(parse_kernel(made.replace("f32[1] smem", "f32[2] smem")))
    assert "select_n" in other.text


def test_the_other_polarity():
    text = guarded_starts(kernel("%start, %old")).text
    assert "not %first" in text and "select_n" not in text


@pytest.mark.parametrize(
    "after",
    [
        "%again: f32[4] = load %acc[:]\n      store %acc[:] = %again",  # read before
        "store %acc[0:+2] = %part",  # only a part is overwritten
        "",  # never stored: the contents stay
    ],
)
def test_contents_that_somebody_sees_stay(after: str):
    given = after.replace("%part", "%h")
    if "%h" in given:
        half = "%h: f32[2] = slice %t {starts=(0,), limits=(2,), strides=(1,)}"
        given = f"{half}\n      {given}"
    before = kernel(after=given)
    assert guarded_starts(before) is before


def test_a_loaded_value_with_another_use_stays():
    text = KERNEL.replace("CASES", "%old, %start").replace("add %s, %v", "add %s, %old")
    before = parse_kernel(text.replace("AFTER", STORED))
    assert guarded_starts(before) is before


@pytest.mark.parametrize("where", ["first", "later"])
def test_matmuls_started_so_have_parallel_axes(where: str):
    def body(x_ref, w_ref, o_ref, acc_ref):
        k, old = pl.program_id(2), acc_ref[...]
        if where == "first":
            old = jnp.where(k == 0, jnp.zeros_like(old), old)
        else:
            old = jnp.where(k > 0, old, 0.0)
        acc_ref[...] = old + jnp.dot(x_ref[...], w_ref[...])
        o_ref[...] = acc_ref[...]

    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((24, 16), jnp.float32),
        grid=(3, 2, 5),
        in_specs=[
            pl.BlockSpec((8, 8), lambda i, j, k: (i, k)),
            pl.BlockSpec((8, 8), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((8, 8), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)],
    )
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(24, 40)), rng.normal(size=(40, 16))
    x, w = x.astype(np.float32), w.astype(np.float32)
    np.testing.assert_allclose(call(x, w), x @ w, rtol=1e-4, atol=1e-4)
    (report,) = pl.explain(call)(x, w).kernels
    assert [axis.parallel for axis in report.axes] == [True, True, False]


BRANCHES = """\
      %one: i32 = cast %first {dtype=i32}
      cond %one
        branch () {
          %was: f32[4] = load %acc[:]
          %sum: f32[4] = add %was, %v
          store %acc[:] = %sum
        }
        branch () { store %acc[:] = FIRST }
      %t: f32[4] = load %acc[:]
"""


def stored_first(first: str):
    head, rest = KERNEL.split("      %old:")
    load = "      %v: f32[4] = load %b[:, 0]\n"
    branches = BRANCHES.replace("FIRST", first)
    made = parse_kernel(head + load + branches + rest[rest.index("      store %r") :])
    verify(made)
    return made


def test_what_is_stored_first_is_added_to_zero():
    text = guarded_starts(stored_first("%v")).text
    verify(parse_kernel(text))
    # Only -0.0 leaves every float as it is.
    assert "constant {value=-0.0}" in text
    assert text.index("cond ") < text.index("load %acc[:]") < text.index("add %was, %v")


def test_an_element_that_is_all_of_a_ref_is_added_to_zero():
    """As authors write sums in SMEM; its tile has no dimension."""

    def kernel(x_ref, o_ref, sum_ref):
        total = jnp.max(x_ref[...])
        first = pl.program_id(0) == 0

        @pl.when(first)
        def _():
            sum_ref[0] = total

        @pl.when(jnp.logical_not(first))
        def _():
            sum_ref[0] = jnp.maximum(sum_ref[0], total)

        o_ref[0] = sum_ref[0]

    run = pl.pallas_call(
        kernel,
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1,), lambda i: (0,), memory_space=pltpu.SMEM),
        out_shape=jax.ShapeDtypeStruct((1,), jnp.float32),
        scratch_shapes=[pltpu.SMEM((1,), jnp.float32)],
    )
    x = -np.arange(1, 513, dtype=np.float32).reshape(32, 16)
    (made,) = kernels_in(run, x)
    normal = normalize(made)
    verify(normal)
    assert "constant {value=-inf}" in normal.text
    assert_same_meaning(made, normal, [x])


def test_another_start_stays():
    before = stored_first("%start")
    assert guarded_starts(before) is before


def test_a_first_product_leaves_a_plain_sum():
    """The accumulator of a first product starts at 0.0, as where authors write that."""

    def kernel(x_ref, w_ref, o_ref):
        part = jnp.dot(x_ref[...], w_ref[...])
        store = lambda: o_ref.__setitem__(..., part)
        add = lambda: o_ref.__setitem__(..., o_ref[...] + part)
        jax.lax.cond(pl.program_id(0) == 0, store, add)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 24), jnp.float32),
        grid=(3,),
        in_specs=[
            pl.BlockSpec((8, 8), lambda k: (0, k)),
            pl.BlockSpec((8, 24), lambda k: (k, 0)),
        ],
        out_specs=pl.BlockSpec((8, 24), lambda k: (0, 0)),
        interpret=True,
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 24), np.float32)
    w = rng.standard_normal((24, 24), np.float32)
    (before,) = kernels_in(call, x, w)
    text = normalize(before).text
    assert "value=-0.0" not in text
    assert text.index("store %o_ref_1[:, :]") < text.index("load %o_ref_1[:, :]")
    np.testing.assert_allclose(call(x, w), x @ w, rtol=1e-5, atol=1e-5)


GUARDS = """\
kernel @k(%x: ref<f32[4,8] any>, %o: ref<f32[4] any>) outputs 1 {
  pipeline %x, %o {grid=(8,), windows=(in[4, 1], out[4]), semantics=("arbitrary",)}
    map (%j: i32) {
      %z: i32 = constant {value=0}
      yield %z, %j
    }
    map (%j_1: i32) {
      %z_1: i32 = constant {value=0}
      yield %z_1
    }
    body (%i: i32, %b: ref<f32[4,1] block>, %r: ref<f32[4] block>) {
      %0: i32 = constant {value=0}
      %1: i32 = constant {value=1}
      %v: f32[4] = load %b[:, 0]
      %first: bool = FIRST
      %w: i32 = cast %first {dtype=i32}
      cond %w
        branch () {}
        branch () {
          store %r[:] = %v
        }
      %later: bool = LATER
      %l: i32 = cast %later {dtype=i32}
      cond %l
        branch () {}
        branch () {
          %old: f32[4] = load %r[:]
          %t: f32[4] = OP %old, %v
          store %r[:] = %t
        }
    }
}
"""


def guards(first: str, later: str, op: str):
    text = GUARDS.replace("FIRST", first).replace("LATER", later).replace("OP", op)
    before = parse_kernel(text)
    verify(before)
    return before, guarded_starts(before)


@pytest.mark.parametrize(
    ("first", "later", "op", "nothing"),
    [
        ("eq %i, %0", "gt %i, %0", "max", "-inf"),
        ("lt %i, %1", "ne %0, %i", "min", "inf"),
        ("eq %0, %i", "not %first", "add", "-0.0"),
    ],
)
def test_two_guards_of_which_one_holds(first, later, op, nothing):
    before, after = guards(first, later, op)
    verify(after)
    assert after.text.count("cond ") == 1
    assert f"constant {{value={nothing}}}" in after.text
    x = np.random.default_rng(0).standard_normal((4, 8), np.float32)
    one, two = (Walker(k, NumpyNumbers()).run([x.copy()])[0] for k in (before, after))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("first", "later", "op"),
    [
        ("eq %i, %0", "gt %i, %1", "max"),  # neither holds in step 1
        ("eq %i, %0", "ge %i, %0", "max"),  # both hold in step 0
        ("eq %i, %0", "gt %i, %0", "sub"),
    ],
)
def test_other_guards_stay(first, later, op):
    before, after = guards(first, later, op)
    assert after is before


def test_a_guard_is_joined_once():
    """Of three in turn, the last overwrites what the branch of the first two stored."""
    start, end = GUARDS.index("      cond %w"), GUARDS.index("      %later")
    third = GUARDS[start:end]
    text = GUARDS.replace("    }\n}\n", f"{third}    }}\n}}\n")
    text = text.replace("FIRST", "eq %i, %0").replace("LATER", "gt %i, %0")
    before = parse_kernel(text.replace("OP", "add"))
    verify(before)
    after = guarded_starts(before)
    assert after.text.count("cond ") == 2
    assert_same_meaning(before, after)
