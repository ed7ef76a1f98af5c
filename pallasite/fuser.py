"""The names of upstream's `pallas.fuser`, as they arrive."""

from pallasite import missing

__getattr__ = missing.names(
    "pallasite.fuser",
    missing.hints(
        "BlockIndexTransform Fusion block_spec_with_prefetch custom_fusion evaluate "
        "filter_no_block_specs fuse fusible get_fusion_values "
        "get_stateful_input_fusion_values get_stateful_output_fusion_values "
        "make_scalar_prefetch_handler pull_block_spec push_block_spec "
        "push_pull_block_spec",
        "call the functions around a kernel in the kernel itself, or leave them to XLA",
    ),
)
