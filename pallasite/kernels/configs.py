"""Which configuration an operation of the library takes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pallasite.kernels import common
from pallasite.primitive import chip_for
from pallasite.target import Gpu, Host, Tpu
from pallasite.tune import choices
from pallasite.tune.space import Space

WIDE = 1024  # elements of a row that is worth a program by itself

C = TypeVar("C")  # a configuration: a frozen dataclass

# What the tuner tries.
ROWS = {"block_rows": (8, 16, 32, 64, 128, 256)}
PRODUCT = {
    "block_m": (64, 128, 256),
    "block_n": (64, 128, 256),
    "block_k": (32, 64, 128),
}


def traced_for(kind: type[Host | Gpu | Tpu]) -> bool:
    """Is a call traced now for a chip of this kind?"""
    return isinstance(chip_for(None), kind)


def tuned(
    kernel: str,
    given: C | None,
    default: C,
    space: Mapping[str, Sequence[Any]],
    operands: Sequence[Any],
    **options: Any,
) -> C:
    """The configuration of a call: the caller's, else a tuned one, else the default.

    Args:
        kernel: what tables call the operation.
        given: what the caller passed as `config=`.
        default: the configuration of calls that were never tuned.
        space: the values of its fields that the tuner tries; others stay as they are.
        operands: arrays whose shapes and dtypes decide (None: not given).
        options: whatever else decides the kernel's code.
    """
    if given is not None:
        return given
    values = {name: getattr(default, name) for name in space}
    site = choices.site_of(kernel, operands, options)
    chosen = choices.choose(site, values, Space(space))
    return dataclasses.replace(default, **chosen)  # pyright: ignore[reportArgumentType]


def tuned_rows(
    kernel: str,
    given: common.RowConfig | None,
    *operands: Any,
    default: common.RowConfig | None = None,
) -> common.RowConfig:
    """The configuration of an operation on rows; the first operand has them."""
    default = default or common.row_config(operands[0])
    if traced_for(Host):
        default = _even(default, operands[0].shape)
    return tuned(kernel, given, default, ROWS, operands)


def _even(config: common.RowConfig, shape: Sequence[int]) -> common.RowConfig:
    """Blocks that divide the rows, if they are not much smaller, or rows are wide.

    A CPU copies a block that hangs over the edge, and has no need of eight rows.
    """
    count, wanted = math.prod(shape[:-1]), config.block_rows
    if not count:
        return config
    rows = max(n for n in range(1, wanted + 1) if count % n == 0)
    close = 2 * rows >= wanted or shape[-1] >= WIDE
    return common.RowConfig(rows) if close else config
