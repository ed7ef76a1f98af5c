"""Control flow and call shapes: branches, loops, nesting, pytrees, odd grids."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu

from .case import Family, integers, normal, uniform

zoo = Family("control")


def nested_cond_kernel(x_ref, o_ref):
    """A branch on the program inside a branch on the data."""
    x = x_ref[...]
    even = pl.program_id(0) % 2 == 0
    o_ref[...] = lax.cond(
        jnp.sum(x) > 0.0,
        lambda: lax.cond(even, lambda: 2.0 * x, lambda: -x),
        lambda: lax.cond(even, lambda: x * x, lambda: jnp.abs(x) + 1.0),
    )


def nested_cond_reference(x):
    blocks = x.reshape(6, 8, 16)
    positive = blocks.sum(axis=(1, 2), keepdims=True) > 0.0
    even = (jnp.arange(6) % 2 == 0)[:, None, None]
    first = jnp.where(even, 2.0 * blocks, -blocks)
    second = jnp.where(even, blocks * blocks, jnp.abs(blocks) + 1.0)
    return jnp.where(positive, first, second).reshape(x.shape)


@zoo.case(reference=nested_cond_reference, make_args=lambda rng: (normal(rng, 48, 16),))
def nested_cond(x, **call):
    rows = pl.BlockSpec((8, 16), lambda i: (i, 0))
    return pl.pallas_call(
        nested_cond_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(6,),
        in_specs=[rows],
        out_specs=rows,
        **call,
    )(x)


ACTIVATIONS = (jnp.tanh, jax.nn.relu, jnp.square, jax.nn.sigmoid)


def switch_kernel(choice_ref, x_ref, o_ref):
    """Each block names the function that it wants."""
    o_ref[...] = lax.switch(choice_ref[pl.program_id(0)], ACTIVATIONS, x_ref[...])


def switch_reference(choice, x):
    results = jnp.stack([function(x) for function in ACTIVATIONS])
    return results[jnp.repeat(choice, 8), jnp.arange(x.shape[0])]


@zoo.case(
    reference=switch_reference,
    make_args=lambda rng: (integers(rng, 5, high=4), normal(rng, 40, 16)),
    tags="prefetch",
)
def switch_activation(choice, x, **call):
    rows = pl.BlockSpec((8, 16), lambda i, choice: (i, 0))
    return pl.pallas_call(
        switch_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(5,), in_specs=[rows], out_specs=rows
        ),
        **call,
    )(choice, x)


def collatz_kernel(x_ref, o_ref):
    """Steps of every element to one; the block runs until its last element is there."""

    def body(state):
        x, steps = state
        following = jnp.where(x % 2 == 0, x // 2, 3 * x + 1)
        running = x > 1
        return jnp.where(running, following, x), steps + running.astype(jnp.int32)

    start = (x_ref[...], jnp.zeros_like(x_ref))
    o_ref[...] = lax.while_loop(lambda state: jnp.any(state[0] > 1), body, start)[1]


def collatz_reference(x):
    def body(_, state):
        x, steps = state
        following = jnp.where(x % 2 == 0, x // 2, 3 * x + 1)
        return jnp.where(x > 1, following, x), steps + (x > 1).astype(jnp.int32)

    return lax.fori_loop(0, 120, body, (x, jnp.zeros_like(x)))[1]


@zoo.case(
    reference=collatz_reference,
    make_args=lambda rng: (integers(rng, 32, low=1, high=90),),
    tags="int while nograd nofloat",
)
def collatz(x, **call):
    """No number below 97 needs as many as 120 steps."""
    block = pl.BlockSpec((8,), lambda i: (i,))
    return pl.pallas_call(
        collatz_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4,),
        in_specs=[block],
        out_specs=block,
        **call,
    )(x)


def newton_kernel(x_ref, o_ref):
    """Square roots by Newton's method, until no element moves any more."""
    x = x_ref[...]

    def unfinished(state):
        guess, previous, steps = state
        return (steps < 40) & (jnp.max(jnp.abs(guess - previous)) > 1e-6)

    def improve(state):
        guess, _, steps = state
        return 0.5 * (guess + x / guess), guess, steps + 1

    start = (0.5 * (x + 1.0), jnp.zeros_like(x), 0)
    o_ref[...] = lax.while_loop(unfinished, improve, start)[0]


@zoo.case(
    reference=jnp.sqrt,
    make_args=lambda rng: (uniform(rng, 24, 16, low=0.1, high=50.0),),
    tags="while nograd",
)
def newton_sqrt(x, **call):
    rows = pl.BlockSpec((8, 16), lambda i: (i, 0))
    return pl.pallas_call(
        newton_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        in_specs=[rows],
        out_specs=rows,
        **call,
    )(x)


def first_above_kernel(x_ref, o_ref, *, limit):
    """Walks along until the running sum exceeds a limit, and tells where."""
    size = x_ref.shape[0]

    def search(state):
        index, total = state
        return (index < size) & (total <= limit)

    def step(state):
        index, total = state
        return index + 1, total + x_ref[jnp.minimum(index, size - 1)]

    o_ref[0] = lax.while_loop(search, step, (0, 0))[0]


def first_above_reference(x):
    return jnp.minimum(jnp.sum(jnp.cumsum(x) <= 200) + 1, x.shape[0]).astype(jnp.int32)[
        None
    ]


@zoo.case(
    reference=first_above_reference,
    make_args=lambda rng: (integers(rng, 40, high=12),),
    tags="int smem while nograd nofloat",
)
def early_exit_search(x, **call):
    scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        functools.partial(first_above_kernel, limit=200),
        out_shape=jax.ShapeDtypeStruct((1,), jnp.int32),
        in_specs=[scalars],
        out_specs=scalars,
        **call,
    )(x)


def gcd_kernel(x_ref, y_ref, o_ref):
    """Euclid's algorithm for a whole block, with a pair as the state of the loop."""

    def body(pair):
        x, y = pair
        safe = jnp.maximum(y, 1)
        return jnp.where(y > 0, y, x), jnp.where(y > 0, lax.rem(x, safe), 0)

    pair = (x_ref[...], y_ref[...])
    o_ref[...] = lax.while_loop(lambda pair: jnp.any(pair[1] > 0), body, pair)[0]


@zoo.case(
    reference=jnp.gcd,
    make_args=lambda rng: (
        integers(rng, 60, low=1, high=999),
        integers(rng, 60, high=999),
    ),
    tags="int odd fill while nograd nofloat",
)
def gcd_pairs(x, y, **call):
    """The last block is short: what is outside is filled, for a loop must end."""
    block = pl.BlockSpec((16,), lambda i: (i,))
    filled = pl.BlockSpec((16,), lambda i: (i,), fill=0)
    return pl.pallas_call(
        gcd_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4,),
        in_specs=[filled, filled],
        out_specs=block,
        **call,
    )(x, y)


@jax.custom_jvp
def safe_log(x):
    """log(x) whose derivative stays finite at zero."""
    return jnp.log(jnp.maximum(x, 1e-6))


@safe_log.defjvp
def safe_log_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return safe_log(x), dx / jnp.maximum(x, 1e-6)


@jax.jit
def entropy_term(p):
    return -p * safe_log(p)


def entropy_kernel(x_ref, o_ref):
    """Calls a jitted function that calls one with its own derivative."""
    probabilities = jax.nn.softmax(x_ref[...], axis=1)
    o_ref[...] = jnp.sum(entropy_term(probabilities), axis=1, keepdims=True)


def entropy_reference(x):
    return jnp.sum(entropy_term(jax.nn.softmax(x, axis=1)), axis=1, keepdims=True)


@zoo.case(reference=entropy_reference, make_args=lambda rng: (normal(rng, 16, 24),))
def nested_jit_custom_jvp(x, **call):
    return pl.pallas_call(
        entropy_kernel,
        out_shape=jax.ShapeDtypeStruct((16, 1), x.dtype),
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 24), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 1), lambda i: (i, 0)),
        **call,
    )(x)


def rolling_step(state, row):
    state = 0.8 * state + 0.2 * row
    return state, row - state


def scan_kernel(x_ref, o_ref, last_ref):
    """A scan over the rows of a block, with inputs, a carry, and stacked results."""
    start = jnp.zeros((x_ref.shape[1],), jnp.float32)
    last, deviations = lax.scan(rolling_step, start, x_ref[...])
    o_ref[...] = deviations
    last_ref[...] = last


def scan_reference(x):
    last, deviations = lax.scan(rolling_step, jnp.zeros((24,), jnp.float32), x)
    return deviations, last


@zoo.case(reference=scan_reference, make_args=lambda rng: (normal(rng, 12, 24),))
def scan_in_kernel(x, **call):
    return pl.pallas_call(
        scan_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((12, 24), x.dtype),
            jax.ShapeDtypeStruct((24,), x.dtype),
        ),
        grid=(2,),
        in_specs=[pl.BlockSpec((12, 12), lambda j: (0, j))],
        out_specs=(
            pl.BlockSpec((12, 12), lambda j: (0, j)),
            pl.BlockSpec((12,), lambda j: (j,)),
        ),
        **call,
    )(x)


def scoped_kernel(x_ref, o_ref):
    """Two nested temporaries, and a value that leaves them."""

    def outer(squares_ref):
        squares_ref[...] = x_ref[...] * x_ref[...]

        def inner(sums_ref):
            sums_ref[...] = jnp.sum(squares_ref[...], axis=1, keepdims=True)
            return squares_ref[...] / sums_ref[...]

        return pl.run_scoped(inner, pltpu.VMEM((8, 1), jnp.float32))

    o_ref[...] = pl.run_scoped(outer, pltpu.VMEM((8, 16), jnp.float32))


@zoo.case(
    reference=lambda x: x * x / jnp.sum(x * x, axis=1, keepdims=True),
    make_args=lambda rng: (normal(rng, 24, 16),),
    tags="scratch",
)
def run_scoped_temporaries(x, **call):
    rows = pl.BlockSpec((8, 16), lambda i: (i, 0))
    return pl.pallas_call(
        scoped_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        in_specs=[rows],
        out_specs=rows,
        **call,
    )(x)


def loop_kernel(x_ref, o_ref):
    """A decorated loop body that changes memory under a condition."""
    o_ref[...] = jnp.zeros_like(o_ref)

    @pl.loop(0, x_ref.shape[0])
    def _(row):
        here = pl.ds(row, 1)

        @pl.when(row % 3 != 1)
        def _():
            o_ref[...] += x_ref[here, :]


def loop_reference(x):
    keep = jnp.arange(x.shape[0]) % 3 != 1
    return jnp.sum(jnp.where(keep[:, None], x, 0.0), axis=0, keepdims=True)


@zoo.case(reference=loop_reference, make_args=lambda rng: (normal(rng, 14, 32),))
def loop_with_when(x, **call):
    return pl.pallas_call(
        loop_kernel,
        out_shape=jax.ShapeDtypeStruct((1, 32), x.dtype),
        **call,
    )(x)


def statistics_kernel(x_ref, out_refs):
    """Writes a dictionary of results, one entry of which is a pair."""
    x = x_ref[...]
    out_refs["mean"][...] = jnp.mean(x, axis=1, keepdims=True)
    low_ref, high_ref = out_refs["range"]
    low_ref[...] = jnp.min(x, axis=1, keepdims=True)
    high_ref[...] = jnp.max(x, axis=1, keepdims=True)


def statistics_reference(x):
    return {
        "mean": x.mean(axis=1, keepdims=True),
        "range": (x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)),
    }


@zoo.case(reference=statistics_reference, make_args=lambda rng: (normal(rng, 16, 32),))
def dictionary_outputs(x, **call):
    column = pl.BlockSpec((8, 1), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct((16, 1), x.dtype)
    return pl.pallas_call(
        statistics_kernel,
        out_shape={"mean": shape, "range": (shape, shape)},
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 32), lambda i: (i, 0))],
        out_specs={"mean": column, "range": (column, column)},
        **call,
    )(x)


def layer_kernel(params_ref, x_ref, o_ref):
    """Parameters come as one dictionary of refs."""
    hidden = jnp.dot(x_ref[...], params_ref["weight"][...])
    o_ref[...] = jnp.tanh(hidden + params_ref["bias"][...])


@zoo.case(
    reference=lambda weight, bias, x: jnp.tanh(jnp.dot(x, weight) + bias),
    make_args=lambda rng: (
        normal(rng, 16, 24),
        normal(rng, 1, 24),
        normal(rng, 24, 16),
    ),
    vmap_axes=(None, None, 0),
)
def dictionary_inputs(weight, bias, x, **call):
    whole = lambda array: pl.BlockSpec(array.shape, lambda i: (0, 0))
    return pl.pallas_call(
        layer_kernel,
        out_shape=jax.ShapeDtypeStruct((24, 24), x.dtype),
        grid=(3,),
        in_specs=[
            {"weight": whole(weight), "bias": whole(bias)},
            pl.BlockSpec((8, 16), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec((8, 24), lambda i: (i, 0)),
        **call,
    )({"weight": weight, "bias": bias}, x)


def quadratic_kernel(a_ref, b_ref, c_ref, small_ref, large_ref):
    """No grid and no specs: whole arrays in, two whole arrays out."""
    a, b, c = a_ref[...], b_ref[...], c_ref[...]
    root = jnp.sqrt(b * b + 4.0 * a * c)
    large = 0.5 * (b + root) / a
    large_ref[...] = large
    small_ref[...] = -c / (a * large)


def quadratic_reference(a, b, c):
    root = jnp.sqrt(b * b + 4.0 * a * c)
    return (b - root) / (2.0 * a), (b + root) / (2.0 * a)


@zoo.case(
    reference=quadratic_reference,
    make_args=lambda rng: tuple(uniform(rng, 5, 7, low=0.5, high=2.0) for _ in "abc"),
)
def no_grid_two_outputs(a, b, c, **call):
    shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
    return pl.pallas_call(quadratic_kernel, out_shape=(shape, shape), **call)(a, b, c)


def squeezed_kernel(x_ref, o_ref):
    """Two of four dimensions are squeezed away, in the middle and in front."""
    o_ref[...] = jnp.cumsum(x_ref[...], axis=0)


@zoo.case(
    reference=lambda x: jnp.cumsum(x, axis=1).transpose(0, 2, 1, 3),
    make_args=lambda rng: (normal(rng, 2, 8, 3, 12),),
)
def squeezed_dimensions(x, **call):
    """(batch, time, head, width) to (batch, head, time, width), by specs alone."""
    return pl.pallas_call(
        squeezed_kernel,
        out_shape=jax.ShapeDtypeStruct((2, 3, 8, 12), x.dtype),
        grid=(2, 3),
        in_specs=[
            pl.BlockSpec((None, 8, pl.Squeezed(), 12), lambda b, h: (b, 0, h, 0))
        ],
        out_specs=pl.BlockSpec((pl.Squeezed(), None, 8, 12), lambda b, h: (b, h, 0, 0)),
        **call,
    )(x)


def four_axes_kernel(x_ref, scale_ref, o_ref):
    """A block of four dimensions, reduced over the first of them."""
    o_ref[...] = jnp.sum(x_ref[...] * scale_ref[...], axis=0)


@zoo.case(
    reference=lambda x, scale: jnp.sum(x * scale, axis=0),
    make_args=lambda rng: (normal(rng, 3, 5, 10, 12), normal(rng, 1, 1, 10, 12)),
    tags="odd",
)
def four_dimensional_blocks(x, scale, **call):
    return pl.pallas_call(
        four_axes_kernel,
        out_shape=jax.ShapeDtypeStruct((5, 10, 12), x.dtype),
        grid=(3, 3, 1),
        in_specs=[
            pl.BlockSpec((3, 2, 4, 12), lambda i, j, k: (0, i, j, k)),
            pl.BlockSpec((1, 1, 4, 12), lambda i, j, k: (0, 0, j, k)),
        ],
        out_specs=pl.BlockSpec((2, 4, 12), lambda i, j, k: (i, j, k)),
        **call,
    )(x, scale)


def increment_kernel(x_ref, o_ref):
    """What it computes does not matter where no program runs."""
    o_ref[...] = x_ref[...] + 1.0


@zoo.case(
    reference=lambda x: x + 1.0,
    make_args=lambda rng: (normal(rng, 0, 16),),
)
def empty_grid(x, **call):
    """An array without rows: a grid of no programs at all."""
    rows = pl.BlockSpec((8, 16), lambda i: (i, 0))
    return pl.pallas_call(
        increment_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], 8),),
        in_specs=[rows],
        out_specs=rows,
        **call,
    )(x)


def coordinates_kernel(o_ref):
    """No input: every program writes where it is, and how many there are."""
    row = pl.program_id(0) * o_ref.shape[0]
    column = pl.program_id(1) * o_ref.shape[1]
    rows = row + lax.broadcasted_iota(jnp.int32, o_ref.shape, 0)
    columns = column + lax.broadcasted_iota(jnp.int32, o_ref.shape, 1)
    o_ref[...] = 1000 * rows + columns + 100_000 * pl.num_programs(1)


def coordinates_reference():
    rows, columns = jnp.arange(12)[:, None], jnp.arange(30)[None, :]
    return (1000 * rows + columns + 300_000).astype(jnp.int32)


@zoo.case(
    reference=coordinates_reference,
    make_args=lambda rng: (),
    tags="int nograd nofloat",
    vmap_axes=None,
    why="it has no argument to map over",
)
def no_inputs(**call):
    return pl.pallas_call(
        coordinates_kernel,
        out_shape=jax.ShapeDtypeStruct((12, 30), jnp.int32),
        grid=(2, 3),
        out_specs=pl.BlockSpec((6, 10), lambda i, j: (i, j)),
        **call,
    )()


def dropout_block(key, x, rate):
    keep = jax.random.uniform(key, x.shape) >= rate
    return jnp.where(keep, x / (1.0 - rate), 0.0)


def dropout_kernel(key_ref, x_ref, o_ref, *, rate):
    """Random numbers inside the kernel, from one key per program."""
    key = jax.random.wrap_key_data(key_ref[...], impl="threefry2x32")
    key = jax.random.fold_in(key, pl.program_id(0))
    o_ref[...] = dropout_block(key, x_ref[...], rate)


def dropout_reference(key_data, x):
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    blocks = [
        dropout_block(jax.random.fold_in(key, i), x[8 * i : 8 * i + 8], 0.25)
        for i in range(3)
    ]
    return jnp.concatenate(blocks)


@zoo.case(
    reference=dropout_reference,
    make_args=lambda rng: (
        integers(rng, 2, low=0, high=2**32, dtype=jnp.uint32),
        normal(rng, 24, 16),
    ),
    tags="int",
)
def threefry_dropout(key_data, x, **call):
    rows = pl.BlockSpec((8, 16), lambda i: (i, 0))
    return pl.pallas_call(
        functools.partial(dropout_kernel, rate=0.25),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        in_specs=[pl.BlockSpec((2,), lambda i: (0,)), rows],
        out_specs=rows,
        **call,
    )(key_data, x)


def escape_times(real, imaginary, limit):
    def body(_, state):
        x, y, count = state
        inside = x * x + y * y <= 4.0
        next_x = jnp.where(inside, x * x - y * y + real, x)
        next_y = jnp.where(inside, 2.0 * x * y + imaginary, y)
        return next_x, next_y, count + inside.astype(jnp.int32)

    start = (
        jnp.zeros_like(real),
        jnp.zeros_like(real),
        jnp.zeros(real.shape, jnp.int32),
    )
    return lax.fori_loop(0, limit, body, start)[2]


def mandelbrot_kernel(corner_ref, o_ref, *, limit):
    """Escape times of one tile of the plane, from nothing but its corner."""
    row = pl.program_id(0) * o_ref.shape[0] + lax.broadcasted_iota(
        jnp.int32, o_ref.shape, 0
    )
    column = pl.program_id(1) * o_ref.shape[1] + lax.broadcasted_iota(
        jnp.int32, o_ref.shape, 1
    )
    real = corner_ref[0] + 0.125 * column.astype(jnp.float32)
    imaginary = corner_ref[1] + 0.125 * row.astype(jnp.float32)
    o_ref[...] = escape_times(real, imaginary, limit)


def mandelbrot_reference(corner):
    real = corner[0] + 0.125 * jnp.arange(24, dtype=jnp.float32)[None, :]
    imaginary = corner[1] + 0.125 * jnp.arange(20, dtype=jnp.float32)[:, None]
    real, imaginary = jnp.broadcast_arrays(real, imaginary)
    return escape_times(real, imaginary, 8)


@zoo.case(
    reference=mandelbrot_reference,
    make_args=lambda rng: (
        jnp.asarray([-2.0, -1.25], jnp.float32)
        + 0.125 * integers(rng, 2, low=-2, high=3).astype(jnp.float32),
    ),
    tags="smem int odd nograd",
)
def mandelbrot(corner, **call):
    """Coordinates in eighths and few steps: rounding cannot move a pixel."""
    return pl.pallas_call(
        functools.partial(mandelbrot_kernel, limit=8),
        out_shape=jax.ShapeDtypeStruct((20, 24), jnp.int32),
        grid=(3, 2),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM)],
        out_specs=pl.BlockSpec((8, 16), lambda i, j: (i, j)),
        **call,
    )(corner)


def substitution_kernel(lower_ref, b_ref, o_ref):
    """Solves a triangular system row by row, in place in the output."""
    o_ref[...] = jnp.zeros_like(o_ref)

    def body(i, carry):
        here = pl.ds(i, 1)
        row = lower_ref[here, :]
        known = jnp.dot(row, o_ref[...], preferred_element_type=jnp.float32)
        o_ref[here, :] = (b_ref[here, :] - known) / lower_ref[here, here]
        return carry

    lax.fori_loop(0, lower_ref.shape[0], body, 0)


@zoo.case(
    reference=lambda lower, b: jax.scipy.linalg.solve_triangular(lower, b, lower=True),
    make_args=lambda rng: (
        jnp.tril(normal(rng, 12, 12, scale=0.3)) + 2.0 * jnp.eye(12),
        normal(rng, 12, 8),
    ),
    rtol=1e-4,
    atol=1e-4,
)
def forward_substitution(lower, b, **call):
    columns = pl.BlockSpec((12, 4), lambda j: (0, j))
    return pl.pallas_call(
        substitution_kernel,
        out_shape=jax.ShapeDtypeStruct(b.shape, b.dtype),
        grid=(2,),
        in_specs=[pl.BlockSpec((12, 12), lambda j: (0, 0)), columns],
        out_specs=columns,
        **call,
    )(lower, b)


def energy(position):
    return jnp.sum(0.25 * position**4 - jnp.cos(position))


def gradient_kernel(x_ref, o_ref):
    """Differentiates and vectorises inside the kernel: one step downhill per row."""
    o_ref[...] = x_ref[...] - 0.1 * jax.vmap(jax.grad(energy))(x_ref[...])


@zoo.case(
    reference=lambda x: x - 0.1 * (x**3 + jnp.sin(x)),
    make_args=lambda rng: (normal(rng, 18, 10),),
    tags="odd",
)
def gradient_in_kernel(x, **call):
    rows = pl.BlockSpec((8, 10), lambda i: (i, 0))
    return pl.pallas_call(
        gradient_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(3,),
        in_specs=[rows],
        out_specs=rows,
        **call,
    )(x)


def power_kernel(x_ref, exponent_ref, o_ref):
    """Integer power by squaring: as many steps as the exponent has bits."""

    def body(state):
        base, exponent, result = state
        result = lax.cond(exponent % 2 == 1, lambda: result * base, lambda: result)
        return base * base, exponent // 2, result

    start = (x_ref[...], exponent_ref[0], jnp.ones_like(x_ref))
    o_ref[...] = lax.while_loop(lambda state: state[1] > 0, body, start)[2]


@zoo.case(
    reference=lambda x, exponent: x ** exponent[0].astype(jnp.float32),
    make_args=lambda rng: (
        uniform(rng, 16, 8, low=0.5, high=1.5),
        integers(rng, 1, high=14),
    ),
    tags="smem while nograd",
    rtol=1e-4,
    atol=1e-4,
)
def power_by_squaring(x, exponent, **call):
    return pl.pallas_call(
        power_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        in_specs=[
            pl.BlockSpec((16, 8), lambda i: (0, 0)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
        ],
        out_specs=pl.BlockSpec((16, 8), lambda i: (0, 0)),
        **call,
    )(x, exponent)


def triangle_kernel(x_ref, o_ref):
    """A loop inside a loop whose bound is the outer counter; memory changes in both."""
    o_ref[...] = jnp.zeros_like(o_ref)

    def outer(i, carry):
        def inner(j, carry):
            o_ref[pl.ds(i, 1), :] += x_ref[pl.ds(j, 1), :]
            return carry

        return lax.fori_loop(0, i + 1, inner, carry)

    lax.fori_loop(0, x_ref.shape[0], outer, 0)


@zoo.case(
    reference=lambda x: jnp.cumsum(x, axis=0),
    make_args=lambda rng: (normal(rng, 9, 20),),
    tags="while nograd",
)
def nested_fori_triangle(x, **call):
    columns = pl.BlockSpec((9, 10), lambda j: (0, j))
    return pl.pallas_call(
        triangle_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(2,),
        in_specs=[columns],
        out_specs=columns,
        **call,
    )(x)
