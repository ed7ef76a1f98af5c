"""Random functions around kernel calls, fused and not (`fusions.py`)."""

from collections import Counter

import pytest

from tests.fuzz.batches import each_batch
from tests.fuzz.choices import Stream
from tests.fuzz.fusions import check_fusion
from tests.fuzz.hunt import stream_of
from tests.share import SHARE

BYTES = 192


@pytest.mark.parametrize("engine", ["cpu", "emulation"])
def test_fused_functions_give_what_they_gave(engine: str):
    seen: Counter[str] = Counter()

    def check(streams: list[bytes]) -> None:
        seen.update(check_fusion(Stream(stream), engine) for stream in streams)

    each_batch(check, part=len(engine), count=max(4 // SHARE, 2), batch=2, size=BYTES)
    assert seen["fused"]


# What the hunt has found.
FOUND = {1192: "cpu", 5000012: "cpu"}


@pytest.mark.parametrize("number", FOUND)
def test_what_was_wrong(number: int):
    check_fusion(Stream(stream_of(number)), FOUND[number])
