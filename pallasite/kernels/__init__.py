"""Ready-made operations, one portable source each: `from pallasite import kernels`.

Each is an ordinary JAX function: it works under jit, vmap and grad, on sharded arrays,
and on every chip the language supports. This file lists the public names.
"""

from pallasite import missing as _missing
from pallasite.kernels import entry as _entry
from pallasite.kernels import masks as masks
from pallasite.kernels.attention import AttentionConfig as AttentionConfig
from pallasite.kernels.attention import attention as attention
from pallasite.kernels.cache import update_pages as update_pages
from pallasite.kernels.collective_matmul import (
    CollectiveMatmulConfig as CollectiveMatmulConfig,
)
from pallasite.kernels.collective_matmul import all_gather_matmul as all_gather_matmul
from pallasite.kernels.collective_matmul import (
    matmul_reduce_scatter as matmul_reduce_scatter,
)
from pallasite.kernels.common import RowConfig as RowConfig
from pallasite.kernels.conv import ConvConfig as ConvConfig
from pallasite.kernels.conv import causal_conv1d as causal_conv1d
from pallasite.kernels.cross_entropy import CrossEntropyConfig as CrossEntropyConfig
from pallasite.kernels.cross_entropy import (
    linear_softmax_cross_entropy_loss as linear_softmax_cross_entropy_loss,
)
from pallasite.kernels.decode import DecodeConfig as DecodeConfig
from pallasite.kernels.decode import decode_attention as decode_attention
from pallasite.kernels.decode import paged_attention as paged_attention
from pallasite.kernels.embedding import embedding_bag as embedding_bag
from pallasite.kernels.expert_parallel import (
    expert_parallel_mixture as expert_parallel_mixture,
)
from pallasite.kernels.glu import gated_linear_unit as gated_linear_unit
from pallasite.kernels.group_norm import group_norm as group_norm
from pallasite.kernels.grouped_matmul import grouped_matmul as grouped_matmul
from pallasite.kernels.latent_attention import (
    LatentAttentionConfig as LatentAttentionConfig,
)
from pallasite.kernels.latent_attention import latent_attention as latent_attention
from pallasite.kernels.matmul import MatmulConfig as MatmulConfig
from pallasite.kernels.matmul import matmul as matmul
from pallasite.kernels.moe import Permutation as Permutation
from pallasite.kernels.moe import Routing as Routing
from pallasite.kernels.moe import mixture_of_experts as mixture_of_experts
from pallasite.kernels.moe import permute as permute
from pallasite.kernels.moe import route as route
from pallasite.kernels.moe import sort_by_expert as sort_by_expert
from pallasite.kernels.moe import unpermute as unpermute
from pallasite.kernels.norms import layer_norm as layer_norm
from pallasite.kernels.norms import rms_norm as rms_norm
from pallasite.kernels.ordering import sort as sort
from pallasite.kernels.ordering import top_k as top_k
from pallasite.kernels.quantized import QuantizedWeights as QuantizedWeights
from pallasite.kernels.quantized import WeightOnlyConfig as WeightOnlyConfig
from pallasite.kernels.quantized import block_scaled_matmul as block_scaled_matmul
from pallasite.kernels.quantized import quantize_weights as quantize_weights
from pallasite.kernels.quantized import weight_only_matmul as weight_only_matmul
from pallasite.kernels.ragged_attention import (
    RaggedAttentionConfig as RaggedAttentionConfig,
)
from pallasite.kernels.ragged_attention import (
    ragged_paged_attention as ragged_paged_attention,
)
from pallasite.kernels.ring_attention import ring_attention as ring_attention
from pallasite.kernels.ring_attention import zigzag_order as zigzag_order
from pallasite.kernels.rotary import rotary_embedding as rotary_embedding
from pallasite.kernels.scaled import scaled_matmul as scaled_matmul
from pallasite.kernels.scans import RecurrenceConfig as RecurrenceConfig
from pallasite.kernels.scans import StateSpaceConfig as StateSpaceConfig
from pallasite.kernels.scans import linear_recurrence as linear_recurrence
from pallasite.kernels.scans import state_space_scan as state_space_scan
from pallasite.kernels.softmax import softmax as softmax

_missing_name = _entry.missing_name
__dir__ = _missing.listed(__name__)
_entry.public(__name__)


def __getattr__(name: str) -> object:
    raise _missing_name(name, __dir__())
