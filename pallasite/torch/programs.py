"""Compiled programs: a JAX function for operands of one signature, run on tensors.

A program that needs gradients also returns residuals and has a second program for the
backward pass (`derivatives.py`).
"""

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import torch

from pallasite import jaxcompat
from pallasite.torch import tensors

Arrays = Sequence[Any]
Function = Callable[..., Arrays]  # flat arrays to flat arrays

# By name, which is what a torch graph holds. Names are unique to this process: torch
# keeps compiled graphs on disk, and another process has other programs.
programs: weakref.WeakValueDictionary[str, "Program"] = weakref.WeakValueDictionary()
# Programs in torch.compile graphs, which hold only names.
pinned: set["Program"] = set()
_process = f"{os.getpid():x}_{os.urandom(4).hex()}"
_numbers = itertools.count()


@dataclass(frozen=True)
class Backward:
    """How to compute gradients of a program's operands.

    Attributes:
        program: takes residuals, then cotangents of the results that have one; returns
            gradients of the operands in `wanted`.
        residuals: where each is found: ("operand", number) or ("result", number),
            counting the function's own results first, then the returned residuals.
        differentiable: numbers of the results with cotangents.
    """

    program: "Program"
    wanted: tuple[int, ...]
    residuals: tuple[tuple[str, int], ...]
    differentiable: tuple[int, ...]


class Program:
    """A function of arrays of fixed shapes and dtypes on one device, for tensors.

    Attributes:
        results: how many of the returned tensors are the function's own results.
        backward: None if there are no gradients.
    """

    def __init__(
        self, label: str, function: Function, avals: Arrays, device: torch.device
    ):
        self.label, self.avals, self.device = label, tuple(avals), device
        self.name = f"{label}_{_process}_{next(_numbers)}"
        self.jax_device = tensors.jax_device(device)
        with jax.default_device(self.jax_device):
            self.jaxpr = jax.make_jaxpr(lambda *x: list(function(*x)))(*avals)
        self.out_avals = list(self.jaxpr.out_avals)
        self.out_dtypes = [
            tensors.dtype_of(aval, f"number {n} of {label}")
            for n, aval in enumerate(self.out_avals)
        ]
        self.results = len(self.out_avals)
        self.backward: Backward | None = None
        self._computed, self._sources = _sources(self.jaxpr)
        self._run = jax.jit(self._of_arrays)
        self._batched: dict[Any, Program] = {}
        programs[self.name] = self

    def of_arrays(self, *arrays: Any) -> Arrays:
        """The function on arrays, for JAX to trace."""
        return jax.core.eval_jaxpr(*jaxcompat.opened(self.jaxpr), *arrays)

    def _of_arrays(self, *arrays: Any) -> Arrays:
        outs = self.of_arrays(*arrays)
        return [outs[n] for n in self._computed]

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every result in its own memory, as a torch operator requires."""
        made = self._run(*tensors.to_jax(operands, self.jax_device))
        outs = tensors.to_torch(made, self.device)
        of = {"operand": operands, "result": outs}
        return [
            outs[n] if kind == "own" else of[kind][n].detach().clone()
            for kind, n in self._sources
        ]

    def fake(self) -> list[torch.Tensor]:
        """The results' shapes, dtypes and device."""
        pinned.add(self)
        return [
            torch.empty(aval.shape, dtype=dtype, device=self.device)
            for aval, dtype in zip(self.out_avals, self.out_dtypes, strict=True)
        ]

    def batched(self, dims: tuple[int | None, ...], size: int) -> "Program":
        """The program under `torch.vmap`; results have the new dimension first."""
        key = dims, size
        if key not in self._batched:
            avals = [
                aval if dim is None else _with_dimension(aval, dim, size)
                for aval, dim in zip(self.avals, dims, strict=True)
            ]
            function = jax.vmap(self.of_arrays, in_axes=dims, axis_size=size)
            self._batched[key] = Program(self.label, function, avals, self.device)
        return self._batched[key]


def _with_dimension(aval: Any, dim: int, size: int) -> jax.ShapeDtypeStruct:
    shape = (*aval.shape[:dim], size, *aval.shape[dim:])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _sources(closed: Any) -> tuple[list[int], list[tuple[str, int]]]:
    """Which outputs of a jaxpr to compute, and how to make all outputs from those.

    Returns:
        Numbers of the outputs to compute, and for each output: ("own", n) for computed
        output n, ("result", n) for a copy of it, ("operand", n) for a copy of an
        operand.
    """
    jaxpr, _ = jaxcompat.opened(closed)
    computed: list[int] = []
    places: dict[Any, tuple[str, int]] = {
        variable: ("operand", n) for n, variable in enumerate(jaxpr.invars)
    }
    constants = set(jaxpr.constvars)
    sources: list[tuple[str, int]] = []
    for number, out in enumerate(jaxpr.outvars):
        literal = is_literal(out)
        if not literal and out in places:
            sources.append(places[out])
            continue
        place = len(computed)
        computed.append(number)
        # JAX may return a constant's own memory, which torch must not write to.
        sources.append(("result" if not literal and out in constants else "own", place))
        if not literal:
            places[out] = ("result", place)
    return computed, sources


def is_literal(out: Any) -> bool:
    """Whether an output of a jaxpr is a constant, not a variable."""
    return hasattr(out, "val")
