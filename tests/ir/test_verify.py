"""The verifier accepts what is legal and says what is wrong with the rest."""

from textwrap import dedent

import pytest

from pallasite.errors import VerifyError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Loc, Op, Value
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import F32, INDEX, RefType, TileType
from pallasite.ir.verify import verify
from tests.ir import kernels

HEAD = "kernel @k(%x: ref<f32[8,16] any>, %s: ref<i32 sem>) outputs 1"
PIPELINE = """\
pipeline %x {{grid={grid}, windows=({window},), semantics={semantics}}}
  map (%a: i32) {{ {map} }}
  body (%b: i32, %xb: {block}) {{}}
"""
DEFAULTS = dict(
    grid="(4,)",
    window="in[2, 16]",
    semantics='("parallel",)',
    map="yield %a, %a",
    block="ref<f32[2,16] block>",
)


def pipeline(**changes: str) -> str:
    return PIPELINE.format(**{**DEFAULTS, **changes})


def kernel_text(code: str, head: str = HEAD) -> str:
    constants = """\
    %c: i32 = constant {value=0}
    %f: f32 = constant {value=0.0}
    %t: f32[8,16] = load %x[:, :]
    """
    return f"{head} {{\n{dedent(constants)}\n{code}\n}}"


# Code of a kernel body, and what the verifier says about it.
BROKEN_CODE = {
    "unknown op": ("frobnicate %c", "unknown operation 'frobnicate'"),
    "arity": ("%1: f32[8,16] = add %t", "add takes 2 operands, got 1"),
    "regions": ("%1: i32 = for %c, %c, %c, %c", "for takes 1 regions, got 0"),
    "missing attribute": (
        "%1: f32[8] = reduce %t {axes=(1,)}",
        "reduce lacks attribute 'kind'",
    ),
    "unknown attribute": (
        "%1: f32[8,16] = exp %t {fast=True}",
        "exp has no attribute 'fast'",
    ),
    "result type": (
        "%1: f32[8] = neg %t",
        "neg gives (f32[8,16]), but its results are (f32[8])",
    ),
    "result count": (
        "neg %t",
        "neg gives (f32[8,16]), but its results are ()",
    ),
    "operand types differ": (
        "%1: f32 = add %f, %c",
        "add: operands differ: f32 and i32",
    ),
    "dtype": ("%1: i32 = exp %c", "exp does not take i32"),
    "bool arithmetic": (
        "%1: bool = eq %c, %c\n%2: bool = add %1, %1",
        "add does not take bool",
    ),
    "ref as a tile": ("%1: f32[8,16] = neg %x", "neg: takes tiles, got ref<"),
    "tile as a ref": (
        "%1: f32[8] = load %t {index=(span(0, 8, 1), at(0)), mask=False, other=False}",
        "load: the first operand must be a ref",
    ),
    "reduction kind": (
        '%1: f32[8] = reduce %t {kind="mean", axes=(1,)}',
        "reduce: unknown reduction 'mean'",
    ),
    "reshape": (
        "%1: f32[7] = reshape %t {shape=(7,)}",
        "reshape: cannot reshape f32[8,16] to (7,)",
    ),
    "malformed attribute": (
        "%1: f32[7] = reshape %t {shape=None}",
        "reshape: malformed operands or attributes (TypeError:",
    ),
    "constant kind": ("%1: i32 = constant {value=1.5}", "1.5 is not a int, for i32"),
    "constant bool": (
        "%1: bool = constant {value=1}",
        "constant: 1 is not a bool, for bool",
    ),
    "constant range": (
        "%1: i8 = constant {value=300}",
        "constant: 300 is not a number of i8",
    ),
    "constant rounding": (
        "%1: bf16 = constant {value=0.1}",
        "constant: 0.1 is not a number of bf16",
    ),
    "iota dimension": (
        "%1: i32[4] = iota {dim=1}",
        "iota: dimension 1 is not one of i32[4]",
    ),
    "alloc of a tile": (
        "%1: f32[4] = alloc {type=f32[4]}",
        "alloc: f32[4] is not a ref type",
    ),
    "memory space": (
        "%1: ref<f32[4] attic> = alloc {type=ref<f32[4] attic>}",
        "unknown memory space 'attic'",
    ),
    "index rank": ("%1: f32 = load %x[0]", "load: index has 1 entries for ref<f32"),
    "index range": (
        "%1: f32[16] = load %x[8, :]",
        "load: index 8 is out of bounds for 8 elements",
    ),
    "span range": (
        "%1: f32[8,16] = load %x[1:+8, :]",
        "is out of bounds for 8 elements",
    ),
    "index operand": (
        "%1: f32[16] = load %x[%f, :]",
        "load: index operand f32 is not an integer",
    ),
    "stored value": (
        "store %x[:, :] = %f",
        "store: value is f32, the index selects f32[8,16]",
    ),
    "mask shape": (
        "%1: bool = eq %c, %c\nstore %x[:, :] = %t mask %1",
        "store: mask and other must have the shape of f32[8,16]",
    ),
    "mask dtype": (
        "store %x[:, :] = %t mask %t",
        "store: the mask is f32[8,16], not bool",
    ),
    "other dtype": (
        "%1: bool = eq %c, %c\n%2: f32 = load %x[0, 0] mask %1 other %c",
        "load: other is i32 for ref<f32[8,16] any>",
    ),
    "gather in a view": (
        "%1: i32[4] = iota {dim=0}\n%2: ref<f32[4,16] any> = subview %x[gather %1, :]",
        "subview: a view cannot gather",
    ),
    "atomic kind": (
        '%1: f32 = atomic_rmw %x[0, 0] = %f {kind="nand"}',
        "atomic_rmw: unknown atomic 'nand'",
    ),
    "semaphore as data": ("%1: i32 = load %s[]", "load: ref<i32 sem> is a semaphore"),
    "data as semaphore": (
        "sem_wait %x, %c",
        "sem_wait: ref<f32[8,16] any> is not a semaphore",
    ),
    "semaphore amount": (
        "sem_signal %s, %f",
        "sem_signal: the amount is f32, not i32",
    ),
    "copy shapes": (
        "%1: ref<f32[8] vmem> = alloc\ncopy_start %x, %1, %s {priority=0}",
        "copy_start: cannot copy ref<f32[8,16] any> to ref<f32[8] vmem>",
    ),
    "copy semaphore": (
        "copy_wait %x, %x, %x",
        "copy_wait: ref<f32[8,16] any> is not a semaphore",
    ),
    "debug_check": ('debug_check %c {message="m"}', "debug_check: i32 is not a bool"),
    "cond number": (
        "cond %f\n branch () {}",
        "cond: the branch number is one i32, got (f32)",
    ),
    "cond results": (
        "%1: i32 = cond %c\n branch () { yield %c }\n branch () { yield %f }",
        "cond: region yields (f32), expected (i32)",
    ),
    "for counter": (
        "for %f, %f, %f\n body (%i: f32) {}",
        "for: counts with f32, not an integer scalar",
    ),
    "for carry": (
        "%1: f32 = for %c, %c, %c, %f\n body (%i: i32, %g: f32) { yield %i }",
        "for: region yields (i32), expected (f32)",
    ),
    "while condition": (
        "%1: i32 = while %c\n test (%i: i32) { yield %i }\n"
        " body (%j: i32) { yield %j }",
        "while: region yields (i32), expected (bool)",
    ),
    "ref yielded": (
        "%1: ref<f32[8,16] any> = cond %c\n branch () { yield %x }",
        "a region yields a ref",
    ),
    "out of scope": (
        "cond %c\n branch () {\n %1: i32 = add %c, %c\n }\n%2: i32 = neg %1",
        "operand 0 is defined in a region that has ended",
    ),
    "grid size": (pipeline(grid="(-1,)"), "pipeline: grid size -1 is not a count"),
    "grid operand": (
        "%1: f32[8,16] = neg %t\n"
        + pipeline(grid="(None,)").replace("pipeline %x", "pipeline %f, %x"),
        "pipeline: grid size operand 0 is f32, not i32",
    ),
    "semantics": (
        pipeline(semantics='("fast",)'),
        "pipeline: unknown semantics 'fast'; known: arbitrary",
    ),
    "semantics count": (
        pipeline(semantics="()"),
        "pipeline: 0 semantics for 1 axes",
    ),
    "window rank": (
        pipeline(window="in[2]"),
        "pipeline: window has 1 dimensions for ref<f32[8,16] any>",
    ),
    "window mode": (pipeline(window="inout[2, 16]"), "unknown mode 'inout'"),
    "window space": (
        pipeline(window="in[2, 16] space attic", block="ref<f32[2,16] attic>"),
        "unknown memory space 'attic'",
    ),
    "window kind": (
        pipeline(window="in[odd 2, 16]"),
        "window 0: unknown kind of dimension 'odd'",
    ),
    "squeezed size": (
        pipeline(window="in[squeezed 2, 16]", block="ref<f32[16] block>"),
        "window 0: a squeezed dimension of size 2",
    ),
    "padding": (
        pipeline(window="in[2 pad (1, 1), 16]"),
        "window 0: padding (1, 1) of a blocked dimension",
    ),
    "buffers": (pipeline(window="in[2, 16] buffers 0"), "window 0: 0 buffers"),
    "map results": (
        pipeline(map="yield %a"),
        "pipeline: region yields (i32), expected (i32, i32)",
    ),
    "block ref": (
        pipeline(block="ref<f32[4,16] block>"),
        "pipeline: region takes (i32, ref<f32[4,16] block>)",
    ),
    "map writes": (
        pipeline(map="store %x[:, :] = %t\nyield %a, %a"),
        "index map 0 writes memory: store",
    ),
}


@pytest.mark.parametrize("name", BROKEN_CODE)
def test_broken_code_is_refused(name: str):
    code, message = BROKEN_CODE[name]
    explicit = "sem_" in code or "copy_" in code
    head = HEAD + " level explicit" if explicit else HEAD
    kernel = parse_kernel(kernel_text(code, head))
    with pytest.raises(VerifyError) as raised:
        verify(kernel)
    assert message in str(raised.value)


BROKEN_HEADS = {
    "tile parameter": (
        "kernel @k(%x: f32[8,16]) outputs 1",
        "parameter 0 is f32[8,16]; kernels take refs",
    ),
    "output count": (HEAD.replace("outputs 1", "outputs 3"), "3 outputs of 2"),
    "level": (HEAD + " level lane", "level 'lane' is not one of tile, explicit"),
    "alias input": (HEAD + " aliases {3: 0}", "alias 3: 0 names no input"),
    "alias output": (HEAD + " aliases {0: 1}", "alias 0: 1 names no output"),
    "alias types": (
        HEAD + " aliases {0: 0}",
        "alias 0: 0 joins f32[8,16] and i32",
    ),
    "alias twice": (
        "kernel @k(%x: ref<f32[8,16] any>, %y: ref<f32[8,16] any>, "
        "%z: ref<f32[8,16] any>) outputs 1 aliases {0: 0, 1: 0}",
        "two aliases name the same parameter",
    ),
}


@pytest.mark.parametrize("name", BROKEN_HEADS)
def test_broken_signatures_are_refused(name: str):
    head, message = BROKEN_HEADS[name]
    with pytest.raises(VerifyError) as raised:
        verify(parse_kernel(head + " {\n}"))
    assert message in str(raised.value)


def test_legal_code_is_accepted():
    verify(parse_kernel(kernel_text(pipeline())))
    verify(parse_kernel(kernel_text(pipeline(window="in[2, 16] fill -inf buffers 2"))))
    for make in kernels.ALL:
        verify(make())


def test_the_message_names_kernel_op_and_line():
    text = """kernel @k(%x: ref<f32[8] any>) outputs 1 {
      %0: f32[8] = load %x[:] loc("model.py":11 in "f")
      %1: f32[4] = exp %0 loc("model.py":12 in "f")
    }"""
    with pytest.raises(VerifyError) as raised:
        verify(parse_kernel(text))
    assert str(raised.value) == dedent(
        """\
        exp gives (f32[8]), but its results are (f32[4])
          kernel  k
          op      %1: f32[4] = exp %0
          at      model.py:12 in f"""
    )


# --- what text cannot say ---


def _fails(kernel: Kernel, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(kernel)


def test_use_before_definition_is_refused():
    b = Builder()
    x = b.index(1)
    b.add(x, x)
    constant, add = b.ops
    kernel = Kernel("k", (), Block((), (add, constant)), 0)
    _fails(kernel, "operand 0 is used before it is defined")


def test_a_value_defined_twice_is_refused():
    b = Builder()
    b.index(1)
    (op,) = b.ops
    _fails(Kernel("k", (), Block((), (op, op)), 0), "a value: i32 is defined twice")
    x = kernels.main_ref("x", 8)
    _fails(Kernel("k", (x, x), Block(), 0), r"x: ref<f32\[8\] any> is defined twice")


def test_a_region_used_twice_is_refused():
    inner = Builder()
    inner.index(1)
    region = inner.block()
    b = Builder()
    b.emit("cond", b.index(0), regions=(region, region))
    _fails(Kernel("k", (), b.block(), 0), "is defined twice")


def test_a_foreign_value_yielded_is_refused():
    b = Builder()
    stranger = Value(INDEX, "stranger")
    b.emit("cond", b.index(0), regions=(Block((), (), (stranger,)),))
    _fails(Kernel("k", (), b.block(), 0), "yielded value is used before it is defined")


def test_a_body_with_yields_is_refused():
    x = kernels.main_ref("x", 8)
    _fails(Kernel("k", (x,), Block((), (), (x,)), 1), "a kernel body takes no param")


def test_an_attribute_that_is_no_data_is_refused():
    result = Value(TileType((), F32))
    op = Op("constant", (), (result,), {"value": object(), "type": result.type})
    loc = Loc("k.py", 4)
    kernel = Kernel("k", (), Block((), (op.with_(loc=loc),)), 0)
    _fails(kernel, "attribute 'value' is not plain data")


def test_a_negative_dimension_is_refused():
    x = Value(RefType((-1,), F32, "any"), "x")
    _fails(Kernel("k", (x,), Block(), 1), "negative dimension")
