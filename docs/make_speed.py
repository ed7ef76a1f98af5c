"""Fills the tables of speed in the pages from `benchmarks/results`, and draws charts.

A table stands between `<!-- speed: NAME -->` and `<!-- end -->` in a page. `python
docs/make_speed.py` writes all of them again; a test fails if one is out of date.
"""

import json
import re
import runpy
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
BENCHMARKS = runpy.run_path(str(DOCS / "make_benchmarks.py"))
PAGES = (
    "benchmarks",
    "index",
    "tpu_speed",
    "gpu",
    "kernels_attention",
    "kernels_caches",
    "kernels_devices",
    "kernels_products",
    "kernels_rows",
    "learn/flash_attention",
    "learn/matmul",
    "learn/softmax",
)
TPUS = ("v5e", "v6e", "v5p")
FAMILIES = {  # the operations of each page, by how the names of their rows begin
    "attention": ("attention",),
    "caches": ("decode", "paged", "ragged", "latent", "update"),
    "devices": ("all_gather", "all-gather", "matmul_reduce", "ring", "expert_parallel"),
    "products": (
        "matmul",
        "weight_only",
        "block_scaled",
        "grouped",
        "mixture",
        "route",
        "permute",
        "unpermute",
        "sort_by_expert",
        "linear_softmax",
    ),
}

Rows = dict[str, dict[str, Any]]


def results(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def in_family(name: str, family: str) -> bool:
    """Whether a row is of this family; rows that no other one has are of `rows`."""
    if family != "rows":
        prefixes = FAMILIES[family]
        longer = [p for own in FAMILIES.values() for p in own if name.startswith(p)]
        return bool(longer) and max(longer, key=len) in prefixes
    return not any(in_family(name, each) for each in FAMILIES)


# --- TPUs, by estimated cycles ---


def cycles(part: str) -> str:
    """Rows of one part of `tpu.json`: "source", "library" or "operation"."""
    chips = results("tpu")["cycles"]
    names = list(dict.fromkeys(name for chip in TPUS for name in chips[chip]))
    prefix = f"{part}: "
    if part == "source":
        names, prefix = [n for n in names if ": " not in n], ""
    else:
        names = [n for n in names if n.startswith(prefix)]
    head = ["kernel", *(c for chip in TPUS for c in (chip, "of upstream's"))]
    rows = [
        [
            name.removeprefix(prefix),
            *(cell for chip in TPUS for cell in against_upstream(chips[chip], name)),
        ]
        for name in names
    ]
    return table(head, rows)


def against_upstream(rows: Rows, name: str) -> tuple[str, str]:
    row = rows.get(name, {})
    ours, theirs = row.get("ours"), row.get("upstream")
    ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
    return f"{ours:,}" if ours else "", ratio


# --- the library beside XLA and torch ---


def beside(file: str, family: str = "") -> str:
    """Operations of one chip, forward and then gradients; without a family, all."""
    found = results(file)
    rivals = ["ours", "XLA", "times faster", "torch", "times faster"]
    head = ["operation", "operands", *rivals]
    rows = [
        [label(name, gradient), row.get("operands", ""), *times(row)]
        for gradient, part in ((False, "rows"), (True, "gradients"))
        for name, row in found.get(part, {}).items()
        if not family or in_family(name, family)
    ]
    width = max((n for row in rows for n, cell in enumerate(row, 1) if cell), default=0)
    return table(head[:width], [row[:width] for row in rows]) if rows else ""


def label(name: str, gradient: bool) -> str:
    return f"gradient of {name}" if gradient else name


def times(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['ms']:.3g} ms"
    yield f"{row['xla ms']:.3g}"
    yield f"{row['times faster']:.2f}"
    yield f"{row['torch ms']:.3g}" if "torch ms" in row else ""
    faster = row.get("times faster than torch")
    yield f"{faster:.2f}" if faster else ""


def family(name: str) -> str:
    """The operations of a family, chip by chip."""
    chips = {"kernels_h200": "H200, bf16", "kernels_cpu": "CPU"}
    parts = []
    for file, chip in chips.items():
        if made := beside(file, name):
            about = results(file)
            where = f", {about['chip']}" if "chip" in about else ""
            parts.append(f"{chip}{where}:\n\n{made}")
    return "\n".join(parts)


# --- the kernels of docs/learn ---


def learned(page: str) -> str:
    """The steps of a page beside XLA on a CPU and an H200, and a TPU's estimates."""
    files = ("learn_cpu", "learn_h200", "learn_v5e")
    cpu, h200, v5e = (results(f)["pages"][page]["steps"] for f in files)
    head = ["step", "CPU", "XLA", "H200", "XLA", "v5e, cycles"]
    rows = [
        [
            step,
            *(cell for chip in (cpu, h200) for cell in beside_xla(chip.get(step, {}))),
            f"{found:,}"
            if (found := v5e.get(step, {}).get("cycles"))
            else "no estimate",
        ]
        for step in cpu
    ]
    return table(head, rows)


def beside_xla(row: dict[str, Any]) -> list[str]:
    return [f"{row[key]:.3g} ms" if key in row else "" for key in ("ms", "xla_ms")]


def made(name: str) -> str:
    kind, _, rest = name.partition(" ")
    makers = {
        "bench": lambda part: BENCHMARKS["TABLES"][part](),
        "tpu": cycles,
        "library": beside,
        "family": family,
        "learn": learned,
    }
    return makers[kind](rest)


def filled(text: str) -> str:
    """A page with all of its tables made again."""
    form = re.compile(r"(<!-- speed: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
    return form.sub(lambda m: f"{m[1]}\n{made(m[2])}\n{m[3]}", text)


def main() -> None:
    for page in PAGES:
        path = DOCS / f"{page}.md"
        path.write_text(filled(path.read_text()))
    for name, drawn in BENCHMARKS["charts"]().items():
        (DOCS / "pictures" / name).write_text(drawn)


if __name__ == "__main__":
    main()
