"""Walking, substituting, cloning, cleaning up and the pattern driver."""

from textwrap import dedent

import pytest

from pallasite.errors import InternalError
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.rewrite import (
    Rewriter,
    apply_patterns,
    clone,
    common_subexpressions,
    dead_code,
    inline,
    map_ops,
    substitute,
)
from pallasite.ir.text import parse_kernel, print_block, print_kernel
from pallasite.ir.verify import verify
from tests.ir import kernels

HEAD = "kernel @k(%x: ref<f32[8] any>, %y: ref<f32[8] any>) outputs 1 {"


def kernel_of(code: str) -> Kernel:
    kernel = parse_kernel(f"{HEAD}\n{code}\n}}")
    verify(kernel)
    return kernel


def code_of(kernel: Kernel) -> str:
    verify(kernel)
    lines = print_kernel(kernel).splitlines()
    return dedent("\n".join(lines[1:-1]))


def check(change, before: str, after: str) -> None:
    assert code_of(change(kernel_of(before))) == dedent(after).strip()


def add_to_sub(op: Op, b: Rewriter) -> Value | None:
    if op.name != "add":
        return None
    x, y = op.operands
    return b.sub(x, b.neg(y))


NESTED = """
%0: f32[8] = load %x[:]
%1: i32 = constant {value=1}
%2: f32[8] = cond %1
  branch () { yield %0 }
  branch () {
    %3: f32[8] = add %0, %0
    yield %3
  }
%4: f32[8] = add %2, %0
store %y[:] = %4
"""


def test_map_ops_rewrites_inside_and_out():
    check(
        lambda k: map_ops(k, add_to_sub),
        NESTED,
        """
        %0: f32[8] = load %x[:]
        %1: i32 = constant {value=1}
        %2: f32[8] = cond %1
          branch () { yield %0 }
          branch () {
            %3: f32[8] = neg %0
            %4: f32[8] = sub %0, %3
            yield %4
          }
        %5: f32[8] = neg %0
        %6: f32[8] = sub %2, %5
        store %y[:] = %6
        """,
    )


def test_map_ops_returns_the_same_object_if_nothing_changes():
    kernel = kernels.flash_attention()
    assert map_ops(kernel, lambda op, b: None) is kernel
    assert map_ops(kernel.body, lambda op, b: None) is kernel.body


def test_map_ops_keeps_the_source_line():
    text = HEAD + '\n%0: f32[8] = load %x[:] loc("a.py":3)\n'
    kernel = parse_kernel(text + '%1: f32[8] = add %0, %0 loc("a.py":4)\n}')
    ops = map_ops(kernel, add_to_sub).body.ops
    assert [op.loc and op.loc.line for op in ops] == [3, 4, 4]


def test_substitute_replaces_uses_everywhere():
    kernel = kernel_of(NESTED)
    x, y = kernel.params
    new = substitute(kernel.body, {x: y})
    assert "load %y[:]" in print_block(new)
    assert substitute(kernel.body, {}) is kernel.body
    loaded = kernel.body.ops[0].result
    other = Value(loaded.type, "other")
    text = print_block(substitute(kernel.body, {loaded: other}))
    assert "add %other, %other" in text
    assert "yield %other" in text


def test_clone_makes_every_value_fresh():
    body = kernels.matmul().body
    copy = clone(body)
    old = {v for op in walk(body) for v in op.results}
    old |= {p for op in walk(body) for r in op.regions for p in r.params}
    new = {v for op in walk(copy) for v in op.results}
    new |= {p for op in walk(copy) for r in op.regions for p in r.params}
    assert len(old) == len(new)
    assert not old & new
    assert print_block(copy) == print_block(body)


def test_inline_emits_a_copy_with_arguments():
    kernel = kernel_of(
        """
        %0: f32[8] = load %x[:]
        %1: i32 = constant {value=1}
        %2: f32[8] = for %1, %1, %1, %0
          body (%i: i32, %c: f32[8]) {
            %3: f32[8] = neg %c
            yield %3
          }
        """
    )

    def inlined(op: Op, b: Rewriter):
        if op.name != "for":
            return None
        once = inline(b, op.regions[0], (op.operands[0], op.operands[3]))
        return inline(b, op.regions[0], (op.operands[0], *once))

    assert code_of(map_ops(kernel, inlined)) == dedent(
        """\
        %0: f32[8] = load %x[:]
        %1: i32 = constant {value=1}
        %2: f32[8] = neg %0
        %3: f32[8] = neg %2"""
    )


def test_dead_code_goes_and_effects_stay():
    check(
        dead_code,
        """
        %0: f32[8] = load %x[:]
        %1: f32[8] = exp %0
        %2: f32[8] = exp %1
        %3: i32 = constant {value=0}
        %s: ref<f32[8] vmem> = alloc
        %4: f32 = atomic_rmw %y[0] = %5 {kind="add"}
        """.replace("%4", "%5: f32 = constant {value=1.0}\n%4"),
        """
        %0: f32 = constant {value=1.0}
        %1: f32 = atomic_rmw %y[0] = %0 {kind="add"}
        """,
    )


def test_dead_results_of_branches_go():
    check(
        dead_code,
        """
        %0: i32 = constant {value=0}
        %1: f32[8] = load %x[:]
        %2: f32[8], %3: f32[8] = cond %0
          branch () { yield %1, %1 }
          branch () {
            %4: f32[8] = neg %1
            %5: f32[8] = exp %1
            store %y[:] = %1
            yield %4, %5
          }
        store %y[:] = %3
        """,
        """
        %0: i32 = constant {value=0}
        %1: f32[8] = load %x[:]
        %2: f32[8] = cond %0
          branch () { yield %1 }
          branch () {
            %3: f32[8] = exp %1
            store %y[:] = %1
            yield %3
          }
        store %y[:] = %2
        """,
    )


def test_dead_code_inside_regions_and_dead_loops_go():
    check(
        dead_code,
        """
        %0: i32 = constant {value=0}
        %1: i32 = for %0, %0, %0, %0
          body (%i: i32, %c: i32) {
            %2: i32 = add %i, %c
            yield %2
          }
        cond %0
          branch () {
            %3: f32[8] = load %x[:]
            %4: f32[8] = neg %3
            store %y[:] = %3
          }
        %5: i32 = while %0
          test (%j: i32) {
            %6: bool = eq %j, %0
            yield %6
          }
          body (%k: i32) { yield %k }
        """,
        """
        %0: i32 = constant {value=0}
        cond %0
          branch () {
            %1: f32[8] = load %x[:]
            store %y[:] = %1
          }
        %2: i32 = while %0
          test (%j: i32) {
            %3: bool = eq %j, %0
            yield %3
          }
          body (%k: i32) { yield %k }
        """,
    )


def test_equal_expressions_are_shared_within_scope():
    check(
        common_subexpressions,
        """
        %0: i32 = constant {value=0}
        %1: i32 = constant {value=0}
        %2: i32 = add %0, %1
        cond %2
          branch () {
            %3: i32 = add %0, %0
            %4: i32 = neg %3
            debug_print %4 {format="a"}
          }
          branch () {
            %5: i32 = neg %2
            debug_print %5 {format="b"}
          }
        %6: i32 = neg %2
        debug_print %6 {format="c"}
        """,
        """
        %0: i32 = constant {value=0}
        %1: i32 = add %0, %0
        cond %1
          branch () {
            %2: i32 = neg %1
            debug_print %2 {format="a"}
          }
          branch () {
            %3: i32 = neg %1
            debug_print %3 {format="b"}
          }
        %4: i32 = neg %1
        debug_print %4 {format="c"}
        """,
    )


def test_constants_that_only_look_equal_are_not_shared():
    code = """
        %0: f32 = constant {value=0.0}
        %1: f32 = constant {value=-0.0}
        %2: i32 = constant {value=0}
        debug_print %0, %1, %2 {format="a"}
        """
    check(common_subexpressions, code, code)


def test_loads_are_shared_up_to_a_write():
    check(
        common_subexpressions,
        """
        %0: f32[8] = load %x[:]
        %1: f32[8] = load %x[:]
        %2: f32[8] = add %0, %1
        store %y[:] = %2
        %3: f32[8] = load %x[:]
        debug_print %3 {format="a"}
        """,
        """
        %0: f32[8] = load %x[:]
        %1: f32[8] = add %0, %0
        store %y[:] = %1
        %2: f32[8] = load %x[:]
        debug_print %2 {format="a"}
        """,
    )


def test_loads_are_not_shared_with_a_loop_that_writes():
    code = """
        %0: i32 = constant {value=0}
        %1: f32[8] = load %y[:]
        for %0, %0, %0
          body (%i: i32) {
            %2: f32[8] = load %y[:]
            %3: f32[8] = neg %2
            store %y[:] = %3
          }
        %4: f32[8] = load %y[:]
        store %x[:] = %4
        """
    check(common_subexpressions, code, code)


def test_loads_are_shared_with_a_loop_that_only_reads():
    check(
        common_subexpressions,
        """
        %0: i32 = constant {value=0}
        %1: f32[8] = load %y[:]
        %2: f32[8] = for %0, %0, %0, %1
          body (%i: i32, %c: f32[8]) {
            %3: f32[8] = load %y[:]
            yield %3
          }
        %4: f32[8] = load %y[:]
        %5: f32[8] = add %2, %4
        store %x[:] = %5
        """,
        """
        %0: i32 = constant {value=0}
        %1: f32[8] = load %y[:]
        %2: f32[8] = for %0, %0, %0, %1
          body (%i: i32, %c: f32[8]) { yield %1 }
        %3: f32[8] = add %2, %1
        store %x[:] = %3
        """,
    )


def test_pipeline_regions_share_nothing_with_the_outside():
    kernel = kernels.flash_attention()
    shared = common_subexpressions(kernel)
    for region in shared.body.ops[-1].regions[:-1]:
        assert [op.name for op in region.ops] == ["constant"]


def test_semaphore_reads_are_not_shared():
    kernel = parse_kernel(
        """kernel @k(%x: ref<i32[2] any>) outputs 1 {
          %s: ref<i32 sem> = alloc
          %0: i32 = sem_read %s
          %1: i32 = sem_read %s
          store %x[0] = %0
          store %x[1] = %1
        }"""
    )
    assert common_subexpressions(kernel) is kernel


def test_patterns_run_to_a_fixpoint():
    def count_down(op: Op, b: Rewriter) -> Value | None:
        value = op.attrs["value"]
        return b.index(value - 1) if value > 0 else None

    kernel = kernel_of('%0: i32 = constant {value=5}\ndebug_print %0 {format="a"}')
    new = apply_patterns(kernel, [("constant", count_down)])
    assert new.body.ops[0].attrs["value"] == 0
    with pytest.raises(InternalError, match="count_down on constant"):
        apply_patterns(kernel, [("constant", count_down)], limit=3)


def test_patterns_see_what_made_a_value_and_refusals_leave_nothing():
    def double_negation(op: Op, b: Rewriter) -> Value | None:
        b.index(7)  # emitted, then not used
        inner = b.producer(op.operands[0], "neg")
        return inner.operands[0] if inner else None

    kernel = kernel_of(
        "%0: f32[8] = load %x[:]\n%1: f32[8] = neg %0\n"
        "%2: f32[8] = neg %1\nstore %y[:] = %2"
    )
    new = apply_patterns(kernel, [("neg", double_negation)])
    assert [op.name for op in new.body.ops] == ["load", "neg", "constant", "store"]
    assert new.body.ops[-1].operands[1] is new.body.ops[0].result


def test_patterns_for_any_op_come_last():
    seen: list[str] = []

    def named(op: Op, b: Rewriter) -> None:
        seen.append(f"named {op.name}")

    def anywhere(op: Op, b: Rewriter) -> None:
        seen.append(f"any {op.name}")

    kernel = kernel_of("%0: f32[8] = load %x[:]\nstore %y[:] = %0")
    assert apply_patterns(kernel, [("*", anywhere), ("load", named)]) is kernel
    assert seen == ["named load", "any load", "any store"]


def test_an_empty_block_is_left_alone():
    block = Block()
    assert substitute(block, {}) is block
    kernel = Kernel("k", (), block, 0)
    assert dead_code(kernel) is kernel
    assert common_subexpressions(kernel) is kernel
