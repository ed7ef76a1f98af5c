"""`matmul`: a matmul with its prologue and epilogue, in one kernel.

`product` is the kernel that other operations build on: the last grid axis runs over
blocks of k, and `finish` computes the outputs of a finished block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import KernelTypeError, SpecError
from pallasite.kernels import common, configs
from pallasite.kernels.glu import ACTIVATIONS, activation_of
from pallasite.target import Gpu, Host

IDENTITY = ACTIVATIONS["identity"]
PROGRAMS_PER_THREAD = 8  # on a CPU


@dataclasses.dataclass(frozen=True)
class MatmulConfig:
    """How a matmul is split into blocks.

    Attributes:
        block_m, block_n, block_k: rows, columns, and the part of k in a step.
        splits: parts of the sum over k that run concurrently; XLA adds their results.
            Useful for few rows and columns and large k. `matmul` only.
        batch_invariant: the operations' argument.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    splits: int = 1
    batch_invariant: bool = False


def matmul(
    x: jax.Array,
    y: jax.Array,
    *,
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    activation: str | Callable[[jax.Array], jax.Array] = "identity",
    prologue: Callable[[jax.Array], jax.Array] | None = None,
    out_dtype: Any = None,
    implementation: common.Implementation = "pallasite",
    config: MatmulConfig | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """`activation(p(x) @ y + bias) + residual`, or with a gate.

    Args:
        x: (..., k), floating point.
        y: (k, n).
        gate: (k, n): the result is `activation(p(x) @ gate) * (p(x) @ y + bias)
            + residual`; both matmuls share one read of x.
        bias: (n,).
        residual: (..., n).
        activation: one of `gated_linear_unit`'s activations.
        prologue: p, an elementwise function of blocks of x (an activation, a
            conversion of 8-bit floats), traced into the kernel. By default x is used
            as it is.
        out_dtype: the result's dtype; by default x's.
        batch_invariant: whether a row's bits, and those of its gradient, may not depend
            on how many rows x has, and where it is among them. On a GPU the sum over k
            is then split for few rows only if `config` says so, and for all.

    Returns:
        (..., n). The sums and everything after them are computed in float32.
    """
    k, n = common.check_rank("matmul", "y", y, "k, n")
    common.check_array("matmul", "x", x)
    common.check_floats("matmul", x=x, y=y, gate=gate, bias=bias, residual=residual)
    if x.shape[-1] != k:
        swapped = x.shape[-1] == n
        raise SpecError(
            "matmul: the columns of x and the rows of y differ",
            [("x has shape", x.shape), ("y has shape", y.shape)],
            fix=f"pass y.T, of shape {(n, k)}: y is (k, n)"
            if swapped
            else "pass x (..., k) and y (k, n) with one k",
        )
    common.check_shape("matmul", "gate", gate, (k, n))
    common.check_shape("matmul", "bias", bias, (n,))
    common.check_shape("matmul", "residual", residual, (*x.shape[:-1], n))
    activation = activation_of("matmul", activation)
    if prologue is not None:
        if not callable(prologue):
            raise KernelTypeError(
                "matmul: prologue is not a function",
                [("is of type", type(prologue).__name__)],
                fix="pass an elementwise function of blocks of x, such as jnp.tanh",
            )
        common.check_elementwise("matmul", "prologue", prologue, x)
    common.check_invariant("matmul", implementation, batch_invariant)
    compute = common.choose(implementation, _fused, _plain)
    rows = math.prod(x.shape[:-1])
    counted = configs.MANY_ROWS if batch_invariant else rows
    config = configs.tuned(
        "matmul",
        config,
        _default(counted, k, y.shape[1], gate is not None),
        _space(rows, k),
        (x, y, gate, bias, residual),
        batch_invariant,
        activation=activation,
        has_prologue=prologue is not None,
    )
    return compute(
        x,
        y,
        gate,
        bias,
        residual,
        activation=ACTIVATIONS[activation],
        prologue=prologue,
        out_dtype=common.result_dtype(out_dtype, x),
        config=config,
    )


def _default(rows: int, k: int, n: int, gated: bool) -> MatmulConfig:
    """With a gate, two accumulators take the space of one twice as wide.

    Few rows make one row of blocks: on a GPU the sum over k is then split into parts
    of at least 512 that give every SM work several times over. A CPU reads long runs
    of y, and packs it once for many rows.
    """
    if configs.traced_for(Host):
        return (
            MatmulConfig(64, 4096)
            if rows <= 64
            else MatmulConfig(256, narrow(rows, n, 512 if gated else 1024))
        )
    if configs.traced_for(Gpu) and rows <= 64 and n and not gated:
        splits = min(16, 512 // pl.cdiv(n, 128), k // 512)
        if splits > 1:
            return MatmulConfig(splits=splits)
    return MatmulConfig(block_n=128 if gated else 256)


def narrow(rows: int, n: int, most: int, block_m: int = 256) -> int:
    """Columns of a CPU's blocks: at most `most`, with enough programs for its threads.

    Cores differ in speed, and a slow thread must not leave the others idle: eight
    programs per thread. Blocks that do not divide n would be copied at the edge.
    """
    chip = configs.chip_for(None)
    widths = [w for w in (most, most // 2, most // 4, most // 8) if w and n % w == 0]
    if not isinstance(chip, Host) or not widths:
        return most
    wanted = PROGRAMS_PER_THREAD * chip.threads / max(pl.cdiv(rows, block_m), 1)
    return next((w for w in widths if n // w >= wanted), widths[-1])


def _space(rows: int, k: int) -> dict[str, tuple[int, ...]]:
    """What the tuner tries; splits only where the rows leave the chip partly idle."""
    is_skinny = 8 * rows <= k and rows <= 256
    return {**configs.PRODUCT, **({"splits": (1, 2, 4, 8, 16)} if is_skinny else {})}


def _finished(sums, bias, residual, activation):
    """The epilogue of the sums of y alone, or of y and gate."""
    total = sums[0] if bias is None else sums[0] + bias.astype(sums[0].dtype)
    total = activation(total) if len(sums) == 1 else activation(sums[1]) * total
    return total if residual is None else total + residual.astype(total.dtype)


def _plain(x, y, gate, bias, residual, *, activation, prologue, out_dtype, config):
    del config  # only kernels have blocks
    wide = common.statistics_dtype(x.dtype)
    left = x if prologue is None else prologue(x).astype(x.dtype)
    factors = [y] if gate is None else [y, gate]
    sums = [jnp.dot(left, w, preferred_element_type=wide) for w in factors]
    return _finished(sums, bias, residual, activation).astype(out_dtype)


def _fused(x, y, gate, bias, residual, **how):
    if not x.size or not y.size:  # nothing to multiply, so no kernel
        return _plain(x, y, gate, bias, residual, **how)
    if how["config"].splits > 1:
        # The derivatives with respect to x and y have no long sum to split.
        whole = {**how, "config": dataclasses.replace(how["config"], splits=1)}
        return common.differentiated_as(
            functools.partial(_by_splits, **how),
            functools.partial(_fused, **whole),
            *(x, y, gate, bias, residual),
        )
    if _keeps_factors(x, gate, how) and configs.traced_for(Gpu):
        del how["prologue"]
        return _finished_sums(x, y, gate, bias, residual, tuple(how.items()))
    return _by_blocks(x, y, gate, bias, residual, **how)


def _keeps_factors(x, gate, how) -> bool:
    """Whether the derivative needs more than matmuls of the call's operands."""
    if how["prologue"] is not None:
        return False
    # XLA's float32 matmuls are less precise than a kernel's.
    is_narrow = x.dtype.itemsize == 2
    return gate is not None or (how["activation"] is not IDENTITY and is_narrow)


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def _finished_sums(x, y, gate, bias, residual, how):
    """Matmuls whose derivative is that of their sums, times factors.

    The factors are computed with the result, while the sums are in registers; the rest
    are plain matmuls, which XLA runs at a GPU's full rate. A backward kernel derived
    from this one would recompute the sums; with a gate, it would then accumulate two
    matmuls per step, on blocks that leave tensor cores idle.
    """
    return _by_blocks(x, y, gate, bias, residual, prologue=None, **dict(how))


@_finished_sums.defjvp
def _finished_sums_jvp(how, primals, tangents):
    x, y, gate, *_ = primals
    d_x, d_y, d_gate, d_bias, d_residual = tangents
    out, *factors = _with_factors(*primals, **dict(how))
    wide, how_of = common.statistics_dtype(x.dtype), dict(how)

    def narrow(rows, weights):
        if not how_of["config"].batch_invariant:
            return jnp.dot(rows, weights, preferred_element_type=x.dtype)
        plain = {"activation": IDENTITY, "prologue": None, "out_dtype": x.dtype}
        config = how_of["config"]
        return _by_blocks(rows, weights, None, None, None, **plain, config=config)

    def d_sum(weights, d_weights):
        return (narrow(d_x, weights) + narrow(x, d_weights)).astype(wide)

    d_value = d_sum(y, d_y)
    if d_bias is not None:
        d_value = d_value + d_bias.astype(wide)
    d_out = factors[0].astype(wide) * d_value
    if gate is not None:
        d_out = d_out + factors[1].astype(wide) * d_sum(gate, d_gate)
    if d_residual is not None:
        d_out = d_out + d_residual.astype(wide)
    return out, d_out.astype(out.dtype)


def _with_factors(x, y, gate, bias, residual, *, activation, out_dtype, config):
    """The result, and its derivatives with respect to the sums, in x's dtype."""
    weights = [y] if gate is None else [y, gate]

    def finish(sums, first, second, refs):
        value = functools.partial(
            _finished, bias=first, residual=None, activation=activation
        )
        ones = jnp.ones_like(sums[0])
        if gate is None:
            out, by_value = jax.jvp(lambda a: value([a]), (sums[0],), (ones,))
            factors = [by_value]
        else:
            of_gate = lambda b: value([sums[0], b])
            out, by_gate = jax.jvp(of_gate, (sums[1],), (ones,))
            factors = [activation(sums[1]), by_gate]
        if second is not None:
            out = out + second.astype(out.dtype)
        for ref, each in zip(refs, (out, *factors), strict=True):
            ref[...] = each.astype(ref.dtype)

    dtypes = [out_dtype] + [x.dtype] * len(weights)
    return _finished_blocks(x, weights, bias, residual, finish, dtypes, None, config)


def _by_splits(x, y, gate, bias, residual, *, activation, prologue, out_dtype, config):
    factors = [y] if gate is None else [y, gate]
    rows = x.reshape(-1, x.shape[-1])
    parts = partial_sums(rows, factors, prologue=prologue, config=config)
    sums = [common.added(p, config).reshape(*x.shape[:-1], y.shape[1]) for p in parts]
    return _finished(sums, bias, residual, activation).astype(out_dtype)


def _by_blocks(x, y, gate, bias, residual, *, activation, prologue, out_dtype, config):
    def finish(sums, first, second, refs):
        refs[0][...] = _finished(sums, first, second, activation).astype(out_dtype)

    factors = [y] if gate is None else [y, gate]
    (out,) = _finished_blocks(
        x, factors, bias, residual, finish, [out_dtype], prologue, config
    )
    return out


def _finished_blocks(x, factors, bias, residual, finish, dtypes, prologue, config):
    """Results (..., n), from `finish(sums, bias, residual, refs)` on every block."""
    rows, n = math.prod(x.shape[:-1]), factors[0].shape[1]
    extras = []
    if bias is not None:
        extras.append((bias.reshape(1, n), column_blocks))
    if residual is not None:
        extras.append((residual.reshape(rows, n), tiles))

    def finish_refs(sums, refs):
        take = iter(refs)
        first = next(take)[...] if bias is not None else None
        second = next(take)[...] if residual is not None else None
        finish(sums, first, second, list(take))

    made = product(
        x.reshape(rows, x.shape[-1]),
        factors,
        finish_refs,
        extras,
        [(jax.ShapeDtypeStruct((rows, n), dtype), tiles) for dtype in dtypes],
        prologue=prologue,
        config=config,
        name="matmul",
    )
    return [each.reshape(*x.shape[:-1], n) for each in made]


def tiles(config: MatmulConfig) -> pl.BlockSpec:
    """The spec of an operand (m, n) of `product`."""
    return pl.BlockSpec((config.block_m, config.block_n), lambda i, j, k: (i, j))


def row_blocks(config: MatmulConfig) -> pl.BlockSpec:
    """The spec of an operand (m, 1)."""
    return pl.BlockSpec((config.block_m, 1), lambda i, j, k: (i, 0))


def column_blocks(config: MatmulConfig) -> pl.BlockSpec:
    """The spec of an operand (1, n)."""
    return pl.BlockSpec((1, config.block_n), lambda i, j, k: (0, j))


def row_partials(config: MatmulConfig) -> pl.BlockSpec:
    """The spec of an output (blocks along n, m, 1): a number per row of a block."""
    return pl.BlockSpec((None, config.block_m, 1), lambda i, j, k: (j, i, 0))


def fitted(config: MatmulConfig, m: int, n: int, k: int) -> MatmulConfig:
    """The blocks, none much larger than the matmul; on a CPU, none larger at all.

    A GPU multiplies few rows by other instructions than many, if blocks have few.
    """
    sizes = {"block_m": m, "block_n": n, "block_k": k}
    if config.batch_invariant and configs.traced_for(Gpu):
        del sizes["block_m"]
    step = 1 if configs.traced_for(Host) else 16
    return dataclasses.replace(
        config,
        **{
            name: min(getattr(config, name), pl.align_to(max(size, 1), step))
            for name, size in sizes.items()
        },
    )


def product(
    x: jax.Array,
    factors: Sequence[jax.Array],
    finish: Callable[[list[Any], Sequence[Any]], None],
    extras: Sequence[tuple[jax.Array, Callable[[MatmulConfig], pl.BlockSpec]]],
    results: Sequence[tuple[Any, Callable[[MatmulConfig], pl.BlockSpec]]],
    *,
    config: MatmulConfig,
    name: str,
    prologue: Callable | None = None,
    contract: tuple[int, int] = (1, 0),
) -> list[jax.Array]:
    """`finish([x @ y for y in factors], (*extra_refs, *result_refs))` block by block.

    x is (m, k) and each factor (k, n), unless `contract` names other dimensions of x
    and of the factors as k. Each extra and result comes with a function that makes its
    spec from the block sizes.
    """
    x_k, y_k = contract
    m, k, n = x.shape[1 - x_k], x.shape[x_k], factors[0].shape[1 - y_k]
    config = fitted(config, m, n, k)
    wide = common.statistics_dtype(x.dtype)
    count = len(factors)
    steps = max(pl.cdiv(k, config.block_k), 1)  # an empty sum is stored, too
    fill: dict[str, Any] = {"fill": 0} if steps * config.block_k != k else {}

    def kernel(x_ref, *refs):
        factor_refs, rest, sums = refs[:count], refs[count:-count], refs[-count:]
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            for acc_ref in sums:
                acc_ref[...] = jnp.zeros_like(acc_ref)

        left = x_ref[...]
        if prologue is not None:
            left = prologue(left).astype(x_ref.dtype)
        for y_ref, acc_ref in zip(factor_refs, sums, strict=True):
            acc_ref[...] += lax.dot_general(
                left,
                y_ref[...],
                (((x_k,), (y_k,)), ((), ())),
                preferred_element_type=wide,
            )

        @pl.when(step == steps - 1)
        def _():
            finish([acc_ref[...] for acc_ref in sums], rest)

    def factor(size: int, axis: int, k_dim: int) -> pl.BlockSpec:
        """The spec of blocks of `size` rows or columns, indexed by a grid axis."""
        # Gradients mask what is read past an edge, and then round before the mask.
        known = {"fill": 0} if config.batch_invariant else fill
        order = lambda across, along: (along, across) if k_dim == 0 else (across, along)
        return pl.BlockSpec(
            order(size, config.block_k), lambda *ids: order(ids[axis], ids[2]), **known
        )

    return pl.pallas_call(
        kernel,
        out_shape=[shape for shape, _ in results],
        grid=(pl.cdiv(m, config.block_m), pl.cdiv(n, config.block_n), steps),
        in_specs=[
            factor(config.block_m, 0, x_k),
            *[factor(config.block_n, 1, y_k)] * count,
            *(spec(config) for _, spec in extras),
        ],
        out_specs=[spec(config) for _, spec in results],
        scratch_shapes=[pltpu.VMEM((config.block_m, config.block_n), wide)] * count,
        compiler_params=common.compiler_params(
            config, "parallel", "parallel", "arbitrary"
        ),
        cost_estimate=common.cost(
            2 * m * n * k * count,
            [x, *factors, *(a for a, _ in (*extras, *results))],
        ),
        name=name,
    )(x, *factors, *(a for a, _ in extras))


class SplitSum(NamedTuple):
    """The steps of a sum, split into parts that run concurrently: two grid axes.

    Attributes:
        steps: steps of the whole sum.
        each: steps per part; the last part may have fewer.
        count: number of parts.
    """

    steps: int
    each: int
    count: int

    @staticmethod
    def of(steps: int, wanted: int) -> "SplitSum":
        each = pl.cdiv(steps, max(1, min(wanted, steps)))
        return SplitSum(steps, each, pl.cdiv(steps, each))

    def has(self, part: Any, step: Any) -> Any:
        """Whether a part has a step."""
        return part * self.each + step < self.steps

    def step(self, part: Any, step: Any) -> Any:
        """The step's number in the whole sum; past the end, that of the last step."""
        return jnp.minimum(part * self.each + step, self.steps - 1)


def partial_sums(
    x: jax.Array,
    factors: Sequence[jax.Array],
    *,
    config: MatmulConfig,
    prologue: Callable | None = None,
) -> list[jax.Array]:
    """The partial sums of each x @ y over `config.splits` parts of k: (parts, m, n)."""
    (m, k), n = x.shape, factors[0].shape[1]
    config = fitted(config, m, n, k)
    wide = common.statistics_dtype(x.dtype)
    steps = pl.cdiv(k, config.block_k)
    parts = SplitSum.of(steps, config.splits)
    fill: dict[str, Any] = {"fill": 0} if steps * config.block_k != k else {}

    def kernel(x_ref, *refs):
        factor_refs, sums = refs[: len(factors)], refs[len(factors) :]
        step = pl.program_id(3)

        @pl.when(step == 0)
        def _():
            for sum_ref in sums:
                sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(parts.has(pl.program_id(2), step))
        def _():
            left = x_ref[...]
            if prologue is not None:
                left = prologue(left).astype(x_ref.dtype)
            for y_ref, sum_ref in zip(factor_refs, sums, strict=True):
                sum_ref[...] += jnp.dot(left, y_ref[...], preferred_element_type=wide)

    shape = jax.ShapeDtypeStruct((parts.count, m, n), wide)
    return pl.pallas_call(
        kernel,
        out_shape=[shape] * len(factors),
        grid=(
            pl.cdiv(m, config.block_m),
            pl.cdiv(n, config.block_n),
            parts.count,
            parts.each,
        ),
        in_specs=[
            pl.BlockSpec(
                (config.block_m, config.block_k),
                lambda i, j, s, t: (i, parts.step(s, t)),
                **fill,
            ),
            *[
                pl.BlockSpec(
                    (config.block_k, config.block_n),
                    lambda i, j, s, t: (parts.step(s, t), j),
                    **fill,
                )
            ]
            * len(factors),
        ],
        out_specs=[
            pl.BlockSpec(
                (None, config.block_m, config.block_n), lambda i, j, s, t: (s, i, j)
            )
        ]
        * len(factors),
        compiler_params=common.compiler_params(
            config, "parallel", "parallel", "parallel", "arbitrary"
        ),
        cost_estimate=common.cost(
            2 * m * n * k * len(factors), [x, *factors, *[shape] * len(factors)]
        ),
        name="matmul_splits",
    )(x, *factors)
