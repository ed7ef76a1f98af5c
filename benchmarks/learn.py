"""The kernels of docs/learn, step by step, against XLA: the tables on those pages.

The functions are taken from the pages themselves, so what is timed is what is shown.

    python benchmarks/learn.py                     # on the device that JAX uses
    python benchmarks/learn.py --tpu v5e           # libtpu's estimates, without a TPU
    python benchmarks/learn.py matmul --size 512   # one page, at another size

Prints a table per page and writes benchmarks/results/learn_<chip>.json; pages that were
not run keep their numbers.
"""

import argparse
import ast
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

import pallasite as pl
from benchmarks.cpu import facts
from benchmarks.kernels import distance, seconds
from pallasite import kernels
from pallasite.kernels import masks
from pallasite.target import chip_of_device

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
F32, BF16 = jnp.float32, jnp.bfloat16
SIZES = {"cpu": 1024, "gpu": 4096, "tpu": 4096}


@dataclass(frozen=True)
class Step:
    """One line of a table: a function of a page, and its rival, mostly plain XLA."""

    name: str
    run: Callable[..., Any]
    xla: Callable[..., Any]
    operands: tuple[Shape, ...]
    xla_operands: tuple[Shape, ...] | None = None  # where its layout is another


def definitions(page: str) -> SimpleNamespace:
    """The imports, functions and constants of a page; its examples are not run."""
    path = ROOT / "docs" / "learn" / f"{page}.md"
    tree = ast.parse("".join(BLOCK.findall(path.read_text())))
    kept = [node for node in tree.body if _is_definition(node)]
    names: dict[str, Any] = {"__name__": page}
    exec(compile(ast.Module(kept, []), str(path), "exec"), names)
    return SimpleNamespace(**names)


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)


def matmul_steps(size: int) -> Iterator[Step]:
    page = definitions("matmul")
    wide, narrow = ((Shape((size, size), dtype),) * 2 for dtype in (F32, BF16))
    # Kernels multiply float32 exactly; so does XLA only if it is told to.
    exact = lambda x, y: jnp.dot(x, y, precision="highest")
    yield Step("one element per program", page.one_element, exact, wide)
    yield Step("blocks of 128 x 128", page.in_blocks, exact, wide)
    yield Step("sum over k in scratch", page.matmul, exact, wide)
    yield Step("bfloat16", page.matmul, jnp.dot, narrow)

    def plain_layer(x, y, bias):
        total = jnp.dot(x, y, preferred_element_type=F32) + bias
        return jax.nn.gelu(total).astype(x.dtype)

    def library(x, y, bias):
        return kernels.matmul(x, y, bias=bias, activation="gelu")

    operands = (*narrow, Shape((size,), BF16))
    yield Step("bias and gelu inside", page.layer, plain_layer, operands)
    yield Step("`kernels.matmul`", library, plain_layer, operands)


def softmax_steps(size: int) -> Iterator[Step]:
    page = definitions("softmax")
    operands = (Shape((size, size), F32),)
    yield Step("softmax", page.softmax, jax.nn.softmax, operands)
    of_sum = lambda f: jax.grad(lambda x: (f(x) * x).sum())
    yield Step("its gradient", of_sum(page.softmax), of_sum(jax.nn.softmax), operands)


def attention_steps(size: int) -> Iterator[Step]:
    page = definitions("flash_attention")
    heads, depth = 8, 64
    ours = (Shape((heads, size // 2, depth), BF16),) * 3
    theirs = (Shape((1, size // 2, heads, depth), BF16),) * 3

    def library(q, k, v):
        return kernels.attention(q, k, v, mask=masks.Causal())

    def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
        loss = lambda *qkv: (f(*qkv).astype(F32) ** 2).sum()
        return jax.grad(loss, argnums=(0, 1, 2))

    plain, flash = page.plain, page.flash
    yield Step("flash", flash, plain, ours)
    yield Step("`kernels.attention`", library, plain, theirs, ours)
    yield Step("flash, gradient", gradient(flash), gradient(plain), ours)
    name = "`kernels.attention`, gradient"
    yield Step(name, gradient(library), gradient(plain), theirs, ours)


def performance_steps(size: int) -> Iterator[Step]:
    """Mistakes and what mends them: the rival is the kernel with the mistake."""
    page = definitions("performance")
    square = (Shape((size, size), F32),)
    yield Step("sequential axis", page.total_in_parts, page.total, square)
    edge = (Shape((size + 16, 512), F32),)
    tall = functools.partial(page.wave, rows=size)
    fitting = functools.partial(page.wave, rows=(size + 16) // 4)
    yield Step("blocks past the edge", fitting, tall, edge)


PAGES = {
    "matmul": matmul_steps,
    "softmax": softmax_steps,
    "flash_attention": attention_steps,
    "performance": performance_steps,
}


def timed(step: Step) -> dict[str, Any]:
    """Milliseconds of the step and of XLA, taking turns, and how far they differ."""
    ours = made_up(step.operands)
    theirs = ours if step.xla_operands is None else made_up(step.xla_operands)
    jitted = jax.jit(step.run), jax.jit(step.xla)
    functions = {"ms": lambda: jitted[0](*ours), "xla_ms": lambda: jitted[1](*theirs)}
    row: dict[str, Any] = {
        name: round(1e3 * t, 4) for name, t in seconds(functions, ()).items()
    }
    if step.xla_operands is None:
        row["distance"] = distance(*(run() for run in functions.values()))
    return row


def made_up(shapes: tuple[Shape, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(key, shape.shape, shape.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def estimated(step: Step, chip: str) -> dict[str, Any]:
    """libtpu's estimate of cycles of the step's kernels; nothing was measured."""
    report = pl.aot(step.run, *step.operands).compile(f"tpu:{chip}", timeout=280)
    cycles = [k.estimate.cycles for k in report.kernels if k.estimate]
    known = [each for each in cycles if each is not None]
    if len(known) < len(report.kernels):
        return {"cycles": None, "why": str(report)[-600:]}
    # Of some kernels only the code is known, which is no estimate of a call.
    notes = [k.note for k in report.kernels if k.note]
    return {"cycles": None, "why": notes[0]} if notes else {"cycles": sum(known)}


def shown(row: dict[str, Any]) -> str:
    if "failed" in row:
        return "failed"
    if "cycles" in row:
        return f"{row['cycles']:,} cycles" if row["cycles"] else "no estimate"
    ratio = row["xla_ms"] / row["ms"]
    return f"{row['ms']:.3g} ms | {row['xla_ms']:.3g} ms | {ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help=", ".join(PAGES))
    parser.add_argument("--size", type=int, help="default: by the kind of chip")
    parser.add_argument("--tpu", default="", help="v5e, v6e, ...: by estimate")
    parser.add_argument("--python", default="", help="another that has libtpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.python:
        os.environ["PALLASITE_LIBTPU_PYTHON"] = asked.python
    platform = "tpu" if asked.tpu else jax.default_backend()
    size = asked.size or SIZES[platform]
    device = chip_of_device(jax.devices()[0].device_kind)
    chip = asked.tpu or (device.name if device else platform)
    path = asked.results / f"learn_{chip}.json"
    old = json.loads(path.read_text())["pages"] if path.exists() else {}
    found: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "jax": metadata.version("jax"),
        "chip": facts()["chip"] if platform == "cpu" else chip,
        "pages": old,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    for page in asked.pages or PAGES:
        print(f"\n{page}, size {size}, {chip} (ours, XLA, times as fast)", flush=True)
        rows: dict[str, Any] = {}
        found["pages"][page] = {"size": size, "steps": rows}
        for step in PAGES[page](size):
            try:
                row = estimated(step, asked.tpu) if asked.tpu else timed(step)
            except Exception as error:  # one step that fails leaves the others
                row = {"failed": str(error)[:600]}
            rows[step.name] = row
            print(f"| {step.name} | {shown(row)} |", flush=True)
            if "failed" in row or row.get("why"):
                print(row.get("failed") or row["why"], flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
