"""Kernels of the zoo as machine code in vmap, lax.scan and shard_map: no fallback."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tests.backends.cpu.test_zoo import assert_agrees, each
from tests.zoo import Case, all_cases

pytestmark = pytest.mark.filterwarnings("error::pallasite.errors.FallbackWarning")

# One or two of each family, and what is special about memory.
CHOSEN = (
    *("add_vectors", "swiglu_bf16", "rope", "row_softmax"),
    *("matmul_accumulate", "matmul_odd_fill", "matmul_scratch_bf16", "ragged_matmul"),
    *("flash_scratch_causal", "paged_decode", "alias_partial_update", "dma_gather"),
    *("reshape_bitcast_views", "scatter_array_index", "masked_offsets", "max_pool"),
    *("linear_recurrence", "histogram_atomic_vector", "top_k", "collatz"),
    *("run_scoped_temporaries", "matmul_emit_pipeline", "threefry_dropout"),
)
CASES = [case for case in all_cases() if case.name in CHOSEN]
STEPS = 3


def native(case: Case):
    """The default on a CPU, which warns if it is not machine code."""
    return lambda *args: case.run(*args, interpret=False)


def examples(case: Case, count: int) -> tuple[list[tuple], tuple]:
    """Arguments per example, and which of them differ."""
    made = [case.make_args(np.random.default_rng(seed)) for seed in range(count)]
    axes = case.vmap_axes
    axes = axes if isinstance(axes, tuple) else (axes,) * len(made[0])
    same = [
        tuple(made[0][k] if axis is None else args[k] for k, axis in enumerate(axes))
        for args in made
    ]
    return same, axes


def stacked(rows: list[tuple], axes: tuple) -> list:
    columns = zip(*rows, strict=True)
    return [
        column[0] if axis is None else jnp.stack(column, axis)
        for column, axis in zip(columns, axes, strict=True)
    ]


def referred(case: Case, rows: list[tuple]):
    """What the examples should give, one after another."""
    reference = jax.jit(case.reference)
    found = [reference(*row) for row in rows]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)


def test_all_chosen_exist():
    assert len(CASES) == len(CHOSEN)


@each([case for case in CASES if case.vmap_axes is not None])
def test_vmap_inside_scan(case: Case):
    """Each round of the loop runs all examples at once."""
    rows, axes = examples(case, 2)
    batched = stacked(rows, axes)
    mapped = jax.vmap(native(case), axes)

    @jax.jit
    def run(*args):
        return jax.lax.scan(lambda n, _: (n + 1, mapped(*args)), 0, length=STEPS)[1]

    got = run(*batched)
    want = jax.tree.map(lambda leaf: jnp.stack([leaf] * STEPS), referred(case, rows))
    assert_agrees(case, got, want)


SHARDED = ("add_vectors", "matmul_accumulate", "flash_scratch_causal", "paged_decode")
SHARDED += ("alias_partial_update", "histogram_atomic_vector", "matmul_emit_pipeline")


@each([case for case in CASES if case.name in SHARDED])
def test_on_eight_devices_at_once(case: Case):
    devices = jax.devices("cpu")
    assert len(devices) == 8
    rows, axes = examples(case, len(devices))
    leading = tuple(None if axis is None else 0 for axis in axes)
    specs = tuple(PartitionSpec() if a is None else PartitionSpec("d") for a in leading)

    def one(*args):
        pairs = zip(args, leading, strict=True)
        mine = [x if axis is None else x[0] for x, axis in pairs]
        return jax.tree.map(lambda leaf: leaf[None], native(case)(*mine))

    spread = jax.shard_map(
        one,
        mesh=Mesh(np.array(devices), ("d",)),
        in_specs=specs,
        out_specs=PartitionSpec("d"),
        check_vma=False,
    )
    got = jax.jit(spread)(*stacked(rows, leading))
    assert_agrees(case, got, referred(case, rows))
