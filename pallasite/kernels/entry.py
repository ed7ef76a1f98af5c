"""What every public operation does first: names that other libraries have get a hint,
and errors end at the user's call."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from pallasite.errors import KernelTypeError, one_of
from pallasite.language.trace import user_location
from pallasite.language.tracebacks import folds

# Arguments as other libraries call them, and how to say the same here.
ELSEWHERE = {
    "eps": "epsilon=",
    "variance_epsilon": "epsilon=",
    "weight": "scale=, of a norm; else the operand's own name",
    "is_causal": "mask=kernels.masks.Causal()",
    "causal": "mask=kernels.masks.Causal()",
    "attn_mask": "mask=, of kernels.masks, or bias=",
    "dropout_p": "dropout_rate= and dropout_key=",
    "logits_soft_cap": "soft_cap=",
    "softcap": "soft_cap=",
    "sm_scale": "scale=",
    "act": "activation=",
    "act_fn": "activation=",
    "preferred_element_type": "out_dtype=",
    "num_groups": "groups, the second argument",
}

OTHER_NAMES = {
    "cross_entropy": "linear_softmax_cross_entropy_loss",
    "flash_attention": "attention",
    "scaled_dot_product_attention": "attention",
    "dot_product_attention": "attention",
    "swiglu": "gated_linear_unit",
    "geglu": "gated_linear_unit",
    "rmsnorm": "rms_norm",
    "layernorm": "layer_norm",
    "rope": "rotary_embedding",
    "linear": "matmul",
    "gemm": "matmul",
}


def public(module: str) -> None:
    """Make a module's functions public operations, and hide its submodules."""
    names = sys.modules[module].__dict__
    for name, x in list(names.items()):
        if inspect.isfunction(x) and name[0] != "_":
            names[name] = _operation(x)
        elif isinstance(x, ModuleType) and name != "masks":
            del names[name]  # still importable


def missing_name(name: str, known: Iterable[str]) -> AttributeError:
    """The error of a name that a module does not have."""
    meant = OTHER_NAMES.get(name)
    hint = (
        f"kernels.{meant}" if meant else one_of(name, [n for n in known if n[0] != "_"])
    )
    return AttributeError(f"pallasite.kernels has no {name!r}: {hint}")


def _operation(function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - parameters.keys():
            hint = ELSEWHERE.get(name)
            raise KernelTypeError(
                f"{function.__name__} has no argument {name!r}",
                at=user_location(),
                fix=f"pass {hint}" if hint else one_of(name, parameters),
            )
        for number, x in enumerate((*args, *kwargs.values())):
            if type(x).__module__.partition(".")[0] == "torch":
                raise KernelTypeError(
                    f"{function.__name__}: operand {number} is a torch tensor",
                    at=user_location(),
                    fix=f"pallasite.torch.wrap(kernels.{function.__name__}) takes "
                    "tensors; jax.dlpack.from_dlpack(x) makes an array of one",
                )
        return function(*args, **kwargs)

    return folds(call)
