"""Structured ops taken apart by role, and put together again."""

import pytest

from pallasite.ir.nodes import Block, Kernel, Op, walk
from pallasite.ir.roles import Cond, Dot, Loop, Pipeline, While
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify

KERNEL = parse_kernel("""
    kernel @k(%size: ref<i32[] smem>, %x: ref<f32[32,8] any>, %o: ref<f32[8,8] any>)
        outputs 1 {
      %n: i32 = load %size[]
      pipeline %n, %x, %o {grid=(2, None), windows=(in[8, 8], out[8, 8]),
          semantics=("parallel", "arbitrary")}
        map (%a: i32, %b: i32) { yield %b, %a }
        map (%c: i32, %d: i32) { yield %c, %c }
        body (%i: i32, %j: i32, %xb: ref<f32[8,8] block>, %ob: ref<f32[8,8] block>) {
          %v: f32[8,8] = load %xb[:, :]
          %p: f32[8,8] = dot %v, %v {contract=((1,), (0,)), batch=((), ()),
              dtype=f32, precision=None}
          %zero: i32 = constant {value=0, type=i32[]}
          %one: i32 = constant {value=1, type=i32[]}
          %r: f32[8,8] = for %zero, %n, %one, %p
            body (%k: i32, %sum: f32[8,8]) {
              %next: f32[8,8] = add %sum, %v
              yield %next
            }
          cond %zero
            branch () {}
            branch () { store %ob[:, :] = %r }
        }
    }
""")


def only(kernel: Kernel, name: str) -> Op:
    (found,) = (op for op in walk(kernel.body) if op.name == name)
    return found


def names(values) -> list[str]:
    return [v.name for v in values]


def test_pipeline():
    pipeline = Pipeline.of(only(KERNEL, "pipeline"))
    assert pipeline.grid == (2, None)
    assert [n if isinstance(n, int) else n.name for n in pipeline.sizes] == [2, "n"]
    assert names(pipeline.arrays) == ["x", "o"]
    assert names(pipeline.ids) == ["i", "j"]
    assert names(pipeline.blocks) == ["xb", "ob"]
    shown = pipeline.shown[1]
    assert (shown.array.name, shown.window.mode, shown.block.name) == ("o", "out", "ob")
    assert names(shown.index_map.yields) == ["c", "c"]


def test_loop():
    loop = Loop.of(only(KERNEL, "for"))
    assert names(loop.bounds) == ["zero", "n", "one"]
    assert loop.index.name == "k"
    carried = (loop.inits, loop.carried, loop.yields, loop.results)
    assert [names(values) for values in carried] == [["p"], ["sum"], ["next"], ["r"]]


def test_cond_takes_the_nearest_branch():
    cond = Cond.of(only(KERNEL, "cond"))
    assert cond.which.name == "zero"
    first, second = cond.branches
    taken = [cond.branch(number) for number in (-1, 0, 1, 9)]
    assert taken == [first, first, second, second]


def test_while():
    kernel = parse_kernel("""
        kernel @k(%o: ref<i32[] any>) outputs 1 {
          %zero: i32 = constant {value=0, type=i32[]}
          %r: i32 = while %zero
            cond (%a: i32) {
              %go: bool = lt %a, %zero
              yield %go
            }
            body (%b: i32) { yield %b }
        }
    """)
    loop = While.of(only(kernel, "while"))
    assert names(loop.inits) == ["zero"]
    assert (names(loop.condition.params), names(loop.body.params)) == (["a"], ["b"])


@pytest.mark.parametrize("name", ["pipeline", "for"])
def test_an_op_taken_apart_is_put_together_the_same(name: str):
    op = only(KERNEL, name)
    again = {"pipeline": Pipeline, "for": Loop}[name].of(op).to_op()
    assert (again.operands, again.results) == (op.operands, op.results)
    assert (again.attrs, again.regions) == (op.attrs, op.regions)


def test_windows_are_left_out():
    pipeline = Pipeline.of(only(KERNEL, "pipeline"))
    ops = tuple(op for op in pipeline.body.ops if op.name == "constant")
    alone = pipeline.with_(body=Block(pipeline.body.params, ops))
    kept = alone.showing(s for s in alone.shown if s.window.mode == "out")
    before, _ = KERNEL.body.ops
    verify(KERNEL.with_(body=Block((), (before, kept.to_op()))))
    assert (names(kept.arrays), names(kept.body.params)) == (["o"], ["i", "j", "ob"])
    none = alone.showing([])
    verify(KERNEL.with_(body=Block((), (before, none.to_op()))))
    assert none.blocks == none.windows == none.maps == ()


def test_dot():
    kernel = parse_kernel("""
        kernel @k(%x: ref<f32[2,3,4] any>, %y: ref<f32[4,5,2] any>,
            %o: ref<f32[2,3,5] any>) outputs 1 {
          %l: f32[2,3,4] = load %x[:, :, :]
          %r: f32[4,5,2] = load %y[:, :, :]
          %p: f32[2,3,5] = dot %l, %r {contract=((2,), (0,)), batch=((0,), (2,)),
              dtype=f32, precision=None}
          store %o[:, :, :] = %p
        }
    """)
    dot = Dot.of(only(kernel, "dot"))
    assert (dot.lhs.batch, dot.lhs.free, dot.lhs.contract) == ((0,), (1,), (2,))
    assert (dot.rhs.batch, dot.rhs.free, dot.rhs.contract) == ((2,), (1,), (0,))
    assert dot.depth == 4
    assert dot.rhs.sizes(dot.rhs.free) == [5]
