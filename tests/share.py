"""How much of the large tests a run does.

`make test-all` does all. With PALLASITE_TEST_SHARE=8, `make test` does an eighth of the
random kernels and of the cases of large tables (`SAMPLED` in conftest.py), and leaves
out what is marked slow. The eighth is always the same one, chosen by what it covers.
"""

import heapq
import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

SHARE = int(os.environ.get("PALLASITE_TEST_SHARE", "1"))
WORDS = re.compile(r"[^\W_]+")
WORD = 1_000_000  # how many pairs of words one word counts as

Case = TypeVar("Case")


def share_of(cases: Sequence[Case], number: int) -> Sequence[Case]:
    """One of every `SHARE` cases of the test with this number, and at least one.

    The next test begins with the next case, so that tests of one table see all of it
    between them.
    """
    return cases[number % min(SHARE, len(cases)) :: SHARE]


def spread(cases: Sequence[Case], place: int, places: int) -> Sequence[Case]:
    """Of cases that are tried in several places, those to try in this one.

    A run with a share tries each case in one place at most.
    """
    return cases if SHARE == 1 else cases[place :: max(SHARE, places)]


def chosen(names: Sequence[str], number: int = 0) -> list[str]:
    """The share of these names that covers the most; `sample_of` says how."""
    return [names[n] for n in sample_of(names, number)]


def sample_of(names: Sequence[str], number: int) -> list[int]:
    """Which of a test's cases are in its share, by their names.

    Of `exp-f32-cpu` each word is met, if twice the share suffices, and then as many
    pairs of words as there is room for: every op, type and backend, and not each with
    each. Names that have no words in common are taken evenly, as in `share_of`.
    """
    if SHARE == 1:
        return [*range(len(names))]
    room = max(-(-len(names) // SHARE), min(len(names), 8 // SHARE))
    words = [sorted(set(WORDS.findall(name))) for name in names]
    uses = Counter(itertools.chain.from_iterable(words))
    wanted = {word for word, count in uses.items() if count > 1}
    features = [
        {*own, *itertools.combinations(own, 2)}
        for own in ([w for w in found if w in wanted] for found in words)
    ]
    step = min(SHARE, len(names))
    order = sorted(range(len(names)), key=lambda n: ((n - number) % step, n))
    seen: set[object] = set()
    taken: list[int] = []

    def gain(case: int) -> int:
        new = features[case] - seen
        return sum(WORD if isinstance(each, str) else 1 for each in new)

    # What a case adds only falls while others are taken: the first whose number is
    # still true adds the most.
    heap = [(-gain(case), place, case) for place, case in enumerate(order)]
    heapq.heapify(heap)
    while heap and len(taken) < (room if wanted <= seen else 2 * room):
        _, place, case = heapq.heappop(heap)
        now = (-gain(case), place, case)
        if heap and now > heap[0]:
            heapq.heappush(heap, now)
            continue
        if len(taken) >= room and -now[0] < WORD:
            break
        taken.append(case)
        seen |= features[case]
    return sorted(taken)
