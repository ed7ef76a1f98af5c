"""How much of the large tests a run does.

A run that repeats another in a second environment may do a part of them: with
PALLASITE_TEST_SHARE=8 an eighth of the random kernels and of the kernels in large
tables (`SAMPLED` in conftest.py).
"""

import os
from collections.abc import Sequence
from typing import TypeVar

SHARE = int(os.environ.get("PALLASITE_TEST_SHARE", "1"))

Case = TypeVar("Case")


def share_of(cases: Sequence[Case], number: int) -> Sequence[Case]:
    """One of every `SHARE` cases of the test with this number, and at least one.

    The next test begins with the next case, so that tests of one table see all of it
    between them.
    """
    return cases[number % min(SHARE, len(cases)) :: SHARE]
