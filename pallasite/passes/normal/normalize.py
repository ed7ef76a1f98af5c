"""The passes that bring a kernel into normal form; docs/normal_form.md defines it."""

from pallasite.ir.nodes import Kernel
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.passes.normal.replicated import replicated
from pallasite.passes.normal.unit_dims import unit_dims

RULES = (canonicalize, unit_dims, replicated)


def normalize(kernel: Kernel) -> Kernel:
    for rule in RULES:
        kernel = rule(kernel)
    return kernel
