"""Rewrites the tables and sums of docs/tpu_speed.md from benchmarks/results/tpu.json.

`python docs/make_tpu_speed.py` after `python benchmarks/tpu.py`; a test fails if the
page is out of date. What is between `<!-- name -->` and `<!-- end -->` is made here.
"""

import json
import re
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path

PAGE = Path(__file__).with_name("tpu_speed.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "tpu.json"
CHIPS = ("v5e", "v6e", "v5p")

CYCLES = json.loads(RESULTS.read_text())["cycles"]
Row = tuple[str, Sequence[str]]

PORTABLE: list[Row] = [
    (
        "matmul 4096, blocks of 128, 256, 512",
        [f"matmul 4096, blocks of {n}" for n in (128, 256, 512)],
    ),
    ("matmul 2048, the same", [f"matmul 2048, blocks of {n}" for n in (128, 256, 512)]),
    (
        "flash attention, 8 heads, 2048 x 128, the same",
        [f"flash, blocks of {n}" for n in (128, 256, 512)],
    ),
    (
        "with keys in a loop, the same",
        [f"flash in a loop, blocks of {n}" for n in (128, 256, 512)],
    ),
    (
        "causal, the same",
        [f"flash causal, blocks of {n}" for n in (128, 256, 512)],
    ),
    ("softmax, 8192 x 2048, blocks of 8 rows", ["softmax, 8 rows"]),
    ("layer norm, 8192 x 2048, blocks of 8 rows", ["layer norm, 8 rows"]),
    (
        "grouped matmul, 4096 x 2048 x 2048, blocks of 128, 512",
        [f"grouped matmul, blocks of {n}" for n in (128, 512)],
    ),
    (
        "paged decode, 8 sequences of 2048, pages of 16",
        ["paged decode, pages of 16"],
    ),
    ("the same, pages of 128", ["paged decode, pages of 128"]),
    ("stencil, 4096 x 2048, blocks of 8 rows", ["stencil, 8 rows"]),
    ("the same, blocks of 128 rows", ["stencil, 128 rows"]),
]

CAUSAL = "library: flash attention, causal, with its gradient, call"
SPLASH = "library: splash attention, with its gradient, call"
GROUPED = "library: grouped matmul, with its gradient, call"
LIBRARY: list[Row] = [
    ("matmul", ["library: matmul"]),
    ("flash attention", ["library: flash attention"]),
    (
        "flash attention, causal: forward, and the two of its gradient",
        [f"{CAUSAL} {n}" for n in (1, 2, 3)],
    ),
    ("splash attention: the same", [f"{SPLASH} {n}" for n in (1, 2, 3)]),
    ("grouped matmul, and its transpose", [f"{GROUPED} {n}" for n in (1, 2)]),
    ("paged attention", ["library: paged attention"]),
    ("ragged paged attention", ["library: ragged paged attention"]),
    ("threefry", ["library: threefry"]),
    ("all-gather, four devices", ["library: all-gather"]),
]

OF_LIBRARY, GRADIENT = "operation: attention", ", with its gradient"
OPERATIONS: list[Row] = [
    ("`matmul`, 2048", ["operation: matmul"]),
    ("`attention`, of flash attention", [OF_LIBRARY]),
    (
        "the same, causal; with its gradient",
        [f"{OF_LIBRARY}, causal", f"{OF_LIBRARY}, causal{GRADIENT}"],
    ),
    (
        "causal, of splash attention; with its gradient",
        [
            f"{OF_LIBRARY}, causal (splash, counted)",
            f"{OF_LIBRARY}, causal{GRADIENT} (splash, counted)",
        ],
    ),
    (
        "a window of 512, of splash attention; with its gradient",
        [
            f"{OF_LIBRARY}, window (splash, counted)",
            f"{OF_LIBRARY}, window{GRADIENT} (splash, counted)",
        ],
    ),
    ("`grouped_matmul` with its gradient", [f"operation: grouped matmul{GRADIENT}"]),
]


def ours(chip: str, name: str) -> int | None:
    return CYCLES[chip].get(name, {}).get("ours")


def ratio(chip: str, name: str) -> float | None:
    """Of upstream's cycles; None if one of the two was not obtained."""
    row = CYCLES[chip].get(name, {})
    known = "ours" in row and "upstream" in row
    return row["ours"] / row["upstream"] if known else None


def cycles(chip: str, names: Sequence[str]) -> str:
    found = sorted(n for name in names if (n := ours(chip, name)) is not None)
    ends = dict.fromkeys((found[0], found[-1]))
    return " to ".join(f"{n:,}" for n in ends)


def of_upstream(chip: str, names: Sequence[str]) -> str:
    found = [ratio(chip, name) for name in names]
    return ", ".join("no estimate" if r is None else f"{r:.2f}" for r in found)


def portable() -> Iterator[str]:
    heads = " | ".join(f"{chip} | of upstream's" for chip in CHIPS)
    yield f"| kernel, all bf16 but softmax and stencil | {heads} |"
    yield "| " + " | ".join(["---"] * (1 + 2 * len(CHIPS))) + " |"
    for label, names in PORTABLE:
        cells = [f"{cycles(c, names)} | {of_upstream(c, names)}" for c in CHIPS]
        yield f"| {label} | {' | '.join(cells)} |"


def ratios(head: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {head} | {' | '.join(CHIPS)} |"
    yield "| " + " | ".join(["---"] * (1 + len(CHIPS))) + " |"
    for label, names in rows:
        cells = [of_upstream(chip, names) for chip in CHIPS]
        yield f"| {label} | {' | '.join(cells)} |"


def sums() -> Iterator[str]:
    others = ("library", "operation")
    names = [n for n in CYCLES["v5e"] if not n.startswith(others)]
    for chip in CHIPS:
        found = [r for name in names if (r := ratio(chip, name)) is not None]
        mean = exp(sum(map(log, found)) / len(found))
        away = max(most_apart(chip))
        yield (
            f"- {chip}: {mean:.2f} of upstream's cycles (geometric mean of {len(found)}"
            f" rows), {max(found):.2f} at most; whatever block one begins with, at most"
            f" {away:.2f} of the cycles of the best one."
        )


def most_apart(chip: str) -> Iterator[float]:
    """For each kernel with several blocks, the worst of them, of the best one."""
    pages = "paged decode"  # how an array is laid out, not how it is cut
    for label, names in (
        *PORTABLE,
        ("stencil", ["stencil, 8 rows", "stencil, 128 rows"]),
    ):
        found = [n for name in names if (n := ours(chip, name)) is not None]
        if found and not label.startswith(pages):
            yield max(found) / min(found)


def page() -> str:
    """The whole page as text."""
    parts = {
        "portable": portable(),
        "sums": sums(),
        "library": ratios("kernel", LIBRARY),
        "operations": ratios("operation", OPERATIONS),
    }
    text = PAGE.read_text()
    for name, lines in parts.items():
        made = "\n".join(lines)
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        text = re.sub(pattern, rf"\g<1>{made}\g<2>", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
