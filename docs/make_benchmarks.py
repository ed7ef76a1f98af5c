"""Tables and charts of docs/benchmarks.md, from `benchmarks/results`.

`python docs/make_speed.py` writes all of them again; a test fails if one is too old.
`pallasite bench` draws what it has measured with the same functions.
"""

import json
import math
import runpy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
DRAW = runpy.run_path(str(DOCS / "make_pictures.py"))
INK, PALE, BUSY, MOVED, WRONG = (
    DRAW[name] for name in ("INK", "PALE", "BUSY", "MOVED", "WRONG")
)
PARTS = {"rows": "forward", "gradients": "gradients"}
TPUS = ("v5e", "v6e", "v5p")
MEANS = "bench_means.svg"
SLOWER = 0.95  # what is below this is listed


@dataclass(frozen=True)
class Ratio:
    """How many times faster than a rival an operation is; 2 is half of its time."""

    name: str
    rival: str
    value: float


def results(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


# --- what was measured ---


def library(rows: Mapping[str, Any]) -> list[Ratio]:
    """Operations beside XLA, or cuDNN where that is what XLA calls, and torch."""
    found = []
    for name, row in rows.items():
        if name.endswith("splits"):  # choices of which the default is another row
            continue
        rival = "cuDNN" if "beside cuDNN" in name else "XLA"
        found.append(Ratio(name, rival, row["times faster"]))
        if row.get("times faster than torch"):
            found.append(Ratio(name, "torch", row["times faster than torch"]))
    return found


def tokamax(rows: Mapping[str, Any]) -> list[Ratio]:
    """Operations beside the faster one of Tokamax's kernels that run."""
    found = []
    for name, row in rows.items():
        times = [
            row[f"{kind} ms"] for kind in ("triton", "mosaic") if row.get(f"{kind} ms")
        ]
        if times:
            found.append(Ratio(name, "Tokamax", min(times) / row["ours ms"]))
    return found


def cycles(rows: Mapping[str, Any]) -> list[Ratio]:
    """Cycles that a TPU's compiler estimates, beside upstream's kernels.

    Where it takes a loop of upstream's for one round, the row "(counted)" has them all.
    """
    return [
        Ratio(name, "upstream", row["upstream"] / row["ours"])
        for name, row in rows.items()
        if row.get("ours") and row.get("upstream") and f"{name} (counted)" not in rows
    ]


def mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


# --- charts ---


def chart(title: str, ratios: Iterable[Ratio]) -> str:
    """A bar per operation, from 1 to how many times faster it is; torch is a mark."""
    bars = sorted((r for r in ratios if r.rival != "torch"), key=lambda r: -r.value)
    marks = {r.name: r.value for r in ratios if r.rival == "torch"}
    low = min([0.5, *(r.value for r in bars), *marks.values()])
    high = max([2.0, *(r.value for r in bars), *marks.values()])
    left, right, top, row = 400, 760, 62, 19
    box, label = DRAW["box"], DRAW["label"]

    def x(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return round(left + (right - left) * share, 1)

    bottom = top + row * len(bars)
    rivals = " and ".join(dict.fromkeys(r.rival for r in bars))
    mark = "; the line in a bar is torch" if marks else ""
    shapes = [
        label(10, 20, title),
        label(10, 38, f"times faster than {rivals}, logarithmic{mark}"),
    ]
    for tick in (0.5, 1, 2, 5, 10, 20, 50, 100):
        if low <= tick <= high:
            ink = INK if tick == 1 else PALE
            shapes.append(f'<path d="M{x(tick):g} {top - 6}V{bottom}" stroke="{ink}"/>')
            shapes.append(label(x(tick), top - 8, f"{tick:g}", "middle"))
    for n, ratio in enumerate(bars):
        y, start, end = top + row * n, x(1), x(ratio.value)
        rival = f" ({ratio.rival})" if ratio.rival == "cuDNN" else ""
        name = ratio.name.replace(" beside cuDNN", "") + rival
        fill = BUSY if ratio.value >= 1 else WRONG
        shapes.append(label(left - 10 if start > left else left, y + 13, name, "end"))
        shapes.append(box(min(start, end), y + 2, abs(end - start), row - 5, fill))
        if ratio.name in marks:
            line = f"M{x(marks[ratio.name]):g} {y + 1}v{row - 3}"
            shapes.append(f'<path d="{line}" stroke="{MOVED}" stroke-width="3"/>')
        shapes.append(label(right + 8, y + 13, f"{ratio.value:.2f}"))
    return DRAW["picture"](right + 60, bottom + 12, shapes)


def charts(folder: Path = RESULTS) -> dict[str, str]:
    """The pictures, by file name."""
    made = {}
    for file in sorted(folder.glob("kernels_*.json")):
        chip = file.stem.removeprefix("kernels_")
        found = results(file.stem, folder)
        for part, title in PARTS.items():
            if found.get(part):
                text = f"{where(found)}: {title}"
                made[f"bench_{chip}_{title}.svg"] = chart(text, library(found[part]))
    bars = [
        Ratio(f"{what}: {rival}", "others", mean(values))
        for what, ratios in groups(folder)
        for rival, values in by_rival(ratios).items()
        if not what.startswith("TPU")  # estimates
    ]
    if folder == RESULTS:
        made[MEANS] = chart("operations of the library, geometric mean", bars)
    for chip, rows in results("tpu", folder).get("cycles", {}).items():
        title = f"TPU {chip}: cycles that its compiler estimates"
        made[f"bench_{chip}.svg"] = chart(title, cycles(rows))
    return made


def where(found: Mapping[str, Any]) -> str:
    """The chip that numbers are from."""
    return found.get("chip") or found.get("device", "this chip")


# --- the page ---


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def means(what: str, ratios: Sequence[Ratio]) -> list[list[str]]:
    """A row of the first table per rival."""
    rows = []
    for rival, values in by_rival(ratios).items():
        ahead = f"{sum(v >= 1 for v in values)} of {len(values)}"
        rows.append([what, rival, f"{mean(values):.2f}", ahead, f"{min(values):.2f}"])
    return rows


def by_rival(ratios: Iterable[Ratio]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for ratio in ratios:
        found.setdefault(ratio.rival, []).append(ratio.value)
    return found


def groups(folder: Path = RESULTS) -> Iterable[tuple[str, list[Ratio]]]:
    """What was measured, chip by chip."""
    for chip, name in (("h200", "H200"), ("cpu", "CPU")):
        for part, title in PARTS.items():
            yield (
                f"{name}, {title}",
                library(results(f"kernels_{chip}", folder).get(part, {})),
            )
        if chip == "h200":
            rows = results("tokamax_h200", folder).get("rows", {})
            yield f"{name}, forward", tokamax(rows)
    for chip in TPUS:
        rows = results("tpu", folder).get("cycles", {}).get(chip, {})
        yield f"TPU {chip}, estimated cycles", cycles(rows)


def forms() -> Iterable[list[str]]:
    """Kernels as people write them: a row per chip and direction."""
    for chip in ("h200", "cpu"):
        for part, found in results(f"forms_{chip}").items():
            told = found["summary"]
            ahead = sum(n for band, n in told["bands"].items() if band == ">= 1.0")
            yield [
                f"{chip.upper()}, {part}",
                f"{told['geometric mean']:.2f}",
                f"{ahead} of {told['timed']}",
                "; ".join(f"{n} {v:.2g}" for n, v in told["below 0.5"].items())
                or "none",
            ]


def slower() -> Iterable[list[str]]:
    for what, ratios in groups():
        below = sorted((r for r in ratios if r.value < SLOWER), key=lambda r: r.value)
        for ratio in below:
            yield [what, ratio.name, ratio.rival, f"{ratio.value:.2f}"]


def pictures() -> str:
    lines = []
    for name in charts():
        if name == MEANS:  # on the first page
            continue
        text = name.removeprefix("bench_").removesuffix(".svg").replace("_", ", ")
        lines.append(f"![Times faster, {text}](pictures/{name})\n")
    return "\n".join(lines)


def summary() -> str:
    head = ["where", "beside", "times faster, geometric mean", "at least as fast"]
    rows = [row for what, ratios in groups() for row in means(what, ratios)]
    return table([*head, "lowest"], rows)


def below() -> str:
    return table(["where", "operation", "beside", "times faster"], slower())


def spelled() -> str:
    head = ["where", "times faster than XLA or cuDNN", "at least as fast"]
    return table([*head, "below half"], forms())


def kernel() -> str:
    """The speed of a kernel like that of the first page."""
    files = (results("learn_cpu"), results("learn_h200"))
    cpu, h200 = (each["pages"]["softmax"]["steps"]["softmax"] for each in files)
    cores = files[0]["chip"]["cores"]
    return (
        f"On {cores} cores of a CPU the [softmax of the tutorial](learn/softmax.md) "
        f"takes {cpu['ms']:.2g} ms,\nXLA's own {cpu['xla_ms']:.2g} ms; on an H200 "
        f"{1e3 * h200['ms']:.0f} and {1e3 * h200['xla_ms']:.0f} µs.\n"
    )


TABLES = {
    "kernel": kernel,
    "summary": summary,
    "slower": below,
    "forms": spelled,
    "charts": pictures,
}
