"""`pl.lower(f)(*args)`: kernels and the text of every stage."""

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import config
from pallasite.backends import base
from pallasite.errors import SpecError
from pallasite.passes.run import SHARED


def double(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


def twice(x):
    call = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jnp.sin(call(call(x)))


SHAPE = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def test_stages_for_cpu():
    lowered = pl.lower(twice)(SHAPE)
    assert [kernel.name for kernel in lowered.kernels] == ["double", "double"]
    stages = lowered.stages(backend="cpu")
    shared = [step.name for step in SHARED]
    passes = base.get("cpu").passes(base.Options())
    own = [step.name for step in passes if not step.if_changed]  # nothing was merged
    steps = ["import", *shared, *own, "scheduled", "llvm", "asm"]
    again = [steps[:n].count(name) for n, name in enumerate(steps)]
    named = [f"{s}.{n + 1}" if n else s for s, n in zip(steps, again, strict=True)]
    assert list(stages) == named and any(again)
    assert "pipeline" in stages["import"] and "test_lower.py" in stages["import"]
    assert stages["scheduled"] == stages[own[-1]]
    assert "@handler" in stages["llvm"] and "handler:" in stages["asm"]


def test_stages_for_other_backends():
    lowered = pl.lower(twice)(SHAPE)
    assert "tt.func" in "".join(lowered.stages(backend="triton").values())
    assert "tpu" in "".join(lowered.stages(backend="tpu", kernel=1).values())


def test_a_function_without_kernels():
    with pytest.raises(SpecError, match="'sin' calls no kernel"):
        pl.lower(jnp.sin)(SHAPE)


def test_dump_writes_the_backends_stages(tmp_path):
    with config.override(dump=str(tmp_path)):
        call = pl.pallas_call(double, out_shape=SHAPE, backend="cpu")
        jax.jit(call).lower(jnp.zeros((8, 128)))
    names = sorted(path.name.split("-", 1)[1] for path in tmp_path.glob("double-*/*"))
    shown = list(pl.lower(call)(SHAPE).stages(backend="cpu"))
    shown.remove("scheduled")  # the last pass's text
    shown = [name.partition(".")[0] for name in shown]  # files are numbered anyway
    want = [f"cpu-{name}" if name in ("llvm", "asm") else name for name in shown]
    assert names == sorted(f"{name}.txt" for name in want)


def test_the_choice_of_another_chip_does_not_warn():
    """Of blocks that a TPU has to copy: only whether it can run them was asked."""
    block = pl.BlockSpec((8,), lambda i: (i,))
    shape = jax.ShapeDtypeStruct((32,), jnp.float32)
    call = pl.pallas_call(
        double, out_shape=shape, grid=4, in_specs=[block], out_specs=block
    )
    assert pl.lower(call)(shape).choice("tpu").backend == "tpu"
