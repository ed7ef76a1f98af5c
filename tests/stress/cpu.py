"""Many threads call kernels at once, for a while: no wrong result, no hang, no leak.

    python -m tests.stress.cpu --seconds 600

Threads call different kernels of the zoo, some without waiting for the result before
the next call, inside loops, under vmap, and on eight devices at once with a collective
between; one compiles new kernels. Every result is compared with the first, and that
with the reference. Memory is looked at once there is nothing left to compile, and at
the end.
"""

import argparse
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    devices = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import pallasite as pl
from tests.zoo import Case, all_cases

CASES = (
    "add_vectors",
    "matmul_accumulate",
    "flash_scratch",
    "row_softmax",
    "histogram_atomic_vector",
    "linear_recurrence",
    "paged_decode",
)
IN_FLIGHT = 4  # calls a thread starts before it looks at a result
MOST_GROWTH = 48 << 20  # bytes of memory between warm-up and end
STUCK = 120.0  # seconds without a result

Job = Callable[[], None]


def close(case: Case, got, want) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(
        np.allclose(
            np.asarray(g, np.float64), np.asarray(w, np.float64), case.rtol, case.atol
        )
        for g, w in pairs
    )


def case_job(case: Case) -> Job:
    """Calls one after another, several in flight."""
    args = case.make_args(np.random.default_rng(3))
    call = jax.jit(lambda *args: case.run(*args, interpret=False))
    want = jax.tree.map(np.asarray, call(*args))
    assert close(case, want, jax.jit(case.reference)(*args)), case.name

    def job() -> None:
        for got in [call(*args) for _ in range(IN_FLIGHT)]:
            assert close(case, got, want), case.name

    return job


def scale_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2.0 + pl.program_id(0).astype(jnp.float32)


def scale(x: jax.Array, block: int = 8) -> jax.Array:
    """Enough work for several threads."""
    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        scale_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=pl.cdiv(x.shape[0], block),
        in_specs=[spec],
        out_specs=spec,
    )(x)


def loop_job() -> Job:
    """Calls inside XLA's own loops, one of them mapped."""

    @jax.jit
    def call(x):
        doubled, _ = jax.lax.scan(lambda c, _: (scale(c) * 0.5, c[0, 0]), x, length=20)
        return doubled, jax.vmap(scale)(jnp.stack([x, x + 1]))

    x = jnp.arange(512.0 * 256).reshape(512, 256)
    want = jax.tree.map(np.asarray, call(x))

    def job() -> None:
        jax.tree.map(np.testing.assert_array_equal, call(x), want)

    return job


def sharded_job() -> Job:
    """Every device runs the kernel, with a collective before and after."""
    mesh = Mesh(np.array(jax.devices("cpu")), ("d",))

    def each(x):
        total = jax.lax.psum(x[0, 0], "d")
        return jax.lax.pmean(scale(x + 0 * total), "d")

    spread = jax.shard_map(
        each,
        mesh=mesh,
        in_specs=PartitionSpec("d"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    call = jax.jit(spread)
    x = jnp.arange(512.0 * 128).reshape(512, 128)
    want = np.asarray(call(x))

    def job() -> None:
        np.testing.assert_array_equal(call(x), want)

    return job


def compile_job(most: int) -> Job:
    """Kernels nobody has compiled before; code is never freed, so not for ever."""
    made = [0]

    def job() -> None:
        made[0] += 1
        if made[0] > most:
            time.sleep(0.01)
            return
        n = 8 + made[0]
        x = jnp.ones((n, 16))
        got = jax.jit(lambda x: scale(x, 4))(x)
        want = 2.0 + np.arange(n) // 4
        np.testing.assert_array_equal(got[:, 0], want)

    return job


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Worker(threading.Thread):
    """Runs a job again and again until told to stop."""

    def __init__(self, name: str, job: Job, stop: threading.Event):
        super().__init__(name=name, daemon=True)
        self.job, self.stop_event = job, stop
        self.rounds, self.last, self.error = 0, time.monotonic(), ""

    def run(self) -> None:
        while not self.stop_event.is_set():
            try:
                self.job()
            except Exception:
                self.error = traceback.format_exc()
                self.stop_event.set()
            self.rounds, self.last = self.rounds + 1, time.monotonic()


def jobs(new_kernels: int) -> dict[str, list[Job]]:
    cases = {case.name: case for case in all_cases()}
    made = {name: [case_job(cases[name])] for name in CASES}
    # The same kernel from two threads, too.
    made["flash_scratch"] *= 2
    made["histogram_atomic_vector"] *= 2
    return {
        **made,
        "loops": [loop_job()],
        "eight devices": [sharded_job()],
        "compiling": [compile_job(new_kernels)],
    }


def _look(workers: list[Worker], pause: float) -> None:
    """Wait a little; everybody must have moved not too long ago."""
    time.sleep(pause)
    for worker in workers:
        stuck = time.monotonic() - worker.last
        assert stuck < STUCK, f"{worker.name}: nothing for {stuck:.0f} s"


def stress(seconds: float, new_kernels: int) -> str:
    """Run everything at once; a report, or an AssertionError."""
    random.seed(0)
    stop = threading.Event()
    named = jobs(new_kernels).items()
    workers = [Worker(name, job, stop) for name, group in named for job in group]
    for worker in workers:
        worker.start()
    compiling = next(w for w in workers if w.name == "compiling")
    while compiling.rounds < new_kernels and not stop.is_set():
        _look(workers, 0.1)
    started, warm, most = time.monotonic(), 0, 0
    while time.monotonic() - started < seconds and not stop.is_set():
        _look(workers, min(1.0, seconds / 20))
        now = resident_bytes()
        if time.monotonic() - started < seconds / 3:
            warm = max(warm, now)
        most = max(most, now)
    stop.set()
    for worker in workers:
        worker.join(STUCK)
        assert not worker.is_alive(), f"{worker.name} hangs"
        assert not worker.error, f"{worker.name}: {worker.error}"
    last = resident_bytes()
    rounds = ", ".join(f"{w.name} {w.rounds}" for w in workers)
    sizes = f"warm {warm >> 20} MiB, most {most >> 20} MiB, end {last >> 20} MiB"
    report = f"{seconds:.0f} s, {len(workers)} threads"
    report += f"; rounds: {rounds}; memory: {sizes}"
    assert last - warm < MOST_GROWTH, f"memory grows: {report}"
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--new-kernels", type=int, default=40)
    args = parser.parse_args()
    print(stress(args.seconds, args.new_kernels))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
