"""The names of upstream's `plsc`: `from pallasite import tpu_sc as plsc`."""

from pallasite import missing
from pallasite.calls.mesh import ScalarSubcoreMesh as ScalarSubcoreMesh
from pallasite.calls.mesh import VectorSubcoreMesh as VectorSubcoreMesh
from pallasite.language.sparse_core import Indices as Indices
from pallasite.language.sparse_core import PackFormat as PackFormat
from pallasite.language.sparse_core import (
    SparseCorePushStreamWarning as SparseCorePushStreamWarning,
)
from pallasite.language.sparse_core import addupdate as addupdate
from pallasite.language.sparse_core import addupdate_compressed as addupdate_compressed
from pallasite.language.sparse_core import addupdate_scatter as addupdate_scatter
from pallasite.language.sparse_core import all_reduce_ffs as all_reduce_ffs
from pallasite.language.sparse_core import (
    all_reduce_population_count as all_reduce_population_count,
)
from pallasite.language.sparse_core import bitcast as bitcast
from pallasite.language.sparse_core import cummax as cummax
from pallasite.language.sparse_core import cummin as cummin
from pallasite.language.sparse_core import cumsum as cumsum
from pallasite.language.sparse_core import fetch_and_add as fetch_and_add
from pallasite.language.sparse_core import load_expanded as load_expanded
from pallasite.language.sparse_core import load_gather as load_gather
from pallasite.language.sparse_core import pack as pack
from pallasite.language.sparse_core import parallel_loop as parallel_loop
from pallasite.language.sparse_core import scan_count as scan_count
from pallasite.language.sparse_core import sort_key_val as sort_key_val
from pallasite.language.sparse_core import store_compressed as store_compressed
from pallasite.language.sparse_core import store_scatter as store_scatter
from pallasite.language.sparse_core import subcore_barrier as subcore_barrier
from pallasite.language.sparse_core import unpack as unpack
from pallasite.language.tpu_info import get_sparse_core_info as get_sparse_core_info

__getattr__ = missing.names(
    "pallasite.tpu_sc",
    missing.hints(
        "slice_subcore_vmem_from_shared",
        "subcores share pltpu.VMEM_SHARED, through copies, and synchronise with "
        "plsc.subcore_barrier",
    ),
)
