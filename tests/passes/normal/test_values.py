"""Each rule about values, text to text."""

import itertools
import textwrap

import numpy as np
import pytest

from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.columns import columns
from pallasite.passes.normal.counted_loops import counted_loops
from pallasite.passes.normal.known_clamps import known_clamps
from pallasite.passes.normal.masks import masks
from pallasite.passes.normal.order import order
from pallasite.passes.normal.positions import positions
from pallasite.passes.normal.products import products
from pallasite.passes.normal.replicated import replicated
from pallasite.passes.normal.unit_dims import unit_dims
from tests.passes.normal.test_same_meaning import inputs, results
from tests.passes.normal_text import nameless


def kernel(body: str, *refs: str) -> Kernel:
    """A kernel on refs such as `x: f32[4,8]`, of which the last is the output."""
    shown = ", ".join(f"%{r.split(':')[0]}: ref<{r.split(': ')[1]} any>" for r in refs)
    made = parse_kernel(f"kernel @k({shown}) outputs 1 {{\n{body}\n}}")
    verify(made)
    return canonicalize(made)


def code(kernel: Kernel) -> str:
    """Without names of values other than the kernel's refs."""
    names = {p: p for p in kernel.params}
    kernel = kernel.with_(body=nameless(kernel.body, names))
    lines = kernel.text.strip().split("\n")[1:-1]
    return textwrap.dedent("\n".join(lines)).strip()


def check(rule, old: Kernel, text: str) -> None:
    """The rule gives this code, which means the same; it then changes nothing."""
    new = rule(old)
    verify(new)
    header = old.text.strip().split("\n")[0]
    assert code(new) == code(parse_kernel(f"{header}\n{text}\n}}"))
    assert rule(new) is new
    arrays = inputs(old)
    for a, b in zip(results(old, arrays), results(new, arrays), strict=True):
        np.testing.assert_array_equal(a, b)


def same(rule, old: Kernel) -> None:
    assert rule(old) is old


# --- unit dimensions ---


def test_unit_dims_of_tiles_scratch_and_loops():
    old = kernel(
        """
        %s: ref<f32[1,4,8] vmem> = alloc
        %x0: f32[1,4,8] = load %x[:, :, :]
        store %s[:, :, :] = %x0
        %a: i32 = constant {value=0}
        %n: i32 = constant {value=3}
        %one: i32 = constant {value=1}
        %r: f32[1,4,8] = for %a, %n, %one, %x0
          body (%i: i32, %c: f32[1,4,8]) {
            %t: f32[1,4,8] = load %s[:, :, :]
            %d: f32[1,4,8] = add %c, %t
            yield %d
          }
        %f: f32[4,8] = reshape %r {shape=(4, 8)}
        store %o[:, :] = %f
        """,
        "x: f32[1,4,8]", "o: f32[4,8]",
    )  # fmt: skip
    check(
        unit_dims,
        old,
        """
        %s: ref<f32[4,8] vmem> = alloc
        %0: f32[1,4,8] = load %x[:, :, :]
        %1: f32[4,8] = reshape %0 {shape=(4, 8)}
        store %s[:, :] = %1
        %2: i32 = constant {value=0}
        %3: i32 = constant {value=3}
        %4: i32 = constant {value=1}
        %r: f32[4,8] = for %2, %3, %4, %1
          body (%i: i32, %c: f32[4,8]) {
            %5: f32[4,8] = load %s[:, :]
            %6: f32[4,8] = add %c, %5
            yield %6
          }
        store %o[:, :] = %r
        """,
    )


def test_unit_dims_of_dots():
    old = kernel(
        """
        %a: f32[1,4,8] = load %x[:, :, :]
        %b: f32[1,6,8] = load %y[:, :, :]
        %c: f32[1,4,6] = dot %a, %b {contract=((2,), (2,)), batch=((0,), (0,)), \
dtype=f32, precision=None}
        store %o[:, :, :] = %c
        """,
        "x: f32[1,4,8]", "y: f32[1,6,8]", "o: f32[1,4,6]",
    )  # fmt: skip
    (dot,) = [op for op in unit_dims(old).body.ops if op.name == "dot"]
    assert [v.type.shape for v in dot.operands] == [(4, 8), (6, 8)]
    assert dot.attrs["contract"] == ((1,), (1,)) and dot.attrs["batch"] == ((), ())


def test_two_dims_remain():
    old = kernel(
        """
        %a: f32[1,8] = load %x[:, :]
        %b: f32[1,8] = exp %a
        store %o[:, :] = %b
        """,
        "x: f32[1,8]", "o: f32[1,8]",
    )  # fmt: skip
    same(unit_dims, old)


# --- replicated values ---

LANES = """
        %s: ref<f32[4,128] vmem> = alloc
        %x0: f32[4,8] = load %x[:, :]
        %m: f32[4] = reduce %x0 {kind="max", axes=(1,)}
        %w: f32[4,128] = broadcast_in_dim %m {shape=(4, 128), dims=(0,)}
        store %s[STORED] = %w
        %l: f32[4,128] = load %s[:, :]
        %e: f32[4,128] = exp %l
        %t: f32[4,8] = slice %e {starts=(0, 0), limits=(4, 8), strides=(1, 1)}
        %d: f32[4,8] = sub %x0, %t
        store %o[:, :] = %d
        """


def test_lanes_of_statistics():
    check(
        replicated,
        kernel(LANES.replace("STORED", ":, :"), "x: f32[4,8]", "o: f32[4,8]"),
        """
        %s: ref<f32[4,1] vmem> = alloc
        %0: f32[4,8] = load %x[:, :]
        %1: f32[4] = reduce %0 {kind="max", axes=(1,)}
        %2: f32[4,1] = broadcast_in_dim %1 {shape=(4, 1), dims=(0,)}
        store %s[:, :] = %2
        %3: f32[4,1] = load %s[:, :]
        %4: f32[4,1] = exp %3
        %5: f32[4,8] = broadcast_in_dim %4 {shape=(4, 8), dims=(0, 1)}
        %6: f32[4,8] = sub %0, %5
        store %o[:, :] = %6
        """,
    )


def test_scratch_with_other_stores_keeps_its_lanes():
    """A store of one lane makes the others differ from it."""
    text = LANES.replace("STORED", ":, :").replace(
        "%l: f32[4,128] = load",
        "%c: f32[4,1] = constant {value=2.0}\n        store %s[:, 3:+1] = %c\n        "
        "%l: f32[4,128] = load",
    )
    old = kernel(text, "x: f32[4,8]", "o: f32[4,8]")
    assert "f32[4,128] vmem" in code(replicated(old))


def test_repeats_and_tiles():
    """As `jnp.tile` and `jnp.repeat` spell copies."""
    old = kernel(
        """
        %c: f32[4,1] = load %x[:, :]
        %e: f32[4,1] = exp %c
        %b: f32[4,2,1,3] = broadcast_in_dim %e {shape=(4, 2, 1, 3), dims=(0, 2)}
        %r: f32[4,6] = reshape %b {shape=(4, 6)}
        %j: f32[4,12] = concatenate %r, %r {axis=1}
        %n: f32[4,12] = neg %j
        store %o[:, :] = %n
        """,
        "x: f32[4,1]", "o: f32[4,12]",
    )  # fmt: skip
    check(
        replicated,
        old,
        """
        %0: f32[4,1] = load %x[:, :]
        %1: f32[4,1] = exp %0
        %2: f32[4,1] = neg %1
        %3: f32[4,12] = broadcast_in_dim %2 {shape=(4, 12), dims=(0, 1)}
        store %o[:, :] = %3
        """,
    )


# --- columns ---


def test_lines_become_columns():
    old = kernel(
        """
        %x0: f32[4,8] = load %x[:, :]
        %m: f32[4] = reduce %x0 {kind="sum", axes=(1,)}
        %r: f32[4] = rsqrt %m
        %b: f32[4,8] = broadcast_in_dim %r {shape=(4, 8), dims=(0,)}
        %y: f32[4,8] = mul %x0, %b
        store %o[:, :] = %y
        """,
        "x: f32[4,8]", "o: f32[4,8]",
    )  # fmt: skip
    check(
        columns,
        old,
        """
        %0: f32[4,8] = load %x[:, :]
        %1: f32[4] = reduce %0 {kind="sum", axes=(1,)}
        %2: f32[4,1] = broadcast_in_dim %1 {shape=(4, 1), dims=(0,)}
        %3: f32[4,1] = rsqrt %2
        %4: f32[4,8] = broadcast_in_dim %3 {shape=(4, 8), dims=(0, 1)}
        %5: f32[4,8] = mul %0, %4
        store %o[:, :] = %5
        """,
    )


def test_vectors_that_are_not_broadcast_stay():
    old = kernel(
        """
        %x0: f32[4,8] = load %x[:, :]
        %m: f32[4] = reduce %x0 {kind="sum", axes=(1,)}
        %r: f32[4] = exp %m
        store %o[:] = %r
        """,
        "x: f32[4,8]", "o: f32[4]",
    )  # fmt: skip
    same(columns, old)


# --- dots ---

DOT = "{contract=((CONTRACT,), (0,)), batch=((), ()), dtype=f32, precision=None}"


def test_transposed_operands_and_results():
    old = kernel(
        f"""
        %a: f32[4,8] = load %x[:, :]
        %b: f32[6,8] = load %y[:, :]
        %t: f32[8,4] = transpose %a {{perm=(1, 0)}}
        %c: f32[6,4] = dot %b, %t {DOT.replace("CONTRACT", "1")}
        %d: f32[4,6] = transpose %c {{perm=(1, 0)}}
        store %o[:, :] = %d
        """,
        "x: f32[4,8]", "y: f32[6,8]", "o: f32[4,6]",
    )  # fmt: skip
    new = products(old)
    names = [op.name for op in new.body.ops]
    assert "transpose" not in names
    (dot,) = [op for op in new.body.ops if op.name == "dot"]
    assert dot.attrs["contract"] == ((1,), (1,))
    assert [v.type.shape for v in dot.operands] == [(4, 8), (6, 8)]


def test_a_dot_that_is_also_used_as_it_is_stays_one():
    old = kernel(
        f"""
        %a: f32[4,8] = load %x[:, :]
        %b: f32[8,4] = load %y[:, :]
        %c: f32[4,4] = dot %a, %b {DOT.replace("CONTRACT", "1")}
        %d: f32[4,4] = transpose %c {{perm=(1, 0)}}
        %e: f32[4,4] = add %c, %d
        store %o[:, :] = %e
        """,
        "x: f32[4,8]", "y: f32[8,4]", "o: f32[4,4]",
    )  # fmt: skip
    same(products, old)


# --- loops ---


@pytest.mark.parametrize(
    "first, test, bound, step",
    [
        (0, "lt", 5, 1),
        (0, "ne", 5, 1),
        (0, "le", 4, 1),
        (1, "lt", 10, 3),
        (6, "gt", 1, -1),
        (7, "ge", 0, -2),
        (3, "ne", 0, -1),
        (9, "lt", 5, 1),
    ],
)
@pytest.mark.parametrize("dtype", ["i32", "i16"])
def test_counted_loops(first, test, bound, step, dtype):
    old = kernel(
        f"""
        %f: {dtype} = constant {{value={first}}}
        %z: {dtype} = constant {{value=0}}
        %i: {dtype}, %s: {dtype} = while %f, %z
          test (%a: {dtype}, %b: {dtype}) {{
            %n: {dtype} = constant {{value={bound}}}
            %p: bool = {test} %a, %n
            yield %p
          }}
          body (%c: {dtype}, %d: {dtype}) {{
            %k: {dtype} = constant {{value={step}}}
            %e: {dtype} = add %c, %k
            %g: {dtype} = add %d, %c
            yield %e, %g
          }}
        store %o[0] = %i
        store %o[1] = %s
        """,
        f"o: {dtype}[2]",
    )  # fmt: skip
    new = counted_loops(old)
    verify(new)
    assert "while" not in {op.name for op in new.body.ops}
    assert counted_loops(new) is new
    assert np.array_equal(results(new, []), results(old, []))


@pytest.mark.parametrize(
    "first, factor, step, counts",
    [
        (0, 16, 1, True),
        (2, 1, 1, True),
        (0, 12, 1, False),
        (-3, 16, 1, False),
        (0, 16, 2, False),
        (1 << 28, 16, 1, False),
    ],
)
def test_multiples_of_a_counter(first, factor, step, counts):
    """Blocks of a length known only at run time."""
    old = kernel(
        f"""
        %f: i32 = constant {{value={first}}}
        %n: i32 = load %x[0]
        %i: i32 = while %f
          test (%a: i32) {{
            %k: i32 = constant {{value={factor}}}
            %m: i32 = mul %a, %k
            %p: bool = lt %m, %n
            yield %p
          }}
          body (%c: i32) {{
            %s: i32 = constant {{value={step}}}
            %e: i32 = add %c, %s
            yield %e
          }}
        store %o[0] = %i
        """,
        "x: i32[1]", "o: i32[1]",
    )  # fmt: skip
    new = counted_loops(old)
    verify(new)
    assert ("while" not in {op.name for op in new.body.ops}) == counts
    for length in (-40, 0, 1, 15, 16, 17, 100) if counts else ():
        given = [np.array([length], np.int32)]
        assert np.array_equal(results(new, given), results(old, given))


@pytest.mark.parametrize("written", [False, True])
def test_bounds_in_memory(written: bool):
    """As `while_loop` over blocks of a length, with `pl.multiple_of(at, 16)`."""
    ref = "%o" if written else "%x"
    old = kernel(
        f"""
        %f: i32 = constant {{value=0}}
        %l: i32 = load %x[0]
        store %o[0] = %l
        %i: i32 = while %f
          test (%a: i32) {{
            %n: i32 = load {ref}[0]
            %p: bool = gt %n, %a
            yield %p
          }}
          body (%c: i32) {{
            %m: i32 = assume_multiple %c {{multiple=16}}
            %s: i32 = constant {{value=16}}
            %e: i32 = add %m, %s
            store %o[1] = %e
            yield %e
          }}
        store %o[2] = %i
        """,
        "x: i32[1]", "o: i32[3]",
    )  # fmt: skip
    if written:
        same(counted_loops, old)
        return
    new = counted_loops(old)
    verify(new)
    assert "while" not in {op.name for op in new.body.ops}
    for length in (-40, 0, 1, 15, 16, 17, 100):
        given = [np.array([length], np.int32)]
        assert np.array_equal(results(new, given)[:1], results(old, given)[:1])


def test_a_counter_that_is_asserted_to_be_a_multiple():
    """As `pl.multiple_of` is written at the start of the body, in steps of a block."""
    old = kernel(
        """
        %f: i32 = constant {value=0}
        %z: i32 = constant {value=0}
        %i: i32, %s: i32 = while %f, %z
          test (%a: i32, %b: i32) {
            %n: i32 = constant {value=40}
            %p: bool = lt %a, %n
            yield %p
          }
          body (%c: i32, %d: i32) {
            %m: i32 = assume_multiple %c {multiple=16}
            %k: i32 = constant {value=16}
            %e: i32 = add %m, %k
            %g: i32 = add %d, %m
            yield %e, %g
          }
        store %o[0] = %i
        store %o[1] = %s
        """,
        "o: i32[2]",
    )  # fmt: skip
    new = counted_loops(old)
    verify(new)
    assert "while" not in new.text and np.array_equal(results(new, []), [[48, 48]])


@pytest.mark.parametrize("first, counts", [(3, True), (-(1 << 31), False)])
def test_loops_in_steps_count_iterations(first: int, counts: bool):
    old = kernel(
        f"""
        %f: i32 = constant {{value={first}}}
        %k: i32 = constant {{value=7}}
        %z: i32 = constant {{value=0}}
        %m: i32 = constant {{value=40}}
        %v: i32 = load %x[0]
        %n: i32 = min %v, %m
        %l: i32 = max %n, %z
        %s: i32 = for %f, %l, %k, %z
          body (%c: i32, %d: i32) {{
            %e: i32 = mul %c, %c
            %g: i32 = add %d, %e
            yield %g
          }}
        store %o[0] = %s
        """,
        "x: i32[1]", "o: i32[1]",
    )  # fmt: skip
    new = counted_loops(old)
    verify(new)
    assert (new is not old) == counts
    for length in (-40, 0, 3, 4, 10, 11, 31, 100) if counts else ():
        given = [np.array([length], np.int32)]
        assert np.array_equal(results(new, given), results(old, given))


OFFSETS = (-(1 << 31), -(1 << 31) + 3, -5, 0, 1, 30, (1 << 31) - 1)


def test_steps_between_offsets_in_memory_count_iterations():
    """As `while at < ptr[row + 1]: at += 2**29`: a difference may wrap around."""
    old = kernel(
        """
        %f: i32 = load %x[0]
        %l: i32 = load %x[1]
        %k: i32 = constant {value=536870912}
        %z: i32 = constant {value=0}
        %s: i32 = for %f, %l, %k, %z
          body (%c: i32, %d: i32) {
            %e: i32 = mul %d, %k
            %h: i32 = add %e, %c
            %u: i32 = constant {value=17}
            %g: i32 = add %h, %u
            yield %g
          }
        store %o[0] = %s
        """,
        "x: i32[2]", "o: i32[1]",
    )  # fmt: skip
    new = counted_loops(old)
    verify(new)
    assert new is not old and counted_loops(new) is new
    for pair in itertools.product(OFFSETS, repeat=2):
        given = [np.array(pair, np.int32)]
        want, at = 0, pair[0]
        while at < pair[1]:
            want, at = (want * (1 << 29) + at + 17) % (1 << 32), at + (1 << 29)
        assert int(results(new, given)[0][0]) % (1 << 32) == want, pair


def test_a_bound_that_the_loop_may_pass_stays_a_while():
    """`i != 5` from 6 on counts through all integers."""
    old = kernel(
        """
        %f: i32 = load %x[0]
        %i: i32 = while %f
          test (%a: i32) {
            %n: i32 = constant {value=5}
            %p: bool = ne %a, %n
            yield %p
          }
          body (%c: i32) {
            %k: i32 = constant {value=1}
            %e: i32 = add %c, %k
            yield %e
          }
        store %o[0] = %i
        """,
        "x: i32[1]", "o: i32[1]",
    )  # fmt: skip
    same(counted_loops, old)


# --- positions, masks, order ---


def test_positions():
    old = kernel(
        """
        %n: i32 = load %x[0]
        %i: i32[4,1] = iota {dim=0}
        %b: i32[4,1] = broadcast_in_dim %n {shape=(4, 1), dims=()}
        %p: i32[4,1] = add %i, %b
        %w: i32[4,8] = broadcast_in_dim %p {shape=(4, 8), dims=(0, 1)}
        store %o[:, :] = %w
        """,
        "x: i32[1]", "o: i32[4,8]",
    )  # fmt: skip
    check(
        positions,
        old,
        """
        %n: i32 = load %x[0]
        %0: i32[4,8] = iota {dim=0}
        %1: i32[4,8] = broadcast_in_dim %n {shape=(4, 8), dims=()}
        %2: i32[4,8] = add %0, %1
        store %o[:, :] = %2
        """,
    )


@pytest.mark.parametrize(
    "move", ["reshape %p {shape=(4, 1)}", "transpose %p {perm=(1, 0)}"]
)
def test_row_of_positions_as_a_column(move: str):
    old = kernel(
        f"""
        %n: i32 = load %x[0]
        %i: i32[1,4] = iota {{dim=1}}
        %b: i32[1,4] = broadcast_in_dim %n {{shape=(1, 4), dims=()}}
        %p: i32[1,4] = add %i, %b
        %c: i32[4,1] = {move}
        store %o[:, :] = %c
        """,
        "x: i32[1]", "o: i32[4,1]",
    )  # fmt: skip
    check(
        positions,
        old,
        """
        %n: i32 = load %x[0]
        %0: i32[4,1] = iota {dim=0}
        %1: i32[4,1] = broadcast_in_dim %n {shape=(4, 1), dims=()}
        %2: i32[4,1] = add %0, %1
        store %o[:, :] = %2
        """,
    )


def test_slice_of_positions_needs_its_clamp_only_outside():
    text = """
        %i: i32 = load %x[0]
        %c3: i32 = constant {value=LIMIT}
        %c0: i32 = constant {value=0}
        %k: i32 = clamp %c0, %i, %c3
        %a: i32[5] = iota {dim=0}
        %s: i32[1] = dynamic_slice %a, %k {sizes=(1,)}
        %r: i32 = reshape %s {shape=()}
        store %o[0] = %r
        """
    refs = ("x: i32[1]", "o: i32[1]")
    inside = kernel(text.replace("LIMIT", "4"), *refs)
    outside = kernel(text.replace("LIMIT", "5"), *refs)
    both = [known_clamps(positions(k)) for k in (inside, outside)]
    assert [code(k).count("clamp") for k in both] == [1, 2]
    for old, new in zip((inside, outside), both, strict=True):
        assert results(new, [np.array([7], "i4")]) == results(
            old, [np.array([7], "i4")]
        )


@pytest.mark.parametrize("dtype", ["u8", "i8", "u16", "u32", "i64", "u64"])
def test_slice_of_positions_starts_at_the_nearest_place(dtype: str):
    """Starts that no i32 can be do not wrap, and a limit need not fit their type."""
    old = kernel(
        f"""
        %i: {dtype} = load %x[0]
        %a: i32[300] = iota {{dim=0}}
        %s: i32[1] = dynamic_slice %a, %i {{sizes=(1,)}}
        %r: i32 = reshape %s {{shape=()}}
        store %o[0] = %r
        """,
        f"x: {dtype}[1]", "o: i32[1]",
    )  # fmt: skip
    new = positions(old)
    assert "dynamic_slice" not in new.text
    kind = np.dtype(f"{dtype[0]}{int(dtype[1:]) // 8}")
    limits = np.iinfo(kind)
    for start in {limits.min, limits.max, 3, min(2**32 + 1, limits.max)}:
        given = [np.array([start], kind)]
        assert results(new, given) == results(old, given)


def test_masks():
    old = kernel(
        """
        %a: f32[4,8] = load %x[:, :]
        %i: i32[4,8] = iota {dim=0}
        %j: i32[4,8] = iota {dim=1}
        %p: bool[4,8] = lt %i, %j
        %q: bool[4,8] = not %p
        %n: f32[4,8] = constant {value=-inf}
        %s: f32[4,8] = select_n %q, %n, %a
        %c: f32[4,8] = constant {value=8.0}
        %d: f32[4,8] = div %s, %c
        store %o[:, :] = %d
        """,
        "x: f32[4,8]", "o: f32[4,8]",
    )  # fmt: skip
    check(
        masks,
        old,
        """
        %a: f32[4,8] = load %x[:, :]
        %i: i32[4,8] = iota {dim=0}
        %j: i32[4,8] = iota {dim=1}
        %p: bool[4,8] = ge %i, %j
        %n: f32[4,8] = constant {value=-inf}
        %0: f32[4,8] = constant {value=0.125}
        %1: f32[4,8] = mul %a, %0
        %2: f32[4,8] = select_n %p, %n, %1
        store %o[:, :] = %2
        """,
    )


def test_other_divisors_stay():
    old = kernel(
        """
        %a: f32[4,8] = load %x[:, :]
        %c: f32[4,8] = constant {value=3.0}
        %d: f32[4,8] = div %a, %c
        store %o[:, :] = %d
        """,
        "x: f32[4,8]", "o: f32[4,8]",
    )  # fmt: skip
    same(masks, old)


def test_order():
    """A load may wait for its use, but not for a store before it."""
    old = kernel(
        """
        %c: f32[4] = constant {value=2.0}
        %b: f32[4] = load %y[:]
        %s: f32[4] = load %o[:]
        %a: f32[4] = load %x[:]
        %d: f32[4] = exp %a
        store %o[:] = %d
        %e: f32[4] = mul %s, %c
        %f: f32[4] = add %e, %b
        store %o[:] = %f
        """,
        "x: f32[4]", "y: f32[4]", "o: f32[4]",
    )  # fmt: skip
    check(
        order,
        old,
        """
        %a: f32[4] = load %x[:]
        %d: f32[4] = exp %a
        %b: f32[4] = load %y[:]
        %s: f32[4] = load %o[:]
        store %o[:] = %d
        %c: f32[4] = constant {value=2.0}
        %e: f32[4] = mul %s, %c
        %f: f32[4] = add %e, %b
        store %o[:] = %f
        """,
    )


def test_order_of_products_and_starts():
    """A product waits for the guarded start of its sum, and for no arithmetic."""
    body = """
        %acc: ref<f32[4,4] vmem> = alloc
        FIRST
        %i: i32 = load %n[0]
        cond %i
          branch () {}
          branch () {
            %z: f32[4,4] = constant {value=0.0}
            store %acc[:, :] = %z
          }
        SECOND
        %old: f32[4,4] = load %acc[:, :]
        %s: f32[4,4] = add %old, %p
        store %acc[:, :] = %s
        store %o[:, :] = %s
        """
    product = """
        %a: f32[4,4] = load %x[:, :]
        %b: f32[4,4] = load %y[:, :]
        %p: f32[4,4] = dot %a, %b
            {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
        """
    refs = "n: i32[1]", "x: f32[4,4]", "y: f32[4,4]", "o: f32[4,4]"
    text = body.replace("FIRST", product).replace("SECOND", "")
    late = body.replace("FIRST", "").replace("SECOND", product)
    check(order, kernel(text, *refs), code(order(kernel(late, *refs))))
    before = "%q: f32[4,4] = load %x[:, :] %e: f32[4,4] = exp %q"
    text = text.replace("%i: i32", f"{before} store %o[:, :] = %e\n%i: i32")
    new = code(order(kernel(text, *refs)))
    assert new.index("= dot") < new.index("= exp")


def test_scratch_read_through_a_mask_keeps_its_dimensions():
    """The mask decides per element, so one element cannot stand for all."""
    text = """
        kernel @k(%o: ref<f32[4,8] any>) outputs 1 {
          %s: ref<f32[4,8] vmem> = alloc
          %v: f32[4,8] = constant {value=0.25}
          store %s[:, :] = %v
          %i: i32[4,8] = iota {dim=1}
          %n: i32[4,8] = constant {value=3}
          %m: bool[4,8] = gt %i, %n
          %other: f32[4,8] = constant {value=-1.0}
          %x: f32[4,8] = load %s[:, :] mask %m other %other
          store %o[:, :] = %x
        }
    """
    (found,) = results(replicated(parse_kernel(text)), [])
    np.testing.assert_array_equal(found, [[-1.0] * 4 + [0.25] * 4] * 4)


def test_a_slice_of_a_broadcast_scalar_is_one_element():
    text = """
        kernel @k(%x: ref<f32 any>, %o: ref<f32[3] any>) outputs 1 {
          %v: f32 = load %x[]
          %w: f32[9] = broadcast_in_dim %v {shape=(9,), dims=()}
          %s: f32[3] = slice %w {starts=(0,), limits=(3,), strides=(1,)}
          %e: f32[3] = exp %s
          store %o[:] = %e
        }
    """
    made = replicated(parse_kernel(text))
    verify(made)
    (found,) = results(made, [np.zeros((), np.float32)])
    np.testing.assert_array_equal(found, [1.0] * 3)
