"""Where the elements of a tile are: each has a place, and texts say the same."""

from itertools import product

import pytest

from pallasite.backends.cuda.layouts import Spread, accumulator, striped


def coordinate(spread: Spread, dim: int, thread: int, register: int) -> int:
    """What the C++ texts give."""
    text = f"({spread.lane_text(dim, 't')}) + ({spread.digit_text(dim, 'r')})"
    return eval(text.replace("/", "//"), {"t": thread, "r": register})


def places(spread: Spread, threads: int) -> dict[tuple[int, ...], int]:
    """How many registers of all threads hold each element."""
    found: dict[tuple[int, ...], int] = {}
    for thread, register in product(range(threads), range(spread.registers)):
        dims = range(len(spread.shape))
        at = tuple(coordinate(spread, d, thread, register) for d in dims)
        found[at] = found.get(at, 0) + 1
    return found


@pytest.mark.parametrize(
    ("shape", "threads", "vector"),
    [
        ((1000,), 64, 8),
        ((1, 1000), 64, 8),
        ((8, 1000), 256, 8),
        ((5, 7), 32, 4),
        ((3, 4, 6), 32, 2),
        ((16, 1), 32, 8),
        ((1, 1), 32, 8),
    ],
)
def test_striped_tiles_have_every_element(shape, threads, vector):
    spread = striped(shape, threads, vector)
    found = places(spread, threads)
    wanted = set(product(*map(range, shape)))
    assert wanted <= found.keys()
    assert len({found[at] for at in wanted}) == 1  # as many copies of each
    for dim in range(len(shape)):
        covered = 1 + max(at[dim] for at in found)
        assert covered == spread.covered(dim)
        assert spread.has_padding(dim) == (covered > shape[dim])


def test_a_thread_holds_vectors():
    spread = striped((1024,), 64, 8)
    at = [coordinate(spread, 0, 3, r) for r in range(8)]
    assert at == list(range(24, 32))
    assert spread.lane_multiple(0) == 8


def test_rows_are_spread_over_warps_first():
    """So that one warp, or few, reduce a row."""
    spread = striped((8, 1024), 256, 8)
    assert {coordinate(spread, 0, t, 0) for t in range(32)} == {0}
    assert {coordinate(spread, 0, t, 0) for t in range(0, 256, 32)} == set(range(8))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_accumulators_have_each_element_once(groups: int, beside: bool):
    rows = 128 * groups
    found = places(accumulator(rows, 16, groups, beside), 128 * groups)
    assert set(found) == set(product(range(rows), range(16)))
    assert set(found.values()) == {1}


def test_accumulator_is_the_one_of_the_instruction():
    spread = accumulator(64, 32, 1)
    # Thread 37: the second warp, row 16 + 37 % 32 / 4, columns from 2 * (37 % 4).
    at = [tuple(coordinate(spread, d, 37, r) for d in (0, 1)) for r in range(6)]
    assert at == [(17, 2), (17, 3), (25, 2), (25, 3), (17, 10), (17, 11)]


def test_without_a_dimension_registers_are_found_again():
    spread = accumulator(128, 16, 1)
    left = spread.without([1])
    assert left.registers == 4
    text = spread.register_without([1], "r").replace("/", "//")
    for register in range(spread.registers):
        number = eval(text, {"r": register})
        assert coordinate(left, 0, 70, number) == coordinate(spread, 0, 70, register)


def test_corners_are_the_ends_of_a_threads_part():
    spread = accumulator(128, 32, 1)
    at = {tuple(coordinate(spread, d, 0, r) for d in (0, 1)) for r in spread.corners()}
    assert at == {(0, 0), (0, 25), (72, 0), (72, 25)}


def test_permuted_and_with_units():
    spread = striped((4, 32), 32, 4)
    turned = spread.permuted((1, 0))
    assert turned.shape == (32, 4)
    assert coordinate(turned, 0, 5, 3) == coordinate(spread, 1, 5, 3)
    wide = spread.without([0]).with_units((1, 32, 1), (1,))
    assert [coordinate(wide, d, 5, 3) for d in range(3)] == [
        0,
        coordinate(spread, 1, 5, 3),
        0,
    ]
