"""How long `import pallasite` takes on top of `import jax`.

Each statement runs in processes of its own, the two in turn, and the best time counts:
what else the machine does can only add time.
"""

import subprocess
import sys

STATEMENTS = ("import jax", "import jax, pallasite")
TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
ROUNDS = 5


def seconds(statement: str) -> float:
    """Runs `statement` in a fresh Python and returns how long it took there."""
    command = [sys.executable, "-c", TIMED.format(statement)]
    return float(subprocess.check_output(command, text=True))


def main() -> None:
    """Prints the table."""
    times: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(ROUNDS):
        for statement, found in times.items():
            found.append(seconds(statement))

    print(f"{'statement':24} {'best':>8} {'worst':>8}   of {ROUNDS}")
    for statement, found in times.items():
        print(f"{statement:24} {min(found):7.3f}s {max(found):7.3f}s")
    jax_alone, both = (min(times[statement]) for statement in STATEMENTS)
    print(f"{'pallasite adds':24} {both - jax_alone:7.3f}s")


if __name__ == "__main__":
    main()
