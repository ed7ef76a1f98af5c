"""Products with the same right side become one. Text in, text out; and numbers."""

import textwrap

import numpy as np
import pytest

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.join_products import join_products

DOT = "{contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}"

# Two blocks of rows, and what is made of them, with the same right sides.
STEPS = f"""\
kernel @k(%x: ref<f32[8,4] any>, %y: ref<f32[4,4] any>, %o: ref<f32[8,4] any>) \
outputs 1 {{
  %s: ref<f32[4,4] vmem> = alloc
  %t: ref<f32[4,4] vmem> = alloc
  %x0: f32[4,4] = load %x[0:+4, :]
  %y0: f32[4,4] = load %y[:, :]
  %a0: f32[4,4] = dot %x0, %y0 {DOT}
  %w0: f32[4,4] = exp %a0
  %b0: f32[4,4] = dot %w0, %y0 {DOT}
  store %s[:, :] = %b0
  %x1: f32[4,4] = load %x[4:+4, :]
  %y1: f32[4,4] = load %y[:, :]
  %a1: f32[4,4] = dot %x1, %y1 {DOT}
  %w1: f32[4,4] = exp %a1
  BETWEEN
  %b1: f32[4,4] = dot %w1, %y1 {DOT}
  store %t[:, :] = %b1
  %c0: f32[4,4] = load %s[:, :]
  store %o[0:+4, :] = %c0
  %c1: f32[4,4] = load %t[:, :]
  store %o[4:+4, :] = %c1
}}
"""


def steps(between: str = "", was: str = "", now: str = "") -> Kernel:
    text = STEPS.replace("BETWEEN\n", between + "\n").replace(was or "\0", now)
    kernel = parse_kernel(text)
    verify(kernel)
    return kernel


def join(kernel: Kernel, few_rows=8, granule=4, most_bytes=1 << 10) -> Kernel:
    new = join_products(kernel, few_rows, granule, most_bytes)
    verify(new)
    return new


def products(kernel: Kernel) -> list[tuple[int, ...]]:
    found = (op for op in walk(kernel.body) if op.name == "dot")
    return [op.result.tile.shape for op in found]


def assert_same(kernel: Kernel, new: Kernel) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=p.ref.shape).astype(np.float32) for p in kernel.inputs]
    a, b = (
        np.asarray(Walker(k, NumpyNumbers()).run([x.copy() for x in arrays])[0])
        for k in (kernel, new)
    )
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_rows_in_memory_are_loaded_as_one_and_others_joined():
    kernel = steps()
    new = join(kernel)
    body = new.text[new.text.index("  %t:") : new.text.rindex("}")]
    assert textwrap.dedent(body) == textwrap.dedent(f"""\
        %t: ref<f32[4,4] vmem> = alloc
        %y0: f32[4,4] = load %y[:, :]
        %0: f32[8,4] = load %x[:, :]
        %1: f32[8,4] = dot %0, %y0 {DOT}
        %2: f32[4,4] = slice %1 {{starts=(0, 0), limits=(4, 4), strides=(1, 1)}}
        %3: f32[4,4] = slice %1 {{starts=(4, 0), limits=(8, 4), strides=(1, 1)}}
        %w0: f32[4,4] = exp %2
        %w1: f32[4,4] = exp %3
        %4: f32[8,4] = concatenate %w0, %w1 {{axis=0}}
        %5: f32[8,4] = dot %4, %y0 {DOT}
        %6: f32[4,4] = slice %5 {{starts=(0, 0), limits=(4, 4), strides=(1, 1)}}
        %7: f32[4,4] = slice %5 {{starts=(4, 0), limits=(8, 4), strides=(1, 1)}}
        store %s[:, :] = %6
        store %t[:, :] = %7
        %c0: f32[4,4] = load %s[:, :]
        store %o[0:+4, :] = %c0
        %c1: f32[4,4] = load %t[:, :]
        store %o[4:+4, :] = %c1
    """)
    assert_same(kernel, new)


def test_what_reads_a_result_from_memory_comes_after_it():
    between = "%m: f32[4,4] = load %s[:, :]\n  store %t[:, :] = %m"
    kernel = steps(between)
    new = join(kernel)
    assert products(new) == [(8, 4), (8, 4)]
    assert_same(kernel, new)


def test_a_product_that_needs_another_stays():
    kernel = steps("%w2: f32[4,4] = load %s[:, :]", "dot %w1, %y1", "dot %w2, %y1")
    new = join(kernel)
    assert products(new) == [(8, 4), (4, 4), (4, 4)]
    assert_same(kernel, new)


def test_other_right_sides_stay():
    kernel = steps("%z: f32[4,4] = exp %y1", "dot %w1, %y1", "dot %w1, %z")
    new = join(kernel)
    assert products(new) == [(8, 4), (4, 4), (4, 4)]
    assert_same(kernel, new)


def test_rows_that_are_not_next_to_each_other_stay():
    kernel = steps("", "load %x[4:+4, :]", "load %x[2:+4, :]")
    new = join(kernel)
    assert products(new) == [(4, 4), (4, 4), (8, 4)]
    assert_same(kernel, new)


def test_memory_that_is_written_is_read_where_it_was():
    kernel = steps("store %y[:, :] = %w1")
    new = join(kernel)
    assert products(new) == [(4, 4)] * 4
    assert_same(kernel, new)


def test_effects_that_are_not_known_are_not_passed():
    kernel = steps('debug_print %w0 {format="{}"}')
    assert products(join(kernel)) == [(8, 4), (4, 4), (4, 4)]


@pytest.mark.parametrize(
    "limits", [{"few_rows": 4}, {"granule": 8}, {"most_bytes": 100}]
)
def test_products_of_many_rows_or_without_room_stay(limits):
    kernel = steps()
    assert join(kernel, **limits) is kernel


def test_products_inside_branches_are_joined():
    head, *body = STEPS.replace("  BETWEEN\n", "").splitlines()[:-1]
    memory, code = body[:2], body[2:]
    start = ["%n: i32 = constant {value=1}", "cond %n", "branch () {}", "branch () {"]
    kernel = parse_kernel("\n".join([head, *memory, *start, *code, "}", "}"]))
    new = join(kernel)
    assert products(new) == [(8, 4), (8, 4)]
    assert_same(kernel, new)
