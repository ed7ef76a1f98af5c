"""Launches of GPU kernels are kept on disk: what was made before needs no passes."""

import os
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import config
from pallasite.backends import base
from pallasite.backends.cuda import nvrtc
from pallasite.errors import UnsupportedError
from pallasite.primitive import choose
from pallasite.sites import calls_in, kernels_in
from pallasite.target import GPUS

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no file owners")


@pytest.fixture(autouse=True)
def place(tmp_path):
    folder = str(tmp_path / "cache")
    with config.override(cache_dir=folder, verify=False, dump=""):
        yield


def row_sums(columns=256, print_too=False):
    def kernel(x_ref, o_ref):
        total = x_ref[...].sum(axis=-1, keepdims=True)
        if print_too:
            pl.debug_print("total {}", total[0, 0])
        o_ref[...] = x_ref[...] - total

    x = jax.ShapeDtypeStruct((64, columns), jnp.float32)
    (found,) = kernels_in(pl.pallas_call(kernel, out_shape=x), x)
    return found


def compiled(backend, kernel, chip="h200", **options):
    if backend == "cuda" and not nvrtc.is_available():
        pytest.skip("NVRTC is not installed")
    how = base.Options(chip=GPUS[chip], **options)
    return base.Compiled(base.get(backend), kernel, how)


def launched(made):
    return made.backend.launch(made)


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_kernel_made_before_needs_no_passes(backend):
    first, again = (compiled(backend, row_sums()) for _ in range(2))
    want = launched(first)
    assert first.steps
    assert launched(again) == want
    assert not again.steps


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_another_kernel_chip_or_option_is_made(backend):
    launched(compiled(backend, row_sums()))
    others = [
        compiled(backend, row_sums(columns=512)),
        compiled(backend, row_sums(), chip="a100"),
        compiled(backend, row_sums(), compiler_params={"num_warps": 2}),
    ]
    for other in others:
        launched(other)
        assert other.steps


def test_a_kernel_whose_prints_are_read_here_is_made_again():
    first, again = (compiled("triton", row_sums(print_too=True)) for _ in range(2))
    assert launched(first).read_log is not None
    assert launched(again).read_log is not None
    assert again.steps


@pytest.mark.parametrize("knob", ["verify", "dump"])
def test_passes_that_are_to_be_seen_run(knob, tmp_path):
    launched(compiled("triton", row_sums()))
    wanted = {"verify": True, "dump": str(tmp_path / "texts")}[knob]
    with config.override(**{knob: wanted}):
        again = compiled("triton", row_sums())
        launched(again)
    assert again.steps


def test_kernels_that_are_lowered_together_are_begun_with_the_first(monkeypatch):
    """NVRTC compiles each once: all of them when the first is launched."""
    if not nvrtc.is_available():
        pytest.skip("NVRTC is not installed")
    texts = list[str]()

    def compile_ptx(text, arch):
        texts.append(text)
        return f"ptx of {arch}"

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...])

    def scaled(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...]) * y_ref[...]

    def squares(x, y):
        first = pl.pallas_call(scaled, out_shape=x)(x, x + 1)
        return first, pl.pallas_call(kernel, out_shape=y)(y)

    monkeypatch.setattr(nvrtc, "compile_ptx", compile_ptx)
    sizes = [jax.ShapeDtypeStruct((n, n), jnp.bfloat16) for n in (64, 128)]
    first, last = calls_in(squares, *sizes)
    # Which operands XLA has just computed is each kernel's own.
    calls = [replace(first, flowing=(1,)), last]
    base.lowered_together([base.Together(c.kernel, c.flowing) for c in calls])
    begun = list[int]()
    for each in calls:
        assert choose(each, "cuda", chip=GPUS["h200"]).backend == "cuda"
        begun.append(len(texts))
    assert begun == [2, 2] and len(set(texts)) == 2


def test_what_cannot_be_begun_is_refused_when_asked_for():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.cumsum(x_ref[...])

    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    (refused,) = kernels_in(pl.pallas_call(kernel, out_shape=x), x)
    made = compiled("cuda", row_sums())
    made.beside = [compiled("cuda", refused)]
    assert launched(made).symbol
    with pytest.raises(UnsupportedError):
        launched(made.beside[0])
