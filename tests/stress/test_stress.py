"""Six seconds of what `cpu.py` can do for hours."""

from tests.share import SHARE


def test_concurrent_calls(run_python):
    seconds = max(6 // SHARE, 1)
    report = run_python("-m", "tests.stress.cpu", "--seconds", str(seconds))
    assert report.startswith(f"{seconds} s, 12 threads")
