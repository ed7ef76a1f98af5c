"""The torch operator that runs a program, and its gradient.

One operator, `pallasite::call`, serves all programs: it takes the program's name. torch
traces it without running it (`register_fake`), so it is one node in the graphs of
`torch.compile`. It is defined by schema, as calls of a `torch.library.custom_op` take
twice as long.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from pallasite.errors import UnsupportedError
from pallasite.torch.programs import Program, programs

torch.library.define(
    "pallasite::call",
    "(Tensor[] operands, str program) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("pallasite::call", ("cpu", "cuda"))
def _run(operands: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    return _program(program).run(operands)


@torch.library.register_fake("pallasite::call")
def _fake(operands: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    del operands
    return _program(program).fake()


def _batch(
    info: Any, in_dims: Any, operands: list[torch.Tensor], program: str
) -> tuple[list[torch.Tensor], list[int]]:
    batched = _program(program).batched(tuple(in_dims[0]), info.batch_size)
    results = _call(operands, batched.name)
    return results, [0] * len(results)


torch.library.register_vmap("pallasite::call", _batch)


def _program(name: str) -> Program:
    found = programs.get(name)
    if found is None:
        raise UnsupportedError(
            "a torch graph calls a program of another process",
            [("program", name)],
            fix="call or compile the wrapped function in the process that runs it; to "
            "write it to a file, use jax.export",
        )
    return found


_call = torch.ops.pallasite.call.default


def apply(program: Program, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a program on tensors, recorded for autograd if needed."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        return _Apply.apply(program, *operands)
    return _call(list(operands), program.name)


class _Apply(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(program: Program, *operands: torch.Tensor) -> Any:
        return tuple(_call(list(operands), program.name))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        program, *operands = inputs
        ctx.program = program
        ctx.set_materialize_grads(False)
        backward = program.backward
        if backward is None:
            return
        # Residuals require gradients, so that differentiating them is an error.
        ctx.mark_non_differentiable(
            *(x for x in output if not (x.is_floating_point() or x.is_complex()))
        )
        of = {"operand": operands, "result": output}
        ctx.save_for_backward(*(of[kind][n] for kind, n in backward.residuals))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        program: Program = ctx.program
        backward = program.backward
        if backward is None:
            raise UnsupportedError(
                "second derivatives of a wrapped function are not supported",
                [("program", program.label)],
                fix="wrap JAX's first derivative: pallasite.torch.wrap(jax.grad(f))",
            )
        residuals = ctx.saved_tensors
        given = [_or_zeros(cotangents[n], program, n) for n in backward.differentiable]
        gradients: list[torch.Tensor | None] = [None] * len(program.avals)
        made = apply(backward.program, [*residuals, *given])
        for n, gradient in zip(backward.wanted, made, strict=True):
            gradients[n] = gradient
        return None, *gradients


# torch needs the signature at every call; inspecting the function is slower.
_Apply.forward.__signature__ = inspect.signature(_Apply.forward)


def _or_zeros(
    cotangent: torch.Tensor | None, program: Program, number: int
) -> torch.Tensor:
    """The cotangent of a program's result; zeros if autograd has none."""
    if cotangent is not None:
        return cotangent
    shape, dtype = program.out_avals[number].shape, program.out_dtypes[number]
    return torch.zeros(shape, dtype=dtype, device=program.device)
