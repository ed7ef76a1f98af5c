"""The TPU backend: tile IR -> Mosaic MLIR -> `tpu_custom_call`.

Reading order: `schedule.py` (inner pipelines become loops), `emit.py` (module, grid,
windows), `control.py`, `memory.py`, `tiles.py`, `elementwise.py` (ops by family), and
`compile.py` (what XLA is handed). libtpu compiles the result, with or without a TPU:
see `runtime/aot.py`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pallasite.backends.base import Launch, Options, Stage
from pallasite.ir.nodes import Kernel


class TpuBackend:
    """See `backends.base.Backend`."""

    name = "tpu"
    platforms = ("tpu",)
    level = "tile"

    @cached_property
    def native(self) -> frozenset[str]:
        from pallasite.backends.tpu.emit import native_ops

        return native_ops()

    def stages(self, kernel: Kernel, options: Options) -> dict[str, Stage]:
        from pallasite.backends.tpu.emit import emit_module, is_native
        from pallasite.backends.tpu.schedule import schedule
        from pallasite.passes.legalize import legalize
        from pallasite.passes.place_windows import place_windows

        scheduled = schedule(place_windows(kernel))
        scheduled = legalize(scheduled, is_native, self.name)
        return {
            "scheduled": lambda _: scheduled.text,
            # The text form has no source lines, which error messages need.
            "mosaic": lambda _: emit_module(scheduled, options.debug),
        }

    def launch(
        self, kernel: Kernel, outputs: Mapping[str, Any], options: Options
    ) -> Launch:
        from pallasite.backends.tpu.compile import call_config

        return Launch(
            target="tpu_custom_call",
            config=call_config(outputs["mosaic"], options),
            api_version=1,
            aliases=kernel.aliases,
            has_side_effect=bool(options.compiler_params.get("has_side_effects")),
        )

    def version(self) -> str:
        from pallasite.backends.tpu.compile import DIALECT_VERSION

        return f"1+mosaic{DIALECT_VERSION}"


BACKEND = TpuBackend()
