"""What a call of a wrapped function costs on the host, beside `jax.jit` and torch.

Small operands, so that the time is that of the calls themselves; on a GPU nothing waits
for the device between calls. The best of several rounds counts.

    python benchmarks/torch_calls.py
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallasite import kernels

ROUNDS, CALLS = 10, 100


def microseconds(call: Callable[[], Any]) -> float:
    """The time of a call, on average over the best round."""
    call()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / CALLS


def table(device: str) -> dict[str, float]:
    """Microseconds of each way to call an rms norm of (8, 128)."""
    import torch

    import pallasite.torch

    wrapped = pallasite.torch.wrap(kernels.rms_norm)
    x, weight = torch.ones(8, 128, device=device), torch.ones(128, device=device)
    x_grad, weight_grad = (a.clone().requires_grad_() for a in (x, weight))
    where = jax.devices(device)[0]
    arrays = jax.device_put((jnp.ones((8, 128)), jnp.ones(128)), where)
    compiled: Any = jax.jit(kernels.rms_norm)
    own = torch.nn.functional.rms_norm
    return {
        "wrapped": microseconds(lambda: wrapped(x, weight)),
        "wrapped, for gradients": microseconds(lambda: wrapped(x_grad, weight_grad)),
        "wrapped, and backward": microseconds(
            lambda: wrapped(x_grad, weight_grad).sum().backward()
        ),
        "jax.jit": microseconds(lambda: compiled(*arrays).block_until_ready())
        if device == "cpu"
        else microseconds(lambda: compiled(*arrays)),
        "torch": microseconds(lambda: own(x, (128,), weight)),
        "torch, and backward": microseconds(
            lambda: own(x_grad, (128,), weight_grad).sum().backward()
        ),
    }


def main() -> None:
    try:
        import torch
    except ModuleNotFoundError:
        print("torch is not installed: nothing to measure")
        return
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        print(f"microseconds per call on {device}")
        for name, found in table(device).items():
            print(f"  {name:24} {found:8.1f}")


if __name__ == "__main__":
    main()
