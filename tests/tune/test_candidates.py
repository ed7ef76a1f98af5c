"""What is known of candidates before they are compiled."""

import jax
import jax.numpy as jnp
import pytest

from pallasite import config, kernels
from pallasite.kernels import masks
from pallasite.target import GPUS
from pallasite.tune import candidates
from pallasite.tune.candidates import Candidate
from pallasite.tune.table import Table

H200 = GPUS["h200"]


def scheduled(function, *shapes) -> Candidate:
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with config.override(target="h200"):
        chosen = lambda call: ("cuda", "triton")
        made = candidates.make({}, Table(), function, args, chosen, H200)
    assert not made.refused
    return made


def attention(block_q: int, block_kv: int, mask: masks.Mask, length=4096) -> Candidate:
    blocks = kernels.AttentionConfig(block_q, block_kv)
    run = lambda q, k, v: kernels.attention(q, k, v, mask=mask, config=blocks)
    return scheduled(run, *[(1, length, 16, 64)] * 3)


def test_what_masked_blocks_compute_for_nothing_is_in_an_estimate_for_a_gpu():
    blocks = (128, 256, 512)
    causal = [attention(n, 128, masks.Causal()).estimate for n in blocks]
    assert 0 < causal[0] < causal[1] < causal[2]
    full = [attention(n, 128, masks.Everything()).estimate for n in blocks]
    assert full[2] == pytest.approx(full[0], rel=0.02)
    assert full[0] > 1.6 * causal[0]


def test_rows_of_one_warpgroup_are_merged_for_two():
    """One that is alone would multiply and compute in turns."""
    rows = [attention(n, 256, masks.Causal()).estimate for n in (64, 128)]
    assert rows[0] == pytest.approx(rows[1], rel=0.1)


def test_few_programs_leave_multiprocessors_idle():
    two, one = (attention(128, 128, masks.Everything(), n) for n in (256, 128))
    assert one.estimate == pytest.approx(two.estimate / 2, rel=0.1)


def test_no_bound_on_a_gpu_is_above_the_estimate():
    made = scheduled(kernels.matmul, (1024, 512), (512, 2048))
    least = 2 * 1024 * 512 * 2048 / H200.rates["bf16"]
    assert least * 0.999 < made.bound < made.estimate
    rows = scheduled(kernels.rms_norm, (8192, 4096))
    moved = 2 * 8192 * 4096 * 2
    assert rows.estimate == pytest.approx(moved / 4.8e12, rel=0.5)


def test_of_lengths_that_operands_decide_there_is_no_estimate():
    lengths = jnp.full((4,), 100, jnp.int32)
    run = lambda q, k, v: kernels.decode_attention(q, k, v, lengths)
    made = scheduled(run, (4, 8, 64), (4, 512, 2, 64), (4, 512, 2, 64))
    assert made.estimate == 0
