"""Branches that the grid decides are taken first. Text in, text out; random ones."""

import re
import textwrap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite.interpret import Walker
from pallasite.interpret.numpy_numbers import NumpyNumbers
from pallasite.ir.nodes import Block, Kernel, walk
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.optimise.join_branches import join_branches

KERNEL = """
kernel @k(%n: ref<i32[1] smem>, %x: ref<f32[4,4] any>, %o: ref<f32[16,4] any>)
    outputs 1 {
  %s: ref<f32[4,4] vmem> = alloc
  pipeline %x, %o {grid=(4, 2), windows=(in[4, 4], out[4, 4]),
      semantics=("parallel", "arbitrary")}
    map (%i1: i32, %j1: i32) {
      %z1: i32 = constant {value=0}
      yield %z1, %z1
    }
    map (%i2: i32, %j2: i32) {
      %z2: i32 = constant {value=0}
      yield %i2, %z2
    }
    body (%i: i32, %j: i32, %xb: ref<f32[4,4] block>, %ob: ref<f32[4,4] block>) {
      %c0: i32 = constant {value=0}
      %c1: i32 = constant {value=1}
      %c2: i32 = constant {value=2}
      %c3: i32 = constant {value=3}
      %given: i32 = load %n[0]
      %v0: f32[4,4] = load %xb[:, :]
      store %ob[:, :] = %v0
BODY
    }
}
"""

STEP = """
      %w{n}: i32 = cast %g{n} {{dtype=i32}}
      cond %w{n}
        branch () {{}}
        branch () {{
          %a{n}: f32[4,4] = load %ob[:, :]
          %b{n}: f32[4,4] = load %xb[:, :]
          %d{n}: f32[4,4] = dot %a{n}, %b{n} {{contract=((1,), (0,)),
            batch=((), ()), dtype=f32, precision=None}}
          store %ob[:, :] = %d{n}
        }}
"""


def kernel_of(*guards: str, after: str = "", step: str = STEP) -> Kernel:
    body = "".join(
        f"      {guard}\n{step.format(n=n)}" for n, guard in enumerate(guards)
    )
    kernel = canonicalize(parse_kernel(KERNEL.replace("BODY", body + after)))
    verify(kernel)
    return kernel


def outputs(kernel: Kernel, number: int = 2) -> np.ndarray:
    x = np.arange(16, dtype=np.float32).reshape(4, 4) % 3 - 1
    given_number = np.array([number], "i4")
    (out,) = Walker(kernel, NumpyNumbers()).run([given_number, x.copy()])
    return np.asarray(out)


def joined(kernel: Kernel, most: float = 1e9) -> Kernel:
    new = join_branches(kernel, lambda block: len(list(walk(block))), most)
    verify(new)
    for number in (0, 2):
        np.testing.assert_array_equal(outputs(kernel, number), outputs(new, number))
    return new


def shape(block: Block) -> list:
    """The products and branches of a block: "dot", or a list of branches."""
    found: list = []
    for op in block.ops:
        if op.name == "dot":
            found.append("dot")
        elif op.regions:
            found.append([shape(region) for region in op.regions])
    return found


def body_of(kernel: Kernel) -> Block:
    (pipeline,) = [op for op in kernel.body.ops if op.name == "pipeline"]
    return pipeline.regions[-1]


def test_a_version_for_each_outcome_that_there_is():
    """`i > 0`, `i > 1`, `i > 2`: no, one, two or three steps after each other."""
    kernel = kernel_of(*(f"%g{n}: bool = gt %i, %c{n}" for n in range(3)))
    assert shape(body_of(kernel)) == [[[], ["dot"]]] * 3
    one, two, three = (["dot"] * n for n in (1, 2, 3))
    assert shape(body_of(joined(kernel))) == [[[], [[one, [[two, three]]]]]]


def test_text():
    """What decides comes first; what is around the steps is in each version."""
    guards = "%g0: bool = gt %i, %c0", "%g1: bool = le %i, %c0"
    after = "      %last: f32[4,4] = load %xb[:, :]\n      store %ob[:, :] = %last\n"
    text = joined(kernel_of(*guards, after=after)).text
    body = text[text.index("    body (") : text.rindex("    }\n}")]
    body = re.sub(r" \{contract=.*\}", "", body)
    assert textwrap.dedent(body) == textwrap.dedent("""\
    body (%i: i32, %j: i32, %xb: ref<f32[4,4] block>, %ob: ref<f32[4,4] block>) {
      %c0: i32 = constant {value=0}
      %g0: bool = gt %i, %c0
      %w0: i32 = cast %g0 {dtype=i32}
      cond %w0
        branch () {
          %v0: f32[4,4] = load %xb[:, :]
          store %ob[:, :] = %v0
          %a1: f32[4,4] = load %ob[:, :]
          %b1: f32[4,4] = load %xb[:, :]
          %d1: f32[4,4] = dot %a1, %b1
          store %ob[:, :] = %d1
          %last: f32[4,4] = load %xb[:, :]
          store %ob[:, :] = %last
        }
        branch () {
          %v0_1: f32[4,4] = load %xb[:, :]
          store %ob[:, :] = %v0_1
          %a0: f32[4,4] = load %ob[:, :]
          %b0: f32[4,4] = load %xb[:, :]
          %d0: f32[4,4] = dot %a0, %b0
          store %ob[:, :] = %d0
          %last_1: f32[4,4] = load %xb[:, :]
          store %ob[:, :] = %last_1
        }
    """)


MASKED = STEP.replace(
    "          store %ob[:, :] = %d{n}",
    """\
          %r{n}: i32[4,4] = iota {{dim=0}}
          %f{n}: i32[4,4] = add %first, %r{n}
          %l{n}: i32[4,4] = broadcast_in_dim %c{n} {{shape=(4, 4), dims=()}}
          %m{n}: bool[4,4] = gt %f{n}, %l{n}
          %e{n}: f32[4,4] = select_n %m{n}, %a{n}, %d{n}
          store %ob[:, :] = %e{n}""",
)
FIRST = "%first: i32[4,4] = broadcast_in_dim %i {shape=(4, 4), dims=()}\n      "


@pytest.mark.parametrize("steps, masks", [(2, [0, 2]), (3, [0, 0, 0])])
def test_an_index_that_a_version_knows_is_a_number(steps, masks):
    """Rows `i + r > n` of step n, which is taken if `i > n`: no mask where i is known.

    Of two steps, the second version is that of i = 2 and of i = 3.
    """
    guards = [f"%g{n}: bool = gt %i, %c{n}" for n in range(steps)]
    kernel = kernel_of(FIRST + guards[0], *guards[1:], step=MASKED)
    regions = [r for op in walk(body_of(joined(kernel))) for r in op.regions]
    names = [[op.name for op in region.ops] for region in regions]
    assert [each.count("select_n") for each in names if "dot" in each] == masks


def test_steps_that_the_grid_does_not_decide_are_left():
    """A number from memory: the two steps before it are joined, it is not."""
    guards = [f"%g{n}: bool = gt %i, %c{n}" for n in range(2)]
    kernel = kernel_of(*guards, "%g2: bool = gt %i, %given")
    after = joined(kernel)
    assert shape(body_of(after)) == [
        [[], [[["dot"], ["dot", "dot"]]]],
        [[], ["dot"]],
    ]
    alone = kernel_of(guards[0], "%g1: bool = gt %i, %given")
    assert joined(alone) is alone


def test_too_much_code_is_left():
    kernel = kernel_of(*(f"%g{n}: bool = gt %i, %c{n}" for n in range(3)))
    assert joined(kernel, most=10) is kernel


def test_branches_without_products_are_left():
    product = STEP[STEP.index("dot %a{n}") : STEP.index("          store")]
    step = STEP.replace(product, "add %a{n}, %b{n}\n")
    kernel = kernel_of("%g0: bool = gt %i, %c0", "%g1: bool = gt %i, %c1", step=step)
    assert joined(kernel) is kernel


VALUES = """
      %w{n}: i32 = cast %g{n} {{dtype=i32}}
      %v{m}: f32[4,4] = cond %w{n}
        branch () {{ yield %v{n} }}
        branch () {{
          %b{n}: f32[4,4] = load %xb[:, :]
          %d{n}: f32[4,4] = dot %v{n}, %b{n} {{contract=((1,), (0,)),
            batch=((), ()), dtype=f32, precision=None}}
          yield %d{n}
        }}
"""


def test_values_pass_from_step_to_step():
    """And out of the versions, to a branch that is none of them."""
    guards = "%g0: bool = gt %i, %c0", "%g1: bool = gt %i, %c1"
    steps = "".join(
        f"      {guard}\n{VALUES.format(n=n, m=n + 1)}"
        for n, guard in enumerate(guards)
    )
    after = """
      %h: bool = eq %j, %given
      %hw: i32 = cast %h {dtype=i32}
      cond %hw
        branch () { store %ob[:, :] = %v2 }
        branch () { store %s[:, :] = %v1 }
    """
    kernel = canonicalize(parse_kernel(KERNEL.replace("BODY", steps + after)))
    assert shape(body_of(joined(kernel))) == [
        [[], [[["dot"], ["dot", "dot"]]]],
        [[], []],
    ]


@settings(deadline=None)
@given(st.data())
def test_random_guards(data):
    kinds = st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"])
    values = st.sampled_from(["%i", "%j", "%c0", "%c1", "%c2", "%c3", "%given"])
    guards = [
        f"%g{n}: bool = {data.draw(kinds)} {data.draw(values)}, {data.draw(values)}"
        for n in range(data.draw(st.integers(2, 4)))
    ]
    step = data.draw(st.sampled_from([STEP, MASKED]))
    kernel = kernel_of(FIRST + guards[0], *guards[1:], step=step)
    joined(kernel, most=data.draw(st.sampled_from([20, 100, 1e9])))
