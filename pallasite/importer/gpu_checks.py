"""Trace-time checks of `plgpu` kernels: more memory than any chip has, copies between
the wrong memory spaces, matmuls that no matrix instruction supports.
"""

from collections.abc import Sequence
from typing import Any

from pallasite.errors import KernelTypeError, ResourceError
from pallasite.ir import types as T
from pallasite.ir.nodes import Value
from pallasite.ops.tensor_memory import KEPT, KEPT_TILE
from pallasite.passes.analysis.cost import bytes_of
from pallasite.target.table import GPUS

SHARED_BYTES = max(chip.shared.bytes for chip in GPUS.values())
TENSOR_COLUMNS = 512  # of 32 bits, of a multiprocessor's tensor memory
PLACES = {
    "gmem": "main memory (GMEM)",
    "smem": "shared memory (SMEM)",
    "tmem": "tensor memory (TMEM)",
    "regs": "an accumulator",
    "mbarrier": "barriers",
}
# By the dtype of both operands of a wgmma: the accumulator dtypes it supports.
SUMS_OF = {
    "bf16": ("f32",),
    "f16": ("f32", "f16"),
    "f32": ("f32",),
    "i8": ("i32",),
    "u8": ("i32",),
    "f8e4m3fn": ("f32", "f16"),
    "f8e5m2": ("f32", "f16"),
}


def _columns_of(ref: T.RefType) -> int:
    """At least: small elements may have a column each."""
    return -(-ref.shape[-1] * ref.dtype.bits // 32) if ref.shape else 1


def room(im: Any, held: Sequence[T.RefType], more: T.RefType) -> None:
    """Reject a thread block that needs more memory than any chip has."""
    for space, unit, needed, most in (
        ("smem", "bytes", bytes_of, SHARED_BYTES),
        ("tmem", "columns of 32 bits", _columns_of, TENSOR_COLUMNS),
    ):
        before = sum(needed(ref) for ref in held if ref.space == space)
        if more.space != space or before + needed(more) <= most:
            continue
        total = before + needed(more)
        raise ResourceError(
            f"a thread block has {most} {unit} of {PLACES[space]}, but needs {total}",
            [
                ("kernel", im.kernel_name),
                ("this one", f"{more.tile}: {needed(more)} {unit}"),
                ("allocated before", f"{before} {unit}"),
            ],
            im.where,
            "use smaller blocks, or fewer slots (max_concurrent_steps)",
        )


def ends(im: Any, spaces: tuple[str, str], source: Value, target: Value) -> None:
    """Reject a copy between the wrong memory spaces, or of different shapes."""
    facts = [
        ("kernel", im.kernel_name),
        ("source", source.type),
        ("destination", target.type),
    ]
    words = zip(("from", "to"), (source.ref, target.ref), spaces, strict=True)
    for word, ref, space in words:
        if ref.space != space:
            found = PLACES.get(ref.space, ref.space)
            fix = (
                "use copy_gmem_to_smem(src, dst, barrier) to shared memory, "
                "copy_smem_to_gmem(src, dst) from it"
            )
            raise KernelTypeError(
                f"this copy must be {word} {PLACES[space]}, not {word} {found}",
                facts,
                im.where,
                fix,
            )
    if source.ref.tile != target.ref.tile:
        raise KernelTypeError(
            "source and destination of a copy must have the same shape and dtype",
            facts,
            im.where,
            "slice both with .at[...]",
        )


def store(im: Any, value: Value, target: Value) -> None:
    """Reject an async store to another memory space, or of another type."""
    problem = None
    if target.ref.space != "smem":
        problem = "async_store_smem stores to shared memory (SMEM)"
    elif value.tile.shape != target.ref.shape or value.tile.dtype != target.ref.dtype:
        problem = "the value and the ref of async_store_smem have different types"
    if problem is not None:
        facts = [("value", value.type), ("ref", target.type)]
        fix = "slice the ref with .at[...], and .astype the value"
        raise KernelTypeError(
            problem, [("kernel", im.kernel_name), *facts], im.where, fix
        )


# By the dtype of scales: elements along k that one of them is for.
SCALED = {"f8e8m0fnu": (16, 32), "f8e4m3fn": (16,)}


def scales(im: Any, sides: Sequence[int], k: int, found: Sequence[Value]) -> None:
    """Reject scales of a tcgen05_mma that no matrix instruction has."""
    for scale, n, name in zip(found, sides, ("a_scale", "b_scale"), strict=False):
        ref, blocks = scale.ref, scale.ref.shape[-1] if scale.ref.shape else 0
        known = SCALED.get(ref.dtype.name, ())
        fits = ref.shape[:1] == (n,) and ref.rank == 2 and blocks > 0
        if ref.space == "tmem" and fits and any(b * blocks == k for b in known):
            continue
        raise KernelTypeError(
            f"{name} is no tensor memory with scales of {n} x {k}",
            [("kernel", im.kernel_name), (name, scale.type)],
            im.where,
            f"plgpu.TMEM(({n}, {k} // 32), jnp.float8_e8m0fnu), or {k} // 16 of "
            "float8_e4m3fn; plgpu.async_copy_scales_to_tmem fills it",
        )


def places(im: Any, lhs: Value, turned: bool, found: Sequence[Value]) -> None:
    """Reject metadata that does not place the elements of a sparse left operand."""
    for each in found:
        ref, whole = (
            each.ref,
            not any(n % size for n, size in zip(lhs.ref.shape, KEPT_TILE, strict=True)),
        )
        fits = ref.space == "tmem" and ref.shape == lhs.ref.shape and whole
        if fits and not turned and ref.dtype.bits == 2 and lhs.ref.dtype.bits in KEPT:
            continue
        raise KernelTypeError(
            "a_sparse_metadata does not place the elements of the left operand",
            [("kernel", im.kernel_name), ("left", lhs.type), ("metadata", each.type)],
            im.where,
            "left operand (m, k // 2) of 8 or 16 bits, m and k multiples of 128, and "
            "plgpu.TMEM((m, k // 2), jnp.uint2)",
        )


def product(
    im: Any, sums: Value, left: tuple[Value, bool], right: tuple[Value, bool]
) -> None:
    """Reject a wgmma whose shapes or dtypes do not match.

    Args:
        im: the importer.
        sums: the accumulator.
        left, right: each operand, and whether it is stored transposed.
    """
    problem = _shape_problem(sums, left, right)
    fix = "accumulator plgpu.ACC((m, n), ...), operands (m, k) and (k, n)"
    if problem is None:
        problem, fix = _dtype_problem(sums, left[0].type.dtype, right[0].type.dtype)
    if problem is not None:
        facts = [
            ("kernel", im.kernel_name),
            ("accumulator", sums.type),
            ("left", left[0].type),
            ("right", right[0].type),
        ]
        raise KernelTypeError(problem, facts, im.where, fix)


def _shape_problem(
    sums: Value, left: tuple[Value, bool], right: tuple[Value, bool]
) -> str | None:
    lhs, rhs = (
        side.type.shape[::-1] if turned else side.type.shape
        for side, turned in (left, right)
    )
    for side in (left[0], right[0]):
        if side.is_ref and side.ref.space != "smem":
            return f"wgmma needs operands in {PLACES['smem']}"
    if len(lhs) != 2 or len(rhs) != 2:
        return "wgmma needs operands with two dimensions"
    if lhs[1] != rhs[0] or sums.ref.shape != (lhs[0], rhs[1]):
        return "the shapes of the operands and the accumulator do not match"
    return None


def _dtype_problem(sums: Value, lhs: T.DType, rhs: T.DType) -> tuple[str | None, str]:
    of_bytes = lhs.bits == rhs.bits == 8 and lhs.is_float == rhs.is_float
    if lhs != rhs and not of_bytes:
        fix = "cast one of them; the left operand may be a value, x[...].astype(...)"
        return "the operands of a wgmma have different dtypes", fix
    known = SUMS_OF.get(lhs.name, ())
    if sums.ref.dtype.name in known:
        return None, ""
    if not known:
        return (
            f"wgmma does not support {lhs}",
            "cast the operands to bfloat16 or float16",
        )
    wanted = f"plgpu.ACC({sums.ref.shape}, jnp.{T.DTYPES[known[0]].numpy_name})"
    return f"wgmma of {lhs} does not support an accumulator of {sums.ref.dtype}", wanted
