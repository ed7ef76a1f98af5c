"""Names of `plgpu` that upstream's users have in their kernels: axes with any names,
meshes, layouts as values, reductions, predicates, atomics, the interpreter's params."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite import tpu as pltpu
from pallasite.errors import CheckError, KernelTypeError, SpecError
from tests.backends.cuda import host

S = jax.ShapeDtypeStruct
f32 = jnp.float32
X = np.random.default_rng(3).normal(size=(16, 24)).astype(np.float32)
needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason="g++, which compiles the emitted text, is missing"
)


class Axis(enum.Enum):
    GRID = 0
    CLUSTER = 1
    THREAD = 2


def on_host(function, args, folder):
    (kernel,) = pl.lower(function)(*args).kernels
    return host.Code(kernel, folder, optimise="-O0")(*args)[0]


# --- axes and meshes ---


def places(names, shared):
    grid, cluster, thread = names

    def kernel(o_ref, barrier):
        plgpu.barrier_arrive_and_wait(barrier)
        i, j, t = (lax.axis_index(name) for name in names)
        o_ref[i, j, t] = 100 * i + 10 * j + t

    return plgpu.kernel(
        kernel,
        out_type=S((3, 2, 2), jnp.int32),
        grid=(3,),
        grid_names=(grid,),
        cluster=(2,),
        cluster_names=(cluster,),
        num_threads=2,
        thread_name=thread,
        scratch_types=[plgpu.ClusterBarrier(collective_axes=shared, num_arrivals=2)],
    )


PLACES = np.arange(3)[:, None, None] * 100 + np.arange(2)[:, None] * 10 + np.arange(2)


@pytest.mark.parametrize(
    "names", [("x", "y", "t"), (0, 1, 2), tuple(Axis), (object(), "", 0.5)]
)
def test_any_hashable_names_an_axis(names):
    np.testing.assert_array_equal(places(names, names[1])(), PLACES)
    np.testing.assert_array_equal(places(names, [names[1]])(), PLACES)


def test_names_of_axes_are_not_in_the_kernel():
    kernel_of = lambda *names: pl.lower(places(names, names[1]))().kernels[0]
    assert str(kernel_of(object(), Axis.GRID, "t")) == str(kernel_of("x", "y", "t"))
    texts = {str(kernel_of("x", "y", name)) for name in (object(), object())}
    assert len(texts) == 1


def test_a_cluster_axis_that_does_not_exist():
    with pytest.raises(KernelTypeError, match=r"7 is not an axis of the cluster"):
        places((0, 1, 2), 7)()


MESH = dict(grid=(2,), grid_names=("g",), num_threads=2, thread_name="t")


def half_rows(x_ref, o_ref, buffer, barrier):
    """Each block copies its rows; each warpgroup writes half of their columns."""
    block, wg = lax.axis_index("g"), lax.axis_index("t")
    rows, columns = pl.ds(block * 8, 8), pl.ds(wg * 12, 12)

    @pl.when(wg == 0)
    def _():
        plgpu.copy_gmem_to_smem(x_ref.at[rows], buffer, barrier)

    plgpu.barrier_wait(barrier)
    o_ref[rows, columns] = buffer[:, columns] * 2


SCRATCH = [plgpu.SMEM((8, 24), f32), plgpu.Barrier()]


@pytest.mark.parametrize("mesh", [plgpu.Mesh, plgpu.GPUMesh])
def test_a_kernel_over_a_mesh(mesh):
    function = pl.kernel(
        half_rows, out_type=S(X.shape, f32), mesh=mesh(**MESH), scratch_types=SCRATCH
    )
    np.testing.assert_array_equal(function(X), X * 2)


@needs_compiler
def test_a_kernel_over_a_mesh_on_the_host(tmp_path):
    mesh = plgpu.Mesh(**MESH)
    function = pl.kernel(
        half_rows, out_type=S(X.shape, f32), mesh=mesh, scratch_types=SCRATCH
    )
    np.testing.assert_array_equal(on_host(function, (X,), tmp_path), X * 2)


def test_code_over_a_mesh():
    mesh = plgpu.Mesh(**MESH, kernel_name="halves")
    assert dict(mesh.shape) == {"g": 2, "t": 2}

    @jax.jit
    def function(x):
        x_ref, o_ref = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))

        @pl.core_map(mesh, scratch_shapes=SCRATCH)
        def _(buffer, barrier):
            half_rows(x_ref, o_ref, buffer, barrier)

        return o_ref[...]

    np.testing.assert_array_equal(function(X), X * 2)


def test_meshes_that_do_not_fit_together():
    with pytest.raises(SpecError, match="grid and grid_names do not have the same"):
        plgpu.Mesh(grid=(2, 2), grid_names=("x",))
    with pytest.raises(SpecError, match="must be given together"):
        plgpu.Mesh(num_threads=2)


# --- reductions, atomics, predicates ---


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
def test_reductions_keep_the_dtype(name, dtype):
    x = jnp.asarray(np.sign(X[:, :23]) if name == "prod" else X[:, :23] * 4, dtype)

    def kernel(x_ref, o_ref):
        o_ref[...] = getattr(plgpu, name)(x_ref[...], axis=1, accumulator_ilp=2)

    got = plgpu.kernel(kernel, out_type=S((16,), dtype))(x)
    want = getattr(jnp, name)(x, axis=1).astype(dtype)
    np.testing.assert_allclose(*map(np.float32, (got, want)), rtol=1e-2)


@needs_compiler
@pytest.mark.parametrize("name", ["sum", "max", "min", "prod"])
def test_reductions_on_the_host(name, tmp_path):
    def kernel(x_ref, o_ref, buffer, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        o_ref[...] = getattr(plgpu, name)(buffer[...], 1)

    x = np.asarray(np.sign(X) if name == "prod" else X * 4, np.int32)
    scratch = [plgpu.SMEM(x.shape, jnp.int32), plgpu.Barrier()]
    function = plgpu.kernel(kernel, out_type=S((16,), jnp.int32), scratch_types=scratch)
    got = on_host(function, (x,), tmp_path)
    np.testing.assert_array_equal(got, getattr(np, name)(x, 1))


def test_small_integers_do_not_grow():
    assert plgpu.sum(jnp.ones((4, 4), jnp.int8), 0).dtype == jnp.int8
    assert plgpu.max(jnp.ones((4, 4)), (0, 1), keepdims=True).shape == (1, 1)
    with pytest.raises(SpecError, match="accumulator_ilp must be a positive integer"):
        plgpu.sum(jnp.ones(3), accumulator_ilp=0)


def test_atomics_as_upstream_spells_them():
    def kernel(x_ref, o_ref):
        plgpu.atomic_add(o_ref.at[0], x_ref[...])
        plgpu.atomic_max(o_ref.at[1], x_ref[...], optimized=False)
        plgpu.atomic_min(o_ref, 2, x_ref[...])

    x = np.arange(-64, 64, dtype=np.int32)
    zeros = np.zeros((3, 128), np.int32)

    def with_zeros(x, zeros):
        mine = lambda x_ref, _, o_ref: kernel(x_ref, o_ref)
        return plgpu.kernel(
            mine, out_type=S(zeros.shape, jnp.int32), input_output_aliases={1: 0}
        )(x, zeros)

    want = np.stack([x, np.maximum(x, 0), np.minimum(x, 0)])
    np.testing.assert_array_equal(with_zeros(x, zeros), want)


def predicated(x_ref, o_ref, buffer, barrier, other):
    """The second block has no copy: it stores its own zeros."""
    first = lax.axis_index("g") == 0
    buffer[...] = jnp.zeros_like(buffer)
    plgpu.async_prefetch(x_ref, predicate=first)
    plgpu.commit_smem()
    plgpu.copy_gmem_to_smem(x_ref, buffer, barrier, predicate=first, oob_mode=None)
    plgpu.barrier_arrive(barrier, predicate=~first)
    plgpu.barrier_wait(barrier)
    plgpu.barrier_arrive(other, predicate=True)
    plgpu.barrier_wait(other)
    o_ref[lax.axis_index("g")] = buffer[...]


PREDICATED = plgpu.kernel(
    predicated,
    out_type=S((2, *X.shape), f32),
    grid=(2,),
    grid_names=("g",),
    scratch_types=[plgpu.SMEM(X.shape, f32), plgpu.Barrier(), plgpu.Barrier()],
)


def test_predicates():
    np.testing.assert_array_equal(PREDICATED(X), np.stack([X, 0 * X]))


@needs_compiler
def test_predicates_on_the_host(tmp_path):
    got = on_host(PREDICATED, (X,), tmp_path)
    np.testing.assert_array_equal(got, np.stack([X, 0 * X]))


# --- work of blocks that have not started ---


def claiming(o_ref, answer, barrier):
    def one(carry):
        (i,), count, _ = carry
        plgpu.try_cluster_cancel(answer.at[0], barrier, collective_axes="t")
        o_ref[i, lax.axis_index("t")] = i + 1
        plgpu.barrier_wait(barrier)
        index, more = plgpu.query_cluster_cancel(answer.at[0], ("g",))
        return index, count + 1, more

    first = (lax.axis_index("g"),), jnp.int32(0), jnp.bool_(True)
    lax.while_loop(lambda carry: carry[2], one, first)


CLAIMING = plgpu.kernel(
    claiming,
    out_type=S((5, 2), jnp.int32),
    grid=(5,),
    grid_names=("g",),
    num_threads=2,
    thread_name="t",
    scratch_types=[plgpu.TryClusterCancelResult(2), plgpu.Barrier(num_arrivals=2)],
)
CLAIMED = np.repeat(np.arange(1, 6)[:, None], 2, axis=1)


def test_every_block_is_claimed_once():
    np.testing.assert_array_equal(CLAIMING(), CLAIMED)
    assert plgpu.TryClusterCancelResult().shape == (16,)


@needs_compiler
def test_every_block_is_claimed_once_on_the_host(tmp_path):
    np.testing.assert_array_equal(on_host(CLAIMING, (), tmp_path), CLAIMED)


def test_an_answer_of_several():
    def kernel(o_ref, answer, barrier):
        plgpu.try_cluster_cancel(answer, barrier)

    scratch = [plgpu.TryClusterCancelResult(2), plgpu.Barrier()]
    with pytest.raises(KernelTypeError, match="has 16 bytes"):
        plgpu.kernel(kernel, S((1,), f32), scratch_shapes=scratch)()


# --- layouts and types as values ---


def test_layouts_are_values():
    tiling = plgpu.Tiling(((64, 8), (16, 8), (8, 8), (1, 2)))
    assert tiling.tile_shape((128, 16))[-2:] == (1, 2)
    tiled = plgpu.Layout.TILED(
        tiling,
        warp_dims=(-7, plgpu.Replicated(4)),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
    assert tiled == plgpu.Layout.TILED(*tiled.args, **tiled.kwargs)
    assert tiled.reduce(0).reduce((1,)).axes == (1,)
    assert plgpu.Layout.MMA_ACC is not plgpu.Layout.MMA_LHS
    assert isinstance(plgpu.TilingTransform((8, 64)), plgpu.Transform)
    assert plgpu.RefType((plgpu.SwizzleTransform(128),)).transforms
    typed = plgpu.ShapeDtypeStruct((64, 8), f32, plgpu.Layout.WGMMA)
    assert typed.layout.reduce(1).layout is plgpu.Layout.WGMMA
    params = plgpu.CompilerParams(approx_math=True).replace(max_concurrent_steps=3)
    assert params.approx_math and isinstance(params, plgpu.GPUCompilerParams)
    assert plgpu.GPUMemorySpace.GMEM is plgpu.GMEM
    block = plgpu.BlockSpec((8, 8), oob_fill_mode=plgpu.OOBFillMode.UNDEFINED)
    assert block.block_shape == (8, 8)
    assert plgpu.TMEM((128, 8), f32, layout=plgpu.TMEMLayout.M64_COLLECTIVE_LAYOUT(8))


@pytest.mark.parametrize("tiles", [((8,), (4, 4)), ((8, 0),), ((),)])
def test_tiles_that_are_none(tiles):
    with pytest.raises(SpecError, match="a tile"):
        plgpu.Tiling(tiles)


def test_a_tile_that_does_not_divide():
    with pytest.raises(SpecError, match=r"the tile \(8, 8\) does not divide \(16, 9\)"):
        plgpu.Tiling(((8, 8),)).tile_shape((16, 9))


def test_a_layout_is_printed_while_the_kernel_is_traced(capsys):
    swizzled = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))

    def kernel(x_ref, o_ref, buffer):
        x = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)
        plgpu.print_layout("x: {}", x)
        plgpu.print_layout("buffer: {}", buffer)
        o_ref[...] = x

    scratch = [plgpu.SMEM((8, 32), f32, transforms=swizzled)]
    plgpu.kernel(kernel, out_type=S(X.shape, f32), scratch_types=scratch)(X)
    printed = capsys.readouterr().out
    assert "x: float32[16, 24]\n" in printed
    assert "buffer: float32[8, 32] in smem, swizzled by 128 bytes\n" in printed


# --- memory ---


def in_turn(x_ref, o_ref, union):
    whole, (left, right) = union
    assert union[1][0] is left
    whole[...] = x_ref[...]
    doubled = whole[...] * 2
    left[...] = doubled[:8]
    right[...] = doubled[8:]
    o_ref[...] = jnp.concatenate([right[...], left[...]])


IN_TURN = plgpu.kernel(
    in_turn,
    out_type=S(X.shape, f32),
    scratch_types=[
        plgpu.RefUnion(plgpu.SMEM(X.shape, f32), [plgpu.SMEM((8, 24), f32)] * 2)
    ],
)


def test_refs_of_a_union_are_used_in_turn():
    np.testing.assert_array_equal(IN_TURN(X), np.roll(X, 8, 0) * 2)


@needs_compiler
def test_refs_of_a_union_on_the_host(tmp_path):
    got = on_host(IN_TURN, (X,), tmp_path)
    np.testing.assert_array_equal(got, np.roll(X, 8, 0) * 2)


def test_a_union_is_in_one_memory_space():
    with pytest.raises(SpecError, match="are in one memory space"):
        plgpu.RefUnion(plgpu.SMEM((8,), f32), plgpu.TMEM((128, 8), f32))


@pytest.mark.parametrize("how", ["max", "min", "absmax", "absmin"])
def test_loads_of_tensor_memory_that_reduce(how):
    def kernel(x_ref, o_ref, rows_ref, tensor):
        plgpu.async_store_tmem(tensor, x_ref[...])
        plgpu.commit_tmem()
        o_ref[...], rows_ref[...] = plgpu.async_load_tmem(tensor, reduce=how)
        plgpu.wait_load_tmem()

    x = np.random.default_rng(1).normal(size=(128, 16)).astype(np.float32)
    got, rows = plgpu.kernel(
        kernel,
        out_type=(S(x.shape, f32), S((128,), f32)),
        scratch_types=[plgpu.TMEM(x.shape, f32)],
    )(x)
    np.testing.assert_array_equal(got, x)
    sizes = np.abs(x) if how.startswith("abs") else x
    np.testing.assert_array_equal(rows, getattr(sizes, how[-3:])(-1))


def test_reductions_that_tensor_memory_lacks():
    with pytest.raises(SpecError, match="cannot reduce by 'sum'"):
        plgpu.async_load_tmem(jnp.ones((4, 4)), reduce="sum")


# --- upstream's interpreter ---


def racing(o_ref):
    o_ref[...] = jnp.full((8,), lax.axis_index("t"))


RACING = plgpu.kernel(
    racing, out_type=S((8,), jnp.int32), num_threads=2, thread_name="t"
)


def test_params_of_upstreams_interpreter():
    finds = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=2)
    with plgpu.force_gpu_interpret_mode(finds), pytest.raises(CheckError, match="race"):
        RACING()
    with plgpu.force_gpu_interpret_mode():
        assert set(np.asarray(RACING())) <= {0, 1}
    plgpu.set_gpu_interpret_mode(finds)
    try:
        with pytest.raises(CheckError):
            RACING()
    finally:
        plgpu.set_gpu_interpret_mode(False)
    with pytest.raises(SpecError, match="InterpretGPUParams does not support this on"):
        plgpu.InterpretGPUParams(on_race="ignore")
    assert isinstance(finds, pltpu.InterpretParams)
