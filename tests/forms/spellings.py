"""Spellings of a kernel by chance: `spelling` draws every choice of a style.

A `Base` is a family of computations with the choices their authors have. Two spellings
of one computation (`pairs`) mean the same, so nothing else about them may differ.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.forms import (
    attention,
    attention_styles,
    map_styles,
    matmul,
    matmul_styles,
    row_styles,
)
from tests.forms.form import Problem, Size


@dataclass(frozen=True)
class Base:
    """Computations and how they may be written.

    Args:
        name: of the family.
        whats: the computations.
        style: the class of a spelling.
        axes: the options of each choice.
        fits: whether choices can be written together.
        make: the function of a computation and a spelling, for a size.
        problem: operands and reference of a computation.
    """

    name: str
    whats: Sequence[Any]
    style: Callable[..., Any]
    axes: dict[str, tuple[Any, ...]]
    fits: Callable[[Any, Any], bool]
    make: Callable[[Any, Any], Callable[[Size], Callable]]
    problem: Callable[[Any], Problem]


@dataclass(frozen=True)
class Spelling:
    """One kernel: a computation and every choice made."""

    base: Base
    what: Any
    style: Any

    def function(self, size: Size) -> Callable:
        return self.base.make(self.what, self.style)(size)

    @property
    def problem(self) -> Problem:
        return self.base.problem(self.what)

    def __str__(self) -> str:
        """The computation, and the choices that are not the usual ones."""
        usual = self.base.style()
        changed = [
            f"{name}={getattr(self.style, name)}"
            for name in self.base.axes
            if getattr(self.style, name) != getattr(usual, name)
        ]
        return f"{self.problem.name}: {', '.join(changed) or 'as usual'}"


ATTENTION = (
    attention.FULL,
    attention.CAUSAL,
    attention.CAUSAL64,
    attention.GROUP,
    attention.CAP,
    attention.SEGMENTS,
    attention.SINKS,
    attention.ALIBI,
    attention.LATENT,
)
MATMUL = (
    matmul.PLAIN,
    matmul.WIDE,
    matmul.W_TURNED,
    matmul.X_TURNED,
    matmul.BATCH,
    matmul.EDGE,
)
_ROWS = row_styles
BASES = {
    base.name: base
    for base in (
        Base(
            "attention",
            ATTENTION,
            attention_styles.Style,
            attention_styles.AXES,
            attention_styles.fits,
            attention_styles.attention,
            attention.problem,
        ),
        Base(
            "matmul",
            MATMUL,
            matmul_styles.Style,
            matmul_styles.AXES,
            matmul_styles.fits,
            matmul_styles.matmul,
            matmul.problem,
        ),
        Base(
            "maps",
            map_styles.MAPS,
            map_styles.Style,
            map_styles.AXES,
            map_styles.fits,
            map_styles.maps,
            map_styles.problem,
        ),
        Base(
            "rows",
            ("softmax", "rms norm", "layer norm"),
            _ROWS.RowStyle,
            _ROWS.ROW_AXES,
            _ROWS.rows_fit,
            _ROWS.rows,
            _ROWS.row_problem,
        ),
        Base(
            "reductions",
            _ROWS.SUMS,
            _ROWS.SumStyle,
            _ROWS.SUM_AXES,
            _ROWS.sums_fit,
            _ROWS.sums,
            _ROWS.sum_problem,
        ),
        Base(
            "scans",
            _ROWS.SCANS,
            _ROWS.ScanStyle,
            _ROWS.SCAN_AXES,
            _ROWS.scans_fit,
            _ROWS.scans,
            _ROWS.scan_problem,
        ),
    )
}


def spelling(draw: random.Random, base: Base, what: Any) -> Spelling:
    """A spelling of a computation; each choice is as likely as its options allow."""
    while True:
        style = base.style(
            **{
                name: draw.choice(options) if draw.random() < 0.5 else options[0]
                for name, options in base.axes.items()
            }
        )
        if base.fits(what, style):
            return Spelling(base, what, style)


def pairs(seed: int, names: Sequence[str] = ()) -> Iterator[tuple[Spelling, Spelling]]:
    """Spellings of the same computation, two by two, without end."""
    draw = random.Random(seed)
    while True:
        base = BASES[draw.choice(list(names) or list(BASES))]
        what = draw.choice(base.whats)
        first, second = spelling(draw, base, what), spelling(draw, base, what)
        if first.style != second.style:
            yield first, second
