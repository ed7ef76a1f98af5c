"""Compiles and runs kernels once in child processes, with a time limit.

A kernel that crashes, hangs the compiler or does not terminate takes down a child, not
the tuner. Compiled code stays in the disk cache (`runtime/cache.py`), where this
process finds it. Operands are synthetic: random floats, zero integers.

As a command (`python -m pallasite.tune.workers`) it is the child: it reads pickled
calls, each preceded by its length, and answers each with a line of JSON.
"""

import contextlib
import json
import os
import pickle
import select
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from pallasite import config
from pallasite.errors import CompileError
from pallasite.primitive import Call

START_SECONDS = 180.0  # for a child to import JAX and find its devices
_LENGTH = struct.Struct("<Q")


class Workers:
    """A pool of child processes; use it in a `with` block, which ends them.

    Args:
        count: how many.
        limit: seconds that one kernel may take.
        platform: the platform on which the children run kernels.
        command: what a child runs; tests pass others.
    """

    def __init__(
        self,
        count: int,
        limit: float,
        platform: str,
        command: Sequence[str] | None = None,
    ):
        self.limit, self.platform = limit, platform
        self.command = tuple(command or (sys.executable, "-m", __name__))
        self._idle: list[_Child | None] = [None] * count
        self._known: dict[Call, str] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        for child in self._idle:
            if child is not None:
                child.end()

    def probe(
        self, calls: Iterable[Call], said: Callable[[int], None] = lambda left: None
    ) -> dict[Call, str]:
        """Compiles and runs each call once; returns why it is unusable, or ""."""
        asked = list(dict.fromkeys(calls))
        new = [call for call in asked if call not in self._known]
        waiting = iter(new)
        lock = threading.Lock()
        stop = threading.Event()
        # Events instead of `join`: before Python 3.13 a Ctrl-C in `join` makes a
        # running thread look finished.
        ended = [threading.Event() for _ in range(min(len(self._idle), len(new)))]

        def serve(place: int) -> None:
            try:
                while not stop.is_set():
                    with lock:
                        call = next(waiting, None)
                    if call is None:
                        return
                    self._known[call] = self._one(place, call)
            finally:
                ended[place].set()

        started = 0
        try:
            for place in range(len(ended)):
                threading.Thread(target=serve, args=(place,), daemon=True).start()
                started += 1
            for each in ended:
                while not each.wait(0.2):
                    said(sum(call not in self._known for call in new))
        except BaseException:
            stop.set()
            for each in ended[:started]:
                self._kill()  # ends what the threads wait for
                while not each.wait(0.2):
                    self._kill()  # including a child only just started
            raise
        return {call: self._known[call] for call in asked}

    def _kill(self) -> None:
        for child in list(self._idle):
            if child is not None:
                child.process.kill()

    def _one(self, place: int, call: Call) -> str:
        try:
            child = self._idle[place]
            if child is None:
                child = self._idle[place] = _Child(self.command, self.platform)
                child.wait_until_ready()
            answer = child.ask(call, self.limit)
        except _Gone as gone:
            child = self._idle[place]
            if child is not None:
                child.end()
            self._idle[place] = None
            return str(gone)
        return answer["error"]


class _Gone(Exception):
    """A child can no longer be used, and why."""


class _Child:
    def __init__(self, command: Sequence[str], platform: str):
        root = str(config.PACKAGE.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        # Kernels must not take all of a GPU's memory, as the parent needs some.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={
                **os.environ,
                **_knobs(),
                "PYTHONPATH": path,
                "JAX_PLATFORMS": platform,
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
            start_new_session=True,  # only the parent gets Ctrl-C
        )

    def wait_until_ready(self) -> None:
        self._answer(START_SECONDS, "its process did not start")

    def ask(self, call: Call, limit: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        data = pickle.dumps(call)
        try:
            self.process.stdin.write(_LENGTH.pack(len(data)) + data)
            self.process.stdin.flush()
        except OSError:
            raise _Gone(f"its process ended: {self._last_words()}") from None
        return self._answer(limit, f"did not end within {limit:g} s")

    def _answer(self, limit: float, late: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        if not ready:
            raise _Gone(late)
        line = self.process.stdout.readline()  # the child flushes each line
        if not line:
            raise _Gone(f"its process ended: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"status {self.process.returncode}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _knobs() -> dict[str, str]:
    """This process's `config.override`, as environment variables."""
    said = {knob.env: config.get(knob.name) for knob in config.KNOBS.values()}
    return {
        env: str(int(value) if isinstance(value, bool) else value)
        for env, value in said.items()
        if value != ""
    }


# --- the child process ---


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # kernels' output must not mix with answers
    import jax

    jax.devices()

    def answer(error: str) -> None:
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()

    answer("")  # ready
    for call in _calls(sys.stdin.buffer):
        answer(_tried(call))


def _calls(stream: BinaryIO) -> Iterator[Call]:
    while len(length := stream.read(_LENGTH.size)) == _LENGTH.size:
        yield pickle.loads(stream.read(_LENGTH.unpack(length)[0]))


def _tried(call: Call) -> str:
    """Runs a call; returns what went wrong."""
    import jax

    from pallasite.placement import own_platform
    from pallasite.primitive import bind_call, choose, wants_emulation

    try:
        chosen = choose(call, own_platform())
        if chosen.backend == "interpret" and not wants_emulation(call):
            raise CompileError(f"no native backend supports it: {chosen}")
        operands = [_made_up(p.ref.shape, p.ref.dtype.np) for p in call.kernel.inputs]
        jax.block_until_ready(jax.jit(lambda *xs: bind_call(call, xs))(*operands))
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return ""  # the parent holds the memory, and may run it
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def _made_up(shape: tuple[int, ...], dtype: Any) -> Any:
    import jax
    import numpy as np

    if not jax.numpy.issubdtype(dtype, np.inexact):
        return jax.numpy.zeros(shape, dtype)
    return jax.random.normal(jax.random.key(0), shape).astype(dtype)


if __name__ == "__main__":
    _main()
