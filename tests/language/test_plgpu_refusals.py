"""What `plgpu` refuses when a kernel is traced, and bugs that checked mode finds: with
what is wrong, the numbers, the author's line, and a fix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import mosaic_gpu as plgpu
from pallasite.errors import (
    CheckError,
    KernelTypeError,
    PallasError,
    ResourceError,
    SpecError,
    UnsupportedError,
)

F16, BF16, F32, I32 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int32
X = jnp.arange(128, dtype=F32)
WARPGROUPS = dict(num_threads=2, thread_name="wg")


def run(kernel, *args, out=X, scratch=(), **options):
    options.setdefault("interpret", pl.Checked())
    made = plgpu.kernel(kernel, out, scratch_shapes=scratch, **options)
    return made(*(args or (X,)))


def refused(error, what, kernel, *args, **options):
    with pytest.raises(error, match=what) as raised:
        run(kernel, *args, **options)
    assert "fix " in str(raised.value)
    assert "test_plgpu_refusals.py" in str(raised.value)


def copy(x, o):
    o[...] = x[...]


# --- products ---


def product(x, y, o, a, b, sums=F32):
    a[...], b[...] = x[...], y[...]
    plgpu.commit_smem()

    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    o[...] = pl.run_scoped(multiply, plgpu.ACC(o.shape, sums))


@pytest.mark.parametrize(
    "left, right, sums, what",
    [
        (BF16, F16, F32, "different dtypes"),
        (BF16, BF16, I32, "bf16 does not support an accumulator of i32"),
        (jnp.int16, jnp.int16, I32, "wgmma does not support i16"),
        (F32, F32, F16, "f32 does not support an accumulator of f16"),
    ],
)
def test_dtypes_of_products(left, right, sums, what):
    x, y = jnp.ones((8, 8), left), jnp.ones((8, 8), right)
    memory = [plgpu.SMEM((8, 8), left), plgpu.SMEM((8, 8), right)]
    body = functools.partial(product, sums=sums)
    out = jax.ShapeDtypeStruct((8, 8), sums)
    refused(KernelTypeError, what, body, x, y, out=out, scratch=memory)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.int8, F16])
def test_products_that_there_are(dtype):
    x = jnp.ones((8, 8), dtype)
    sums = I32 if dtype is jnp.int8 else F32
    memory = [plgpu.SMEM((8, 8), dtype)] * 2
    out = jax.ShapeDtypeStruct((8, 8), sums)
    body = functools.partial(product, sums=sums)
    assert (run(body, x, x, out=out, scratch=memory) == 8).all()


def test_shapes_of_products():
    x, y = jnp.ones((8, 16), BF16), jnp.ones((8, 8), BF16)
    memory = [plgpu.SMEM(x.shape, BF16), plgpu.SMEM(y.shape, BF16)]
    out = jax.ShapeDtypeStruct((8, 8), F32)
    what = "operands and the accumulator do not match"
    refused(KernelTypeError, what, product, x, y, out=out, scratch=memory)


def test_a_product_has_no_derivative():
    """It would be zero: no rule knows what a wgmma or a barrier does."""
    x = jnp.ones((8, 8), BF16)
    memory = [plgpu.SMEM((8, 8), BF16)] * 2
    out = jax.ShapeDtypeStruct((8, 8), F32)

    def loss(x, interpret):
        return run(product, x, x, out=out, scratch=memory, interpret=interpret).sum()

    for interpret in (True, pl.Checked()):
        with pytest.raises(
            UnsupportedError, match=r"cannot be differentiated[\s\S]*custom_vjp"
        ):
            jax.grad(loss)(x, interpret)
        with pytest.raises(UnsupportedError, match="cannot be differentiated"):
            jax.jvp(lambda x, i=interpret: loss(x, i), (x,), (x,))


# --- memory ---


def test_copies_between_other_memories():
    def to_main_memory(x, o, full):
        plgpu.copy_gmem_to_smem(x, o, full)
        plgpu.barrier_wait(full)

    def from_main_memory(x, o):
        plgpu.copy_smem_to_gmem(x, o)
        plgpu.wait_smem_to_gmem(0)

    what = "to shared memory .* not to main memory"
    refused(KernelTypeError, what, to_main_memory, scratch=[plgpu.Barrier()])
    refused(KernelTypeError, "from shared memory .* not from main", from_main_memory)


@pytest.mark.parametrize(
    "memory, what",
    [
        (plgpu.SMEM((512, 512), F32), "232448 bytes .* needs 1048576"),
        (plgpu.TMEM((128, 1024), F32), "512 columns .* needs 1024"),
    ],
)
def test_more_memory_than_a_chip_has(memory, what):
    refused(ResourceError, what, lambda x, o, s: copy(x, o), scratch=[memory])


@pytest.mark.parametrize(
    "make, what",
    [
        (
            lambda: plgpu.SwizzleTransform(100),
            "a swizzle of 100 bytes is not supported",
        ),
        (
            lambda: plgpu.SMEM((60, 48), BF16, transforms=tiled(8, 64, 128)),
            "a tiling must divide",
        ),
        (
            lambda: plgpu.SMEM((64, 64), BF16, transforms=tiled(8, 32, 128)),
            "tiles with rows of 128 bytes",
        ),
        (lambda: plgpu.Barrier(num_barriers=0), "at least one barrier"),
    ],
)
def test_layouts_of_memory(make, what):
    with pytest.raises(SpecError, match=what):
        make()


def tiled(rows, columns, swizzle):
    return plgpu.TilingTransform((rows, columns)), plgpu.SwizzleTransform(swizzle)


@pytest.mark.parametrize("interpret", [True, pl.Checked()])
def test_a_ref_after_its_scope(interpret):
    leaked = []

    def kernel(x, o):
        def scoped(s):
            s[...] = x[...]
            leaked.append(s)

        pl.run_scoped(scoped, plgpu.SMEM((128,), F32))
        o[...] = leaked[-1][...]

    what = "after its lifetime"
    refused(KernelTypeError, what, kernel, interpret=interpret)


def test_scoped_memory_is_a_warpgroups_own_unless_it_is_collective():
    def kernel(axes, x, o):
        wg = lax.axis_index("wg")

        def scoped(s):
            s[...] = x[...] * (1 + wg)
            o[wg] = s[...]

        pl.run_scoped(scoped, plgpu.SMEM((128,), F32), collective_axes=axes)

    out = jax.ShapeDtypeStruct((2, 128), F32)
    own = functools.partial(kernel, ())
    np.testing.assert_array_equal(
        run(own, out=out, **WARPGROUPS), jnp.stack([X, 2 * X])
    )
    with pytest.raises(CheckError, match="data race"):
        run(functools.partial(kernel, "wg"), out=out, **WARPGROUPS)


def test_two_warpgroups_each_with_a_pipeline():
    def kernel(x, o):
        wg = lax.axis_index("wg")

        def body(indices, x_block, o_block):
            o_block[...] = x_block[...] * (2 + wg)

        block = plgpu.BlockSpec((1, 128), lambda i: (2 * i + wg, 0))
        plgpu.emit_pipeline(
            body, grid=(3,), in_specs=[block], out_specs=[block], max_concurrent_steps=2
        )(x, o)

    x = jnp.arange(6 * 128, dtype=F32).reshape(6, 128)
    scale = 2 + jnp.arange(6)[:, None] % 2
    np.testing.assert_array_equal(run(kernel, x, out=x, **WARPGROUPS), x * scale)


# --- axes, warpgroups, barriers ---


def test_axes():
    def unknown(x, o):
        o[...] = x[...] * lax.axis_index("nope")

    refused(KernelTypeError, "unbound axis name 'nope'", unknown)
    same = dict(grid=(2,), grid_names=("g",), num_threads=2, thread_name="g")
    refused(SpecError, "two axes of a kernel have the name 'g'", copy, **same)
    many = dict(num_threads=9, thread_name="wg")
    refused(SpecError, "1 to 8 warpgroups, got 9", copy, **many)


def test_a_barrier_that_nothing_arrives_at():
    def kernel(x, o, full):
        plgpu.barrier_wait(full)
        o[...] = x[...]

    what = "nothing in it arrives at"
    for interpret in (True, pl.Checked()):
        memory = [plgpu.Barrier()]
        refused(KernelTypeError, what, kernel, scratch=memory, interpret=interpret)


def test_phases_that_nobody_waited_for():
    def kernel(x, o, a, b, full):
        plgpu.copy_gmem_to_smem(x, a, full)
        plgpu.copy_gmem_to_smem(x, b, full)
        plgpu.barrier_wait(full)
        o[...] = a[...] + b[...]

    memory = [plgpu.SMEM((128,), F32), plgpu.SMEM((128,), F32), plgpu.Barrier()]
    what = (
        r"completed without a wait[\s\S]*2 completed, 0 waited for[\s\S]*num_arrivals"
    )
    refused(CheckError, what, kernel, scratch=memory)


def test_pallas_call_has_no_warpgroups():
    def kernel(x, o, s, full):
        plgpu.copy_gmem_to_smem(x, s, full)
        o[...] = s[...]

    with pytest.raises(PallasError, match=r"only supported in plgpu.kernel"):
        pl.pallas_call(
            kernel,
            X,
            in_specs=[pl.BlockSpec(memory_space=plgpu.GMEM)],
            scratch_shapes=[plgpu.SMEM((128,), F32), plgpu.Barrier()],
            interpret=pl.Checked(),
        )(X)


def test_blocks_that_write_the_same():
    def kernel(x, o):
        o[...] = x[...] * lax.axis_index("g")

    what = "a concurrent program writes"
    refused(CheckError, what, kernel, grid=(4,), grid_names=("g",))


# --- pipelines ---


def pipeline(body=None, specs=None, **options):
    block = plgpu.BlockSpec((8, 16), lambda i: (i, 0))

    def double(indices, x, o):
        o[...] = x[...] * 2

    def kernel(x, o):
        plgpu.emit_pipeline(
            body or double,
            **{"grid": (4,), "in_specs": [specs or block], "out_specs": [block]}
            | options,
        )(x, o)

    return kernel


def spec(index_map, **options):
    return plgpu.BlockSpec((8, 16), index_map, **options)


@pytest.mark.parametrize(
    "kernel, what",
    [
        (pipeline(specs=spec(lambda i, j: (i, j))), "one index per grid axis: 1 here"),
        (pipeline(specs=spec(lambda i: (i,))), "one index per dimension"),
        (pipeline(lambda x, o: None), "the body takes the indices.*: 3 here"),
        (
            pipeline(specs=spec(lambda i: (i, 0), delay_release=2)),
            "more slots .* than delay_release",
        ),
        (
            pipeline(lambda i, x, o, c: None, init_carry=jnp.int32(0)),
            r"a carry of another type[\s\S]*returned +nothing",
        ),
        (
            pipeline(lambda i, x, o, c: c * 1.5, init_carry=jnp.int32(0)),
            r"a carry of another type[\s\S]*int32[\s\S]*float32",
        ),
    ],
)
def test_pipelines(kernel, what):
    x = jnp.ones((32, 16), F32)
    refused(SpecError, what, kernel, x, out=x)


def test_warpgroups_of_a_pipeline():
    def kernel(x, o):
        plgpu.emit_pipeline_warp_specialized(
            lambda indices, x_block, o_block: None,
            grid=(4,),
            memory_registers=40,
            wg_axis="wg",
            num_compute_wgs=2,
            in_specs=[spec(lambda i: (i, 0))],
            out_specs=[spec(lambda i: (i, 0))],
        )(x, o)

    x = jnp.ones((32, 16), F32)
    what = r"the compute warpgroups[\s\S]*num_threads=3"
    refused(SpecError, what, kernel, x, out=x, **WARPGROUPS)


@pytest.mark.parametrize("interpret", [True, pl.Checked()])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_block_that_several_steps_write(interpret, steps):
    def kernel(x, o):
        def body(indices, x_block, o_block, sums):
            sums = jnp.where(indices[1] == 0, jnp.zeros_like(sums), sums) + x_block[...]
            o_block[...] = sums
            return sums

        plgpu.emit_pipeline(
            body,
            grid=(2, 4),
            in_specs=[plgpu.BlockSpec((8, 16), lambda i, j: (i, j))],
            out_specs=[plgpu.BlockSpec((8, 16), lambda i, j: (i, 0))],
            max_concurrent_steps=steps,
            init_carry=jnp.zeros((8, 16), F32),
        )(x, o)

    x = jnp.arange(16 * 64, dtype=F32).reshape(16, 64)
    out = jax.ShapeDtypeStruct((16, 16), F32)
    got = run(kernel, x, out=out, interpret=interpret)
    np.testing.assert_allclose(got, x.reshape(16, 4, 16).sum(1), rtol=1e-6)


def test_layouts_with_parameters():
    def kernel(x, o):
        layout = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
        o[...] = plgpu.layout_cast(plgpu.load(x, layout=layout) + 1, layout)

    np.testing.assert_array_equal(run(kernel), X + 1)
