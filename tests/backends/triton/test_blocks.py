"""Blocks of any size on a GPU: what programs get instead."""

import re
from dataclasses import replace

import numpy as np
import pytest

from pallasite.backends import base
from pallasite.errors import ResourceError, UnsupportedError
from pallasite.ir.nodes import Kernel
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import BF16, DTYPES, F32, TileType
from pallasite.target import GPUS, Gpu, Memory
from tests.backends.triton.harness import BACKEND, compiled, simulated, whole_kernel
from tests.backends.triton.test_emit import vector_add

CONTRACT = dict(contract=((1,), (0,)), batch=((), ()), dtype=F32, precision=None)


def matmul(
    size: int, m: int, n: int, k: int, dtype: str = "bf16", added: str = ""
) -> Kernel:
    """A product of square matrices, summed along the last axis of the grid.

    `added` is what is added of the product `%d`, as an op.
    """
    summed = "%d"
    if added:
        added, summed = f"%e: f32[{m},{n}] = {added}", "%e"
    grid = tuple(-(-size // b) for b in (m, n, k))
    array = f"ref<{dtype}[{size},{size}] any>"
    kernel = parse_kernel(f"""
    kernel @matmul(%x: {array}, %y: {array}, %o: ref<f32[{size},{size}] any>) outputs 1 {{
      pipeline %x, %y, %o {{grid={grid}, windows=(in[{m}, {k}], in[{k}, {n}], out[{m}, {n}]),
          semantics=("arbitrary", "arbitrary", "arbitrary")}}
        map (%i: i32, %j: i32, %k: i32) {{ yield %i, %k }}
        map (%i1: i32, %j1: i32, %k1: i32) {{ yield %k1, %j1 }}
        map (%i2: i32, %j2: i32, %k2: i32) {{ yield %i2, %j2 }}
        body (%i3: i32, %j3: i32, %k3: i32, %xb: ref<{dtype}[{m},{k}] block>,
              %yb: ref<{dtype}[{k},{n}] block>, %ob: ref<f32[{m},{n}] block>) {{
          %c: i32 = constant {{value=0}}
          %first: bool = eq %k3, %c
          %w: i32 = cast %first {{dtype=i32}}
          cond %w
            branch () {{}}
            branch () {{ %z: f32[{m},{n}] = constant {{value=0.0}} store %ob[:, :] = %z }}
          %a: f32[{m},{n}] = load %ob[:, :]
          %u: {dtype}[{m},{k}] = load %xb[:, :]
          %v: {dtype}[{k},{n}] = load %yb[:, :]
          %d: f32[{m},{n}] = dot %u, %v {{contract=((1,), (0,)), batch=((), ()),
              dtype=f32, precision=None}}
          {added}
          %s: f32[{m},{n}] = add %a, {summed}
          store %ob[:, :] = %s
        }}
    }}""")  # noqa: E501
    return kernel


def launched(kernel: Kernel, chip: str = "h100", **params):
    options = base.Options(compiler_params=params, chip=GPUS[chip])
    outputs = base.Compiled(BACKEND, kernel, options)
    return outputs["ttir"], BACKEND.launch(outputs).config


def test_blocks_of_512_compile_as_what_a_gpu_wants():
    """Not only the same tiles: the same text as the author of these blocks gets."""
    large, config = launched(matmul(4096, 512, 512, 512))
    small, own = launched(matmul(4096, 128, 256, 64))
    assert large == small
    assert config["grid_x"] == 512 and config == own


OTHERS = [(32, 32, 32), (64, 64, 64), (128, 128, 64), (1024, 1024, 1024)]


@pytest.mark.parametrize("block", OTHERS)
def test_other_blocks_become_the_same(block):
    text, _ = launched(matmul(4096, *block))
    assert text == launched(matmul(4096, 128, 256, 64))[0]


@pytest.mark.parametrize("block", [(256, 128, 64), (128, 256, 64), (128, 256, 32)])
def test_blocks_that_suit_the_chip_stay(block):
    kernel = matmul(4096, *block)
    made = base.Compiled(BACKEND, kernel, base.Options(chip=GPUS["h100"]))
    assert made.scheduled is not None
    assert [s.changed for s in made.steps if s.name == "choose_blocks"] == [False]


def test_blocks_of_a_matmul_that_is_scaled_in_each_step_stay():
    """The product and the sum are both in registers; what was measured has the sum."""
    kernel = matmul(4096, 128, 128, 64, added="mul %d, %d")
    made = base.Compiled(BACKEND, kernel, base.Options(chip=GPUS["h100"]))
    assert made.scheduled is not None
    assert [s.changed for s in made.steps if s.name == "choose_blocks"] == [False]


def test_blocks_chosen_with_warps_and_stages_stay():
    text, _ = launched(matmul(4096, 64, 64, 64), num_warps=4)
    assert "tensor<64x64xf32>" in text
    # ... unless there is no room for them.
    text, _ = launched(matmul(4096, 512, 512, 512), num_warps=4)
    assert "tensor<512x512xf32>" not in text


def test_a_chip_with_less_shared_memory_gets_shallower_blocks():
    for chip, most in (("a100", 163 << 10), ("h100", 227 << 10)):
        text, config = launched(matmul(4096, 512, 512, 512, "f32"), chip)
        (m, k), (_, n) = _operands(text)
        assert (m * k + k * n) * 4 * int(config["num_stages"]) <= most
        assert int(config["num_stages"]) >= 3


@pytest.mark.parametrize("block", [(128, 128, 64), (512, 512, 512), (64, 64, 16)])
def test_products_of_f32_in_all_its_bits_are_shallow(block):
    """Threads hold the whole depth of their part of the operands in registers."""
    text, _ = launched(matmul(4096, *block, "f32"))
    (m, k), (_, n) = _operands(text)
    assert k == 16 and m * n <= 128 * 128


def _operands(ttir: str) -> list[tuple[int, int]]:
    """The shapes of what the module's dot multiplies."""
    dot = next(line for line in ttir.split("\n") if "tt.dot" in line)
    return [(int(a), int(b)) for a, b in re.findall(r"tensor<(\d+)x(\d+)x", dot)[:2]]


def test_a_product_without_steps_along_k_gets_a_loop():
    """Blocks that hang over the edge along k cannot become more steps."""
    text, _ = launched(matmul(4000, 512, 512, 512))
    assert text.count("scf.for") == 2
    (m, k), (_, n) = _operands(text)
    assert (m, n) == (128, 256) and k <= 64


@pytest.mark.parametrize("size", [100, 144])
def test_a_product_without_a_grid_is_as_shallow(size):
    """Its depth has a part that is shallow enough, but no axis to step through it."""
    product = lambda b, x, y: b.op("dot", x, y, **CONTRACT)
    square = TileType((size, size), F32)
    x, y = np.random.default_rng(0).normal(size=(2, size, size)).astype(np.float32)
    (found,) = simulated(whole_kernel(product, [square] * 2, square), [x, y])
    np.testing.assert_allclose(found, x @ y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size, block", [(96, (48, 96, 96)), (100, (64, 48, 52))])
def test_products_of_other_blocks_are_right(size, block, monkeypatch):
    """With so little registers and shared memory that everything must be cut."""
    tiny = _tiny_gpu()
    monkeypatch.setattr("pallasite.backends.triton._chip", lambda options: tiny)
    rng = np.random.default_rng(0)
    x, y = rng.integers(-3, 4, (2, size, size)).astype(np.float32)
    kernel = matmul(size, *block, "f32")
    if size % block[2]:  # what is read past the edge is not 0
        kernel = parse_kernel(re.sub(r"(in\[\d+, \d+\])", r"\1 fill 0.0", kernel.text))
    (got,) = simulated(kernel, [x, y])
    np.testing.assert_array_equal(got, x @ y)


def _tiny_gpu() -> Gpu:
    h100 = GPUS["h100"]
    memories = {**h100.memories, "shared": Memory(16 << 10)}
    return replace(h100, memories=memories, registers=2048)


def test_too_large_a_block_without_products_is_cut():
    text, config = launched(vector_add(1 << 21, 1 << 21))
    assert "tensor<8192xf32>" in text and config["grid_x"] == 256


def spread(rows: int, columns: int, shown: int) -> Kernel:
    """A row that all rows of the result are, in blocks of so many rows."""
    return parse_kernel(f"""
    kernel @spread(%x: ref<f32[1,{columns}] any>, %o: ref<f32[{rows},{columns}] any>)
        outputs 1 {{
      pipeline %x, %o {{grid=({rows // shown},), windows=(in[1, {columns}],
          out[{shown}, {columns}]), semantics=("parallel",)}}
        map (%i: i32) {{ %c: i32 = constant {{value=0}} yield %c, %c }}
        map (%i1: i32) {{ %c1: i32 = constant {{value=0}} yield %i1, %c1 }}
        body (%i2: i32, %xb: ref<f32[1,{columns}] block>,
              %ob: ref<f32[{shown},{columns}] block>) {{
          %a: f32[1,{columns}] = load %xb[:, :]
          %b: f32[{shown},{columns}] = broadcast_in_dim %a {{
              shape=({shown}, {columns}), dims=(0, 1)}}
          store %ob[:, :] = %b
        }}
    }}""")


def test_rows_are_cut_where_whole_ones_load_more():
    """A row that is added to all is loaded once for several rows, by parts."""
    kernel = spread(512, 8192, 64)
    text, config = launched(kernel)
    assert "tensor<4x2048xf32>" in text and config["grid_x"] == 512
    x = np.random.default_rng(0).normal(size=(1, 8192)).astype(np.float32)
    (got,) = simulated(kernel, [x])
    np.testing.assert_array_equal(got, np.repeat(x, 512, axis=0))
    # Nothing is loaded twice: rows stay whole.
    text, config = launched(vector_add(1 << 21, 1 << 21))
    assert "tensor<8192xf32>" in text


def test_many_tiny_programs_become_fewer():
    text, config = launched(vector_add(1 << 22, 64))
    assert "tensor<2048xf32>" in text and config["grid_x"] == 2048
    text, config = launched(vector_add(1 << 17, 64))  # the fewer, the smaller
    assert "tensor<128xf32>" in text and config["grid_x"] == 1024
    text, _ = launched(vector_add(1 << 22, 1024))
    assert "tensor<1024xf32>" in text


def test_what_cannot_be_cut_says_how_much_it_needs():
    tile = TileType((2048, 2048), BF16)

    def body(b, x, y):
        z = b.op("scan", y, kind="sum", axis=0, reverse=False)
        return b.op(
            "dot", x, b.op("scan", z, kind="sum", axis=1, reverse=False), **CONTRACT
        )

    kernel = whole_kernel(body, [tile, tile], tile.with_dtype(F32))
    with pytest.raises(ResourceError) as error:
        compiled(kernel)
    assert str(error.value) == "\n".join(
        [
            "a block needs more shared memory than h100 has",
            "  kernel      test",
            "  operand     bf16[2048,2048]",
            "  needed      8388608 bytes",
            "  available   232448 bytes",
            "  kept whole  dimension 0 (2048 elements): 'scan' runs along it",
            "  kept whole  dimension 1 (2048 elements): 'scan' runs along it",
            "  fix         use smaller blocks along the dimensions that are kept whole",
        ]
    )


@pytest.mark.parametrize("chip", ("a100", "h100"))
def test_types_that_a_chip_does_not_convert_are_rejected(chip: str):
    """XLA's compiler would end the process."""
    tile = TileType((8, 16), DTYPES["f8e4m3fn"])
    kernel = whole_kernel(lambda b, x: b.cast(x, BF16), [tile], tile.with_dtype(BF16))
    options = base.Options(chip=GPUS[chip])
    if chip == "h100":
        assert "tt.fp_to_fp" in base.Compiled(BACKEND, kernel, options)["ttir"]
        return
    with pytest.raises(UnsupportedError) as caught:
        base.Compiled(BACKEND, kernel, options)["ttir"]
    what = "backend 'triton' does not support f8e4m3fn[8,16] on a100"
    assert what in str(caught.value) and "sm_89 is the first" in str(caught.value)
