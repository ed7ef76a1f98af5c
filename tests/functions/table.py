"""How each public function of JAX is called: its operands, and the ones left out.

A row is `letters` for the operands (below) and optionally a call. `names()` lists what
this JAX has; a name that is in none of the tables is unclassified, and a test fails.

Letters: x any, u in (-1, 1), p in (0, 1), q positive, g over 1, of the tested dtype and
shape; s a square matrix, v a vector, t of three axes, of the tested dtype; i indices
from 0 to 4, n counts from 0 to 6, m a mask, k a random key, of their own dtype.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.nn
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
from jax import lax

MODULES = {
    "jnp": jnp,
    "lax": lax,
    "nn": jax.nn,
    "special": jax.scipy.special,
    "random": jax.random,
}


@dataclass(frozen=True)
class Row:
    """One function: its operands by letter, and how they are passed."""

    letters: str
    call: Callable[..., Any] | None = None


def names(module: str) -> list[str]:
    """The public functions of a module of `MODULES`."""
    found = []
    for name in dir(MODULES[module]):
        value = getattr(MODULES[module], name)
        plain = not inspect.ismodule(value) and not isinstance(value, type)
        if name[0] != "_" and plain and callable(value) and name[-2:] != "_p":
            found.append(name)
    return found


def rows(module: str) -> Iterator[tuple[str, Row]]:
    """The rows of a module, of functions that this JAX has."""
    for name, row in TABLES[module].items():
        if hasattr(MODULES[module], name):
            yield name, row


def unclassified(module: str) -> list[str]:
    known = TABLES[module].keys() | LEFT_OUT[module].keys()
    return [name for name in names(module) if name not in known]


def _group(**by_letters: str) -> dict[str, Row]:
    return {
        name: Row(letters)
        for letters, text in by_letters.items()
        for name in text.split()
    }


def _calls(letters: str, **calls: Callable[..., Any]) -> dict[str, Row]:
    return {name: Row(letters, call) for name, call in calls.items()}


def _left(why: str, text: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), why)


CONSTANT, NOT_ARRAYS = "takes no array", "is not a function from arrays to arrays"
DYNAMIC = "has a result whose shape depends on values"
DEVICES = "is about devices"

# --- jnp ---

_JNP = _group(
    x="""abs absolute all amax amin angle any argmax argmin argsort around asarray
    array atleast_1d atleast_2d atleast_3d arcsinh asinh arctan atan bitwise_count
    bitwise_invert bitwise_not cbrt ceil conj conjugate copy cos cosh count_nonzero
    cumprod cumsum deg2rad degrees diag diagflat diff ediff1d empty_like exp exp2 expm1
    fabs fix flip flipud floor frexp i0 imag invert isfinite isinf isnan isneginf
    isposinf iscomplex isreal logical_not max mean median min modf nan_to_num nanargmax
    nanargmin nancumprod nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum
    nanvar negative ones_like positive prod ptp rad2deg radians ravel real rint round
    sign signbit sin sinc sinh sort square squeeze std sum tan tanh transpose trunc
    trapezoid unwrap var zeros_like gradient sort_complex minmax""",
    u="arccos acos arcsin asin arctanh atanh",
    g="arccosh acosh",
    q="log log10 log1p log2 sqrt reciprocal spacing",
    xx="""add allclose append arctan2 atan2 array_equal array_equiv bitwise_and
    bitwise_or bitwise_xor broadcast_arrays copysign divmod equal float_power
    floor_divide fmax fmin fmod gcd greater greater_equal heaviside hypot isclose isin
    lcm less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor maximum
    minimum mod multiply nextafter not_equal remainder subtract vecdot""",
    xq="divide true_divide",
    qx="pow power",
    xn="bitwise_left_shift bitwise_right_shift left_shift right_shift ldexp",
    t="matrix_transpose",
    s="trace tril triu diagonal fliplr rot90 corrcoef cov",
    ss="dot inner matmul kron outer tensordot",
    vv="vdot convolve correlate polyadd polysub polymul meshgrid",
    v="vander polyder polyint",
)
_JNP |= _calls(
    "x",
    astype=lambda f, x: [f(x, d) for d in (np.float32, np.int32, np.bool_)],
    apply_along_axis=lambda f, x: f(jnp.cumsum, -1, x),
    apply_over_axes=lambda f, x: f(jnp.sum, x, [-1]),
    argpartition=lambda f, x: jnp.sort(f(x, 2)[..., :2], -1),
    partition=lambda f, x: f(x, 2)[..., 2],
    array_split=lambda f, x: f(x, 3, axis=-1),
    average=lambda f, x: f(x, axis=-1),
    block=lambda f, x: f([[x, x], [x, x]]),
    broadcast_to=lambda f, x: f(x, (2, *x.shape)),
    column_stack=lambda f, x: f([x, x]),
    compress=lambda f, x: f(x[0] > 0, x, axis=0, size=3),
    concat=lambda f, x: f([x, x], axis=-1),
    concatenate=lambda f, x: f([x, x + x], axis=-1),
    cross=lambda f, x: f(x[..., :3], x[..., 1:4]),
    cumulative_prod=lambda f, x: f(x, axis=-1),
    cumulative_sum=lambda f, x: f(x, axis=-1, include_initial=True),
    delete=lambda f, x: f(x, np.array([1, 3]), axis=-1),
    dsplit=lambda f, x: f(x[..., None, :4], 2),
    dstack=lambda f, x: f([x, x]),
    hstack=lambda f, x: f([x, x]),
    vstack=lambda f, x: f([x, x]),
    expand_dims=lambda f, x: f(x, (0, -1)),
    extract=lambda f, x: f(x > 0, x, size=6, fill_value=0),
    fill_diagonal=lambda f, x: f(x, 3, inplace=False),
    flatnonzero=lambda f, x: f(x, size=9, fill_value=0),
    nonzero=lambda f, x: f(x, size=9, fill_value=0),
    argwhere=lambda f, x: f(x, size=9, fill_value=0),
    full_like=lambda f, x: f(x, 1),
    histogram=lambda f, x: f(x, bins=5, range=(-3, 3)),
    histogram_bin_edges=lambda f, x: f(x, bins=5),
    histogramdd=lambda f, x: f(x[..., :2], bins=3),
    hsplit=lambda f, x: f(x[..., :4], 2),
    vsplit=lambda f, x: f(x[:4], 2),
    insert=lambda f, x: f(x, 2, 1, axis=-1),
    ix_=lambda f, x: f(x.ravel(), x.ravel()),
    moveaxis=lambda f, x: f(x, 0, -1),
    rollaxis=lambda f, x: f(x, x.ndim - 1),
    swapaxes=lambda f, x: f(x, 0, -1),
    permute_dims=lambda f, x: f(x, tuple(range(x.ndim))[::-1]),
    nanpercentile=lambda f, x: f(x, 30.0, axis=-1),
    nanquantile=lambda f, x: f(x, 0.3),
    percentile=lambda f, x: f(x, jnp.array([10.0, 60.0]), axis=-1),
    quantile=lambda f, x: f(x, 0.7, axis=-1),
    packbits=lambda f, x: f(x > 0, axis=-1),
    pad=lambda f, x: [f(x, 2, mode=m) for m in ("constant", "edge", "reflect")],
    piecewise=lambda f, x: f(x, [x < 0, x > 1], [1, lambda v: v, 2]),
    put=lambda f, x: f(x, np.array([1, 3]), 7, inplace=False),
    place=lambda f, x: f(x, x > 0, jnp.ones(3, x.dtype), inplace=False),
    repeat=lambda f, x: f(x, 3, axis=-1),
    reshape=lambda f, x: f(x, (-1, 1)),
    resize=lambda f, x: f(x, (4, 4)),
    roll=lambda f, x: f(x, 3, axis=-1),
    searchsorted=lambda f, x: f(jnp.sort(x.ravel()), x),
    select=lambda f, x: f([x < 0, x > 1], [x + x, x]),
    split=lambda f, x: f(x[..., :6], 3, axis=-1),
    stack=lambda f, x: f([x, x], axis=1),
    unstack=lambda f, x: f(x),
    tile=lambda f, x: f(x, (2, 3)),
    top_k=lambda f, x: f(x, 3),
    vectorize=lambda f, x: f(lambda v: v * v + v)(x),
    frompyfunc=lambda f, x: f(lambda a, b: a + b, 2, 1, identity=0)(x, x),
    fromfunction=lambda f, x: x + f(lambda i: i, (x.shape[-1],)).astype(x.dtype),
    union1d=lambda f, x: f(x, x, size=20, fill_value=0),
    unique=lambda f, x: f(x, size=20, fill_value=0),
    unique_all=lambda f, x: tuple(f(x, size=20, fill_value=0)),
    unique_counts=lambda f, x: tuple(f(x, size=20, fill_value=0)),
    unique_inverse=lambda f, x: tuple(f(x, size=20, fill_value=0)),
    unique_values=lambda f, x: f(x, size=20, fill_value=0),
    lexsort=lambda f, x: f((x, -x)),
    einsum=lambda f, x: f("...i,...i->...", x, x),
    geomspace=lambda f, x: f(x * x + 1, x * x + 5, 7),
    linspace=lambda f, x: f(x, x + 3, 7),
    logspace=lambda f, x: f(x, x + 1, 7),
    arange=lambda f, x: x + f(x.shape[-1]).astype(x.dtype),
    eye=lambda f, x: x[..., None, None] * f(3, 4, dtype=x.dtype),
    empty=lambda f, x: x + f(x.shape, x.dtype) * 0,
    full=lambda f, x: x + f(x.shape, 2, x.dtype),
    ones=lambda f, x: x + f(x.shape, x.dtype),
    zeros=lambda f, x: x + f(x.shape, x.dtype),
    identity=lambda f, x: x[..., None, None] * f(3, x.dtype),
    tri=lambda f, x: x * f(5, x.shape[-1], dtype=x.dtype)[0],
    bartlett=lambda f, x: x * f(x.shape[-1]).astype(x.dtype),
    blackman=lambda f, x: x * f(x.shape[-1]).astype(x.dtype),
    hamming=lambda f, x: x * f(x.shape[-1]).astype(x.dtype),
    hanning=lambda f, x: x * f(x.shape[-1]).astype(x.dtype),
    kaiser=lambda f, x: x * f(x.shape[-1], 2.0).astype(x.dtype),
    indices=lambda f, x: x + f(x.shape)[0].astype(x.dtype),
    isrealobj=lambda f, x: jnp.where(f(x), x, 0),
)
_JNP |= _calls("xx", clip=lambda f, x, y: f(x, y, y + 1))
_JNP |= _calls("xx", put_along_axis=lambda f, x, y: _put_along(f, x, y))
_JNP |= _calls("xx", histogram2d=lambda f, x, y: f(x.ravel(), y.ravel(), bins=3))
_JNP |= _calls(
    "xx",
    intersect1d=lambda f, x, y: f(x, y, size=9, fill_value=0),
    setdiff1d=lambda f, x, y: f(x, y, size=9, fill_value=0),
    setxor1d=lambda f, x, y: f(x, y, size=9, fill_value=0),
)
_JNP |= _calls("mxx", where=lambda f, m, x, y: f(m, x, y))
_JNP |= _calls(
    "ix",
    choose=lambda f, i, x: f(i, [x, x + x, -x], mode="clip"),
    take=lambda f, i, x: f(x, i, axis=-1),
    take_along_axis=lambda f, i, x: f(x, i, axis=-1, mode="clip"),
    bincount=lambda f, i, x: f(i.ravel(), x.ravel(), length=6),
    digitize=lambda f, i, x: f(x, jnp.array([-1.0, 0.0, 1.5])),
    interp=lambda f, i, x: f(x, jnp.arange(5.0), jnp.sin(jnp.arange(5.0))),
)
_JNP |= _calls(
    "i",
    ravel_multi_index=lambda f, i: f((i, i), (5, 6), mode="clip"),
    unravel_index=lambda f, i: f(i, (2, 3)),
    unpackbits=lambda f, i: f(i.astype(np.uint8)),
)
_JNP |= _calls(
    "s",
    diag_indices_from=lambda f, s: f(s),
    tril_indices_from=lambda f, s: f(s),
    triu_indices_from=lambda f, s: f(s),
    poly=lambda f, s: f(s[0]),
)
_JNP |= _calls(
    "ss",
    matvec=lambda f, x, y: f(x, y[0]),
    vecmat=lambda f, x, y: f(x[0], y),
)
_JNP |= _calls("vx", polyval=lambda f, v, x: f(v, x))
_JNP |= _calls(
    "v",
    polydiv=lambda f, v: f(v, jnp.array([1, 2, 3], v.dtype)),
    polyfit=lambda f, v: f(jnp.arange(7.0).astype(v.dtype), v, 2),
    roots=lambda f, v: f(v[:4], strip_zeros=False),
    diag_indices=lambda f, v: v[f(3, 1)[0]],
    tril_indices=lambda f, v: v[f(3)[0]],
    triu_indices=lambda f, v: v[f(3)[0]],
    mask_indices=lambda f, v: v[f(3, jnp.triu, size=6)[0]],
)


def _put_along(f: Any, x: Any, y: Any) -> Any:
    at = jnp.argsort(y, -1)[..., :1]
    return f(x, at, 7, axis=-1, inplace=False)


_JNP_LEFT = _left(
    NOT_ARRAYS,
    """array_repr array_str broadcast_shapes can_cast einsum_path from_dlpack
    frombuffer fromfile fromiter fromstring get_printoptions iscomplexobj isdtype
    isscalar issubdtype iterable load ndim printoptions promote_types result_type save
    savez set_printoptions shape size""",
)
_JNP_LEFT |= _left(DYNAMIC, "trim_zeros")

# --- lax ---

_LAX = _group(
    x="""abs asinh atan bessel_i0e bessel_i1e bitwise_not cbrt ceil clz conj cos cosh
    erf erfc exp exp2 expm1 floor is_finite logistic neg optimization_barrier
    population_count round sign sin sinh square stop_gradient tan tanh transpose
    cummax cummin cumprod cumsum cumlogsumexp sort dce_sink stage shape_as_value
    one_minus_square""",
    u="acos asin atanh erf_inv",
    g="acosh",
    q="digamma lgamma log log1p log2 rsqrt sqrt reciprocal",
    xx="""add atan2 bitwise_and bitwise_or bitwise_xor complex eq ge gt le lt max min
    mul mulhi ne nextafter sub""",
    xq="div rem",
    qx="pow",
    qq="igamma igammac igamma_grad_a random_gamma_grad",
    qqp="betainc",
    gq="zeta polygamma",
    xxx="clamp",
    xn="shift_left shift_right_arithmetic shift_right_logical",
    mxx="select select_n",
    ss="dot",
)


def _over_last(f: Any, x: Any) -> Any:
    return f(x, [x.ndim - 1])


_LAX |= _calls(
    "x",
    cumsum=lambda f, x: f(x, axis=x.ndim - 1, reverse=True),
    transpose=lambda f, x: f(x, tuple(range(x.ndim))[::-1]),
    approx_max_k=lambda f, x: f(x, 3),
    approx_min_k=lambda f, x: f(x, 3),
    argmax=lambda f, x: f(x, x.ndim - 1, np.int32),
    argmin=lambda f, x: f(x, x.ndim - 1, np.int32),
    associative_scan=lambda f, x: f(jnp.add, x, axis=x.ndim - 1),
    bitcast_convert_type=lambda f, x: f(x, np.uint8),
    broadcast=lambda f, x: f(x, (2, 3)),
    broadcast_in_dim=lambda f, x: f(x, (2, *x.shape), tuple(range(1, x.ndim + 1))),
    broadcast_like=lambda f, x: f(x[..., :1], x),
    broadcast_to_rank=lambda f, x: f(x, 4),
    broadcasted_iota=lambda f, x: x + f(x.dtype, x.shape, 0),
    iota=lambda f, x: x + f(x.dtype, x.shape[-1]),
    empty=lambda f, x: x + 0 * f(x.shape, x.dtype),
    full=lambda f, x: x + f(x.shape, 3, x.dtype),
    full_like=lambda f, x: f(x, 3),
    collapse=lambda f, x: f(x[None], 0, 2),
    composite=lambda f, x: f(lambda v: v + v, name="my.twice")(x),
    concatenate=lambda f, x: f([x, x + x], x.ndim - 1),
    cond=lambda f, x: f(x.sum() > 0, lambda v: v + v, lambda v: -v, x),
    switch=lambda f, x: f(2, [lambda v: v, lambda v: -v, lambda v: v + v], x),
    convert_element_type=lambda f, x: [f(x, d) for d in (np.int32, np.float32)],
    custom_linear_solve=lambda f, x: f(
        lambda v: v * 4, x, lambda _, b: b / 4, symmetric=True
    ),
    custom_root=lambda f, x: f(
        lambda v: v * 4 - x, x, lambda _, v: x / 4, lambda g, y: y / g(jnp.ones_like(y))
    ),
    dynamic_index_in_dim=lambda f, x: f(x, 2, x.ndim - 1),
    dynamic_slice=lambda f, x: f(x, [1] * x.ndim, [3] * x.ndim),
    dynamic_slice_in_dim=lambda f, x: f(x, 1, 3, x.ndim - 1),
    dynamic_update_index_in_dim=lambda f, x: f(x, x[..., :1] * 2, 1, x.ndim - 1),
    dynamic_update_slice=lambda f, x: f(x, x[..., :2] + x[..., :2], [0] * x.ndim),
    dynamic_update_slice_in_dim=lambda f, x: f(x, x[..., :2], 2, x.ndim - 1),
    expand_dims=lambda f, x: f(x, (0, 2)),
    fft=lambda f, x: jnp.real(f(x, "FFT", x.shape[-1:])),
    fori_loop=lambda f, x: f(0, 3, lambda i, c: c + x * i.astype(x.dtype), x),
    while_loop=lambda f, x: f(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + c[1]), (0, x)
    )[1],
    scan=lambda f, x: f(lambda c, v: (c + v, c * v), x[0] * 0, x),
    map=lambda f, x: f(lambda v: v + v, x),
    index_in_dim=lambda f, x: f(x, 3, x.ndim - 1),
    slice=lambda f, x: f(x, [1] * x.ndim, [4] * x.ndim, [2] * x.ndim),
    slice_in_dim=lambda f, x: f(x, 1, 5, 2, x.ndim - 1),
    integer_pow=lambda f, x: f(x, 3),
    pad=lambda f, x: f(x, x.dtype.type(1), [(1, 2, 1)] * x.ndim),
    platform_dependent=lambda f, x: f(x, cpu=lambda v: v + v, default=lambda v: v + v),
    polynomial=lambda f, x: f(x, [1, x, 3]),
    reduce=lambda f, x: f(x, x.dtype.type(0), lax.add, [x.ndim - 1]),
    reduce_and=_over_last,
    reduce_max=_over_last,
    reduce_min=_over_last,
    reduce_or=_over_last,
    reduce_prod=_over_last,
    reduce_sum=_over_last,
    reduce_xor=_over_last,
    reduce_precision=lambda f, x: f(x, 6, 5),
    reduce_window=lambda f, x: f(
        x, -np.inf, lax.max, (2,) * x.ndim, (1,) * x.ndim, "SAME"
    ),
    reshape=lambda f, x: f(x, (1, x.size)),
    rev=_over_last,
    sort_key_val=lambda f, x: f(x, x + x),
    split=lambda f, x: f(x, (2, x.shape[-1] - 2), x.ndim - 1),
    squeeze=lambda f, x: f(x[None], (0,)),
    stack=lambda f, x: f([x, x + x], axis=1),
    unstack=lambda f, x: f(x, axis=x.ndim - 1),
    tile=lambda f, x: f(x, (2,) * x.ndim),
    top_k=lambda f, x: f(x, 3),
    rng_uniform=lambda f, x: f(x.dtype.type(0), x.dtype.type(1), x.shape).shape[0] + x,
    conv_general_dilated_patches=lambda f, x: f(
        x.reshape(1, 1, -1), (3,), (1,), "SAME"
    ),
)
_LAX |= _calls(
    "tt",
    conv=lambda f, x, w: f(x, w[..., :2], (1,), "SAME"),
    conv_general_dilated=lambda f, x, w: f(x, w[..., :2], (2,), [(1, 2)], (2,), (1,)),
    conv_general_dilated_local=lambda f, x, w: f(
        x, jnp.tile(w[:, :1], (1, 6, 5))[:, :, :4], (1,), "VALID", (2,)
    ),
    conv_transpose=lambda f, x, w: f(
        x, w[..., :2], (2,), "SAME", dimension_numbers=("NCH", "OIH", "NCH")
    ),
    conv_with_general_padding=lambda f, x, w: f(
        x, w[..., :2], (1,), [(1, 1)], (1,), (1,)
    ),
)
_LAX |= _calls("tt", batch_matmul=lambda f, x, y: f(x, jnp.swapaxes(y, 1, 2)))
_LAX |= _calls("xx", real=lambda f, x, y: f(lax.complex(x, y)))
_LAX |= _calls("xx", imag=lambda f, x, y: f(lax.complex(x, y)))
_LAX |= _calls("ss", dot_general=lambda f, x, y: f(x, y, (((0,), (1,)), ((), ()))))
_LAX |= _calls(
    "ts",
    ragged_dot=lambda f, x, w: f(w, jnp.stack([w, w + w]), jnp.array([2, 3], np.int32)),
    ragged_dot_general=lambda f, x, w: f(
        w,
        jnp.stack([w, w + w]),
        jnp.array([2, 3], np.int32),
        lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    ),
)


def _scatter(f: Any, x: Any, i: Any) -> Any:
    dims = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    if f.__name__ == "scatter_apply":
        return f(x, i[:2, :1], lambda v: v + v, dims, update_shape=(2, x.shape[1]))
    return f(x, jnp.array([[3], [1]]) + 0 * i[:2, :1], x[:2] + x[1:3], dims)


def _gather(f: Any, x: Any, i: Any) -> Any:
    return f(x, i[:, :1], lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 4))


_LAX |= _calls(
    "xi",
    gather=_gather,
    index_take=lambda f, x, i: f(x, (i[0], i[1]), (0, 1)),
    scatter=_scatter,
    scatter_add=_scatter,
    scatter_apply=_scatter,
    scatter_max=_scatter,
    scatter_min=_scatter,
    scatter_mul=_scatter,
    scatter_sub=_scatter,
)
_LAX |= _calls(
    "k",
    rng_bit_generator=lambda f, k: f(jnp.tile(jax.random.key_data(k), 2), (5, 7)),
)
_LAX |= _calls(
    "tt",
    scaled_dot=lambda f, x, y: f(x, jnp.swapaxes(y, 1, 2)),
)
_LAX_LEFT = _left(
    NOT_ARRAYS,
    """ConvGeneralDilatedDimensionNumbers DotDimensionNumbers PrecisionLike
    after_all broadcast_shapes conv_dimension_numbers conv_general_permutations
    conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple create_token
    dtype padtype_to_pads reduce_window_shape_tuple""",
)
_LAX_LEFT |= _left(
    DEVICES,
    """all_gather all_to_all axis_index axis_size pbroadcast pcast pmax pmean pmin
    ppermute precv psend pshuffle psum psum_scatter psum_scatter_start pswapaxes
    ragged_all_to_all with_sharding_constraint""",
)

# --- jax.nn ---

_NN = _group(
    x="""celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity
    leaky_relu log_sigmoid log_softmax logmeanexp logsumexp mish relu relu6 selu sigmoid
    silu soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus standardize
    swish tanh""",
    q="log1mexp",
)
_NN |= _calls(
    "x",
    glu=lambda f, x: f(jnp.concatenate([x, x + 1], -1)),
    gelu=lambda f, x: [f(x, approximate=True), f(x, approximate=False)],
)
_NN |= _calls("i", one_hot=lambda f, i: f(i, 5))
_NN |= _calls(
    "t",
    dot_product_attention=lambda f, t: f(t[None], t[None] * 2, t[None], is_causal=True),
)
_NN_LEFT = _left(NOT_ARRAYS, "get_scaled_dot_general_config")
_NN_LEFT |= _left("has code for some chips only", "scaled_dot_general scaled_matmul")

# --- jax.scipy.special ---

_SPECIAL = _group(
    x="""bessel_jn dawsn erf erfc erfcx expit fresnel i0 i0e i1 i1e log_ndtr log_softmax
    logsumexp ndtr sici softmax""",
    q="digamma entr exp1 factorial gamma gammaln gammasgn loggamma spence",
    u="erfinv",
    p="logit ndtri erfcinv",
    qq="""beta betaln boxcox boxcox1p comb gammainc gammaincc kl_div poch rel_entr
    xlog1py xlogy""",
    qqp="betainc",
    gq="zeta",
    nq="polygamma expn",
    xq="owens_t",
    qqu="hyp1f1",
)
_SPECIAL |= _calls(
    "x",
    bessel_jn=lambda f, x: f(x, v=3, n_iter=20),
    bernoulli=lambda f, x: f(5).sum() * x,
    expi=lambda f, x: f(x),
    wofz=lambda f, x: jnp.real(f(x + 1j)),
)
_SPECIAL |= _calls("g", multigammaln=lambda f, g: f(g + 2, 3))
_SPECIAL |= _calls("qqp", hyp2f1=lambda f, a, b, z: f(a, b, a + b + 1, z))
_SPECIAL |= _calls("np", sph_harm_y=lambda f, n, p: jnp.real(f(n, n, p, p, n_max=7)))
_SPECIAL_LEFT: dict[str, str] = {}

# --- jax.random ---


def _shaped(*between: Any) -> Callable[..., Any]:
    return lambda f, k: f(k, *between, shape=(5, 7))


_RANDOM = _calls(
    "k",
    PRNGKey=lambda f, k: f(3) + jax.random.key_data(k),
    key=lambda f, k: (jax.random.fold_in(f(3), 2), k),
    clone=lambda f, k: f(k),
    ball=lambda f, k: f(k, 3, shape=(5,)),
    bernoulli=_shaped(0.3),
    beta=_shaped(1.5, 0.7),
    binomial=_shaped(9.0, 0.3),
    bits=_shaped(),
    cauchy=_shaped(),
    chisquare=_shaped(2.0),
    choice=lambda f, k: [f(k, 9, (4,), replace=r) for r in (True, False)],
    dirichlet=lambda f, k: f(k, jnp.array([1.0, 2.0, 0.5]), shape=(5,)),
    double_sided_maxwell=lambda f, k: f(k, 0.5, 2.0, shape=(5, 7)),
    exponential=_shaped(),
    f=_shaped(2.0, 3.0),
    fold_in=lambda f, k: f(k, 7),
    gamma=_shaped(1.5),
    generalized_normal=_shaped(1.5),
    geometric=_shaped(0.3),
    gumbel=_shaped(),
    key_data=lambda f, k: f(k),
    laplace=_shaped(),
    loggamma=_shaped(0.7),
    logistic=_shaped(),
    lognormal=_shaped(0.5),
    maxwell=_shaped(),
    multinomial=lambda f, k: f(k, 9, jnp.array([0.2, 0.3, 0.5])),
    multivariate_normal=lambda f, k: f(
        k, jnp.zeros(2), jnp.array([[2.0, 0.5], [0.5, 1.0]]), shape=(5,)
    ),
    normal=_shaped(),
    orthogonal=lambda f, k: f(k, 3),
    pareto=_shaped(1.5),
    permutation=lambda f, k: f(k, 9),
    poisson=_shaped(3.0),
    rademacher=_shaped(),
    randint=lambda f, k: f(k, (5, 7), -3, 9),
    rayleigh=_shaped(1.5),
    split=lambda f, k: f(k, 3),
    t=_shaped(3.0),
    triangular=_shaped(0.0, 0.5, 1.0),
    truncated_normal=_shaped(-1.0, 1.5),
    uniform=_shaped(),
    wald=_shaped(1.5),
    weibull_min=_shaped(1.5, 2.0),
    wrap_key_data=lambda f, k: f(jax.random.key_data(k)),
)
_RANDOM |= _calls("kx", categorical=lambda f, k, x: f(k, x))
_RANDOM_LEFT = _left(NOT_ARRAYS, "key_dtype key_impl Key")

TABLES = {
    "jnp": _JNP,
    "lax": _LAX,
    "nn": _NN,
    "special": _SPECIAL,
    "random": _RANDOM,
}
LEFT_OUT = {
    "jnp": _JNP_LEFT,
    "lax": _LAX_LEFT,
    "nn": _NN_LEFT,
    "special": _SPECIAL_LEFT,
    "random": _RANDOM_LEFT,
}


def function(module: str, name: str, row: Row) -> Callable[..., Any]:
    """The function of a row, from its operands alone."""
    fn = getattr(MODULES[module], name)
    return fn if row.call is None else functools.partial(row.call, fn)
