"""Names that kernels written for TPUs use: emulated, checked and on the CPU."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite import tpu_sc as plsc
from pallasite.errors import CheckError, KernelTypeError, SpecError

S = jax.ShapeDtypeStruct
f32 = jnp.float32
X = np.arange(32, dtype=np.float32).reshape(4, 8)
MODES = (True, False, pl.Checked())


def in_every_mode(kernel, out, *args, **kw):
    """The result of one call, which is the same in each mode."""
    first, *others = [
        np.asarray(pl.pallas_call(kernel, out_shape=out, interpret=mode, **kw)(*args))
        for mode in MODES
    ]
    rounding = 1e-6 if np.issubdtype(first.dtype, np.floating) else 0
    for other in others:
        np.testing.assert_allclose(other, first, rtol=rounding)
    return first


# --- a generator that programs seed ---


def words_kernel(o_ref):
    """Draws before a loop and in it, seeded anew in every other program."""
    program = pl.program_id(0)

    @pl.when(program % 2 == 0)
    def _():
        pltpu.prng_seed(3, program // 2)

    o_ref[0] = pltpu.prng_random_bits((16,))

    def draw(i, carry):
        o_ref[i] = pltpu.prng_random_bits((16,))
        return carry

    lax.fori_loop(1, 4, draw, 0)


def test_a_seeded_generator_goes_on_through_loops_and_programs():
    rows = pl.BlockSpec((4, 16), lambda i: (i, 0))
    words = in_every_mode(words_kernel, S((16, 16), jnp.int32), grid=4, out_specs=rows)
    assert len(np.unique(words)) == words.size


def test_samplers_of_the_generator_show_that_they_take_no_key():
    parameters = inspect.signature(pltpu.stateful_uniform).parameters
    assert "key" not in parameters and "shape" in parameters


def test_one_seed_gives_the_same_numbers_again():
    def kernel(o_ref):
        for n in range(2):
            pltpu.prng_seed(jnp.int32(-5))
            o_ref[n] = pltpu.stateful_uniform((8,), minval=1.0, maxval=2.0)
        o_ref[2] = pltpu.stateful_normal((8,))
        o_ref[3] = pltpu.stateful_bernoulli(0.5, (8,)).astype(f32)

    first, second, normal, coins = in_every_mode(kernel, S((4, 8), f32))
    np.testing.assert_array_equal(first, second)
    assert ((first >= 1) & (first < 2)).all()
    assert (normal < 0).any()
    assert set(coins) == {0.0, 1.0}


def test_seeds_are_integers_and_checked_mode_finds_a_missing_one():
    def floating(o_ref):
        pltpu.prng_seed(0.5)

    def unseeded(o_ref):
        o_ref[...] = pltpu.prng_random_bits((8,))

    out = S((8,), jnp.int32)
    with pytest.raises(KernelTypeError, match="prng_seed takes integers, got float32"):
        pl.pallas_call(floating, out_shape=out)()
    with pytest.raises(CheckError, match="random_state"):
        pl.pallas_call(unseeded, out_shape=out, interpret=pl.Checked())()


# --- keys as operands ---


def test_keys_are_operands_in_blocks_and_indexed():
    keys = jax.random.split(jax.random.key(7), 4).reshape(2, 2)

    def kernel(prefetched_ref, key_ref, o_ref):
        mixed = jax.random.fold_in(key_ref[1], pl.program_id(0))
        o_ref[0] = jax.random.bits(key_ref.at[0][...], (16,))
        o_ref[1] = jax.random.bits(mixed, (16,))
        o_ref[2] = jax.random.bits(prefetched_ref[0, 1], (16,))

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=2,
        in_specs=[pl.BlockSpec((None, 2), lambda i, _: (i, 0))],
        out_specs=pl.BlockSpec((None, 3, 16), lambda i, _: (i, 0, 0)),
    )
    out = S((2, 3, 16), jnp.uint32)
    bits = jax.vmap(lambda key: jax.random.bits(key, (16,)))
    first, second = keys[:, 0], jax.vmap(jax.random.fold_in)(keys[:, 1], jnp.arange(2))
    third = jnp.broadcast_to(keys[0, 1], 2)
    expected = jnp.stack([bits(first), bits(second), bits(third)], axis=1)
    for mode in MODES:
        call = pl.pallas_call(kernel, out, grid_spec=spec, interpret=mode)
        np.testing.assert_array_equal(call(keys, keys), expected)
        if mode is False:  # the batch axis goes around the words
            mapped = jax.vmap(call, (None, 0))(keys, keys[None])
            np.testing.assert_array_equal(mapped[0], expected)


def test_upstream_keys_seed_generators_and_sample_blocks():
    key = pltpu.to_pallas_key(jax.random.key(3, impl="rbg"))
    several = pltpu.to_pallas_key(jax.random.split(jax.random.PRNGKey(0), 3))
    assert several.shape == (3,)

    def kernel(key_ref, o_ref):
        pltpu.prng_seed(key_ref[...])
        o_ref[...] = pltpu.prng_random_bits(o_ref.shape)

    words = in_every_mode(kernel, S((8,), jnp.int32), key)
    assert len(np.unique(words)) == 8

    def sampled(blocks, swapped):
        def kernel(key_ref, o_ref):
            i, j = pl.program_id(0), pl.program_id(1)
            o_ref[...] = pltpu.sample_block(
                jax.random.uniform, key_ref[...], blocks, (2, 4), (8, 16),
                block_index=(j, i) if swapped else None, maxval=3.0,
            )  # fmt: skip

        order = (lambda i, j: (j, i)) if swapped else (lambda i, j: (i, j))
        grid = (8 // blocks[0], 16 // blocks[1])
        return pl.pallas_call(
            kernel, S((8, 16), f32), grid=grid[::-1] if swapped else grid,
            out_specs=pl.BlockSpec(blocks, order),
        )(key)  # fmt: skip

    small = sampled((2, 4), False)
    np.testing.assert_array_equal(sampled((4, 8), True), small)
    assert len(np.unique(small)) == small.size
    assert 1 < small.max() < 3
    with pytest.raises(KernelTypeError, match="not made of whole tiles"):
        pltpu.sample_block(jax.random.uniform, key, (3, 4), (2, 4), (8, 16))


# --- shapes and chips ---


def test_einshape_splits_moves_and_joins():
    def kernel(x_ref, o_ref):
        o_ref[...] = pltpu.einshape("(ab)(cd)->c(ad)b", x_ref[...], a=2, c=4)

    moved = X.reshape(2, 2, 4, 2).transpose(2, 0, 3, 1).reshape(4, 4, 2)
    np.testing.assert_array_equal(in_every_mode(kernel, S((4, 4, 2), f32), X), moved)
    for equation, sizes, problem in [
        ("a(bc)->abc", {}, "Ambiguous split: give sizes of 'bc'"),
        ("a(bc)->abc", {"b": 3}, "Cannot split size 8 by"),
        ("abc->abc", {}, "it has 3 dimensions for 2"),
        ("ab->a", {}, "each letter must stand once"),
    ]:
        with pytest.raises(KernelTypeError, match=problem):
            pltpu.einshape(equation, X, **sizes)


def test_tpu_numbers_are_there_without_a_tpu():
    info = pltpu.get_tpu_info()
    assert (info.num_lanes, info.num_sublanes, info.num_cores) == (128, 8, 1)
    assert info.get_sublane_tiling(jnp.int8) == 32
    seven = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_7X, 1)
    assert seven.generation == 7
    assert not seven.is_lite


CHIPS = ("TPU_V4", "TPU_V5E", "TPU_V5P", "TPU_V6E", "TPU_7X")
MULTIPLIED = "float32 bfloat16 int8 uint8 int4 uint4 float8_e5m2 float8_e4m3fn float16"


@pytest.mark.parametrize("name", CHIPS)
def test_tpu_numbers_are_those_of_jax(name):
    theirs = pytest.importorskip("jax.experimental.pallas.tpu")
    cores = 2 if name in ("TPU_V4", "TPU_V5P") else 1
    for number in {1, cores}:
        chips = [getattr(m.ChipVersion, name) for m in (theirs, pltpu)]
        want = theirs.get_tpu_info_for_chip(chips[0], number)
        info = pltpu.get_tpu_info_for_chip(chips[1], number)
        for field in filter(lambda n: not n.startswith("_"), dir(want)):
            known, ours = getattr(want, field), getattr(info, field)
            if isinstance(known, int):
                assert ours == pytest.approx(known, rel=0.13), field
        for lhs in MULTIPLIED.split():
            for rhs in MULTIPLIED.split():
                both = getattr(jnp, lhs), getattr(jnp, rhs)
                assert info.is_matmul_supported(*both) == want.is_matmul_supported(
                    *both
                ), (lhs, rhs)
        for field in ("is_lite", "supports_megacore"):
            assert getattr(chips[1], field) == getattr(chips[0], field)


def test_a_device_has_no_more_cores_than_the_chip():
    with pytest.raises(SpecError, match="at most 1 TensorCores, not 2"):
        pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 2)


def test_a_mesh_of_subcores_names_its_axes():
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="c", subcore_axis_name="s", num_cores=2, num_subcores=4
    )
    assert (mesh.core_axis_name, mesh.subcore_axis_name) == ("c", "s")
    assert (mesh.num_cores, mesh.num_subcores, mesh.size) == (2, 4, 8)


# --- parts of JAX's own Pallas ---

# Each is a kernel that uses one: by a primitive, in JAX's own code, as an argument.
FOREIGN = {
    "run_scoped": lambda theirs, x_ref, o_ref: theirs.run_scoped(
        lambda memory: None, pltpu.VMEM((8, 128), jnp.float32)
    ),
    "program_id": lambda theirs, x_ref, o_ref: theirs.program_id(0),
    "multiple_of": lambda theirs, x_ref, o_ref: theirs.multiple_of(jnp.int32(8), 8),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_functions_of_jaxs_own_pallas_are_told_as_such(name):
    theirs = pytest.importorskip("jax._src.pallas.primitives")

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)
        FOREIGN[name](theirs, x_ref, o_ref)

    with pytest.raises(KernelTypeError, match=f"{name} is of JAX's own Pallas") as told:
        emulated(kernel, X)
    assert "import it from pallasite" in str(told.value)


def test_keys_and_specs_of_jaxs_own_pallas_are_told_as_such():
    pytest.importorskip("jax._src.pallas.mosaic.random")
    theirs = pytest.importorskip("jax._src.pallas.core")
    key = jax.random.key(0, impl="pallas_tpu")

    def kernel(key_ref, o_ref):
        o_ref[...] = jax.random.uniform(key_ref[...], o_ref.shape)

    with pytest.raises(KernelTypeError, match="make keys with pltpu"):
        emulated(kernel, key)
    for options in (
        dict(in_specs=[theirs.BlockSpec((8, 128), lambda: (0, 0))]),
        dict(grid_spec=theirs.GridSpec(grid=(1,))),
    ):
        with pytest.raises(SpecError, match="import it from pallasite"):
            emulated(kernel, X, **options)


def emulated(kernel, *args, **options):
    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    return pl.pallas_call(kernel, shape, interpret=True, **options)(*args)


# --- cores, memory, words ---


@pytest.mark.parametrize("mode", MODES, ids=["emulated", "cpu", "checked"])
def test_core_map_works_on_the_refs_it_closes_over(mode):
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=2)
    offset = jnp.float32(1)

    @pl.run_state
    def triple(refs):
        x_ref, o_ref = refs

        @pl.core_map(mesh, interpret=mode, scratch_shapes=[pltpu.VMEM((2, 8), f32)])
        def _(buffer_ref):
            mine = pl.ds(2 * lax.axis_index("core"), 2)
            pltpu.sync_copy(x_ref.at[mine], buffer_ref)
            buffer_ref[...] = 3 * buffer_ref[...] + offset
            pltpu.sync_copy(buffer_ref, o_ref.at[mine])

    x, out = triple((X, jnp.zeros_like(X)))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(out, 3 * X + 1)


def test_scoped_memory_as_a_decorator_comes_after_the_arguments():
    def kernel(x_ref, o_ref):
        @pl.with_scoped(pltpu.VMEM((4, 8), f32), other=pltpu.VMEM((8,), f32))
        def negate(source_ref, memory_ref, other, scale=0):
            pltpu.touch(other)
            memory_ref[...] = scale * source_ref[...]
            return memory_ref[...]

        negated = negate(x_ref, scale=-1)
        o_ref[...] = pltpu.reciprocal(negated - 1, approx=True)

    got = in_every_mode(kernel, S((4, 8), f32), X)
    np.testing.assert_allclose(got, 1 / (-X - 1), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES, ids=["emulated", "cpu", "checked"])
def test_kernels_over_cores_take_refs_and_close_over_them(mode):
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)

    @jax.jit
    def run(x):
        o_ref, total_ref = jax.new_ref(jnp.zeros_like(x)), jax.new_ref(jnp.zeros(2))

        @pl.kernel(out_type=S((2,), jnp.int32), mesh=mesh, interpret=mode)
        def negate(x_ref, o_ref, core_ref):
            core = lax.axis_index("core")
            o_ref[core] = -x_ref[core]
            core_ref[core] = core

        @functools.partial(pl.kernel, mesh=mesh, interpret=mode)
        def add_up():
            core = lax.axis_index("core")
            total_ref[core] = jnp.sum(o_ref[core])

        cores = negate(x, o_ref)
        assert add_up() is None
        return o_ref[...], total_ref[...], cores

    negative, totals, cores = run(X[:2])
    np.testing.assert_array_equal(negative, -X[:2])
    np.testing.assert_array_equal(totals, -X[:2].sum(1))
    np.testing.assert_array_equal(cores, [0, 1])


def test_copies_of_a_size_known_at_run_time():
    def kernel(sizes_ref, x_ref, before_ref, o_ref, sem):
        first, count = sizes_ref[0], sizes_ref[1]
        copy = pltpu.make_async_copy(
            x_ref.at[pl.ds(0, count)], o_ref.at[pl.ds(first, count)], sem
        )
        copy.start(priority=1)
        copy.wait()

    whole = pl.BlockSpec(memory_space=pl.ANY)
    args = jnp.array([1, 2]), X, jnp.asarray(-X)
    options = dict(
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), whole, whole],
        out_specs=whole,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases={2: 0},
    )
    got = in_every_mode(kernel, S((4, 8), f32), *args, **options)
    np.testing.assert_array_equal(got, [-X[0], X[0], X[1], -X[3]])

    def two_sizes(sizes_ref, x_ref, before_ref, o_ref, sem):
        part = (pl.ds(0, sizes_ref[0]), pl.ds(1, sizes_ref[1]))
        pltpu.async_copy(x_ref.at[part], o_ref.at[part], sem).wait()

    got = in_every_mode(two_sizes, S((4, 8), f32), *args, **options)
    expected = -X
    expected[:1, 1:3] = X[:1, 1:3]
    np.testing.assert_array_equal(got, expected)

    def one_sided(sizes_ref, x_ref, before_ref, o_ref, sem):
        pltpu.async_copy(x_ref.at[:2], o_ref.at[pl.ds(0, sizes_ref[0])], sem)

    with pytest.raises(
        KernelTypeError, match="only one side of a copy has a dynamic size"
    ):
        in_every_mode(one_sided, S((4, 8), f32), *args, **options)


def test_copies_that_add():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.ones_like(o_ref)
        pltpu.sync_copy(x_ref, o_ref, add=True)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    got = in_every_mode(kernel, S((4, 8), f32), X, in_specs=[whole])
    np.testing.assert_array_equal(got, X + 1)


def test_a_semaphore_can_be_a_result():
    whole = pl.BlockSpec(memory_space=pl.ANY)
    sem_spec = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)

    def begin(x_ref, o_ref, sem):
        pltpu.make_async_copy(x_ref, o_ref, sem).start()

    def end(x_ref, o_ref, sem, same_ref):
        pltpu.make_async_copy(x_ref, o_ref, sem).wait()

    out = S((4, 8), f32)
    started, sem = pl.pallas_call(
        begin,
        out_shape=[out, pltpu.SemaphoreType.DMA],
        in_specs=[whole],
        out_specs=[whole, sem_spec],
    )(X)
    specs = dict(in_specs=[whole, whole, sem_spec], out_specs=whole)
    call = pl.pallas_call(end, out_shape=out, input_output_aliases={1: 0}, **specs)
    np.testing.assert_array_equal(call(X, started, sem), X)


def test_dot_of_transposed_tiles():
    def kernel(x_ref, o_ref):
        x = pl.max_contiguous(x_ref[...], 8)
        o_ref[...] = pl.dot(x, x, trans_b=True, allow_tf32=False)

    np.testing.assert_allclose(in_every_mode(kernel, S((4, 4), f32), X), X @ X.T)


def test_elements_packed_into_words_come_out_again():
    def kernel(x_ref, o_ref):
        parts = [x_ref[n].astype(jnp.int32) - 9 for n in range(4)]
        packed = pltpu.pack_elementwise(parts, packed_dtype=jnp.int8)
        halves = pltpu.pack_elementwise([x_ref[0], x_ref[1]], packed_dtype=jnp.bfloat16)
        assert packed.dtype == halves.dtype == jnp.uint32
        kinds = dict(packed_dtype=jnp.int8, unpacked_dtype=f32)
        for n in range(4):
            o_ref[n] = pltpu.unpack_elementwise(packed, index=n, **kinds)
        o_ref[4] = pltpu.unpack_elementwise(
            halves, index=1, packed_dtype=jnp.bfloat16, unpacked_dtype=f32
        )

    got = in_every_mode(kernel, S((5, 8), f32), X)
    np.testing.assert_array_equal(got, [*(X - 9), X[1]])
    with pytest.raises(KernelTypeError, match="pack 2 arrays together"):
        pltpu.pack_elementwise([jnp.zeros(3)], packed_dtype=jnp.bfloat16)


def test_stochastic_rounding_goes_either_way_and_keeps_what_is_exact():
    value = np.float32(1 + 2**-9)  # a quarter of the way from 1 to the next bfloat16
    bits = jnp.arange(0, 2**16, 16, dtype=jnp.uint32)
    x = jnp.full(bits.shape, value).at[0].set(jnp.inf).at[1].set(2.0)
    got = pltpu.stochastic_round(x, bits, target_dtype=jnp.bfloat16).astype(f32)
    assert got[0] == np.inf
    assert got[1] == 2
    assert set(np.unique(got[2:])) == {1.0, 1 + 2**-7}
    np.testing.assert_allclose((got[2:] > 1).mean(), 0.25, atol=1e-3)


def test_interpret_mode_for_a_block_of_calls():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    call = lambda x: pl.pallas_call(kernel, out_shape=S((4, 8), f32))(x)
    with pltpu.force_tpu_interpret_mode():
        emulated = jax.jit(call).lower(X).as_text()
    assert "custom_call" not in emulated
    assert "custom_call" in jax.jit(lambda x: call(x)).lower(X).as_text()
    seen = []
    params = pltpu.InterpretParams(
        grid_point_recorder=lambda ids, core: seen.append(ids)
    )
    with pltpu.force_tpu_interpret_mode(params):
        np.testing.assert_array_equal(call(X), X + 1)
    assert seen == [()]
    pltpu.set_tpu_interpret_mode(params)
    np.testing.assert_array_equal(call(X), X + 1)
    pltpu.set_tpu_interpret_mode(False)
    np.testing.assert_array_equal(call(X), X + 1)
    assert len(seen) == 2
