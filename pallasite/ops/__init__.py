"""The op table. Importing this package registers every op with `ir.opdef`."""

from pallasite.ops import effects as effects
from pallasite.ops import elementwise as elementwise
from pallasite.ops import fused as fused
from pallasite.ops import gpu as gpu
from pallasite.ops import matrix_units as matrix_units
from pallasite.ops import scaled as scaled
from pallasite.ops import tensor_memory as tensor_memory
from pallasite.ops import tile as tile
