"""Trains a small language model on this repository's documentation.

Attention, norms, rotary embedding, gated units and the cross entropy are
`pallasite.kernels`, their gradients too; the model is plain functions over a dictionary
of arrays. It is trained on one device, on several with the batch divided, and once more
with plain `jnp` in place of the kernels: the three losses must agree. Kernels matter
most in attention: plain `jnp` writes its scores to memory, forward and backward.

    python examples/train.py                        # a toy, in seconds
    python examples/train.py --size real --steps 200 --picture loss.svg
"""

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

# Without an accelerator JAX shows the CPU as eight devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallasite import kernels
from pallasite.kernels import masks

Params = dict[str, Any]
Implementation = Literal["pallasite", "xla"]
TEXT = Path(__file__).parent.parent / "docs"


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder over bytes."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 256
    dtype: Any = jnp.bfloat16

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SIZES = {  # model, batch, length, steps, learning rate
    "toy": (Model(64, 1, 4, 2, 128), 8, 256, 8, 3e-3),
    "real": (Model(512, 8, 8, 4, 1536), 32, 512, 200, 5e-4),
}


def init(model: Model, key: jax.Array) -> Params:
    """Weights in float32; products take them in the model's dtype."""
    m, keys = model, iter(jax.random.split(key, 2 + 7 * model.layers))

    def matrix(rows: int, columns: int):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    kv_width = m.kv_heads * m.head_width
    return {
        "embedding": matrix(m.vocabulary, m.width) * m.vocabulary**0.5,
        "layers": [
            {
                "attention_norm": jnp.ones(m.width),
                "query": matrix(m.width, m.width),
                "key": matrix(m.width, kv_width),
                "value": matrix(m.width, kv_width),
                "out": matrix(m.width, m.width),
                "mlp_norm": jnp.ones(m.width),
                "gate": matrix(m.width, m.hidden),
                "up": matrix(m.width, m.hidden),
                "down": matrix(m.hidden, m.width),
            }
            for _ in range(m.layers)
        ],
        "norm": jnp.ones(m.width),
        "head": matrix(m.width, m.vocabulary),
    }


def hidden_states(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Callable[..., jax.Array],
    model: Model,
    implementation: Implementation,
) -> jax.Array:
    """What the last layer's head is multiplied with.

    Args:
        tokens, positions: (batch, length).
        attend: `attend(layer, query, key, value)`, with heads as the third dimension.
    """

    def cast(weight: jax.Array) -> jax.Array:
        return weight.astype(model.dtype)

    params = jax.tree.map(cast, params)
    x = params["embedding"][tokens]
    batch, length = tokens.shape
    for number, p in enumerate(params["layers"]):
        h = kernels.rms_norm(x, p["attention_norm"], implementation=implementation)
        query, key, value = (
            (h @ p[name]).reshape(batch, length, -1, model.head_width)
            for name in ("query", "key", "value")
        )
        query, key = (
            kernels.rotary_embedding(each, positions, implementation=implementation)
            for each in (query, key)
        )
        mixed = attend(number, query, key, value)
        x = x + mixed.reshape(batch, length, model.width) @ p["out"]
        h = kernels.rms_norm(x, p["mlp_norm"], implementation=implementation)
        gated = kernels.gated_linear_unit(
            h @ p["gate"], h @ p["up"], implementation=implementation
        )
        x = x + gated @ p["down"]
    return kernels.rms_norm(x, params["norm"], implementation=implementation)


def loss_of(
    params: Params, text: jax.Array, model: Model, implementation: Implementation
) -> jax.Array:
    """The mean cross entropy of each byte of `text` but the first."""
    tokens, labels = text[:, :-1], text[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        del layer
        return kernels.attention(
            query, key, value, mask=masks.Causal(), implementation=implementation
        )

    x = hidden_states(params, tokens, positions, attend, model, implementation)
    return kernels.linear_softmax_cross_entropy_loss(
        x.reshape(-1, model.width),
        labels.reshape(-1),
        params["head"].astype(model.dtype),
        reduction="mean",
        implementation=implementation,
    )


def adam(
    params: Params, grads: Params, state: Params, rate: float
) -> tuple[Params, Params]:
    """One step of Adam; `state` has the two averages and the number of steps."""
    count = state["count"] + 1

    def average(m: jax.Array, g: jax.Array):
        return 0.9 * m + 0.1 * g

    def average_square(v: jax.Array, g: jax.Array):
        return 0.95 * v + 0.05 * g * g

    mean = jax.tree.map(average, state["mean"], grads)
    square = jax.tree.map(average_square, state["square"], grads)

    def moved(w: jax.Array, m: jax.Array, v: jax.Array):
        return w - rate * (m / (1 - 0.9**count)) / (
            jnp.sqrt(v / (1 - 0.95**count)) + 1e-8
        )

    new = jax.tree.map(moved, params, mean, square)
    return new, {"mean": mean, "square": square, "count": count}


def stepper(
    model: Model, mesh: jax.sharding.Mesh, implementation: Implementation, rate: float
) -> Callable[..., Any]:
    """A function of weights, state and texts that makes one step.

    Each device works on its texts. What they exchange is one array, the mean of the
    gradients and of the loss.
    """
    split, everywhere = PartitionSpec("data"), PartitionSpec()

    def step(params: Params, state: Params, text: jax.Array):
        found = jax.value_and_grad(loss_of)(params, text, model, implementation)
        if mesh.size > 1:
            flat, unflatten = ravel_pytree(found)
            flat = jax.lax.pmean(flat, "data")  # pyright: ignore[reportUnknownMemberType]
            found = unflatten(flat)
        loss, grads = found
        params, state = adam(params, grads, state, rate)
        return params, state, loss

    specs = (everywhere, everywhere, split)
    if mesh.size > 1:
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False
        )
    return jax.jit(step)


def batches(batch: int, length: int, steps: int) -> list[np.ndarray]:
    """Pieces of the documentation as bytes, the same in every run."""
    pages = [page.read_bytes() for page in sorted(TEXT.glob("*.md"))]
    text = np.frombuffer(b"\n".join(pages), np.uint8).astype(np.int32)
    generator = np.random.default_rng(0)
    starts = generator.integers(0, len(text) - length, (steps, batch))
    return [np.stack([text[s : s + length + 1] for s in row]) for row in starts]


def train(
    model: Model,
    texts: list[np.ndarray],
    devices: int,
    implementation: Implementation,
    rate: float,
) -> tuple[Params, list[float], float]:
    """Weights, the loss of each step, and seconds of a step, in the median."""
    mesh = jax.make_mesh(
        (devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices]
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put(init(model, jax.random.key(0)), everywhere)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"mean": zeros, "square": zeros, "count": jnp.zeros(())}
    state = jax.device_put(state, everywhere)
    step = stepper(model, mesh, implementation, rate)
    losses: list[float] = []
    seconds: list[float] = []
    for text in texts:
        text = jax.device_put(jnp.asarray(text), divided)
        started = time.perf_counter()
        params, state, loss = step(params, state, text)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    return params, losses, float(np.median(seconds[1:] or seconds))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text, in columns; the first is aligned on the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    return "\n".join(lines)


def plot(
    path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str
) -> None:
    """A picture of curves with a legend, if matplotlib is here."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'pallasite[plot]')")
        return
    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.subplots()
    for style, (name, points) in zip(("-", "--", ":"), curves.items(), strict=False):
        axes.plot(*zip(*points, strict=True), style, label=name)
    axes.set(xlabel=x, ylabel=y)
    axes.legend()
    figure.savefig(path)
    print(f"the curves are in {path}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--steps", type=int, help="1 or more")
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path(tempfile.gettempdir(), "pallasite_train.svg"),
    )
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}, not 1 or more")
    model, batch, length, steps, rate = SIZES[options.size]
    texts = batches(batch, length, options.steps or steps)
    count = len(jax.devices())
    if jax.default_backend() == "cpu":  # more devices than cores only wait in turns
        count = min(count, os.cpu_count() or 1)
    count = max(n for n in (1, 2, 4, 8) if n <= count)
    curves: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    runs: list[tuple[str, int, Implementation]] = [
        ("kernels", 1, "pallasite"),
        ("plain jnp", 1, "xla"),
    ]
    if count > 1:
        runs.append((f"kernels, {count} devices", count, "pallasite"))
    for name, devices, implementation in runs:
        _, curves[name], seconds[name] = train(
            model, texts, devices, implementation, rate
        )
    rows = [
        [
            name,
            f"{curve[0]:.3f} to {curve[-1]:.3f}",
            f"{1e3 * seconds[name]:.1f} ms",
            f"{batch * length / seconds[name]:,.0f}",
            f"{seconds['plain jnp'] / seconds[name]:.2f}",
        ]
        for name, curve in curves.items()
    ]
    head = ["", "loss", "step", "tokens per second", "times plain jnp"]
    print(table(head, rows))
    points = {name: list(enumerate(curve)) for name, curve in curves.items()}
    plot(options.picture, points, "step", "loss")
    reference = np.array(curves["plain jnp"])
    for name, curve in curves.items():
        off = np.abs(np.array(curve) - reference).mean()
        assert off < 0.05, f"{name}: the loss is off by {off:.3f}"
    if len(texts) >= steps:  # fewer may be too few to learn anything
        assert reference[-1] < reference[0] - 0.1, "nothing was learned"


if __name__ == "__main__":
    main()
