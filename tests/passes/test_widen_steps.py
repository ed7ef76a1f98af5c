"""Steps of running maxima and sums, fewer and wider. Text in, text out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.known_comparisons import known_comparisons
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.run import run
from pallasite.passes.schedule.reblock import grow
from pallasite.passes.schedule.tpu_blocks import for_tpu
from pallasite.passes.schedule.widen_steps import widen_steps
from pallasite.sites import kernels_in
from pallasite.target import TPUS
from tests.passes.test_promote import expect
from tests.passes.test_reblock import head
from tests.passes.test_row_strips import code
from tests.passes.test_same_meaning import outputs

FIRST = """
%zero: i32 = constant {value=0}
%first: bool = eq %s, %zero
%begin: i32 = cast %first {dtype=i32}
cond %begin
  branch () {}
  branch () {
    %low: f32[8] = constant {value=-65536.0}
    store %top[:] = %low
    %none: f32[8] = constant {value=0.0}
    store %ob[:] = %none
  }
"""
SCORES = "%x0: f32[8,4] = load %xb[:, :]"
REST = """
%old: f32[8] = load %top[:]
%highest: f32[8] = reduce %x0 {kind="max", axes=(1,)}
%new: f32[8] = max %old, %highest
store %top[:] = %new
%less: f32[8] = sub %old, %new
%shrink: f32[8] = exp %less
%wide: f32[8,4] = broadcast_in_dim %new {shape=(8, 4), dims=(0,)}
%below: f32[8,4] = sub %x0, %wide
%weights: f32[8,4] = exp %below
%total: f32[8] = load %ob[:]
%kept: f32[8] = mul %shrink, %total
%part: f32[8] = reduce %weights {kind="sum", axes=(1,)}
%sum: f32[8] = add %kept, %part
store %ob[:] = %sum
"""


def steps(body: str, x_map: str = "yield %z, %i", n: int = 32) -> Kernel:
    """Eight steps over x[8, n] that keep o[8], the sum of a running softmax."""
    text = f"""
    kernel @k(%x: ref<f32[8,{n}] any>, %o: ref<f32[8] any>) outputs 1 {{
      %top: ref<f32[8] vmem> = alloc
      pipeline %x, %o {{grid=(8,), windows=(in[8, 4], out[8]),
          semantics=("arbitrary",)}}
        map (%i: i32) {{ %z: i32 = constant {{value=0}} {x_map} }}
        map (%i1: i32) {{ %z1: i32 = constant {{value=0}} yield %z1 }}
        body (%s: i32, %xb: ref<f32[8,4] block>, %ob: ref<f32[8] block>) {{
          {body}
        }}
    }}"""
    made = parse_kernel(text)
    verify(made)
    return made


def widened(kernel: Kernel, widest: int) -> Kernel:
    plain = canonicalize(known_comparisons(kernel))
    new = canonicalize(widen_steps(plain, widest))
    verify(new)
    return new


def test_steps_become_wider():
    new = widened(steps(FIRST + SCORES + REST), 16)
    assert "grid=(2,), windows=(in[8, 16], out[8])" in new.text
    assert code(new) == expect(
        """
        %0: i32 = constant {value=0}
        %1: bool = eq %s, %0
        %2: i32 = cast %1 {dtype=i32}
        cond %2
          branch () {}
          branch () {
            %3: f32[8] = constant {value=-65536.0}
            store %top[:] = %3
            %4: f32[8] = constant {value=0.0}
            store %ob[:] = %4
          }
        %x0: f32[8,16] = load %xb[:, :]
        %old: f32[8] = load %top[:]
        %highest: f32[8] = reduce %x0 {kind="max", axes=(1,)}
        %new: f32[8] = max %old, %highest
        store %top[:] = %new
        %less: f32[8] = sub %old, %new
        %shrink: f32[8] = exp %less
        %wide: f32[8,16] = broadcast_in_dim %new {shape=(8, 16), dims=(0,)}
        %below: f32[8,16] = sub %x0, %wide
        %weights: f32[8,16] = exp %below
        %total: f32[8] = load %ob[:]
        %kept: f32[8] = mul %shrink, %total
        %part: f32[8] = reduce %weights {kind="sum", axes=(1,)}
        %sum: f32[8] = add %kept, %part
        store %ob[:] = %sum
        """
    )


POSITIONS = """
%four: i32 = constant {value=4}
%base: i32 = mul %s, %four
%bases: i32[8,4] = broadcast_in_dim %base {shape=(8, 4), dims=()}
%line: i32[8,4] = iota {dim=1}
%place: i32[8,4] = add %bases, %line
%many: i32[8,4] = constant {value=10}
%mask: bool[8,4] = lt %place, %many
%x1: f32[8,4] = load %xb[:, :]
%masked: f32[8,4] = constant {value=-65536.0}
%x0: f32[8,4] = select_n %mask, %masked, %x1
"""
GUARD = """
%three: i32 = constant {value=3}
%some: bool = lt %s, %three
%which: i32 = cast %some {dtype=i32}
cond %which branch () {} branch () {"""
UNMASKED = f"{FIRST} {GUARD} {SCORES} {REST} }}"


def test_skipped_steps_count_as_nothing():
    new = code(widened(steps(UNMASKED), 16))
    part = expect(
        """
        %5: i32 = constant {value=4}
        %6: i32 = mul %s, %5
        %7: bool = lt %6, %three
        %8: i32 = cast %7 {dtype=i32}
        cond %8
          branch () {}
          branch () {
            %x0: f32[8,16] = load %xb[:, :]
            %9: i32[8,16] = iota {dim=1}
            %10: i32[8,16] = constant {value=4}
            %11: i32[8,16] = broadcast_in_dim %6 {shape=(8, 16), dims=()}
            %12: i32[8,16] = div %9, %10
            %13: i32[8,16] = add %11, %12
            %14: i32[8,16] = constant {value=3}
            %15: bool[8,16] = lt %13, %14
            %16: f32[8,16] = constant {value=-inf}
            %17: f32[8,16] = select_n %15, %16, %x0
            %old: f32[8] = load %top[:]
            %highest: f32[8] = reduce %17 {kind="max", axes=(1,)}
        """
    )
    assert part in new and new.count("select_n") == 1


MEANING = {
    "plain": FIRST + SCORES + REST,
    "masked": FIRST + POSITIONS + REST,
    "skipped": UNMASKED,
    "skipped and masked": f"{FIRST} {GUARD} {POSITIONS} {REST} }}",
    "begins with minus infinity": UNMASKED.replace("-65536.0", "-inf"),
    "plain sums": FIRST
    + SCORES
    + """
        %total: f32[8] = load %ob[:]
        %part: f32[8] = reduce %x0 {kind="sum", axes=(1,)}
        %sum: f32[8] = add %total, %part
        store %ob[:] = %sum""",
}


@pytest.mark.parametrize("widest", [8, 16, 32])
@pytest.mark.parametrize("name", MEANING)
def test_meaning_stays(name: str, widest: int):
    made = steps(MEANING[name])
    rng = np.random.default_rng(0)
    x = (5 * rng.normal(size=(8, 32))).astype("f4")
    x[:, 12:] = np.nan if "skipped" in name else x[:, 12:]
    (got,), (want,) = outputs(widened(made, widest), [x]), outputs(made, [x])
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=1e-5)


def rest(old: str, new: str) -> str:
    assert old in REST
    return FIRST + SCORES + REST.replace(old, new)


NOT_SUMS = "neither a maximum nor such a sum"
SCAN = '%run: f32[8,4] = scan %x0 {kind="sum", axis=1, reverse=False}'
STAY = {
    "scale of another": (rest("exp %less", "exp %new"), NOT_SUMS),
    "other base": (rest("exp %less", "exp2 %less"), NOT_SUMS),
    "product": (rest("add %kept, %part", "mul %kept, %part"), NOT_SUMS),
    "twice as much": (rest("add %kept, %part", "add %kept, %total"), NOT_SUMS),
    "old maximum": (rest("broadcast_in_dim %new", "broadcast_in_dim %old"), NOT_SUMS),
    "scan": (
        rest("%below: f32[8,4] = sub %x0", f"{SCAN} %below: f32[8,4] = sub %run"),
        "'scan' needs all of a block",
    ),
    "twice": (FIRST + SCORES + REST + "store %top[:] = %old", "steps store twice"),
    "after": (SCORES + REST + FIRST, "first or last step is out of order"),
    "the last part": (
        f"""{FIRST} {SCORES} {REST}
        %c7: i32 = constant {{value=7}}
        %is_last: bool = eq %s, %c7
        %which: i32 = cast %is_last {{dtype=i32}}
        cond %which
          branch () {{}}
          branch () {{ store %ob[:] = %part }}""",
        "a branch at one step uses the block of that step",
    ),
}


@pytest.mark.parametrize("name", STAY)
def test_steps_that_stay(name: str):
    body, reason = STAY[name]
    with pytest.raises(CannotReblock, match=reason):
        widen_steps(steps(body), 16)


@pytest.mark.parametrize(
    "x_map, n, reason",
    [
        ("yield %z, %i", 28, "the last block of x extends past the edge"),
        ("%j: i32 = sub %z, %i yield %z, %j", 32, "no axis or loop iterates over"),
    ],
)
def test_windows_that_stay(x_map: str, n: int, reason: str):
    with pytest.raises(CannotReblock, match=reason):
        widen_steps(steps(FIRST + SCORES + REST, x_map, n), 16)


def test_steps_whose_last_block_hangs_over_the_edge_become_wider():
    """What is past the edge is masked, wherever the block ends."""
    masked = POSITIONS.replace("{value=10}", "{value=30}")
    made = steps(FIRST + masked + REST, n=30)
    new = widened(made, 16)
    assert "grid=(2,), windows=(in[8, 16], out[8])" in new.text
    x = np.random.default_rng(0).normal(size=(8, 30)).astype("f4")
    (got,), (want,) = outputs(new, [x]), outputs(made, [x])
    np.testing.assert_allclose(got, want, rtol=1e-5)


# --- attention, as written for TPUs and for GPUs ---


def absorb(q, k, v, state, mask=None):
    top, total, acc = state
    scores = jnp.dot(q, k.T)
    scores = scores if mask is None else jnp.where(mask, scores, -1e30)
    new = jnp.maximum(top, scores.max(axis=-1, keepdims=True))
    shrink, weights = jnp.exp(top - new), jnp.exp(scores - new)
    total = shrink * total + weights.sum(axis=-1, keepdims=True)
    return new, total, shrink * acc + jnp.dot(weights, v)


def start(rows: int, width: int):
    column = jnp.full((rows, 1), -1e30)
    return column, jnp.zeros((rows, 1)), jnp.zeros((rows, width))


def in_steps(block: int, n: int, width: int, causal: bool) -> Kernel:
    def kernel(q_ref, k_ref, v_ref, o_ref, *refs):
        i, j = pl.program_id(0), pl.program_id(1)

        @pl.when(j == 0)
        def _():
            for ref, value in zip(refs, start(block, width), strict=True):
                ref[...] = value

        @pl.when(j <= i if causal else j >= 0)
        def _():
            rows, columns = (jnp.arange(block) + block * x for x in (i, j))
            mask = rows[:, None] >= columns[None] if causal else None
            operands = q_ref[...], k_ref[...], v_ref[...]
            state = absorb(*operands, [ref[...] for ref in refs], mask)
            for ref, value in zip(refs, state, strict=True):
                ref[...] = value

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o_ref[...] = refs[2][...] / refs[1][...]

    queries = pl.BlockSpec((block, width), lambda i, j: (i, 0))
    keys = pl.BlockSpec((block, width), lambda i, j: (j, 0))
    shape = jax.ShapeDtypeStruct((n, width), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(n // block, n // block),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        scratch_shapes=[pltpu.VMEM((block, d), jnp.float32) for d in (1, 1, width)],
    )
    (made,) = kernels_in(call, shape, shape, shape)
    return run(made)


def in_a_loop(block: int, n: int, width: int, limit: int | None = None) -> Kernel:
    def kernel(q_ref, k_ref, v_ref, o_ref):
        def step(j, state):
            k, v = (ref[pl.ds(j * block, block), :] for ref in (k_ref, v_ref))
            mask = j * block + jnp.arange(block)[None] < n - 3
            return absorb(q_ref[...], k, v, state, mask)

        rounds = pl.program_id(0) + 1 if limit is None else limit
        _, total, acc = jax.lax.fori_loop(0, rounds, step, start(block, width))
        o_ref[...] = acc / total

    queries = pl.BlockSpec((block, width), lambda i: (i, 0))
    keys = pl.BlockSpec((n, width), lambda i: (0, 0))
    shape = jax.ShapeDtypeStruct((n, width), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(n // block,),
        in_specs=[queries, keys, keys],
        out_specs=queries,
    )
    (made,) = kernels_in(call, shape, shape, shape)
    return run(made)


ATTENTION = {
    "steps": (in_steps(4, 16, 8, causal=False), "grid=(4, 2)"),
    "causal": (in_steps(4, 16, 8, causal=True), "grid=(4, 2)"),
    "loop": (in_a_loop(4, 16, 8, limit=4), "constant {value=2}"),
}


def assert_same(new: Kernel, old: Kernel) -> None:
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=p.ref.shape).astype("f4") for p in old.inputs]
    for got, want in zip(outputs(new, arrays), outputs(old, arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str):
    made, expected = ATTENTION[name]
    new = widened(made, 8)
    assert expected in new.text and "f32[4,8] = exp" in new.text
    assert_same(new, made)


def test_rows_that_skip_different_steps_can_still_be_joined():
    made, _ = ATTENTION["causal"]
    new = grow(widened(made, 8), (0, 0), 2, selects=True)
    verify(new)
    assert "f32[8,8] = exp" in new.text
    assert "i32[8,8] = and" in new.text  # the block of a position; no quotient
    assert_same(new, made)


def test_rounds_that_only_the_run_counts_stay():
    with pytest.raises(CannotReblock, match="the trip count is known only at run time"):
        widen_steps(in_a_loop(4, 16, 8), 8)


def test_narrow_blocks_become_what_wide_ones_do():
    made = (in_steps(block, 2048, 128, causal=False) for block in (128, 512))
    narrow, wide = (head(for_tpu(kernel, TPUS["v5e"])) for kernel in made)
    assert narrow == wide


def test_narrow_rounds_become_wide_ones():
    new = for_tpu(in_a_loop(128, 2048, 128, limit=16), TPUS["v5e"])
    assert "512,512] = exp" in new.text
