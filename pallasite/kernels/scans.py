"""Recurrences along time: `linear_recurrence` and Mamba-2's `state_space_scan`.

The last grid axis runs over blocks of time; scratch carries the state to the next
block. Within a block the first goes position by position, the second uses matmuls.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.errors import SpecError
from pallasite.kernels import common, configs
from pallasite.kernels.derivatives import Differentiable
from pallasite.target import Gpu


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
    """How a recurrence is split into blocks.

    Attributes:
        block_length, block_channels: positions and channels per block.
        together: positions whose operands are loaded before the first is used. On a
            GPU this keeps memory busy, as a channel advances one position at a time.
    """

    block_length: int = 128
    block_channels: int = 128
    together: int = 8


RECURRENCE_SPACE = {
    "block_length": (32, 64, 128, 256),
    "block_channels": (32, 64, 128, 256, 512),
    "together": (8, 16, 32, 64),
}


def _default_recurrence() -> RecurrenceConfig:
    is_gpu = configs.traced_for(Gpu)
    return RecurrenceConfig(128, 32, 64) if is_gpu else RecurrenceConfig()


def linear_recurrence(
    decay: jax.Array,
    x: jax.Array,
    initial: jax.Array | None = None,
    *,
    implementation: common.Implementation = "pallasite",
    config: RecurrenceConfig | None = None,
) -> jax.Array:
    """`h[t] = decay[t] * h[t - 1] + x[t]`, per channel (RG-LRU, S6).

    Args:
        decay, x: (batch, length, channels), floating point.
        initial: (batch, channels): h before the first position; by default zeros.

    Returns:
        h, like x; the state is float32.
    """
    operation = "linear_recurrence"
    batch, _, channels = common.check_rank(operation, "x", x, "batch, length, channels")
    common.check_array(operation, "decay", decay)
    common.check_floats(operation, decay=decay, x=x, initial=initial)
    common.check_shape(operation, "decay", decay, x.shape)
    common.check_shape(operation, "initial", initial, (batch, channels))
    if initial is None:
        initial = jnp.zeros((batch, channels), common.statistics_dtype(x.dtype))
    compute = common.choose(implementation, _stepped, _plain)
    config = configs.tuned(
        operation, config, _default_recurrence(), RECURRENCE_SPACE, (decay, x)
    )
    return compute(x, decay, initial, config=config)


def _plain(x, decay, initial, *, config):
    del config  # only kernels have blocks
    wide = common.statistics_dtype(x.dtype)
    first = decay[:, :1].astype(wide) * initial.astype(wide)[:, None]
    inputs = x.astype(wide).at[:, :1].add(first)

    def join(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    _, out = lax.associative_scan(join, (decay.astype(wide), inputs), axis=1)
    return out.astype(x.dtype)


def _stepped(x, decay, initial, *, config):
    out: Any = _recurrence(x, decay, initial, config)
    return out


@functools.partial(Differentiable, static=(3,))
def _recurrence(x, decay, initial, config):
    """All states, in x's dtype."""
    if not x.size:
        return x
    blocks = _Blocks.of(x, config)
    wide = common.statistics_dtype(x.dtype)

    def kernel(x_ref, decay_ref, initial_ref, o_ref, state_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            state_ref[...] = initial_ref[...].astype(wide)

        def step(t, state):
            rows = blocks.rows(t)
            decays = [decay_ref[row].astype(wide) for row in rows]
            inputs = [x_ref[row].astype(wide) for row in rows]
            for row, decay, value in zip(rows, decays, inputs, strict=True):
                state = decay * state + value
                o_ref[row] = state.astype(o_ref.dtype)
            return state

        state_ref[...] = lax.fori_loop(0, blocks.steps, step, state_ref[...])

    along = blocks.spec(lambda i: i)
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=blocks.grid(x),
        in_specs=[along, along, blocks.state_spec()],
        out_specs=along,
        scratch_shapes=[pltpu.VMEM((1, blocks.width), wide)],
        compiler_params=_SEMANTICS,
        cost_estimate=common.cost(2 * x.size, [x, decay, initial, x]),
        name="linear_recurrence",
    )(x, decay, initial[:, None])


_SEMANTICS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary")
)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Blocks of `steps` times `together` positions of some channels."""

    steps: int
    together: int
    width: int

    @staticmethod
    def of(x: Any, config: RecurrenceConfig) -> "_Blocks":
        _, length, channels = x.shape
        most = min(config.block_length, pl.align_to(length, 8))
        together = max(1, min(config.together, most))
        width = min(config.block_channels, channels)
        return _Blocks(pl.cdiv(most, together), together, width)

    @property
    def length(self) -> int:
        return self.steps * self.together

    def rows(self, step: Any) -> list[Any]:
        return [pl.ds(step * self.together + i, 1) for i in range(self.together)]

    def grid(self, x: Any) -> tuple[int, int, int]:
        batch, length, channels = x.shape
        return batch, pl.cdiv(channels, self.width), pl.cdiv(length, self.length)

    def spec(self, block: Any, **more: Any) -> pl.BlockSpec:
        """`block` maps step i to its block of positions."""
        shape = (None, self.length, self.width)
        return pl.BlockSpec(shape, lambda b, j, i: (b, block(i), j), **more)

    def state_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, 1, self.width), lambda b, j, i: (b, 0, j))


def _recurrence_fwd(x, decay, initial, config):
    states = _recurrence(x, decay, initial, config)
    return states, (decay, initial, states)


def _recurrence_tangent(config, kept, tangents):
    """The same recurrence of other inputs: a decay multiplies the preceding state."""
    (decay, initial, states), (d_x, d_decay, d_initial) = kept, tangents
    wide = common.statistics_dtype(states.dtype)
    before = jnp.concatenate([initial[:, None].astype(wide), states[:, :-1]], axis=1)
    inputs = d_x.astype(wide) + d_decay.astype(wide) * before
    return _recurrence(inputs, decay, d_initial, config)


def _recurrence_bwd(config, kept, cotangent):
    """Runs backwards: the cotangent of h[t] is g[t] + decay[t+1] times that of h[t+1].

    A decay multiplies the preceding state: the row above in the block of states, or
    the last row of the previous block, which a second block shows.
    """
    decay, initial, states = kept
    if not states.size:
        return tuple(map(jnp.zeros_like, (states, decay, initial)))
    blocks = _Blocks.of(states, config)
    grid = blocks.grid(states)
    wide = common.statistics_dtype(states.dtype)

    def kernel(*refs):
        (g_ref, decay_ref, state_ref, earlier_ref, initial_ref) = refs[:5]
        d_x_ref, d_decay_ref, d_initial_ref, carried_ref = refs[5:]
        i = pl.program_id(2)

        @pl.when(i == 0)
        def _():
            carried_ref[...] = jnp.zeros_like(carried_ref)

        is_first = i == pl.num_programs(2) - 1
        above = jnp.where(
            is_first, initial_ref[...].astype(wide), earlier_ref[-1:].astype(wide)
        )

        def step(s, carried):
            t = blocks.steps - 1 - s
            rows = blocks.rows(t)
            decays = [decay_ref[row].astype(wide) for row in rows]
            given = [g_ref[row].astype(wide) for row in rows]
            row_above = pl.ds(jnp.maximum(t * blocks.together - 1, 0), 1)
            first = jnp.where(t > 0, state_ref[row_above].astype(wide), above)
            before = [first, *(state_ref[row].astype(wide) for row in rows[:-1])]
            parts = zip(rows, decays, given, before, strict=True)
            for row, decay, g, state in reversed([*parts]):
                g = g + carried
                d_x_ref[row] = g.astype(d_x_ref.dtype)
                d_decay_ref[row] = (g * state).astype(d_decay_ref.dtype)
                carried = decay * g
            return carried

        carried = lax.fori_loop(0, blocks.steps, step, carried_ref[...])
        carried_ref[...] = carried

        @pl.when(is_first)
        def _():
            d_initial_ref[...] = carried.astype(d_initial_ref.dtype)

    # Positions past the end pass nothing on: zeros.
    backwards = lambda i: grid[2] - 1 - i
    along = blocks.spec(backwards, fill=0)
    rows = 8 if blocks.length % 8 == 0 else blocks.length  # of the previous block
    per_block = blocks.length // rows
    earlier = pl.BlockSpec(
        (None, rows, blocks.width),
        lambda b, j, i: (b, jnp.maximum(backwards(i) * per_block - 1, 0), j),
    )
    d_x, d_decay, d_initial = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            jax.ShapeDtypeStruct(decay.shape, decay.dtype),
            jax.ShapeDtypeStruct(initial[:, None].shape, initial.dtype),
        ],
        grid=grid,
        in_specs=[along, along, along, earlier, blocks.state_spec()],
        out_specs=[*[blocks.spec(backwards)] * 2, blocks.state_spec()],
        scratch_shapes=[pltpu.VMEM((1, blocks.width), wide)],
        compiler_params=_SEMANTICS,
        cost_estimate=common.cost(4 * states.size, [states] * 3 + [decay] * 2),
        name="linear_recurrence_backward",
    )(cotangent, decay, states, states, initial[:, None])
    return d_x, d_decay, d_initial[:, 0]


_recurrence.define(_recurrence_fwd, _recurrence_tangent, _recurrence_bwd)


@dataclasses.dataclass(frozen=True)
class StateSpaceConfig:
    """How a scan is split: positions per chunk, whose pairs form one matmul."""

    chunk: int = 128


SCAN_SPACE = {"chunk": (32, 64, 128, 256)}


def _default_scan(dtype: Any) -> StateSpaceConfig:
    """Shorter chunks where a GPU multiplies in f32, here or in the gradient.

    It does so without its matrix units: pairs of positions, of which there are more in
    long chunks, take most of the time, and operands twice the shared memory.
    """
    in_bf16 = dtype == jnp.bfloat16
    return StateSpaceConfig(128 if in_bf16 or not configs.traced_for(Gpu) else 64)


# A logarithm whose exponential is zero in float32. Decays between two positions are
# differences of sums: for much larger sums they are imprecise, for infinite ones NaN.
FORGOTTEN = -105.0


def state_space_scan(
    x: jax.Array,
    log_decay: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    implementation: common.Implementation = "pallasite",
    config: StateSpaceConfig | None = None,
) -> jax.Array:
    """Mamba-2's scan: `S[t] = exp(log_decay[t]) S[t - 1] + b[t] x[t]^T`, `c[t]^T S[t]`.

    Args:
        x: (batch, length, heads, width), the time step already multiplied in.
        log_decay: (batch, length, heads), not positive. -inf resets the state: later
            results do not depend on earlier positions. These must be finite: NaN
            anywhere may reach all results of its sequence and head.
        b, c: (batch, length, groups, state); groups divides heads, and each serves
            heads / groups consecutive heads.

    Returns:
        Like x; the state and sums are float32.
    """
    operation = "state_space_scan"
    batch, length, heads, _ = common.check_rank(
        operation, "x", x, "batch, length, heads, width"
    )
    layout = "batch, length, groups, state"
    *_, groups, state = common.check_rank(operation, "b", b, layout)
    common.check_arrays(operation, log_decay=log_decay, c=c)
    common.check_floats(operation, x=x, log_decay=log_decay, b=b, c=c)
    common.check_shape(operation, "log_decay", log_decay, (batch, length, heads))
    for name, value in {"b": b, "c": c}.items():
        common.check_shape(operation, name, value, (batch, length, groups, state))
    if not groups or heads % groups:
        raise SpecError(
            f"{operation}: groups do not divide the heads",
            [("heads", heads), ("groups", groups)],
            fix="repeat b and c so that they do",
        )
    compute = common.choose(implementation, _chunked, _plain_scan)
    config = configs.tuned(
        operation, config, _default_scan(x.dtype), SCAN_SPACE, (x, b)
    )
    return compute(x, log_decay, b, c, config=config)


def _plain_scan(x, log_decay, b, c, *, config):
    del config  # only kernels have blocks
    wide = common.statistics_dtype(x.dtype)
    repeat = functools.partial(jnp.repeat, repeats=x.shape[2] // b.shape[2], axis=2)
    by_time = [jnp.moveaxis(v.astype(wide), 1, 0) for v in (x, log_decay, b, c)]

    def step(state, now):
        x, log_decay, b, c = now
        b, c = (repeat(v[:, None])[:, 0] for v in (b, c))
        state = jnp.exp(log_decay)[..., None, None] * state
        state = state + b[..., :, None] * x[..., None, :]
        return state, jnp.einsum("bhn,bhnp->bhp", c, state)

    start = jnp.zeros((x.shape[0], x.shape[2], b.shape[3], x.shape[3]), wide)
    _, out = lax.scan(step, start, tuple(by_time))
    return jnp.moveaxis(out, 0, 1).astype(x.dtype)


def _chunked(x, log_decay, b, c, *, config):
    batch, length, heads, width = x.shape
    groups, state = b.shape[2:]
    if not x.size:
        return x
    chunk = min(config.chunk, pl.align_to(length, 8))
    chunks = pl.cdiv(length, chunk)
    wide = common.statistics_dtype(x.dtype)
    # Padding past the end adds nothing and does not decay.
    past = chunks * chunk - length
    pad = lambda v: jnp.pad(v, ((0, 0), (0, past)) + ((0, 0),) * (v.ndim - 2))
    padded = [pad(v) if past else v for v in (x, log_decay, b, c)]
    x, log_decay, b, c = padded
    within = jnp.maximum(log_decay.astype(wide), FORGOTTEN)
    within = within.reshape(batch, chunks, chunk, heads)
    total = jnp.cumsum(within, axis=2).transpose(0, 3, 1, 2)  # log of decay so far

    def kernel(x_ref, b_ref, c_ref, down_ref, along_ref, o_ref, state_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            state_ref[...] = jnp.zeros_like(state_ref)

        x, b, c = x_ref[...], b_ref[...], c_ref[...]
        down, along = down_ref[...], along_ref[...]  # (chunk, 1), (1, chunk)
        pairs = lax.dot_general(
            c, b, (((1,), (1,)), ((), ())), preferred_element_type=wide
        )
        rows = lax.broadcasted_iota(jnp.int32, pairs.shape, 0)
        columns = lax.broadcasted_iota(jnp.int32, pairs.shape, 1)
        # Masked before the exponential, which could overflow above the diagonal.
        decay = jnp.exp(jnp.where(rows >= columns, down - along, -jnp.inf))
        out = jnp.dot((pairs * decay).astype(x.dtype), x, preferred_element_type=wide)
        old = state_ref[...]
        carried = jnp.dot(c, old.astype(c.dtype), preferred_element_type=wide)
        o_ref[...] = (out + jnp.exp(down) * carried).astype(o_ref.dtype)
        last = down_ref[chunk - 1 :]
        rest = (b.astype(wide) * jnp.exp(last - down)).astype(x.dtype)
        state_ref[...] = jnp.exp(last) * old + lax.dot_general(
            rest, x, (((0,), (0,)), ((), ())), preferred_element_type=wide
        )

    group = heads // groups
    of_head = pl.BlockSpec((None, chunk, None, width), lambda n, h, i: (n, i, h, 0))
    of_group = pl.BlockSpec(
        (None, chunk, None, state), lambda n, h, i: (n, i, h // group, 0)
    )
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(batch, heads, chunks),
        in_specs=[
            of_head,
            of_group,
            of_group,
            pl.BlockSpec((None, None, None, chunk, 1), lambda n, h, i: (n, h, i, 0, 0)),
            pl.BlockSpec((None, None, None, 1, chunk), lambda n, h, i: (n, h, i, 0, 0)),
        ],
        out_specs=of_head,
        scratch_shapes=[pltpu.VMEM((state, width), wide)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        # Per chunk: its pairs, reading from the state, and adding to the state.
        cost_estimate=common.cost(
            2 * x.size // width * (chunk * (state + width) + 2 * state * width),
            [x, x, b, c, total, total],
            x.size // width * (chunk + 2),
        ),
        name="state_space_scan",
    )(x, b, c, total[..., None], total[..., None, :])
    return out[:, :length]
