"""Writes a function with a kernel to a file; another process reads and runs it.

The file holds the emulation for a CPU, plain StableHLO, and the kernel itself as Mosaic
for a TPU. The process that reads it needs JAX alone.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from pallasite import kernels

READER = """
import sys
import jax.export
import numpy as np

program = jax.export.deserialize(bytearray(open("softmax.bin", "rb").read()))
np.save("y.npy", program.call(np.load("x.npy")))
assert "pallasite" not in sys.modules
print(*program.platforms, *program.in_avals)
"""


def main() -> None:
    x = jax.random.normal(jax.random.key(0), (16, 128))
    export = jax.export.export(jax.jit(kernels.softmax), platforms=["cpu", "tpu"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "softmax.bin").write_bytes(export(x).serialize())
        np.save(folder / "x.npy", x)
        command = [sys.executable, "-c", READER]
        said = subprocess.check_output(command, cwd=folder, text=True)
        y = np.load(folder / "y.npy")
    np.testing.assert_allclose(y, jax.nn.softmax(x), rtol=1e-5)
    print(f"read and run by another process, for {said.strip()}")
    assert jnp.allclose(y.sum(-1), 1)


if __name__ == "__main__":
    main()
