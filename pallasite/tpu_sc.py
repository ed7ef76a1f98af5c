"""The names of upstream's `pallas.tpu_sc` (SparseCore), as they arrive."""

from pallasite import missing

__getattr__ = missing.names(
    "pallasite.tpu_sc",
    missing.hints(
        "Indices PackFormat ScalarSubcoreMesh SparseCorePushStreamWarning "
        "VectorSubcoreMesh addupdate addupdate_compressed addupdate_scatter "
        "all_reduce_ffs all_reduce_population_count bitcast cummax cumsum "
        "fetch_and_add get_sparse_core_info load_expanded load_gather pack "
        "parallel_loop scan_count slice_subcore_vmem_from_shared sort_key_val "
        "store_compressed store_scatter subcore_barrier unpack",
        "SparseCore kernels are not available yet",
    ),
)
