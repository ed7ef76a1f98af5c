"""Programs in groups that read blocks in common. Text in, text out."""

import numpy as np
import pytest

from pallasite.ir.verify import verify
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.canonicalize import canonicalize
from pallasite.passes.program_order import order_programs
from tests.backends.triton.test_blocks import matmul
from tests.passes.test_reblock import COPY, head, rows
from tests.passes.test_same_meaning import outputs


@pytest.mark.parametrize(
    "size, cores, grid",
    [
        # 132 blocks of 128 rows and 256 columns: 16 x 8 of them are nearly square.
        (8192, 132, "(4, 32, 16, 128)"),
        # 16 columns of blocks only: 8 x 16 at once is as good.
        (4096, 132, "(32, 16, 64)"),
        (8192, 1, "(64, 32, 128)"),
    ],
)
def test_programs_at_once_are_nearly_square(size, cores, grid):
    new = order_programs(matmul(size, 128, 256, 64), cores)
    verify(new)
    assert f"grid={grid}, windows=(in[128, 64], in[64, 256], out[128, 256])" in head(
        new
    )


def test_maps_and_programs_see_the_axes_they_had():
    old = matmul(64, 4, 4, 16, "f32")
    new = order_programs(old, 8)
    verify(new)
    assert "grid=(8, 16, 2, 4)" in head(new)
    assert [a.parallel for a in analyze(new).axes] == [True, True, True, False]
    arrays = list(np.random.default_rng(0).normal(size=(2, 64, 64)).astype(np.float32))
    np.testing.assert_array_equal(outputs(new, arrays)[0], outputs(old, arrays)[0])


def test_what_has_nothing_in_common_stays():
    for kernel in (rows(COPY), matmul(256, 128, 128, 64)):
        assert order_programs(canonicalize(kernel), 132) == canonicalize(kernel)
