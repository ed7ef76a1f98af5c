"""Every kernel of the zoo with float operands: derivatives agree with its reference's.

Forward, the tangent kernel runs natively; backward, the kernel's functional form. Both
directions are compiled as one function per case.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.errors import FallbackWarning
from tests.xla import put
from tests.zoo import Case, all_cases

# Cases whose derivative is not compared, and why.
EXCLUDED = {
    "softmax_backward": "its reference normalises y again, so it equals the kernel "
    "only where rows sum to one, and its derivative differs",
}
# The tangent is not a kernel: it runs through the emulation, and says so.
NO_TANGENT_KERNEL = {
    "bucket_extremes": "an atomic max",
    "reshape_bitcast_views": "a bitcast of a ref",
}


def is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def arguments(case: Case) -> tuple:
    return case.make_args(np.random.default_rng([0, *case.name.encode()]))


CASES = [
    case
    for case in all_cases()
    if "nofloat" not in case.tags and case.name not in EXCLUDED
]


def of_floats(run, args):
    """`run` as a function from its float operands to its float results."""

    def fn(*floats):
        pending = iter(floats)
        full = [next(pending) if is_float(x) else x for x in args]
        return [y for y in jax.tree.leaves(run(*full)) if is_float(y)]

    return fn


def random_like(x, rng):
    return put(rng.uniform(-1, 1, x.shape), x.dtype)


def both_directions(fn, floats):
    """Tangents of the results and cotangents of the operands, in random directions."""
    rng = np.random.default_rng(7)
    tangents = [random_like(x, rng) for x in floats]
    results = jax.eval_shape(fn, *floats)
    cotangents = [random_like(y, rng) for y in results]

    def run(floats, tangents, cotangents):
        _, moved = jax.jvp(fn, floats, tangents)
        return moved, jax.vjp(fn, *floats)[1](cotangents)

    return jax.jit(run)(tuple(floats), tuple(tangents), cotangents)


def assert_close(case, got, want, what):
    for n, (actual, expected) in enumerate(zip(got, want, strict=True)):
        assert actual.dtype == expected.dtype
        actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
        narrow = got[n].dtype.itemsize < 4
        error = np.abs(actual - expected) / max(1.0, np.abs(expected).max(initial=0))
        allowed = max(2e-2 if narrow else 2e-5, 5 * case.rtol)
        assert error.max(initial=0) <= allowed, (what, n)  # false for NaN, too


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_derivatives_agree(case):
    args = arguments(case)
    floats = [x for x in args if is_float(x)]

    def native(*args):
        return case.run(*args, interpret=False)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FallbackWarning)
        got = both_directions(of_floats(native, args), floats)
    said = [str(w.message) for w in caught if "derivative" in str(w.message)]
    reason = NO_TANGENT_KERNEL.get(case.name)
    assert bool(said) == (reason is not None), said
    assert reason is None or reason in said[0]
    want = both_directions(of_floats(case.reference, args), floats)
    assert_close(case, got[0], want[0], "tangent")
    assert_close(case, got[1], want[1], "cotangent")


def test_almost_the_whole_zoo_is_compared():
    known = {case.name for case in all_cases()}
    assert known >= EXCLUDED.keys()
    assert len(CASES) >= 0.95 * (len(CASES) + len(EXCLUDED))
