"""The text the TPU backend emits, and what it refuses, word for word."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.backends.base import Compiled, Options, get
from pallasite.backends.tpu.compile import call_config, verify
from pallasite.backends.tpu.emit import emit_module
from pallasite.backends.tpu.fit_windows import CallArrays
from pallasite.errors import PallasError, SpecError, UnsupportedError
from pallasite.ir.nodes import Kernel, Loc
from pallasite.passes.normal.canonicalize import canonicalize
from pallasite.sites import kernels_in
from pallasite.target import TPUS
from tests.backends.tpu.harness import (
    emulated,
    kernel_of,
    mosaic,
    random_arrays,
    simulated,
)
from tests.backends.tpu.kernels import CASES, array
from tests.ir import kernels as by_hand

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["vector_add", "attention_causal"])
def test_text_is_as_before(name):
    path = GOLDEN / f"{name}.mlir"
    text = mosaic(kernel_of(name))
    if not path.exists():  # delete the file to accept a new text
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        pytest.fail(f"wrote {path.name}: read it, then run this again")
    assert text == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_module_verifies(name):
    verify(mosaic(kernel_of(name)))


@pytest.mark.parametrize("make", by_hand.ALL, ids=lambda make: make.__name__)
def test_kernel_built_by_hand_verifies(make):
    verify(mosaic(make()))


def test_debug_puts_the_users_lines_into_the_module():
    text = mosaic(kernel_of("softmax"), debug=True)
    assert 'kernels.py":' in text
    verify(text)
    assert "loc(" not in mosaic(kernel_of("softmax"))


def test_stages_are_named_in_order():
    case = CASES["inner_pipeline"]
    (kernel,) = kernels_in(case.function, *case.shapes)
    # As imported: in normal form its pipeline is the grid.
    stages = Compiled(get("tpu"), canonicalize(kernel), Options(), shared=())
    assert list(stages) == ["scheduled", "mosaic"]
    assert "copy_start" in stages["scheduled"]


def test_jit_lowers_to_the_custom_call():
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    call = pl.pallas_call(double, out_shape=array(8, 128), backend="tpu")
    traced = jax.jit(call).trace(array(8, 128))
    assert "@tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_call_config_carries_what_the_author_said():
    import json

    options = Options(
        compiler_params={"vmem_limit_bytes": 1 << 20, "collective_id": 3},
        cost_estimate={"flops": 7, "transcendentals": 1, "bytes_accessed": 9},
    )
    config = json.loads(call_config(mosaic(kernel_of("vector_add")), options))
    memory = [{"memory_space": 1, "offset": 0, "size": 1 << 20}]
    assert config["scoped_memory_configs"] == memory
    call = config["custom_call_config"]
    assert call["collective_id"] == 3
    assert call["cost_estimate"]["flops"] == 7
    assert call["serialization_format"] == 1
    assert call["needs_layout_passes"] is True


@pytest.mark.parametrize(
    "said, passed", [({}, True), ({"disable_bounds_checks": False}, False)]
)
def test_bounds_are_checked_again_only_where_the_author_says_so(said, passed):
    """What a kernel reads and copies is clamped in its own code."""
    import json

    text = mosaic(kernel_of("vector_add"))
    config = json.loads(call_config(text, Options(compiler_params=said)))
    assert config["custom_call_config"]["disable_bounds_checks"] is passed
    sparse = Options(compiler_params={"kernel_type": "sc_vector_subcore"})
    config = json.loads(call_config(text, sparse))
    assert "disable_bounds_checks" not in config["custom_call_config"]


@pytest.mark.parametrize(
    "given, passed",
    [([True, False], [True, False]), ([True], [True, False]), ([True] * 3, None)],
)
def test_input_fusion_is_allowed_for_the_operands_there_are(given, passed):
    import json

    options = Options(compiler_params={"allow_input_fusion": given})
    made = Compiled(get("tpu"), kernel_of("vector_add"), options)
    config = json.loads(get("tpu").launch(made).config)["custom_call_config"]
    assert config.get("allow_input_fusion") == passed


def test_unknown_compiler_parameter_is_refused():
    options = Options(compiler_params={"num_warps": 4})
    with pytest.raises(SpecError, match="no compiler parameter num_warps"):
        call_config(mosaic(kernel_of("vector_add")), options)


# --- refusals ---


def refusal(kernel: Kernel) -> str:
    with pytest.raises(PallasError) as caught:
        mosaic(kernel)
    text = str(caught.value)
    lines = [line for line in text.splitlines() if not line.startswith("  at ")]
    return "\n".join(lines)


def scheduled(kernel: Kernel) -> str:
    return Compiled(get("tpu"), kernel, Options(), shared=()).scheduled.text


def kernel(function, *shapes) -> Kernel:
    (found,) = kernels_in(function, *shapes)
    return found


@pytest.mark.parametrize(
    ("shape", "block", "dtype", "fits"),
    [
        ((64, 256), (8, 128), jnp.float32, True),
        ((64, 256), (8, 64), jnp.float32, False),
        ((64, 256), (1, 256), jnp.float32, False),
        ((60, 200), (60, 200), jnp.float32, True),
        ((60, 200), (20, 200), jnp.float32, False),
        ((7, 512), (7, 128), jnp.float32, True),
        ((100, 300), (104, 384), jnp.float32, True),
        ((64, 256), (8, 128), jnp.bfloat16, True),
        ((64, 256), (4, 128), jnp.bfloat16, False),
        ((1000,), (1000,), jnp.float32, True),
        ((1024,), (128,), jnp.float32, True),
        ((1024,), (64,), jnp.float32, False),
        ((1024,), (128,), jnp.bfloat16, False),
        ((3, 8, 128), (1, 8, 128), jnp.float32, True),
    ],
)
def test_tiling_rule(shape, block, dtype, fits):
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    out = jax.ShapeDtypeStruct(shape, dtype)
    spec = pl.BlockSpec(block, lambda *ids: ids)
    grid = tuple(pl.cdiv(n, b) for n, b in zip(shape, block, strict=True))
    call = pl.pallas_call(
        copy, out_shape=out, grid=grid, in_specs=[spec], out_specs=spec
    )
    made = kernel(call, out)
    verify(mosaic(made))
    scheduled = Compiled(get("tpu"), made, Options()).scheduled
    assert CallArrays.of(scheduled, made).as_they_are == fits


def test_unsupported_op_is_refused_with_its_line():
    def in_rows(x_ref, o_ref):
        o_ref[...] = x_ref.reshape(8, 128)[...]

    call = pl.pallas_call(in_rows, out_shape=array(8, 128))
    made = kernel(call, array(1024))
    with pytest.raises(UnsupportedError, match="cannot run reshape_view") as e:
        mosaic(made)
    assert e.value.at.file.endswith("test_emit.py")
    assert e.value.fix


def test_load_from_main_memory_is_refused():
    """Rows that may begin in one tile and end in another, of which the last is cut."""

    def direct(starts_ref, x_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(starts_ref[pl.program_id(0)], 3), :]

    spaces = (pl.MemorySpace.SMEM, pl.ANY)
    call = pl.pallas_call(
        direct, out_shape=array(4, 3, 1024, dtype=jnp.bfloat16), grid=4,
        in_specs=[pl.BlockSpec(memory_space=space) for space in spaces],
        out_specs=pl.BlockSpec((None, 3, 1024), lambda i: (i, 0, 0)),
    )  # fmt: skip
    starts, x = array(4, dtype=jnp.int32), array(1027, 1024, dtype=jnp.bfloat16)
    text = refusal(kernel(call, starts, x))
    assert text.startswith("backend 'tpu' cannot run load\n")
    assert "ref<bf16[3,1024] any> is in main memory" in text
    assert "copy it to VMEM first" in text


def test_large_vector_of_scalar_memory_is_refused():
    def whole(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    smem = pl.BlockSpec(memory_space=pl.MemorySpace.SMEM)
    call = pl.pallas_call(whole, out_shape=array(1024), in_specs=[smem])
    text = refusal(kernel(call, array(1024)))
    assert "is accessed one element at a time, here 1024" in text


def test_inner_pipeline_over_the_edge_is_refused():
    from pallasite import tpu as pltpu

    def outer(x_ref, o_ref):
        def step(x_block):
            o_ref[...] = x_block[...]

        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(step, grid=(2,), in_specs=[spec])(x_ref)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(outer, out_shape=array(8, 128), in_specs=[anywhere])
    text = refusal(kernel(call, array(12004, 128)))
    assert "a block of an inner pipeline extends past the edge" in text
    assert "choose a block that divides the array" in text


def test_unaligned_copy_of_narrow_elements_is_refused():
    from pallasite import tpu as pltpu

    def fetch(i_ref, x_ref, o_ref):
        pltpu.sync_copy(x_ref.at[pl.ds(i_ref[0], 8)], o_ref)

    specs = [pl.BlockSpec(memory_space=s) for s in (pltpu.SMEM, pltpu.ANY)]
    out, table = (array(n, 128, dtype=jnp.bfloat16) for n in (8, 64))
    call = pl.pallas_call(fetch, out_shape=out, in_specs=specs)
    text = refusal(kernel(call, array(1, dtype=jnp.int32), table))
    assert "a copy along dimension 0 (rows) starts at an index not known" in text
    assert "fix    if it always is, use pl.multiple_of(i, 16); if not" in text


def test_reshaping_memory_of_one_dimension_is_refused():
    def rows(x_ref, o_ref):
        o_ref[...] = x_ref.reshape(8, 128)[...]

    call = pl.pallas_call(rows, out_shape=array(8, 128))
    text = refusal(kernel(call, array(1024)))
    assert "memory with fewer than two dimensions cannot be reshaped in place" in text
    assert "fix  reshape the loaded value" in text


def test_a_line_is_kept_through_the_stages():
    made = by_hand.vector_add(1024, 64)
    made = made.with_(loc=Loc("user.py", 12, "main"))
    with pytest.raises(SpecError) as caught:
        emit_module(made)
    assert "at       user.py:12 in main" in str(caught.value)


# --- blocks that a grid leaves and enters again ---


def sums(steps: tuple[int, int], body, size: int = 8) -> Kernel:
    """Output blocks along the last axis; `body(first axis, x_ref, o_ref)`."""
    rows, columns = (array(size * n, 128) for n in steps)
    call = pl.pallas_call(
        lambda x_ref, o_ref: body(pl.program_id(0), x_ref, o_ref),
        out_shape=columns,
        grid=steps,
        in_specs=[pl.BlockSpec((size, 128), lambda i, j: (i, 0))],
        out_specs=pl.BlockSpec((size, 128), lambda i, j: (j, 0)),
    )
    return kernel(call, rows)


def add_to_kept(i, x_ref, o_ref):
    @pl.when(i == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...]


def store_once(i, x_ref, o_ref):
    @pl.when(i == 0)
    def _():
        o_ref[...] = x_ref[...]


def store_at_last(i, x_ref, o_ref):
    @pl.when(i == 1)
    def _():
        o_ref[...] = x_ref[...]


def overwrite(i, x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


@pytest.mark.parametrize("body", [add_to_kept, store_once])
def test_a_block_that_has_to_be_kept_is_visited_in_consecutive_steps(body):
    made = sums((2, 3), body, 2048)
    assert "grid=(3, 2)" in scheduled(made)
    (x,) = random_arrays(made)
    (found,), (wanted,) = simulated(made, [x]), emulated(made, [x])
    np.testing.assert_array_equal(found, wanted)
    verify(mosaic(sums((2, 1), body)))


def test_a_block_to_which_one_axis_returns_is_refused():
    def body(x_ref, o_ref):
        o_ref[pl.ds(pl.program_id(0) // 2, 1), :] = x_ref[pl.ds(0, 1), :]

    x = array(4 * 2048, 256)
    call = pl.pallas_call(
        body,
        array(2 * 2048, 256),
        grid=4,
        in_specs=[pl.BlockSpec((2048, 256), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((2048, 256), lambda i: (i % 2, 0)),
    )
    text = refusal(kernel(call, x))
    assert "returns along axis 0" in text
    assert "or visit each block in consecutive steps of axis 0" in text


def test_an_operand_whose_stored_blocks_are_visited_again():
    def body(x_ref, o_ref):
        x_ref[...] += 1
        o_ref[...] = x_ref[...]

    x = array(2 * 2048, 256)
    call = pl.pallas_call(
        body,
        array(2, 2 * 2048, 256),
        grid=(2, 2),
        in_specs=[pl.BlockSpec((2048, 256), lambda k, i: (i, 0))],
        out_specs=pl.BlockSpec((None, 2048, 256), lambda k, i: (k, i, 0)),
    )
    made = kernel(call, x)
    assert "grid=(2, 2)" in scheduled(made)
    (x,) = random_arrays(made)
    (found,), (wanted,) = simulated(made, [x]), emulated(made, [x])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("body", [add_to_kept, store_once])
def test_small_results_are_kept_on_the_chip_instead(body):
    made = sums((2, 3), body)
    (x,) = random_arrays(made)
    (found,), (wanted,) = simulated(made, [x]), emulated(made, [x])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("body", [store_at_last, overwrite])
def test_a_block_that_is_filled_whenever_it_matters_is_not(body):
    made = sums((2, 3), body)
    (x,) = random_arrays(made)
    (found,), (wanted,) = simulated(made, [x]), emulated(made, [x])
    np.testing.assert_array_equal(found, wanted)


# --- tiles and blocks of no elements ---


def test_blocks_of_no_elements_are_refused():
    def copy(x_ref, e_ref, o_ref):
        o_ref[...] = x_ref[...]

    call = pl.pallas_call(copy, out_shape=array(8, 128))
    text = refusal(kernel(call, array(8, 128), array(0, 128)))
    assert "does not support empty arrays" in text and "input 1 ('e_ref')" in text


def test_blocks_of_an_empty_array_are_refused_without_a_block_that_no_spec_may_have():
    def copy(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    spec = pl.BlockSpec((4, 16), lambda i: (i, 0))
    empty = array(0, 16)
    call = pl.pallas_call(copy, empty, grid=(0,), in_specs=[spec], out_specs=spec)
    assert "does not support empty arrays" in refusal(kernel(call, empty))


def test_ops_on_no_elements_are_refused():
    def largest(x_ref, o_ref):
        none = x_ref[...][:0]
        o_ref[...] = x_ref[...] + jnp.sum(none, axis=0)

    call = pl.pallas_call(largest, out_shape=array(8, 128))
    text = refusal(kernel(call, array(8, 128)))
    assert "Mosaic does not support empty vectors" in text


def test_a_copy_of_a_whole_dimension_starts_at_its_beginning():
    """Wherever it says it starts: there is no other place inside."""

    def kernel(start_ref, x_ref, o_ref, semaphore):
        head = pl.ds(start_ref[0] * 8, 8)
        copy = pltpu.make_async_copy(x_ref.at[1, head, :], o_ref, semaphore)
        copy.start()
        copy.wait()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.bfloat16),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )
    start = jax.ShapeDtypeStruct((1,), jnp.int32)
    x = jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16)
    (imported,) = kernels_in(call, start, x)
    text = mosaic(imported)
    verify(text)
    assert "tpu.enqueue_dma" in text and "arith.minsi" not in text


def test_v4_multiplies_bytes_as_floats():
    """Its matrix unit has no products of integers."""

    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.int32)

    square = jax.ShapeDtypeStruct((128, 128), jnp.int8)
    out = jax.ShapeDtypeStruct((128, 128), jnp.int32)
    (imported,) = kernels_in(pl.pallas_call(kernel, out_shape=out), square, square)
    for chip, element in (("v4", "bf16"), ("v5e", "i8")):
        text = mosaic(imported, chip=TPUS[chip])
        (product,) = (line for line in text.splitlines() if "tpu.matmul" in line)
        assert f"vector<128x128x{element}>" in product


@pytest.mark.parametrize("chip", ["v4", "v5e"])
def test_a_column_becomes_a_row_by_what_the_chip_has(chip):
    """Cores of generation 4 do not reorder the rows of a register."""

    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...] * 2).reshape(8)

    call = pl.pallas_call(kernel, jax.ShapeDtypeStruct((8,), jnp.float32))
    (column,) = kernels_in(call, jax.ShapeDtypeStruct((8, 1), jnp.float32))
    made = Compiled(get("tpu"), column, Options(chip=TPUS[chip]))
    assert ("tpu.transpose" in made["mosaic"]) == (chip == "v4")
