"""A kernel is compiled for the chip that JAX lowers for, wherever that chip is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import config, jaxcompat

SHAPE = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def double(x: jax.Array) -> jax.Array:
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=SHAPE)(x)


def lowered_for(monkeypatch, kind: str, platform: str) -> str:
    device = SimpleNamespace(device_kind=kind, platform=platform)
    monkeypatch.setattr(jaxcompat, "lowering_device", lambda ctx: device)
    jax.clear_caches()
    traced = jax.jit(double).trace(SHAPE)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("kind", "arch"), [("NVIDIA A100-SXM4-80GB", "sm_80"), ("NVIDIA H200", "sm_90a")]
)
def test_the_lowering_names_the_chip(monkeypatch, kind: str, arch: str):
    pytest.importorskip("pallasite.backends.cuda.nvrtc").version()
    assert f".target {arch}" in lowered_for(monkeypatch, kind, "gpu")


def test_the_target_knob_comes_first(monkeypatch):
    with config.override(target="gpu:h200"):
        text = lowered_for(monkeypatch, "NVIDIA A100", "gpu")
    assert ".target sm_80" not in text


def test_a_device_of_another_platform_says_nothing(monkeypatch):
    text = lowered_for(monkeypatch, "cpu", "cpu")
    assert "triton" in text and ".target" not in text


def test_a_lowering_for_this_machine_knows_its_device():
    found = []

    def rule(ctx, x):
        found.append(jaxcompat.lowering_device(ctx))
        return [x]

    from jax.interpreters import mlir

    primitive = jaxcompat.Primitive("shows_its_device")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, rule)
    jax.jit(primitive.bind).lower(SHAPE)
    assert found and found[0].platform == jax.devices()[0].platform


def test_stages_follow_the_target_knob():
    call = pl.lower(double)(SHAPE)
    with config.override(target="gpu:a100"):
        assert "sm_80" in call.stages(backend="cuda")["ptx"]
    with config.override(target="gpu:h200"):
        assert "sm_90a" in call.stages(backend="cuda")["ptx"]
