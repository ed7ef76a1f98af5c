"""Child processes that compile: hung, crashed and silent ones are survived."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite.sites import calls_in
from pallasite.tune import workers as workers_module
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
        if sys.argv[1:]:
            open(sys.argv[1], "w").close()  # a pipe: waits for a reader
        else:
            print("hangs", flush=True)
        time.sleep(600)
    if name == "crashes":
        print("the last words", file=sys.stderr)
        os._exit(3)
    say(name)
"""


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """What a child that is about to hang opens."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def call(name: str):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    (found,) = calls_in(pl.pallas_call(kernel, out_shape=shape, name=name), shape)
    return found


def late(files, _writing, _errors, _seconds):
    """`select` for which the time is over when the child says that it hangs."""
    (file,) = files
    return [] if file.peek().startswith(b"hangs") else files, [], []


@pytest.mark.parametrize("count", [1, 2])
def test_children_that_hang_or_crash_are_replaced(count: int, monkeypatch):
    calls = [call(n) for n in ("hangs", "fine", "crashes", "refuses", "good")]
    command = (sys.executable, "-c", CHILD)
    monkeypatch.setattr(workers_module, "select", SimpleNamespace(select=late))
    with Workers(count, 2.0, "cpu", command) as workers:
        said = workers.probe(calls)
        assert [said[c] for c in calls] == [
            "did not end within 2 s",
            "",
            "its process ended: the last words",
            "refuses",
            "",
        ]
        monkeypatch.delattr(workers_module._Child, "ask")
        assert workers.probe(calls) == said  # known: no child is asked


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Handled, although a shell's background jobs are started to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_for_what_children_say_last(pipe: Path):
    """It comes while the main thread waits, as it does from a terminal."""
    hanging, waits = call("hangs"), threading.Event()

    def interrupt() -> None:
        pipe.open().close()  # the child is at work
        waits.wait()
        os.kill(os.getpid(), signal.SIGINT)

    command = (sys.executable, "-c", CHILD, str(pipe))
    with Workers(1, 600.0, "cpu", command) as workers:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            workers.probe([hanging], lambda left: waits.set())
        assert "its process ended" in workers._known[hanging]


def test_an_interruption_ends_the_children():
    def interrupt(left: int) -> None:
        raise KeyboardInterrupt

    command = (sys.executable, "-c", CHILD, os.devnull)
    with Workers(1, 60.0, "cpu", command) as workers:
        with pytest.raises(KeyboardInterrupt):
            workers.probe([call("hangs")], interrupt)
