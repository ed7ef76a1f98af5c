"""Pallasite: the Pallas kernel language with one meaning on CPU, GPU and TPU.

Conventional import: `import pallasite as pl`. This file lists the public names.
"""

from pallasite import config as _config
from pallasite import missing as _missing
from pallasite.autodiff.explain_grad import explain_grad as explain_grad
from pallasite.calls.estimate_cost import estimate_cost as estimate_cost
from pallasite.calls.mesh import core_map as core_map
from pallasite.calls.mesh import kernel as kernel
from pallasite.calls.pallas_call import pallas_call as pallas_call
from pallasite.fusion.fuse import fuse as fuse
from pallasite.install import install as install
from pallasite.language.device_ids import DeviceIdType as DeviceIdType
from pallasite.language.helpers import align_to as align_to
from pallasite.language.helpers import broadcast_to as broadcast_to
from pallasite.language.helpers import cdiv as cdiv
from pallasite.language.helpers import debug_checks_enabled as debug_checks_enabled
from pallasite.language.helpers import dot as dot
from pallasite.language.helpers import empty as empty
from pallasite.language.helpers import empty_like as empty_like
from pallasite.language.helpers import empty_ref_like as empty_ref_like
from pallasite.language.helpers import enable_debug_checks as enable_debug_checks
from pallasite.language.helpers import enable_poison_buffers as enable_poison_buffers
from pallasite.language.helpers import loop as loop
from pallasite.language.helpers import max_contiguous as max_contiguous
from pallasite.language.helpers import next_power_of_2 as next_power_of_2
from pallasite.language.helpers import reciprocal as reciprocal
from pallasite.language.helpers import run_state as run_state
from pallasite.language.helpers import strides_from_shape as strides_from_shape
from pallasite.language.helpers import when as when
from pallasite.language.memory_spaces import MemoryRef as MemoryRef
from pallasite.language.memory_spaces import MemorySpace as MemorySpace
from pallasite.language.ref_type import Ref as Ref
from pallasite.language.refs import Slice as Slice
from pallasite.language.refs import atomic_add as atomic_add
from pallasite.language.refs import atomic_and as atomic_and
from pallasite.language.refs import atomic_cas as atomic_cas
from pallasite.language.refs import atomic_max as atomic_max
from pallasite.language.refs import atomic_min as atomic_min
from pallasite.language.refs import atomic_or as atomic_or
from pallasite.language.refs import atomic_xchg as atomic_xchg
from pallasite.language.refs import atomic_xor as atomic_xor
from pallasite.language.refs import debug_check as debug_check
from pallasite.language.refs import debug_print as debug_print
from pallasite.language.refs import delay as delay
from pallasite.language.refs import ds as ds
from pallasite.language.refs import dslice as dslice
from pallasite.language.refs import get_global as get_global
from pallasite.language.refs import load as load
from pallasite.language.refs import multiple_of as multiple_of
from pallasite.language.refs import num_programs as num_programs
from pallasite.language.refs import program_id as program_id
from pallasite.language.refs import run_scoped as run_scoped
from pallasite.language.refs import select_ref as select_ref
from pallasite.language.refs import semaphore_read as semaphore_read
from pallasite.language.refs import semaphore_signal as semaphore_signal
from pallasite.language.refs import semaphore_wait as semaphore_wait
from pallasite.language.refs import store as store
from pallasite.language.refs import swap as swap
from pallasite.language.refs import with_scoped as with_scoped
from pallasite.language.specs import Blocked as Blocked
from pallasite.language.specs import BlockSpec as BlockSpec
from pallasite.language.specs import BoundedSlice as BoundedSlice
from pallasite.language.specs import Buffered as Buffered
from pallasite.language.specs import CompilerParams as CompilerParams
from pallasite.language.specs import CostEstimate as CostEstimate
from pallasite.language.specs import Element as Element
from pallasite.language.specs import GridSpec as GridSpec
from pallasite.language.specs import RevisitMode as RevisitMode
from pallasite.language.specs import Squeezed as Squeezed
from pallasite.language.specs import no_block_spec as no_block_spec
from pallasite.language.specs import squeezed as squeezed
from pallasite.primitive import Checked as Checked
from pallasite.primitive import call_p as _call_p
from pallasite.proofs.prove import prove as prove
from pallasite.sharding.rule import Partition as Partition
from pallasite.tools.aot import aot as aot
from pallasite.tools.explain import explain as explain
from pallasite.tools.lower import lower as lower
from pallasite.tools.lower_as_mlir import lower_as_mlir as lower_as_mlir
from pallasite.tools.lower_as_mlir import (
    pallas_export_experimental as pallas_export_experimental,
)
from pallasite.tools.profile import profile as profile
from pallasite.tools.roofline_picture import roofline as roofline
from pallasite.tune.autotune import autotune as autotune
from pallasite.tune.choices import configs as configs
from pallasite.tune.results import Tuned as Tuned
from pallasite.tune.tunable import tunable as tunable

BlockDim = Blocked | Element | Squeezed | BoundedSlice
pallas_call_p = _call_p
ANY = MemorySpace.ANY
HOST = MemorySpace.HOST
semaphore = MemorySpace.SEMAPHORE

__version__ = _config.VERSION

__getattr__ = _missing.names(
    "pallasite",
    {
        "Indirect": "gather rows by index in the kernel: "
        "pltpu.async_copy(x_ref.at[indices_ref], rows_ref, sem)",
    },
)

__dir__ = _missing.listed(__name__)
