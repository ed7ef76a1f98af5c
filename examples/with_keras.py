"""Keras layers (JAX backend) whose forward pass is a kernel, trained by `fit`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

from typing import Any

import keras
import numpy as np

from pallasite import kernels


class RMSNorm(keras.layers.Layer):
    """`kernels.rms_norm` with a trained scale."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.scale: Any = self.add_weight(shape=input_shape[-1:], initializer="ones")

    def call(self, x: Any) -> Any:
        return kernels.rms_norm(x, self.scale.value)


class GatedUnit(keras.layers.Layer):
    """A dense layer to twice the width, gated by half of it."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.dense = width, keras.layers.Dense(2 * width)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.dense.build(input_shape)

    def call(self, x: Any) -> Any:
        gate, up = keras.ops.split(self.dense(x), 2, axis=-1)
        return kernels.gated_linear_unit(gate, up)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.width)


def main() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([RMSNorm(), GatedUnit(32), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
    x = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)
    y = x[:, :1] * x[:, 1:2]
    losses: list[float] = model.fit(x, y, epochs=8, batch_size=32, verbose=0).history[
        "loss"
    ]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
