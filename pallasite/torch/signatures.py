"""`wrap`: a JAX function as a torch function, with one program per signature."""

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
import torch._dynamo

from pallasite import jaxcompat
from pallasite.errors import KernelTypeError, PerformanceWarning
from pallasite.torch import tensors
from pallasite.torch.derivatives import with_backward
from pallasite.torch.operator import apply
from pallasite.torch.programs import Program


def wrap(
    function: Callable[..., Any], *, max_signatures: int = 64
) -> Callable[..., Any]:
    """A function of torch tensors that runs a JAX function, with its gradient.

        rms_norm = pallasite.torch.wrap(pallasite.kernels.rms_norm)
        y = rms_norm(x, weight)  # torch tensors; y.sum().backward() works

    Tensors are passed and returned without copies (DLPack), on a CPU and on NVIDIA
    GPUs, in the order of torch's current stream. Tensors that are not contiguous, or
    not aligned to 64 bytes, are copied. Works under autograd, `torch.func.vjp` and
    `vmap`, and `torch.compile(fullgraph=True)`.

    Args:
        function: takes and returns arrays in any pytrees. It is traced and compiled
            once per signature: shapes, dtypes, device, which tensors require gradients,
            and the values of all arguments that are not tensors, which must be
            hashable.
        max_signatures: how many signatures stay compiled. The least recently used are
            dropped, with a warning the first time.
    """
    signatures = _Signatures(function, max_signatures)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        compiled = signatures.compiled_for(leaves, tree)
        operands = [x for x in leaves if isinstance(x, torch.Tensor)]
        results = apply(compiled.program, operands)
        own = results[: compiled.program.results]
        return jax.tree.unflatten(compiled.out_tree, own)

    # torch.compile keeps the call opaque, without tracing into JAX's code.
    return torch._dynamo.nonstrict_trace(wrapped)


@dataclass
class _Compiled:
    """A program, the tree of its results, and the number of the last call with it."""

    program: Program
    out_tree: Any
    last_call: int = 0


class _Signatures:
    """The compiled programs of one function."""

    def __init__(self, function: Callable[..., Any], limit: int):
        self.function, self.limit = function, limit
        self.label = getattr(function, "__name__", type(function).__name__).strip("<>")
        self.compiled: dict[Any, _Compiled] = {}
        self.calls = itertools.count()
        self.warned = False

    def compiled_for(self, leaves: list[Any], tree: Any) -> "_Compiled":
        grad = torch.is_grad_enabled()
        key = (tree, jaxcompat.trace_context(), *(_signature(x, grad) for x in leaves))
        try:
            found = self.compiled.get(key)
        except TypeError:
            raise self._not_hashable(leaves, tree) from None
        if found is None:
            self._make_room()
            found = self.compiled[key] = self._make(leaves, tree)
        found.last_call = next(self.calls)
        return found

    def _make(self, leaves: list[Any], tree: Any) -> "_Compiled":
        places = [n for n, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        operands = [leaves[n] for n in places]
        names = _names(self.function, tree)
        device = self._device(operands, [names[n] for n in places])
        avals = [tensors.aval_of(leaves[n], names[n]) for n in places]
        statics = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        out_tree: Any = None

        def flat(*arrays: Any) -> Sequence[Any]:
            nonlocal out_tree
            every = list(statics)
            for n, array in zip(places, arrays, strict=True):
                every[n] = array
            args, kwargs = jax.tree.unflatten(tree, every)
            results, out_tree = jax.tree.flatten(self.function(*args, **kwargs))
            return list(map(jax.numpy.asarray, results))

        wanted = ()
        if torch.is_grad_enabled():
            wanted = tuple(n for n, x in enumerate(operands) if x.requires_grad)
        if wanted:
            program = with_backward(self.label, flat, avals, wanted, device)
        else:
            program = Program(self.label, flat, avals, device)
        return _Compiled(program, out_tree)

    def _device(self, operands: list[torch.Tensor], names: list[str]) -> torch.device:
        """The device that all tensors are on."""
        if not operands:
            raise KernelTypeError(
                f"{self.label}: a wrapped function needs at least one tensor, for its "
                "device",
                fix="pass a tensor, or call the JAX function itself",
            )
        first = operands[0].device
        for operand, name in zip(operands, names, strict=True):
            if operand.device != first:
                raise KernelTypeError(
                    f"{self.label}: tensors are on different devices",
                    [(names[0], first), (name, operand.device)],
                    fix=f"move them to one device: x.to({str(first)!r})",
                )
        return first

    def _make_room(self) -> None:
        if len(self.compiled) < self.limit:
            return
        oldest = min(self.compiled, key=lambda key: self.compiled[key].last_call)
        dropped = self.compiled.pop(oldest).program
        if self.warned:
            return
        self.warned = True
        shapes = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in dropped.avals)
        warnings.warn(
            PerformanceWarning(
                f"{self.label} was called with more than {self.limit} signatures: the "
                "one used least recently is dropped for each new one, and compiled "
                f"again when needed (now {shapes}). Pad tensors to a few sizes, or "
                "keep more: wrap(f, max_signatures=...)"
            ),
            stacklevel=5,
        )

    def _not_hashable(self, leaves: list[Any], tree: Any) -> KernelTypeError:
        names = _names(self.function, tree)
        for leaf, name in zip(leaves, names, strict=True):
            try:
                hash(leaf)
            except TypeError:
                return KernelTypeError(
                    f"{self.label}: an argument is neither a tensor nor hashable",
                    [("argument", name), ("type", type(leaf).__name__)],
                    fix="pass arrays as torch tensors: torch.from_numpy(x)",
                )
        return KernelTypeError(
            f"{self.label}: the structure of the arguments is not hashable",
            [("structure", tree)],
            fix="pass tensors in tuples, lists and dicts",
        )


def _signature(leaf: Any, grad: bool) -> Any:
    """What a program depends on in one argument."""
    if isinstance(leaf, torch.Tensor):
        shape = tuple(map(int, leaf.shape))
        return shape, leaf.dtype, leaf.device, leaf.layout, grad and leaf.requires_grad
    # 1, 1.0 and True compare equal, but make different programs.
    return type(leaf), leaf


def _names(function: Callable[..., Any], tree: Any) -> list[str]:
    """What to call each argument in a message: `x`, `params['w']`."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        parameters = []
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    names = []
    for (side, first, *rest), _ in jax.tree_util.tree_leaves_with_path(numbered):
        if side.idx == 1:
            name = first.key
        elif first.idx < len(parameters):
            name = parameters[first.idx]
        else:
            name = f"argument {first.idx}"
        names.append(f"{name}{jax.tree_util.keystr(tuple(rest))}")
    return names
