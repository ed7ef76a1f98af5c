"""Child processes that compile: hung, crashed and silent ones are survived."""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite.sites import calls_in
from pallasite.tune.workers import Workers

# A child that is ready at once and answers by the length of the call's name.
CHILD = """
import json, struct, sys, time, pickle, os
def say(error):
    print(json.dumps({"error": error}), flush=True)
say("")
read = sys.stdin.buffer.read
while length := read(8):
    data = read(struct.unpack("<Q", length)[0])
    for name in ("hangs", "crashes", "refuses"):
        if name.encode() in data:
            break
    else:
        name = ""
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        print("the last words", file=sys.stderr)
        os._exit(3)
    say(name)
"""


def call(name: str):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    (found,) = calls_in(pl.pallas_call(kernel, out_shape=shape, name=name), shape)
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_children_that_hang_or_crash_are_replaced(count: int):
    calls = [call(n) for n in ("hangs", "fine", "crashes", "refuses", "good")]
    started = time.monotonic()
    with Workers(count, 2.0, "cpu", (sys.executable, "-c", CHILD)) as workers:
        said = workers.probe(calls)
        assert [said[c] for c in calls] == [
            "did not end within 2 s",
            "",
            "its process ended: the last words",
            "refuses",
            "",
        ]
        assert time.monotonic() - started < 30
        again = time.monotonic()
        assert workers.probe(calls) == said  # known: no child is asked
        assert time.monotonic() - again < 1


def test_ctrl_c_waits_for_what_children_say_last():
    """It comes while the main thread waits, as it does from a terminal."""
    hanging = call("hangs")
    with Workers(1, 60.0, "cpu", (sys.executable, "-c", CHILD)) as workers:
        signals = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        signals.start()
        with pytest.raises(KeyboardInterrupt):
            workers.probe([hanging])
        assert "its process ended" in workers._known[hanging]


def test_an_interruption_ends_the_children():
    def interrupt(left: int) -> None:
        raise KeyboardInterrupt

    with Workers(1, 60.0, "cpu", (sys.executable, "-c", CHILD)) as workers:
        with pytest.raises(KeyboardInterrupt):
            workers.probe([call("hangs")], interrupt)
