"""What ran on an accelerator, from JAX's profiler."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from pallasite.tools.time_profile import Span


def device_events(run: Callable[[], None]) -> list[Span]:
    """The spans of everything that devices execute while a function runs.

    Args:
        run: the function; it must wait for the work it starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        found = [span for file in files for span in _spans_of(file)]
    start = min((span[1] for span in found), default=0.0)
    return [
        Span(name, where, (begin - start) / 1e9, (end - start) / 1e9, kernel=False)
        for (name, begin, end, where) in found
    ]


def _spans_of(file: Path) -> list[tuple[str, float, float, str]]:
    """Name, begin and end in nanoseconds, and the device's stream."""
    data = jax.profiler.ProfileData.from_file(str(file))
    return [
        (event.name, event.start_ns, event.end_ns, f"{plane.name} {line.name}")
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")  # other lines repeat them, by source
        for event in line.events
    ]
