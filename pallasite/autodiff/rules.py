"""Rules of differentiation: jvp, transpose, and vmap of both, for kernel calls.

Two separate primitives keep derivatives of a call together, so that they can be
batched, partitioned and differentiated again as one operation:

- `tangent_p` takes operands and tangents and returns tangents of the results. It runs
  the tangent kernel (`tangent.py`) through the same backends as the call. Residuals of
  a forward kernel (`residuals.py`) are its last operands, for its transpose only.
- `cotangent_p` takes operands and cotangents of the results and returns cotangents of
  operands, through the functional form of the kernel (`reversible.py`).

They are each other's transpose. `pull_back` decides how cotangents are computed: by
backward kernels (`backward.py`) if there are any, else by `cotangent_p`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from pallasite import jaxcompat, primitive, sites
from pallasite.autodiff import backward
from pallasite.autodiff.activity import activity
from pallasite.autodiff.equal_operands import once
from pallasite.autodiff.tangent import NoTangentKernel, TangentKernel, tangent_kernel
from pallasite.emulation.reversible import emulate_reverse, emulate_smooth
from pallasite.errors import NoBackwardKernel, UnsupportedError
from pallasite.ir.nodes import walk
from pallasite.ir.roles import Pipeline
from pallasite.ops.gpu import is_of_warpgroups
from pallasite.passes.analysis.partition import pull_back_rule
from pallasite.passes.lower.matrix_units import write_out
from pallasite.passes.transform.report_checks import without_checks
from pallasite.passes.transform.shard import shard
from pallasite.placement import chip_for
from pallasite.primitive import Call, call_p, wants_emulation
from pallasite.sharding.custom_call import Task, call_key, lower_partitioned
from pallasite.sharding.rule import Partition, inherit, local_of, rule_of
from pallasite.target import Host

Array = Any
Flags = tuple[bool, ...]

tangent_p = jaxcompat.Primitive("pallasite_tangent")
tangent_p.multiple_results = True
MANY_STEPS = 64  # of a grid, as loops of XLA
cotangent_p = jaxcompat.Primitive("pallasite_cotangent")
cotangent_p.multiple_results = True


def pull_back(
    call: Call,
    primals: Sequence[Array],
    cotangents: Sequence[Array | None],
    wanted: Sequence[bool],
    kept: Sequence[Array] = (),
) -> list[Array | None]:
    """Cotangents of a call's operands: the only place that chooses how.

    Args:
        call: the kernel call.
        primals: its operands.
        cotangents: of its results; None is zero.
        wanted: the operands whose cotangents are requested; others give None.
        kept: the forward kernel's residuals for this, if any.
    """
    if all(c is None for c in cotangents):
        return [None] * len(primals)
    known = tuple(c is not None for c in cotangents)
    given = [c for c in cotangents if c is not None]
    operands = jaxcompat.vary_alike([*primals, *given])
    primals, pending = operands[: len(primals)], iter(operands[len(primals) :])
    cotangents = [next(pending) if k else None for k in known]
    try:
        if local_of(call) is not None:
            raise NoBackwardKernel(
                "pl.Partition(local=...) defines what one device runs"
            )
        if call.kernel.symbols:
            raise NoBackwardKernel("its shapes are symbolic")
        made = backward.cotangents(call, primals, cotangents, wanted, kept)
        return [
            # Its type must be that of its primal, also on explicit mesh axes.
            c if c is None else jaxcompat.lying_as(c, jaxcompat.aval_of(p))
            for c, p in zip(made, primals, strict=True)
        ]
    except NoBackwardKernel as error:  # the functional form serves every kernel
        if _is_slow(call):
            _announce(call, error)
        found = iter(
            cotangent_p.bind(*operands, call=call, wanted=tuple(wanted), known=known)
        )
        return [next(found) if w else None for w in wanted]


def _is_slow(call: Call) -> bool:
    """Whether the functional form leaves an accelerator idle: it takes a grid's steps
    one after another, each in several kernels of XLA."""
    grids = [op for op in walk(call.kernel.body) if op.name == "pipeline"]
    sizes = [Pipeline.of(op).grid for op in grids]
    is_long = any(None in n or prod(k or 1 for k in n) >= MANY_STEPS for n in sizes)
    return is_long and not call.own and not isinstance(chip_for(call.backend), Host)


# --- forward ---


def jvp(primals: Sequence[Array], tangents: Sequence[Any], *, call: Call) -> Any:
    """The call itself, and a call of its tangent kernel."""
    _refuse_warpgroups(call)
    plain, own, tangents = once(_in_plain_ops(call), primals, tangents)
    found = _keeping(plain, own, tangents)
    results, kept = (call_p.bind(*primals, call=call), []) if found is None else found
    # The call itself has checked what its derivatives recompute.
    return results, _push(_unchecked(plain), own, tangents, kept)


def _refuse_warpgroups(call: Call) -> None:
    """Asynchronous ops of warpgroups (matmuls, copies that barriers count) have no
    rules: a derivative without them would be wrong."""
    found = next((op for op in walk(call.kernel.body) if is_of_warpgroups(op)), None)
    if found is not None:
        raise UnsupportedError(
            "kernels made by plgpu.kernel cannot be differentiated",
            [("kernel", call.kernel.name), ("op", found.name)],
            found.loc or call.kernel.loc,
            "define its derivative: wrap the plgpu.kernel call in jax.custom_vjp",
        )


def _unchecked(call: Call) -> Call:
    return replace(call, kernel=_without_checks(call.kernel))


_without_checks = functools.lru_cache(maxsize=1024)(without_checks)


def _in_plain_ops(call: Call) -> Call:
    """Instructions to matrix units have no rules; their expansions do."""
    kernel = write_out(call.kernel)
    return call if kernel is call.kernel else replace(call, kernel=kernel)


def _keeping(
    call: Call, primals: Sequence[Array], tangents: Sequence[Any]
) -> tuple[list[Array], list[Array]] | None:
    """Results of the call, and its kernel's residuals for a reverse; None: none."""
    avals = list(map(jaxcompat.aval_of, primals))
    whole = call.kernel.symbols or local_of(call) is not None
    if wants_emulation(call) or whole:
        return None
    if any(jaxcompat.manual_axes(a) or any(jaxcompat.explicit_spec(a)) for a in avals):
        return None
    return backward.keeping(call, primals, tuple(map(_is_active, tangents)))


def _push(
    call: Call,
    primals: Sequence[Array],
    tangents: Sequence[Any],
    kept: Sequence[Array] = (),
) -> list[Any]:
    """Tangents of the call's results, some of them symbolic zeros."""
    active = tuple(map(_is_active, tangents))
    avals = list(map(jaxcompat.aval_of, primals))
    pushed = [_no_tangent(aval) for aval in primitive.result_types(call, avals)]
    outputs = activity(call.kernel, active).outputs
    if outputs:
        given = [t for t, a in zip(tangents, active, strict=True) if a]
        operands = jaxcompat.vary_alike([*primals, *given])
        found = tangent_p.bind(*operands, *kept, call=call, active=active)
        for position, tangent in zip(outputs, found, strict=True):
            pushed[position] = tangent
    return pushed


def _no_tangent(aval: Any) -> Any:
    """The symbolic zero tangent of a value of this type."""
    return ad.Zero(aval.to_tangent_aval())


def _is_active(tangent: Any) -> bool:
    """Whether a tangent exists: neither a symbolic zero nor that of an integer."""
    return type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0


def _tangents(call: Call, active: Flags) -> Callable[..., list[Array]]:
    """The meaning of `tangent_p`: (operands, active tangents) to result tangents."""
    try:
        made = tangent_kernel(call.kernel, active)
    except NoTangentKernel as error:
        _announce(call, error)
        return _tangents_of(emulate_smooth(call.kernel), call, active)

    def run(*operands: Array) -> list[Array]:
        primals, tangents = _split(operands, active)
        full = [_full(primals, tangents, n) for n in made.inputs]
        return call_p.bind(*primals, *full, call=_tangent_call(call, made))[
            made.skipped :
        ]

    return run


def _tangent_call(call: Call, made: TangentKernel) -> Call:
    """The call of a tangent kernel."""
    rule = call.partition
    if isinstance(rule, Partition):
        tangents = [rule.operands[n] for n in made.inputs]
        results = [*[()] * made.skipped, *(rule.results[n] for n in made.outputs)]
        rule = inherit(rule, made.kernel, [*rule.operands, *tangents, *results])
    first = len(call.kernel.inputs)
    flowing = (*call.flowing, *range(first, first + len(made.inputs)))
    one = replace(call, kernel=made.kernel, cost_estimate=None, partition=rule)
    return replace(one, flowing=flowing, equal=())


def _full(primals: Sequence[Array], tangents: Sequence[Any], n: int) -> Array:
    return jnp.zeros_like(primals[n]) if tangents[n] is None else tangents[n]


def _split(
    operands: Sequence[Array], active: Flags
) -> tuple[Sequence[Array], list[Array | None]]:
    """Operands of the call, and one tangent per operand, None where not active."""
    primals, given = operands[: len(active)], iter(operands[len(active) :])
    return primals, [next(given) if a else None for a in active]


def _tangents_of(fn: Callable, call: Call, active: Flags) -> Callable[..., list[Array]]:
    """The same by JAX, for a function that computes what the call does."""
    outputs = activity(call.kernel, active).outputs

    def run(*operands: Array) -> list[Array]:
        primals, tangents = _split(operands, active)
        run, chosen = _of_active(fn, primals, active)
        given = [t for t in tangents if t is not None]
        _, found = jax.jvp(run, tuple(chosen), tuple(given))
        return [found[n] for n in outputs]

    return run


def _of_active(
    fn: Callable, operands: Sequence[Array], active: Sequence[bool]
) -> tuple[Callable, list[Array]]:
    """`fn` as a function of its active operands, and those operands."""

    def run(*chosen: Array) -> Any:
        pending = iter(chosen)
        pairs = zip(operands, active, strict=True)
        return fn(*(next(pending) if a else x for x, a in pairs))

    return run, [x for x, a in zip(operands, active, strict=True) if a]


def _announce(call: Call, error: Exception) -> None:
    if not primitive.wants_emulation(call):
        primitive.warn_fallback(call.kernel, error, what="the derivative of kernel")


# --- backward ---


def _cotangents(call: Call, wanted: Flags, known: Flags) -> Callable[..., list[Array]]:
    """The meaning of `cotangent_p`: (operands, known cotangents) to those wanted."""
    if local_of(call) is None:
        return _cotangents_of(emulate_reverse(call.kernel), wanted, known)
    whole = replace(call, partition=None)

    def run(*operands: Array) -> list[Array]:
        primals, given = operands[: len(wanted)], iter(operands[len(wanted) :])
        cotangents = [next(given) if k else None for k in known]
        found = pull_back(whole, primals, cotangents, wanted)
        return [
            jnp.zeros_like(p) if c is None else c
            for c, p, w in zip(found, primals, wanted, strict=True)
            if w
        ]

    return run


def _cotangents_of(
    fn: Callable, wanted: Flags, known: Flags
) -> Callable[..., list[Array]]:
    """The same by JAX, for a function that computes what the call does."""

    def run(*operands: Array) -> list[Array]:
        primals, given = operands[: len(wanted)], iter(operands[len(wanted) :])
        run, chosen = _of_active(fn, primals, wanted)
        results, pull = jax.vjp(run, *chosen)
        full = [
            next(given) if k else _zero_cotangent(r)
            for r, k in zip(results, known, strict=True)
        ]
        return list(pull(full))

    return run


def _zero_cotangent(result: Array) -> Array:
    if jnp.issubdtype(result.dtype, jnp.floating):
        return jnp.zeros_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)


def _transpose_tangent(
    cotangents: Sequence[Any], *operands: Any, call: Call, active: Flags
) -> list[Any]:
    """Cotangents of the tangents are those of the operands they belong to."""
    count = len(active)
    primals, tangents = _split(operands, active)
    # A known tangent adds a constant, which a transpose omits.
    wanted = [t is not None and ad.is_undefined_primal(t) for t in tangents]
    full: list[Any] = [None] * call.kernel.num_outputs
    outputs = activity(call.kernel, active).outputs
    for position, cotangent in zip(outputs, cotangents, strict=True):
        full[position] = _instantiated(cotangent)
    kept = operands[count + sum(active) :]
    found = pull_back(call, primals, full, wanted, kept)
    asked = (x for x, a in zip(found, active, strict=True) if a)
    return [*[None] * count, *asked, *[None] * len(kept)]


def transpose_call(cotangents: Sequence[Any], *operands: Any, call: Call) -> list[Any]:
    """A call that is linear in some operands (`jax.linear_transpose`): its derivative
    is the same everywhere, so it is taken at zero.

    No operand is actually zero, so the call's checks must not run there.
    """
    call = _unchecked(_in_plain_ops(call))
    linear = tuple(map(ad.is_undefined_primal, operands))
    primals = [
        jaxcompat.lying_as(jnp.zeros(x.aval.shape, x.aval.dtype), x.aval) if f else x
        for x, f in zip(operands, linear, strict=True)
    ]
    found = pull_back(call, primals, [_instantiated(c) for c in cotangents], linear)
    return [
        c if c is None else jaxcompat.summed_as(c, x.aval)
        for c, x in zip(found, operands, strict=True)
    ]


def _instantiated(cotangent: Any) -> Array | None:
    if type(cotangent) is ad.Zero or cotangent.dtype == jax.dtypes.float0:
        return None
    return cotangent


def _transpose_cotangent(
    tangents: Sequence[Any], *operands: Any, call: Call, wanted: Flags, known: Flags
) -> list[Any]:
    """The transpose of a pull-back is a push-forward."""
    primals, cotangents = operands[: len(wanted)], iter(operands[len(wanted) :])
    asked = [k and ad.is_undefined_primal(next(cotangents)) for k in known]
    pending = iter(tangents)
    full = [next(pending) if w else None for w in wanted]
    active = tuple(t is not None and type(t) is not ad.Zero for t in full)
    outputs = activity(call.kernel, active).outputs
    pushed: list[Any] = [None] * call.kernel.num_outputs
    if outputs:
        given = [t for t, a in zip(full, active, strict=True) if a]
        operands = tuple(jaxcompat.vary_alike([*primals, *given]))
        found = tangent_p.bind(*operands, call=call, active=active)
        for position, tangent in zip(outputs, found, strict=True):
            pushed[position] = tangent
    answers = [t if a else None for t, a in zip(pushed, asked, strict=True)]
    chosen = (t for t, k in zip(answers, known, strict=True) if k)
    return [*[None] * len(wanted), *chosen]


# --- second derivatives ---


def _jvp_tangent(
    operands: Sequence[Array], tangents_in: Sequence[Any], *, call: Call, active: Flags
) -> Any:
    """The tangent kernel is a kernel: it has a tangent kernel of its own."""
    results = tangent_p.bind(*operands, call=call, active=active)
    try:
        made = tangent_kernel(call.kernel, active)
    except NoTangentKernel:
        fn = _tangents_of(emulate_smooth(call.kernel), call, active)
        return results, _jvp_in_line(fn, operands, tangents_in)[1]
    primals, tangents = _split(operands, active)
    primal_tangents, tangent_tangents = _split(tangents_in, active)
    full = [_full(primals, tangents, n) for n in made.inputs]
    second = [
        tangent_tangents[n]
        if tangent_tangents[n] is not None
        else _no_tangent(jaxcompat.aval_of(x))
        for n, x in zip(made.inputs, full, strict=True)
    ]
    found = _push(
        _tangent_call(call, made), [*primals, *full], [*primal_tangents, *second]
    )
    return results, found[made.skipped :]


def _jvp_cotangent(
    operands: Sequence[Array], tangents_in: Sequence[Any], *, call: Call, **params: Any
) -> Any:
    if any(jaxcompat.manual_axes(jaxcompat.aval_of(x)) for x in operands):
        raise UnsupportedError(
            "reverse-mode second derivatives of a kernel without a backward kernel "
            "are not supported in a shard_map with check_vma=True",
            [("kernel", call.kernel.name)],
            call.kernel.loc,
            "pass check_vma=False to shard_map, or differentiate forward over forward",
        )
    try:
        return _jvp_in_line(_cotangents(call, **params), operands, tangents_in)
    except TypeError as error:
        if "to a custom_vjp function" not in str(error):
            raise
    ops = {op.name: op for op in walk(call.kernel.body)}
    cause = ops.get("while") or ops.get("custom") or ops.get("for")
    raise UnsupportedError(
        "forward-over-reverse differentiation does not support loops with a "
        "data-dependent trip count, nor custom_vjp functions",
        [("kernel", call.kernel.name)],
        call.kernel.loc if cause is None else cause.loc,
        "use jacrev of jacrev, or jacfwd of jacfwd; a loop with a static trip count "
        "and masked steps; or custom_jvp",
    )


def _jvp_in_line(
    fn: Callable, operands: Sequence[Array], tangents_in: Sequence[Any]
) -> Any:
    active = [_is_active(t) for t in tangents_in]
    run, chosen = _of_active(fn, operands, active)
    given = [t for t, a in zip(tangents_in, active, strict=True) if a]
    return jax.jvp(run, tuple(chosen), tuple(given))


# --- vmap ---


def _batch_tangent(
    operands: Sequence[Array], dims: Sequence[int | None], *, call: Call, active: Flags
) -> Any:
    """The tangent of the batched call. An operand and its tangent are batched alike.

    The residuals are of another kernel than the batched one's, and are left out.
    """
    count = len(active)
    operands, dims = (x[: count + sum(active)] for x in (operands, dims))
    tangent_dims = _split(dims, active)[1]
    needed = [
        d is not None or t is not None
        for d, t in zip(dims[:count], tangent_dims, strict=True)
    ]
    size = _batch_size(operands, dims)
    needed = _with_aliased(call, needed)
    flags = [*needed, *(n for n, a in zip(needed, active, strict=True) if a)]
    batched_operands = _lead(operands, dims, flags, size)
    batched = primitive.batched(call, needed, size)
    results = tangent_p.bind(*batched_operands, call=batched, active=active)
    return results, [0] * len(results)


def _batch_cotangent(
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    call: Call,
    wanted: Flags,
    known: Flags,
) -> Any:
    """Cotangents of the batched call. Each requested one differs between examples."""
    size = _batch_size(operands, dims)
    needed = [d is not None or w for d, w in zip(dims, wanted, strict=False)]
    needed = _with_aliased(call, needed)
    flags = [*needed, *[True] * sum(known)]
    batched_operands = _lead(operands, dims, flags, size)
    batched = primitive.batched(call, needed, size)
    results = cotangent_p.bind(
        *batched_operands, call=batched, wanted=wanted, known=known
    )
    return results, [0] * len(results)


def _batch_size(operands: Sequence[Array], dims: Sequence[int | None]) -> int:
    pairs = zip(operands, dims, strict=True)
    return next(x.shape[d] for x, d in pairs if d is not None)


def _with_aliased(call: Call, needed: list[bool]) -> list[bool]:
    """An operand that aliases a result has one copy per example."""
    aliased = {source for source, _ in call.kernel.aliases}
    return [f or n in aliased for n, f in enumerate(needed)]


def _lead(
    operands: Sequence[Array],
    dims: Sequence[int | None],
    flags: Sequence[bool],
    size: int,
) -> list[Array]:
    """Operands with the batch in front where `flags` say so."""
    made = []
    for x, d, f in zip(operands, dims, flags, strict=True):
        if d is not None:
            x = jnp.moveaxis(x, d, 0)
        elif f:
            x = jnp.broadcast_to(x[None], (size, *x.shape))
        made.append(x)
    return made


# --- types, running, lowering ---


@tangent_p.def_abstract_eval
def _tangent_types(*avals: Any, call: Call, active: Flags) -> list[Any]:
    avals = avals[: len(active) + sum(active)]
    results = primitive.result_types(call, avals[: len(active)], avals)
    return [results[n] for n in activity(call.kernel, active).outputs]


@cotangent_p.def_abstract_eval
def _cotangent_types(*avals: Any, call: Call, wanted: Flags, known: Flags) -> list[Any]:
    return [
        jaxcompat.out_aval_like(
            avals, aval.shape, aval.dtype, jaxcompat.explicit_spec(aval)
        )
        for aval, w in zip(avals, wanted, strict=False)
        if w
    ]


@functools.lru_cache(maxsize=4096)
def _jitted(which: Any, params: tuple[tuple[str, Any], ...]) -> Callable:
    return jax.jit(lambda *operands: which.bind(*operands, **dict(params)))


def _cotangent_task(call: Call, wanted: Flags, known: Flags) -> Task:
    """Cotangents of a call as something to partition: by the rule of the call."""
    rule, local = rule_of(call), local_of(call)

    def of_local(splits: Mapping[int, int]) -> Any:
        return _cotangents_of(_leaves_of(local), wanted, known), ()

    def compute(splits: Mapping[int, int]) -> Any:
        part = shard(rule, splits)
        one = replace(call, kernel=part.kernel, partition=False, equal=())
        count, told = len(wanted), len(part.offset_axes)
        params = dict(call=one, wanted=(*wanted, *[False] * told), known=known)

        def run(*operands: Array) -> Any:
            given = operands[count : len(operands) - told]
            first_steps = operands[len(operands) - told :]
            return cotangent_p.bind(*operands[:count], *first_steps, *given, **params)

        return run, part.offset_axes

    key = repr((call_key(call), "cotangents", wanted, known))
    pulled = pull_back_rule(rule, wanted, known)
    made = compute if local is None else of_local
    return Task(call.kernel.name, key, pulled, made, call.kernel.loc)


def _tangent_task(call: Call, active: Flags) -> Task:
    """Tangents of a call for which the author says what one device runs."""
    rule, local = rule_of(call), local_of(call)
    outputs = activity(call.kernel, active).outputs
    tangents = [a for a, f in zip(rule.inputs, active, strict=True) if f]
    pushed = replace(
        rule,
        inputs=(*rule.inputs, *tangents),
        outputs=tuple(rule.outputs[n] for n in outputs),
    )

    def compute(splits: Mapping[int, int]) -> Any:
        return _tangents_of(_leaves_of(local), call, active), ()

    key = repr((call_key(call), "tangents", active))
    return Task(call.kernel.name, key, pushed, compute, call.kernel.loc)


def _leaves_of(local: Any) -> Callable[..., list[Array]]:
    return lambda *parts: jax.tree.leaves(local(*parts))


def _register(which: Any, meaning: Callable[..., Callable]) -> None:
    def run(*operands: Array, **params: Any) -> Any:
        with jax.disable_jit(False):
            return _jitted(which, tuple(sorted(params.items())))(*operands)

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if primitive.partitions(ctx, params["call"]):
            if which is cotangent_p:
                return lower_partitioned(ctx, operands, _cotangent_task(**params))
            if local_of(params["call"]) is not None:
                return lower_partitioned(ctx, operands, _tangent_task(**params))
        plain = ctx.replace(
            avals_in=jaxcompat.plain_avals(ctx.avals_in),
            avals_out=jaxcompat.plain_avals(ctx.avals_out),
        )
        fn = meaning(**params)
        return mlir.lower_fun(fn, multiple_results=True)(plain, *operands)

    which.def_impl(run)
    mlir.register_lowering(which, lower)
    sites.MEANINGS[which] = meaning


# `first_derivative.py` registers the rules of `call_p` itself.
_register(tangent_p, _tangents)
_register(cotangent_p, _cotangents)
ad.primitive_jvps[tangent_p] = _jvp_tangent
ad.primitive_transposes[tangent_p] = _transpose_tangent
ad.primitive_jvps[cotangent_p] = _jvp_cotangent
ad.primitive_transposes[cotangent_p] = _transpose_cotangent
batching.primitive_batchers[tangent_p] = _batch_tangent
batching.primitive_batchers[cotangent_p] = _batch_cotangent
