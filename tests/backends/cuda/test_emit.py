"""What the cuda backend writes: texts, launches, custom calls, refusals."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite import kernels as library
from pallasite import tpu as pltpu
from pallasite.autodiff.backward import keeping_plan
from pallasite.backends import base, cuda
from pallasite.backends.cuda import BACKEND, emit, nvrtc
from pallasite.backends.cuda import text as c_text
from pallasite.errors import CompileError, UnsupportedError
from pallasite.ir.nodes import Kernel
from pallasite.sites import calls_in
from pallasite.target import GPUS, Machine
from tests.backends.cuda import host, kernels
from tests.backends.cuda.kernels import bf16, f32
from tests.share import SHARE, share_of
from tests.zoo import all_cases
from tests.zoo.test_zoo import arguments

needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason="NVRTC is not installed (nvidia-cuda-nvrtc)"
)


def kernel_of(function, *shapes) -> Kernel:
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    (kernel,) = pl.lower(function)(*arrays).kernels
    return kernel


def softmax(rows=1, columns=1000, count=300, dtype=bf16) -> Kernel:
    run = lambda x: kernels.rows(kernels.softmax_kernel, x, (rows, columns))
    return kernel_of(run, ((count, columns), dtype))


def matmul(m, n, k, dtype=bf16, left="mk", right="kn", **options) -> Kernel:
    sizes = {"m": m, "n": n, "k": k}
    run = lambda x, y: kernels.matmul(x, y, left=left, right=right, **options)
    shapes = [tuple(sizes[d] for d in dims) for dims in (left, right)]
    return kernel_of(run, *((s, dtype) for s in shapes))


def attention(heads=2, length=512, width=128, **options) -> Kernel:
    run = lambda q, k, v: kernels.attention(q, k, v, **options)
    return kernel_of(run, *[((heads, length, width), bf16)] * 3)


def plain_attention(heads=2, length=512, width=128, **options) -> Kernel:
    run = lambda q, k, v: kernels.plain_attention(q, k, v, **options)
    return kernel_of(run, *[((heads, length, width), bf16)] * 3)


def text_of(kernel: Kernel, **options) -> str:
    return base.Compiled(BACKEND, kernel, base.Options(**options))["cuda"]


def refusal(kernel: Kernel, **options) -> str:
    """Why the backend cannot run a kernel; empty: it can."""
    try:
        text_of(kernel, **options)
    except UnsupportedError as error:
        return str(error)
    return ""


def body_of(text: str) -> str:
    return text[text.index('extern "C"') :]


def test_vector_add_is_this_text():
    def run(x, y):
        spec = pl.BlockSpec((512,), lambda i: (i,))
        return pl.pallas_call(
            kernels.add_kernel,
            out_shape=kernels.shape(x),
            grid=(2,),
            in_specs=[spec, spec],
            out_specs=spec,
        )(x, y)

    text = text_of(kernel_of(run, ((1024,), f32), ((1024,), f32)))
    assert body_of(text).splitlines() == [
        'extern "C" __global__ void __launch_bounds__(32)',
        "pl_add_kernel(const float* __restrict__ a0, const float* __restrict__ a1, "
        "float* a2) {",
        "  const u32 thread = threadIdx.x;",
        "  const int b0 = (int)(thread % 32 * 4);",
        "  const int program0 = (int)blockIdx.x;",
        "  __align__(16) float x1[16];",
        "  const float* p2 = a0 + ((program0) * 512);",
        "  EACH(4) { get<16>(x1 + i * 4, p2 + (b0 + (i * 4) / 4 * 128 + (i * 4) % 4)); "
        "}",
        "  __align__(16) float x3[16];",
        "  const float* p4 = a1 + ((program0) * 512);",
        "  EACH(4) { get<16>(x3 + i * 4, p4 + (b0 + (i * 4) / 4 * 128 + (i * 4) % 4)); "
        "}",
        "  __align__(16) float v5[16];",
        "  EACH(16) v5[i] = x1[i] + x3[i];",
        "  float* p6 = a2 + ((program0) * 512);",
        "  EACH(4) { get<16>(p6 + (b0 + (i * 4) / 4 * 128 + (i * 4) % 4), v5 + i * 4); "
        "}",
        "}",
    ]
    launched = emit.Launched.of(text)
    assert (launched.programs, launched.threads, launched.shared_bytes) == (2, 32, 0)
    assert emit.Launched.of(launched.line()) == launched


@pytest.mark.parametrize(
    ("columns", "dtype", "bytes"),
    [(1000, bf16, 16), (1004, bf16, 8), (1001, bf16, 2), (1002, f32, 8)],
)
def test_vectors_are_as_long_as_rows_are_aligned(columns, dtype, bytes):
    text = body_of(text_of(softmax(4, columns, 16, dtype)))
    assert (f"get<{bytes}>" in text) == (bytes > 2)
    assert "#include" not in text


def test_blocks_that_hang_over_are_masked():
    text = body_of(text_of(softmax(8, 128, 300)))
    loads = [line for line in text.splitlines() if "get<16>" in line]
    assert len(loads) == 2 and all("< 300" in line for line in loads)
    assert "< 304" not in body_of(text_of(softmax(8, 128, 304)))


@pytest.fixture
def blocks_as_written(monkeypatch):
    """Without the pass that cuts and grows blocks."""
    monkeypatch.setattr(cuda, "for_gpu", lambda kernel, **_: kernel)


def test_blocks_of_many_rows_are_computed_a_few_rows_at_a_time(blocks_as_written):
    launched = emit.Launched.of(text_of(softmax(8, 8192, 64)))
    assert (launched.programs, launched.threads) == (8, 256)
    assert "for (int n" in body_of(text_of(softmax(8, 8192, 64)))
    assert "for (int n" not in body_of(text_of(softmax(8, 128, 64)))


def test_a_warp_reduces_a_row_alone_if_it_can():
    assert "__syncthreads" not in body_of(text_of(softmax(1, 2048, 64)))
    assert "__syncthreads" in body_of(text_of(softmax(1, 4096, 64)))


def test_what_is_cheap_is_computed_again_after_a_reduction():
    """16-bit floats wait in registers, not what they are converted to."""
    text = body_of(text_of(softmax(1, 8192, 64)))
    first, _ = text.split("changed(x", 1)
    assert "float v4[32]" not in first and "from_bf16" in first
    assert "changed(" not in body_of(text_of(softmax(1, 8192, 64, f32)))


def test_rows_that_start_anywhere_are_read_by_neighbouring_threads():
    aligned, odd = (body_of(text_of(softmax(1, n, 64))) for n in (8192, 8191))
    assert "get<16>" in aligned and "thread % 256 * 8" in aligned
    assert "get<" not in odd.split("__syncthreads")[0] and "thread % 256 * 1)" in odd


def test_no_address_is_computed_in_32_bits_where_an_array_is_larger():
    text = body_of(text_of(softmax(1, 1 << 10, 1 << 21, f32)))
    assert "(i64)(program0) * 1024" in text


def test_positions_take_no_registers():
    def kernel(x_ref, o_ref):
        row = jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 0)
        column = jax.lax.broadcasted_iota(jnp.int32, x_ref.shape, 1)
        o_ref[...] = jnp.where(row >= column, x_ref[...], 0)

    def run(x):
        return pl.pallas_call(kernel, out_shape=kernels.shape(x))(x)

    text = body_of(text_of(kernel_of(run, ((64, 64), f32))))
    assert "int v" not in text and "bool v" not in text


# --- launches ---


@needs_nvrtc
def test_the_call_carries_ptx_and_launch():
    x = jax.ShapeDtypeStruct((300, 1000), bf16)
    run = lambda x: kernels.rows(kernels.softmax_kernel, x, (1, 1000))
    traced = jax.jit(run).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.custom_call @__gpu$xla.gpu.ptx" in text
    assert "api_version = 3 : i32" in text
    for part in ("grid_x = 300 : i32", "block_x = 32 : i32", ".target sm_90a"):
        assert part in text


@needs_nvrtc
def test_products_get_scratch_for_descriptions_of_arrays():
    compiled = base.Compiled(BACKEND, matmul(256, 256, 256), base.Options())
    launch = BACKEND.launch(compiled)
    # Two programs; descriptions of both operands and of the result, 128 bytes each.
    assert launch.scratch_results == (((2 * 3 * 128,), "uint8"),)
    assert "shared_mem_bytes = " in launch.config


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "sizes", "made"),
    [
        (jnp.int8, (1024, 1024, 1024), ["stablehlo.transpose", "tensor<1024x1024xi8>"]),
        (bf16, (1024, 1023, 1024), ["stablehlo.pad", "tensor<1024x1024xbf16>"]),
    ],
)
def test_xla_repacks_operands_before_the_call(dtype, sizes, made):
    m, n, k = sizes
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (k, n))]
    out = jnp.int32 if dtype == jnp.int8 else f32
    run = lambda x, y: kernels.matmul(x, y, block=(128, 128, 128), out=out)
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert all(part in text for part in ("@__gpu$xla.gpu.ptx", *made))


def test_copies_round_f32_to_what_is_multiplied():
    """Cutting off the lower bits instead would make every product a little smaller."""
    tf32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
    kernel = matmul(512, 512, 512, f32, right="nk", block=(128, 64, 32), precision=tf32)
    text = body_of(text_of(kernel))
    assert (
        text.count("map_array<2, 11, 3>") == 2 and text.count("map_array<2, 7, 3>") == 1
    )


def test_results_in_16_bits_are_computed_by_approximations():
    """Those that both GPU backends use; what is stored in f32 stays exact."""
    rough = ("__expf(", "divide_fast(")
    assert all(word in body_of(text_of(softmax())) for word in rough)
    assert not any(word in body_of(text_of(softmax(dtype=f32))) for word in rough)


@needs_nvrtc
@pytest.mark.parametrize("chip", ["a100", "h100", "b200"])
def test_row_kernels_compile_for_every_chip(chip: str):
    compiled = base.Compiled(BACKEND, softmax(), base.Options(chip=GPUS[chip]))
    assert f".target {GPUS[chip].arch}" in compiled["ptx"]


@needs_nvrtc
@pytest.mark.parametrize(
    "kernel",
    [
        lambda: matmul(1000, 520, 328),
        lambda: matmul(512, 512, 512, right="nk", left="km", block=(128, 128, 64)),
        lambda: matmul(512, 512, 512, jnp.int8, right="nk", block=(64, 128, 128)),
        lambda: matmul(
            512, 512, 512, jnp.float8_e4m3fn, right="nk", out=f32, block=(192, 64, 128)
        ),
        lambda: attention(style="grid"),
        lambda: attention(style="loop", causal=True, width=64),
        lambda: plain_attention(causal=True),
        lambda: plain_attention(style="loop", width=64),
    ],
)
def test_products_compile_without_spills(kernel):
    compiled = base.Compiled(BACKEND, kernel(), base.Options())
    assert ".target sm_90a" in compiled["ptx"]
    report = compiled["ptxas"]
    assert "is not installed" in report or "0 bytes spill stores" in report
    assert "arning" not in report and "serialized" not in report


@pytest.mark.parametrize(("rows", "as_matrices"), [(128, False), (192, True)])
def test_three_warpgroups_store_matrices(rows, as_matrices):
    x = jax.ShapeDtypeStruct((16, 4096, 64), bf16)
    run = partial(kernels.plain_attention, block=(rows, 128))
    (kernel,) = pl.lower(run)(x, x, x).kernels
    text = text_of(kernel, chip=GPUS["h200"])
    assert f"__launch_bounds__({rows * 2 + 128}, 1)" in text
    assert ("put_matrices(" in text) == as_matrices


@pytest.mark.parametrize(("width", "turns", "products"), [(64, 1, 2), (128, 2, 1)])
def test_warpgroups_take_turns_where_products_are_long(width, turns, products):
    """In the gradient's two kernels; the first turn is the first warpgroup's."""
    x = jax.ShapeDtypeStruct((16, 4096, width), bf16)
    (call,) = calls_in(partial(kernels.attention, style="grid", causal=False), x, x, x)
    keeping = keeping_plan(call.kernel, (True,) * 3, Machine.usual(GPUS["h200"]))
    assert keeping is not None
    texts = [body_of(text_of(step.kernel)) for step in keeping.backward.steps]
    waiting = [text for text in texts if "meet(8 + group, 256);" in text]
    assert len(waiting) == turns
    for text in waiting:
        start, rest = text.split("meet(8 + group, 256);")
        assert "if (group == 1) pass_by(8, 256);" in start
        turn = rest[: rest.index("pass_by(8 + (group + 1) % 2, 256);")]
        assert turn.count("products_together();") == products


@pytest.mark.parametrize(
    ("m", "k", "activation", "apart"),
    [
        (4096, 1024, "gelu", True),
        (4096, 1024, "identity", False),  # nothing to compute beside products
        (4096, 256, "gelu", False),  # fewer steps than slots
        (1024, 1024, "gelu", False),  # one program on each multiprocessor
    ],
)
def test_warpgroups_start_a_sum_a_step_apart(m, k, activation, apart):
    """So that one computes its results beside products of the other."""
    run = partial(library.matmul, activation=activation)
    with config.override(target="h200"):
        kernel = kernel_of(run, ((m, k), bf16), ((k, m), bf16))
    text = body_of(text_of(kernel))
    assert ("if (group > 0) meet(12 + group, 256);" in text) == apart
    assert ("if (group < 1 && " in text) == apart


def test_numbers_of_rows_are_stored_where_they_are():
    """Warpgroups would wait for each other to move them through shared memory."""
    x, w = (jax.ShapeDtypeStruct(s, bf16) for s in ((8192, 512), (512, 32768)))
    labels = jax.ShapeDtypeStruct((8192,), jnp.int32)
    loss = library.linear_softmax_cross_entropy_loss
    (call,) = calls_in(lambda x, labels, w: loss(x, labels, w), x, labels, w)
    text = body_of(text_of(call.kernel))
    assert "meet(1," not in text and "expf" not in text


@needs_nvrtc
@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_of_attention_compiles_without_spills(causal):
    """Its tiles take nearly all registers."""
    x = jax.ShapeDtypeStruct((16, 4096, 128), bf16)
    (call,) = calls_in(partial(kernels.attention, style="grid", causal=causal), x, x, x)
    keeping = keeping_plan(call.kernel, (True,) * 3, Machine.usual(GPUS["h200"]))
    assert keeping is not None
    for step in keeping.backward.steps:
        report = base.Compiled(BACKEND, step.kernel, base.Options())["ptxas"]
        assert "is not installed" in report or "0 bytes spill stores" in report
        assert "arning" not in report and "serialized" not in report


def test_the_gradient_of_a_product_with_a_bias_has_large_tiles():
    """Sums over rows are made in parallel programs, of tiles of two warpgroups."""
    x, bias = (jax.ShapeDtypeStruct(s, bf16) for s in ((4096, 4096), (4096,)))
    # With a prologue, the derivative is that of the kernel.
    run = lambda x, y, b: library.matmul(
        x, y, bias=b, activation="gelu", prologue=lambda x: x
    )
    with config.override(target="h200"):
        made = pl.lower(lambda d, *args: jax.vjp(run, *args)[1](d))(x, x, x, bias)
    compiled = {
        kernel.name: base.Compiled(BACKEND, kernel, base.Options(chip=GPUS["h200"]))
        for kernel in made.kernels
    }
    assert len(compiled) == 4
    for each in compiled.values():
        launched = emit.Launched.of(each["cuda"])
        assert launched.programs == GPUS["h200"].cores and launched.threads == 384
    # Four steps of 64 rows in flight, not two of the forward kernel's 128.
    assert "ref<bf16[4,64,256] smem" in compiled["matmul_d_operand1"].scheduled.text


def test_lanes_that_agree_have_one_place_in_shared_memory():
    def kernel(x_ref, y_ref, o_ref, s_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32)
        s_ref[...] = jnp.sum(o_ref[...], axis=0, keepdims=True)

    def run(x, y):
        results = [jax.ShapeDtypeStruct(s, f32) for s in ((128, 256), (1, 256))]
        return pl.pallas_call(kernel, out_shape=results)(x, y)

    text = text_of(kernel_of(run, ((128, 64), bf16), ((64, 256), bf16)))
    # Four lanes of a warp have different columns: 8 warps x 256 columns, twice.
    assert text.count("if (thread % 32 < 4)") == 2
    assert emit.Launched.of(text).shared_bytes < 160 << 10  # 64 KiB twice, before


def test_blocks_with_a_dimension_of_one_are_copied_out_by_the_engine():
    assert "copy_out_3(" in body_of(text_of(plain_attention()))


@pytest.mark.parametrize(
    ("width", "block", "count"),
    [(64, (64, 64), 3), (128, (64, 64), 2), (128, (128, 128), 1), (256, (64, 64), 1)],
)
def test_programs_of_one_warpgroup_share_a_multiprocessor(width, block, count):
    text = text_of(plain_attention(16, 4096, width, block=block), chip=GPUS["h100"])
    launched = emit.Launched.of(text)
    assert launched.programs == count * GPUS["h100"].cores
    assert f"__launch_bounds__({launched.threads}, {count})" in text
    memory = GPUS["h100"].shared.bytes + 1024  # with what each takes besides
    assert count * (launched.shared_bytes + 1024) <= memory


@pytest.mark.parametrize("width", [64, 96, 128, 192])
@pytest.mark.parametrize("length", [333, 4096])
def test_rows_of_attention_stay_as_written(width, length):
    """Two warpgroups of 64 rows and the one that copies, whatever the width."""
    text = text_of(plain_attention(64, length, width), chip=GPUS["h100"])
    assert emit.Launched.of(text).threads == 3 * 128


# --- refusals ---


REFUSED = {
    "sort": (
        lambda: kernel_of(
            lambda x: pl.pallas_call(
                lambda x_ref, o_ref: o_ref.__setitem__(..., jnp.cumsum(x_ref[...])),
                out_shape=kernels.shape(x),
            )(x),
            ((64,), f32),
        ),
        "backend 'cuda' cannot run scan",
    ),
    "empty": (
        lambda: kernel_of(
            lambda x: pl.pallas_call(
                lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[:, :0] + 1),
                out_shape=jax.ShapeDtypeStruct((4, 0), f32),
                in_specs=[pl.BlockSpec((4, 1), lambda: (0, 0))],
                out_specs=pl.BlockSpec((4, 0), lambda: (0, 0)),
            )(x),
            ((4, 1), f32),
        ),
        "empty tiles are not supported",
    ),
    "f32": (lambda: matmul(512, 512, 512, f32), "f32 matmuls need precision='tf32'"),
    "rows": (
        lambda: matmul(512, 512, 512, block=(32, 64, 64)),
        "32 rows, at most half of the 64 of wgmma",
    ),
    "large": (
        lambda: matmul(512, 512, 512, block=(256, 256, 64)),
        "256 x 256 accumulators do not fit in the registers of 2 warpgroups",
    ),
    "memory": (
        lambda: attention(width=256, block=(128, 256)),
        "its operands need 327680 bytes of shared memory",
    ),
    "narrow": (
        lambda: matmul(512, 512, 512, block=(128, 128, 8)),
        "k=8, not a multiple of 16",
    ),
    "unaligned": (
        lambda: matmul(512, 511, 512),
        "rows of 1022 bytes, not a multiple of 16",
    ),
    "int8 by k": (
        lambda: matmul(512, 512, 512, jnp.int8, block=(128, 128, 128)),
        "the right operand, i8, is not contiguous along k",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused_with_the_reason(name: str, blocks_as_written):
    make, reason = REFUSED[name]
    said = refusal(make())
    assert reason in said, said


def test_products_are_for_chips_that_have_the_instructions():
    said = refusal(matmul(512, 512, 512), chip=GPUS["a100"])
    assert "matmuls need sm_90, sm_100, sm_103, the chip is sm_80" in said
    assert not refusal(matmul(512, 512, 512), chip=GPUS["b200"])


def test_shared_memory_is_limited_by_the_chip(blocks_as_written):
    def kernel(x_ref, o_ref, scratch):
        scratch[...] = x_ref[...]
        o_ref[...] = scratch[1:2, :] + x_ref[...]

    def run(x):
        memory = pltpu.VMEM(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, out_shape=kernels.shape(x), scratch_shapes=[memory]
        )(x)

    large = kernel_of(run, ((200, 256), f32))
    assert not refusal(large, chip=GPUS["h100"])
    said = refusal(large, chip=GPUS["a100"])
    assert "204800 bytes of shared memory per program" in said


def test_blocks_are_those_the_chip_wants():
    def schedule(*block):
        kernel = matmul(4096, 4096, 4096, block=block)
        return base.Compiled(BACKEND, kernel, base.Options())["scheduled"]

    wanted = schedule(128, 256, 64)
    assert "wgmma" in wanted
    assert all(schedule(*[n] * 3) == wanted for n in (64, 256, 512))


def test_what_it_can_do_fits():
    assert not refusal(softmax())
    assert not refusal(matmul(512, 512, 512))
    assert not refusal(attention())
    # A left side that the copy engine cannot load goes through registers.
    assert not refusal(matmul(512, 512, 511))


@pytest.mark.skipif(host.compiler() is None, reason="needs g++")
def test_an_operand_that_is_written_is_a_copy():
    def kernel(x_ref, o_ref):
        x_ref[...] = x_ref[...] + 1
        o_ref[...] = x_ref[...]

    def run(x):
        return pl.pallas_call(kernel, out_shape=kernels.shape(x))(x)

    given = np.arange(64, dtype=np.float32)
    (result,) = host.simulated(kernel_of(run, ((64,), f32)), [given])
    assert result.tolist() == (given + 1).tolist() and given[0] == 0


def test_missing_nvrtc_is_said(monkeypatch):
    monkeypatch.setattr(nvrtc, "_found", lambda: None)
    with pytest.raises(UnsupportedError, match="NVRTC, which compiles for the backe"):
        nvrtc.compile_ptx("", "sm_90a")


@needs_nvrtc
def test_ptx_is_kept_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLASITE_CACHE_DIR", str(tmp_path / "kept"))
    text = text_of(softmax(1, 96, 8))
    first = nvrtc.stored_ptx(text, "sm_90a")
    monkeypatch.setattr(nvrtc, "compile_ptx", None)  # nothing is compiled again
    assert nvrtc.stored_ptx(text, "sm_90a") == first
    with pytest.raises(TypeError):
        nvrtc.stored_ptx(text, "sm_80")


@needs_nvrtc
@pytest.mark.parametrize("name", ["max", "exp", "double", "3d", "u32", "main", "a b"])
def test_a_kernel_may_have_any_name(name: str):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])

    def run(x):
        return pl.pallas_call(kernel, out_shape=kernels.shape(x), name=name)(x)

    text = text_of(kernel_of(run, ((64,), f32)))
    assert f".entry {emit.Launched.of(text).name}(" in nvrtc.compile_ptx(text, "sm_80")


CHIPS = ["a100", "h100"]


@cache
def zoo_kernels() -> list[Kernel]:
    calls = (
        call
        for case in all_cases()
        for call in calls_in(
            partial(case.run, interpret=False, backend="cuda"), *arguments(case, 0)
        )
    )
    return [call.kernel for call in calls]


@needs_nvrtc
@pytest.mark.parametrize("chip", CHIPS)
def test_nvrtc_takes_every_kernel_of_the_zoo(chip: str):
    """All that the backend accepts, as one text: a call of NVRTC takes a while."""
    texts: list[str] = []
    for kernel in share_of(zoo_kernels(), CHIPS.index(chip)):
        try:
            text = text_of(kernel, chip=GPUS[chip])
        except UnsupportedError:
            continue
        name = emit.Launched.of(text).name
        text = text.replace(f"\n{name}(", f"\n{name}_{len(texts)}(")
        texts.append(f"namespace n{len(texts)} {{\n{text}}}\n")
    assert len(texts) > 70 // SHARE
    arch = cuda._arch(GPUS[chip])
    assert nvrtc.compile_ptx("".join(texts), arch).count(".entry ") == len(texts)


@needs_nvrtc
def test_text_that_nvrtc_refuses_is_an_error_of_ours():
    with pytest.raises(CompileError, match="NVRTC rejected the code of a kernel"):
        nvrtc.compile_ptx("this is not C++", "sm_90a")
    text = text_of(softmax(1, 96, 8)).replace("const u32 thread", "const u32 lost")
    with pytest.raises(CompileError, match=r"kernel *softmax_kernel\n *nvrtc"):
        nvrtc.compile_ptx(text, "sm_90a")


def test_numbers_are_exact():
    from pallasite.backends.cuda.text import number
    from pallasite.ir.types import BF16, F32, F64, I32, I64

    assert number(-1, I32) == "(-1)" and number(-(1 << 31), I32).startswith("(-2147483")
    assert number(0.1, F32) == "0.10000000149011612f"
    assert number(0.1, BF16) == "0.10009765625f"
    assert number(float("-inf"), F32) == "__uint_as_float(0xff800000u)"
    assert number(1e300, F64) == "1e+300"
    assert number(1 << 40, I64) == "1099511627776ll"
    assert np.isfinite(float(number(1e-45, F32)[:-1]))


@pytest.mark.parametrize(("columns", "programs"), [(96, 3), (112, 2), (128, 2)])
def test_programs_that_share_a_multiprocessor_start_with_enough_registers(
    columns: int, programs: int
):
    """ptxas refuses a product whose sums do not fit what all threads start with."""
    x = jax.ShapeDtypeStruct((768, 512), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((512, 6 * columns), jnp.bfloat16)
    run = partial(kernels.matmul, block=(64, columns, 64))
    (call,) = calls_in(run, x, y)
    text = base.Compiled(BACKEND, call.kernel, base.Options(), shared=())["cuda"]
    assert f"__launch_bounds__(256, {programs})" in text


def test_many_short_loops_are_written_out():
    loops = [
        "  EACH(2) { get<16>(x1 + i * 4, p2 + (b0 + i) / 2); if (i < 2) x1[i] = 0; }",
        "  EACH(3) v5[i] = x1[i] + xi[i];",
        "  EACH(32) v6[i] = x1[i];",
        '  EACH(2) asm volatile("mov %0, i;" : "+f"(v5[i]));',
        "  EACH(4) {",
        "    v7[i] = 0;",
        "  }",
    ]
    few = "\n".join([*loops, ""])
    assert c_text.with_short_loops_written_out(few) == few
    many = few * c_text.MANY_LOOPS
    assert c_text.with_short_loops_written_out(many).splitlines()[:7] == [
        "  { get<16>(x1 + 0 * 4, p2 + (b0 + 0) / 2); if (0 < 2) x1[0] = 0; }",
        "  { get<16>(x1 + 1 * 4, p2 + (b0 + 1) / 2); if (1 < 2) x1[1] = 0; }",
        "  v5[0] = x1[0] + xi[0];",
        "  v5[1] = x1[1] + xi[1];",
        "  v5[2] = x1[2] + xi[2];",
        *loops[2:4],
    ]


@needs_nvrtc
def test_written_out_loops_are_the_same_code(monkeypatch):
    lines = [f"float x{k}[4]; EACH(4) x{k}[i] = a0[{k} + i];" for k in range(3)]
    body = "\n".join(line.replace("; EACH", ";\n  EACH") for line in lines)
    sums = "\n".join(f"  EACH(4) a1[{k} * 4 + i] = x{k}[i] + x0[i];" for k in range(3))
    head = 'extern "C" __global__ void pl_sums(const float* a0, float* a1) {'
    code = "\n".join([head, body, sums, "}", ""])
    text = emit.functions.used(code, {}) + "\n" + code
    as_loops = nvrtc.compile_ptx(text, "sm_90a")
    monkeypatch.setattr(c_text, "MANY_LOOPS", 1)
    assert c_text.with_short_loops_written_out(text) != text
    assert nvrtc.compile_ptx(text, "sm_90a").count(";") == as_loops.count(";")
