"""Random kernels of warpgroups are right; without one of their waits, arrivals or
fences they are reported, or still right."""

import jax
import numpy as np
import pytest

import pallasite as pl
from pallasite.errors import CheckError, PallasError
from tests.fuzz.choices import Stream
from tests.fuzz.warpgroups import Left, Pipe, Ring
from tests.share import SHARE

RINGS = 12 // SHARE or 1
PIPES = 16 // SHARE or 1


def drawn(kind, seed):
    return kind.draw(Stream(bytes(np.random.default_rng(seed).bytes(96))))


@pytest.mark.parametrize("seed", range(RINGS))
def test_rings(seed):
    ring, left = drawn(Ring, seed), Left()
    np.testing.assert_array_equal(ring.run(left), ring.want)
    reported = 0
    for place in range(left.count):
        try:
            got = ring.run(Left(place))
        except PallasError as error:
            assert error.fix and error.at, error
            reported += isinstance(error, CheckError)
        else:
            np.testing.assert_array_equal(got, ring.want)
    assert reported, ring


@pytest.mark.parametrize("seed", range(PIPES))
def test_pipelines(seed):
    pipe = drawn(Pipe, seed)
    np.testing.assert_array_equal(pipe.run(pl.Checked()), pipe.want)
    np.testing.assert_array_equal(jax.jit(lambda: pipe.run(True))(), pipe.want)
