"""AMD's GPUs: the text for them on numpy, what they lack, and their own compiler.

The compiler is the `triton` package, which needs no GPU; without it, its tests are
skipped. `make amd` compiles everything.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config, placement, primitive
from pallasite.backends import base
from pallasite.errors import UnsupportedError
from pallasite.ir.types import DTYPES, TileType
from pallasite.passes.run import run
from pallasite.sites import calls_in, kernels_in
from pallasite.target import GPUS
from pallasite.triton import elementwise_inline_asm
from tests.backends import amd, gpu_compile
from tests.backends.triton.harness import BACKEND, simulated, whole_kernel
from tests.xla import put
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments, assert_agrees

CHIPS = [name for name, row in GPUS.items() if row.is_amd]
NAMES = {
    "flash_scratch_causal",
    "gather_rows",
    "histogram_atomic_vector",
    "layer_norm",
    "matmul_accumulate",
    "prefix_sum_carried",
    "special_functions",
    "threefry_dropout",
}
CASES = {case.name: case for case in all_cases() if case.name in NAMES}


def text_for(chip: str, kernel) -> str:
    options = base.Options(chip=GPUS[chip])
    return base.Compiled(BACKEND, kernel, options, shared=())["ttir"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chip", ["mi300x", "r9700"])
def test_simulated_kernel_agrees(name: str, chip: str, monkeypatch):
    def simulate(*operands, call):
        results = simulated(run(call.kernel), operands, chip=GPUS[chip])
        return [put(x, x.dtype) for x in results]

    monkeypatch.setattr(primitive.call_p, "impl", simulate)
    case, args = CASES[name], arguments(CASES[name], 0)
    want = jax.jit(case.reference)(*args)
    assert_agrees(case, case.run(*args, interpret=False), want)


def test_a_program_for_both_platforms_has_the_code_of_each():
    def sines(x_ref, o_ref):
        o_ref[...] = jnp.sin(x_ref[...])

    call = pl.pallas_call(sines, out_shape=jax.ShapeDtypeStruct((256,), jnp.float32))
    traced = jax.jit(call).trace(np.zeros(256, np.float32))
    text = {
        each: traced.lower(lowering_platforms=tuple(each.split())).as_text()
        for each in ("cuda", "rocm", "cuda rocm")
    }
    for each, found in text.items():
        assert found.count("@__gpu$xla.gpu.triton") == len(each.split())
        assert ("__nv_sinf" in found) == ("cuda" in each)
        assert ("__ocml_sin_f32" in found) == ("rocm" in each)


@pytest.mark.parametrize("chip", CHIPS)
def test_code_takes_nothing_from_nvidia(chip: str):
    integers = TileType((128,), DTYPES["i32"])
    kernel = whole_kernel(
        lambda b, x: b.op("clz", b.op("abs", b.op("neg", x))), [integers], integers
    )
    text = text_for(chip, kernel)
    assert "__nv_" not in text and "inline_asm" not in text
    assert "__nv_clz" in text_for("h200", kernel)


@pytest.mark.parametrize("name", ["f8e4m3fnuz", "f8e5m2fnuz"])
def test_their_own_floats(name: str):
    tile = TileType((64, 64), DTYPES[name])
    kernel = whole_kernel(lambda b, x, y: b.op("add", x, y), [tile, tile], tile)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(64, 64)).astype(DTYPES[name].np) for _ in range(2))
    (got,) = simulated(kernel, [x, y], chip=GPUS["mi300x"])
    want = (x.astype(np.float32) + y.astype(np.float32)).astype(x.dtype)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    with pytest.raises(UnsupportedError, match="does not support") as caught:
        text_for("h200", kernel)
    assert "only AMD's GPUs convert it" in str(caught.value)


def test_ptx_is_refused():
    def kernel(x_ref, o_ref):
        o_ref[...] = elementwise_inline_asm(
            "abs.f32 $0, $1;",
            args=[x_ref[...]],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct((128,), jnp.float32)],
        )[0]

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((128,), jnp.float32))
    (made,) = kernels_in(call, jax.ShapeDtypeStruct((128,), jnp.float32))
    with pytest.raises(UnsupportedError, match="PTX is for NVIDIA's GPUs"):
        text_for("mi355x", made)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_is_found_by_its_name_and_its_instructions(chip: str):
    row = GPUS[chip]
    with config.override(target=f"gpu:{chip}"):
        assert placement.accelerator("rocm") is row
        assert placement.accelerator("cuda") is None
    with config.override(target=f"gpu:{row.arch}"):
        found = placement.accelerator("rocm")
    assert found is not None and found.platform == "rocm"


def test_tools_know_the_target():
    def double(x_ref, o_ref):
        o_ref[...] = 2 * x_ref[...]

    call = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct((4096,), jnp.float32))
    x = jax.ShapeDtypeStruct((4096,), jnp.float32)
    said = str(pl.explain(call, target="gpu:gfx950")(x))
    assert "gpu:mi355x" in said and "triton: the default" in said


@pytest.mark.parametrize(
    ("chip", "dtype", "instruction"),
    [
        ("mi300x", "float8_e4m3fnuz", "v_mfma_f32_32x32x16_fp8_fp8"),
        ("mi300x", "float8_e4m3fn", "v_mfma_f32_32x32x8_f16"),  # converted
        ("mi355x", "float8_e5m2", "v_mfma_f32_32x32x64_f8f6f4"),
        ("r9700", "float8_e4m3fn", "v_wmma_f32_16x16x16_fp8_fp8"),
    ],
)
def test_what_multiplies_narrow_floats(chip: str, dtype: str, instruction: str):
    pytest.importorskip("triton")

    def product(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    call = pl.pallas_call(
        product, out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32)
    )
    (made,) = calls_in(call, *[jax.ShapeDtypeStruct((64, 64), dtype)] * 2)
    launch = primitive.choose(made, "rocm", chip=GPUS[chip]).launch
    assert launch is not None
    assert instruction in amd.assemble(launch, GPUS[chip]).text


@pytest.mark.parametrize("chip", gpu_compile.AMD)
@pytest.mark.parametrize("name", ["zoo matmul_accumulate none", "zoo layer_norm grad"])
def test_their_compiler_takes_the_text(chip: str, name: str, capsys):
    pytest.importorskip("triton")
    assert gpu_compile.run(chip, name) == "compiled"
    assert not capsys.readouterr().out  # nothing is refused, nothing spills
