"""An Equinox module around `kernels.layer_norm` and `kernels.attention`, with vmap.

The module is written for one sequence; `jax.vmap` adds the batch to its kernels.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from pallasite import kernels


class Attention(eqx.Module):
    """Self-attention of one sequence, (length, width), after a layer norm."""

    scale: jax.Array
    bias: jax.Array
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, key: jax.Array):
        first, second = jax.random.split(key)
        self.scale, self.bias = jnp.ones(width), jnp.zeros(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=first)
        self.out = eqx.nn.Linear(width, width, key=second)
        self.heads = heads

    def __call__(self, x: jax.Array, implementation: str = "pallasite") -> jax.Array:
        how = {"implementation": implementation}
        length, width = x.shape
        normed = kernels.layer_norm(x, self.scale, self.bias, **how)
        qkv = jax.vmap(self.qkv)(normed).reshape(1, length, 3, self.heads, -1)
        query, key, value = jnp.moveaxis(qkv, 2, 0)
        mixed = kernels.attention(query, key, value, **how)
        return x + jax.vmap(self.out)(mixed.reshape(length, width))


@eqx.filter_value_and_grad
def loss_of(model: Attention, x: jax.Array, implementation: str) -> jax.Array:
    y = jax.vmap(lambda sequence: model(sequence, implementation))(x)
    return jnp.mean(y**2)


def main() -> None:
    model = Attention(32, 2, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 16, 32))
    loss, grads = eqx.filter_jit(loss_of)(model, x, "pallasite")
    plain_loss, plain_grads = eqx.filter_jit(loss_of)(model, x, "xla")
    assert abs(loss - plain_loss) < 1e-5
    for grad, plain in zip(
        jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True
    ):
        assert jnp.allclose(grad, plain, atol=1e-4)
    print(f"loss {loss:.4f}, gradients as with plain jnp")


if __name__ == "__main__":
    main()
