"""The names of upstream's `pallas.fuser`."""

from pallasite.fusion.block_rules import BlockIndexTransform as BlockIndexTransform
from pallasite.fusion.block_specs import (
    block_spec_with_prefetch as block_spec_with_prefetch,
)
from pallasite.fusion.block_specs import evaluate as evaluate
from pallasite.fusion.block_specs import filter_no_block_specs as filter_no_block_specs
from pallasite.fusion.block_specs import get_fusion_values as get_fusion_values
from pallasite.fusion.block_specs import (
    get_stateful_input_fusion_values as get_stateful_input_fusion_values,
)
from pallasite.fusion.block_specs import (
    get_stateful_output_fusion_values as get_stateful_output_fusion_values,
)
from pallasite.fusion.block_specs import (
    make_scalar_prefetch_handler as make_scalar_prefetch_handler,
)
from pallasite.fusion.block_specs import pull_block_spec as pull_block_spec
from pallasite.fusion.block_specs import push_block_spec as push_block_spec
from pallasite.fusion.block_specs import push_pull_block_spec as push_pull_block_spec
from pallasite.fusion.custom_fusion import custom_fusion as custom_fusion
from pallasite.fusion.fusible import Fusion as Fusion
from pallasite.fusion.fusible import fuse as fuse
from pallasite.fusion.fusible import fusible as fusible
