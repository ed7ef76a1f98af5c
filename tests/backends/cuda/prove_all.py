"""Proves the bounds of every kernel that `cuda` takes: zoo, forms, library, gradients.

    python -m tests.backends.cuda.prove_all                  # everything, a table
    python -m tests.backends.cuda.prove_all forms matmul     # what has "matmul" in it

Kernels are those of an H200. Nothing is run: `bounds.py` reads their text.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from pallasite import config, sites
from pallasite.backends import base
from pallasite.errors import ChipMemoryError, CompileError, UnsupportedError
from pallasite.ir.nodes import Kernel
from pallasite.target import GPUS
from tests.backends.cuda import bounds
from tests.forms import all_forms
from tests.forms.form import SIZES, gradient
from tests.kernels import test_native_on_gpu as library
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

KINDS = ("zoo", "zoo gradients", "forms", "form gradients", "library")
KINDS += ("library gradients",)
MOST_LINES = 3  # of a kernel


def names(kind: str) -> list[str]:
    """Of the functions of a kind."""
    if kind.startswith("zoo"):
        cases = [
            case for case in all_cases() if kind == "zoo" or "nograd" not in case.tags
        ]
        return [case.name for case in cases]
    if kind.startswith("form"):
        return [form.name for form in all_forms() if form.grad or kind == "forms"]
    without = library.WITHOUT_GRADIENTS if kind == "library gradients" else ()
    return [name for name in library.CASES if name not in without]


def subject(
    kind: str, name: str, size: str = "model"
) -> tuple[Callable, Sequence[Any]]:
    """A function whose kernels are looked at, and what it is traced with.

    `size` is that of forms (`tests/forms/form.py`).
    """
    if kind.startswith("zoo"):
        (case,) = (c for c in all_cases() if c.name == name)
        args = arguments(case, 0)
        run = lambda *a: case.run(*a, interpret=False)
        return (run if kind == "zoo" else gradient(run, args)), args
    if kind.startswith("form"):
        (form,) = (f for f in all_forms() if f.name == name)
        structs, run = form.problem.structs(SIZES[size]), form.make(SIZES[size])
        return (run if kind == "forms" else gradient(run, structs)), structs
    case = library.CASES[name]
    return case if kind == "library" else library.gradient(*case)


def kernels_of(function: Callable, args: Sequence[Any]) -> list[tuple[Kernel, Any]]:
    calls = sites.calls_in(function, *jax.tree.map(jax.typeof, args))
    return list({c.kernel.text: (c.kernel, c.options) for c in calls}.values())


def report(kernel: Kernel, options: Any) -> bounds.Report | None:
    """Of what `cuda` makes of a kernel; None if it does not take it."""
    options = replace(options, chip=GPUS["h200"])
    try:
        compiled = base.Compiled(base.get("cuda"), kernel, options)
        text = compiled["cuda"]
    except (UnsupportedError, ChipMemoryError, CompileError):
        return None
    return bounds.check(text, kernel)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=KINDS, help=", ".join(KINDS))
    parser.add_argument("--only", default="", help="part of a name")
    given = parser.parse_args(arguments)
    complaints = 0
    print(f"{'':18} kernels  other  accesses  proved  guarded  not proved")
    for kind in given.kinds:
        kernels = others = accesses = guarded = outside = 0
        began = time.perf_counter()
        for name in names(kind):
            if given.only not in name:
                continue
            for kernel, options in kernels_of(*subject(kind, name)):
                found = report(kernel, options)
                if found is None:
                    others += 1
                    continue
                kernels += 1
                accesses += found.accesses
                guarded += found.guarded
                outside += len(found.outside)
                for line in found.outside[:MOST_LINES]:
                    print(f"{kind}, {name}, {kernel.name}: {line}", file=sys.stderr)
        proved = accesses - guarded - outside
        print(
            f"{kind:18} {kernels:7} {others:6} {accesses:9} {proved:7} {guarded:8}"
            f" {outside:11}  {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        complaints += outside
    return bool(complaints)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with config.override(target="h200", verify=False):
        sys.exit(main())
