"""`pl.roofline(reports...)`: a roofline chart of kernels, drawn by matplotlib."""

from importlib import import_module
from typing import Any

from pallasite.errors import MissingPackageError

MARKERS = "osD^v<>ph*"


def roofline(*reports: Any, axes: Any = None) -> Any:
    """Draw kernels below the ceilings of their chips.

    Several kernels on one chip, or one kernel on several chips: operations per second
    over operations per byte that must be moved. A filled point is measured, an empty
    one a compiler's estimate; a cross is the bound, where there is neither.

    Args:
        *reports: from `pl.explain` or `pl.profile`, or of single kernels.
        axes: matplotlib axes to draw into; default: those of a new figure.

    Returns:
        The figure: `.savefig("roofline.svg")` writes it.

    Raises:
        MissingPackageError: matplotlib is not installed.
        SpecError: there is nothing to draw.

    Example:
        `pl.roofline(pl.explain(f, target=["tpu:v5e", "gpu:h200"])(x))`
    """
    from pallasite.tools.roofline_chart import BOUND, MEASURED, chart_of, reports_in

    chart = chart_of(reports_in(reports))
    if axes is None:
        axes = _new_axes()
    left, right, bottom, top = chart.limits
    colors = {chip: f"C{n}" for n, chip in enumerate(chart.chips)}
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    axes.set(xlabel="operations per byte", ylabel="operations per second")
    for chip, color in colors.items():
        _draw_ceilings(axes, chart, chip, color)
    kernels = list(dict.fromkeys(point.kernel for point in chart.points))
    for point in chart.points:
        color = colors[point.chip]
        if point.kind == BOUND:
            style = {"marker": "x", "color": color}
        else:
            marker = MARKERS[kernels.index(point.kernel) % len(MARKERS)]
            fill = color if point.kind == MEASURED else "none"
            style = {"marker": marker, "edgecolors": color, "facecolors": fill}
        text = f"{point.kernel} on {point.chip} ({point.kind})"
        text += ", in cache" if point.cached else ""
        axes.scatter([point.intensity], [point.rate], zorder=3, label=text, **style)
    axes.legend(fontsize="small", loc="lower right")
    return axes.figure


def _draw_ceilings(axes: Any, chart: Any, chip: str, color: str) -> None:
    left, right, bottom, top = chart.limits
    memory, level = chart.roof(chip)
    text = {"color": color, "fontsize": "small", "textcoords": "offset points"}
    # Levels of two chips may be close, so their names are placed side by side.
    place = 0.99 - 0.27 * (chart.chips.index(chip) % 3)
    for ceiling in chart.ceilings:
        if ceiling.chip != chip:
            continue
        label = f"{chip}: {ceiling.label}"
        if ceiling.slope:
            begin = max(left, bottom / memory)
            end = min(chart.ridge(chip), top / memory)
            axes.plot([begin, end], [begin * memory, end * memory], color=color)
            axes.annotate(label, (begin, begin * memory), (8, 2), **text)
        else:
            begin = max(left, ceiling.rate / memory)
            style = "-" if ceiling.rate == level else "--"
            axes.plot([begin, right], [ceiling.rate] * 2, style, color=color)
            at = {"xy": (place, ceiling.rate), "xytext": (0, 2), "ha": "right"}
            axes.annotate(label, xycoords=axes.get_yaxis_transform(), **at, **text)


def _new_axes() -> Any:
    try:
        figure = import_module("matplotlib.figure")
    except ImportError:
        raise MissingPackageError(
            "pl.roofline needs matplotlib, which is not installed",
            fix="pip install 'pallasite[plot]', or pip install matplotlib",
        ) from None
    return figure.Figure(figsize=(8, 5), layout="constrained").subplots()
