"""A step that takes long is named while it runs."""

import logging
import time

import jax.numpy as jnp

import pallasite as pl
from pallasite.passes import progress
from pallasite.passes.run import Pass, run
from pallasite.sites import kernels_in


def slow_kernel():
    def slow(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    x = jnp.zeros(8)
    return next(iter(kernels_in(pl.pallas_call(slow, x), x)))


def test_names_kernel_and_pass(monkeypatch, caplog):
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.05)

    def sleep(kernel):
        time.sleep(0.6)
        return kernel

    with caplog.at_level(logging.WARNING, "pallasite"):
        run(slow_kernel(), [Pass("quick", lambda k: k), Pass("sleep", sleep)])
    assert 1 <= len(caplog.messages) <= 6  # at times that double
    assert all("'slow'" in m and "pass sleep" in m for m in caplog.messages)


def test_quick_compilations_say_nothing(caplog):
    run(slow_kernel(), [Pass("quick", lambda k: k)])
    assert not caplog.messages
