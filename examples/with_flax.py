"""A Flax NNX block whose norms and attention are kernels, trained for a few steps."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from pallasite import kernels
from pallasite.kernels import masks


class RMSNorm(nnx.Module):
    """`kernels.rms_norm` with its scale."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        return kernels.rms_norm(x, self.scale[...])


class Block(nnx.Module):
    """Causal self-attention and a gated unit, with residual connections."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.attention_norm, self.unit_norm = RMSNorm(width), RMSNorm(width)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.gate_up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        query, key, value = jnp.moveaxis(
            qkv.reshape(batch, length, 3, self.heads, -1), 2, 0
        )
        mixed = kernels.attention(query, key, value, mask=masks.Causal())
        x = x + self.out(mixed.reshape(batch, length, width))
        gate, up = jnp.split(self.gate_up(self.unit_norm(x)), 2, axis=-1)
        return x + self.down(kernels.gated_linear_unit(gate, up))


def main() -> None:
    x, wanted = jax.random.normal(jax.random.key(0), (2, 2, 16, 32))
    model = Block(32, 2, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Block, optimizer: nnx.Optimizer[Block]) -> jax.Array:
        def loss_of(model: Block) -> jax.Array:
            return jnp.mean((model(x) - wanted) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(10)]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
