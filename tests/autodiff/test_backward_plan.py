"""Which kernels have backward kernels, and what those look like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite as pl
from pallasite import tpu as pltpu
from pallasite.autodiff import backward
from pallasite.autodiff.explain_grad import full_plan
from pallasite.errors import NoBackwardKernel, SpecError
from pallasite.ir.nodes import walk
from pallasite.ir.roles import Pipeline
from pallasite.ir.types import F32
from pallasite.ir.verify import verify
from pallasite.passes.analysis.grid import find_pipeline
from pallasite.sites import kernels_in
from pallasite.target import AVX2, GPUS, Host, Machine
from tests.share import chosen
from tests.zoo import all_cases

BY_NAME = {case.name: case for case in all_cases()}
# The kernels of the zoo whose cotangents go through the functional form, and why.
_STORED = "the backward pass needs a value that was stored to a result or an operand"
FUNCTIONAL = {
    "normalise_columns": _STORED,
    "forward_substitution": _STORED,
    "stored_operands": "x_ref is stored to",
    "dma_double_buffer": "a loop or branch reads scratch that the program writes",
    "newton_sqrt": "a while loop has no reverse-mode rule",
    "power_by_squaring": "a while loop has no reverse-mode rule",
    "empty_grid": "the grid is empty",
}


def zoo_kernels(name):
    case = BY_NAME[name]
    return kernels_in(case.run, *case.make_args(np.random.default_rng(0)))


def backward_kernels(name):
    (kernel,) = zoo_kernels(name)
    return [step.kernel for step in full_plan(kernel).steps]


def names_of(kernel):
    return [op.name for op in walk(kernel.body)]


def test_shares_of_a_sum_are_not_rounded():
    """Of bf16 rows that are scaled in each step: a product that is only added up."""

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        x = x_ref[...] * 0.3
        product = jnp.dot(x, y_ref[...], preferred_element_type=jnp.float32)
        o_ref[...] += jnp.sin(product)

    def run(x, y):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((24, 16), jnp.float32),
            grid=(3, 5),
            in_specs=[
                pl.BlockSpec((8, 16), lambda i, j: (i, 0)),
                pl.BlockSpec((16, 16), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((8, 16), lambda i, j: (i, 0)),
        )(x, y)

    x, y = (jnp.ones(shape, jnp.bfloat16) for shape in ((24, 16), (16, 80)))
    (made,) = kernels_in(run, x, y)
    (d_x,) = (s.kernel for s in full_plan(made).steps if "d_x" in s.kernel.name)
    ops = list(walk(d_x.body))
    rounded = [
        op for op in ops if op.name == "cast" and op.result.type.dtype.bits == 16
    ]
    sums = {op.result for op in ops if op.name == "load"}
    shares = [op for op in ops if op.name == "add" and sums & {*op.operands}]
    assert all(op.result.type.dtype == F32 for op in shares) and shares
    makers = {v: op for op in ops for v in op.results}
    (share,) = (v for op in shares for v in op.operands if v not in sums)
    while makers[share].name != "dot":
        assert makers[share] not in rounded
        share = makers[share].operands[0]


def test_a_branch_that_gives_the_share_adds_it():
    """Of rows loaded before a loop whose `lax.cond` skips blocks above the diagonal."""

    def kernel(x_ref, y_ref, o_ref):
        i, x = pl.program_id(0), x_ref[...]

        def visit(j, total):
            return total + jnp.dot(x, y_ref[pl.ds(j * 8, 8), :])

        def body(j, total):
            return jax.lax.cond(j <= i, visit, lambda j, total: total, j, total)

        o_ref[...] = jax.lax.fori_loop(0, 4, body, jnp.zeros((8, 6)))

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((32, 6), jnp.float32),
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 8), lambda i: (i, 0)), pl.BlockSpec((32, 6))],
        out_specs=pl.BlockSpec((8, 6), lambda i: (i, 0)),
    )
    x = jnp.linspace(-1, 1, 256).reshape(32, 8)
    y = jnp.linspace(-2, 1, 192).reshape(32, 6)
    (made,) = kernels_in(call, x, y)
    for step in full_plan(made).steps:
        branches = [op for op in walk(step.kernel.body) if op.name == "cond"]
        assert not any(op.results for op in branches)
    plain = lambda x, y: jnp.einsum(
        "ijbk,jkn->ibn", jnp.where(_below(4), x.reshape(4, 1, 8, 8), 0),
        y.reshape(4, 8, 6),
    ).reshape(32, 6)  # fmt: skip
    for got, want in zip(_gradients(call, x, y), _gradients(plain, x, y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def _below(blocks):
    return jnp.tril(jnp.ones((blocks, blocks), bool))[:, :, None, None]


def _gradients(function, *operands):
    loss = lambda *xs: (function(*xs) ** 2).sum()
    return jax.grad(loss, tuple(range(len(operands))))(*operands)


def test_most_of_the_zoo_has_backward_kernels():
    refused, names = {}, chosen([*BY_NAME])
    for name in names:
        for kernel in zoo_kernels(name):
            if not any(p.ref.dtype.is_float for p in kernel.inputs):
                continue
            try:
                steps = full_plan(kernel).steps
            except NoBackwardKernel as error:
                refused[name] = error.what
                continue
            for step in steps:
                verify(step.kernel)
    assert refused == {n: why for n, why in FUNCTIONAL.items() if n in names}


def test_a_matmul_has_one_dot_per_step_and_operand():
    dx, dy = backward_kernels("matmul_accumulate")
    for kernel in (dx, dy):
        assert names_of(kernel).count("dot") == 1
        assert "transpose" not in names_of(kernel) and "for" not in names_of(kernel)
    # Blocks of dx are chosen by i0 and i2; they are summed along i1, innermost.
    assert "grid=(2, 3, 2)" in dx.text
    assert 'semantics=("parallel", "parallel", "sequential")' in dx.text


@pytest.mark.parametrize("clamped", [False, True])
def test_blocks_that_two_indices_choose_are_not_shown_whole(clamped):
    """Split-k: block `part * 4 + step` of x and y; their cotangents have such blocks"""

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...] @ y_ref[...]

    def block(part, step):
        return jnp.minimum(part * 4 + step, 11) if clamped else part * 4 + step

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((3, 16, 64), jnp.float32),
        grid=(2, 3, 4),
        in_specs=[
            pl.BlockSpec((16, 8), lambda j, part, step: (0, block(part, step))),
            pl.BlockSpec((8, 32), lambda j, part, step: (block(part, step), j)),
        ],
        out_specs=pl.BlockSpec((None, 16, 32), lambda j, part, step: (part, 0, j)),
    )
    x = jax.random.normal(jax.random.key(0), (16, 96))
    y = jax.random.normal(jax.random.key(1), (96, 64))
    (made,) = kernels_in(call, x, y)
    (step,) = full_plan(made).steps
    pipeline = Pipeline.of(find_pipeline(step.kernel))
    assert all(block.ref.shape[-2:] != (96, 64) for block in pipeline.blocks)
    assert {(8, 32), (16, 8)} <= {block.ref.shape for block in pipeline.blocks}
    of_kernel = jax.grad(lambda *xs: (call(*xs).sum(0) ** 2).sum(), (0, 1))(x, y)
    of_jnp = jax.grad(lambda x, y: ((x @ y) ** 2).sum(), (0, 1))(x, y)
    for ours, theirs in zip(of_kernel, of_jnp, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


def test_an_epilogue_runs_once():
    first, *rest = backward_kernels("matmul_bias_gelu")
    assert "tanh" in names_of(first)
    assert all("tanh" not in names_of(kernel) for kernel in rest)


def test_sums_are_in_parts_where_programs_leave_multiprocessors_idle():
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] * w_ref[...]

    block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        grid=(128, 32),
        in_specs=[block, pl.BlockSpec((1, 128), lambda i, j: (0, j))],
        out_specs=block,
    )
    (made,) = kernels_in(call, jnp.ones((1024, 4096)), jnp.ones((1, 4096)))
    cpu = Machine.usual(Host(32, 16, AVX2.features, threads=16))
    parts = {
        machine.name: full_plan(made, machine=machine).steps[-1].parts
        for machine in (cpu, Machine.usual(GPUS["h200"]))
    }
    # 32 programs, each of which sums over all rows: enough for 16 cores.
    assert parts["cpu"] == (1, 1) and max(parts["h200"]) > 1


def test_sums_are_in_parts_of_several_axes(monkeypatch):
    """Also of a result that shares one of the axes with its blocks."""

    def kernel(x_ref, w_ref, v_ref, o_ref):
        o_ref[...] = x_ref[...] * w_ref[...] + v_ref[...]

    def run(x, w, v):
        block = pl.BlockSpec((None, 8, 128), lambda b, j, i: (b, i, j))
        row = pl.BlockSpec((1, 128), lambda b, j, i: (0, j))
        row_of_batch = pl.BlockSpec((None, 1, 128), lambda b, j, i: (b, 0, j))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(3, 2, 64),
            in_specs=[block, row, row_of_batch],
            out_specs=block,
        )(x, w, v)

    rng = np.random.default_rng(0)
    shapes = (3, 512, 256), (1, 256), (3, 1, 256)
    args = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    (made,) = kernels_in(run, *args)
    (step,) = full_plan(made, machine=Machine.usual(GPUS["h200"])).steps
    names = [ref.name for ref in step.results]
    # Three steps along b are too few for a GPU: it shares those along i, too.
    assert dict(zip(names, step.parts, strict=True)) == {
        "d_x_ref": 1,
        "d_v_ref": 32,
        "d_w_ref": 96,
    }
    assert "grid=(2, 3, 32, 2)" in step.kernel.text
    parallel = '"parallel", "parallel", "parallel"'
    assert f'semantics=({parallel}, "sequential")' in step.kernel.text

    monkeypatch.setattr(backward, "chip_for", lambda _: GPUS["h200"])
    gradient = lambda f: jax.grad(lambda *a: jnp.sin(f(*a)).sum(), (0, 1, 2))(*args)
    got, want = gradient(run), gradient(lambda x, w, v: x * w + v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, want)


def test_flash_attention_is_one_kernel_on_two_cores():
    (kernel,) = zoo_kernels("flash_fori_causal")
    machine = Machine.usual(Host(32, 16, AVX2.features, threads=2))
    (step,) = full_plan(kernel, machine=machine).steps
    kernel = step.kernel
    names = names_of(kernel)
    # Forward: scores and output; backward: scores again, then four products.
    assert names.count("dot") == 7 and names.count("for") == 2


def test_explain_grad():
    def scaled(n_ref, x_ref, scale_ref, o_ref):
        o_ref[...] = x_ref[...] * scale_ref[...] + n_ref[0].astype(jnp.float32)

    row = pl.BlockSpec((8, 128), lambda i: (i, 0))
    fixed = pl.BlockSpec((1, 128), lambda i: (0, 0))
    call = pl.pallas_call(
        scaled,
        out_shape=jax.ShapeDtypeStruct((64, 128), jnp.float32),
        grid=(8,),
        in_specs=[pl.BlockSpec((1,), lambda i: (0,)), row, fixed],
        out_specs=row,
    )
    x, scale = jnp.ones((64, 128)), jnp.ones((1, 128))
    report = pl.explain_grad(lambda x, s: jnp.sin(call(jnp.ones(1, int), x, s)))(
        x, scale
    )
    tiers = {row.operand: (row.tier, row.why) for row in report.operands}
    assert tiers == {
        "n_ref": ("none", "i32 has no cotangent"),
        "x_ref": ("kernel", "scaled_d_x_d_scale over i0"),
        "scale_ref": (
            "kernel",
            "scaled_d_x_d_scale over i0, summed along i0 in 8 parts",
        ),
    }
    assert [kernel.name for kernel in report.kernels] == ["scaled_d_x_d_scale"]
    assert str(report).splitlines()[0].split() == ["kernel", "operand", "tier", "why"]


def test_explain_grad_says_why_not():
    def root(x_ref, o_ref):
        halve = lambda x: x / 2
        o_ref[...] = jax.lax.while_loop(lambda x: x.sum() > 1, halve, x_ref[...])

    call = pl.pallas_call(root, out_shape=jax.ShapeDtypeStruct((8,), jnp.float32))
    (row,) = pl.explain_grad(call)(jnp.ones(8)).operands
    assert row.tier == "functional"
    assert "a while loop has no reverse-mode rule" in row.why
    assert "test_backward_plan.py:" in row.why


def test_explain_grad_of_no_kernel():
    with pytest.raises(SpecError, match="'sin' calls no kernel"):
        pl.explain_grad(jnp.sin)(jnp.ones(8))


def test_a_cotangent_stored_once_has_its_operands_type():
    """Sums stay in f32; a block that is stored whole, once, is no sum."""

    def norm_kernel(x_ref, w_ref, o_ref):
        x = x_ref[...].astype(jnp.float32)
        scale = jax.lax.rsqrt((x * x).mean(1, keepdims=True) + 1e-6)
        o_ref[...] = (x * scale * w_ref[...]).astype(o_ref.dtype)

    def norm(x, w):
        row = pl.BlockSpec((1, 256), lambda i: (i, 0))
        return pl.pallas_call(
            norm_kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=x.shape[0],
            in_specs=[row, pl.BlockSpec((1, 256), lambda i: (0, 0))],
            out_specs=row,
        )(x, w)

    x = jnp.ones((8192, 256), jnp.bfloat16)
    w = jnp.ones((1, 256), jnp.bfloat16)
    _, backward = kernels_in(lambda x, w, g: jax.vjp(norm, x, w)[1](g), x, w, x)
    d_x, d_w = (p.ref for p in backward.outputs)
    assert (str(d_x.dtype), str(d_w.dtype)) == ("bf16", "f32")
    assert d_w.shape[0] == 128  # as many parts as a thirty-second of the operands holds


def turned_halves(x_ref, o_ref):
    """Halves of rows, each stored to its own part of the block."""
    o_ref[:, :64], o_ref[:, 64:] = 2 * x_ref[:, 64:], x_ref[:, :64] * x_ref[:, :64]


def in_halves(kernel, x):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(x.shape[0], 8),),
        in_specs=[spec],
        out_specs=spec,
    )(x)


def test_parts_of_a_block_are_stored_without_sums():
    x = jax.random.normal(jax.random.key(0), (20, 128), jnp.bfloat16)
    (kernel,) = kernels_in(lambda x: in_halves(turned_halves, x), x)
    (step,) = full_plan(kernel).steps
    # No copy of the cotangent, no zeros to add to, and the operand's own type.
    names = names_of(step.kernel)
    assert "alloc" not in names and names.count("store") == 2
    assert [p.ref.dtype.name for p in step.kernel.outputs] == ["bf16"]

    def plain(x):
        return jnp.concatenate([2 * x[:, 64:], x[:, :64] * x[:, :64]], axis=1)

    got, want = (
        jax.vjp(f, x)[1](x)[0] for f in (lambda x: in_halves(turned_halves, x), plain)
    )
    np.testing.assert_allclose(*(np.float32(v) for v in (got, want)), rtol=1e-2)


@pytest.mark.parametrize(
    "name", ["overlapping", "twice", "a part only", "every second"]
)
def test_stores_to_parts_have_right_cotangents(name):
    def kernel(x_ref, o_ref):
        if name == "overlapping":
            o_ref[:, :96] = x_ref[:, :96] * 2
            o_ref[:, 32:] = x_ref[:, 32:] * x_ref[:, 32:]
        elif name == "twice":
            o_ref[...] = x_ref[...] * 3
            o_ref[:, :64] = x_ref[:, 64:] * 5 + x_ref[:, :64]
        elif name == "a part only":
            o_ref[...] = jnp.sin(x_ref[:, 17:18]) + jnp.zeros(o_ref.shape)
        else:
            o_ref[:, ::2] = x_ref[:, 1::2] * 2
            o_ref[:, 1::2] = x_ref[:, ::2] * x_ref[:, ::2]

    def run(x, **how):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(3,),
            in_specs=[spec],
            out_specs=spec,
            **how,
        )(x)

    x, g = (jax.random.normal(jax.random.key(n), (24, 128)) for n in range(2))
    got, want = (
        jax.vjp(f, x)[1](g)[0] for f in (run, lambda x: run(x, interpret=True))
    )
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", [lambda t: t, lambda t: pl.ds(t, 1)])
def test_states_of_blocks_of_rows_are_one_parallel_kernel(row, monkeypatch):
    """Sums along both axes of programs are in parts: a loop runs once for all of them,
    whether it takes rows by an integer or by a slice."""

    def kernel(x_ref, a_ref, b_ref, o_ref, h_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            h_ref[...] = jnp.zeros_like(h_ref)

        def step(t, h):
            h = a_ref[...] * h + (x_ref[row(t), :] * b_ref[row(t), :]).reshape(1, 32)
            o_ref[row(t), :] = jnp.sin(h).reshape(o_ref[row(t), :].shape)
            return h

        h_ref[...] = jax.lax.fori_loop(0, 4, step, h_ref[...])

    def run(x, a, b):
        wide = pl.BlockSpec((None, 4, 32), lambda n, j, t: (n, t, j))
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(3, 2, 5),
            in_specs=[
                wide,
                pl.BlockSpec((1, 32), lambda n, j, t: (0, j)),
                pl.BlockSpec((None, 4, 1), lambda n, j, t: (n, t, 0)),
            ],
            out_specs=wide,
            scratch_shapes=[pltpu.VMEM((1, 32), jnp.float32)],
        )(x, a, b)

    def reference(x, a, b):
        values = jnp.moveaxis(x * b, 1, 0)
        step = lambda h, x: (a * h + x, jnp.sin(a * h + x))
        zero = jnp.zeros((3, 64), jnp.float32)
        return jnp.moveaxis(jax.lax.scan(step, zero, values)[1], 0, 1)

    rng = np.random.default_rng(0)
    shapes = (3, 20, 64), (1, 64), (3, 20, 1)
    args = [jnp.asarray(rng.normal(size=s) * 0.5, jnp.float32) for s in shapes]
    monkeypatch.setattr(backward, "chip_for", lambda _: GPUS["h200"])
    (original,) = kernels_in(run, *args)
    (only,) = full_plan(original, machine=Machine.usual(GPUS["h200"])).steps
    assert not only.changing and sorted(only.parts) == [1, 2, 3]
    assert set(Pipeline.of(find_pipeline(only.kernel)).semantics) == {"parallel"}
    gradient = lambda f: jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1, 2)))(*args)
    for got, want in zip(gradient(run), gradient(reference), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
