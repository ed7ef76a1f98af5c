"""Canonical form, text in and text out; and the same results before and after."""

from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.opdef import table
from pallasite.ir.text import parse_kernel, print_kernel
from pallasite.ir.types import DTYPES, DType, TileType
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from tests.ir import kernels, samples
from tests.passes.normal.meaning import assert_same_meaning

HEAD = (
    "kernel @k(%x: ref<f32[8,16] any>, %n: ref<i32[8] any>, %b: ref<bool[8] any>, "
    "%h: ref<bf16[8] any>, %o: ref<f32[8,16] any>) outputs 1 {"
)
LOADS = """\
%v: f32[8,16] = load %x[:, :]
%m: i32[8] = load %n[:]
%p: bool[8] = load %b[:]
%l: bf16[8] = load %h[:]
"""


def canonical(code: str) -> str:
    """What is left of some code after four loads, shown from the third line on."""
    kernel = parse_kernel(f"{HEAD}\n{LOADS}{code}\n}}")
    verify(kernel)
    new = canonicalize(kernel)
    verify(new)
    assert canonicalize(new) is new
    lines = [line.strip() for line in print_kernel(new).splitlines()[1:-1]]
    return "\n".join(line for line in lines if line not in LOADS.splitlines())


def shows(code: str, printed: str = "") -> str:
    """Canonical code that ends in printing `%r`."""
    code = dedent(code).strip()
    return canonical(f'{code}\ndebug_print {printed or "%r"} {{format=""}}')


# What `%r` is computed as, and what is left to print.
BECOMES = {
    # x op constant
    "%c: i32[8] = constant {value=0}\n%r: i32[8] = add %m, %c": "%m",
    "%c: i32[8] = constant {value=0}\n%r: i32[8] = add %c, %m": "%m",
    "%c: f32[8,16] = constant {value=-0.0}\n%r: f32[8,16] = add %v, %c": "%v",
    "%c: f32[8,16] = constant {value=0.0}\n%r: f32[8,16] = sub %v, %c": "%v",
    "%c: i32[8] = constant {value=0}\n%r: i32[8] = sub %m, %c": "%m",
    "%c: f32[8,16] = constant {value=1.0}\n%r: f32[8,16] = mul %c, %v": "%v",
    "%c: i32[8] = constant {value=1}\n%r: i32[8] = div %m, %c": "%m",
    "%c: f32[8,16] = constant {value=1.0}\n%r: f32[8,16] = div %v, %c": "%v",
    "%c: i32[8] = constant {value=-1}\n%r: i32[8] = and %m, %c": "%m",
    "%c: bool[8] = constant {value=True}\n%r: bool[8] = and %p, %c": "%p",
    "%c: bool[8] = constant {value=False}\n%r: bool[8] = or %c, %p": "%p",
    "%c: i32[8] = constant {value=0}\n%r: i32[8] = xor %m, %c": "%m",
    "%c: i32[8] = constant {value=0}\n%r: i32[8] = shift_left %m, %c": "%m",
    "%r: f32[8,16] = integer_pow %v {y=1}": "%v",
    # a quotient and its remainder
    "%c: i32[8] = constant {value=2}\n%d: i32[8] = div %m, %c\n"
    "%e: i32[8] = mul %d, %c\n%f: i32[8] = rem %m, %c\n%r: i32[8] = add %f, %e": "%m",
    # x op x
    "%r: i32[8] = and %m, %m": "%m",
    "%r: f32[8,16] = max %v, %v": "%v",
    "%c: f32[8,16] = neg %v\n%r: f32[8,16] = neg %c": "%v",
    "%c: bool[8] = not %p\n%r: bool[8] = not %c": "%p",
    # select
    "%c: bool[8] = not %p\n%r: i32[8] = select_n %c, %m, %m": "%m",
    "%c: bool = constant {value=True}\n%d: f32[8,16] = exp %v\n"
    "%r: f32[8,16] = select_n %c, %d, %v": "%v",
    "%c: i32 = constant {value=9}\n%d: f32[8,16] = exp %v\n"
    "%r: f32[8,16] = select_n %c, %d, %d, %v": "%v",
    # the same choice again, also by the opposite comparison
    "%e: i32[8] = neg %m\n%f: i32[8] = select_n %p, %m, %e\n"
    "%r: i32[8] = select_n %p, %f, %m": "%m",
    "%e: i32[8] = neg %m\n%f: i32[8] = select_n %p, %e, %m\n"
    "%r: i32[8] = select_n %p, %m, %f": "%m",
    "%e: i32[8] = neg %m\n%c: i32[8] = constant {value=3}\n%g: bool[8] = gt %m, %c\n"
    "%f: i32[8] = select_n %g, %e, %m\n%d: i32[8] = constant {value=4}\n"
    "%k: bool[8] = lt %m, %d\n%r: i32[8] = select_n %k, %f, %m": "%m",
    # casts
    "%r: f32[8,16] = cast %v {dtype=f32}": "%v",
    "%c: f32[8] = cast %l {dtype=f32}\n%r: bf16[8] = cast %c {dtype=bf16}": "%l",
    "%c: i64[8] = cast %m {dtype=i64}\n%r: i32[8] = cast %c {dtype=i32}": "%m",
    "%c: i32[8] = cast %p {dtype=i32}\n%r: bool[8] = cast %c {dtype=bool}": "%p",
    "%c: i32[8] = cast %p {dtype=i32}\n%z: i32[8] = constant {value=0}\n"
    "%r: bool[8] = ne %c, %z": "%p",
    # shapes
    "%r: f32[8,16] = reshape %v {shape=(8, 16)}": "%v",
    "%c: f32[128] = reshape %v {shape=(128,)}\n"
    "%r: f32[8,16] = reshape %c {shape=(8, 16)}": "%v",
    "%r: f32[8,16] = transpose %v {perm=(0, 1)}": "%v",
    "%c: f32[16,8] = transpose %v {perm=(1, 0)}\n"
    "%r: f32[8,16] = transpose %c {perm=(1, 0)}": "%v",
    "%r: f32[8,16] = broadcast_in_dim %v {shape=(8, 16), dims=(0, 1)}": "%v",
    "%r: f32[8,16] = slice %v {starts=(0, 0), limits=(8, 16), strides=(1, 1)}": "%v",
    "%r: f32[8,16] = concatenate %v {axis=0}": "%v",
    "%c: f32[0,16] = slice %v {starts=(8, 0), limits=(8, 16), strides=(1, 1)}\n"
    "%d: f32[0,16] = exp %c\n%r: f32[8,16] = concatenate %d, %v, %c {axis=0}": "%v",
    "%r: f32[8,16] = rev %v {axes=()}": "%v",
    '%r: f32[8,16] = reduce %v {kind="sum", axes=()}': "%v",
    "%c: f32 = constant {value=7.0}\n"
    "%r: f32[8,16] = pad %v, %c {low=(0, 0), high=(0, 0), interior=(0, 0)}": "%v",
    "%c: i32 = constant {value=3}\n"
    "%r: f32[8,16] = dynamic_slice %v, %c, %c {sizes=(8, 16)}": "%v",
    "%c: i32 = constant {value=3}\n%d: f32[8,16] = exp %v\n"
    "%r: f32[8,16] = dynamic_update_slice %d, %v, %c, %c": "%v",
}


@pytest.mark.parametrize("code", BECOMES)
def test_exact_identities(code: str):
    assert shows(code) == f'debug_print {BECOMES[code]} {{format=""}}'


# Rewrites that would change a bit somewhere, and are not made.
STAYS = [
    # -0.0 + 0.0 is 0.0
    "%c: f32[8,16] = constant {value=0.0}\n%r: f32[8,16] = add %v, %c",
    # 0.0 - -0.0 is 0.0 for x = -0.0
    "%c: f32[8,16] = constant {value=-0.0}\n%r: f32[8,16] = sub %v, %c",
    # inf, NaN and signs
    "%c: f32[8,16] = constant {value=0.0}\n%r: f32[8,16] = mul %v, %c",
    "%r: f32[8,16] = sub %v, %v",
    "%r: f32[8,16] = div %v, %v",
    # not of the same division
    "%c: i32[8] = constant {value=2}\n%d: i32[8] = div %m, %c\n"
    "%k: i32[8] = constant {value=3}\n"
    "%e: i32[8] = mul %d, %c\n%f: i32[8] = rem %m, %k\n%r: i32[8] = add %f, %e",
    # rounds
    "%c: bf16[8,16] = cast %v {dtype=bf16}\n%r: f32[8,16] = cast %c {dtype=f32}",
    # saturates
    "%c: f32[8] = cast %m {dtype=f32}\n%r: i8[8] = cast %c {dtype=i8}",
    # drops bits
    "%c: i8[8] = cast %m {dtype=i8}\n%r: i32[8] = cast %c {dtype=i32}",
    # sign
    "%c: u32[8] = cast %m {dtype=u32}\n%r: i64[8] = cast %c {dtype=i64}",
]


def test_a_quotient_of_chosen_constants_is_one_of_them():
    """The derivative of a maximum divides 0 or 1 by 1 or 2."""
    compare = """\
%w: f32[8,16] = neg %v
%a: bool[8,16] = lt %v, %w
%c: bool[8,16] = eq %v, %w
%zero: f32[8,16] = constant {value=0.0}
%one: f32[8,16] = constant {value=1.0}
"""
    divide = """\
%two: f32[8,16] = constant {value=NUMBER}
%s: f32[8,16] = select_n %a, %zero, %one
%t: f32[8,16] = select_n %c, %one, %two
%q: f32[8,16] = div %s, %t
store %o[:, :] = %q"""
    folded = canonical(compare + divide.replace("NUMBER", "2.0"))
    assert "div" not in folded and folded.count("select_n") == 3
    for number in ("3.0", "0.0"):  # inexact, and a division by zero
        assert "div" in canonical(compare + divide.replace("NUMBER", number))


def test_the_number_of_a_block_and_of_its_part_are_one_number():
    """As `cut` leaves positions: what compares them can be solved for the step."""
    code = """%i: i32 = load %n[0]
%two: i32 = constant {value=2}
%size: i32 = constant {value=128}
%half: i32 = constant {value=64}
%block: i32 = div %i, %two
%part: i32 = rem %i, %two
%from: i32 = mul %block, %size
%more: i32 = mul %part, %half
%u: i32[8] = broadcast_in_dim %from {shape=(8,), dims=()}
%w: i32[8] = broadcast_in_dim %more {shape=(8,), dims=()}
%c: i32[8] = add %w, %m
%r: i32[8] = add %u, %c"""
    left = shows(code).splitlines()[:-1]
    assert [line.split(" = ")[1] for line in left] == [
        "load %n[0]",
        "constant {value=64}",
        "mul %i, %half",
        "broadcast_in_dim %0 {shape=(8,), dims=()}",
        "add %m, %1",
    ]


@pytest.mark.parametrize("code", STAYS)
def test_what_is_not_exact_stays(code: str):
    ops = [line.split(" = ")[1].split()[0] for line in code.splitlines()]
    left = shows(code).splitlines()[:-1]
    assert [line.split(" = ")[1].split()[0] for line in left] == ops


def test_shape_chains_become_one_op():
    assert "reshape %v {shape=(128,)}" in shows(
        "%c: f32[8,16,1] = reshape %v {shape=(8, 16, 1)}\n"
        "%r: f32[128] = reshape %c {shape=(128,)}"
    )
    assert "broadcast_in_dim %m {shape=(2, 8, 4), dims=(1,)}" in shows(
        "%c: i32[8,1] = broadcast_in_dim %m {shape=(8, 1), dims=(0,)}\n"
        "%r: i32[2,8,4] = broadcast_in_dim %c {shape=(2, 8, 4), dims=(1, 2)}"
    )
    # Reductions along dimensions of size one, as derivatives of broadcasts have.
    assert 'reduce %v {kind="sum", axes=(1,)}' in shows(
        "%a: f32[1,8,16] = broadcast_in_dim %v {shape=(1, 8, 16), dims=(1, 2)}\n"
        '%r: f32[8] = reduce %a {kind="sum", axes=(0, 2)}'
    )
    assert "%m" in shows(
        "%a: i32[8,1] = broadcast_in_dim %m {shape=(8, 1), dims=(0,)}\n"
        '%r: i32[8] = reduce %a {kind="sum", axes=(1,)}'
    )
    assert "transpose %a {perm=(1, 2, 0)}" in shows(
        "%a: f32[8,4,4] = reshape %v {shape=(8, 4, 4)}\n"
        "%c: f32[4,8,4] = transpose %a {perm=(2, 0, 1)}\n"
        "%r: f32[4,4,8] = transpose %c {perm=(2, 0, 1)}"
    )


# Code whose `%r` is a known number, and that number.
FOLDS = {
    "%a: i32 = constant {value=6}\n%b1: i32 = constant {value=7}\n"
    "%r: i32 = mul %a, %b1": "i32 = constant {value=42}",
    "%a: i8[4] = constant {value=127}\n%r: i8[4] = add %a, %a": (
        "i8[4] = constant {value=-2}"
    ),
    "%a: i32 = constant {value=7}\n%z: i32 = constant {value=0}\n"
    "%r: i32 = div %a, %z": "i32 = constant {value=-1}",
    "%a: f32 = constant {value=0.0}\n%r: f32 = log %a": ("f32 = constant {value=-inf}"),
    "%a: bf16 = constant {value=1.0}\n%c: bf16 = constant {value=0.00390625}\n"
    "%r: bf16 = add %a, %c": "bf16 = constant {value=1.0}",
    "%a: i32 = constant {value=3}\n%r: bool = eq %a, %a": (
        "bool = constant {value=True}"
    ),
    "%a: f32 = constant {value=4294967296.0}\n%r: i32 = cast %a {dtype=i32}": (
        "i32 = constant {value=2147483647}"
    ),
    "%a: f32 = constant {value=2.5}\n"
    "%r: f32[2,3] = broadcast_in_dim %a {shape=(2, 3), dims=()}": (
        "f32[2,3] = constant {value=2.5}"
    ),
    "%a: f32[6] = constant {value=2.5}\n%c: f32[2,3] = reshape %a {shape=(2, 3)}\n"
    "%r: f32[3,2] = transpose %c {perm=(1, 0)}": "f32[3,2] = constant {value=2.5}",
    "%a: f32[6] = constant {value=2.5}\n%r: f32[12] = concatenate %a, %a {axis=0}": (
        "f32[12] = constant {value=2.5}"
    ),
    '%a: f32[6] = constant {value=2.5}\n%r: f32 = reduce %a {kind="max", axes=(0,)}': (
        "f32 = constant {value=2.5}"
    ),
    "%r: i32[8,1] = iota {dim=1}": "i32[8,1] = constant {value=0}",
    "%a: f32[0] = constant {value=2.5}\n%c: f32 = constant {value=7.0}\n"
    "%r: f32[3] = pad %a, %c {low=(2,), high=(1,), interior=(0,)}": (
        "f32[3] = constant {value=7.0}"
    ),
    "%r: i32[8] = sub %m, %m": "i32[8] = constant {value=0}",
}


@pytest.mark.parametrize("code", FOLDS)
def test_constants_fold(code: str):
    first, *rest = shows(code).splitlines()
    assert first.partition(": ")[2] == FOLDS[code]
    assert len(rest) == 1


def test_concatenation_of_different_zeros_stays():
    code = "%a: f32[2] = constant {value=0.0}\n%c: f32[2] = constant {value=-0.0}\n"
    assert "concatenate" in shows(code + "%r: f32[4] = concatenate %a, %c {axis=0}")


def test_known_starts_of_a_slice_are_clamped():
    code = (
        "%a: i32 = constant {value=20}\n%c: i32 = constant {value=-3}\n"
        "%r: f32[2,4] = dynamic_slice %v, %c, %a {sizes=(2, 4)}"
    )
    assert "slice %v {starts=(0, 12), limits=(2, 16), strides=(1, 1)}" in shows(code)


# --- views ---

VIEWS = {
    # static in static
    "%s: ref<f32[4,8] any> = subview %x[2:+4, 0:+8:2]\n"
    "%r: f32[3] = load %s[1, 2:+3:2]": "%x[3, 4:+3:4]",
    # a whole view of anything
    "%s: ref<f32[8,16] any> = subview %x[:, :]\n%r: f32[8,16] = load %s[:, :]": None,
    # a dynamic view read whole
    "%s: ref<f32[16] any> = subview %x[%i, :]\n%r: f32[16] = load %s[:]": "%x[%i, :]",
    "%s: ref<f32[2,16] any> = subview %x[%i:+2, :]\n%r: f32[2,16] = load %s[:, :]": (
        "%x[%i:+2, :]"
    ),
    # views of views
    "%s: ref<f32[4,16] any> = subview %x[4:+4, :]\n"
    "%t: ref<f32[16] any> = subview %s[1, :]\n%r: f32 = load %t[3]": "%x[5, 3]",
    # untouched dimensions keep their dynamic index
    "%s: ref<f32[16] any> = subview %x[3, :]\n%r: f32[2] = load %s[%i:+2]": (
        "%x[3, %i:+2]"
    ),
    "%s: ref<f32[16] any> = subview %x[%i, :]\n%r: f32[8] = load %s[gather %m]": (
        "%x[%i, gather %m]"
    ),
}
LOAD_I = "%i: i32 = load %n[0]\n"


@pytest.mark.parametrize("code", VIEWS)
def test_views_merge_into_accesses(code: str):
    lines = shows(LOAD_I + code if "%i" in code else code).splitlines()
    if VIEWS[code] is None:
        assert lines == ['debug_print %v {format=""}']
    else:
        assert lines[-2].partition("load ")[2] == VIEWS[code]
        assert "subview" not in "".join(lines)


UNMERGED = [
    # both clamp, each in its own range
    "%s: ref<f32[4,16] any> = subview %x[%i:+4, :]\n%r: f32[16] = load %s[%i, :]",
    "%s: ref<f32[4,16] any> = subview %x[2:+4, :]\n%r: f32[16] = load %s[%i, :]",
    "%s: ref<f32[4,16] any> = subview %x[%i:+4, :]\n%r: f32[16] = load %s[1, :]",
    "%s: ref<f32[4,16] any> = subview %x[2:+4, :]\n"
    "%r: f32[8,16] = load %s[gather %m, :]",
    # the view is clamped whole, the masked elements one by one
    "%s: ref<f32[8] any> = subview %x[:, %i]\n%r: f32[8] = load %s[:] mask %p",
]


@pytest.mark.parametrize("code", UNMERGED)
def test_views_that_clamp_apart_stay(code: str):
    assert "subview" in shows(LOAD_I + code)


def test_stores_and_atomics_merge_too():
    left = canonical(
        """
        %s: ref<f32[16] any> = subview %o[3, :]
        %c: f32[16] = constant {value=1.0}
        %d: f32 = constant {value=1.0}
        store %s[:] = %c
        %r: f32 = atomic_rmw %s[2] = %d {kind="add"}
        """
    )
    assert "store %o[3, :] = %c" in left
    assert 'atomic_rmw %o[3, 2] = %d {kind="add"}' in left


def test_known_starts_become_static():
    assert "load %x[2, 4:+3]" in shows(
        "%a: i32 = constant {value=2}\n%c: i64 = constant {value=4}\n"
        "%r: f32[3] = load %x[%a, %c:+3]"
    )
    # Outside: clamped when it runs, reported by checked mode.
    assert "load %x[%a, :]" in shows(
        "%a: i32 = constant {value=8}\n%r: f32[16] = load %x[%a, :]"
    )


def test_other_views_simplify():
    code = """
    %a: ref<f32[16,8] any> = transpose_view %x {perm=(1, 0)}
    %c: ref<f32[8,16] any> = transpose_view %a {perm=(1, 0)}
    %d: ref<f32[4,32] any> = reshape_view %c {shape=(4, 32)}
    %e: ref<f32[128] any> = reshape_view %d {shape=(128,)}
    %f: ref<f32[128] any> = bitcast_view %e {dtype=f32}
    %r: f32[128] = load %f[:]
    """
    assert shows(code).splitlines()[0].endswith("reshape_view %x {shape=(128,)}")


# --- control ---


def test_padding_by_negative_numbers_is_a_slice():
    z = "%z: f32 = constant {value=0.0}\n"
    edges = "{low=(-1, 0), high=(-2, -3), interior=(0, 0)}"
    text = shows(f"{z}%r: f32[5,13] = pad %v, %z {edges}")
    assert "slice %v {starts=(1, 0), limits=(6, 13), strides=(1, 1)}" in text
    assert "= pad" not in text
    edges = "{low=(-1, 0), high=(1, 0), interior=(0, 0)}"
    assert "= pad" in shows(f"{z}%r: f32[8,16] = pad %v, %z {edges}")


def test_a_known_branch_is_inlined():
    code = """
    %k: i32 = constant {value=5}
    %r: i32[8] = cond %k
      branch () { yield %m }
      branch () {
        %1: i32[8] = add %m, %m
        store %n[:] = %1
        yield %1
      }
    """
    assert shows(code).splitlines() == [
        "%0: i32[8] = add %m, %m",
        "store %n[:] = %0",
        'debug_print %0 {format=""}',
    ]


def test_a_predicate_that_folds_decides_the_branch():
    code = """
    %k: i32 = constant {value=0}
    %q: bool = eq %k, %k
    %w: i32 = cast %q {dtype=i32}
    %r: i32[8] = cond %w
      branch () { yield %m }
      branch () {
        %1: i32[8] = add %m, %m
        yield %1
      }
    """
    assert shows(code).splitlines()[0] == "%0: i32[8] = add %m, %m"


LOOP = """
%f: i32 = constant {{value={first}}}
%g: i32 = constant {{value={limit}}}
%s: i32 = constant {{value={step}}}
%r: i32[8] = for %f, %g, %s, %m
  body (%i: i32, %c: i32[8]) {{
    %1: i32[8] = broadcast_in_dim %i {{shape=(8,), dims=()}}
    %2: i32[8] = mul %c, %1
    yield %2
  }}
"""


def test_numbers_that_count_along_are_the_index():
    """As fori_loop of a known length has one; after the loop it is the limit."""
    code = """
        %c0: i32 = constant {value=0}
        %c1: i32 = constant {value=1}
        %zero: i32 = constant {value=0}
        %limit: i32 = reduce %m {kind="max", axes=(0,)}
        %a: i32, %b1: i32, %c: i32 = for %c0, %limit, %c1, %zero, %zero, %c1
          body (%i: i32, %k: i32, %s: i32, %t: i32) {
            %k1: i32 = add %k, %c1
            %s1: i32 = add %s, %k
            %t1: i32 = add %t, %c1
            yield %k1, %s1, %t1
          }
    """
    assert shows(code, "%a, %b1, %c") == dedent("""\
        %c0: i32 = constant {value=0}
        %c1: i32 = constant {value=1}
        %limit: i32 = reduce %m {kind="max", axes=(0,)}
        %b1: i32 = for %c0, %limit, %c1, %c0
        body (%i: i32, %s: i32) {
        %s1: i32 = add %s, %i
        yield %s1
        }
        %0: i32 = max %c0, %limit
        %1: i32 = add %0, %c1
        debug_print %0, %b1, %1 {format=""}""")


CARRIES = """
kernel @k(%n: ref<i32[3] any>, %o: ref<i32[4] any>, %f: ref<f32[] any>) outputs 2 {
  %first: i32 = FIRST
  %limit: i32 = load %n[1]
  %by: i32 = load %n[2]
  %stride: i32 = constant {value=STRIDE}
  %zero: i32 = constant {value=0}
  %half: f32 = constant {value=0.5}
  %start: u32 = constant {value=5}
  %a: i32, %b: i32, %c: u32, %d: f32, %e: i32 =
    for %first, %limit, %stride, %by, %first, %start, %half, %zero
    body (%i: i32, %x: i32, %y: i32, %z: u32, %w: f32, %v: i32) {
      %x1: i32 = add %by, %x
      %y1: i32 = add %y, %stride
      %huge: u32 = constant {value=3000000000}
      %z1: u32 = add %z, %huge
      %z2: i32 = bitcast %z {dtype=i32}
      %v1: i32 = mul %v, %zero
      %v2: i32 = add %x, %y
      %v3: i32 = add %v2, %z2
      %v4: i32 = sub %v3, %v
      yield %x1, %y1, %z1, %w, %v4
    }
  %s: i32 = bitcast %c {dtype=i32}
  store %o[0] = %a
  store %o[1] = %b
  store %o[2] = %s
  store %o[3] = %e
  store %f[] = %d
}
"""


@pytest.mark.parametrize("bounds", [(0, 7), (3, 3), (5, 2), (-4, 5), (2, -(2**31))])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("known", [True, False])
def test_counters_and_what_never_changes_are_not_carried(bounds, stride, known):
    """Of any start, step and type, also where they wrap around or nothing runs."""
    first = f"constant {{value={bounds[0]}}}" if known else "load %n[0]"
    text = CARRIES.replace("FIRST", first).replace("STRIDE", str(stride))
    kernel = parse_kernel(text)
    verify(kernel)
    new = canonicalize(kernel)
    verify(new)
    loops = [op for op in walk(new.body) if op.name == "for"]
    carried = 1 if stride == 1 or (known and bounds[0] >= 0) else 4
    assert all(len(op.results) == carried for op in loops)
    numbers = np.array([*bounds, 2**30 + 7], np.int32)
    assert_same_meaning(kernel, new, [numbers], checked=False)


def test_small_counters_and_loops_that_go_down_stay():
    assert "%t: i8" in shows(COUNT.replace("TYPE", "i8").replace("STRIDE", "1"))
    assert "%t: i32" in shows(COUNT.replace("TYPE", "i32").replace("STRIDE", "-1"))
    assert "%t:" not in shows(COUNT.replace("TYPE", "i32").replace("STRIDE", "1"))


COUNT = """
%c0: i32 = constant {value=0}
%five: i32 = constant {value=5}
%step: i32 = constant {value=STRIDE}
%c3: TYPE = constant {value=3}
%r: TYPE, %s: TYPE = for %c0, %five, %step, %c3, %c3
  body (%i: i32, %t: TYPE, %u: TYPE) {
    %t1: TYPE = add %t, %c3
    %u1: TYPE = mul %u, %t
    yield %t1, %u1
  }
debug_print %s {format=""}
"""


def test_loops_of_no_or_one_trip_go():
    none = shows(LOOP.format(first=3, limit=3, step=1))
    assert none == 'debug_print %m {format=""}'
    once = shows(LOOP.format(first=3, limit=5, step=2)).splitlines()
    assert once == [
        "%0: i32[8] = constant {value=3}",
        "%1: i32[8] = mul %m, %0",
        'debug_print %1 {format=""}',
    ]
    assert "for" in shows(LOOP.format(first=3, limit=6, step=2))
    assert "for" in shows(LOOP.format(first=3, limit=0, step=-1))


def test_dead_and_repeated_code_goes():
    code = """
    %a: f32[8,16] = exp %v
    %c: f32[8,16] = exp %v
    %d: f32[8,16] = log %v
    %r: f32[8,16] = add %a, %c
    """
    assert shows(code).splitlines()[:-1] == [
        "%a: f32[8,16] = exp %v",
        "%r: f32[8,16] = add %a, %a",
    ]


# --- same meaning ---


@pytest.mark.parametrize("name", sorted(table()))
def test_every_op_survives(name: str):
    verify(canonicalize(samples.kernel_of(name)))


@pytest.mark.parametrize("make", kernels.ALL, ids=lambda f: f.__name__)
def test_whole_kernels_stay_legal(make):
    kernel = canonicalize(make())
    verify(kernel)
    assert canonicalize(kernel) is kernel


_FOLDABLE = [
    row
    for row in table().values()
    if row.elementwise and row.name not in ("bitcast", "select_n")
]
_WIDE = [d for d in DTYPES.values() if d.bits >= 8]


@given(st.data())
def test_folding_agrees_with_the_meaning(data):
    row = data.draw(st.sampled_from(_FOLDABLE), label="op")
    dtype: DType = data.draw(
        st.sampled_from([d for d in row.dtypes if d in _WIDE]), label="dtype"
    )
    numbers = [data.draw(_numbers(dtype)) for _ in range(row.arity or 2)]
    b = Builder()
    type_ = TileType((3,), dtype)
    operands = [b.constant(n, type_) for n in numbers]
    attrs = {k: samples.ATTRS[k] for k in row.attrs}
    (result,) = b.emit(row.name, *operands, **attrs)
    b.emit("debug_print", result, format="")
    new = canonicalize(Kernel("k", (), b.block(), 0))
    verify(new)
    arrays = [np.full((3,), n, dtype.np) for n in numbers]
    try:
        with np.errstate(all="ignore"):
            expected = np.asarray(row.meaning(*arrays, **attrs))
    except TypeError:
        return
    op = new.body.ops[0]
    if op.name == row.name:  # left alone, as numpy's result has another type
        assert expected.dtype != result.type.dtype.np
        return
    folded = np.full((3,), op.attrs["value"], result.type.dtype.np)
    wide = object if dtype.is_integer else np.float64  # numpy compares no narrow NaNs
    np.testing.assert_array_equal(folded.astype(wide), expected.astype(wide))


def _numbers(dtype: DType):
    if dtype.is_bool:
        return st.booleans()
    if dtype.is_integer:
        low = -(1 << (dtype.bits - 1)) if dtype.is_signed_int else 0
        high = (1 << (dtype.bits - dtype.is_signed_int)) - 1
        return st.integers(low, high) | st.sampled_from([low, 0, 1, high])
    return st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 100.0])
