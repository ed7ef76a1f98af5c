"""The `cpu` backend: tile IR to LLVM IR text to machine code, called through XLA FFI.

Reading order: `emit.py` walks a kernel, `tiles.py` says what a tile is meanwhile, the
rules for ops are in the modules `emit.py` lists, `handler.py` is what XLA calls,
`compile.py` makes machine code.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pallasite import config
from pallasite.backends.base import Launch, Options, Stage
from pallasite.backends.cpu.call import compile as compiler
from pallasite.backends.cpu.call.parallel_units import sharing_text
from pallasite.backends.cpu.emit import NATIVE, emit_kernel, is_native, with_own_inputs
from pallasite.backends.cpu.ops.debugging import RULES as DEBUG_RULES
from pallasite.ir.nodes import Kernel, walk
from pallasite.ir.text import print_kernel
from pallasite.passes.canonicalize import canonicalize
from pallasite.passes.legalize import legalize
from pallasite.passes.merge_k_rounds import merge_k_rounds
from pallasite.passes.merge_k_steps import merge_k_steps
from pallasite.passes.place_windows import place_windows
from pallasite.passes.row_strips import row_strips

DEEPEST = 1024  # steps of k for each time that sums are read and written
COMPUTED_BYTES = 256 << 10  # of a tile that is multiplied, so that it is still near
STRIP_BYTES = 16 << 10  # of a tile, so that the few of one row's code stay in L1


class CpuBackend:
    """Kernels as machine code of this computer."""

    name = "cpu"
    platforms = ("cpu",)
    level = "tile"
    native = NATIVE

    def stages(self, kernel: Kernel, options: Options) -> dict[str, Stage]:
        # Stages that need more than the text before them take what they need here.
        llvm = cache(lambda: llvm_text(kernel))
        stages: dict[str, Stage] = {"ir": lambda kernel: kernel.text}
        if options.debug or config.get("dump"):
            # To be read; otherwise written only where no object code is at hand.
            stages["scheduled"] = lambda _: scheduled_text(kernel)
            stages["llvm"] = lambda _: llvm()
            stages["asm"] = compiler.make_assembly
        stages["object"] = lambda _: compiler.make_object(_identity(kernel), llvm)
        return stages

    def launch(
        self, kernel: Kernel, outputs: Mapping[str, Any], options: Options
    ) -> Launch:
        key = compiler.short_name(_identity(kernel))
        address, owner = compiler.load(key, outputs["object"])
        owning = with_own_inputs(kernel)
        more = [out.ref for out in owning.outputs[kernel.num_outputs :]]
        return Launch(
            target=f"pallasite_cpu_{key}",
            config={},
            api_version=4,
            aliases=owning.aliases,
            # Seen even where nobody uses the results.
            has_side_effect=_is_seen(kernel),
            handler=address,
            keep_alive=owner,
            scratch_results=tuple((ref.shape, ref.dtype.np.name) for ref in more),
        )

    def version(self) -> str:
        return f"cpu 1, {compiler.version()}"


def _legal(kernel: Kernel) -> Kernel:
    kernel = place_windows(with_own_inputs(kernel))
    kernel = merge_k_steps(kernel, DEEPEST, COMPUTED_BYTES)
    deeper = merge_k_rounds(kernel, COMPUTED_BYTES)
    if deeper is not kernel:  # loops that are gone leave numbers to be computed
        kernel = canonicalize(deeper)
    return row_strips(legalize(kernel, is_native, "cpu"), STRIP_BYTES)


def scheduled_text(kernel: Kernel) -> str:
    """What is translated: how threads share the kernel, and it in native ops."""
    kernel = _legal(kernel)
    return "\n".join([sharing_text(kernel), print_kernel(kernel, locs=True)])


def llvm_text(kernel: Kernel) -> str:
    """The LLVM module of any kernel."""
    return emit_kernel(_legal(kernel))


def _identity(kernel: Kernel) -> str:
    # The messages of checks name the source line.
    text = print_kernel(kernel, locs=True) if _is_seen(kernel) else kernel.text
    return compiler.identity(text)


def _is_seen(kernel: Kernel) -> bool:
    """Whether running it shows by more than its results: prints and checks."""
    return any(op.name in DEBUG_RULES for op in walk(kernel.body))


BACKEND = CpuBackend()
