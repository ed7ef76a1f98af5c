"""The printed form: exact round trip for every op, stable names, clear errors."""

import math
from textwrap import dedent

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallasite.errors import ParseError
from pallasite.ir.build import Builder
from pallasite.ir.nodes import (
    At,
    Block,
    BlockDim,
    Gather,
    Kernel,
    Loc,
    Op,
    Span,
    Value,
    Window,
    walk,
)
from pallasite.ir.opdef import table
from pallasite.ir.text import (
    attr_text,
    parse_kernel,
    print_block,
    print_kernel,
    print_op,
)
from pallasite.ir.types import DTYPES, F32, INDEX, SPACES, RefType, TileType
from pallasite.ir.verify import verify
from tests.ir import kernels, samples


def round_trip(kernel: Kernel, locs: bool = False) -> Kernel:
    text = print_kernel(kernel, locs)
    again = parse_kernel(text)
    assert print_kernel(again, locs) == text
    return again


@pytest.mark.parametrize("name", sorted(table()))
def test_every_op_round_trips(name: str):
    kernel = samples.kernel_of(name)
    verify(kernel)
    assert name in {op.name for op in walk(kernel.body)}
    for locs in (False, True):
        again = round_trip(kernel, locs)
        verify(again)
        for old, new in zip(walk(kernel.body), walk(again.body), strict=True):
            assert old.name == new.name
            assert new.attrs == old.attrs
            assert new.loc == (old.loc if locs else None)


@pytest.mark.parametrize("make", kernels.ALL, ids=lambda f: f.__name__)
def test_whole_kernels_round_trip(make):
    kernel = make()
    verify(kernel)
    assert round_trip(kernel) == kernel
    assert hash(round_trip(kernel)) == hash(kernel)


def test_the_form_of_a_kernel():
    assert print_kernel(kernels.matmul()) == dedent(
        """\
        kernel @matmul(%x: ref<f32[256,256] any>, %y: ref<f32[256,256] any>, %o: ref<f32[256,256] any>) outputs 1 {
          pipeline %x, %y, %o {grid=(2, 2, 2), windows=(in[128, 128], in[128, 128], out[128, 128]), semantics=("parallel", "parallel", "arbitrary")}
            map (%i: i32, %j: i32, %k: i32) { yield %i, %k }
            map (%i_1: i32, %j_1: i32, %k_1: i32) { yield %k_1, %j_1 }
            map (%i_2: i32, %j_2: i32, %k_2: i32) { yield %i_2, %j_2 }
            body (%i_3: i32, %j_3: i32, %k_3: i32, %x_block: ref<f32[128,128] block>, %y_block: ref<f32[128,128] block>, %o_block: ref<f32[128,128] block>) {
              %0: i32 = constant {value=0}
              %1: bool = eq %k_3, %0
              %2: i32 = cast %1 {dtype=i32}
              cond %2
                branch () {}
                branch () {
                  %3: f32[128,128] = constant {value=0.0}
                  store %o_block[:, :] = %3
                }
              %4: f32[128,128] = load %x_block[:, :]
              %5: f32[128,128] = load %y_block[:, :]
              %6: f32[128,128] = dot %4, %5 {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
              %7: f32[128,128] = load %o_block[:, :]
              %8: f32[128,128] = add %7, %6
              store %o_block[:, :] = %8
            }
        }
        """  # noqa: E501
    )


def test_the_form_of_accesses():
    lines = print_kernel(samples.kernel_of("load")).splitlines()
    accesses = [line.partition(" = load ")[2] for line in lines if "= load" in line]
    assert accesses == [
        "%x[:, :]",
        "%x[2, 4:+3:2]",
        "%x[%0, %0:+4]",
        "%x[%0:+2:3, gather %1]",
        "%x[gather %1, gather %1] mask %6 other %7",
        "%x[:, :] mask %9",
    ]


def test_the_form_of_windows():
    text = print_kernel(samples.kernel_of("pipeline"))
    assert (
        "grid=(None, 4), windows=("
        "in[element 4 pad (1, 1), squeezed 1] fill -0.5 buffers 3, "
        "in[bounded 4, 16] space vmem fill False, "
        "out[element 4 pad (1, 1), squeezed 1] space smem)"
    ) in text


def test_locations_are_printed_on_demand():
    kernel = samples.kernel_of("delay").with_(loc=Loc("k.py", 3))
    assert "loc" not in print_kernel(kernel)
    text = print_kernel(kernel, locs=True)
    assert 'outputs 1 loc("k.py":3) {' in text
    assert 'delay %0 loc("samples.py":7 in "make.<locals>.delay")' in text


def test_names_are_made_unique_and_legal():
    hints = ["x", "x", "x_1", "", "a b", "3d", "größe", ""]
    params = tuple(Value(RefType((), F32, "any"), hint) for hint in hints)
    text = print_kernel(Kernel("k", params, Block(), 0))
    names = [part.partition(":")[0] for part in text.split("%")[1:]]
    assert names == ["x", "x_1", "x_1_1", "0", "a_b", "_3d", "gr__e", "1"]
    round_trip(Kernel("k", params, Block(), 0))


def test_header_round_trips():
    params = tuple(Value(RefType((2,), F32, "any")) for _ in range(4))
    kernel = Kernel("a <lambda>", params, Block(), 2, ((0, 1), (1, 0)), "explicit")
    assert print_kernel(kernel).startswith('kernel @"a <lambda>"(')
    again = round_trip(kernel)
    assert (again.name, again.aliases, again.level) == (
        kernel.name,
        kernel.aliases,
        kernel.level,
    )


def test_text_is_the_same_in_another_process(run_python):
    code = "from tests.ir import kernels; print(kernels.flash_attention().text, end='')"
    assert run_python("-c", code) == kernels.flash_attention().text


def test_one_op_and_one_block_print():
    kernel = kernels.vector_add()
    (pipeline,) = kernel.body.ops
    body = pipeline.regions[-1]
    assert print_op(body.ops[2], within=kernel) == "%2: f32[128] = add %0, %1"
    assert print_block(body).startswith("block (%i: i32, %x_block: ref<f32[128] block>")
    assert "\n" not in print_op(pipeline, regions=False)


def test_ops_with_wrong_operand_counts_still_print():
    x = kernels.main_ref("x", 8)
    op = Op("load", (x,), (Value(INDEX),), {"index": (At(), Span(None, 2), Gather())})
    text = print_op(op)
    assert text == "%0: i32 = load %x {index=(at(None), span(None, 2, 1), gather())}"
    round_trip(Kernel("k", (x,), Block((), (op,)), 1))


# --- attributes of any kind ---

_integers = st.integers(-(2**70), 2**70)
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    _integers,
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(),
)
_dtypes = st.sampled_from(list(DTYPES.values()))
_shapes = st.lists(st.integers(0, 4096), max_size=4).map(tuple)
_types = st.one_of(
    _dtypes,
    st.builds(TileType, _shapes, _dtypes),
    st.builds(RefType, _shapes, _dtypes, st.sampled_from(SPACES)),
)
_starts = st.none() | st.integers(0, 100)
_entries = st.one_of(
    st.builds(At, _starts),
    st.builds(Span, _starts, st.integers(0, 100), st.integers(1, 9)),
    st.just(Gather()),
)
_dims = st.builds(
    BlockDim,
    st.integers(1, 512),
    st.sampled_from(["blocked", "element", "squeezed", "bounded"]),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
_windows = st.builds(
    Window,
    st.lists(_dims, max_size=4).map(tuple),
    st.sampled_from(["in", "out"]),
    st.sampled_from(SPACES),
    st.none() | st.booleans() | st.integers() | st.floats(),
    st.none() | st.integers(1, 4),
)
_names = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)
_values = st.recursive(
    st.one_of(_scalars, _types, _entries, _windows),
    lambda inner: (
        st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_names, inner, max_size=3)
    ),
    max_leaves=10,
)


@given(st.dictionaries(_names, _values, max_size=4))
def test_attributes_round_trip(attrs):
    op = Op("debug_print", (), (), attrs)
    kernel = Kernel("k", (), Block((), (op,)), 0)
    (again,) = round_trip(kernel).body.ops
    for key, value in attrs.items():
        assert attr_text(again.attrs[key]) == attr_text(value)
        assert _exactly_equal(again.attrs[key], value)


def _exactly_equal(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        same_sign = math.copysign(1, a) == math.copysign(1, b)
        return (math.isnan(a) and math.isnan(b)) or (a == b and same_sign)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_exactly_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_exactly_equal(a[k], b[k]) for k in a)
    if isinstance(a, Window):
        return a.dims == b.dims and _exactly_equal(a.fill, b.fill)
    return a == b


def test_attributes_that_are_not_data_are_refused():
    from pallasite.errors import InternalError

    with pytest.raises(InternalError, match="an attribute has no text form"):
        attr_text(object())


# --- errors of the reader ---

HEAD = "kernel @k(%x: ref<f32[8] any>) outputs 1 {\n"
BROKEN = {
    "function @k() {}": ("'kernel'", "function", 1),
    "kernel @k(%x: ref<f32[8] any>) {\n}": ("'outputs'", "{", 1),
    "kernel @k(%x: ref<f99[8] any>) outputs 1 {\n}": ("an element type", "f99", 1),
    HEAD + "  %0: f32[8] = load %x[:]": ("an operation", "the end of the text", 2),
    HEAD + "  %0: f32[8] load %x[:]\n}": ("'='", "load", 2),
    HEAD + "  %0 = load %x[:]\n}": ("':'", "=", 2),
    HEAD + "  %0: f32[8] = load %x[:, :]\n}": ("at most one entry", ":", 2),
    HEAD + "  %0: f32[4] = load %x[0:4]\n}": ("'+'", "4", 2),
    HEAD + "  %0: f32 = constant {value=}\n}": ("an attribute value", "}", 2),
    HEAD + "  %0: f32 = constant {value 1}\n}": ("'='", "1", 2),
    HEAD + "  %0: f32 = constant {value=1,\n}\n": (
        "an operation",
        "the end of the text",
        4,
    ),
    HEAD + "  delay 5\n}": ("an operation", "5", 2),
    HEAD + "  delay %x $\n}": ("an operation", "$", 2),
    HEAD + "}\n}": ("the end of the text", "}", 3),
    HEAD + "  cond %x\n    branch () { yield }\n}": ("a value", "}", 3),
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_text_says_what_was_expected(text: str):
    expected, found, line = BROKEN[text]
    with pytest.raises(ParseError) as raised:
        parse_kernel(text)
    message = str(raised.value)
    assert f"  expected  {expected}" in message
    assert f"  found     {found}" in message
    assert f"  line      {line}: " in message


def test_the_message_of_a_parse_error():
    with pytest.raises(ParseError) as raised:
        parse_kernel(HEAD + "  %0: f32[8] = load %y[:]\n}\n")
    assert str(raised.value) == (
        "%y is used but not defined above\n  line  2: %0: f32[8] = load %y[:]"
    )
    with pytest.raises(ParseError, match="%0 is defined twice"):
        parse_kernel(HEAD + "  %0: f32 = constant {value=1.0}\n" * 2 + "}")


def test_comments_and_line_breaks_are_free():
    text = """
    // a comment
    kernel @k(%x: ref<f32[8] any>)   // another
      outputs 1 {
      %4: f32[8]
        = load %x[ : ]
      store %x[:] = %4 }
    """
    assert print_kernel(parse_kernel(text)) == (
        HEAD + "  %0: f32[8] = load %x[:]\n  store %x[:] = %0\n}\n"
    )


def test_ints_that_print_themselves_otherwise_are_ints():
    """JAX has such a subclass: the sizes it hands out must not change the text."""

    class Loud(int):
        def __repr__(self) -> str:
            return f"Loud({int(self)})"

    assert str(RefType((Loud(4), 2), F32)) == "ref<f32[4,2] block>"
    assert attr_text((Loud(4), Span(Loud(1), Loud(2)))) == "(4, span(1, 2, 1))"


def test_numbers_of_numpy_become_plain_attributes():
    """`vmap` and jnp compute axes with numpy; emitters print attributes as they are."""
    builder = Builder()
    x = builder.constant(1.0, TileType((2, 3), F32))
    total = builder.op("reduce", x, kind="sum", axes=(np.int64(1),))
    (axis,) = builder.ops[-1].attrs["axes"]
    assert type(axis) is int and total.tile.shape == (2,)
