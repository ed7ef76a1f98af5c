"""Which blocks a chip gets: only where they do not fit, or gain much."""

import pytest

from pallasite.passes.choose_blocks import for_threads
from tests.backends.triton.test_blocks import matmul
from tests.passes.test_reblock import COPY, OWN, head, parsed, rows

MANY_NS = 1e9
COLUMNS = """
%a: f32[8,4] = load %xb[:, :]
%b: f32[8,4] = scan %a {kind="sum", axis=0, reverse=False}
store %ob[:, :] = %b
"""


def shared(kernel, threads: int, nanoseconds: float = MANY_NS) -> str:
    return head(for_threads(kernel, threads, lambda _: nanoseconds))


@pytest.mark.parametrize(
    "threads, grid, block",
    [(1, 1, 512), (2, 2, 256), (4, 4, 128), (5, 4, 128), (7, 32, 16), (64, 64, 8)],
)
def test_one_program_becomes_enough_for_all_threads(threads, grid, block):
    text = shared(matmul(512, 512, 512, 512, "f32"), threads)
    assert f"grid=({grid}, 1, 1), windows=(in[{block}, 512]" in text


def test_columns_are_cut_where_rows_do_not_suffice():
    text = shared(matmul(512, 16, 512, 512, "f32"), 128)
    assert "grid=(64, 2, 1), windows=(in[8, 512], in[512, 256], out[8, 256])" in text


def test_programs_that_fill_all_threads_stay():
    for threads in (2, 4):
        kernel = rows(COPY, n=32)
        assert for_threads(kernel, threads, lambda _: MANY_NS) is kernel


def test_uneven_programs_are_cut():
    """Three programs on four threads leave one idle, six would leave two."""
    text = shared(matmul(384, 128, 384, 384, "f32"), 4)
    assert "grid=(12, 1, 1), windows=(in[32, 384]" in text


def test_small_work_stays_with_one_thread():
    kernel = matmul(512, 512, 512, 512, "f32")
    assert for_threads(kernel, 4, lambda _: 70_000) is kernel
    assert "grid=(2, 1, 1)" in shared(kernel, 4, 100_000)


def test_rows_that_depend_on_each_other_stay():
    kernel = rows(COLUMNS, n=8, grid="(1,)", x_map=OWN)
    assert for_threads(kernel, 4, lambda _: MANY_NS) is kernel


def test_a_grid_sized_at_run_time_stays():
    text = rows(COPY).text.replace("grid=(4,)", "grid=(None,)")
    text = text.replace(
        "%x: ref<f32[32,4] any>", "%n: ref<i32[1] smem>, %x: ref<f32[32,4] any>"
    )
    text = text.replace("pipeline %x", "%count: i32 = load %n[0] pipeline %count, %x")
    kernel = parsed(text)
    assert for_threads(kernel, 64, lambda _: MANY_NS) is kernel
