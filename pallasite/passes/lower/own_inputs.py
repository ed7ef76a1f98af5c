"""own_inputs: gives an operand that the kernel writes a private copy.

XLA's arrays are immutable; memory aliased with a result is the kernel's own. A launch
has these results after those of the call (`own_results`).
"""

from pallasite.ir.nodes import Kernel, Value
from pallasite.passes.analysis.memory import Roots


def own_inputs(kernel: Kernel) -> Kernel:
    """The kernel with one more result per operand it writes and does not return."""
    aliased = {i for i, _ in kernel.aliases}
    written = Roots(kernel.body).all_written(kernel.body)
    inputs = list(enumerate(kernel.inputs))
    own = [n for n, param in inputs if param in written and n not in aliased]
    if not own:
        return kernel
    more = [Value(kernel.inputs[n].type, kernel.inputs[n].name) for n in own]
    new = [(n, kernel.num_outputs + k) for k, n in enumerate(own)]
    return kernel.with_(
        params=(*kernel.params, *more),
        num_outputs=kernel.num_outputs + len(own),
        aliases=(*kernel.aliases, *new),
    )


def own_results(kernel: Kernel, count: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and numpy dtypes of the results that a kernel has beside `count`."""
    return tuple((p.ref.shape, p.ref.dtype.np.name) for p in kernel.outputs[count:])
