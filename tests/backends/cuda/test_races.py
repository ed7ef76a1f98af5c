"""Races between threads and what runs beside them: copies and products.

A kernel is right however late these are in `host.py`; the same kernel with one wait,
fence or meeting taken out is not. Checked mode follows its explicit IR.
"""

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import kernels as library
from pallasite import tpu as pltpu
from pallasite.backends import cuda
from pallasite.backends.cuda import products
from pallasite.interpret.checked import run_checked
from pallasite.ir.nodes import walk
from pallasite.ir.parse import parse_kernel
from pallasite.target import GPUS
from pallasite.target.chip import Memory
from tests.backends.cuda import host, kernels
from tests.backends.cuda.kernels import bf16, f32

needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)


def layer_kernel(x_ref, w_ref, b_ref, o_ref, sums):
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    y = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=f32)
    sums[...] += jnp.maximum(y + b_ref[...], 0)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = sums[...].astype(o_ref.dtype)


def layer(x, w, b):
    """Sums of `relu(x @ w + b)` over blocks of columns."""
    return pl.pallas_call(
        layer_kernel,
        grid=(x.shape[0] // 64, w.shape[1] // 64),
        in_specs=[
            pl.BlockSpec((64, 64), lambda i, j: (i, 0)),
            pl.BlockSpec((64, 64), lambda i, j: (0, j)),
            pl.BlockSpec((1, 64), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((64, 64), lambda i, j: (i, 0)),
        out_shape=kernels.shape(x),
        scratch_shapes=[pltpu.VMEM((64, 64), f32)],
        backend="cuda",
    )(x, w, b)


OPERANDS = [
    kernels.normal(128, 64, dtype=bf16),
    kernels.normal(64, 256, dtype=bf16, seed=1),
    kernels.normal(1, 256, seed=2),
]
# What is taken out of the text.
LEFT_OUT = {
    "wait for operands": r"barrier_wait\([^;]*;(?=\s*__align__\(16\) float d)",
    "wait for a product": r"products_left<0>\(\);",
    "fence after stores": r"stores_before_copies\(\);",
    "meeting after stores": r"meet\([^;]*;(?=\s*if [^{]*{ copy_out)",
    "wait for a copy that reads": r"copies_reading<0>\(\);",
    "wait for the last copy": r"copies_left<0>\(\);",
}
# What a wait is put after.
RELEASE = r"(products_left<0>\(\);.*?)(if \(thread % 32 == 0\) barrier_arrive\([^;]*;)"
MISTAKES = ["none", "slot released before its product has ended", *LEFT_OUT]


def with_mistakes(text: str) -> str:
    """The text, with the mistake in it whose number `mistake` is."""
    moved = r"if (mistake == 1) \2\n\1if (mistake != 1) \2"
    text, count = re.subn(RELEASE, moved, text, count=1, flags=re.S)
    assert count
    for name, pattern in LEFT_OUT.items():
        kept = rf"if (mistake != {MISTAKES.index(name)}) \g<0>"
        text, count = re.subn(pattern, kept, text)
        assert count, name
    return text.replace("\n#define DEVICE", "\nint mistake;\n#define DEVICE")


def is_right(code: host.Code) -> bool:
    """In all timings."""
    x, w, b = (np.asarray(v, np.float32) for v in OPERANDS)
    want = np.maximum(x @ w + b, 0).reshape(128, 4, 64).sum(1)
    try:
        found = (code(*map(np.asarray, OPERANDS), timing=t)[0] for t in host.TIMINGS)
        return all(kernels.error(got, want) < 1e-2 for got in found)
    except AssertionError:  # it is not done
        return False


@pytest.fixture(scope="module", autouse=True)
def small_chip():
    """Of one multiprocessor with room for few slots, which are filled again."""
    memories = {**GPUS["h100"].memories, "shared": Memory(60 << 10)}
    chip = replace(GPUS["h100"], cores=1, memories=memories)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_chip", lambda options: chip)
        yield


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> host.Code:
    (kernel,) = pl.lower(layer)(*OPERANDS).kernels
    folder: Path = tmp_path_factory.mktemp("races")
    return host.Code(kernel, folder, optimise="-O0", edit=with_mistakes)


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, code):
    """Without one, numbers beside an operand are loaded while its product runs."""
    ctypes.c_int.in_dll(code.library, "mistake").value = MISTAKES.index(mistake)
    assert is_right(code) == (mistake == "none")


def test_no_slot_is_freed_while_a_product_reads_it():
    """Beside it are numbers of each column, which are loaded while the product runs."""
    (kernel,) = pl.lower(layer)(*OPERANDS).kernels
    explicit = parse_kernel(host.scheduled_text(kernel))
    operands = [np.asarray(x) for x in OPERANDS]
    run_checked(explicit, operands, pl.Checked(orders=("late",)))


@pytest.mark.parametrize("per_core", [2, 1])
def test_weights_are_loaded_before_their_slot_is_freed(per_core, monkeypatch):
    """Where programs do not share a multiprocessor, two products are in flight."""
    chip = replace(GPUS["h100"], cores=2)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)
    if per_core == 1:
        monkeypatch.setattr(products, "PREPARING_REGISTERS", {})
    weights = kernels.normal(512, 128, dtype=bf16)
    weights = library.quantize_weights(weights, bits=4, group_size=64)
    x, scales = kernels.normal(16, 512, dtype=bf16, seed=1), weights.scales[:, None]
    how = library.WeightOnlyConfig(splits=1)
    call = lambda x: library.weight_only_matmul(x, weights, config=how)
    (kernel,) = pl.lower(call)(x).kernels
    explicit = parse_kernel(host.scheduled_text(kernel))
    (roles,) = [op for op in walk(explicit.body) if op.name == "roles"]
    assert roles.attrs["cuda.per_core"] == per_core
    operands = [np.asarray(a) for a in (x, x, weights.values, scales, scales)]
    (got,) = run_checked(explicit, operands, pl.Checked(orders=("late",)))
    want = x.astype(f32) @ weights.dequantize().astype(f32)
    assert kernels.error(got[0], want) < 1e-2
