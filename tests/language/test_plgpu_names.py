"""Every name that upstream's module of GPU kernels has: it works, or is refused and
listed as such."""

import ast
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import mosaic_gpu as plgpu
from pallasite.errors import UnsupportedError
from pallasite.missing import Missing
from tests.language import upstream_names

UPSTREAM = pathlib.Path(jax.__file__).parent / "experimental/pallas/mosaic_gpu.py"


@pytest.mark.skipif(not UPSTREAM.exists(), reason="JAX without pallas.mosaic_gpu")
def test_every_name_of_upstream_is_here_or_refused():
    names = upstream_names.names_in_source("pallas.mosaic_gpu")
    assert len(names) > 80
    absent = [name for name in names if not hasattr(plgpu, name)]
    assert not absent, absent
    refused = [n for n in names if isinstance(getattr(plgpu, n), Missing)]
    for name in refused:
        with pytest.raises(UnsupportedError, match=f"{name} is not supported"):
            getattr(plgpu, name)(1)(lambda: None)()  # one of them decorates


def test_the_table_of_refused_names_is_that_of_the_package():
    begin, end = upstream_names.MARKS
    written = upstream_names.PAGE.read_text().split(begin)[1].split(end)[0]
    assert written == upstream_names.table(), "run the script with --write"
    words = {word for _, word, _ in upstream_names.rows()}
    assert "absent" not in words
    assert "works" in words


def test_settings_of_upstreams_compiler_are_accepted():
    source = UPSTREAM.parents[2] / "_src/pallas/mosaic_gpu/core.py"
    (params,) = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "CompilerParams"
    ]
    fields = {n.target.id for n in params.body if isinstance(n, ast.AnnAssign)}
    fields -= {"BACKEND"}
    known = {f.name for f in dataclasses.fields(plgpu.CompilerParams)}
    assert fields <= known, fields - known


def test_what_changes_no_result():
    def kernel(x_ref, o_ref, buffer, barrier, meeting):
        plgpu.griddepcontrol_wait()
        plgpu.async_prefetch(x_ref)
        plgpu.copy_gmem_to_smem(
            x_ref, buffer, barrier, oob_mode=plgpu.OOBFillMode.UNDEFINED
        )
        plgpu.barrier_wait(barrier)
        plgpu.barrier_arrive_and_wait(meeting)
        o_ref[...] = buffer[...] + 1
        plgpu.griddepcontrol_launch_dependents()

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32)
    got = plgpu.kernel(
        kernel,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[
            plgpu.SMEM(x.shape, x.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
    )(x)
    np.testing.assert_array_equal(got, x + 1)


def test_a_loop_over_tiles_of_a_grid():
    def kernel(o_ref):
        @plgpu.nd_loop(
            (4, 6), collective_axes="block", tiling=(2, 3), init_carry=jnp.int32(0)
        )
        def _(info, carry):
            i, j = info.index
            o_ref[i, j] = carry
            return carry + 1

    got = plgpu.kernel(
        kernel,
        jax.ShapeDtypeStruct((4, 6), jnp.int32),
        grid=(1,),
        grid_names=("block",),
    )()
    np.testing.assert_array_equal(got[:2, :3], np.arange(6).reshape(2, 3))
    assert sorted(np.ravel(got)) == list(range(24))
