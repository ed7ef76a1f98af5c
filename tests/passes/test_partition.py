"""Which axes devices may share, and that a kernel in parts computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from benchmarks.partitioning import matmul
from pallasite import tpu as pltpu
from pallasite.autodiff.equal_operands import with_operands
from pallasite.passes.analysis.partition import derive, pull_back_rule
from pallasite.passes.transform.shard import shard
from pallasite.sharding.custom_call import AxisSplit, _is_even, place, shardy_text
from pallasite.sites import calls_in, kernels_in
from tests.passes.parts import assert_parts_agree
from tests.zoo import all_cases

STEPS, ROWS, COLUMNS = 4, 2, 8


def random_arrays(kernel, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for p in kernel.inputs:
        dtype, shape = p.ref.dtype.np, p.ref.shape
        whole = np.dtype(dtype).kind in "iub"
        values = rng.integers(0, 4, shape) if whole else rng.standard_normal(shape)
        found.append(np.asarray(values).astype(dtype))
    return found


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_zoo_in_parts(case):
    arguments = case.make_args(np.random.default_rng(0))
    for kernel in kernels_in(case.run, *arguments):
        # Parts of a bfloat16 sum are rounded before they are added.
        short = any(p.ref.dtype.np.itemsize < 4 for p in kernel.outputs)
        tolerance = 0.1 if short else 1e-4
        assert_parts_agree(
            kernel, random_arrays(kernel), rtol=tolerance, atol=tolerance
        )


def test_most_of_the_zoo_can_be_cut():
    kernels = [
        kernel
        for case in all_cases()
        for kernel in kernels_in(case.run, *case.make_args(np.random.default_rng(0)))
    ]
    cut = [kernel for kernel in kernels if derive(kernel).splittable]
    assert len(cut) >= 0.6 * len(kernels), f"{len(cut)} of {len(kernels)}"


@pytest.mark.parametrize("reversed_", [False, True])
def test_several_windows_on_one_array(reversed_):
    """Blocks beside a program's own are of other devices, whichever window is last."""
    maps = [lambda i: (jnp.maximum(i - 1, 0), 0), lambda i: (i, 0)]
    maps = maps[::-1] if reversed_ else maps

    def add(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + 2 * y_ref[...]

    def run(x):
        return pl.pallas_call(
            add,
            out_shape=x,
            grid=(STEPS,),
            in_specs=[pl.BlockSpec((ROWS, COLUMNS), m) for m in maps],
            out_specs=pl.BlockSpec((ROWS, COLUMNS), lambda i: (i, 0)),
        )(x, x)

    (call,) = calls_in(run, jnp.zeros((STEPS * ROWS, COLUMNS)))
    kernel, _ = with_operands(call)
    assert len(kernel.inputs) == 1
    assert derive(kernel).inputs[0].axes[0] is None
    assert_parts_agree(kernel, random_arrays(kernel), rtol=1e-5, atol=1e-5)


# --- sums ---


def over_rows(body, scratch=False):
    """A kernel of one row block per step of a grid of four, with one result row."""
    x = jnp.zeros((STEPS * ROWS, COLUMNS), jnp.int32)
    rows = pl.BlockSpec((ROWS, COLUMNS), lambda k: (k, 0))
    call = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((1, COLUMNS), jnp.int32),
        grid=STEPS,
        in_specs=[rows],
        out_specs=pl.BlockSpec((1, COLUMNS), lambda k: (0, 0)),
        scratch_shapes=[pltpu.VMEM((1, COLUMNS), jnp.int32)] if scratch else [],
    )
    (kernel,) = kernels_in(call, x)
    return kernel


def column_sums(x_ref):
    return x_ref[...].sum(axis=0, keepdims=True)


def first(ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        ref[...] = jnp.zeros_like(ref)


def last(store):
    pl.when(pl.program_id(0) == pl.num_programs(0) - 1)(store)


def plain(x_ref, o_ref):
    first(o_ref)
    o_ref[...] += column_sums(x_ref)


def twice(x_ref, o_ref):
    first(o_ref)
    o_ref[...] += column_sums(x_ref)
    o_ref[...] = o_ref[...] + x_ref[:1] + x_ref[1:]


def sometimes(x_ref, o_ref):
    first(o_ref)

    @pl.when(x_ref[0, 0] > 1)
    def _():
        o_ref[...] += column_sums(x_ref)


def in_a_loop(x_ref, o_ref):
    first(o_ref)

    def add(i, _):
        o_ref[...] += x_ref[pl.ds(i, 1), :]

    jax.lax.fori_loop(0, ROWS, add, None)


def by_global_row(x_ref, o_ref):
    first(o_ref)
    rows = pl.program_id(0) * ROWS + jax.lax.broadcasted_iota(
        jnp.int32, (ROWS, COLUMNS), 0
    )
    o_ref[...] += jnp.where(rows < 5, x_ref[...], 0).sum(axis=0, keepdims=True)


def copied(x_ref, o_ref, acc_ref):
    first(acc_ref)
    acc_ref[...] += column_sums(x_ref)

    @last
    def _():
        o_ref[...] = acc_ref[...] * 3


def copied_each_step(x_ref, o_ref, acc_ref):
    first(acc_ref)
    acc_ref[...] += column_sums(x_ref)
    o_ref[...] = -acc_ref[...]


SUMS = [plain, twice, sometimes, in_a_loop, by_global_row, copied, copied_each_step]


@pytest.mark.parametrize("body", SUMS, ids=lambda f: f.__name__)
def test_sum(body):
    kernel = over_rows(body, scratch="copied" in body.__name__)
    rule = derive(kernel)
    assert (rule.axes[0].kind, rule.axes[0].reason) == ("sum", "o_ref is a sum over it")
    assert assert_parts_agree(kernel, random_arrays(kernel)) == [{0: 2}]


def largest(x_ref, o_ref):
    first(o_ref)
    o_ref[...] = jnp.maximum(o_ref[...], x_ref[:1])


def never_zero(x_ref, o_ref):
    o_ref[...] += column_sums(x_ref)


def zero_each_time(x_ref, o_ref):
    o_ref[...] = jnp.zeros_like(o_ref)
    o_ref[...] += column_sums(x_ref)


def zero_after(x_ref, o_ref):
    o_ref[...] += column_sums(x_ref)
    first(o_ref)


def zero_in_part(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[:, :4] = jnp.zeros((1, 4), jnp.int32)

    o_ref[...] += column_sums(x_ref)


def decaying(x_ref, o_ref):
    first(o_ref)
    o_ref[...] = 2 * o_ref[...] + column_sums(x_ref)


def last_only(x_ref, o_ref):
    first(o_ref)

    @last
    def _():
        o_ref[...] += column_sums(x_ref)


def starts_from_data(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = x_ref[:1]

    o_ref[...] += column_sums(x_ref)


def data_dependent(x_ref, o_ref):
    first(o_ref)

    @pl.when(o_ref[0, 0] < 10)
    def _():
        o_ref[...] += column_sums(x_ref)


def with_bias(x_ref, o_ref, acc_ref):
    first(acc_ref)
    acc_ref[...] += column_sums(x_ref)

    @last
    def _():
        o_ref[...] = acc_ref[...] + 1


def scaled_by_moving_block(x_ref, o_ref, acc_ref):
    first(acc_ref)
    acc_ref[...] += column_sums(x_ref)

    @last
    def _():
        o_ref[...] = acc_ref[...] * x_ref[:1]


def copied_too_early(x_ref, o_ref, acc_ref):
    first(acc_ref)
    o_ref[...] = acc_ref[...] * 1
    acc_ref[...] += column_sums(x_ref)


def squared(x_ref, o_ref, acc_ref):
    first(acc_ref)
    acc_ref[...] += column_sums(x_ref)

    @last
    def _():
        o_ref[...] = acc_ref[...] * acc_ref[...]


def feeds_itself(x_ref, o_ref, acc_ref):
    first(acc_ref)
    first(o_ref)
    acc_ref[...] += column_sums(x_ref)
    o_ref[...] += acc_ref[...]


NO_SUMS = {
    largest: "o_ref carries values along it that are not a plain sum",
    never_zero: "o_ref is not set to zero at the first step",
    zero_each_time: "o_ref is set to zero elsewhere than at the first step",
    zero_after: "o_ref is accumulated into before it is set to zero",
    zero_in_part: "o_ref is set to zero elsewhere than at the first step",
    decaying: "several steps write o_ref, not only by adding to it",
    last_only: "o_ref is accumulated into only at its first or last step",
    starts_from_data: "several steps write o_ref, not only by adding to it",
    data_dependent: "o_ref carries values along it that are not a plain sum",
    with_bias: "several steps write o_ref, not only by adding to it",
    scaled_by_moving_block: "acc_ref carries values along it that are not a plain sum",
    copied_too_early: "o_ref is not copied from a finished sum",
    squared: "acc_ref carries values along it that are not a plain sum",
    feeds_itself: "o_ref is overwritten along it",
}


@pytest.mark.filterwarnings("ignore::pallasite.errors.KernelWarning")  # never_zero
@pytest.mark.parametrize("body", NO_SUMS, ids=lambda f: f.__name__)
def test_no_sum(body):
    scratch = body.__code__.co_argcount == 3
    (axis,) = derive(over_rows(body, scratch)).axes
    assert (axis.kind, axis.reason) == ("whole", NO_SUMS[body])


# --- the rest of a rule ---


def rows_and(x_map, out_map, x_block=(2, 8), out_block=(2, 8), grid=4, shape=(8, 8)):
    def double(x_ref, o_ref):
        o_ref[...] = jnp.broadcast_to(2 * x_ref[...], o_ref.shape)

    x = jnp.zeros((8, 8))
    call = pl.pallas_call(
        double,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        grid=grid,
        in_specs=[pl.BlockSpec(x_block, x_map)],
        out_specs=pl.BlockSpec(out_block, out_map),
    )
    (kernel,) = kernels_in(call, x)
    return kernel


def test_groups_of_steps_stay_together():
    kernel = rows_and(
        lambda i: (i // 2, 0), lambda i: (i, 0), (4, 8), (4, 8), 4, (16, 8)
    )
    rule = derive(kernel)
    assert (rule.axes[0].granule, rule.axes[0].parts) == (2, 2)
    assert str(rule).endswith("(in groups of 2 steps)")
    assert assert_parts_agree(kernel, random_arrays(kernel)) == [{0: 2}]
    assert shardy_text(rule) == "([ij, k])->([il, m]) {i=2, j=4, k=8, l=8, m=8}, custom"


def test_a_diagonal_is_cut_along_one_dimension():
    kernel = rows_and(lambda i: (i, i), lambda i: (i, 0), (2, 2), (2, 2), 4, (8, 2))
    rule = derive(kernel)
    assert [a.axes for a in rule.arrays] == [(0, None), (0, None)]
    assert shard(rule, {0: 2}).offset_axes == (0,)
    assert_parts_agree(kernel, random_arrays(kernel))


def test_reversed_blocks_are_not_followed():
    kernel = rows_and(lambda i: (3 - i, 0), lambda i: (i, 0))
    rule = derive(kernel)
    assert [a.axes for a in rule.arrays] == [(None, None), (0, None)]
    assert_parts_agree(kernel, random_arrays(kernel))
    assert derive(rows_and(lambda i: (i, 0), lambda i: (3 - i, 0))).splittable == ()


def test_equal_kernels_share_a_rule_and_can_be_cut_again():
    one, two = over_rows(plain), over_rows(plain)
    assert one is not two and derive(one) is derive(two)
    assert_parts_agree(two, random_arrays(two))


def test_cotangents_lie_as_what_they_belong_to_and_add_up_over_the_rest():
    (kernel,) = kernels_in(matmul, jnp.zeros((16, 16)), jnp.zeros((16, 16)))
    rule = pull_back_rule(derive(kernel), (True, True), (True,))
    assert str(rule).splitlines()[0] == (
        "x_ref[i0, i2], y_ref[i2, i1], o_ref[i0, i1] -> x_ref[i0, i2], y_ref[i2, i1]"
    )
    summed = [[a for a in range(3) if rule.is_summed(o, a)] for o in rule.outputs]
    assert summed == [[1], [0]]


# --- where devices stand ---


def test_devices_are_shared_out_as_arrays_lie():
    rule = derive(rows_and(lambda i: (i, 0), lambda i: (i, 0)))
    tiles = {0: np.arange(8).reshape(2, 1, 4)}
    placed = place(rule, tiles, 8)
    assert placed.parts == {0: 2}
    assert placed.splits[0].part_of.tolist() == [0] * 4 + [1] * 4


def test_sums_are_over_devices_that_differ_in_their_part_alone():
    kernel = over_rows(plain)
    placed = place(derive(kernel), {0: np.arange(8).reshape(4, 2)[:, None]}, 8)
    assert placed.groups([0]) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_axes_over_the_same_devices_are_not_both_cut():
    same = np.arange(8) // 4
    other = np.arange(8) % 2
    assert not _is_even([AxisSplit(0, 2, same), AxisSplit(1, 2, same)], 8)
    assert _is_even([AxisSplit(0, 2, same), AxisSplit(1, 2, other)], 8)
