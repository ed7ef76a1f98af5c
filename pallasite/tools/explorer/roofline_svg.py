"""A roofline as SVG, in the colours of the page."""

import html
from math import log10

from pallasite.passes.analysis.work import short
from pallasite.tools.roofline_chart import MEASURED, Chart, Point

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 44
RADIUS = 5


def roofline_svg(chart: Chart) -> str:
    """The picture; its classes are those of `page.css`."""
    return _Picture(chart).svg()


class _Picture:
    def __init__(self, chart: Chart):
        self.chart = chart
        self.left, self.right, self.bottom, self.top = chart.limits

    def x(self, value: float) -> float:
        part = log10(value / self.left) / log10(self.right / self.left)
        return LEFT + part * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        part = log10(value / self.bottom) / log10(self.top / self.bottom)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    def svg(self) -> str:
        parts = [*self._axes(), *self._ceilings(), *map(self._point, self.chart.points)]
        spoken = "; ".join(map(_spoken, self.chart.points))
        return (
            f'<svg class="roofline" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="Roofline: {html.escape(spoken)}">{"".join(parts)}</svg>'
        )

    def _axes(self) -> list[str]:
        found = []
        for power in _powers(self.left, self.right):
            x, end = self.x(power), HEIGHT - BOTTOM
            found.append(_line("rule", x, TOP, x, end))
            found.append(_text("tick", x, end + 15, _number(power), "middle"))
        for power in _powers(self.bottom, self.top):
            y = self.y(power)
            found.append(_line("rule", LEFT, y, WIDTH - RIGHT, y))
            found.append(_text("tick", LEFT - 6, y + 4, _number(power), "end"))
        middle = (LEFT + WIDTH - RIGHT) / 2
        found.append(_text("axis", middle, HEIGHT - 8, "flop per byte", "middle"))
        turned = f'<g transform="translate(13 {HEIGHT / 2}) rotate(-90)">'
        found.append(f"{turned}{_text('axis', 0, 0, 'flop per second', 'middle')}</g>")
        return found

    def _ceilings(self) -> list[str]:
        found = []
        for ceiling in self.chart.ceilings:
            memory, level = self.chart.roof(ceiling.chip)
            if ceiling.slope:
                begin = max(self.left, self.bottom / memory)
                end = min(self.chart.ridge(ceiling.chip), self.top / memory)
                x, y = self.x(begin), self.y(begin * memory)
                found.append(_line("roof", x, y, self.x(end), self.y(end * memory)))
                found.append(_text("ceiling", x + 14, y - 2, ceiling.label))
                continue
            begin = max(self.left, ceiling.rate / memory)
            kind = "roof" if ceiling.rate == level else "roof lower"
            y, end = self.y(ceiling.rate), WIDTH - RIGHT
            found.append(_line(kind, self.x(begin), y, end, y))
            found.append(_text("ceiling", end - 2, y - 5, ceiling.label, "end"))
        return found

    def _point(self, point: Point) -> str:
        x, y = self.x(point.intensity), self.y(point.rate)
        kind = "point" if point.kind == MEASURED else "point hollow"
        mark = f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"/>'
        title = f"<title>{html.escape(_spoken(point))}</title>"
        near_end = x > WIDTH * 0.7
        side, anchor = (-10, "end") if near_end else (10, "start")
        label = f"{point.kernel}, {point.kind}"
        return f"<g>{title}{mark}{_text('label', x + side, y + 16, label, anchor)}</g>"


def _spoken(point: Point) -> str:
    rate = f"{short(point.rate)}flop per second"
    at = f"{point.intensity:.3g} flop per byte"
    cached = "; caches held part of its bytes" if point.cached else ""
    return f"{point.kernel} on {point.chip}: {rate} at {at}, {point.kind}{cached}"


def _powers(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(round(log10(low)), round(log10(high)) + 1)]


def _number(power: float) -> str:
    return f"{power:g}" if power < 1000 else f"1e{round(log10(power))}"


def _line(kind: str, x: float, y: float, to_x: float, to_y: float) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line class="{kind}" {ends}/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{html.escape(text)}</text>'
