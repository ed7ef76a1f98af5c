"""Operations of `pallasite.kernels` beside Tokamax's own kernels, on this GPU.

Both run interleaved in one process, by the time of their kernels, on the operands of
`benchmarks/kernels.py`. Tokamax's "triton" and "mosaic" kernels are asked for by name,
with the configurations it picks by itself; what it does not have, or what does not run
here, prints its reason.

    python benchmarks/beside_tokamax.py                # needs tokamax and jax_triton
    python benchmarks/beside_tokamax.py norm --save results/tokamax_h200.json
"""

import argparse
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks import kernels as ours
from pallasite import kernels
from pallasite.kernels import masks

RIVALS = ("triton", "mosaic")
Row = tuple[Callable, Callable, Callable[[], Sequence[Any]]]


def tokamax() -> Any:
    """The package. Its tool for profiles is imported with it, and not used here."""
    name = "xprof.cli.tools"
    try:
        importlib.import_module(name)
    except ImportError:
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:n])] = types.ModuleType(parts[n - 1])
        tool: Any = types.ModuleType("get_kernel_stats_tool")
        vars(sys.modules[name])["get_kernel_stats_tool"] = tool
    return importlib.import_module("tokamax")


def rows() -> dict[str, Row]:
    """By name: ours, Tokamax's (which takes `implementation=`), their operands."""
    rival = tokamax()
    bf16 = jnp.bfloat16
    problems: dict[str, ours.Problem] = {}
    for family in (
        ours.rows_problems,
        ours.product_problems,
        ours.attention_problems,
    ):
        problems |= family(True, bf16)

    def rms(x, w, **how):
        return rival.layer_norm(x, w, None, subtract_mean=False, **how)

    def gated(x, y, g, **how):
        return rival.gated_linear_unit(x, (g, y), activation=jax.nn.swish, **how)

    def our_gated(x, y, g):
        return kernels.matmul(x, y, gate=g, activation="swish")

    causal = partial(kernels.attention, mask=masks.Causal())
    theirs = {
        "rms_norm": (kernels.rms_norm, rms),
        "layer_norm": (kernels.layer_norm, rival.layer_norm),
        "matmul gate": (our_gated, gated),
        "grouped_matmul 8": (kernels.grouped_matmul, rival.ragged_dot),
        "grouped_matmul 64": (kernels.grouped_matmul, rival.ragged_dot),
        "attention": (kernels.attention, rival.dot_product_attention),
        "attention causal, grouped heads": (
            causal,
            partial(rival.dot_product_attention, is_causal=True),
        ),
    }
    return {name: (*both, problems[name].operands) for name, both in theirs.items()}


def measure(row: Row) -> dict[str, Any]:
    own, rival, make = row
    operands = make()
    functions = {"ours": jax.jit(own)}
    want = jax.block_until_ready(functions["ours"](*operands))
    found: dict[str, Any] = {}
    for kind in RIVALS:
        function = jax.jit(partial(rival, implementation=kind))
        try:
            got = jax.block_until_ready(function(*operands))
        except Exception as error:  # not there for this operation, or not on this chip
            found[f"{kind} failed"] = f"{type(error).__name__}: {str(error)[:160]}"
            continue
        found[f"{kind} distance"] = ours.distance(got, want)
        functions[kind] = function
    times = ours.seconds(functions, operands)
    return {**{f"{n} ms": 1e3 * t for n, t in times.items()}, **found}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all by default")
    parser.add_argument("--save", type=Path, help="a JSON file for the numbers")
    options = parser.parse_args(argv)
    found = {}
    for name, row in rows().items():
        if options.names and not any(part in name for part in options.names):
            continue
        found[name] = measure(row)
        shown = ", ".join(
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} ({v})"
            for k, v in found[name].items()
        )
        print(f"{name:32} {shown}", flush=True)
    if options.save:
        ours.save(options.save, "rows", found, tokamax=tokamax().__version__)


if __name__ == "__main__":
    main()
