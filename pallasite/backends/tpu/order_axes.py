"""Orders grid axes so that visits of a result's block are consecutive.

Mosaic writes a block back as soon as the next step has another one, so a block that is
entered again would have to be read back. Parallel axes may run in any order; outside
the others, they leave each block once. Small results are kept on the chip instead
(`fit_windows.py`), in the author's order. Kernel in, Kernel out.
"""

from collections.abc import Sequence
from dataclasses import replace

from pallasite.backends.tpu.fit_windows import is_small
from pallasite.backends.tpu.schedule import main_pipeline
from pallasite.backends.tpu.windows import returned_to
from pallasite.ir.nodes import Kernel, Value
from pallasite.ir.roles import Pipeline
from pallasite.passes.analysis.grid import analyze, with_pipeline


def order_axes(kernel: Kernel) -> Kernel:
    """The kernel with parallel axes first, if blocks are entered again otherwise."""
    op = main_pipeline(kernel)
    if op is None:
        return kernel
    pipeline = Pipeline.of(op)
    returned = [shown.block for shown, *_ in returned_to(kernel, pipeline)]
    if all(is_small(block, pipeline) for block in returned):
        return kernel
    info = analyze(kernel)
    order = (*info.parallel, *info.sequential)
    new = with_pipeline(kernel, _permuted(pipeline, order).to_op())
    again = any(returned_to(new, Pipeline.of(main_pipeline(new) or op)))
    return kernel if again else new


def _permuted(pipeline: Pipeline, order: Sequence[int]) -> Pipeline:
    def moved(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(values[axis] for axis in order)

    ids = moved(pipeline.ids)
    maps = [replace(block, params=moved(block.params)) for block in pipeline.maps]
    sizes = dict(zip(_dynamic(pipeline), pipeline.dynamic_sizes, strict=True))
    return pipeline.with_(
        dynamic_sizes=tuple(sizes[axis] for axis in order if axis in sizes),
        grid=tuple(pipeline.grid[axis] for axis in order),
        semantics=tuple(pipeline.semantics[axis] for axis in order),
        maps=tuple(maps),
        body=replace(pipeline.body, params=(*ids, *pipeline.blocks)),
    )


def _dynamic(pipeline: Pipeline) -> list[int]:
    return [axis for axis, size in enumerate(pipeline.grid) if size is None]
