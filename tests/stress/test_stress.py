"""Six seconds of what `cpu.py` can do for hours."""

from tests.share import SHARE


def test_concurrent_calls(run_python):
    seconds = max(6 // SHARE, 1)
    how = "--seconds", str(seconds), "--new-kernels", str(max(10 // SHARE, 2))
    report = run_python("-m", "tests.stress.cpu", *how)
    assert report.startswith(f"{seconds} s, 12 threads")
