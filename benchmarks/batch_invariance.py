"""What `batch_invariant=True` costs: operations with and without it, on this chip.

    PYTHONPATH=. python benchmarks/batch_invariance.py             # forward
    PYTHONPATH=. python benchmarks/batch_invariance.py --grad      # and gradients
    PYTHONPATH=. python benchmarks/batch_invariance.py matmul      # some, by name

"same bits" says whether a few of the rows alone have the bits that they have among all,
without and with it. On an H200, all forward rows take about half a minute.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels import gradient, normal, seconds
from pallasite import kernels
from pallasite.kernels import masks


class Problem(NamedTuple):
    """An operation, its operands, and how many of these have rows; the first ones."""

    operation: Callable[..., Any]
    operands: Callable[[], Sequence[Any]]
    rows: int = 1
    differentiable: bool = True


def _loss(x, labels, weights, **how):
    loss = kernels.linear_softmax_cross_entropy_loss
    return loss(x, labels, weights, reduction="none", **how)


def problems(big: bool) -> dict[str, Problem]:
    dtype = jnp.bfloat16 if big else jnp.float32
    of = partial(normal, dtype=dtype)
    k, n = (4096, 4096) if big else (256, 512)
    most = 4096 if big else 256
    found: dict[str, Problem] = {}
    gelu = partial(kernels.matmul, activation="gelu")
    for rows in (1, 16, 128, most):
        made = partial(lambda rows: [of(rows, k), of(k, n)], rows)
        found[f"matmul of {rows} rows"] = Problem(kernels.matmul, made)
    found["matmul gelu"] = Problem(gelu, lambda: [of(most, k), of(k, n)])
    gated = lambda x, y, gate, **how: kernels.matmul(x, y, gate=gate, **how)
    found["matmul gate"] = Problem(gated, lambda: [of(most, k), of(k, n), of(k, n)])
    quantized = partial(kernels.quantize_weights, bits=8)
    for rows in (16, 64):
        made = partial(lambda rows: [of(rows, k), quantized(of(k, n))], rows)
        name = f"weight_only_matmul of {rows} rows"
        found[name] = Problem(kernels.weight_only_matmul, made, 1, False)
    words = 32768 if big else 2048
    labels = lambda: jnp.arange(most, dtype=jnp.int32) % words
    found["linear_softmax_cross_entropy_loss"] = Problem(
        _loss, lambda: [of(most, k // 2), labels(), of(k // 2, words)], 2
    )
    for operation in (kernels.rms_norm, kernels.softmax):
        width = [of(n)] if operation is kernels.rms_norm else []
        made = partial(lambda width: [of(most, n), *width], width)
        found[operation.__name__] = Problem(operation, made)
    causal = partial(kernels.attention, mask=masks.Causal())
    shape = (4, 2048, 16, 128) if big else (2, 128, 2, 64)
    found["attention"] = Problem(causal, lambda: [of(*shape)] * 3, 3)
    heads, length = (32, 8192) if big else (8, 512)
    for batch in (1, 64) if big else (1, 8):

        def decoding(batch: int = batch) -> list[Any]:
            cache = of(batch, length, heads // 4, 128)
            lengths = jnp.full(batch, length, jnp.int32)
            return [of(batch, heads, 128), cache, cache, lengths]

        name = f"decode_attention of {batch} sequences"
        found[name] = Problem(kernels.decode_attention, decoding, 4, False)
    return found


def same_bits(run: Callable[..., Any], operands: Sequence[Any], rows: int) -> bool:
    """Whether the last row alone has the bits that it has among all."""
    own = [x[-1:] if n < rows else x for n, x in enumerate(operands)]
    some, whole = (np.asarray(run(*given)) for given in (own, operands))
    return some.tobytes() == whole[-1:].tobytes()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of names; all by default")
    parser.add_argument("--grad", action="store_true", help="gradients, too")
    options = parser.parse_args(argv)
    wanted = lambda name: not options.names or any(n in name for n in options.names)
    head = ("operation", "plain", "invariant", "cost", "same bits")
    print("{:44} {:>10} {:>10} {:>7}  {}".format(*head))
    for name, problem in problems(jax.default_backend() == "gpu").items():
        if not wanted(name):
            continue
        operands = problem.operands()
        plain = jax.jit(problem.operation)
        kept = jax.jit(partial(problem.operation, batch_invariant=True))
        bits = [same_bits(run, operands, problem.rows) for run in (plain, kept)]
        _print(name, {"plain": plain, "kept": kept}, operands, bits)
        if options.grad and problem.differentiable:
            runs = {
                which: jax.jit(gradient(run, operands))
                for which, run in {"plain": plain, "kept": kept}.items()
            }
            cotangents = [jnp.ones_like(jax.eval_shape(plain, *operands))]
            _print(f"gradient of {name}", runs, [cotangents, *operands], ())


def _print(
    name: str, runs: dict[str, Callable], operands: Sequence[Any], bits: Sequence[bool]
) -> None:
    took = seconds(runs, operands)
    plain, kept = (1e6 * took[which] for which in ("plain", "kept"))
    said = ", ".join("yes" if same else "no" for same in bits)
    cost = f"{100 * (kept / plain - 1):.0f}%"
    print(f"{name:44} {plain:7.1f} us {kept:7.1f} us {cost:>7}  {said}", flush=True)


if __name__ == "__main__":
    main()
