"""Matches pytrees of specs with pytrees of arrays: one BlockSpec per leaf.

`pallas_call.py` passes in what the author wrote; the result has one entry per array,
with the path that errors show.
"""

from collections.abc import Callable
from typing import Any

import jax

from pallasite.errors import SpecError
from pallasite.language import upstream
from pallasite.language.specs import BlockSpec, GridSpec, no_block_spec
from pallasite.language.trace import count_of


def input_specs(
    specs: Any, role: str, flat: Any, tree: Any, spec: GridSpec, request: Any
) -> list[tuple[str, BlockSpec]]:
    """One spec per operand leaf, with the path errors show."""
    arguments = jax.tree.unflatten(tree, flat)[spec.num_scalar_prefetch :]
    leaves = jax.tree.leaves(arguments)
    if specs is no_block_spec:
        return [(f"[{n}]", BlockSpec()) for n in range(len(leaves))]
    if isinstance(specs, (list, tuple)) and len(specs) != len(arguments):
        raise SpecError(
            f"{role} has {count_of(len(specs), 'entry', 'entries')} for "
            f"{count_of(len(arguments), 'operand')}",
            [
                ("kernel", request.name),
                ("operands", ", ".join(describe(x) for x in leaves) or "none"),
            ],
            request.at,
            "one BlockSpec per operand (scalar-prefetch operands have none)",
        )
    if isinstance(specs, BlockSpec) and len(leaves) == 1:
        specs = (specs,)
    specs = tuple(specs) if isinstance(specs, (list, tuple)) else specs
    return _match(specs, tuple(arguments), role, request)


def is_spec(s: Any) -> bool:
    """Whether it stands for the spec of one operand."""
    return isinstance(s, BlockSpec) or s is None or s is no_block_spec


def _no_spec_is_whole(s: Any) -> Any:
    return BlockSpec() if s is None or s is no_block_spec else s


def _match(specs: Any, operands: Any, role: str, request: Any):
    specs = jax.tree.map(_no_spec_is_whole, specs, is_leaf=is_spec)
    try:
        spread = jax.tree.broadcast(specs, operands, is_leaf=is_spec)
    except ValueError:
        for n, entry in enumerate(specs if isinstance(specs, tuple) else ()):
            if not isinstance(entry, (BlockSpec, dict, list)) and entry is not None:
                raise SpecError(
                    f"{role}[{n}] is not a BlockSpec",
                    [("kernel", request.name), ("got", repr(entry))],
                    request.at,
                    _fix(entry),
                ) from None
        raise SpecError(
            f"{role} does not match the structure of the operands",
            [
                ("kernel", request.name),
                (role, _shown(specs, lambda s: "BlockSpec")),
                ("operands", _shown(operands, describe)),
            ],
            request.at,
            "the same nesting of lists, tuples and dicts, with a BlockSpec per array",
        ) from None
    is_leaf = lambda s: isinstance(s, BlockSpec)
    result = []
    for path, s in jax.tree_util.tree_flatten_with_path(spread, is_leaf)[0]:
        shown = jax.tree_util.keystr(path)
        if not isinstance(s, BlockSpec):
            raise SpecError(
                f"{role}{shown} is not a BlockSpec",
                [("kernel", request.name), ("got", repr(s))],
                request.at,
                _fix(s),
            )
        result.append((shown, s))
    return result


def _shown(tree: Any, leaf: Callable[[Any], str]) -> str:
    """A pytree with its leaves replaced by text."""

    class Words(str):
        __repr__ = str.__str__

    is_leaf = lambda x: is_shaped(x) or is_spec(x)
    return repr(jax.tree.map(lambda x: Words(leaf(x)), tree, is_leaf=is_leaf))


def output_specs(specs: Any, request: Any) -> list[tuple[str, BlockSpec]]:
    """One spec per result leaf, with the path errors show."""
    count = len(request.out_shapes)
    if specs is no_block_spec:
        return [(f"[{n}]" if count > 1 else "", BlockSpec()) for n in range(count)]
    if isinstance(specs, BlockSpec) and count == 1:
        return [("", specs)]
    target = jax.tree.unflatten(request.out_tree, request.out_shapes)
    if isinstance(specs, (list, tuple)):
        results = target if isinstance(target, (list, tuple)) else (target,)
        if len(specs) != len(results):
            shapes = ", ".join(map(describe, request.out_shapes)) or "none"
            raise SpecError(
                f"out_specs has {count_of(len(specs), 'entry', 'entries')} for "
                f"{count_of(len(results), 'result')}",
                [("kernel", request.name), ("results", shapes)],
                request.at,
                "one BlockSpec per entry of out_shape",
            )
        specs, target = tuple(specs), tuple(results)
    return _match(specs, target, "out_specs", request)


def is_shaped(x: Any) -> bool:
    """Whether it is an array or an array type."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def describe(x: Any) -> str:
    """An array's type as errors show it."""
    return f"{getattr(x.dtype, 'name', x.dtype)}{list(x.shape)}"


def _fix(given: Any) -> str:
    return (
        upstream.FIX
        if upstream.is_upstreams(given)
        else "pl.BlockSpec(block_shape, index_map)"
    )
