"""Block-scaled matmuls on chips that multiply by scales: the emitted text on the CPU.

`tensor_core.h` reads scales where the PTX document says that instructions do. No such
chip has run this text.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config, kernels
from pallasite.backends import base, cuda
from pallasite.backends.cuda import blackwell, nvrtc
from pallasite.backends.cuda.repack import packed_scales
from pallasite.errors import UnsupportedError
from pallasite.interpret.checked import run_checked
from pallasite.ir.nodes import walk
from pallasite.ir.parse import parse_kernel
from pallasite.ir.types import DTYPES, RefType
from pallasite.target import GPUS
from tests.backends.cuda import host
from tests.backends.cuda.kernels import error, f32

needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)
needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason="NVRTC is not installed (nvidia-cuda-nvrtc)"
)
e4m3, e5m2, e8m0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu


@pytest.fixture(autouse=True)
def small_chip(monkeypatch):
    """Two multiprocessors, so that each runs several programs."""
    chip = replace(GPUS["b200"], cores=2)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)
    with config.override(target="b200"):
        yield


def mx(m, n, k, dtype=e4m3):
    """Operands of mxfp8, whose scales all differ from those around them."""
    rng = np.random.default_rng(0)
    values = [jnp.asarray(rng.normal(size=(s, k)), dtype) for s in (m, n)]
    powers = [2.0 ** rng.integers(-6, 7, size=(s, k // 32)) for s in (m, n)]
    return *values, *(jnp.asarray(p, e8m0) for p in powers)


def reference(x, y, x_scales, y_scales):
    def numbers(values, scales):
        scales = np.asarray(scales, np.float64)
        width = values.shape[1] // scales.shape[1]
        return np.asarray(values, np.float64) * np.repeat(scales, width, axis=1)

    return numbers(x, x_scales) @ numbers(y, y_scales).T


def library(block=(128, 128, 128)):
    how = kernels.MatmulConfig(*block)
    return partial(kernels.scaled_matmul, out_dtype=f32, config=how)


def author(x, y, x_scales, y_scales):
    """Dequantised in f32, as a product in three dimensions."""
    (m, k), n = x.shape, y.shape[0]

    def numbers(ref, scale_ref):
        values = ref[...].astype(f32).reshape(128, 4, 32)
        return (scale_ref[...].astype(f32)[:, :, None] * values).reshape(128, 128)

    def kernel(x_ref, y_ref, x_scale_ref, y_scale_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        left, right = numbers(x_ref, x_scale_ref), numbers(y_ref, y_scale_ref)
        o_ref[...] += jnp.dot(left, right.T, preferred_element_type=f32)

    row = lambda c: pl.BlockSpec((128, c), lambda i, j, s: (i, s))
    column = lambda c: pl.BlockSpec((128, c), lambda i, j, s: (j, s))
    return pl.pallas_call(
        kernel,
        grid=(m // 128, n // 128, k // 128),
        in_specs=[row(128), column(128), row(4), column(4)],
        out_specs=pl.BlockSpec((128, 128), lambda i, j, s: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), f32),
        backend="cuda",
    )(x, y, x_scales, y_scales)


def kernel_of(function, *operands):
    (kernel,) = pl.lower(function)(*operands).kernels
    return kernel


SHAPES = {
    "several programs": ((256, 256, 256), (128, 128, 128), e4m3),
    "odd edges": ((200, 136, 128), (128, 128, 128), e4m3),
    "a part of a step": ((130, 72, 224), (128, 128, 128), e4m3),
    "two warpgroups share rows": ((300, 300, 384), (256, 128, 128), e4m3),
    "two warpgroups share columns": ((130, 500, 256), (128, 256, 128), e5m2),
    "two panels along k": ((130, 200, 512), (128, 128, 256), e4m3),
}


@needs_compiler
@pytest.mark.parametrize("name", SHAPES)
def test_it_equals_the_evaluator(name, tmp_path):
    sizes, block, dtype = SHAPES[name]
    operands = mx(*sizes, dtype)
    call = library(block)
    kernel = kernel_of(call, *operands)
    assert blackwell.SCALED in host.cuda_text(kernel)
    given = [np.asarray(x) for x in padded(operands, block[2])]
    (got,) = host.run(kernel, given, tmp_path, timings=tuple(host.TIMINGS))
    assert error(got, reference(*operands)) < 1e-6
    with config.override(interpret=True):
        assert error(got, call(*operands)) < 1e-6


def padded(operands, depth):
    """As the operation passes them to its kernel."""
    x, y, x_scales, y_scales = operands
    more = -x.shape[1] % depth
    wider = lambda v, n, by: jnp.pad(v, ((0, 0), (0, n)), constant_values=by)
    values = [wider(v, more, 0) for v in (x, y)] if more else [x, y]
    scales = [x_scales, y_scales]
    return *values, *([wider(s, more // 32, 1) for s in scales] if more else scales)


def scheduled(call, operands):
    made = base.Compiled(base.get("cuda"), kernel_of(call, *operands), base.Options())
    return parse_kernel(made["scheduled"])


def test_the_thread_that_multiplies_copies_scales():
    """Scales arrive with the operands that they multiply, and pass no registers."""
    explicit = scheduled(library((256, 128, 256)), mx(512, 256, 512))
    (roles,) = [op for op in walk(explicit.body) if op.name == "roles"]
    load, multiply, compute = [list(walk(r)) for r in roles.regions]
    assert sum(op.name == "copy_start" for op in load) == 4
    assert sum(op.name == "tensor_copy" for op in multiply) == 2
    assert not any(op.name == "scaled" for op in walk(explicit.body))
    assert not {"copy_start", "tensor_copy"} & {op.name for op in compute}
    memory = [op.result.ref for op in walk(explicit.body) if op.name == "alloc"]
    scales = [ref.shape for ref in memory if ref.dtype.name == "f8e8m0fnu"]
    ring = scales[0][0]
    assert scales == [(ring, 2, 2, 512), (ring, 2, 1, 512), (2, 2, 512), (2, 1, 512)]


def test_checked_mode_follows_the_roles():
    operands = mx(128, 128, 256)
    explicit = scheduled(library(), operands)
    forms = packed_scales(RefType((128, 8), DTYPES["f8e8m0fnu"], "any"), 1)
    values, scales = operands[:2], operands[2:]
    given = [*map(np.asarray, values), *(forms.pack(np, np.asarray(s)) for s in scales)]
    (got,) = run_checked(explicit, given, pl.Checked(orders=("late",)))
    assert error(got, reference(*operands)) < 1e-6


def test_where_scales_are():
    """PTX, "scale factors": 32 rows after each other, four at a time, then columns."""
    ref = RefType((300, 10), DTYPES["f8e8m0fnu"], "any")
    numbers = np.arange(3000).reshape(300, 10)
    form = replace(packed_scales(ref, 2), dtype="int64", carried_dtype="int64")
    packed = form.pack(np, numbers)
    assert packed.shape == (2, 3, 2, 512)
    for row, column in ((0, 0), (1, 0), (32, 1), (127, 3), (128, 4), (299, 9)):
        block, tall = divmod(row // 128, 2)
        place = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert packed[block, column // 4, tall, place] == numbers[row, column]
    assert packed[1, 0, 1, 511] == 1  # after the end: the scale one


def test_what_an_instruction_is_told():
    # PTX ISA, "Instruction descriptor" of mxf8f6f4: the numbers of scales at bits 4 and
    # 29, types at 7 and 10, columns / 8 at 17, powers of two at 23, rows / 128 at 27.
    told = blackwell.scaled_instruction(128, 256, "f8e5m2", 3)
    assert told == 3 << 4 | 1 << 7 | 1 << 10 | 32 << 17 | 1 << 23 | 1 << 27 | 3 << 29


@needs_compiler
def test_an_authors_own_spelling(tmp_path):
    operands = mx(256, 128, 384)
    kernel = kernel_of(author, *operands)
    assert blackwell.SCALED in host.cuda_text(kernel)
    given, timings = [np.asarray(x) for x in operands], tuple(host.TIMINGS)
    (got,) = host.run(kernel, given, tmp_path, timings=timings)
    assert error(got, reference(*operands)) < 1e-6


@pytest.mark.parametrize(("chip", "is_scaled"), [("b200", True), ("h200", False)])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_four_bits_are_eight_in_a_kernel(form, chip, is_scaled, monkeypatch):
    """mxfp4 then is mxfp8; nvfp4, whose scales are for fewer, is a dot of bf16."""
    monkeypatch.setattr(cuda, "_chip", lambda options: GPUS[chip])
    width, dtype = (32, e8m0) if form == "mxfp4" else (16, e4m3)
    values = [jax.ShapeDtypeStruct((256, 256), jnp.float4_e2m1fn)] * 2
    scales = [jax.ShapeDtypeStruct((256, 256 // width), dtype)] * 2
    with config.override(target=chip):
        kernel = kernel_of(library(), *values, *scales)
    types = [param.ref.dtype.name for param in kernel.inputs]
    if is_scaled and form == "mxfp4":
        assert types == ["f8e4m3fn"] * 2 + ["f8e8m0fnu"] * 2
        assert blackwell.SCALED in host.cuda_text(kernel)
    else:
        assert types == ["f8e4m3fn"] * 2 + ["bf16"] * 2
        base.Compiled(base.get("triton"), kernel, base.Options(chip=GPUS[chip]))["ttir"]


# --- mistakes ---

COPY = r"tensor_copy\(\(tensors[^\n]*"
PLACE = r"(, \(tensors[^;,]*)"
# What becomes of the text. The first copy is of rows, the other two of columns.
MISTAKES = {
    "none": (r"$", ""),
    "no scales of rows": (rf"{COPY}(?=\n\s*{COPY}\n\s*{COPY})", ";"),
    "no scales of columns": (rf"{COPY}(?=\n(?!\s*tensor_copy))", ";"),
    "scales of one slot": (
        r"tensor_rows\(shared_address\((m\d+) \+ [^;]*;",
        r"tensor_rows(shared_address(\1)));",
    ),
    "scales of the other operand": (rf"{PLACE}{PLACE}\);", r"\2\1);"),
    "scales of one step": (r"(_shared<[2-6], [^;]*, )\d{9,}u", r"\g<1>HOWu"),
    "scales of the next rows": (r"(tensor_rows\([^;]*)\);", r"\1 + 16);"),
    "another layout": (r"\(u64\)\(128 >> 4\) << 32", "(u64)(512 >> 4) << 32"),
    "bytes that are not counted": (
        r"(barrier_expect\([^;]*, )\d+\);",
        r"\g<1>49152);",
    ),
    "copied after the matmul": (
        rf"((?:{COPY}\n\s*){{3}})(if \(true\) \{{.*?\n\s*\}}\n)",
        r"\2\1",
    ),
}


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, tmp_path):
    operands = mx(384, 256, 512)
    pattern, instead = MISTAKES[mistake]

    def edit(text: str) -> str:
        first = re.search(r"_shared<0, 0>\([^;]*, (\d+)u", text)
        assert first is not None
        told = instead.replace("HOW", first[1])
        made, count = re.subn(pattern, told, text, flags=re.S)
        assert count, mistake
        return made

    kernel = kernel_of(library((128, 256, 128)), *operands)
    code = host.Code(kernel, tmp_path, optimise="-O0", edit=edit)
    given, want = [np.asarray(x) for x in operands], reference(*operands)

    def is_right(timing: str) -> bool:
        try:
            (got,) = code(*given, timing=timing)
        except AssertionError:  # it is not done
            return False
        return error(got, want) < 1e-6

    assert all(map(is_right, host.TIMINGS)) == (mistake == "none")


@needs_nvrtc
@pytest.mark.parametrize(("chip", "code"), [("b200", "sm_100a"), ("b300", "sm_103a")])
def test_it_is_compiled(chip, code, monkeypatch):
    monkeypatch.setattr(cuda, "_chip", lambda options: GPUS[chip])
    for block in ((128, 256, 128), (256, 128, 128)):
        kernel = kernel_of(library(block), *mx(512, 512, 512))
        made = base.Compiled(base.get("cuda"), kernel, base.Options())
        ptx = made["ptx"]
        assert f".target {code}" in ptx and "tcgen05.cp" in ptx
        assert f"kind::{blackwell.SCALED}.block_scale.scale_vec::1X" in ptx
        if "Used" in made["ptxas"]:
            assert " 0 bytes spill stores" in made["ptxas"]


def test_blocks_that_copies_cannot_take_are_refused():
    call = library((64, 128, 128))
    with pytest.raises(UnsupportedError, match="it is computed"):
        host.cuda_text(kernel_of(call, *mx(256, 256, 256)))


def test_other_chips_multiply_what_is_dequantised(monkeypatch):
    monkeypatch.setattr(cuda, "_chip", lambda options: GPUS["h200"])
    with pytest.raises(UnsupportedError, match="it is computed"):
        host.cuda_text(kernel_of(library(), *mx(256, 256, 256)))
