"""Proves the bounds of every kernel that `cuda` takes: zoo, forms, library, gradients.

    python -m tests.backends.cuda.prove_all                  # everything, a table
    python -m tests.backends.cuda.prove_all forms matmul     # what has "matmul" in it

Kernels are those of an H200. Nothing is run: `bounds.py` reads their text.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
Subject = tuple[str, Callable, Sequence[Any]]


def subjects(kind: str) -> Iterator[Subject]:
    """Functions whose kernels are looked at, with what they are traced with."""
    if kind.startswith("zoo"):
        for case in all_cases():
            args = arguments(case, 0)
            run = lambda *a, case=case: case.run(*a, interpret=False)
            if kind == "zoo":
                yield case.name, run, args
            elif "nograd" not in case.tags:
                yield case.name, gradient(run, args), args
    elif kind.startswith("form"):
        size = SIZES["model"]
        for form in all_forms():
            structs, run = form.problem.structs(size), form.make(size)
            if kind == "forms":
                yield form.name, run, structs
            elif form.grad:
                yield form.name, gradient(run, structs), structs
    else:
        for name, case in library.CASES.items():
            if kind == "library":
                yield (name, *case)
            elif name not in library.WITHOUT_GRADIENTS:
                yield (name, *library.gradient(*case))


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
        for name, function, args in subjects(kind):
            if given.only not in name:
                continue
            for kernel, options in kernels_of(function, args):
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
