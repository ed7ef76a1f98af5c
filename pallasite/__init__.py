"""Pallasite: the Pallas kernel language with one meaning on CPU, GPU and TPU.

Conventional import: `import pallasite as pl`. This file lists the public names.
"""

from pallasite import missing as _missing
from pallasite.frontend.call import pallas_call as pallas_call
from pallasite.frontend.control import align_to as align_to
from pallasite.frontend.control import broadcast_to as broadcast_to
from pallasite.frontend.control import cdiv as cdiv
from pallasite.frontend.control import debug_checks_enabled as debug_checks_enabled
from pallasite.frontend.control import dot as dot
from pallasite.frontend.control import empty as empty
from pallasite.frontend.control import empty_like as empty_like
from pallasite.frontend.control import empty_ref_like as empty_ref_like
from pallasite.frontend.control import loop as loop
from pallasite.frontend.control import max_contiguous as max_contiguous
from pallasite.frontend.control import next_power_of_2 as next_power_of_2
from pallasite.frontend.control import reciprocal as reciprocal
from pallasite.frontend.control import run_state as run_state
from pallasite.frontend.control import strides_from_shape as strides_from_shape
from pallasite.frontend.control import when as when
from pallasite.frontend.estimate import estimate_cost as estimate_cost
from pallasite.frontend.explain_grad import explain_grad as explain_grad
from pallasite.frontend.lower import lower as lower
from pallasite.frontend.mesh import core_map as core_map
from pallasite.frontend.mesh import kernel as kernel
from pallasite.frontend.partition_rule import Partition as Partition
from pallasite.frontend.primitive import Checked as Checked
from pallasite.frontend.refs import Slice as Slice
from pallasite.frontend.refs import atomic_add as atomic_add
from pallasite.frontend.refs import atomic_and as atomic_and
from pallasite.frontend.refs import atomic_cas as atomic_cas
from pallasite.frontend.refs import atomic_max as atomic_max
from pallasite.frontend.refs import atomic_min as atomic_min
from pallasite.frontend.refs import atomic_or as atomic_or
from pallasite.frontend.refs import atomic_xchg as atomic_xchg
from pallasite.frontend.refs import atomic_xor as atomic_xor
from pallasite.frontend.refs import debug_check as debug_check
from pallasite.frontend.refs import debug_print as debug_print
from pallasite.frontend.refs import delay as delay
from pallasite.frontend.refs import ds as ds
from pallasite.frontend.refs import dslice as dslice
from pallasite.frontend.refs import get_global as get_global
from pallasite.frontend.refs import load as load
from pallasite.frontend.refs import multiple_of as multiple_of
from pallasite.frontend.refs import num_programs as num_programs
from pallasite.frontend.refs import program_id as program_id
from pallasite.frontend.refs import run_scoped as run_scoped
from pallasite.frontend.refs import semaphore_read as semaphore_read
from pallasite.frontend.refs import semaphore_signal as semaphore_signal
from pallasite.frontend.refs import semaphore_wait as semaphore_wait
from pallasite.frontend.refs import store as store
from pallasite.frontend.refs import swap as swap
from pallasite.frontend.refs import with_scoped as with_scoped
from pallasite.frontend.spaces import MemoryRef as MemoryRef
from pallasite.frontend.spaces import MemorySpace as MemorySpace
from pallasite.frontend.spec import Blocked as Blocked
from pallasite.frontend.spec import BlockSpec as BlockSpec
from pallasite.frontend.spec import BoundedSlice as BoundedSlice
from pallasite.frontend.spec import Buffered as Buffered
from pallasite.frontend.spec import CostEstimate as CostEstimate
from pallasite.frontend.spec import Element as Element
from pallasite.frontend.spec import GridSpec as GridSpec
from pallasite.frontend.spec import RevisitMode as RevisitMode
from pallasite.frontend.spec import Squeezed as Squeezed
from pallasite.frontend.spec import no_block_spec as no_block_spec
from pallasite.frontend.spec import squeezed as squeezed
from pallasite.install import install as install

ANY = MemorySpace.ANY
HOST = MemorySpace.HOST
semaphore = MemorySpace.SEMAPHORE

__version__ = "0.1.0"

__getattr__ = _missing.names(
    "pallasite",
    {
        **_missing.hints(
            "Indirect DeviceIdType select_ref lower_as_mlir "
            "pallas_call_p pallas_export_experimental BlockDim CompilerParams",
            "not part of this release; see docs/compat.md",
        ),
        "enable_debug_checks": "pl.debug_check is always on",
        "enable_poison_buffers": "interpret=True poisons, pl.Checked() reports",
    },
)
