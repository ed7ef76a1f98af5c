"""Each claim proved, refuted and unknown on small kernels; report and command."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.ir.parse import parse_kernel
from pallasite.proofs.kernels import prove_kernel, prove_source
from tests.checked import test_gpu_level
from tests.prove import bugs
from tests.prove.bugs import blocks, call, copy_kernel, copying, counting, rows, whole

X = jax.ShapeDtypeStruct((64,), jnp.float32)
ROWS = jax.ShapeDtypeStruct((32, 16), jnp.float32)
INDEX = jax.ShapeDtypeStruct((4,), jnp.int32)


def claim(function, name, *operands):
    (kernel,) = pl.prove(function)(*operands).kernels
    return kernel.claim(name)


def verdict(function, name, *operands):
    return claim(function, name, *operands).verdict


def of_a_scalar(store):
    return prove_kernel(
        parse_kernel(
            f"""
            kernel @scalar(%x: ref<f32 any>, %o: ref<f32 any>) outputs 1 {{
              pipeline %x, %o {{
                grid=(2,), windows=(in[], out[]), semantics=("parallel",)}}
                map (%i: i32) {{}}
                map (%i_1: i32) {{}}
                body (%i_2: i32, %xb: ref<f32 block>, %ob: ref<f32 block>) {{
                  %0: f32 = load %xb[]
                  %1: i32 = constant {{value=1}}
                  %2: bool = gt %i_2, %1
                  store {store}
                }}
            }}
            """
        )
    )


def test_programs_that_store_one_scalar_race():
    found = of_a_scalar("%ob[] = %0")
    assert found.races.verdict == "refuted"
    assert found.coverage.verdict == "proved"
    assert found.races.counterexample.replay()


def test_a_scalar_where_the_mask_is_off_is_not_written():
    found = of_a_scalar("%ob[] = %0 mask %2")
    assert found.coverage.verdict == "refuted"
    assert "never written" in found.coverage.counterexample.replay()


# --- bounds ---


def test_masks_clamps_and_guards_prove_bounds():
    def kernel(i_ref, x_ref, o_ref):
        i = pl.program_id(0)
        at = i * 16 + jnp.arange(16)
        pl.store(o_ref, (at,), pl.load(x_ref, (at,), mask=at < 60), mask=at < 60)

        @pl.when(i < 3)
        def _():
            o_ref[pl.ds(i * 16 + 16, 1)] = x_ref[pl.ds(i * 16 + 16, 1)]

        o_ref[0] = x_ref[jnp.clip(i_ref[0], 0, 59)]

    def function(i, x):
        return call(kernel, (60,), 4, [whole(4), whole(60)], whole(60))(i, x)

    x = jax.ShapeDtypeStruct((60,), jnp.float32)
    assert verdict(function, "bounds", INDEX, x) == "proved"


def test_an_index_from_memory_is_unknown_and_says_which():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[0] = x_ref[i_ref[0]]

    def function(i, x):
        return call(kernel, (1,), 1, [whole(4), whole(64)], whole(1))(i, x)

    found = claim(function, "bounds", INDEX, X)
    assert found.verdict == "unknown"
    assert "index 0 of x_ref depends on values read from memory" in found.reason
    assert "test_claims.py" in found.line


def test_a_bad_index_under_an_unknown_guard_is_unknown():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[0] = 0.0

        @pl.when(i_ref[0] > 0)
        def _():
            o_ref[0] = x_ref[pl.program_id(0) + 64]

    def function(i, x):
        return call(kernel, (1,), 1, [whole(4), whole(64)], whole(1))(i, x)

    assert verdict(function, "bounds", INDEX, X) == "unknown"


def test_a_window_over_the_edge_is_no_mistake():
    def function(x):
        return call(copy_kernel, (60,), 4, [blocks(16)], blocks(16))(x)

    found = pl.prove(function)(jax.ShapeDtypeStruct((60,), jnp.float32)).kernels[0]
    assert found.bounds.verdict == found.coverage.verdict == "proved"


@pytest.mark.parametrize(("entries", "verdict"), [(4, "proved"), (2, "refuted")])
def test_an_index_map_stays_inside_the_table_it_reads(entries, verdict):
    """Also where the block that it chooses is inside its array in any case."""

    def function(table, x):
        chosen = pl.BlockSpec((8,), lambda i, t: (jnp.clip(t[i], 0, 7),))
        grid_spec = pltpu.PrefetchScalarGridSpec(
            1, grid=4, in_specs=[chosen], out_specs=pl.BlockSpec((8,), lambda i, t: i)
        )

        def copy(table_ref, x_ref, o_ref):
            o_ref[...] = x_ref[...]

        out = jax.ShapeDtypeStruct((32,), jnp.float32)
        return pl.pallas_call(copy, out_shape=out, grid_spec=grid_spec)(table, x)

    found = claim(function, "bounds", jax.ShapeDtypeStruct((entries,), jnp.int32), X)
    assert found.verdict == verdict
    if found.counterexample is not None:
        assert "program i = 2: the index is 2, of 2" in str(found.counterexample)
        assert "of bounds" in found.counterexample.replay()


def test_large_grids_need_no_large_tables():
    def function(x):
        spec = pl.BlockSpec((8, 128), lambda i, j: (i, j))
        return call(copy_kernel, x.shape, (1 << 13, 1 << 6), [spec], spec)(x)

    x = jax.ShapeDtypeStruct((1 << 16, 1 << 13), jnp.float32)
    found = pl.prove(function, ["bounds", "coverage", "races"])(x).kernels[0]
    assert [c.verdict for c in found.claims] == ["proved"] * 3


# --- coverage ---


def test_coverage_under_a_guard_that_data_decide_is_unknown():
    def kernel(x_ref, o_ref):
        @pl.when(x_ref[0] > 0)
        def _():
            o_ref[...] = x_ref[...]

    def function(x):
        return call(kernel, (64,), 8, [blocks(8)], blocks(8))(x)

    found = claim(function, "coverage", X)
    assert found.verdict == "unknown"
    assert "a condition depends on values read from memory" in found.reason


def test_both_branches_of_a_known_guard_cover():
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) % 2 == 0)
        def _():
            o_ref[...] = x_ref[...]

        @pl.when(pl.program_id(0) % 2 == 1)
        def _():
            o_ref[pl.ds(0, 4, stride=2)] = x_ref[:4]
            o_ref[pl.ds(1, 4, stride=2)] = x_ref[4:]

    def function(x):
        return call(kernel, (64,), 8, [blocks(8)], blocks(8))(x)

    assert verdict(function, "coverage", X) == "proved"


def test_an_output_that_begins_with_an_operand_is_covered():
    def kernel(x_ref, o_ref):
        o_ref[0] = 1.0

    def function(x):
        return call(
            kernel, (64,), 1, [whole(64)], whole(64), input_output_aliases={0: 0}
        )(x)

    assert verdict(function, "coverage", X) == "proved"


# --- races and order ---


def test_a_declared_axis_with_its_own_parts_has_no_races():
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[pl.ds((i ^ 1) * 8, 8)] = x_ref[pl.ds(i * 8, 8)]

    def function(x):
        parallel = ("parallel",)
        return call(kernel, (64,), 8, [whole(64)], whole(64), parallel=parallel)(x)

    found = pl.prove(function)(X).kernels[0]
    assert found.races.verdict == found.order.verdict == "proved"


def test_writes_at_unknown_places_along_a_parallel_axis_are_unknown():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[pl.ds(i_ref[pl.program_id(0)], 16)] = x_ref[...]

    def function(i, x):
        ins, parallel = [whole(4), blocks(16)], ("parallel",)
        return call(kernel, (64,), 4, ins, whole(64), parallel=parallel)(i, x)

    found = pl.prove(function)(INDEX, X).kernels[0]
    assert found.races.verdict == found.order.verdict == "unknown"


# --- synchronisation ---


def test_a_double_buffer_is_synchronised():
    def body(x_ref, buffer_ref, sem):
        def copy(n):
            target = buffer_ref.at[jax.lax.rem(n, 2)]
            return pltpu.make_async_copy(x_ref.at[n], target, sem.at[jax.lax.rem(n, 2)])

        def step(n, carry):
            @pl.when(n < 5)
            def _():
                copy(n + 1).start()

            copy(n).wait()
            return carry

        copy(0).start()
        jax.lax.fori_loop(0, 6, step, 0)

    x = jax.ShapeDtypeStruct((6, 8), jnp.float32)
    assert verdict(lambda x: copying(body, x, semaphores=2), "sync", x) == "proved"


def test_a_wait_that_data_decide_is_unknown():
    def body(x_ref, buffer_ref, sem):
        copy = pltpu.make_async_copy(x_ref.at[0], buffer_ref.at[0], sem.at[0])
        copy.start()
        copy.wait()

        @pl.when(buffer_ref[0, 0] > 100)
        def _():
            again = pltpu.make_async_copy(x_ref.at[1], buffer_ref.at[1], sem.at[0])
            again.start()

    x = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    found = claim(lambda x: copying(body, x), "sync", x)
    assert found.verdict == "unknown"
    assert "depends on values read" in found.reason


def test_matching_signals_are_proved():
    def body(sem):
        pl.semaphore_signal(sem, 3)
        pl.semaphore_wait(sem, 1)
        pl.semaphore_wait(sem, 2)

    (kernel,) = pl.prove(lambda: counting(body))().kernels
    assert kernel.sync.verdict == "proved"


def test_a_run_that_a_check_ends_proves_nothing():
    def body(sem):
        pl.debug_check(jnp.bool_(False), "never")
        pl.semaphore_signal(sem, 1)
        pl.semaphore_wait(sem, 1)

    (kernel,) = pl.prove(lambda: counting(body))().kernels
    assert kernel.sync.verdict == "unknown"


def test_roles_and_their_barriers():
    """One wrong line is refuted; that phases are never missed is not decided."""
    (text, old, new, *_) = test_gpu_level.WRONG["slot never freed"]
    right = prove_kernel(parse_kernel(text), ["sync", "races"])
    assert [c.verdict for c in right.claims] == ["unknown", "unknown"]
    wrong = prove_kernel(parse_kernel(text.replace(old, new)), ["sync"])
    assert wrong.sync.verdict == "refuted"


# --- batch invariance ---


def test_a_softmax_of_rows_is_invariant():
    def kernel(x_ref, o_ref):
        e = jnp.exp(x_ref[...] - x_ref[...].max(axis=1, keepdims=True))
        o_ref[...] = e / e.sum(axis=1, keepdims=True)

    found = claim(lambda x: rows(kernel, x), "batch", ROWS)
    assert found.verdict == "proved"
    assert "the same code for 32 and 64 rows" in found.reason


def test_the_number_of_rows_may_choose_how_many_a_block_has():
    def kernel(x_ref, o_ref):
        summed = x_ref[...] - x_ref[...].sum(axis=1, keepdims=True)
        zeros = jnp.zeros(x_ref.shape)
        o_ref[...] = jax.lax.fori_loop(0, 3, lambda i, s: s * summed, zeros)

    def function(x):
        return rows(kernel, x, size=x.shape[0] // 4)

    found = claim(function, "batch", ROWS)
    assert found.verdict == "proved", found


@pytest.mark.parametrize("combined", ["sum", "dot", "sorted"])
def test_the_number_of_rows_may_not_choose_what_a_row_is_made_of(combined):
    def kernel(x_ref, o_ref):
        ones = jnp.ones(x_ref.shape)
        if combined == "sum":
            o_ref[...] = x_ref[...] + ones.sum(axis=0, keepdims=True)
        elif combined == "dot":
            o_ref[...] = x_ref[...] + jnp.dot(ones.T, ones)[:1]
        else:
            o_ref[...] = x_ref[...] + jnp.cumsum(ones, axis=0)[-1:]

    def function(x):
        return rows(kernel, x, size=x.shape[0] // 4)

    found = claim(function, "batch", ROWS)
    assert found.verdict == "unknown", found


def test_sums_so_far_of_equal_elements_differ_from_row_to_row():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jnp.cumsum(jnp.ones(x_ref.shape), axis=0)

    assert verdict(lambda x: rows(kernel, x), "batch", ROWS) == "refuted"


def test_rows_may_stand_behind_parts():
    """As in products whose sums are divided among programs."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].sum(axis=1, keepdims=True)

    def function(x):
        n = x.shape[0]
        spec = pl.BlockSpec((8, 8), lambda p, i: (i, p))
        out = pl.BlockSpec((None, 8, 1), lambda p, i: (p, i, 0))
        return call(kernel, (2, n, 1), (2, n // 8), [spec], out)(x)

    found = claim(function, "batch", ROWS)
    assert found.verdict == "proved", found
    assert "rows of x_ref, o_ref (dimension 1)" in found.reason


PAGES = {
    "through the table": (lambda i, table: table[i, 1], "proved"),
    "of the row before": (lambda i, table: table[jnp.maximum(i - 1, 0), 1], "refuted"),
    "by its number": (lambda i, table: jnp.minimum(i, 5), "refuted"),
}


@pytest.mark.parametrize("place", PAGES)
@pytest.mark.parametrize("where", ["block", "body"])
def test_pages_that_rows_share(place, where):
    """A row may find what is its own only in its row of the table."""
    page, wanted = PAGES[place]

    def kernel(table_ref, x_ref, pages_ref, o_ref):
        i = pl.program_id(0)
        mine = pages_ref[...] if where == "block" else pages_ref[page(i, table_ref)]
        o_ref[...] = x_ref[...] * (jnp.sum(mine) + table_ref[i, 0])

    def function(table, x, pages):
        one = pl.BlockSpec((1, 16), lambda i, table_ref: (i, 0))
        shared = (
            pl.BlockSpec((1, 16), lambda i, table_ref: (page(i, table_ref), 0))
            if where == "block"
            else pl.BlockSpec((6, 16), lambda i, table_ref: (0, 0))
        )
        grid_spec = pltpu.PrefetchScalarGridSpec(
            1, grid=x.shape[0], in_specs=[one, shared], out_specs=one
        )
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=out, grid_spec=grid_spec)(
            table, x, pages
        )

    of = jax.ShapeDtypeStruct
    operands = of((4, 2), jnp.int32), of((4, 16), jnp.float32), of((6, 16), jnp.float32)
    proof = pl.prove(function, ("batch",), {"table_ref": range(6)})(*operands)
    assert proof.kernels[0].batch.verdict == wanted, proof


def test_the_number_of_rows_in_a_result_is_noticed():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] / pl.num_programs(0)

    assert verdict(lambda x: rows(kernel, x), "batch", ROWS) == "unknown"


def test_rows_times_themselves_are_not_invariant():
    def product(x):
        spec = pl.BlockSpec((8, 16), lambda i: (i, 0))
        out = pl.BlockSpec((8, 32), lambda i: (i, 0))

        def kernel(x_ref, y_ref, o_ref):
            o_ref[...] = jnp.dot(x_ref[...], y_ref[...].T)

        return call(kernel, (32, 32), 4, [spec, whole(32, 16)], out)(x, x)

    assert verdict(product, "batch", ROWS) == "unknown"


@pytest.mark.parametrize("depth", [8, 16])
def test_a_matmul_over_k_is_invariant(depth):
    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros((8, 24), jnp.float32)

        o_ref[...] += jnp.dot(x_ref[...], y_ref[...])

    def function(x, y):
        ins = [
            pl.BlockSpec((8, depth), lambda i, k: (i, k)),
            pl.BlockSpec((depth, 24), lambda i, k: (k, 0)),
        ]
        out = pl.BlockSpec((8, 24), lambda i, k: (i, 0))
        return call(kernel, (x.shape[0], 24), (x.shape[0] // 8, 16 // depth), ins, out)(
            x, y
        )

    y = jax.ShapeDtypeStruct((16, 24), jnp.float32)
    found = claim(function, "batch", ROWS, y)
    assert found.verdict == "proved", found
    assert "rows of x_ref, o_ref; shared: y_ref" in found.reason


# --- the report ---

REPORT = """\
copy_kernel  bugs.py:LINE in call
  bounds   refuted the index map of x_ref leaves the array
                   at program i = 7: dimension 0 is block 8; the last is 7
                   bugs.py:LINE in <lambda>
  coverage proved  every element of the output is written
  races    proved  programs along i0 share nothing that one writes
  order    proved  no program sees what another along a parallel axis does
  sync     proved  no copies, semaphores, barriers or roles
  batch    refuted the blocks of x_ref do not move with its rows
                   at row 0: it changes when only other rows of x_ref do
                   bugs.py:LINE in call"""


def test_the_report():
    text = str(pl.prove(bugs.map_one_too_far)(X))
    text = re.sub(r"\S*bugs\.py:\d+", "bugs.py:LINE", text)
    assert text == REPORT


def test_json():
    data = pl.prove(bugs.map_one_too_far, ["bounds"])(X).as_json()
    (kernel,) = data["kernels"]
    (found,) = kernel["claims"]
    assert not data["ok"] and found["verdict"] == "refuted"
    assert found["counterexample"].startswith("program i = 7")


def test_an_unknown_claim_is_rejected():
    with pytest.raises(pl.errors.SpecError, match="no claim 'speed'"):
        pl.prove(bugs.map_one_too_far, ["speed"])(X)


def test_a_function_without_kernels_is_rejected():
    with pytest.raises(pl.errors.SpecError, match="calls no kernel"):
        pl.prove(jnp.sin)(X)


def test_the_command():
    source = f"{Path(bugs.__file__)}::grid_rounded_down"
    command = [sys.executable, "-m", "pallasite", "prove", source]
    command += ["--args", "f32[64]", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    claims = {c["claim"]: c for c in json.loads(done.stdout)["kernels"][0]["claims"]}
    assert claims["coverage"]["verdict"] == "refuted"
    assert claims["bounds"]["verdict"] == "proved"
    assert "Traceback" not in done.stderr


def test_of_a_file_traces_other_numbers_of_rows(tmp_path: Path):
    file = tmp_path / "rows.py"
    file.write_text(ROWS_FILE)
    found = prove_source(f"{file}::double", "f32[20,8]")
    assert found.proved, found


ROWS_FILE = """
import pallasite as pl

def kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]

def double(x):
    rows = pl.BlockSpec((8, 8), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, x, grid=pl.cdiv(x.shape[0], 8), in_specs=[rows], out_specs=rows
    )(x)
"""


# --- scratch along a parallel axis ---


def filled(fill):
    """Programs along a parallel axis that keep sums in scratch."""

    def kernel(x_ref, o_ref, sums):
        i, j = pl.program_id(0), pl.program_id(1)
        fill(i, j, sums)
        sums[...] += x_ref[...]
        o_ref[...] = sums[...]

    def function(x):
        spec = pl.BlockSpec((8, 8), lambda i, j: (i, j))
        return call(
            kernel,
            (32, 32),
            (4, 4),
            [spec],
            spec,
            parallel=("parallel", "arbitrary"),
            scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32)],
        )(x)

    return verdict(function, "races", jax.ShapeDtypeStruct((32, 32), jnp.float32))


def zero(ref):
    ref[...] = jnp.zeros_like(ref)


def test_scratch_that_each_lane_fills_before_it_reads():
    # In a way that grid analysis does not know.
    assert filled(lambda i, j, s: pl.when(j % 3 == 0)(lambda: zero(s))) == "proved"
    assert filled(lambda i, j, s: pl.when(j * j < 2)(lambda: zero(s))) == "proved"

    def by_halves(i, j, sums):
        @pl.when(j % 2 == 0)
        def _():
            sums[:4] = jnp.zeros((4, 8))
            sums[4:] = jnp.zeros((4, 8))

    assert filled(by_halves) == "proved"


def test_scratch_that_some_lane_reads_too_early():
    assert filled(lambda i, j, s: pl.when(j % 3 == 1)(lambda: zero(s))) != "proved"
    assert filled(lambda i, j, s: pl.when(i + j == 0)(lambda: zero(s))) != "proved"

    def half(i, j, sums):
        @pl.when(j % 2 == 0)
        def _():
            sums[:4] = jnp.zeros((4, 8))

    assert filled(half) != "proved"

    def read_before(i, j, sums):
        old = sums[...]

        @pl.when(j % 3 == 0)
        def _():
            sums[...] = jnp.where(old > 0, 1.0, 2.0)

    assert filled(read_before) != "proved"

    def in_a_later_round(i, j, sums):
        def step(k, carry):
            pl.when((k == 1) & (j % 3 == 0))(lambda: zero(sums))
            return carry + sums[0, 0]

        sums[0, 1] = jax.lax.fori_loop(0, 2, step, 0.0)

    assert filled(in_a_later_round) != "proved"
