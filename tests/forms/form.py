"""What a form is: one computation, spelled as some community would write its kernel.

A `Problem` is a computation in plain `jnp` with its operands at three sizes; a `Form`
is a kernel for it. `benchmarks/forms.py` times forms beside their problems' rivals, the
tests here hold them to the reference.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
Shape = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Size:
    """How large operands are: those of models, moderate ones, those of tests.

    "part" is moderate in a model's types: libtpu's estimate goes through a grid step by
    step, and through that of a whole model for minutes.
    """

    name: str  # "model", "part", "cpu" or "tiny"

    def __call__(self, model: int, cpu: int, tiny: int) -> int:
        return {"model": model, "part": cpu, "cpu": cpu, "tiny": tiny}[self.name]

    def block(self, n: int) -> int:
        """A block size at model sizes, shrunk with tiny operands."""
        return max(n // 8, 8) if self.name == "tiny" else n

    @property
    def dtype(self) -> Any:
        return BF16 if self.name in ("model", "part") else F32


SIZES = {name: Size(name) for name in ("model", "part", "cpu", "tiny")}


@dataclass(frozen=True)
class Operand:
    """An array that a problem is given.

    Args:
        shape, dtype: of the array.
        high: integers are drawn below it.
        make: the array from numpy's generator, where draws do not do.
        spread: standard deviation of floats.
    """

    shape: tuple[int, ...]
    dtype: Any = F32
    high: int = 2
    make: Callable[[np.random.Generator], Any] | None = None
    spread: float = 1.0

    def array(self, seed: int) -> jax.Array:
        if self.make is not None:
            made = np.asarray(self.make(np.random.default_rng(seed)))
            return jnp.asarray(made, self.dtype)
        key = jax.random.key(seed)
        if jnp.issubdtype(self.dtype, jnp.integer):
            low = -self.high if self.dtype == jnp.int8 else 0
            return jax.random.randint(key, self.shape, low, self.high, I32).astype(
                self.dtype
            )
        drawn = self.spread * jax.random.normal(key, self.shape, F32)
        return drawn.astype(self.dtype)

    @property
    def struct(self) -> Any:
        return Shape(self.shape, self.dtype)


@dataclass(frozen=True)
class Problem:
    """A computation.

    Args:
        name: forms of one name compute the same.
        operands: by size.
        reference: in plain jnp; also what is compiled beside a form where no library
            has it.
        rival: a library's function of what `rival_operands` makes of the operands.
        tolerance: the largest relative distance from the reference, by norm.
        lean: the reference in less memory, where it matters.
    """

    name: str
    operands: Callable[[Size], Sequence[Operand]]
    reference: Callable[..., Any]
    rival: Callable[..., Any] | None = None
    rival_operands: Callable[..., Sequence[Any]] | None = None
    tolerance: float = 1e-2
    lean: Callable[..., Any] | None = None

    def arrays(self, size: Size) -> list[jax.Array]:
        return [one.array(11 + n) for n, one in enumerate(self.operands(size))]

    def structs(self, size: Size) -> list[Any]:
        return [one.struct for one in self.operands(size)]


@dataclass(frozen=True)
class Form:
    """A kernel for a problem, in one style.

    Args:
        name: says the style.
        family: "attention", "matmul", "rows" or "others".
        problem: what it computes.
        make: the function of the problem's operands, for a size.
        grad: whether it has a gradient.
    """

    name: str
    family: str
    problem: Problem
    make: Callable[[Size], Callable[..., Any]]
    grad: bool = True


class Family:
    """The forms of one file; `@family.form(problem)` adds one."""

    def __init__(self, name: str) -> None:
        self.name, self.forms = name, list[Form]()

    def add(self, name: str, problem: Problem, make: Callable, **more: Any) -> None:
        assert all(name != form.name for form in self.forms), name
        self.forms.append(Form(name, self.name, problem, make, **more))

    def form(self, problem: Problem, name: str | None = None, **more: Any) -> Callable:
        """Decorates `make(size) -> function`; its name, spaced, is the form's."""

        def decorated(make: Callable) -> Callable:
            self.add(name or make.__name__.replace("_", " "), problem, make, **more)
            return make

        return decorated


def distance(got: Any, want: Any) -> float:
    """The largest relative distance of results, by norm; infinite if not finite."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        worst = max(worst, *map(float, _apart(a, b)))
    return worst if math.isfinite(worst) else math.inf


@jax.jit
def _apart(a: Any, b: Any) -> tuple[Any, Any]:
    """By norm, and a tenth of the largest difference relative to the largest value."""
    a, b = a.astype(F32), b.astype(F32)
    least = jnp.float32(1e-20)
    norm = jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), least)
    return norm, 0.1 * jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), least)


def total(function: Callable, results: int = 1) -> Callable:
    """The loss whose gradient is timed: results weighted by a fixed pattern."""

    def loss(*operands: Any) -> Any:
        parts = []
        for out in jax.tree.leaves(function(*operands)):
            if jnp.issubdtype(out.dtype, jnp.floating):
                # They differ along every axis: a softmax over an axis along which they
                # are the same has no gradient.
                axes = range(out.ndim)
                along = sum(jax.lax.broadcasted_iota(I32, out.shape, n) for n in axes)
                weights = jnp.float32(along % 7) - 2.5
                parts.append((out.astype(F32) * weights).sum())
        return sum(parts)

    return loss


def gradient(function: Callable, operands: Sequence[Any]) -> Callable:
    """Of the loss, with respect to every floating-point operand."""
    floats = [
        n for n, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jax.grad(total(function), argnums=tuple(floats))
