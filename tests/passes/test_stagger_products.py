"""Products of a round before the vector code of the one before. Text in, text out."""

import textwrap

import pytest

from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.optimise.stagger_products import stagger_products
from tests.passes.test_join_products import DOT, assert_same

HEAD = """\
kernel @k(%x: ref<f32[4,16] any>, %y: ref<f32[4,4] any>, %o: ref<f32[4,4] any>) \
outputs 1 {
  %s: ref<f32[4,4] vmem> = alloc
"""
ROUND = f"""\
  %x0: f32[4,4] = load %x[:, 0:+4]
  %y0: f32[4,4] = load %y[:, :]
  %a0: f32[4,4] = dot %x0, %y0 {DOT}
  %w0: f32[4,4] = tanh %a0
  %b0: f32[4,4] = dot %w0, %y0 {DOT}
  %c0: f32[4,4] = load %s[:, :]
  %d0: f32[4,4] = add %c0, %b0
  store %s[:, :] = %d0
"""
TAIL = """\
  %end: f32[4,4] = load %s[:, :]
  store %o[:, :] = %end
}
"""


def rounds(count: int = 10, between: str = "") -> Kernel:
    """Rounds whose results are added in scratch."""
    zero = "  %z: f32[4,4] = constant {value=0.0}\n  store %s[:, :] = %z\n"
    text = HEAD + zero
    for number in range(count):
        names = {f"%{name}0": f"%{name}{number}" for name in "xyawbcd"}
        this = ROUND.replace("0:+4", f"{4 * (number % 4)}:+4")
        for old, new in names.items():
            this = this.replace(old, new)
        text += this + between.replace("%w0", f"%w{number}").replace(
            "%i0", f"%i{number}"
        )
    kernel = parse_kernel(text + TAIL)
    verify(kernel)
    return kernel


def stagger(kernel: Kernel, ahead: int = 64) -> Kernel:
    new = stagger_products(kernel, ahead)
    verify(new)
    return new


def order(kernel: Kernel) -> str:
    """The names of what dots and vector code make."""
    found = (op for op in kernel.body.ops if op.name in ("dot", "tanh"))
    return " ".join(op.result.name for op in found)


def test_stages_of_three_rounds_are_side_by_side():
    kernel = rounds()
    new = stagger(kernel)
    assert order(kernel).startswith("a0 w0 b0 a1 w1 b1 a2 w2 b2")
    assert order(new).startswith("a0 a1 w0 a2 w1 b0 a3 w2 b1 a4 w3 b2")
    assert order(new).endswith("a9 w8 b7 w9 b8 b9")
    assert_same(kernel, new)
    start = new.text.index("  %w0:")
    assert textwrap.dedent(new.text[start : new.text.index("  %x3")]) == (
        textwrap.dedent(f"""\
        %w0: f32[4,4] = tanh %a0
        %x2: f32[4,4] = load %x[:, 8:+4]
        %y2: f32[4,4] = load %y[:, :]
        %a2: f32[4,4] = dot %x2, %y2 {DOT}
        %w1: f32[4,4] = tanh %a1
        %b0: f32[4,4] = dot %w0, %y0 {DOT}
        %c0: f32[4,4] = load %s[:, :]
        %d0: f32[4,4] = add %c0, %b0
        store %s[:, :] = %d0
        """)
    )


def test_short_rounds_are_further_apart():
    kernel = rounds(16)
    new = stagger(kernel, ahead=128)
    assert order(new).startswith("a0 a1 a2 w0 a3 w1 a4 w2 b0 a5 w3 b1")
    assert_same(kernel, new)


@pytest.mark.parametrize(
    "kernel",
    [
        rounds(1),
        rounds(4),  # two of four would be done before vector code begins
        parse_kernel(rounds().text.replace("tanh", "neg").replace("dot %w", "dot %x")),
    ],
    ids=["one", "few", "no products of products"],
)
def test_others_stay_as_they_are(kernel):
    assert stagger(kernel) is kernel


def test_what_reads_and_writes_the_same_memory_stays_in_order():
    """The second round has its rows from memory that the first one writes."""
    text = rounds().text.replace("load %x[:, 4:+4]", "load %s[:, :]")
    kernel = parse_kernel(text)
    new = stagger(kernel)
    assert order(new).startswith("a0 w0 a2 b0 a1")
    assert_same(kernel, new)


def test_an_op_with_other_effects_stays_where_it_is():
    kernel = rounds(between='  debug_print %w0 {format=""}\n')
    assert stagger(kernel) is kernel


def test_values_of_a_region_are_needed_too():
    """A branch that uses and stores values comes after them."""
    branch = (
        "  %i0: i32 = constant {value=1}\n"
        "  cond %i0\n    branch () {}\n    branch () { store %s[:, :] = %w0 }\n"
    )
    kernel = rounds(between=branch)
    new = stagger(kernel)
    assert order(new) != order(kernel)
    assert_same(kernel, new)
