"""Levels and layouts: which ops and types a kernel may have, and their text."""

import pytest

from pallasite.errors import ParseError, VerifyError
from pallasite.ir.levels import level_of, with_level
from pallasite.ir.nodes import Kernel
from pallasite.ir.opdef import EXPLICIT, LEVELS, table
from pallasite.ir.text import parse_kernel, print_kernel
from pallasite.ir.types import BF16, F32, Layout, RefType, TileType
from pallasite.ir.verify import verify
from tests.ir import kernels, samples

COPY = """
    %b: ref<f32[8] vmem> = alloc
    %s: ref<i32 dma_sem> = alloc
    copy_start %x, %b, %s {priority=0}
    copy_wait %x, %b, %s
"""


def kernel_of(code: str, level: str = "") -> Kernel:
    said = f" level {level}" if level else ""
    return parse_kernel(f"kernel @k(%x: ref<f32[8] any>) outputs 1{said} {{{code}}}")


def refused(kernel: Kernel, message: str) -> None:
    with pytest.raises(VerifyError) as raised:
        verify(kernel)
    assert message in str(raised.value)


def test_every_row_has_a_level():
    assert {row.level for row in table().values()} == set(LEVELS)
    assert table()["dot"].level == "tile"
    names = {name for name, row in table().items() if row.level == EXPLICIT}
    waits = {"copy_start", "copy_wait", "sem_signal", "sem_wait", "sem_read"}
    of_gpus = {"barrier_expect", "barrier_arrive", "barrier_wait", "named_barrier"}
    of_gpus |= {"wgmma", "wgmma_wait", "fence_async", "bulk_commit", "bulk_wait"}
    of_gpus |= {
        "sem_reach",
        "set_registers",
        "cluster_barrier",
        "cluster_arrive",
        "cluster_copy",
    }
    of_gpus |= {"tensor_mma", "tensor_copy", "tensor_commit", "tensor_wait", "warps"}
    of_gpus |= {
        "barrier_test",
        "inline_cuda",
        "load_wait",
        "async_store",
        "peer_block",
        "peer_device",
    }
    others = {"remote_copy_start", "sem_signal_device", "barrier_semaphore"}
    others |= {"device_number"}
    others |= {"sem_signal_core", "fetch_and_add", "roles", "barrier"}
    others |= {"indexed_copy_start", "indexed_copy_wait"}
    assert names == {*waits, *of_gpus, *others}


def test_a_tile_kernel_has_no_explicit_ops():
    refused(kernel_of(COPY), "copy_start is of level 'explicit', the kernel of level")
    verify(kernel_of(COPY, "explicit"))


def test_an_explicit_kernel_may_have_tile_ops():
    kernel = kernels.matmul()
    verify(kernel.with_(level=EXPLICIT))
    assert level_of(kernel.body) == "tile"
    assert with_level(kernel) is kernel
    assert with_level(kernel_of(COPY)).level == EXPLICIT


def test_the_text_says_the_level_where_it_is_not_tile():
    assert " level " not in print_kernel(kernels.matmul())
    text = print_kernel(samples.kernel_of("copy_start"))
    assert "outputs 1 level explicit {" in text
    assert parse_kernel(text).level == EXPLICIT


def test_a_barrier_is_inside_roles():
    refused(kernel_of("barrier", "explicit"), "a barrier needs roles")
    verify(kernel_of("roles body () { barrier } body () { barrier }", "explicit"))
    refused(kernel_of("roles", "explicit"), "needs at least one role")


LAID_OUT = {
    "f32[64,8] @lanes(4)": TileType((64, 8), F32, Layout("lanes", (4,))),
    "f32 @uniform": TileType((), F32, Layout("uniform")),
    "ref<bf16[64,64] smem @swizzle(128)>": RefType(
        (64, 64), BF16, "smem", Layout("swizzle", (128,))
    ),
    "ref<f32 smem @tiled(8, 64)>": RefType((), F32, "smem", Layout("tiled", (8, 64))),
}


@pytest.mark.parametrize("text", LAID_OUT)
def test_layouts_are_printed_and_read(text: str):
    type_ = LAID_OUT[text]
    assert str(type_) == text
    ref = type_ if isinstance(type_, RefType) else None
    code = f"%a: {text} = alloc" if ref else f"%a: {text} = mystery"
    assert kernel_of(code, "explicit").body.ops[0].result.type == type_
    in_attribute = kernel_of(f"mystery {{type={_as_data(text)}, n=1}}", "explicit")
    assert in_attribute.body.ops[0].attrs == {"type": type_, "n": 1}
    assert print_kernel(parse_kernel(print_kernel(in_attribute))) == print_kernel(
        in_attribute
    )


def _as_data(text: str) -> str:
    return text.replace("f32 @", "f32[] @") if not text.startswith("ref") else text


def test_a_layout_needs_a_name():
    with pytest.raises(ParseError, match="the name of a layout"):
        kernel_of("%a: f32[8] @4 = mystery", "explicit")


LAID_OUT_CODE = """
    %b: ref<f32[2,8] smem @swizzle(128)> = alloc
    %s: ref<i32 dma_sem> = alloc
    %v: ref<f32[8] smem @swizzle(128)> = subview %b[0, :]
    copy_start %x, %v, %s {priority=0}
    copy_wait %x, %v, %s
    %t: f32[8] = load %v[:]
    store %x[:] = %t
"""


def test_memory_of_an_explicit_kernel_may_be_laid_out():
    verify(kernel_of(LAID_OUT_CODE, "explicit"))
    refused(
        kernel_of("%b: ref<f32[8] smem @swizzle(128)> = alloc"),
        "ref<f32[8] smem @swizzle(128)> has a layout, which is for level 'explicit'",
    )


def test_ops_take_no_layouts_unless_their_row_says_so():
    code = """
    %b: ref<f32[8] smem @swizzle(128)> = alloc
    %v: ref<i32[8] smem @swizzle(128)> = bitcast_view %b {dtype=i32}
    """
    refused(
        kernel_of(code, "explicit"),
        "bitcast_view takes no layouts, got b: ref<f32[8] smem @swizzle(128)>",
    )


def test_views_keep_rows_that_are_laid_out():
    code = """
    %b: ref<f32[8,2] smem @swizzle(128)> = alloc
    %v: ref<f32[16,1] smem @swizzle(128)> = reshape_view %b {shape=(16, 1)}
    """
    why = "the rows of ref<f32[8,2] smem @swizzle(128)> are laid out as they are"
    refused(kernel_of(code, "explicit"), why)


def test_ordinary_types_have_no_layout():
    ref = RefType((8,), F32, "smem", Layout("swizzle", (128,)))
    assert ref.tile == TileType((8,), F32)
    assert ref.with_shape((4,)).layout == ref.layout
    assert str(RefType((8,), F32, "smem")) == "ref<f32[8] smem>"
