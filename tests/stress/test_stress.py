"""Ten seconds of what `cpu.py` can do for hours."""


def test_concurrent_calls(run_python):
    report = run_python("-m", "tests.stress.cpu", "--seconds", "10")
    assert report.startswith("10 s, 12 threads")
