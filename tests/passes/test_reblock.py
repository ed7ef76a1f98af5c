"""Reblocking: the same kernel with smaller or larger blocks. Text in, text out."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.roles import Pipeline
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.analysis.grid import analyze, find_pipeline
from pallasite.passes.analysis.loop_dims import loop_dims
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.run import run
from pallasite.passes.schedule.cut_steps import cut_steps
from pallasite.passes.schedule.loop_over_k import loop_over_k
from pallasite.passes.schedule.reblock import cut, grow
from pallasite.sites import kernels_in
from tests.passes.test_promote import MATMUL, expect
from tests.passes.test_row_strips import code
from tests.passes.test_same_meaning import outputs
from tests.zoo.attention import flash_scratch_call

X, Y, O = 0, 1, 2  # windows of MATMUL


def parsed(text: str) -> Kernel:
    kernel = parse_kernel(text)
    verify(kernel)
    return kernel


FIRST = "%z: i32 = constant {value=0} yield %z, %z"  # an index map's code
OWN = "%z: i32 = constant {value=0} yield %i, %z"
BACKWARDS = """%z: i32 = constant {value=0} %t: i32 = constant {value=3}
    %r: i32 = sub %t, %i yield %r, %z"""


def rows(
    body: str, n: int = 32, grid: str = "(4,)", x_map: str = OWN, o_map: str = OWN
) -> Kernel:
    """Blocks x[8,4] and o[8,4] of arrays with n rows, and the given code over %s."""
    o_map = o_map.replace("%z", "%z1").replace("%i", "%i1")
    return parsed(f"""
    kernel @k(%x: ref<f32[{n},4] any>, %o: ref<f32[{n},4] any>) outputs 1 {{
      pipeline %x, %o {{grid={grid}, windows=(in[8, 4], out[8, 4]),
          semantics=("arbitrary",)}}
        map (%i: i32) {{ {x_map} }}
        map (%i1: i32) {{ {o_map} }}
        body (%s: i32, %xb: ref<f32[8,4] block>, %ob: ref<f32[8,4] block>) {{
          {body}
        }}
    }}""")


COPY = "%a: f32[8,4] = load %xb[:, :] store %ob[:, :] = %a"


def head(kernel: Kernel) -> str:
    return next(line for line in kernel.text.split("\n") if "pipeline" in line).strip()


# --- what moves together ---


def test_the_dimensions_of_a_product():
    found = loop_dims(parsed(MATMUL))
    assert found is not None
    m, k, n = (found.at(place) for place in ((X, 0), (X, 1), (Y, 1)))
    assert m.windows == ((X, 0), (O, 0)) and found.why_not_free(m) is None
    assert n.windows == ((Y, 1), (O, 1)) and found.why_not_free(n) is None
    assert k.windows == ((X, 1), (Y, 0))
    assert found.why_not_free(k) == "a matmul contracts it"


@pytest.mark.parametrize(
    "body, reason",
    [
        (
            '%a: f32[8,4] = load %xb[:, :] %b: f32[8,4] = scan %a {kind="sum", axis=0,'
            " reverse=False} store %ob[:, :] = %b",
            "'scan' runs along it",
        ),
        (
            "%a: f32[8,4] = load %xb[:, :] %b: f32[4,8] = reshape %a {shape=(4, 8)}"
            " %c: f32[8,4] = reshape %b {shape=(8, 4)} store %ob[:, :] = %c",
            "a reshape mixes it with others",
        ),
        (
            "%a: f32[4,4] = load %xb[0:+4, :] store %ob[4:+4, :] = %a",
            "a load selects a part of it",
        ),
        (
            "%a: f32[8,4] = load %xb[:, :] %b: f32 = load %xb[0, 0]"
            " store %ob[:, :] = %a",
            "a single element of it is selected",
        ),
        ("%a: f32[8,4] = constant {value=1.0} store %ob[:, :] = %a", None),
    ],
)
def test_what_keeps_rows_together(body: str, reason: str | None):
    found = loop_dims(rows(body))
    assert found is not None
    dim = found.at((1, 0)) if reason is None else found.at((0, 0))
    assert found.why_not_free(dim) == reason


def test_a_tile_that_is_added_to_its_transpose_is_whole():
    square = parsed("""
    kernel @k(%x: ref<f32[8,8] any>, %o: ref<f32[8,8] any>) outputs 1 {
      pipeline %x, %o {grid=(), windows=(in[8, 8], out[8, 8]), semantics=()}
        map () { %z: i32 = constant {value=0} yield %z, %z }
        map () { %z1: i32 = constant {value=0} yield %z1, %z1 }
        body (%xb: ref<f32[8,8] block>, %ob: ref<f32[8,8] block>) {
          %a: f32[8,8] = load %xb[:, :]
          %b: f32[8,8] = transpose %a {perm=(1, 0)}
          %c: f32[8,8] = add %a, %b
          store %ob[:, :] = %c
        }
    }""")
    assert loop_dims(square).dims[0].whole == "two dimensions of one tile depend on it"


# --- cut ---


def test_an_axis_that_numbers_blocks_numbers_their_parts():
    new = cut(parsed(MATMUL), (O, 0), 4)
    verify(new)
    assert "grid=(8, 2, 4), windows=(in[8, 16], in[16, 32], out[8, 32])" in head(new)
    assert "dot %" in new.text and "f32[8,32] = dot" in new.text
    both = cut(new, (Y, 1), 2)
    assert "grid=(8, 4, 4), windows=(in[8, 16], in[16, 16], out[8, 16])" in head(both)
    assert analyze(both).parallel == analyze(parsed(MATMUL)).parallel


def test_positions_are_those_in_the_block():
    kernel = rows("""
        %a: f32[8,4] = load %xb[:, :]
        %b: f32[8,4] = iota {dim=0}
        %c: f32[8,4] = add %a, %b
        store %ob[:, :] = %c
    """)
    assert code(cut(kernel, (0, 0), 4)) == expect("""
        %0: i32 = constant {value=4}
        %1: i32 = rem %s, %0
        %2: i32 = constant {value=2}
        %3: i32 = mul %1, %2
        %a: f32[2,4] = load %xb[:, :]
        %4: i32[2,4] = iota {dim=0}
        %5: i32[2,4] = broadcast_in_dim %3 {shape=(2, 4), dims=()}
        %6: i32[2,4] = add %4, %5
        %7: f32[2,4] = cast %6 {dtype=f32}
        %c: f32[2,4] = add %a, %7
        store %ob[:, :] = %c
    """)


def test_without_an_axis_a_new_one_comes_first():
    kernel = rows(COPY, n=8, grid="(3,)")
    new = canonicalize(cut(kernel, (1, 0), 2))
    verify(new)
    assert 'grid=(2, 3), windows=(in[4, 4], out[4, 4]), semantics=("parallel"' in head(
        new
    )
    assert 0 in analyze(new).parallel


def test_a_block_that_all_programs_see_is_cut_by_the_part():
    new = cut(rows(COPY, x_map=FIRST), (0, 0), 2)
    assert "grid=(8,), windows=(in[4, 4], out[4, 4])" in head(new)
    x_map = new.text[new.text.index("map") : new.text.rindex("map")]
    assert [line.strip() for line in x_map.strip().split("\n")] == [
        "map (%i: i32) {",
        "%0: i32 = constant {value=2}",
        "%1: i32 = rem %i, %0",
        "%z: i32 = constant {value=0}",
        "%2: i32 = constant {value=2}",
        "%3: i32 = mul %z, %2",
        "%4: i32 = add %3, %1",
        "yield %4, %z",
        "}",
    ]


def test_parts_outside_the_array_are_left_out():
    new = cut(rows(COPY, n=27), (1, 0), 8)
    assert "grid=(27,), windows=(in[1, 4], out[1, 4])" in head(new)
    new = cut(rows(COPY, n=27), (1, 0), 4)
    assert "grid=(14,), windows=(in[2, 4], out[2, 4])" in head(new)


def test_a_part_outside_has_no_block_of_its_own():
    kernel = rows(COPY, n=30, o_map=BACKWARDS)
    with pytest.raises(CannotReblock, match="would be past the end of o"):
        cut(kernel, (1, 0), 8)
    new = cut(kernel, (1, 0), 2)  # of the last block, each half has something inside
    assert "grid=(2, 4), windows=(in[4, 4], out[4, 4])" in head(new)


def test_scratch_is_cut_with_what_is_stored_in_it():
    text = rows(COPY).text.replace("store %ob", "store %acc[:, :] = %a store %ob")
    scratch = "%acc: ref<f32[8,4] vmem> = alloc {type=ref<f32[8,4] vmem>}"
    new = cut(parsed(text.replace("pipeline", f"{scratch} pipeline")), (0, 0), 4)
    verify(new)
    assert "%acc: ref<f32[2,4] vmem> = alloc" in new.text


def test_parts_do_not_share_what_scratch_carries_along_another_axis():
    """The second axis has one step and is parallel, but two parts would not be."""
    kernel = parsed("""
    kernel @k(%x: ref<f32[8] any>, %o: ref<f32[2,8] any>) outputs 1 {
      %sum: ref<f32[8] vmem> = alloc {type=ref<f32[8] vmem>}
      pipeline %x, %o {grid=(2, 1), windows=(in[8], out[squeezed 1, 8]),
          semantics=("arbitrary", "arbitrary")}
        map (%i: i32, %j: i32) { yield %j }
        map (%i1: i32, %j1: i32) { yield %i1, %j1 }
        body (%s: i32, %t: i32, %xb: ref<f32[8] block>, %ob: ref<f32[8] block>) {
          %z: i32 = constant {value=0}
          %f: bool = eq %s, %z
          %w: i32 = cast %f {dtype=i32}
          %a: f32[8] = load %xb[:]
          cond %w
            branch () {}
            branch () { store %sum[:] = %a }
          %b: f32[8] = load %sum[:]
          %c: f32[8] = add %a, %b
          store %sum[:] = %c
          store %ob[:] = %c
        }
    }""")
    new = cut(kernel, (0, 0), 2)
    assert "grid=(2, 2, 1), windows=(in[4], out[squeezed 1, 4])" in head(new)
    arrays = [np.arange(8, dtype=np.float32)]
    np.testing.assert_array_equal(outputs(new, arrays)[0], outputs(kernel, arrays)[0])


def test_uneven_parts_are_refused():
    with pytest.raises(
        CannotReblock, match="8 elements cannot be divided into 3 equal parts"
    ):
        cut(rows(COPY), (0, 0), 3)


# --- grow ---


def test_neighbours_become_one_program():
    new = grow(grow(parsed(MATMUL), (O, 0), 2), (O, 1), 2)
    verify(new)
    assert "grid=(1, 1, 4), windows=(in[64, 16], in[16, 64], out[64, 64])" in head(new)


def test_a_position_in_the_array_stays_one():
    kernel = rows("""
        %a: f32[8,4] = load %xb[:, :]
        %b: i32[8,4] = iota {dim=0}
        %e: i32 = constant {value=8}
        %f: i32 = mul %s, %e
        %g: i32[8,4] = broadcast_in_dim %f {shape=(8, 4), dims=()}
        %c: i32[8,4] = add %g, %b
        %h: f32[8,4] = cast %c {dtype=f32}
        %d: f32[8,4] = add %a, %h
        store %ob[:, :] = %d
    """)
    assert code(canonicalize(grow(kernel, (0, 0), 2))) == expect("""
        %a: f32[16,4] = load %xb[:, :]
        %0: i32[16,4] = iota {dim=0}
        %1: i32 = constant {value=16}
        %2: i32 = mul %s, %1
        %3: i32[16,4] = broadcast_in_dim %2 {shape=(16, 4), dims=()}
        %4: i32[16,4] = add %3, %0
        %h: f32[16,4] = cast %4 {dtype=f32}
        %d: f32[16,4] = add %a, %h
        store %ob[:, :] = %d
    """)


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (rows(COPY, o_map=BACKWARDS), "no parallel axis numbers its blocks"),
        (rows(COPY, x_map=FIRST), "x does not follow the axis block by block"),
        (rows(COPY, n=40), "o has elements that no program writes"),
        (
            rows("cond %s branch () {} branch () { " + COPY + " }"),
            "what a program computes depends on its program id",
        ),
    ],
)
def test_what_cannot_grow(kernel: Kernel, reason: str):
    with pytest.raises(CannotReblock, match=reason):
        grow(kernel, (1, 0), 3)


# --- k ---


def test_a_deep_product_becomes_a_loop():
    new = loop_over_k(parsed(MATMUL), (X, 1), 4)
    verify(new)
    text = code(new)
    assert text[text.index("%0") :] == expect(
        """
        %0: i32 = constant {value=0}
        %1: i32 = constant {value=16}
        %2: i32 = constant {value=4}
        %3: f32[32,32] = for %0, %1, %2, %a
          body (%k_1: i32, %s: f32[32,32]) {
            %4: f32[32,4] = load %xb[:, %k_1:+4]
            %5: f32[4,32] = load %yb[%k_1:+4, :]
            %6: f32[32,32] = dot %4, %5 {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
            %7: f32[32,32] = add %s, %6
            yield %7
          }
        store %ob[:, :] = %3
        """  # noqa: E501
    )


def test_a_reduction_that_a_product_does_not_need_stays_whole():
    reduced = """%r: f32[32] = reduce %u {kind="max", axes=(1,)}
      %w: f32[32,32] = broadcast_in_dim %r {shape=(32, 32), dims=(0,)}
      %e: f32[32,32] = add %s, %w
      store %ob[:, :] = %e"""
    kernel = parsed(MATMUL.replace("store %ob[:, :] = %s", reduced))
    new = loop_over_k(kernel, (X, 1), 4)
    verify(new)
    text = code(new)
    assert "f32[32,4] = load" in text and "reduce %u " in text
    arrays = [np.random.default_rng(n).integers(-9, 9, (64, 64)).astype(np.float32)
              for n in range(2)]  # fmt: skip
    np.testing.assert_array_equal(outputs(new, arrays)[0], outputs(kernel, arrays)[0])


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("dtype=f32", "dtype=bf16", "its accumulator has less precision"),
        (
            "%d: f32[32,32] = dot %u",
            """%r: f32[32] = reduce %u {kind="max", axes=(1,)}
            %b: f32[32,16] = broadcast_in_dim %r {shape=(32, 16), dims=(0,)}
            %w: f32[32,16] = sub %u, %b
            %d: f32[32,32] = dot %w""",
            "'reduce' runs along it",
        ),
    ],
)
def test_what_is_not_done_in_rounds(old: str, new: str, reason: str):
    text = MATMUL.replace(old, new)
    if "bf16" in new:
        text = text.replace("f32", "bf16")
    with pytest.raises(CannotReblock, match=reason):
        loop_over_k(parsed(text), (X, 1), 4)


def test_steps_along_k_become_more_and_shallower():
    new = cut_steps(parsed(MATMUL), 4, (X, 1))
    verify(new)
    assert "grid=(2, 2, 16), windows=(in[32, 4], in[4, 32], out[32, 32])" in head(new)
    with pytest.raises(CannotReblock, match="not a multiple of 5"):
        cut_steps(parsed(MATMUL), 5)


@pytest.mark.parametrize("how", ["selects", "fills"])
@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("blocks", [(16, 16), (8, 32), (16, 8)], ids=str)
def test_branches_that_some_programs_take_select_what_they_store(factor, blocks, how):
    """A causal attention: rows of the first programs end before those of the last."""
    shape = jax.ShapeDtypeStruct((2, 64, 16), "float32")
    block_q, block_kv = blocks
    call = partial(
        flash_scratch_call, is_causal=True, block_q=block_q, block_kv=block_kv
    )
    (kernel,) = map(run, kernels_in(call, shape, shape, shape))
    with pytest.raises(CannotReblock, match="depends on its program id"):
        grow(kernel, (0, 1), factor)
    new = grow(kernel, (0, 1), factor, **{how: True})
    verify(new)
    # With fills, nothing that was stored before is loaded for a select.
    loads = [each.text.count(" = load ") for each in (kernel, new)]
    assert (loads[0] == loads[1]) == (how == "fills")
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape.shape).astype("f4") for _ in range(3)]
    (got,), (want,) = outputs(new, arrays), outputs(kernel, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # The last of the joined programs decides which steps are done.
    last = factor * block_q
    assert guards_of(new) == {
        (i, j)
        for i in range(64 // last)
        for j in range(64 // block_kv)
        if j * block_kv < (i + 1) * last
    }


def guards_of(kernel: Kernel) -> set[tuple[int, int]]:
    """The programs and steps of a causal attention in which products are computed."""
    pipeline = Pipeline.of(find_pipeline(kernel))
    _, rows, steps = pipeline.grid
    assert rows is not None and steps is not None
    made = {v: op for op in pipeline.body.ops for v in op.results}
    (guard,) = (
        op
        for op in pipeline.body.ops
        if op.name == "cond"
        and any(o.name == "dot" for r in op.regions for o in walk(r))
    )

    def number(value, ids):
        if value in ids:
            return ids[value]
        op = made[value]
        if op.name == "constant":
            return op.attrs["value"]
        operands = [number(v, ids) for v in op.operands]
        if op.name == "cast":
            return int(operands[0])
        return getattr(operator, op.name.rstrip("_"))(*operands)

    _, i, j = pipeline.ids
    return {
        (row, step)
        for row in range(rows)
        for step in range(steps)
        if number(guard.operands[0], {i: row, j: step})
    }


def test_windows_of_elements_stay_whole():
    """Their index counts elements: a part does not start at a multiple of its size."""
    kernel = parsed("""
    kernel @k(%x: ref<f32[12,4] any>, %o: ref<f32[8,4] any>) outputs 1 {
      pipeline %x, %o {grid=(1,), windows=(in[element 8, 4], out[8, 4]),
          semantics=("arbitrary",)}
        map (%i: i32) { %a: i32 = constant {value=3} yield %a, %i }
        map (%j: i32) { yield %j, %j }
        body (%s: i32, %xb: ref<f32[8,4] block>, %ob: ref<f32[8,4] block>) {
          %v: f32[8,4] = load %xb[:, :]
          store %ob[:, :] = %v
        }
    }""")
    for place in ((0, 0), (1, 0)):
        with pytest.raises(CannotReblock, match="a window indexes it by element"):
            cut(kernel, place, 2)
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    (found,) = outputs(cut(kernel, (0, 1), 2), [x])
    np.testing.assert_array_equal(found, x[3:11])


MERGED = """
kernel @k(%x: ref<f32[2,9,7,8] any>, %o: ref<f32[2,8,6,8] any>) outputs 1 {
  pipeline %x, %o {grid=(2,), semantics=("arbitrary",),
      windows=(in[squeezed 1, 9, 7, 8], out[squeezed 1, 8, 6, 8])}
    map (%i: i32) { %z: i32 = constant {value=0} yield %i, %z, %z, %z }
    map (%i1: i32) { %z1: i32 = constant {value=0} yield %i1, %z1, %z1, %z1 }
    body (%s: i32, %xb: ref<f32[9,7,8] block>, %ob: ref<f32[8,6,8] block>) {
      %a: f32[8,6,8] = load %xb[1:+8, 0:+6, :]
      %b: f32[48,8] = reshape %a {shape=(48, 8)}
      %n: i32[48,8] = iota {dim=0, type=i32[48,8]}
      %f: f32[48,8] = cast %n {dtype=f32}
      %c: f32[48,8] = add %b, %f
      %d: f32[8,6,8] = reshape %c {shape=(8, 6, 8)}
      store %ob[:, :, :] = %d
    }
}"""


def test_rows_of_several_dimensions_are_cut_along_the_first():
    """What a reshape merges is split with it: six of the merged rows for each."""
    kernel = parsed(MERGED)
    new = cut(kernel, (1, 1), 4)
    verify(new)
    assert "f32[2,6,8] = load" in new.text and "f32[12,8] = reshape" in new.text
    x = np.random.default_rng(0).standard_normal((2, 9, 7, 8)).astype(np.float32)
    for want, got in zip(outputs(kernel, [x]), outputs(new, [x]), strict=True):
        np.testing.assert_array_equal(want, got)


@pytest.mark.parametrize("place", [(1, 2), (0, 1)])
def test_other_dimensions_of_merged_rows_stay_whole(place):
    with pytest.raises(CannotReblock):
        cut(parsed(MERGED), place, 2)


QUOTIENT = """
kernel @k(%t: ref<i32[2] smem>, %x: ref<f32[32,4] any>, %y: ref<f32[16,4] any>, \
%o: ref<f32[32,4] any>) outputs 1 {
  pipeline %x, %y, %o {grid=(4,), windows=(in[8, 4], in[8, 4], out[8, 4]), \
semantics=("parallel",)}
    map (%i: i32) { %z: i32 = constant {value=0} yield %i, %z }
    map (%i1: i32) {
      %z1: i32 = constant {value=0}
      %d1: i32 = constant {value=DIVISOR}
      %q1: i32 = div %i1, %d1
      %n: i32 = load %t[%q1]
      yield %n, %z1
    }
    map (%i2: i32) { %z2: i32 = constant {value=0} yield %i2, %z2 }
    body (%i3: i32, %xb: ref<f32[8,4] block>, %yb: ref<f32[8,4] block>, \
%ob: ref<f32[8,4] block>) {
      %d: i32 = constant {value=DIVISOR}
      %q: i32 = div %i3, %d
      %f: f32 = cast %q {dtype=f32}
      %w: f32[8,4] = broadcast_in_dim %f {shape=(8, 4), dims=()}
      %a: f32[8,4] = load %xb[:, :]
      %b: f32[4] = load %yb[3, :]
      %c: f32[8,4] = broadcast_in_dim %b {shape=(8, 4), dims=(1,)}
      %s: f32[8,4] = add %a, %c
      %r: f32[8,4] = mul %s, %w
      store %ob[:, :] = %r
    }
}"""


@pytest.mark.parametrize("divisor, factor", [(2, 2), (4, 2), (4, 4)])
def test_programs_grow_that_share_what_a_quotient_names(divisor: int, factor: int):
    kernel = parsed(QUOTIENT.replace("DIVISOR", str(divisor)))
    new = grow(kernel, (0, 0), factor)
    verify(new)
    assert f"grid=({4 // factor},)" in head(new)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(n, 4)).astype(np.float32) for n in (32, 16))
    arrays = [np.array([1, 0], np.int32), x, y]
    for got, want in zip(outputs(new, arrays), outputs(kernel, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("divisor, factor", [(2, 4), (3, 2), (1, 2)])
def test_programs_of_several_quotients_do_not_grow(divisor: int, factor: int):
    kernel = parsed(QUOTIENT.replace("DIVISOR", str(divisor)))
    with pytest.raises(CannotReblock, match="y moves along the same axis"):
        grow(kernel, (0, 0), factor)


def test_merged_rows_do_not_grow():
    with pytest.raises(CannotReblock, match=r"parallel axis|mixes it"):
        grow(cut(parsed(MERGED), (1, 1), 4), (1, 1), 2)


def skipping_matmul(condition, depth=8):
    """A matmul whose programs skip some of their steps."""
    last = 32 // depth - 1

    def kernel(x_ref, y_ref, o_ref, acc_ref):
        i, k = pl.program_id(0), pl.program_id(1)

        @pl.when(k == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when(condition(i, k))
        def _():
            acc_ref[...] += x_ref[...] @ y_ref[...]

        @pl.when(k == last)
        def _():
            o_ref[...] = acc_ref[...]

    shape = jax.ShapeDtypeStruct((32, 32), "float32")
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(4, last + 1),
        in_specs=[
            pl.BlockSpec((8, depth), lambda i, k: (i, k)),
            pl.BlockSpec((depth, 32), lambda i, k: (k, 0)),
        ],
        out_specs=pl.BlockSpec((8, 32), lambda i, k: (i, 0)),
        scratch_shapes=[pltpu.VMEM((8, 32), jnp.float32)],
    )
    (kernel,) = map(run, kernels_in(call, shape, shape))
    return kernel


def test_programs_that_skip_by_a_remainder_are_not_merged():
    """Nothing says which of their steps all of them skip: none would be skipped."""
    kernel = skipping_matmul(lambda i, k: (i + k) % 3 > 0)
    with pytest.raises(CannotReblock, match="are skipped is not known"):
        grow(kernel, (0, 0), 2, fills=True)


@pytest.mark.parametrize(
    "condition, depth",
    [
        (lambda i, k: k < pl.cdiv((i + 1) * 8, 16), 16),
        (lambda i, k: k < (i + 1) * 8 // 4, 4),
        (lambda i, k: k >= jnp.maximum(i * 8 - 11, 0) // 8, 8),
        (lambda i, k: (k >= jnp.maximum(i - 1, 0)) & (k <= i), 8),
    ],
)
def test_programs_that_skip_by_rounded_numbers_are_merged(condition, depth):
    kernel = skipping_matmul(condition, depth)
    new = grow(kernel, (0, 0), 2, fills=True)
    verify(new)
    assert new.text.count("cond") == kernel.text.count("cond")
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(32, 32)).astype("f4") for _ in range(2)]
    (got,), (want,) = outputs(new, arrays), outputs(kernel, arrays)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def running_softmax(condition, start):
    """Sums of exponentials relative to a running maximum; programs skip some steps."""

    def kernel(x_ref, o_ref, m_ref, l_ref):
        i, k = pl.program_id(0), pl.program_id(1)

        @pl.when(k == 0)
        def _():
            m_ref[...] = jnp.full_like(m_ref, start)
            l_ref[...] = jnp.zeros_like(l_ref)

        @pl.when(condition(i, k))
        def _():
            x, old = x_ref[...], m_ref[...]
            new = jnp.maximum(old, x.max(axis=1, keepdims=True))
            p = jnp.exp(x - new).sum(axis=1, keepdims=True)
            l_ref[...] = jnp.exp(old - new) * l_ref[...] + p
            m_ref[...] = new

        @pl.when(k == 3)
        def _():
            o_ref[...] = l_ref[...]

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((32, 1), "float32"),
        grid=(4, 4),
        in_specs=[pl.BlockSpec((8, 8), lambda i, k: (i, k))],
        out_specs=pl.BlockSpec((8, 1), lambda i, k: (i, 0)),
        scratch_shapes=[pltpu.VMEM((8, 1), jnp.float32)] * 2,
    )
    (kernel,) = map(run, kernels_in(call, jax.ShapeDtypeStruct((32, 32), "float32")))
    return kernel


def test_a_maximum_from_minus_infinity_is_merged_if_all_take_the_first_step():
    """Rows whose first steps are masked in all are NaN, before and after."""
    kernel = running_softmax(lambda i, k: k <= i, -jnp.inf)
    new = grow(kernel, (0, 0), 2, fills=True)
    verify(new)
    x = np.random.default_rng(0).normal(size=(32, 32)).astype("f4")
    x[9, :8] = x[30] = -np.inf
    x[17, 5] = np.inf
    with np.errstate(invalid="ignore"):
        (got,), (want,) = outputs(new, [x]), outputs(kernel, [x])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert list(np.flatnonzero(np.isnan(want))) == [9, 17, 30]


def test_a_maximum_from_minus_infinity_is_not_merged_before_a_step():
    after = lambda i, k: k >= i
    grow(running_softmax(after, -1e30), (0, 0), 2, fills=True)
    with pytest.raises(CannotReblock, match="before the first step"):
        grow(running_softmax(after, -jnp.inf), (0, 0), 2, fills=True)
