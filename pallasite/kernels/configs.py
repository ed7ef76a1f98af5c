"""Choosing the configuration of an operation."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

import pallasite as pl
from pallasite import config
from pallasite.errors import KernelTypeError, SpecError
from pallasite.kernels import common
from pallasite.placement import chip_for
from pallasite.target import Gpu, Host, Tpu
from pallasite.tune import choices
from pallasite.tune.space import Space

MANY_ROWS = 1 << 20  # for which blocks are chosen where rows are not counted
WIDE = 1024  # elements that make a row worth its own program

C = TypeVar("C")  # a configuration: a frozen dataclass

# What the tuner tries.
ROWS = {"block_rows": (8, 16, 32, 64, 128, 256)}
PRODUCT = {
    "block_m": (64, 128, 256),
    "block_n": (64, 128, 256),
    "block_k": (32, 64, 128),
}


def traced_for(kind: type[Host | Gpu | Tpu]) -> bool:
    """Whether the current call is being traced for a chip of this kind."""
    return isinstance(chip_for(None), kind)


def tpu() -> Tpu | None:
    """The TPU the current call is being traced for, if it is one."""
    chip = chip_for(None)
    return chip if isinstance(chip, Tpu) else None


def hopper() -> Gpu | None:
    """The GPU the current call is being traced for, if it multiplies by warpgroups.

    The `cuda` backend does so on chips of that generation, unless another backend is
    requested.
    """
    chip = chip_for(None)
    if not isinstance(chip, Gpu) or chip.arch != "sm_90":
        return None
    return chip if config.get("backend") in ("", "cuda") else None


def tuned(
    kernel: str,
    given: C | None,
    default: C,
    space: Mapping[str, Sequence[Any]],
    operands: Sequence[Any],
    batch_invariant: bool = False,
    **options: Any,
) -> C:
    """The configuration of a call: the caller's, else a tuned one, else the default.

    A tuned one is that of some number of rows, so it is none where these must not
    matter.

    Args:
        kernel: the operation's name in tuning tables.
        given: what the caller passed as `config=`.
        default: the configuration of calls that were never tuned.
        space: per field, the values the tuner tries; other fields keep the default.
        operands: arrays whose shapes and dtypes matter (None: not given).
        options: whatever else determines the kernel's code.
    """
    if given is not None or batch_invariant:
        found: Any = checked(kernel, default if given is None else given, default)
        same = batch_invariant or getattr(found, "batch_invariant", False)
        return dataclasses.replace(found, batch_invariant=True) if same else found
    values = {name: getattr(default, name) for name in space}
    site = choices.site_of(kernel, operands, options)
    chosen = choices.choose(site, values, Space(space))
    made = dataclasses.replace(default, **chosen)  # pyright: ignore[reportArgumentType]
    # Someone may have edited the table.
    return checked(kernel, made, default, "tune it again: this is from a table")


def checked(operation: str, given: C, like: C, fix: str | None = None) -> C:
    """A configuration, checked: the right class, and positive sizes."""
    if not isinstance(given, type(like)):
        raise KernelTypeError(
            f"{operation}: config is not a {type(like).__name__}",
            [("is of type", type(given).__name__)],
            fix=f"pass config=kernels.{type(like).__name__}(...)",
        )
    for field in dataclasses.fields(given):  # pyright: ignore[reportArgumentType]
        value, usual = getattr(given, field.name), getattr(like, field.name)
        if isinstance(usual, bool) or not isinstance(usual, int | None):
            continue  # a choice, or a configuration within this one
        is_size = isinstance(value, int | np.integer) and value >= 1
        if not is_size and not (value is None and field.default is None):
            raise SpecError(
                f"{operation}: {field.name} of its configuration is {value!r}",
                [("config", given)],
                fix=fix or f"pass a positive integer for {field.name}",
            )
    return given


def tuned_rows(
    kernel: str,
    given: common.RowConfig | None,
    *operands: Any,
    default: common.RowConfig | None = None,
    batch_invariant: bool = False,
) -> common.RowConfig:
    """The configuration of an operation on the rows of the first operand."""
    shape = operands[0].shape
    if batch_invariant:  # that of many rows; there may be fewer than in a block
        default = common.RowConfig(common.rows_per_block((MANY_ROWS, *shape[-1:])))
    default = default or common.row_config(operands[0])
    if traced_for(Host):
        default = _even(default, shape)
    return tuned(kernel, given, default, ROWS, operands, batch_invariant)


# Numbers of the keys of a head that a program of a GPU, and its gradients, have room
# for at a time.
MOST_NUMBERS = 1 << 15


def most_rows(width: int) -> int:
    """How many rows of this width have so many numbers."""
    return max(MOST_NUMBERS // pl.next_power_of_2(width), 16)


# Columns of a row that a program of a GPU holds, in at most seconds of compilation:
# XLA's compiler takes 78 for softmax of 2**20, and Triton has no larger tensors.
WIDEST = 1 << 18


def rows_kernel(kernel: Callable, plain: Callable, x: Any, most: int = WIDEST):
    """The kernel, or the plain form where a program of a GPU has no room for a row.

    XLA passes over such a row several times.
    """
    return plain if traced_for(Gpu) and x.shape[-1] > most else kernel


def _even(config: common.RowConfig, shape: Sequence[int]) -> common.RowConfig:
    """Blocks that divide the rows, if those are not much smaller or rows are wide.

    A CPU copies a block that extends past the edge, and does not need eight rows.
    """
    count, wanted = math.prod(shape[:-1]), config.block_rows
    if not count:
        return config
    rows = max(n for n in range(1, wanted + 1) if count % n == 0)
    close = 2 * rows >= wanted or shape[-1] >= WIDE
    return common.RowConfig(rows) if close else config
