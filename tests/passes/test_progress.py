"""A step that takes long is named while it runs."""

import logging
import threading
from types import SimpleNamespace

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


def test_names_kernel_and_pass(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.01)
    named, messages = threading.Event(), []

    class Said(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())
            if "pass waits" in messages[-1]:
                named.set()

    def wait(kernel):
        assert named.wait(60)
        return kernel

    said = Said()
    logging.getLogger("pallasite").addHandler(said)
    try:
        run(slow_kernel(), [Pass("quick", lambda k: k), Pass("waits", wait)])
    finally:
        logging.getLogger("pallasite").removeHandler(said)
    assert any("'slow'" in m and "pass waits" in m for m in messages)


class Clock:
    """`time` and the event for which `tell` waits: the compilation ends at `end`."""

    def __init__(self, end):
        self.now, self.end = 0.0, end

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        return self.now > self.end


def told(monkeypatch, end):
    clock = Clock(end)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock.monotonic))
    progress.Progress(slow_kernel()).tell(clock)


def test_it_is_said_at_times_that_double(monkeypatch, caplog):
    told(monkeypatch, 100.0)
    assert [m.split(" has taken ")[1] for m in caplog.messages] == [
        f"{seconds} s so far" for seconds in (10, 20, 40, 80)
    ]


def test_quick_compilations_say_nothing(monkeypatch, caplog):
    told(monkeypatch, 9.0)
    assert not caplog.messages
