"""The kernels of `gpu_trial.py`: lowered here, run where a GPU is."""

import pytest

import pallasite as pl
from tests.backends.gpu_trial import TRIALS, run_trial


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRIALS)
def test_trial_is_right(name: str):
    run_trial(name)


# A choice: all of them take half a minute, and the zoo is lowered, too.
LOWERED = ["layer_norm", "cross_entropy_of_logits", "ragged_matmul", "paged_decode"]


@pytest.mark.parametrize("name", LOWERED)
def test_a_gpu_takes_it(name: str):
    case = TRIALS[name]()
    assert pl.lower(case.run)(*case.arrays).choice("cuda").backend != "interpret"
