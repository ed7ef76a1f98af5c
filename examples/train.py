"""Trains a small language model on this repository's documentation.

Attention, norms, rotary embedding, gated units and the cross entropy are
`pallasite.kernels`, their gradients too; the model is plain functions over a dictionary
of arrays. It is trained on one device, on all of them with the batch divided, and once
more with plain `jnp` in place of the kernels: the three losses must agree.

    python examples/train.py                        # a toy, in seconds
    python examples/train.py --size real --steps 200 --picture loss.svg
"""

import argparse
import dataclasses
import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

# Without an accelerator JAX shows the CPU as eight devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
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
    "toy": (Model(32, 1, 2, 1, 64), 8, 32, 12, 3e-3),
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


@functools.partial(jax.jit, static_argnames=("model", "implementation", "rate"))
def step(
    params: Params,
    state: Params,
    text: jax.Array,
    *,
    model: Model,
    implementation: Implementation,
    rate: float,
):
    loss, grads = jax.value_and_grad(loss_of)(params, text, model, implementation)
    params, state = adam(params, grads, state, rate)
    return params, state, loss


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
    """Weights, the loss of each step, and seconds per step without the first."""
    mesh = jax.make_mesh(
        (devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices]
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put(init(model, jax.random.key(0)), everywhere)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"mean": zeros, "square": zeros, "count": jnp.zeros(())}
    state = jax.device_put(state, everywhere)
    losses: list[jax.Array] = []
    started = time.perf_counter()
    for number, text in enumerate(texts):
        params, state, loss = step(
            params,
            state,
            jax.device_put(jnp.asarray(text), divided),
            model=model,
            implementation=implementation,
            rate=rate,
        )
        losses.append(loss)
        if number == 0:
            loss.block_until_ready()
            started = time.perf_counter()
    seconds = (time.perf_counter() - started) / max(len(texts) - 1, 1)
    return params, [float(loss) for loss in losses], seconds


def picture(curves: dict[str, list[float]], path: Path) -> None:
    """The curves as an SVG: loss against step, with a legend."""
    width, height, edge = 640, 360, 44
    every = [loss for curve in curves.values() for loss in curve]
    low, high = min(every), max(every)
    steps = len(every) // len(curves)
    colours = ("#00796b", "#e65100", "#5e35b1", "#c2185b")

    def point(n: int, loss: float, count: int) -> str:
        x = edge + (width - 2 * edge) * n / max(count - 1, 1)
        y = height - edge - (height - 2 * edge) * (loss - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    right, bottom, steps = width - edge, height - edge, len(every) // len(curves)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{edge} {edge}V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{edge - 36}" y="{edge + 4}">{high:.2f}</text>',
        f'<text x="{edge - 36}" y="{bottom}">{low:.2f}</text>',
        f'<text x="{right - 60}" y="{bottom + 24}">{steps} steps</text>',
    ]
    for row, (name, curve) in enumerate(curves.items()):
        points = " ".join(point(n, loss, len(curve)) for n, loss in enumerate(curve))
        colour, y = colours[row % len(colours)], edge + 18 * row
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" '
            f'stroke-width="2" opacity="0.7"/>',
            f'<text x="{right - 170}" y="{y}" fill="{colour}">{name}</text>',
        ]
    path.write_text("\n".join([*parts, "</svg>\n"]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--steps", type=int, help="1 or more")
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path(tempfile.gettempdir(), "pallasite_loss.svg"),
    )
    options = parser.parse_args(argv)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps is {options.steps}, not 1 or more")
    model, batch, length, steps, rate = SIZES[options.size]
    texts = batches(batch, length, options.steps or steps)
    count = max(n for n in (1, 2, 4, 8) if n <= len(jax.devices()))
    curves: dict[str, list[float]] = {}
    runs: list[tuple[str, int, Implementation]] = [
        ("kernels", 1, "pallasite"),
        ("plain jnp", 1, "xla"),
    ]
    if count > 1:
        runs.append((f"kernels, {count} devices", count, "pallasite"))
    for name, devices, implementation in runs:
        _, curve, seconds = train(model, texts, devices, implementation, rate)
        curves[name] = curve
        print(
            f"{name:<20} loss {curve[0]:.3f} to {curve[-1]:.3f}, "
            f"{1e3 * seconds:.1f} ms per step, "
            f"{batch * length / seconds:,.0f} tokens per second"
        )
    picture(curves, options.picture)
    print(f"the curves are in {options.picture}")
    reference = np.array(curves["plain jnp"])
    for name, curve in curves.items():
        off = np.abs(np.array(curve) - reference).mean()
        assert off < 0.05, f"{name}: the loss is off by {off:.3f}"
    if len(texts) >= steps:  # fewer may be too few to learn anything
        assert reference[-1] < reference[0] - 0.1, "nothing was learned"


if __name__ == "__main__":
    main()
