"""PyTorch operators from JAX functions with kernels: `wrap`.

The only part of the package that imports torch.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "pallasite.torch needs PyTorch, which is not installed\n"
        "  fix  pip install 'pallasite[torch]'",
        name="torch",
    ) from None

from pallasite.torch.signatures import wrap as wrap
