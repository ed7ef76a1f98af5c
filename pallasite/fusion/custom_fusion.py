"""`custom_fusion`: a function whose author defines how it acts on blocks."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.interpreters import ad, batching, mlir

from pallasite import jaxcompat
from pallasite.errors import SpecError
from pallasite.fusion import block_rules
from pallasite.fusion.block_rules import Blocks, Equation
from pallasite.fusion.block_specs import as_blocks, as_spec
from pallasite.language.specs import no_block_spec
from pallasite.language.trace import user_location

custom_fusion_p = jaxcompat.Primitive("custom_fusion")
custom_fusion_p.multiple_results = True


@dataclass(frozen=True)
class CustomEvalContext:
    """What an evaluation rule knows about the block it computes.

    Attributes:
        out_block_specs: the specs of the results.
        out_block_indices: their block indices.
        scalar_prefetch, scalar_prefetch_handler: not used.
    """

    out_block_specs: tuple[Any, ...]
    out_block_indices: tuple[Any, ...]
    scalar_prefetch: Any = None
    scalar_prefetch_handler: Any = None


class custom_fusion:
    """A function with custom rules for blocks.

    `def_pull_block_spec` and `def_eval_rule` are required; `def_push_block_spec` is for
    a function of a kernel's results, and `def_pallas_impl` for one that kernels compute
    differently.

    Args:
        fun: the function, as computed outside kernels.
    """

    def __init__(self, fun: Callable[..., Any]):
        functools.update_wrapper(self, fun)
        self.fun, self.__name__ = fun, getattr(fun, "__name__", "function")
        self.eval_rule: Callable[..., Sequence[Any]] | None = None
        self.pull_block_spec_rule: Callable[..., Sequence[Any]] | None = None
        self.push_block_spec_rule: Callable[..., Sequence[Any]] | None = None
        self.pallas_impl: Callable[..., Any] | None = None

    def def_eval_rule(self, rule: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
        """`rule(ctx, *blocks)` returns the flat blocks of the results."""
        self.eval_rule = rule
        return rule

    def def_pull_block_spec(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """`rule(blocks)`: from results' `BlockIndexTransform`s to the operands'."""
        self.pull_block_spec_rule = rule
        return rule

    def def_push_block_spec(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """`rule(specs)`: from the operands' `BlockSpec`s to the results'."""
        self.push_block_spec_rule = rule
        return rule

    def def_pallas_impl(self, impl: Callable[..., Any]) -> Callable[..., Any]:
        """The function as kernels compute it."""
        self.pallas_impl = impl
        return impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for rule, name in (
            (self.eval_rule, "def_eval_rule"),
            (self.pull_block_spec_rule, "def_pull_block_spec"),
        ):
            if rule is None:
                raise SpecError(
                    f"the custom_fusion {self.__name__} has no {name}",
                    at=user_location(),
                    fix=f"@{self.__name__}.{name}",
                )
        flat, tree = jax.tree.flatten((args, kwargs))
        trees: list[Any] = []

        def run(*leaves: Any) -> list[Any]:
            own_args, own_kwargs = jax.tree.unflatten(tree, leaves)
            results, out_tree = jax.tree.flatten(self.fun(*own_args, **own_kwargs))
            trees.append(out_tree)
            return results

        jaxpr, constants = jaxcompat.opened(jax.make_jaxpr(run)(*flat))
        results = custom_fusion_p.bind(
            *constants,
            *flat,
            unfused=jaxpr,
            num_constants=len(constants),
            in_tree=tree,
            rules=self,
        )
        return jax.tree.unflatten(trees[0], results)


def _run(*operands: Any, unfused: Any, num_constants: int, **_: Any) -> list[Any]:
    constants, args = operands[:num_constants], operands[num_constants:]
    return eval_jaxpr(unfused, constants, *args)


def _types(*avals: Any, unfused: Any, **_: Any) -> list[Any]:
    return [v.aval for v in unfused.outvars]


def _batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    run = jax.vmap(functools.partial(_run, **params), in_axes=tuple(dims))
    results = run(*operands)
    return results, [0] * len(results)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    given = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(functools.partial(_run, **params), tuple(primals), given)


custom_fusion_p.def_impl(_run)
custom_fusion_p.def_abstract_eval(_types)
mlir.register_lowering(custom_fusion_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[custom_fusion_p] = _batch
ad.primitive_jvps[custom_fusion_p] = _jvp


# --- its row in the table of rules ---


def _pull(eqn: Equation, outs: tuple[Blocks, ...]) -> list[Blocks]:
    rule = eqn.params["rules"].pull_block_spec_rule
    return [*[None] * eqn.params["num_constants"], *rule(outs)]


def _push(eqn: Equation, ins: Sequence[Blocks]) -> list[Blocks]:
    rules = eqn.params["rules"]
    if rules.push_block_spec_rule is None:
        raise eqn.refuse(f"{rules.__name__} has no def_push_block_spec")
    own = ins[eqn.params["num_constants"] :]
    specs = tuple(no_block_spec if b is None else as_spec(b) for b in own)
    found = rules.push_block_spec_rule(specs)
    return [None if s is no_block_spec else as_blocks(s) for s in found]


def _evaluate(eqn: Equation, *operands: Any) -> Any:
    assert eqn.outer is not None
    outer = eqn.outer()
    context = CustomEvalContext(
        tuple(no_block_spec if b is None else as_spec(b) for b in eqn.outs),
        tuple(None if b is None else b.at(outer) for b in eqn.outs),
    )
    return eqn.params["rules"].eval_rule(
        context, *operands[eqn.params["num_constants"] :]
    )


block_rules.RULES["custom_fusion"] = block_rules.Rule(_pull, _evaluate, _push)
