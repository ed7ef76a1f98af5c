"""Upstream's BufferedRef: here a spec with a direction, since pipelines allocate.

Upstream's kernels may allocate the buffers of a pipeline themselves, as scratch or by
`run_scoped`, and hand them in. Here the compiler places blocks, so what is handed in
has no memory of its own: it is a pytree without leaves that remembers the spec.
"""

import enum
from dataclasses import dataclass, replace
from typing import Any

import jax

from pallasite import jaxcompat
from pallasite.language.spec_trees import is_spec
from pallasite.language.specs import BlockSpec, no_block_spec


class BufferType(enum.Enum):
    """Which way a block moves between main memory and the body."""

    INPUT = "input"
    OUTPUT = "output"
    ACCUMULATOR = "accumulator"
    INPUT_OUTPUT = "input_output"
    MANUAL = "manual"

    @property
    def is_only_read(self) -> bool:
        return self is BufferType.INPUT


@jax.tree_util.register_static
@dataclass(frozen=True)
class BufferedRef:
    """The blocks of one ref of a pipeline: their spec, element type and direction."""

    spec: BlockSpec
    dtype: Any
    buffer_type: BufferType

    @classmethod
    def create(
        cls, spec: BlockSpec, dtype_or_type: Any, buffer_type: BufferType, *_: Any, **__
    ) -> "BufferedRef":
        dtype = getattr(dtype_or_type, "dtype", dtype_or_type)
        return cls(spec, jax.numpy.dtype(dtype), buffer_type)

    @classmethod
    def input(cls, spec: BlockSpec, dtype_or_type: Any, *_: Any, **__: Any):
        """Blocks that the body reads."""
        return cls.create(spec, dtype_or_type, BufferType.INPUT)

    @classmethod
    def output(cls, spec: BlockSpec, dtype_or_type: Any, *_: Any, **__: Any):
        """Blocks that the body writes."""
        return cls.create(spec, dtype_or_type, BufferType.OUTPUT)

    @classmethod
    def accumulator(cls, spec: BlockSpec, dtype_or_type: Any, *_: Any, **__: Any):
        """Blocks that the body adds to."""
        return cls.create(spec, dtype_or_type, BufferType.ACCUMULATOR)

    @classmethod
    def input_output(cls, spec: BlockSpec, dtype_or_type: Any, *_: Any, **__: Any):
        """Blocks that the body reads and writes."""
        return cls.create(spec, dtype_or_type, BufferType.INPUT_OUTPUT)

    def with_spec(self, spec: BlockSpec) -> "BufferedRef":
        return replace(self, spec=spec)

    def with_window_ref(self, window_ref: Any) -> "BufferedRef":
        """Blocks fetched before the pipeline: it fetches the same ones itself."""
        del window_ref
        return self


def allocations_for(
    refs: tuple[Any, ...], in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]
) -> Any:
    """One BufferedRef per spec, in the structure of the specs; None for no spec."""
    flat, tree = jax.tree.flatten((*in_specs, *out_specs), is_leaf=is_spec)
    num_inputs = len(jax.tree.leaves(in_specs, is_leaf=is_spec))
    made: list[Any] = []
    for n, (spec, ref) in enumerate(zip(flat, tree.flatten_up_to(refs), strict=True)):
        make = BufferedRef.input if n < num_inputs else BufferedRef.output
        dtype = jaxcompat.aval_of(jaxcompat.ref_and_transforms(ref)[0]).dtype
        no_spec = spec is no_block_spec
        made.append(None if no_spec else make(spec or BlockSpec(), dtype))
    return tree.unflatten(made)
