"""Kernels that a TPU cannot run, or that are written to break a compiler.

All of them can be traced. `CASES` names each; a case is a function of no arguments that
gives a function to compile and its operands.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite import triton as plt

S = jax.ShapeDtypeStruct
F32, I32, BF16 = jnp.float32, jnp.int32, jnp.bfloat16
X = S((16, 128), F32)

Case = Callable[[], tuple[Any, ...]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def over(kernel, *operands, out=X, **options) -> tuple[Any, ...]:
    operands = operands or (X,)
    return pl.pallas_call(kernel, out_shape=out, **options), *operands


def store(o_ref, value) -> None:
    o_ref[...] = value


# --- more memory than there is ---


@case
def block_larger_than_vmem():
    x = S((8192, 8192), F32)
    return over(
        lambda x_ref, o_ref: store(o_ref, x_ref[...] / x_ref[...].sum()), x, out=x
    )


@case
def scratch_larger_than_vmem():
    def kernel(x_ref, o_ref, big_ref):
        big_ref[0:16, 0:128] = x_ref[...]
        o_ref[...] = big_ref[0:16, 0:128]

    return over(kernel, scratch_shapes=[pltpu.VMEM((1 << 14, 1 << 12), F32)])


@case
def scoped_memory_larger_than_vmem():
    def kernel(x_ref, o_ref):
        def body(big_ref):
            big_ref[0:16, 0:128] = x_ref[...]
            o_ref[...] = big_ref[0:16, 0:128]

        pl.run_scoped(body, pltpu.VMEM((1 << 14, 1 << 12), F32))

    return over(kernel)


@case
def scalar_table_larger_than_smem():
    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + table_ref[pl.program_id(0)]

    table = S((1 << 20,), F32)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=2,
        in_specs=[pl.BlockSpec((8, 128), lambda i, t: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, t: (i, 0)),
    )
    return over(kernel, table, X, grid_spec=spec)


@case
def scalar_scratch_larger_than_smem():
    def kernel(x_ref, o_ref, table_ref):
        table_ref[0] = 1
        o_ref[...] = x_ref[...] * table_ref[0].astype(F32)

    return over(kernel, scratch_shapes=[pltpu.SMEM((1 << 20,), I32)])


@case
def large_array_accessed_directly():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[pl.program_id(0)]

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return over(
        kernel,
        S((1 << 12, 16, 128), F32),
        grid=4,
        in_specs=[anywhere],
        out_specs=pl.BlockSpec((16, 128), lambda i: (0, 0)),
    )


@case
def large_array_accessed_where_data_say():
    def kernel(x_ref, o_ref):
        row = pltpu.prng_random_bits((1, 1))[0, 0] % 8
        o_ref[...] = x_ref[row]

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return over(
        kernel,
        S((1 << 12, 16, 128), F32),
        grid=4,
        in_specs=[anywhere],
        out_specs=pl.BlockSpec((16, 128), lambda i: (0, 0)),
    )


@case
def narrow_rows_of_a_large_array_with_a_cut_tile():
    def kernel(x_ref, o_ref):
        row = pltpu.prng_random_bits((1, 1))[0, 0] % 8
        o_ref[...] = x_ref[pl.ds(row, 3), :].astype(F32)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return over(
        kernel,
        S(((1 << 14) + 3, 128), BF16),
        grid=4,
        in_specs=[anywhere],
        out_specs=pl.BlockSpec((3, 128), lambda i: (0, 0)),
    )


@case
def a_limit_above_what_the_chip_has():
    params = pltpu.CompilerParams(vmem_limit_bytes=1 << 40)
    return over(lambda x_ref, o_ref: store(o_ref, x_ref[...]), compiler_params=params)


@case
def a_limit_below_the_blocks():
    params = pltpu.CompilerParams(vmem_limit_bytes=1 << 12)
    x = S((1024, 1024), F32)
    kernel = lambda x_ref, o_ref: store(o_ref, x_ref[...] / x_ref[...].sum())
    return over(kernel, x, out=x, compiler_params=params)


@case
def a_negative_limit():
    params = pltpu.CompilerParams(vmem_limit_bytes=-1)
    return over(lambda x_ref, o_ref: store(o_ref, x_ref[...]), compiler_params=params)


# --- types that the chip lacks ---


@case
def doubles():
    x = S((16, 128), jnp.float64)
    return over(lambda x_ref, o_ref: store(o_ref, x_ref[...] * 2), x, out=x)


@case
def long_integers():
    x = S((16, 128), jnp.int64)
    return over(lambda x_ref, o_ref: store(o_ref, x_ref[...] + 1), x, out=x)


@case
def doubles_inside():
    def kernel(x_ref, o_ref):
        o_ref[...] = (x_ref[...].astype(jnp.float64) / 3).astype(F32)

    return over(kernel)


@case
def long_integers_inside():
    def kernel(x_ref, o_ref):
        wide = x_ref[...].astype(jnp.int64) << 40
        o_ref[...] = (wide >> 40).astype(F32)

    return over(kernel)


@case
def doubles_in_scratch():
    def kernel(x_ref, o_ref, wide_ref):
        wide_ref[...] = x_ref[...].astype(jnp.float64)
        o_ref[...] = wide_ref[pl.ds(0, 16), :].astype(F32) + wide_ref[0, 0].astype(F32)

    return over(kernel, scratch_shapes=[pltpu.VMEM((16, 128), jnp.float64)])


@case
def a_loop_that_carries_doubles():
    def kernel(x_ref, o_ref):
        body = lambda i, t: t + jnp.float64(1)
        o_ref[...] = x_ref[...] + lax.fori_loop(0, 4, body, jnp.float64(0)).astype(F32)

    return over(kernel)


# --- what belongs to other chips ---


@case
def assembly_of_another_chip():
    def kernel(x_ref, o_ref):
        (o_ref[...],) = plt.elementwise_inline_asm(
            "add.f32 $0, $1, $1;",
            args=[x_ref[...]],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[X],
        )

    return over(kernel)


@case
def a_backend_of_another_chip():
    return over(lambda x_ref, o_ref: store(o_ref, x_ref[...]), backend="triton")


# --- copies ---


def copying(slice_of, wait: bool = True, space=pl.ANY):
    """A kernel that copies a part of an array in main memory."""

    def kernel(x_ref, o_ref, buffer_ref, sem):
        copy = pltpu.make_async_copy(slice_of(x_ref), buffer_ref, sem)
        copy.start()
        if wait:
            copy.wait()
        o_ref[...] = buffer_ref[...]

    return kernel


@case
def a_copy_of_narrow_rows():
    kernel = copying(lambda x_ref: x_ref.at[:, pl.ds(0, 100)])
    return over(
        kernel,
        S((16, 256), F32),
        out=S((16, 100), F32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((16, 100), F32), pltpu.SemaphoreType.DMA],
    )


@case
def a_copy_that_begins_inside_a_tile():
    kernel = copying(lambda x_ref: x_ref.at[pl.ds(3, 8), :])
    return over(
        kernel,
        S((64, 128), F32),
        out=S((8, 128), F32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), F32), pltpu.SemaphoreType.DMA],
    )


@case
def a_copy_from_an_unknown_lane():
    def kernel(n_ref, x_ref, o_ref, buffer_ref, sem):
        part = x_ref.at[:, pl.ds(n_ref[0], 128)]
        pltpu.make_async_copy(part, buffer_ref, sem).start()
        pltpu.make_async_copy(part, buffer_ref, sem).wait()
        o_ref[...] = buffer_ref[...]

    return over(
        kernel,
        S((1,), I32),
        S((16, 512), F32),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        scratch_shapes=[pltpu.VMEM((16, 128), F32), pltpu.SemaphoreType.DMA],
    )


@case
def a_copy_of_one_bf16_row():
    def kernel(n_ref, x_ref, o_ref, buffer_ref, sem):
        part = x_ref.at[pl.ds(n_ref[0], 1), :]
        pltpu.make_async_copy(part, buffer_ref, sem).start()
        pltpu.make_async_copy(part, buffer_ref, sem).wait()
        o_ref[...] = buffer_ref[...]

    return over(
        kernel,
        S((1,), I32),
        S((64, 128), BF16),
        out=S((1, 128), BF16),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        scratch_shapes=[pltpu.VMEM((1, 128), BF16), pltpu.SemaphoreType.DMA],
    )


@case
def a_copy_between_types():
    def kernel(x_ref, o_ref, buffer_ref, sem):
        pltpu.make_async_copy(x_ref, buffer_ref, sem).start()
        o_ref[...] = buffer_ref[...].astype(F32)

    return over(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((16, 128), BF16), pltpu.SemaphoreType.DMA],
    )


# --- views ---


@case
def a_view_of_scratch_in_another_shape():
    def kernel(x_ref, o_ref, s_ref):
        s_ref.reshape(16, 128)[...] = x_ref[...]
        o_ref[...] = s_ref[...].reshape(16, 128)

    return over(kernel, scratch_shapes=[pltpu.VMEM((2048,), F32)])


@case
def a_view_in_a_narrower_type():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref.bitcast(jnp.int8)[0:16].astype(F32)

    return over(kernel)


@case
def a_transposed_view():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref.T[...].T

    return over(kernel)


# --- grids ---


@case
def semantics_that_do_not_exist():
    params = pltpu.CompilerParams(dimension_semantics=("sideways",))
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return over(
        lambda x_ref, o_ref: store(o_ref, x_ref[...]),
        grid=2,
        in_specs=[rows],
        out_specs=rows,
        compiler_params=params,
    )


@case
def more_semantics_than_axes():
    params = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"))
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return over(
        lambda x_ref, o_ref: store(o_ref, x_ref[...]),
        grid=2,
        in_specs=[rows],
        out_specs=rows,
        compiler_params=params,
    )


@case
def cores_that_the_chip_lacks():
    params = pltpu.CompilerParams(dimension_semantics=("core_parallel",))
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return over(
        lambda x_ref, o_ref: store(o_ref, x_ref[...]),
        S((128, 128), F32),
        out=S((128, 128), F32),
        grid=16,
        in_specs=[rows],
        out_specs=rows,
        compiler_params=params,
    )


@case
def a_grid_past_32_bits():
    rows = pl.BlockSpec((8, 128), lambda i, j: (0, 0))
    return over(
        lambda x_ref, o_ref: store(o_ref, x_ref[...]),
        grid=(1 << 20, 1 << 20),
        in_specs=[rows],
        out_specs=rows,
    )


@case
def a_field_of_settings_that_does_not_exist():
    return over(
        lambda x_ref, o_ref: store(o_ref, x_ref[...]),
        compiler_params={"mosaic": {"no_such_field": 1}},
    )


@case
def an_inner_pipeline_over_the_edge():
    def kernel(x_ref, o_ref):
        def body(a_ref, b_ref):
            b_ref[...] = a_ref[...] + 1

        part = pl.BlockSpec((48, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(body, grid=(22,), in_specs=[part], out_specs=[part])(
            x_ref, o_ref
        )

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    x = S((1037, 8192), F32)
    return over(kernel, x, out=x, in_specs=[anywhere], out_specs=anywhere)


@case
def two_inner_pipelines_over_the_edge():
    def kernel(x_ref, o_ref):
        def body(a_ref, b_ref):
            b_ref[...] = a_ref[...] + 1

        part = pl.BlockSpec((48, 128), lambda i: (i, 0))
        run = pltpu.emit_pipeline(body, grid=(22,), in_specs=[part], out_specs=[part])
        run(x_ref, o_ref)
        run(x_ref, o_ref)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    x = S((1037, 8192), F32)
    return over(kernel, x, out=x, in_specs=[anywhere], out_specs=anywhere)


@case
def a_filled_result_read_past_the_end():
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] + jnp.sum(o_ref[...])

    rows = pl.BlockSpec((6, 100), lambda i, j: (i, 0), fill=0)
    x = S((33, 100), F32)
    return over(kernel, x, out=x, grid=(6, 2), in_specs=[rows], out_specs=rows)


# --- operations ---


@case
def a_product_of_doubles():
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(
            x_ref[...], y_ref[...], preferred_element_type=jnp.float64
        ).astype(F32)

    return over(kernel, S((16, 128), F32), S((128, 128), F32))


@case
def a_sort():
    return over(lambda x_ref, o_ref: store(o_ref, jnp.sort(x_ref[...], axis=-1)))


@case
def a_print_of_a_double():
    def kernel(x_ref, o_ref):
        pl.debug_print("{}", x_ref[0, 0].astype(jnp.float64))
        o_ref[...] = x_ref[...]

    return over(kernel)


@case
def atomics_of_doubles():
    def kernel(x_ref, o_ref):
        pl.atomic_add(o_ref, (0, 0), x_ref[0, 0])

    x = S((16, 128), jnp.float64)
    return over(kernel, x, out=x)


@case
def a_loop_without_an_end():
    def kernel(x_ref, o_ref):
        o_ref[...] = lax.while_loop(lambda v: True, lambda v: v + 1, x_ref[...])

    return over(kernel)


@case
def a_body_with_very_much_code():
    def kernel(x_ref, o_ref):
        total = x_ref[...]
        for n in range(400):
            total = jnp.sin(total) * n
        o_ref[...] = total

    return over(kernel)


@case
def no_operands_and_an_empty_grid():
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return (
        lambda: pl.pallas_call(
            lambda o_ref: store(o_ref, jnp.ones_like(o_ref)),
            out_shape=X,
            grid=0,
            out_specs=rows,
        )(),
    )


@case
def a_result_without_elements():
    return over(
        lambda x_ref, o_ref: store(o_ref, x_ref[...]),
        S((0, 128), F32),
        out=S((0, 128), F32),
    )


@case
def a_name_that_is_no_name():
    named = pl.pallas_call(
        lambda x_ref, o_ref: store(o_ref, x_ref[...]),
        out_shape=X,
        name='"quoted"\n} func.func @main() { // \\ \x00',
    )
    return named, X


@case
def an_operand_is_written():
    def kernel(x_ref, o_ref):
        x_ref[...] = jnp.zeros_like(x_ref)
        o_ref[...] = x_ref[...]

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return over(kernel, in_specs=[anywhere])


@case
def complex_numbers():
    x = S((16, 128), jnp.complex64)
    return over(lambda x_ref, o_ref: store(o_ref, x_ref[...] * 2), x, out=x)


@case
def a_fourier_transform():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.abs(jnp.fft.fft(x_ref[...]))

    return over(kernel)


@case
def a_convolution():
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = lax.conv(x_ref[...], w_ref[...], (1, 1), "SAME")

    x, w = S((1, 8, 16, 128), F32), S((8, 8, 3, 3), F32)
    return over(kernel, x, w, out=x)


@case
def a_map_that_reads_an_array():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    table = jnp.array([1, 0])
    rows = pl.BlockSpec((8, 128), lambda i: (table[i], 0))
    out = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return over(kernel, grid=2, in_specs=[rows], out_specs=out)


@case
def a_scalar_block_larger_than_smem():
    def kernel(t_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + t_ref[0, 0]

    table = pl.BlockSpec((1024, 1024), lambda i: (i, 0), memory_space=pltpu.SMEM)
    rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
    x = S((2048, 1024), F32)
    return over(kernel, x, X, grid=2, in_specs=[table, rows], out_specs=rows)


@case
def more_buffers_than_there_is_room_for():
    rows = pl.BlockSpec((256, 1024), lambda i: (i, 0), pipeline_mode=pl.Buffered(200))
    out = pl.BlockSpec((256, 1024), lambda i: (i, 0))
    x = S((2048, 1024), F32)
    kernel = lambda x_ref, o_ref: store(o_ref, x_ref[...])
    return over(kernel, x, out=x, grid=8, in_specs=[rows], out_specs=out)


@case
def aliases_of_other_shapes():
    kernel = lambda x_ref, o_ref: store(o_ref, x_ref[0:8])
    return over(kernel, out=S((8, 128), F32), input_output_aliases={0: 0})


@case
def two_results_in_one_operand():
    def kernel(x_ref, a_ref, b_ref):
        a_ref[...] = b_ref[...] = x_ref[...]

    return over(kernel, out=(X, X), input_output_aliases={0: 0, 1: 0})


@case
def a_callback_to_the_host():
    def kernel(x_ref, o_ref):
        o_ref[...] = jax.pure_callback(lambda v: v, X, x_ref[...])

    return over(kernel)


@case
def a_kernel_in_a_kernel():
    inner = pl.pallas_call(lambda x_ref, o_ref: store(o_ref, x_ref[...]), out_shape=X)
    return over(lambda x_ref, o_ref: store(o_ref, inner(x_ref[...])))


@case
def an_index_past_the_end():
    return over(lambda x_ref, o_ref: store(o_ref, x_ref[pl.ds(8, 16), :]))
