"""Ranges of integers that authors promise: what they prove, and what they do not."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import CheckError, SpecError
from pallasite.interpret.checked import run_checked
from pallasite.proofs.kernels import prove_source
from pallasite.proofs.replay import NO_CHECKS
from pallasite.sites import kernels_in
from pallasite.tools.command import _range_of
from tests.prove.bugs import call, whole

INDEX = jax.ShapeDtypeStruct((4,), jnp.int32)
X = jax.ShapeDtypeStruct((64,), jnp.float32)


def claim(function, name, *operands, **assume):
    (kernel,) = pl.prove(function, assume=assume)(*operands).kernels
    return kernel.claim(name)


def bounds(function, values, *operands):
    return claim(function, "bounds", *operands, i_ref=values).verdict


def loading(index, size=64):
    """A kernel that loads `index(i_ref)` of `size` elements."""

    def kernel(i_ref, x_ref, o_ref):
        o_ref[0] = x_ref[index(i_ref)]

    return lambda i, x: call(kernel, (1,), 1, [whole(4), whole(size)], whole(1))(i, x)


def gathering(index):
    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = x_ref[index(i_ref)]

    return lambda i, x: call(kernel, (4,), 1, [whole(4), whole(64)], whole(4))(i, x)


ACCESSES = {
    "point": loading(lambda i: i[0]),
    "sum": loading(lambda i: i[0] + i[1]),
    "quotient": loading(lambda i: i[0] // 8 + 3),
    "remainder": loading(lambda i: i[0] % 7 * 9),
    "shift": loading(lambda i: i[0] >> 2),
    "from the end": loading(lambda i: 63 - i[1]),
    "chosen": loading(lambda i: jnp.where(i[0] < 9, i[0] + 60, i[0] - 9)),
    "larger": loading(lambda i: jnp.maximum(i[0], i[1]) * 2),
    "masked": loading(lambda i: pl.load(i, 1, mask=i[0] > 3, other=5)),
    "masked, nothing else": loading(lambda i: pl.load(i, 1, mask=i[0] > 3)),
    "gather": gathering(lambda i: i[...]),
    "gather with an offset": gathering(lambda i: i[...] * 2 + jnp.arange(4)),
}
RANGES = [range(0, 1), range(0, 8), range(0, 64), range(3, 33, 5), range(-4, 30)]


def leaves(kernel, values):
    """Whether checked mode reports an index out of range for some operands."""
    x = np.ones(64, np.float32)
    extreme = sorted({values[0], values[-1], values[len(values) // 2]})
    for first, second in itertools.product(extreme, repeat=2):
        i = np.array([first, second, first, second], np.int32)
        try:
            run_checked(kernel, [i, x], replace(NO_CHECKS, bounds=True))
        except CheckError:
            return True
    return False


@pytest.mark.parametrize("name", ACCESSES)
def test_what_a_range_proves_is_true(name):
    function = ACCESSES[name]
    (kernel,) = kernels_in(function, INDEX, X)
    found = {values: bounds(function, values, INDEX, X) for values in RANGES}
    assert set(found.values()) <= {"proved", "unknown"}
    for values in (v for v in RANGES if found[v] == "proved"):
        assert not leaves(kernel, values), values
    # Ranges of sums of small numbers lose nothing.
    unspecified = name == "masked, nothing else"
    assert found[range(0, 1)] == ("unknown" if unspecified else "proved")


def test_a_range_that_is_too_wide_proves_nothing():
    assert bounds(ACCESSES["point"], range(0, 64), INDEX, X) == "proved"
    assert bounds(ACCESSES["point"], range(0, 65), INDEX, X) == "unknown"
    # A negative point is clamped, not counted from the end.
    assert bounds(ACCESSES["point"], range(-1, 64), INDEX, X) == "unknown"


def gather_rows(table, x):
    """A table that an index map reads."""

    def copy(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...]

    grid_spec = pltpu.PrefetchScalarGridSpec(
        1,
        grid=4,
        in_specs=[pl.BlockSpec((8, 16), lambda i, table_ref: (table_ref[i], 0))],
        out_specs=pl.BlockSpec((8, 16), lambda i, table_ref: (i, 0)),
    )
    out = jax.ShapeDtypeStruct((32, 16), x.dtype)
    return pl.pallas_call(copy, out_shape=out, grid_spec=grid_spec)(table, x)


def test_tables_of_blocks():
    x = jax.ShapeDtypeStruct((60, 16), jnp.bfloat16)  # the last block passes the edge
    find = lambda n: claim(gather_rows, "bounds", INDEX, x, table_ref=range(n)).verdict
    assert find(8) == "proved"
    assert find(9) == "unknown"


def test_multiples_are_part_of_a_range():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(i_ref[0] // 8, 1)]

    function = lambda i, x: call(kernel, (1,), 1, [whole(4), whole(64)], whole(1))(i, x)
    assert bounds(function, range(0, 505, 8), INDEX, X) == "proved"


def test_a_promise_is_about_what_the_call_is_given():
    """A kernel may write other numbers."""

    def kernel(i_ref, x_ref, o_ref, j_ref):
        j_ref[0] = 2 * i_ref[0]
        o_ref[0] = x_ref[i_ref[0]]

    def function(i, x):
        return pl.pallas_call(
            kernel,
            out_shape=(jax.ShapeDtypeStruct((1,), x.dtype), i),
            input_output_aliases={0: 1},
        )(i, x)

    assert bounds(function, range(0, 8), INDEX, X) == "unknown"


def test_what_is_past_an_edge_keeps_no_promise():
    def kernel(i_ref, x_ref, o_ref):
        o_ref[0] = x_ref[i_ref[7]]

    def function(rows_of_i):
        i = jax.ShapeDtypeStruct((rows_of_i,), jnp.int32)
        blocks = pl.BlockSpec((8,), lambda n: (n,))
        f = lambda i, x: pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((2,), x.dtype),
            grid=2,
            in_specs=[blocks, whole(64)],
            out_specs=pl.BlockSpec((1,), lambda n: (n,)),
        )(i, x)
        return bounds(f, range(0, 64), i, X)

    assert function(16) == "proved"
    assert function(15) == "unknown"


@pytest.mark.parametrize(
    ("table", "verdict"),
    [
        ([3, 1, 0, 2], "proved"),
        ([3, 1, 1, 2], "refuted"),
        ([9, 1, 0, 2], "proved"),  # 9 is clamped to the last block
    ],
)
def test_a_given_table_decides_coverage(table, verdict):
    def scatter(table, x):
        grid_spec = pltpu.PrefetchScalarGridSpec(
            1,
            grid=4,
            in_specs=[pl.BlockSpec((8, 16), lambda i, table_ref: (i, 0))],
            out_specs=pl.BlockSpec((8, 16), lambda i, table_ref: (table_ref[i], 0)),
        )

        def copy(table_ref, x_ref, o_ref):
            o_ref[...] = x_ref[...]

        return pl.pallas_call(copy, out_shape=x, grid_spec=grid_spec)(table, x)

    x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    given = {"table_ref": np.array(table)}
    (kernel,) = pl.prove(scatter, assume=given)(INDEX, x).kernels
    assert kernel.coverage.verdict == verdict
    assert kernel.bounds.verdict == ("refuted" if 9 in table else "proved")
    assert kernel.assumed == ("table_ref as it is",)
    assert pl.prove(scatter)(INDEX, x).kernels[0].coverage.verdict == "unknown"
    if verdict == "refuted":
        counterexample = kernel.coverage.counterexample
        assert "never written" in counterexample.replay()


def test_gathers_and_slices_of_a_given_table():
    table = jax.ShapeDtypeStruct((8,), jnp.int32)

    def kernel(i_ref, x_ref, o_ref):
        o_ref[...] = x_ref[i_ref[pl.ds(2, 4)]] + x_ref[i_ref[i_ref[jnp.arange(4)]]]

    f = lambda i, x: call(kernel, (4,), 1, [whole(8), whole(64)], whole(4))(i, x)
    good = [0, 1, 7, 7, 60, 63, 7, 7]
    # What a window shows of a table is in its range, and no more is known.
    assert claim(f, "bounds", table, X, i_ref=np.array(good)).verdict == "unknown"

    def direct(i, x):
        table = pl.BlockSpec(memory_space=pl.ANY)
        return call(kernel, (4,), 1, [table, whole(64)], whole(4))(i, x)

    found = lambda given: claim(direct, "bounds", table, X, i_ref=np.array(given))
    assert found(good).verdict == "proved"
    assert found([0, 8, *good[2:]]).verdict == "refuted"  # no place in the table
    assert found([*good[:5], 64, 7, 7]).verdict == "refuted"  # none in x_ref


def test_the_report_says_what_was_given():
    (kernel,) = pl.prove(ACCESSES["point"], assume={"i_ref": range(0, 64, 2)})(
        INDEX, X
    ).kernels
    assert kernel.assumed == ("i_ref in 0:64 step 2",)
    assert "given            i_ref in 0:64 step 2" in str(kernel)
    assert kernel.as_json()["assumed"] == ["i_ref in 0:64 step 2"]


def test_operands_may_be_numbered():
    proof = pl.prove(ACCESSES["point"], assume={0: range(64)})(INDEX, X)
    assert proof.kernels[0].bounds.verdict == "proved"


def test_counterexamples_keep_the_promise():
    """A bug elsewhere is replayed with operands in the range."""

    def kernel(i_ref, x_ref, o_ref):
        o_ref[0] = x_ref[i_ref[0] - 5]
        o_ref[pl.program_id(0) + 1] = 0.0

    function = lambda i, x: call(kernel, (1,), 1, [whole(4), whole(64)], whole(1))(i, x)
    found = claim(function, "bounds", INDEX, X, i_ref=range(5, 64))
    assert found.verdict == "refuted"
    assert "o_ref" in found.counterexample.replay()


@pytest.mark.parametrize(
    ("assume", "text"),
    [
        ({"i_ref": (0, 64)}, "a range or an array of integers for each operand"),
        ({"i_ref": range(0)}, "a range or an array of integers for each operand"),
        ({"i_ref": np.ones(4)}, "a range or an array of integers for each operand"),
        ({"i_ref": np.ones(3, int)}, "an array of another shape for i_ref"),
        ({"j_ref": range(4)}, "no kernel has an operand of integers called 'j_ref'"),
        ({"x_ref": range(4)}, "operands of integers  0, i_ref"),
    ],
)
def test_what_says_nothing_is_refused(assume, text):
    with pytest.raises(SpecError) as error:
        pl.prove(ACCESSES["point"], assume=assume)(INDEX, X)
    assert text in str(error.value)


def test_the_command_takes_ranges():
    assert _range_of("table_ref=0:64") == ("table_ref", range(64))
    assert _range_of("0=8:64:8") == (0, range(8, 64, 8))
    with pytest.raises(SpecError, match="takes REF=LOW:HIGH"):
        _range_of("table_ref=many")
    where = f"{__file__}::gather_rows"
    operands = "i32[4] f32[64,16]"
    assert not prove_source(where, operands, ("bounds",)).proved
    given = {"table_ref": range(8)}
    assert prove_source(where, operands, ("bounds",), given).proved
