"""Runs passes in order; names, times, verifies and dumps each step on request.

`run(kernel, passes)` is the only runner: `SHARED` are the passes of every backend, each
backend lists its own (`backends/base.py`). `PALLASITE_VERIFY` checks the kernel after
each step that changed it; `PALLASITE_DUMP` names a folder that gets one folder per
kernel with the numbered texts of all steps, including backend stages (`Dump.write`).
"""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pallasite import config
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import print_kernel
from pallasite.ir.verify import verify
from pallasite.passes.normal import normalize
from pallasite.passes.normal.drop_rules import drop_rules
from pallasite.passes.progress import watched


@dataclass(frozen=True)
class Pass:
    """A named function from Kernel to Kernel."""

    name: str
    function: Callable[[Kernel], Kernel]
    if_changed: bool = False  # skipped if the previous pass changed nothing


@dataclass(frozen=True)
class Step:
    """What one pass did, for reports."""

    name: str
    seconds: float
    changed: bool
    kernel: Kernel  # after the pass


# One spelling for kernels that mean the same (docs/normal_form.md).
NORMAL: tuple[Pass, ...] = tuple(Pass(name, rule) for name, rule in normalize.RULES)
SHARED: tuple[Pass, ...] = (Pass("drop_rules", drop_rules), *NORMAL)


def run(
    kernel: Kernel,
    passes: Sequence[Pass] = SHARED,
    dump: "Dump | None" = None,
    steps: list[Step] | None = None,
) -> Kernel:
    """The kernel after all passes.

    Args:
        kernel: what to start from.
        passes: applied in order.
        dump: where texts go; by default a new Dump if the `dump` knob is set.
        steps: gets one Step per pass appended.

    Raises:
        VerifyError: with the `verify` knob, after the pass that broke a rule.
    """
    dump = dump or Dump.of(kernel)
    if passes is SHARED and dump is None:
        made: Sequence[Step] = _shared(_Same(kernel))
    else:
        made = _run(kernel, passes, dump)
    if steps is not None:
        steps += made
    return made[-1].kernel if made else kernel


@dataclass(frozen=True, eq=False)
class _Same:
    """A kernel as a key that equals itself only: equal ones differ in source lines."""

    kernel: Kernel

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.kernel is other.kernel

    def __hash__(self) -> int:
        return id(self.kernel)


@lru_cache(maxsize=64)
def _shared(key: _Same) -> Sequence[Step]:
    """The shared passes, once for all that ask: plan, backend, reports."""
    return _run(key.kernel, SHARED, None)


def _run(kernel: Kernel, passes: Sequence[Pass], dump: "Dump | None") -> Sequence[Step]:
    steps = list[Step]()
    checks = config.get("verify")
    if checks:
        verify(kernel)
    if dump is not None and not dump.count:
        dump.write("import", print_kernel(kernel, locs=True))
    changed = True
    with watched(kernel) as progress:
        for step in passes:
            if step.if_changed and not changed:
                continue
            progress.enter(f"pass {step.name}")
            start = time.perf_counter()
            new = step.function(kernel)
            seconds = time.perf_counter() - start
            changed = new is not kernel
            steps.append(Step(step.name, seconds, changed, new))
            kernel = new
            if checks and changed:
                verify(kernel)
            if dump is not None:
                head = f"// {step.name}: {1e3 * seconds:.1f} ms\n"
                dump.write(step.name, head + print_kernel(kernel, locs=True))
    return steps


class Dump:
    """One folder of numbered texts."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.count = 0

    @staticmethod
    def of(kernel: Kernel) -> "Dump | None":
        """A folder for this kernel under the `dump` knob's; None if that is unset."""
        root = config.get("dump")
        if not root:
            return None
        digest = hashlib.sha256(kernel.text.encode()).hexdigest()[:8]
        name = re.sub(r"\W+", "_", kernel.name).strip("_") or "kernel"
        return Dump(Path(root) / f"{name}-{digest}")

    def write(self, stage: str, text: str, suffix: str = "txt") -> Path:
        """Add `NN-stage.suffix`; the number gives the order."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.count:02d}-{stage}.{suffix}"
        path.write_text(text)
        self.count += 1
        return path
