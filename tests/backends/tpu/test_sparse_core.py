"""SparseCore kernels as Mosaic."""

import jax
import jax.numpy as jnp
import pytest

import pallasite as pl
from pallasite import config
from pallasite import tpu as pltpu
from pallasite import tpu_sc as plsc
from pallasite.backends.base import Compiled, get
from pallasite.backends.tpu.compile import verify
from pallasite.errors import UnsupportedError
from pallasite.passes.run import run
from pallasite.runtime.aot import Job, compile_all
from pallasite.sites import calls_in
from pallasite.target import TPUS
from tests.language.test_sparse_core import embedding, mesh, segment_sum
from tests.language.test_subcores import counted, shifted

CHIPS = ("v5p", "v6e", "7x")


def array(*shape: int, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def lookup(table, numbers):
    return embedding(table, numbers)


def sums(lanes: int):
    return lambda x, segments: segment_sum(x, segments, 64, lanes)


def vectors(lanes: int):
    """Loads, gathers, additions by index, scans and sums of vectors."""

    def function(x):
        def kernel(x_ref, o_ref, own, total):
            pltpu.sync_copy(x_ref, own)
            places = jax.lax.broadcasted_iota(jnp.int32, (lanes,), 0)

            @plsc.parallel_loop(0, 4 * lanes, step=lanes)
            def _(i):
                part = pl.ds(i, lanes)
                total[part] = jnp.maximum(own[part] * 2.0 + 1.0, 0.0)

            first = plsc.load_gather(total, [places * 2])
            plsc.addupdate_scatter(own, [places], first, mask=places > 2)
            plsc.store_scatter(own, [places + lanes], plsc.cumsum(first))
            own[pl.ds(2 * lanes, lanes)] = jnp.full((lanes,), jnp.sum(first))
            most = jnp.max(first) + jnp.max(places).astype(jnp.float32)
            own[pl.ds(3 * lanes, lanes)] = jnp.full((lanes,), most)
            pltpu.sync_copy(own, o_ref)

        return pl.kernel(
            kernel,
            array(4 * lanes),
            mesh=mesh(1, 1),
            scratch_shapes=[pltpu.VMEM((4 * lanes,), jnp.float32)] * 2,
        )(x)

    return function


def cases(chip: str):
    lanes = TPUS[chip].sparse.lanes
    numbers = array(256, dtype=jnp.int32)
    return {
        "embedding": (lookup, (array(512, 128), numbers)),
        "segment sum": (sums(lanes), (array(256, 128), numbers)),
        "vectors": (vectors(lanes), (array(4 * lanes),)),
        "counted": (lambda: counted(lanes), ()),
        "shared": (shifted(plsc.subcore_barrier, 128), (array(2, 4, 128),)),
    }


def compiled(function, operands, chip: str) -> Compiled:
    with config.override(target=chip):
        (call,) = calls_in(function, *operands)
    options = call.options
    options = type(options)(options.compiler_params, chip=TPUS[chip])
    return Compiled(get("tpu"), run(call.kernel), options, shared=())


@pytest.mark.parametrize("name", cases("v6e"))
@pytest.mark.parametrize("chip", CHIPS)
def test_module_verifies(name, chip):
    text = compiled(*cases(chip)[name], chip)["mosaic"]
    verify(text)
    assert "#tpu.core_type<sc_vector_subcore>" in text
    wanted = {
        "embedding": ["offsets(%own", "tpu.wait_indirect_dma"],
        "segment sum": ["tpu.vector_load_idx", "{add = true}"],
        "vectors": [
            "array<i32: 0>} : vector<",
            "vector_load_idx",
            "vector_store_idx",
            "masked",
            "tpu.scan",
        ],
        "counted": ["tpu.fetch_and_add_sync", "tpu.barrier"],
        "shared": ["tpu.barrier", "#tpu.memory_space<vmem_shared>"],
    }
    assert all(part in text for part in wanted[name])


def test_call_says_which_cores():
    one = compiled(*cases("v6e")["embedding"], "v6e")
    config_text = get("tpu").launch(one).config
    assert '"device_type": "DEVICE_TYPE_SPARSECORE"' in config_text
    assert '"sparse_core_config": {"tiling": "TILING_COMPACT"}' in config_text


def test_chips_without_sparse_cores_are_refused():
    function, operands = cases("v6e")["embedding"]
    (call,) = calls_in(function, *operands)
    options = type(call.options)(call.options.compiler_params, chip=TPUS["v5e"])
    with pytest.raises(UnsupportedError, match="v5e has no SparseCores"):
        Compiled(get("tpu"), run(call.kernel), options, shared=())["mosaic"]


@pytest.mark.parametrize("kind", ["scalar", "vector"])
def test_a_pipeline_on_one_core_is_a_loop(kind: str):
    """A grid has no windows there; one TensorCore would be a grid with them."""
    with config.override(target="tpu:7x"):
        cores = {"num_cores": 1}
        if kind == "scalar":
            one = plsc.ScalarSubcoreMesh(axis_name="c", **cores)
        else:
            cores |= {"num_subcores": 1}
            names = {"core_axis_name": "c", "subcore_axis_name": "s"}
            one = plsc.VectorSubcoreMesh(**names, **cores)
        block = pl.BlockSpec((128,), lambda i: (i,))

        def kernel(x_ref, o_ref):
            def step(xb_ref, ob_ref):
                at = pl.ds(0, 16) if kind == "vector" else 0
                ob_ref[at] = xb_ref[at] + 1

            pltpu.emit_pipeline(step, grid=(4,), in_specs=[block], out_specs=block)(
                x_ref, o_ref
            )

        result = array(512, dtype=jnp.int32)
        call = pl.kernel(kernel, out_shape=result, mesh=one)
        (found,) = calls_in(call, result)
        options = type(found.options)(found.options.compiler_params, chip=TPUS["7x"])
        made = Compiled(get("tpu"), found.kernel, options)
        assert "windows=()" in made.scheduled.text
        assert "scf." in made["mosaic"]


def test_vectors_of_another_length_are_refused():
    function, operands = cases("7x")["vectors"]
    with pytest.raises(UnsupportedError, match="v6e supports only vectors of 8"):
        compiled(function, operands, "v6e")["mosaic"]


def test_what_subcores_lack_is_refused():
    def function(x):
        def kernel(x_ref, o_ref, own):
            pltpu.sync_copy(x_ref, own)
            own[...] = jnp.sort(own[...])
            pltpu.sync_copy(own, o_ref)

        scratch = [pltpu.VMEM((8,), jnp.float32)]
        return pl.kernel(kernel, array(8), mesh=mesh(1, 1), scratch_shapes=scratch)(x)

    with pytest.raises(UnsupportedError, match="'tpu'"):
        compiled(function, (array(8),), "v6e")["mosaic"]


@pytest.mark.tpu
@pytest.mark.parametrize("chip", CHIPS)
def test_sparse_core_kernels_compile(chip):
    jobs = []
    for name, case in cases(chip).items():
        one = compiled(*case, chip)
        jobs.append(Job.of(name, one.kernel, get("tpu").launch(one)))
    results = compile_all(jobs, chip)
    assert {r.name: r.error for r in results if not r.ok} == {}
