"""Portable matmuls on chips with tensor memory: roles, and the emitted text on the CPU.

`tensor_core.h` runs matmuls as late as the rules allow, and knows who may rely on what
has happened in tensor memory. A kernel is right in all timings; with one commit, wait
or fence taken out it is not. No such chip has run this text.
"""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import config
from pallasite.backends import base, cuda
from pallasite.backends.cuda import nvrtc
from pallasite.errors import UnsupportedError
from pallasite.interpret.checked import run_checked
from pallasite.ir.nodes import walk
from pallasite.ir.parse import parse_kernel
from pallasite.target import GPUS
from pallasite.target.chip import Memory
from tests.backends.cuda import host, kernels, prove_all
from tests.backends.cuda.kernels import bf16, f32
from tests.backends.cuda.test_host import gradients
from tests.xla import pull_back

needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)
needs_nvrtc = pytest.mark.skipif(
    not nvrtc.is_available(), reason="NVRTC is not installed (nvidia-cuda-nvrtc)"
)
TF32 = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.fixture(autouse=True)
def small_chip(monkeypatch):
    """Two multiprocessors, so that each runs several programs."""
    chip = replace(GPUS["b200"], cores=2)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)


@pytest.fixture
def four_cores(monkeypatch):
    chip = replace(GPUS["b200"], cores=4)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)


def kernel_of(function, *operands):
    (kernel,) = pl.lower(function)(*operands).kernels
    return kernel


def scheduled(function, *operands):
    text = host.scheduled_text(kernel_of(function, *operands))
    return parse_kernel(text)


PRODUCTS = {
    "two warpgroups share columns": dict(m=128, n=256, k=256, block=(128, 256, 64)),
    "two warpgroups share rows": dict(m=300, n=128, k=128, block=(256, 128, 64)),
    "odd edges": dict(m=200, n=136, k=136, block=(128, 64, 64)),
    "few rows": dict(m=100, n=72, k=96, dtype=jnp.float16, block=(64, 64, 64)),
    "turned": dict(m=128, n=136, k=128, left="km", right="nk", out=bf16),
    "i8": dict(m=128, n=64, k=256, dtype=jnp.int8, right="nk", block=(128, 64, 128)),
    "few rows, turned": dict(m=192, n=64, k=96, left="km", block=(64, 64, 32)),
    "zeros after the depth": dict(m=128, n=64, k=40, left="km", block=(128, 64, 40)),
    "tf32": dict(m=128, n=64, k=64, dtype=f32, right="nk", precision=TF32),
    "e4m3": dict(m=128, n=96, k=256, dtype=e4m3, right="nk", block=(128, 32, 128)),
    "e4m3, columns contiguous": dict(m=256, n=128, k=192, dtype=e4m3),
    "e4m3, turned": dict(m=128, n=64, k=96, dtype=e4m3, left="km", right="nk"),
    "i8, columns contiguous": dict(m=128, n=144, k=128, dtype=jnp.int8),
    "e5m2": dict(m=130, n=64, k=256, dtype=e5m2, right="nk", block=(128, 64, 128)),
}

PAIRED = {
    "columns contiguous": dict(m=512, n=256, k=192, block=(128, 128, 64)),
    "k contiguous, odd edges": dict(
        m=500, n=200, k=136, right="nk", block=(128, 64, 64)
    ),
    "two warpgroups each": dict(m=256, n=512, k=128, block=(128, 256, 64)),
    "8 bits": dict(m=256, n=96, k=256, dtype=e4m3, right="nk", block=(128, 32, 128)),
}


def product(how):
    """A matmul, its operands, and what it should be."""
    how = {"left": "mk", "right": "kn", "dtype": bf16, "out": f32, **how}
    sizes = {d: how.pop(d) for d in "mnk"}
    dtype = how.pop("dtype")
    how["out"] = jnp.int32 if dtype == jnp.int8 else how["out"]
    how.setdefault("block", (128, 128, 64))
    sides = (how["left"], how["right"])
    x, y = (kernels.operand(sizes, s, dtype, n) for n, s in enumerate(sides))
    return (
        partial(kernels.matmul, **how),
        x,
        y,
        kernels.reference(x, y, *sides, how["out"]),
    )


@needs_compiler
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, tmp_path):
    call, x, y, want = product(PRODUCTS[name])
    operands, timings = [np.asarray(x), np.asarray(y)], tuple(host.TIMINGS)
    kernel = kernel_of(call, x, y)
    (got,) = host.run(kernel, operands, tmp_path, timings=timings)
    assert kernels.error(got, want) < (1e-2 if want.dtype == bf16 else 1e-5)


def test_roles():
    """One thread copies, one multiplies; sums of the next program are added up while
    those of this one are taken."""
    call, x, y, _ = product(dict(m=384, n=512, k=256, block=(128, 256, 64)))
    made = scheduled(call, x, y)
    (roles,) = [op for op in walk(made.body) if op.name == "roles"]
    assert roles.attrs["cuda.names"] == ("load", "multiply", "compute")
    assert roles.attrs["cuda.warpgroups"] == (1, 0, 2)
    load, multiply, compute = [{op.name for op in walk(r)} for r in roles.regions]
    assert "copy_start" in load and not {"tensor_mma", "load"} & load
    assert {"tensor_mma", "tensor_commit"} <= multiply and "load" not in multiply
    assert {"load", "store", "barrier_arrive"} <= compute and "dot" not in compute
    memory = [op.result.ref for op in walk(made.body) if op.name == "alloc"]
    (sums,) = [ref for ref in memory if ref.space == "tmem"]
    assert sums.shape == (2, 128, 256)  # slots, rows, columns


@needs_compiler
@pytest.mark.parametrize("name", PAIRED)
def test_pairs_of_thread_blocks(name, tmp_path, four_cores):
    """Two programs that share right operands multiply together."""
    call, x, y, want = product(PAIRED[name])
    kernel = kernel_of(call, x, y)
    text = host.cuda_text(kernel)
    assert "__cluster_dims__(2, 1, 1)" in text and "tensor_product_" in text
    assert re.search(r"tensor_product_\w+_2_shared", text)
    operands, timings = [np.asarray(x), np.asarray(y)], tuple(host.TIMINGS)
    (got,) = host.run(kernel, operands, tmp_path, timings=timings)
    assert kernels.error(got, want) < 1e-5


def test_a_block_of_a_pair_copies_half_of_the_right_operand(four_cores):
    call, x, y, _ = product(PAIRED["two warpgroups each"])
    made = scheduled(call, x, y)
    memory = [op.result.ref for op in walk(made.body) if op.name == "alloc"]
    rings = [ref.shape[1:] for ref in memory if ref.space == "smem"]
    assert rings == [(128, 64), (64, 128)]
    explicit = [np.asarray(x), np.asarray(y)]
    (got,) = run_checked(made, explicit, pl.Checked(orders=("late",)))
    assert kernels.error(got, kernels.reference(x, y, "mk", "kn", f32)) < 1e-5


def test_programs_with_different_work_are_no_pairs(four_cores):
    """With a causal mask, the number of steps follows from the rows."""
    operands = [kernels.normal(1, 1024, 128, dtype=bf16, seed=n) for n in range(3)]
    for causal in (False, True):
        function = partial(kernels.attention, style="loop", causal=causal)
        text = host.cuda_text(kernel_of(function, *operands))
        assert "tensor_product_" in text
        assert ("__cluster_dims__" in text) == (not causal)


def loop_over_k(x, y):
    """Sums in a value of a loop over parts of the operands."""

    def kernel(x_ref, y_ref, o_ref):
        def step(k, sums):
            at = pl.ds(k * 64, 64)
            sums += jnp.dot(x_ref[:, at], y_ref[at], preferred_element_type=f32)
            return sums

        first = jnp.zeros((x_ref.shape[0], y_ref.shape[1]), f32)
        sums = jax.lax.fori_loop(0, x_ref.shape[1] // 64, step, first)
        o_ref[...] = jnp.maximum(sums, 0).astype(o_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // 128, y.shape[1] // 128),
        in_specs=[
            pl.BlockSpec((128, x.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((y.shape[0], 128), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), bf16),
        backend="cuda",
    )(x, y)


def layer(x, w, b, u):
    """A matmul of a computed operand, from tensor memory, with sums that start at b."""

    def kernel(x_ref, w_ref, b_ref, u_ref, o_ref):
        hidden = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=f32)
        hidden = jnp.maximum(hidden, 0).astype(bf16)
        sums = jnp.broadcast_to(b_ref[...], o_ref.shape)
        o_ref[...] = sums + jnp.dot(hidden, u_ref[...], preferred_element_type=f32)

    rows = lambda n: pl.BlockSpec((128, n), lambda i: (i, 0))
    whole = lambda a: pl.BlockSpec(a.shape, lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // 128,),
        in_specs=[rows(x.shape[1]), whole(w), whole(b), whole(u)],
        out_specs=rows(u.shape[1]),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], u.shape[1]), f32),
        backend="cuda",
    )(x, w, b, u)


LAYER = [
    kernels.normal(512, 64, dtype=bf16),
    kernels.normal(64, 128, dtype=bf16, seed=1),
    kernels.normal(1, 64, seed=2),
    kernels.normal(128, 64, dtype=bf16, seed=3),
]


def reference_layer(x, w, b, u):
    hidden = jnp.maximum(x.astype(f32) @ w.astype(f32), 0).astype(bf16)
    return b + hidden.astype(f32) @ u.astype(f32)


@needs_compiler
def test_other_spellings(tmp_path):
    x, y = kernels.normal(256, 192, dtype=bf16), kernels.normal(192, 128, dtype=bf16)
    operands, timings = [np.asarray(x), np.asarray(y)], tuple(host.TIMINGS)
    kernel = kernel_of(loop_over_k, x, y)
    (got,) = host.run(kernel, operands, tmp_path, timings=timings)
    want = jnp.maximum(x.astype(f32) @ y.astype(f32), 0).astype(bf16)
    assert kernels.error(got, want) < 1e-2


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("style", ["grid", "loop"])
def test_attention(style, causal, tmp_path):
    """Scores are taken from tensor memory, and their exponentials given through it."""
    q, k, v = (kernels.normal(2, 192, 64, dtype=bf16, seed=n) for n in range(3))
    how = dict(style=style, causal=causal, block=(64, 64))
    kernel = kernel_of(partial(kernels.attention, **how), q, k, v)
    operands, timings = [np.asarray(x) for x in (q, k, v)], tuple(host.TIMINGS)
    (got,) = host.run(kernel, operands, tmp_path, timings=timings)
    assert kernels.error(got, kernels.attention_reference(q, k, v, causal)) < 2e-2


@needs_compiler
def test_gradient_of_attention(tmp_path):
    *operands, seed = (kernels.normal(1, 256, 64, dtype=bf16, seed=n) for n in range(4))
    run = partial(kernels.attention, causal=True, block=(128, 128))
    got = gradients(run, operands, (seed,), tmp_path)
    reference = partial(kernels.attention_reference, causal=True)
    want = pull_back(reference, (x.astype(f32) for x in operands), seed.astype(f32))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == bf16 and kernels.error(x, y) < 1e-2


@needs_compiler
def test_a_computed_operand(tmp_path):
    kernel = kernel_of(layer, *LAYER)
    operands, timings = [np.asarray(x) for x in LAYER], tuple(host.TIMINGS)
    (got,) = host.run(kernel, operands, tmp_path, timings=timings)
    # The order of sums decides to which 16 bits some of them are rounded.
    assert kernels.error(got, reference_layer(*LAYER)) < 1e-3


def test_checked_mode_follows_the_roles():
    """With copies, matmuls and commits as late as they may be."""
    explicit = scheduled(layer, *LAYER)
    operands = [np.asarray(x) for x in LAYER]
    (got,) = run_checked(explicit, operands, pl.Checked(orders=("late",)))
    # The order of sums decides to which 16 bits some of them are rounded.
    assert kernels.error(got, reference_layer(*LAYER)) < 1e-3


# --- mistakes ---

# What becomes of the text: of the thread that multiplies, and of the others. Names in
# capitals are those of barriers.
OF_MULTIPLY = {
    "no wait for operands": (r"barrier_wait\(FULL [^;]*;", ""),
    "no wait for taken sums": (r"barrier_wait\(READY [^;]*;", ""),
    "no fence before matmuls": (r"tensor_after\(\);", ""),
    "no commit of a slot": (r"tensor_commit<1>\(EMPTY [^;]*;", ""),
    "no commit of sums": (r"tensor_commit<1>\(DONE [^;]*;", ""),
    "no commit after all": (r"tensor_commit<1>\(LAST\);", ""),
    "slot passed back too early": (
        r"tensor_commit<1>(\(EMPTY [^;]*;)",
        r"barrier_arrive\1",
    ),
    "sums passed on too early": (
        r"tensor_commit<1>(\(DONE [^;]*;)",
        r"barrier_arrive\1",
    ),
    "wrong phase of a slot": (r"(barrier_wait\(FULL .*)\);", r"\1 ^ 1);"),
    "wrong phase of sums": (r"(barrier_wait\(READY .*)\);", r"\1 ^ 1);"),
}
OF_COMPUTE = {
    "no wait for sums": (r"barrier_wait\(DONE [^;]*;", ""),
    "wrong phase of sums that are taken": (r"(barrier_wait\(DONE .*)\);", r"\1 ^ 1);"),
    "no fence after the wait for sums": (r"tensor_after\(\);", ""),
    "no fence before sums are passed back": (r"tensor_before\(\);", ""),
    "sums not passed back": (r"barrier_arrive\(READY [^;]*;", ";"),
    "no fence after stores": (r"stores_before_copies\(\);", ""),
}
MISTAKES = ["none", *OF_MULTIPLY, *OF_COMPUTE]
OF_PAIRS = {
    "bytes of one block": (r"(barrier_expect\(FULL [^;]*)\);", r"\1 / 2);"),
    "copies counted apart": (r"block_address\((FULL [^;]*), 0\)", r"\1"),
    "slot passed back to one": (
        r"tensor_commit_to\((EMPTY [^;]*), 3 .*\);",
        r"tensor_commit<2>(\1);",
    ),
    "sums passed on to one": (
        r"tensor_commit_to\((DONE [^;]*), 3 .*\);",
        r"tensor_commit<2>(\1);",
    ),
    "sums passed back apart": (
        r"arrive_at\((READY [^;]*), 0 .*\);",
        r"barrier_arrive(\1);",
    ),
    "both multiply": (
        r"== \w+;(\s*const int \w+ = \(int\)\w+;\s*if .*\s*\}\s*else \{\s*int)",
        r">= 0;\1",
    ),
    "no meeting at the start": (
        r"blocks_meet\(\);(?=\s*tensor_after\(\);\s*const)",
        ";",
    ),
    "no meeting at the end": (r"blocks_meet\(\);(?=\s*tensor_after\(\);\s*if)", ";"),
}
BARRIERS = ("FULL", "EMPTY", "READY", "DONE", "LAST")


def with_mistake(text: str, mistake: str) -> str:
    body = text.index('extern "C"')
    for name, place in zip(
        BARRIERS, re.findall(r"const u32 (barrier\d+)", text), strict=True
    ):
        text = re.sub(rf"\b{place}\b", name, text)
    if mistake in OF_PAIRS:
        pattern, instead = OF_PAIRS[mistake]
        text, count = re.subn(pattern, instead, text)
        assert count, mistake
    start = text.index("elected()) {", body)
    middle = text.index("const u32 group = ", start)
    parts = {"all": text[:start], "one": text[start:middle], "rest": text[middle:]}
    for part, mistakes in (("one", OF_MULTIPLY), ("rest", OF_COMPUTE)):
        if mistake in mistakes:
            pattern, instead = mistakes[mistake]
            parts[part], count = re.subn(pattern, instead, parts[part])
            assert count, mistake
    return "".join(parts.values())


MISTAKEN = dict(m=640, n=64, k=256, block=(128, 64, 64), out=bf16)


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, tmp_path, monkeypatch):
    """Of one multiprocessor with room for few slots: all are used again."""
    memories = {**GPUS["b200"].memories, "shared": Memory(100 << 10)}
    chip = replace(GPUS["b200"], cores=1, memories=memories)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)
    call, x, y, want = product(MISTAKEN)
    kernel = kernel_of(call, x, y)
    assert is_right_with(mistake, kernel, x, y, want, tmp_path) == (mistake == "none")


def is_right_with(mistake, kernel, x, y, want, folder) -> bool:
    edit = partial(with_mistake, mistake=mistake)
    code = host.Code(kernel, folder, optimise="-O0", edit=edit)

    def is_right(timing: str) -> bool:
        try:
            (got,) = code(np.asarray(x), np.asarray(y), timing=timing)
        except AssertionError:  # it is not done
            return False
        return kernels.error(got, want) < 1e-2

    return all(map(is_right, host.TIMINGS))


@needs_compiler
@pytest.mark.parametrize("mistake", ["none", *OF_PAIRS])
def test_a_mistake_of_pairs_is_found(mistake, tmp_path, monkeypatch):
    memories = {**GPUS["b200"].memories, "shared": Memory(80 << 10)}
    chip = replace(GPUS["b200"], cores=2, memories=memories)
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)
    call, x, y, want = product(dict(m=1280, n=128, k=256, block=(128, 128, 64)))
    kernel = kernel_of(call, x, y)
    assert is_right_with(mistake, kernel, x, y, want, tmp_path) == (mistake == "none")


# --- compilers ---


@needs_nvrtc
@pytest.mark.parametrize(("chip", "code"), [("b200", "sm_100a"), ("b300", "sm_103a")])
def test_it_is_compiled(chip, code, monkeypatch):
    monkeypatch.setattr(cuda, "_chip", lambda options: GPUS[chip])
    call, x, y, _ = product(dict(m=512, n=512, k=512, block=(128, 256, 64)))
    made = base.Compiled(base.get("cuda"), kernel_of(call, x, y), base.Options())
    assert f".target {code}" in made["ptx"] and "tcgen05.mma" in made["ptx"]
    if "Used" in made["ptxas"]:
        assert " 0 bytes spill stores" in made["ptxas"]


@needs_nvrtc
@pytest.mark.parametrize(
    "name", ["attention, sinks and a soft cap", "attention f16, bias"]
)
def test_the_thread_that_multiplies_has_enough_registers(name, monkeypatch):
    """Nothing of what it is told is kept from before its loops, or for after them."""
    chip = GPUS["b200"]
    monkeypatch.setattr(cuda, "_chip", lambda options: chip)
    with config.override(target="b200", verify=False):
        ((kernel, options),) = prove_all.kernels_of(*prove_all.subject("library", name))
    made = base.Compiled(base.get("cuda"), kernel, replace(options, chip=chip))
    body = made["cuda"][made["cuda"].index('extern "C"') :]
    # Steps of 32 bytes, in units of 16, are parts of instructions.
    assert re.search(r"tensor_product_f16_1_shared<2, 2>\(", body)
    assert not re.search(r"tensor_product_\w+<\d+, \d+>\([^;]*, o\d+ \+", body)
    freed = body[body.index("tensor_free") - 60 : body.index("tensor_free")]
    assert "this_thread() / 32 == 0" in freed and "threadIdx" not in freed
    if "Used" in made["ptxas"]:
        assert " 0 bytes spill stores" in made["ptxas"]


def test_what_one_chip_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(cuda, "_chip", lambda options: GPUS["b300"])
    call, x, y, _ = product(PRODUCTS["i8"])
    with pytest.raises(UnsupportedError, match="a matmul of i8"):
        host.cuda_text(kernel_of(call, x, y))
