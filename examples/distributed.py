"""One sharded kernel on several processes, and on one: the same results to the bit.

`python examples/distributed.py` starts 2 and then 4 processes on this machine, each
with its share of four CPU devices, and compares with four devices in one process. On
several machines start one process on each with the coordinator's address.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallasite as pl

CASES = ("rows and columns sharded", "contracted dimension sharded")
DEVICES = 4
SIZE, BLOCK = 64, 8


def matmul_kernel(x_ref: Any, y_ref: Any, o_ref: Any):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)


def matmul(x: jax.Array, y: jax.Array):
    block = (BLOCK, BLOCK)
    return pl.pallas_call(
        matmul_kernel,
        out_shape=jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32),
        grid=(SIZE // BLOCK,) * 3,
        in_specs=[
            pl.BlockSpec(block, lambda i, j, k: (i, k)),
            pl.BlockSpec(block, lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec(block, lambda i, j, k: (i, j)),
    )(x, y)


def compute() -> list[np.ndarray]:
    """Products of sharded matrices; the same code on one process and on many."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SIZE, SIZE)).astype(np.float32)
    y = rng.standard_normal((SIZE, SIZE)).astype(np.float32)
    whole = np.round(x * 8), np.round(y * 8)  # sums of these are exact in any order

    def product(x: np.ndarray, y: np.ndarray, spec_x: P, spec_y: P) -> np.ndarray:
        def place(array: np.ndarray, spec: P):
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(
                array.shape, sharding, lambda index: array[index]
            )

        everywhere = NamedSharding(mesh, P())
        result = jax.jit(matmul, out_shardings=everywhere)(
            place(x, spec_x), place(y, spec_y)
        )
        return np.asarray(result.addressable_data(0))

    return [
        product(x, y, P("a"), P(None, "b")),
        product(*whole, P(None, ("a", "b")), P(("a", "b"))),
    ]


def work(rank: int, processes: int, address: str, folder: Path) -> None:
    """One process of several."""
    if processes > 1:
        jax.distributed.initialize(address, processes, rank)
    assert jax.device_count() == DEVICES
    for number, result in enumerate(compute()):
        np.save(folder / f"{processes}-{rank}-{number}.npy", result)


def start(processes: int, folder: Path) -> None:
    """Run this script in several processes and wait for all of them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    kept = [
        f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f
    ]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES // processes),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": " ".join(kept),
    }
    command = [sys.executable, __file__, f"--processes={processes}"]
    command += [f"--address={address}", f"--folder={folder}"]
    said = subprocess.DEVNULL  # gloo counts its peers there; errors go to stderr
    running = [
        subprocess.Popen([*command, f"--rank={rank}"], env=environment, stdout=said)
        for rank in range(processes)
    ]
    try:
        codes = [child.wait(timeout=300) for child in running]
    finally:
        for child in running:
            child.kill()
    if any(codes):
        raise SystemExit(f"{processes} processes: exit codes {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--address", default="")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.rank is not None:
        work(asked.rank, asked.processes, asked.address, asked.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for processes in (1, 2, 4):
            start(processes, folder)
        for processes in (2, 4):
            for number, case in enumerate(CASES):
                one = np.load(folder / f"1-0-{number}.npy")
                for rank in range(processes):
                    many = np.load(folder / f"{processes}-{rank}-{number}.npy")
                    assert one.tobytes() == many.tobytes(), (case, rank)
                print(f"{processes} processes, {case}: equal to the bit")


if __name__ == "__main__":
    main()
