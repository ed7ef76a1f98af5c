"""Steps of running maxima and sums, split into narrower ones: the same meaning."""

import numpy as np
import pytest

from pallasite.ir.nodes import Kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.normalize import normal_text
from pallasite.passes.normal.resized_code import CannotReblock
from pallasite.passes.schedule.cut_steps import cut_steps
from pallasite.passes.schedule.widen_steps import widen_steps
from tests.passes.test_same_meaning import outputs
from tests.passes.test_widen_steps import (
    FIRST,
    POSITIONS,
    REST,
    SCORES,
    UNMASKED,
    steps,
)


def cut(kernel: Kernel, size: int) -> Kernel:
    new = canonicalize(cut_steps(canonicalize(kernel), size))
    verify(new)
    return new


@pytest.mark.parametrize("size", [2, 1])
@pytest.mark.parametrize(
    "body", [FIRST + SCORES + REST, UNMASKED, FIRST + POSITIONS + REST]
)
def test_the_same_state_in_more_steps(body: str, size: int):
    kernel = steps(body)
    new = cut(kernel, size)
    assert f"grid=({32 // size},), windows=(in[8, {size}], out[8])" in new.text
    x = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)
    x[3, :3] = -np.inf  # parts without anything finite
    arrays = [x]
    for a, b in zip(outputs(kernel, arrays), outputs(new, arrays), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_wide_steps_become_those_that_were_widened():
    kernel = canonicalize(steps(FIRST + SCORES + REST))
    wide = canonicalize(widen_steps(kernel, 16))
    assert normal_text(cut(wide, 4)) == normal_text(kernel)


def test_positions_are_those_of_the_new_steps():
    new = cut(steps(FIRST + POSITIONS + REST), 2)
    assert "div" not in new.text and "rem" not in new.text


@pytest.mark.parametrize(
    "body, reason",
    [
        (FIRST.replace("-65536.0", "-inf") + SCORES + REST, "minus infinity"),
        (SCORES + REST, "minus infinity"),
        (FIRST + SCORES + REST.replace("%sum: f32[8] = add", "%sum: f32[8] = mul"),
         "neither a maximum"),
    ],
)  # fmt: skip
def test_steps_that_stay(body: str, reason: str):
    with pytest.raises(CannotReblock, match=reason):
        cut(steps(body), 2)
