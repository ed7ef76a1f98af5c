"""Which elements an index picks, where that is the same at every step."""

import pytest

from pallasite.ir.nodes import At, Gather, Span
from pallasite.passes.analysis.boxes import box_at
from pallasite.passes.lower.promote import fixed_part

CASES = [
    ((At(3), Span(2, 4)), (Span(3, 1), Span(2, 4)), [(3, 4), (2, 6)]),
    ((Span(None, 8), At(None)), None, None),
    # Starts are clamped to fit: a whole dimension begins at its first element.
    ((Span(None, 8), Span(0, 8)), (Span(0, 8), Span(0, 8)), [(0, 8), (0, 8)]),
    ((At(0), Span(1, 3, 2)), (Span(0, 1), Span(1, 3, 2)), None),
    ((At(8), Span(0, 8)), None, None),
    ((Gather(), Span(0, 8)), None, None),
]


@pytest.mark.parametrize(("index", "box", "part"), CASES)
def test_boxes(index, box, part):
    assert box_at(index, (8, 8)) == box
    assert fixed_part(index, (8, 8)) == part
