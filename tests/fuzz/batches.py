"""Batches of random kernels from hypothesis, and the simplest that fails."""

from collections.abc import Callable, Sequence

import hypothesis
from hypothesis import strategies as st

from tests.fuzz.choices import Stream, simplest
from tests.fuzz.generate import BYTES, Case, random_kernel

Check = Callable[[Sequence[Case]], None]


def most_of(kernels: int) -> float:
    """How many of them must be different: the first ones that hypothesis draws are the
    simplest there is, over and over."""
    return 0.9 * (kernels - 8)


def check_batches(
    check_all: Check,
    family: str,
    part: int,
    count: int,
    batch: int,
    wide: bool = False,
) -> int:
    """Check `count` batches; how many different kernels there were."""
    seen: set[str] = set()

    def check_batch(streams: list[bytes]) -> None:
        cases = [random_kernel(Stream(s), family, wide) for s in streams]
        try:
            check_all(cases)
        except Exception:
            _raise_simplest(check_all, streams, family, wide)
            raise
        seen.update(case.kernel.text for case in cases)

    each_batch(check_batch, part, count, batch, BYTES)
    return len(seen)


def each_batch(
    check: Callable[[list[bytes]], None], part: int, count: int, batch: int, size: int
) -> None:
    """Call `check` with `count` lists of `batch` random streams, each of `size` bytes.

    The same ones each time; other ones for another `part`.
    """
    total = batch * size

    @hypothesis.seed(part)
    @hypothesis.settings(max_examples=count, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.binary(min_size=total, max_size=total))
    def check_streams(data: bytes) -> None:
        check([data[n : n + size] for n in range(0, total, size)])

    check_streams()


def _raise_simplest(
    check_all: Check, streams: Sequence[bytes], family: str, wide: bool
) -> None:
    """Raise for the simplest kernel found that fails by itself."""

    def fails(stream: bytes) -> bool:
        try:
            check_all([random_kernel(Stream(stream), family, wide)])
        except Exception:
            return True
        return False

    for stream in filter(fails, streams):
        case = random_kernel(Stream(simplest(stream, fails)), family, wide)
        print(case)
        check_all([case])
