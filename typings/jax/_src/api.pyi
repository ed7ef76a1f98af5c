# For pyright alone; nothing imports it. JAX annotates functions that it takes and
# returns as bare `Callable`, or not at all. Here are the five that the examples call: a
# jitted function has the parameters and the result of the function that it is made of.
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

from jax import stages
from jaxlib._jax import Device

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

class Jitted(Generic[P, R]):
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def lower(self, *args: Any, **kwargs: Any) -> stages.Lowered: ...
    def trace(self, *args: Any, **kwargs: Any) -> stages.Traced: ...
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any: ...
    def clear_cache(self) -> None: ...

@overload
def jit(
    fun: Callable[P, R],
    /,
    *,
    in_shardings: Any = ...,
    out_shardings: Any = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    keep_unused: bool = ...,
    device: Device | None = ...,
    backend: str | None = ...,
    inline: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> Jitted[P, R]: ...
@overload
def jit(
    *,
    in_shardings: Any = ...,
    out_shardings: Any = ...,
    static_argnums: int | Sequence[int] | None = ...,
    static_argnames: str | Iterable[str] | None = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    donate_argnames: str | Iterable[str] | None = ...,
    keep_unused: bool = ...,
    device: Device | None = ...,
    backend: str | None = ...,
    inline: bool = ...,
    compiler_options: dict[str, Any] | None = ...,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
def vmap(
    fun: F,
    in_axes: int | Sequence[Any] | None = ...,
    out_axes: Any = ...,
    axis_name: Any = ...,
    axis_size: int | None = ...,
    spmd_axis_name: Any = ...,
    sum_match: bool = ...,
) -> F: ...
def value_and_grad(
    fun: Callable[P, R],
    argnums: int | Sequence[int] = ...,
    has_aux: bool = ...,
    holomorphic: bool = ...,
    allow_int: bool = ...,
    reduce_axes: Sequence[Any] = ...,
) -> Callable[P, tuple[R, Any]]: ...
def device_put(
    x: T, device: Any = ..., *, src: Any = ..., donate: Any = ..., may_alias: Any = ...
) -> T: ...
def block_until_ready(x: T) -> T: ...
def __getattr__(name: str) -> Any: ...
