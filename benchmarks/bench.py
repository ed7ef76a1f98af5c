"""The library beside XLA, cuDNN, torch and Tokamax, where they are here: one command.

    pallasite bench                              # everything, forward and gradients
    pallasite bench softmax attention            # those with these in their names
    pallasite bench --save results               # a folder for JSON and charts

The numbers are those of `benchmarks/kernels.py` and `benchmarks/beside_tokamax.py`; the
charts those of docs/benchmarks.md.
"""

import argparse
import importlib.util
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

from benchmarks import kernels  # noqa: E402
from pallasite.errors import one_of  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    lines = (__doc__ or "").split("\n")
    parser = argparse.ArgumentParser(prog="pallasite bench", description=lines[0])
    parser.add_argument("names", nargs="*", help="parts of names; all by default")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--rounds", type=int, default=7, help="of calls, on a CPU")
    parser.add_argument(
        "--save", type=Path, default=Path("bench"), help="a folder; default: bench"
    )
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    known = kernels.problems()
    for name in options.names:
        if not any(name in problem for problem in known):
            parser.error(f"nothing has {name!r} in its name: {one_of(name, known)}")
    if options.save.exists() and not options.save.is_dir():
        parser.error(f"--save {options.save} is a file: name a folder")
    options.save.mkdir(parents=True, exist_ok=True)
    kind = jax.devices()[0].device_kind.removeprefix("NVIDIA ").lower()
    chip = re.sub(r"\W+", "_", kind)
    saved = str(options.save / f"kernels_{chip}.json")
    for part in ([], ["--grad"])[: 1 if options.forward else 2]:
        print("gradients:" if part else "forward:", flush=True)
        kernels.main(
            [*options.names, *part, f"--rounds={options.rounds}", "--save", saved]
        )
    if jax.default_backend() == "gpu" and importlib.util.find_spec("tokamax"):
        from benchmarks import beside_tokamax

        print("beside Tokamax:", flush=True)
        saved = str(options.save / f"tokamax_{chip}.json")
        beside_tokamax.main([*options.names, "--save", saved])
    draw = runpy.run_path(str(ROOT / "docs" / "make_benchmarks.py"))
    for name, text in draw["charts"](options.save).items():
        (options.save / name).write_text(text)
    print(f"numbers and charts are in {options.save}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
