"""What a form becomes on a chip that need not be here: its kernels, how many programs
each has, and their estimated time beside the least that any code takes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.backends import base
from pallasite.errors import PallasError
from pallasite.ir.nodes import Block, Kernel
from pallasite.passes.analysis.cost import bytes_of, most_trips
from pallasite.passes.analysis.grid import analyze
from pallasite.passes.analysis.work import count
from pallasite.primitive import on_arrays, wants_emulation
from pallasite.sites import in_parts, sites_in
from pallasite.target import Chip, host, named
from pallasite.target.machine import Machine
from pallasite.tools.traces import traced_for

Row = dict[str, Any]
MOST_TRIPS = 1 << 24
ROUNDS_AHEAD = 1e-7  # seconds of a round of a loop, at least: latency of its chain


def plan(function: Callable, structs: Sequence[Any], target: str) -> Row:
    """Kernels of a function on a chip, and what planning took."""
    chip, start = named(target), time.perf_counter()
    rows: list[Row] = []
    for site in traced_for(chip, partial(sites_in, function, *structs)):
        platform = "cuda" if chip.platform == "gpu" else chip.platform
        known = chip.chip if isinstance(chip.chip, Chip) else None
        if on_arrays(site.call, platform, known) is not None:
            moved = sum(bytes_of(param.ref) for param in site.call.kernel.params)
            seconds = Machine.usual(chip.chip or host()).copying(moved)
            rows.append({"backend": "xla", "seconds": seconds, "programs": 0})
            continue
        parts = in_parts(site, platform, chip.chip)
        rows += [{**kernel_row(p.call, chip), "times": site.times} for p in parts]
    seconds = sum(row["seconds"] * (row.get("times") or 1) for row in rows)
    return {
        "kernels": rows,
        "estimate": seconds,
        "planning": round(time.perf_counter() - start, 2),
    }


def kernel_row(call: Any, target: Any) -> Row:
    """What a backend makes of one call."""
    if wants_emulation(call):
        return {"backend": "interpret", "seconds": 0.0, "programs": 0}
    refused: list[str] = []
    for name in base.defaults(target.platform, call.kernel):
        options = call.options
        compiled = base.Compiled(
            base.get(name), call.kernel, replace(options, chip=target.chip)
        )
        try:
            compiled[list(compiled)[1]]  # the first text that it emits
        except (PallasError, ImportError) as error:
            refused.append(f"{name}: {getattr(error, 'what', error)}"[:160])
            continue
        kernel = compiled.scheduled
        return {"backend": name, **estimate(kernel, target.chip), "refused": refused}
    return {
        "backend": "interpret",
        "seconds": 0.0,
        "programs": 0,
        "refused": refused,
    }


def estimate(kernel: Kernel, chip: Any) -> Row:
    """Seconds by the machine model: units and memory overlap, idle cores do not."""
    work, machine = count(kernel), Machine.usual(chip or host())
    axes = analyze(kernel).axes
    programs = prod(axis.size or 1 for axis in axes if axis.parallel)
    serial = prod(axis.size or 1 for axis in axes if not axis.parallel)
    busy = machine.multiplying_all(work.products)
    busy += machine.computing(work.arithmetic + work.other / 2, work.transcendentals)
    turns = -(-programs // machine.cores)
    idle = turns * machine.cores / max(programs, 1)
    again = work.bytes - work.distinct_bytes
    memory = machine.copying(work.distinct_bytes) + machine.reading_cache(again)
    at_once = min(max(programs, 1), machine.at_once)
    rounds = deepest(kernel) * serial * -(-programs // machine.at_once)
    waits = work.bytes / 2**15 / at_once * machine.latency
    seconds = max(busy * idle, memory, waits, rounds * ROUNDS_AHEAD) + machine.launch
    name = {"name": kernel.name, "programs": programs, "serial": serial}
    return {**name, "rounds": rounds, "seconds": seconds, "bytes": work.bytes}


def deepest(kernel: Kernel) -> int:
    """Rounds of the longest chain of loops of one program, where data do not decide."""
    trips = most_trips(kernel)

    def of(block: Block) -> int:
        regions = [(trips.get(op, 1), r) for op in block.ops for r in op.regions]
        # A bound on what data decides says nothing.
        known = lambda times: max(times, 1) if times < MOST_TRIPS else 1
        return max((known(times) * of(region) for times, region in regions), default=1)

    return of(kernel.body)


def least(reference: Callable, structs: Sequence[Any], chip: Any, dtype: Any) -> float:
    """Seconds that any code takes: operands and results once, and the matmuls."""
    machine = Machine.peak(chip or host())
    jaxpr = jax.make_jaxpr(reference)(*structs)
    values = [*jaxpr.in_avals, *jaxpr.out_avals]
    moved = sum(v.size * jnp.dtype(v.dtype).itemsize for v in values)
    products = _products(jaxpr.jaxpr)
    kind = "bf16" if dtype == jnp.bfloat16 else "f32"
    return max(machine.copying(moved), machine.multiplying_all({kind: products}))


def _products(jaxpr: Any) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            depth = prod(shape[n] for n in contract)
            total += 2.0 * prod(eqn.outvars[0].aval.shape) * depth
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    total += times * _products(inner)
    return total
