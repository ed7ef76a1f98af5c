"""Small kernels as text for the tests of analyses: a body over grid indices."""

from pallasite.ir.nodes import Value, walk
from pallasite.ir.roles import Pipeline
from pallasite.ir.text import parse_kernel
from pallasite.passes.analysis.grid import find_pipeline


def program(body: str, grid: tuple[int, ...] = (4,), params: str = "") -> Pipeline:
    """The pipeline of a kernel without windows; its grid indices are %i0, %i1, ..."""
    ids = ", ".join(f"%i{axis}: i32" for axis in range(len(grid)))
    semantics = ", ".join(['"arbitrary"'] * len(grid)) + ","
    params = f"{params}, " if params else ""
    kernel = parse_kernel(f"""
        kernel @k({params}%o: ref<i32[64] any>) outputs 1 {{
          pipeline {{grid={grid}, windows=(), semantics=({semantics})}}
            body ({ids}) {{
              {body}
            }}
        }}
    """)
    return Pipeline.of(find_pipeline(kernel))


def value_named(pipeline: Pipeline, name: str) -> Value:
    """The value, operand or ref with this name in a pipeline's body."""
    found = [v for op in walk(pipeline.body) for v in (*op.results, *op.operands)]
    found += [p for op in walk(pipeline.body) for r in op.regions for p in r.params]
    return next(v for v in (*pipeline.body.params, *found) if v.name == name)
