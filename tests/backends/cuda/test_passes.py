"""The backend's passes on kernels: text in, text out, the same meaning."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import kernels as library
from pallasite.backends.cuda import passes_for
from pallasite.backends.cuda.authored import rounds
from pallasite.backends.cuda.before_waits import before_waits
from pallasite.backends.cuda.order import Order
from pallasite.backends.cuda.overlap import overlap
from pallasite.backends.cuda.rows_out import rows_out
from pallasite.backends.cuda.specialize import specialize
from pallasite.backends.cuda.turned import turn_tiles
from pallasite.emulation.emulate import emulate
from pallasite.ir.nodes import Block, Kernel, Op, Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.ir.text import parse_kernel, print_kernel
from pallasite.ir.types import INDEX
from pallasite.ir.verify import verify
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.run import run
from pallasite.target import GPUS, Gpu
from pallasite.target.chip import Memory
from tests.backends.cuda import kernels
from tests.backends.cuda.kernels import bf16
from tests.passes.test_same_meaning import outputs

GOLDEN = Path(__file__).parent / "golden"
CHIP = replace(GPUS["h100"], cores=4)

MATMUL = """
kernel @matmul(%x: ref<bf16[512,256] any>, %y: ref<bf16[256,512] any>, %o: ref<f32[512,512] any>) outputs 1 {
  pipeline {grid=(4, 4), windows=(), semantics=("parallel", "parallel")}
    body (%i: i32, %j: i32) {
      %zero: f32[128,128] = constant {value=0.0}
      %first: i32 = constant {value=0}
      %limit: i32 = constant {value=4}
      %step: i32 = constant {value=1}
      %ob: ref<f32[128,128] block> = block_view %o, %i, %j {window=out[128, 128]}
      %sums: f32[128,128] = for %first, %limit, %step, %zero
        body (%k: i32, %acc: f32[128,128]) {
          %xb: ref<bf16[128,64] block> = block_view %x, %i, %k {window=in[128, 64]}
          %yb: ref<bf16[64,128] block> = block_view %y, %k, %j {window=in[64, 128]}
          %a: bf16[128,64] = load %xb[:, :]
          %b: bf16[64,128] = load %yb[:, :]
          %c: f32[128,128] = dot %a, %b {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
          %d: f32[128,128] = add %acc, %c
          yield %d
        }
      store %ob[:, :] = %sums
    }
}
"""  # noqa: E501

CHAIN = """
kernel @chain(%x: ref<bf16[128,64] any>, %y: ref<bf16[256,64] any>, %z: ref<bf16[256,64] any>, %o: ref<f32[128,64] any>) outputs 1 {
  pipeline {grid=(2,), windows=(), semantics=("parallel",)}
    body (%i: i32) {
      %zero: f32[64,64] = constant {value=0.0}
      %first: i32 = constant {value=0}
      %step: i32 = constant {value=1}
      LIMIT
      %ob: ref<f32[64,64] block> = block_view %o, %i, %first {window=out[64, 64]}
      %xb: ref<bf16[64,64] block> = block_view %x, %i, %first {window=in[64, 64]}
      %q: bf16[64,64] = load %xb[:, :]
      %sums: f32[64,64] = for %first, %limit, %step, %zero
        body (%n: i32, %acc: f32[64,64]) {
          %yb: ref<bf16[64,64] block> = block_view %y, %n, %first {window=in[64, 64]}
          %zb: ref<bf16[64,64] block> = block_view %z, %n, %first {window=in[64, 64]}
          %k: bf16[64,64] = load %yb[:, :]
          %v: bf16[64,64] = load %zb[:, :]
          %s: f32[64,64] = dot %q, %k {contract=((1,), (1,)), batch=((), ()), dtype=f32, precision=None}
          %t: f32[64,64] = tanh %s
          %p: bf16[64,64] = cast %t {dtype=bf16}
          %half: f32[64,64] = constant {value=0.5}
          %old: f32[64,64] = mul %acc, %half
          %c: f32[64,64] = dot %p, %v {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
          %d: f32[64,64] = add %old, %c
          yield %d
        }
      store %ob[:, :] = %sums
    }
}
"""  # noqa: E501
KNOWN = CHAIN.replace("LIMIT", "%limit: i32 = constant {value=4}")
UNKNOWN = CHAIN.replace(
    "LIMIT",
    "%three: i32 = constant {value=3}\n      %limit: i32 = mul %i, %three",
)


def kernel(text: str) -> Kernel:
    made = parse_kernel(text)
    verify(made)
    return made


def check_golden(name: str, made: Kernel) -> None:
    """Compare with a file; where that was removed it is written anew."""
    verify(made)
    text = print_kernel(made)
    assert print_kernel(parse_kernel(text)) == text
    path = GOLDEN / name
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"{path.name} was missing and is written now: read it")
    assert text == path.read_text()


def test_a_product_becomes_roles():
    check_golden("specialized_matmul.txt", specialize(kernel(MATMUL), CHIP))


def test_the_second_of_two_products_is_delayed():
    made = canonicalize(overlap(kernel(KNOWN)))
    check_golden("overlapped_chain.txt", made)
    check_golden("specialized_chain.txt", specialize(made, CHIP))


def test_a_kernel_without_products_is_left_alone():
    plain = kernel(re.sub(r"%c: .*", "%c: f32[128,128] = mul %acc, %acc", MATMUL))
    assert specialize(plain, CHIP) is plain
    assert overlap(plain) is plain


@pytest.mark.parametrize("text", [KNOWN, UNKNOWN])
def test_overlap_keeps_the_meaning(text: str):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(n, 64)).astype(bf16) for n in (128, 256, 256)]
    before = kernel(text)
    after = canonicalize(overlap(before))
    assert after is not before
    for a, b in zip(*(emulate(k)(*arrays) for k in (before, after)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


# dv += p^T @ do and dk += ds^T @ q, as a gradient has them.
BACKWARD = """
kernel @backward(%q: ref<bf16[256,64] any>, %k: ref<bf16[128,64] any>, %d: ref<bf16[256,64] any>, %m: ref<f32[256,1] any>, %o: ref<f32[128,64] any>, %u: ref<f32[128,64] any>) outputs 2 {
  pipeline {grid=(2,), windows=(), semantics=("parallel",)}
    body (%i: i32) {
      %zero: f32[64,64] = constant {value=0.0}
      %first: i32 = constant {value=0}
      %step: i32 = constant {value=1}
      %limit: i32 = constant {value=4}
      %ob: ref<f32[64,64] block> = block_view %o, %i, %first {window=out[64, 64]}
      %ub: ref<f32[64,64] block> = block_view %u, %i, %first {window=out[64, 64]}
      %kb: ref<bf16[64,64] block> = block_view %k, %i, %first {window=in[64, 64]}
      %keys: bf16[64,64] = load %kb[:, :]
      %turned: bf16[64,64] = transpose %keys {perm=(1, 0)}
      %dv: f32[64,64], %dk: f32[64,64] = for %first, %limit, %step, %zero, %zero
        body (%n: i32, %acc: f32[64,64], %sum: f32[64,64]) {
          %qb: ref<bf16[64,64] block> = block_view %q, %n, %first {window=in[64, 64]}
          %db: ref<bf16[64,64] block> = block_view %d, %n, %first {window=in[64, 64]}
          %mb: ref<f32[64,1] block> = block_view %m, %n, %first {window=in[64, 1]}
          %queries: bf16[64,64] = load %qb[:, :]
          %do: bf16[64,64] = load %db[:, :]
          %most: f32[64,1] = load %mb[:, :]
          %s: f32[64,64] = dot %queries, %turned {contract=((1,), (0,)), batch=((), ()), dtype=f32, precision=None}
          %wide: f32[64,64] = broadcast_in_dim %most {shape=(64, 64), dims=(0, 1)}
          %rows: i32[64,64] = iota {dim=0}
          %columns: i32[64,64] = iota {dim=1}
          %seen: bool[64,64] = ge %rows, %columns
          %less: f32[64,64] = sub %s, %wide
          %t: f32[64,64] = tanh %less
          %masked: f32[64,64] = select_n %seen, %zero, %t
          %p: bf16[64,64] = cast %masked {dtype=bf16}
          %c: f32[64,64] = dot %p, %do {contract=((0,), (0,)), batch=((), ()), dtype=f32, precision=None}
          %next: f32[64,64] = add %acc, %c
          %e: f32[64,64] = dot %queries, %p {contract=((0,), (0,)), batch=((), ()), dtype=f32, precision=None}
          %f: f32[64,64] = transpose %e {perm=(1, 0)}
          %more: f32[64,64] = add %sum, %f
          yield %next, %more
        }
      store %ob[:, :] = %dv
      store %ub[:, :] = %dk
    }
}
"""  # noqa: E501


def test_tiles_are_turned_where_products_want_their_transpose():
    """Keys by queries, so that p and its products need no transposition."""
    made = canonicalize(turn_tiles(kernel(BACKWARD)))
    check_golden("turned_backward.txt", made)
    check_golden("specialized_backward.txt", specialize(made, CHIP))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(n, 64)).astype(bf16) for n in (256, 128, 256)]
    arrays.append(rng.normal(size=(256, 1)).astype("f4"))
    for a, b in zip(
        *(emulate(k)(*arrays) for k in (kernel(BACKWARD), made)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-4)


def test_tiles_that_products_want_both_ways_stay():
    """As p and as its transpose: neither is better."""
    other = BACKWARD.replace("%do {contract=((0,), (0,))", "%do {contract=((1,), (0,))")
    text = turn_tiles(kernel(other)).text
    assert "%seen: bool[64,64] = ge %rows, %columns" in text
    assert "dot %p, %do {contract=((1,), (0,))" in text


def test_products_with_no_computed_side_are_left_alone():
    assert turn_tiles(kernel(MATMUL)).text == kernel(MATMUL).text
    assert turn_tiles(kernel(KNOWN)).text == kernel(KNOWN).text


COUNTED = (
    KNOWN.replace(
        "%sums: f32[64,64] = for %first, %limit, %step, %zero",
        "%end: i32, %sums: f32[64,64] = for %first, %limit, %step, %step, %zero",
    )
    .replace(
        "body (%n: i32, %acc: f32[64,64]) {",
        "body (%index: i32, %count: i32, %acc: f32[64,64]) {\n"
        "          %next: i32 = add %count, %step\n"
        "          %n: i32 = sub %count, %step",
    )
    .replace("yield %d", "yield %next, %d")
)


def test_counters_come_from_the_index():
    before = kernel(COUNTED)
    assert overlap(before) is before  # what the loads depend on is carried
    after = canonicalize(before)
    (loop,) = [op for op in walk(after.body) if op.name == "for"]
    assert len(loop.results) == 1
    made = overlap(after)
    assert made is not after
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(n, 64)).astype(bf16) for n in (128, 256, 256)]
    for a, b in zip(*(emulate(k)(*arrays) for k in (before, made)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def test_a_loop_that_may_not_run_is_guarded():
    assert not any(op.name == "cond" for op in walk(overlap(kernel(KNOWN)).body))
    assert any(op.name == "cond" for op in walk(overlap(kernel(UNKNOWN)).body))


def test_both_roles_use_each_ring_as_often():
    made = specialize(canonicalize(overlap(kernel(KNOWN))), CHIP)
    (roles,) = [op for op in walk(made.body) if op.name == "roles"]
    loading, computing = roles.regions
    count = lambda role, name: sum(op.name == name for op in walk(role))
    assert count(loading, "copy_start") == count(computing, "barrier_wait")
    assert count(loading, "barrier_wait") == count(computing, "barrier_arrive")
    assert count(computing, "wgmma") == 4  # first step, two in the loop, after it


def test_the_next_left_side_is_made_when_the_product_in_flight_has_ended():
    """Its registers are those that the product reads: ptxas would serialise both."""
    early = KNOWN.replace("%p: bf16[64,64] = cast %t {dtype=bf16}\n", "").replace(
        "%t: f32[64,64] = tanh %s\n",
        "%t: f32[64,64] = tanh %s\n          %p: bf16[64,64] = cast %t {dtype=bf16}\n"
        "          %u: f32[64,64] = exp %t\n",
    )
    early = early.replace("mul %acc, %half", "mul %acc, %u")
    made = specialize(canonicalize(overlap(kernel(early))), CHIP)
    (roles,) = [op for op in walk(made.body) if op.name == "roles"]
    (step,) = [
        op.regions[0]
        for op in walk(roles.regions[1])
        if op.name == "for" and any(o.name == "wgmma" for o in op.regions[0].ops)
    ]
    names = [op.name for op in step.ops if op.name in ("exp", "wgmma_wait", "cast")]
    assert names == ["wgmma_wait", "exp", "wgmma_wait", "cast"]


def test_the_loading_role_has_no_tiles():
    made = specialize(kernel(MATMUL), CHIP)
    (roles,) = [op for op in walk(made.body) if op.name == "roles"]
    values = [v for op in walk(roles.regions[0]) for v in op.results if not v.is_ref]
    assert values and all(not v.type.shape for v in values)


def spaces_of_loads(role: Block) -> list[str]:
    return [op.operands[0].ref.space for op in walk(role) if op.name == "load"]


def test_numbers_of_a_steps_rows_are_copied_beside_its_operands():
    """Loads of main memory in a step would be waited for: registers for those of the
    next step are not left beside the sums."""
    made = specialize(canonicalize(turn_tiles(kernel(BACKWARD))), CHIP)
    (roles,) = [op for op in walk(made.body) if op.name == "roles"]
    loading, computing = roles.regions
    copied = [op.operands[1].ref for op in walk(loading) if op.name == "copy_start"]
    (line,) = [ref for ref in copied if ref.dtype.name == "f32"]
    assert line.shape == (64, 1) and line.layout is None
    assert spaces_of_loads(computing) == ["smem"]


# Scores of a step and their cotangents; numbers of rows are loaded before operands.
TWO_FIRST = BACKWARD
for old, new in {
    "%o: ref": "%v: ref<bf16[128,64] any>, %o: ref",
    "%keys: bf16": "%vb: ref<bf16[64,64] block> = block_view %v, %i, %first "
    "{window=in[64, 64]}\n%values: bf16[64,64] = load %vb[:, :]\n%keys: bf16",
    "%most: f32[64,1] = load %mb[:, :]": "",
    "%queries: bf16": "%most: f32[64,1] = load %mb[:, :]\n%queries: bf16",
    "%masked: f32[64,64] = select_n %seen, %zero, %t": "%g: f32[64,64] = dot %do, "
    "%values {contract=((1,), (1,)), batch=((), ()), dtype=f32, precision=None}\n"
    "%masked: f32[64,64] = mul %g, %t",
}.items():
    assert old in TWO_FIRST
    TWO_FIRST = TWO_FIRST.replace(old, new)


def step_of(text: str, chip: Gpu = CHIP) -> list[Op]:
    """The loop of the computing role: its products and elementwise ops."""
    made = specialize(canonicalize(turn_tiles(kernel(text))), chip)
    (roles,) = [op for op in walk(made.body) if op.name == "roles"]
    (step,) = [
        op.regions[0]
        for op in walk(roles.regions[1])
        if op.name == "for" and any(o.name == "wgmma" for o in op.regions[0].ops)
    ]
    names = ("wgmma", "wgmma_wait", "tanh", "cast")
    return [op for op in step.ops if op.name in names and op.results[0].type.shape]


def test_the_product_that_is_needed_first_starts_first():
    """Alone: the other one starts when it has ended, and runs beside what follows."""
    ops = step_of(TWO_FIRST)[:4]
    first, wait, _, _ = ops
    assert [op.name for op in ops] == ["wgmma", "wgmma_wait", "wgmma", "tanh"]
    assert wait.operands == (first.result,) and wait.attrs["pending"] == 0


@pytest.mark.parametrize("programs", [1, 2])
def test_left_sides_are_made_beside_products_that_read_other_registers(programs):
    """Of the programs that share a multiprocessor each has too few of them."""
    start, end = TWO_FIRST.index("%c: f32"), TWO_FIRST.index("%e: f32")
    first_sum = TWO_FIRST[start:end]
    text = TWO_FIRST.replace(first_sum, "").replace(
        "%masked: f32",
        "%w: bf16[64,64] = cast %t {dtype=bf16}\n"
        + first_sum.replace("%p", "%w")
        + "%masked: f32",
    )
    room = Memory(CHIP.shared.bytes * programs // 2)
    memories = {**CHIP.memories, "shared": room}
    ops = step_of(text, replace(CHIP, memories=memories))
    casts = [n for n, op in enumerate(ops) if op.name == "cast"]
    between = [op for op in ops[casts[0] : casts[1]] if op.name != "cast"]
    started = next(op for op in between if op.name == "wgmma")
    waited = {v for op in between if op.name == "wgmma_wait" for v in op.operands}
    assert (started.result in waited) == (programs > 1)


@pytest.mark.parametrize(
    "change",
    [
        ("f32[256,1]", "f32[255,1]"),  # the last block hangs over the edge
        ("f32[256,1]", "f32[256,2]"),  # every other number
        ("f32[256,1]", "f32[512,1]", "%mb: ref<f32[64,1] block> = block_view %m, %n"),
    ],
)
def test_other_numbers_of_a_step_are_loaded_by_threads(change):
    old, new, *more = change
    text = BACKWARD.replace(f"%m: ref<{old}", f"%m: ref<{new}")
    if more:  # blocks that start anywhere
        text = text.replace("window=in[64, 1]", "window=in[element 64, 1]")
    made = specialize(canonicalize(turn_tiles(kernel(text))), CHIP)
    (roles,) = [op for op in walk(made.body) if op.name == "roles"]
    assert spaces_of_loads(roles.regions[1]) == ["block"]


@pytest.mark.parametrize("depth, columns", [(4096, 4096), (2048, 1024)])
def test_weights_that_become_floats_are_copied_ahead(depth: int, columns: int):
    """Few rows stay few: they are the columns of a product whose rows are weights."""
    weights = jax.eval_shape(
        lambda w: library.quantize_weights(w, bits=4),
        jax.ShapeDtypeStruct((depth, columns), bf16),
    )
    x = jax.ShapeDtypeStruct((16, depth), bf16)
    (made,) = pl.lower(library.weight_only_matmul)(x, weights).kernels
    made = run(run(made), passes_for(GPUS["h100"]))
    (roles,) = [op for op in walk(made.body) if op.name == "roles"]
    loading, computing = roles.regions
    copied = [op.operands[1].ref for op in walk(loading) if op.name == "copy_start"]
    assert {ref.shape for ref in copied if ref.dtype.name == "i8"} == {(128, 128)}
    assert {ref.shape[0] for ref in copied if ref.layout} == {16, 128}
    loads = (op for op in walk(computing) if op.name == "load")
    shown = {op.result.tile.shape for op in loads if op.operands[0].ref.space != "smem"}
    is_loop = any(op.name == "for" for op in walk(computing))
    # Scales of a single step are loaded once, in order.
    assert is_loop == (depth == 4096) and shown == (set() if is_loop else {(1, 128)})


# --- order ---


def scheduled(causal: bool, heads: int = 3, **options) -> Kernel:
    shapes = [jax.ShapeDtypeStruct((heads, 512, 64), bf16)] * 3
    call = lambda q, k, v: kernels.attention(
        q, k, v, style="loop", causal=causal, **options
    )
    (made,) = pl.lower(call)(*shapes).kernels
    passes = [p for p in passes_for(CHIP) if p.name != "specialize"]
    return run(run(made), passes)


def programs(order: Order, blocks: int) -> list[list[tuple[int, ...]]]:
    """The grid indices that each block of threads runs, by the pass's own code."""
    from pallasite.ir.build import Builder
    from pallasite.passes.analysis.block_table import evaluate_map

    b = Builder()
    turn, block = Value(INDEX), Value(INDEX)
    ids = order.decoded(b, order.program(b, turn, block, blocks))
    limit = order.rounds(b, block, blocks)
    code = b.block([turn, block], [*ids, limit])
    found = []
    for number in range(blocks):
        steps = np.array([[t, number] for t in range(64)], np.int32).T
        *indices, limits = evaluate_map(code, steps)
        found.append([tuple(int(x[t]) for x in indices) for t in range(limits[0])])
    return found


@pytest.mark.parametrize(("grid", "blocks"), [((3, 5), 4), ((20, 7), 13), ((6,), 4)])
@pytest.mark.parametrize("how", [(True, False), (False, False), (False, True)])
def test_every_program_runs_once(grid, blocks, how):
    found = programs(Order(grid, frozenset(), *how), blocks)
    assert sorted(i for each in found for i in each) == sorted(np.ndindex(*grid))


def test_longer_programs_run_first_and_work_is_shared_evenly():
    made = scheduled(causal=True, block=(64, 64))
    order = Order.of(Pipeline.of(find_pipeline(made)), 4)
    order = replace(order, in_pairs=False)
    assert order == Order((3, 8), frozenset({1}), False)
    found = programs(order, 4)
    assert [ids[0][1] for ids in found] == [7, 7, 7, 6]
    work = [sum(1 + row for _, row in ids) for ids in found]
    assert work == [27, 27, 27, 27]


@pytest.mark.parametrize(("heads", "rows"), [(64, 32), (16, 128), (128, 32)])
def test_blocks_of_a_real_chip_get_the_same_work(heads: int, rows: int):
    order = Order((heads, rows), frozenset({1}), False)
    work = [sum(2 + row for _, row in ids) for ids in programs(order, 132)]
    assert np.mean(work) > 0.99 * max(work)


@pytest.mark.parametrize("growing", [frozenset({1}), frozenset[int]()])
@pytest.mark.parametrize("rows", [8, 7])
def test_pairs_of_programs_take_as_long(growing, rows):
    order = Order((12, rows), growing, False, in_pairs=True)
    found = programs(order, 6)
    length = lambda row: 1 + (row if growing else rows - 1 - row)
    work = [sum(length(row) for _, row in ids) for ids in found]
    assert length(found[0][0][1]) == rows and length(found[0][1][1]) == 1
    assert max(work) - min(work) <= (0 if rows % 2 == 0 else rows)


def test_many_programs_run_in_pairs_near_those_that_share_operands():
    made = scheduled(causal=True, block=(64, 64), heads=16)
    assert Order.of(Pipeline.of(find_pipeline(made)), 4).in_pairs
    assert not Order.of(Pipeline.of(find_pipeline(made)), 127).in_pairs


def test_equal_programs_run_in_groups_of_rows():
    made = scheduled(causal=False, block=(64, 64))
    assert Order.of(Pipeline.of(find_pipeline(made)), 4) == Order((3, 8))


TURNS = """
kernel @turns(%x: ref<f32[64,64] any>, %o: ref<f32[64,64] any>) outputs 1 level explicit {
  pipeline {grid=(1,), windows=(), semantics=("parallel",)}
    body (%i: i32) {
      %turn: ref<i32 mbarrier @arrivals(1)> = alloc
      %other: ref<i32 mbarrier @arrivals(1)> = alloc
      roles
        body () {
          %zero: i32 = constant {value=0}
          %p: f32[64,64] = load %x[:, :]
          barrier_expect %turn {bytes=0}
          barrier_wait %turn, %zero
          barrier_wait %other, %zero
          %s: f32[64] = reduce %p {kind="sum", axes=(1,)}
          %w: f32[64,64] = broadcast_in_dim %s {shape=(64, 64), dims=(0,)}
          %q: f32[64,64] = load %x[:, :]
          %d: f32[64,64] = div %q, %w
          %e: f32[64,64] = exp %p
          %f: f32[64,64] = add %d, %e
          store %o[:, :] = %f
        }
    }
}
"""  # noqa: E501


def test_arithmetic_is_done_before_waits_but_not_before_arrivals_or_loads():
    made = before_waits(kernel(TURNS))
    verify(made)
    outer = ("pipeline", "alloc", "roles")
    names = [op.name for op in walk(made.body) if op.name not in outer]
    first = ["constant", "load", "barrier_expect", "reduce", "broadcast_in_dim"]
    assert names[:7] == [*first, "barrier_wait", "barrier_wait"]
    # A load is behind the waits, and what comes after it stays after it.
    assert names[7:] == ["load", "div", "exp", "add", "store"]
    assert before_waits(made) is made


SEVERAL = """
kernel @several(%x: ref<f32[2560,256] gmem>, %o: ref<f32[2560,256] gmem>) outputs 1 level explicit {
  pipeline {grid=(20,), windows=(), semantics=("parallel",)}
    body (%i: i32) {
      %zero: i32 = constant {value=0}
      %a: ref<f32[128,256] smem> = alloc
      %full: ref<i32 mbarrier @arrivals(1)> = alloc
      roles {cuda.names=("wg 0", "wg 1"), cuda.warpgroups=(1, 1)}
        body () {
          %one: i32 = constant {value=1}
          set_registers {count=232, more=True}
          %limit: i32 = constant {value=2}
          %rows: i32 = constant {value=128}
          %first: i32 = mul %i, %rows
          for %zero, %limit, %one
            body (%n: i32) {
              %ob: ref<f32[128,256] gmem> = subview %o[%first:+128, :]
              copy_start %a, %ob {priority=0}
              bulk_commit
              bulk_wait {pending=0, read=False}
            }
        }
        body () {
          set_registers {count=40, more=False}
          barrier_wait %full, %zero
        }
    }
}
"""  # noqa: E501


def blocks_of(text: str, chip: Gpu = CHIP) -> int | None:
    """How many blocks of threads run a kernel's programs; None: one each."""
    given = kernel(text)
    verify(given)
    made = rounds(given, chip)
    assert made.text != given.text or made is given
    return find_pipeline(made).attrs.get("cuda.blocks")


def test_blocks_of_threads_take_all_programs():
    """As many as run at a time: here shared memory is enough for one."""
    assert blocks_of(SEVERAL) == 4
    assert blocks_of(SEVERAL, replace(CHIP, cores=20)) is None
    assert blocks_of(SEVERAL, replace(CHIP, cores=19)) == 19


def test_how_many_programs_run_at_a_time():
    smaller = SEVERAL.replace("[128,256] smem", "[64,256] smem")
    smaller = smaller.replace("[128,256] gmem", "[64,256] gmem").replace(
        ":+128", ":+64"
    )
    # Threads that exchange registers start with all that bounds leave them.
    assert blocks_of(smaller) == 4
    assert blocks_of(smaller.replace("(1, 1)}", "(1, 1), cuda.per_core=2}")) == 8
    # Others have what ptxas gives them: two or three programs fit.
    assert blocks_of(re.sub(" *set_registers.*\n", "", smaller)) is None
    assert blocks_of(re.sub(" *set_registers.*\n", "", SEVERAL)) == 4


FIRST = "          set_registers {count=40, more=False}\n"
WAIT = "          barrier_wait %full, %zero\n"


@pytest.mark.parametrize(
    "old, new",
    [
        # Registers are exchanged after something else, or twice.
        (FIRST + WAIT, WAIT + FIRST),
        (FIRST, FIRST + FIRST),
        # A copy out may still read shared memory.
        ("bulk_wait {pending=0", "bulk_wait {pending=1"),
        ("              bulk_commit\n", ""),
        # Not all programs have as many steps.
        ("for %zero, %limit", "for %i, %limit"),
        # The chip counts the threads that have arrived, and nobody resets it.
        (
            WAIT,
            WAIT + "          named_barrier {id=5, threads=128, arrive_only=True}\n",
        ),
        (WAIT, WAIT + "          %own: ref<i32 mbarrier @arrivals(1)> = alloc\n"),
        # Tiles leave few registers.
        ("count=232", "count=40"),
        ('semantics=("parallel",)', 'semantics=("cluster",)'),
        ("roles {", "roles {cuda.registers=(232, 40), "),
    ],
)
def test_programs_that_have_blocks_of_threads_of_their_own(old, new):
    assert old in SEVERAL
    assert blocks_of(SEVERAL.replace(old, new)) is None


ROWS_OUT = """
kernel @k(%x: ref<f32[4,4,6,8] any>, %o: ref<bf16[4,4,6,8] any>) outputs 1 {
  pipeline {grid=(4, 2), windows=(), semantics=("parallel", "parallel")}
    body (%i: i32, %j: i32) {
      %zero: i32 = constant {value=0}
      %xb: ref<f32[2,6,8] block> = block_view %x, %i, %j, %zero, %zero
          {window=in[squeezed 1, 2, 6, 8]}
      %ob: ref<bf16[2,6,8] block> = block_view %o, %i, %j, %zero, %zero
          {window=out[squeezed 1, 2, 6, 8]}
      %a: f32[2,6,8] = load %xb[:, :, :]
      %b: f32[12,8] = reshape %a {shape=(12, 8)}
      %c: f32[12,8] = exp %b
      %d: f32[2,6,8] = reshape %c {shape=(2, 6, 8)}
      %half: f32[2,6,8] = constant {value=0.5}
      %e: f32[2,6,8] = mul %d, %half
      %f: bf16[2,6,8] = cast %e {dtype=bf16}
      store %ob[:, :, :] = %f
    }
}
"""


def test_rows_of_several_dimensions_are_stored_as_rows():
    kernel = parse_kernel(ROWS_OUT)
    new = rows_out(kernel)
    verify(new)
    *_, tail = new.text.split("exp")
    assert re.findall(r"(?:bf16|f32)\[[\d,]+\](?= =| block>)", tail) == [
        *["f32[12,8]"] * 2,
        "bf16[12,8]",
        "bf16[12,8]",
    ]
    x = np.random.default_rng(0).standard_normal((4, 4, 6, 8)).astype(np.float32)
    for want, got in zip(outputs(kernel, [x]), outputs(new, [x]), strict=True):
        np.testing.assert_array_equal(want, got)
    assert rows_out(new) is new


def test_rows_that_are_apart_keep_their_dimensions():
    """Blocks of six of nine columns: their rows are not adjacent."""
    kernel = parse_kernel(ROWS_OUT.replace("4,4,6,8", "4,4,9,8"))
    assert "reshape_view" not in rows_out(kernel).text


def test_matmuls_of_one_sum_wait_for_each_other_only_to_free_slots():
    """Each adds to the registers of the last, which is in flight."""

    def kernel(x_ref, y_ref, o_ref):
        total = jnp.zeros(o_ref.shape, jnp.float32)
        for n in range(3):
            total += jnp.dot(x_ref[n], y_ref[n], preferred_element_type=jnp.float32)
        o_ref[...] = total

    shapes = [jax.ShapeDtypeStruct(s, bf16) for s in ((3, 64, 64), (3, 64, 64))]
    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    (given,) = pl.lower(call)(*shapes).kernels
    made = run(given)
    for each in passes_for(CHIP):
        made = each.function(made)
    ops = [op for op in walk(made.body) if op.name.startswith("wgmma")]
    waits = [(op.attrs["pending"], len(op.operands)) for op in ops if "wait" in op.name]
    assert waits == [(1, 0), (1, 0), (0, 1)]
    first, second, third = (op for op in ops if op.name == "wgmma")
    assert second.operands[0] is first.result and third.operands[0] is second.result
