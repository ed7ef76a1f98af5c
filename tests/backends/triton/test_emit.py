"""What the Triton backend writes: golden text, launch numbers, refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite as pl
from pallasite.errors import UnsupportedError
from pallasite.ir.nodes import Loc
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import BF16, BOOL, DTYPES, F32, F64, I32, U8, TileType
from pallasite.sites import kernels_in
from tests.backends.triton.harness import compiled, simulated, whole_kernel

VECTOR_ADD = """
kernel @add(%x: ref<f32[{n}] any>, %y: ref<f32[{n}] any>, %o: ref<f32[{n}] any>) outputs 1 {{
  pipeline %x, %y, %o {{grid=({programs},), windows=(in[{block}], in[{block}], out[{block}]), semantics=("arbitrary",)}}
    map (%i: i32) {{ yield %i }}
    map (%i_1: i32) {{ yield %i_1 }}
    map (%i_2: i32) {{ yield %i_2 }}
    body (%i_3: i32, %xb: ref<f32[{block}] block>, %yb: ref<f32[{block}] block>, %ob: ref<f32[{block}] block>) {{
      %a: f32[{block}] = load %xb[:]
      %b: f32[{block}] = load %yb[:]
      %c: f32[{block}] = add %a, %b
      store %ob[:] = %c
    }}
}}
"""  # noqa: E501


def vector_add(n: int, block: int):
    return parse_kernel(VECTOR_ADD.format(n=n, block=block, programs=-(-n // block)))


def test_vector_add_is_this_text():
    text, launch = compiled(vector_add(512, 128))
    pointer = "!tt.ptr<f32> {tt.divisibility = 16 : i32}"
    positions = "tt.make_range {end = 128 : i32, start = 0 : i32}"
    params = ", ".join(f"%arg{n}: {pointer}" for n in range(3))
    assert text == "\n".join(
        [
            "module {",
            f"  tt.func public @add({params}) attributes {{noinline = false}} {{",
            "    %0 = tt.get_program_id x : i32",
            "    %1 = arith.constant 128 : i32",
            "    %2 = arith.muli %0, %1 : i32",
            f"    %3 = {positions} : tensor<128xi32>",
            "    %4 = tt.addptr %arg0, %2 : !tt.ptr<f32>, i32",
            "    %5 = tt.splat %4 : !tt.ptr<f32> -> tensor<128x!tt.ptr<f32>>",
            "    %6 = tt.addptr %5, %3 : tensor<128x!tt.ptr<f32>>, tensor<128xi32>",
            "    %7 = tt.load %6 : tensor<128x!tt.ptr<f32>>",
            "    %8 = tt.addptr %arg1, %2 : !tt.ptr<f32>, i32",
            "    %9 = tt.splat %8 : !tt.ptr<f32> -> tensor<128x!tt.ptr<f32>>",
            "    %10 = tt.addptr %9, %3 : tensor<128x!tt.ptr<f32>>, tensor<128xi32>",
            "    %11 = tt.load %10 : tensor<128x!tt.ptr<f32>>",
            "    %12 = arith.addf %7, %11 : tensor<128xf32>",
            "    %13 = tt.addptr %arg2, %2 : !tt.ptr<f32>, i32",
            "    %14 = tt.splat %13 : !tt.ptr<f32> -> tensor<128x!tt.ptr<f32>>",
            "    %15 = tt.addptr %14, %3 : tensor<128x!tt.ptr<f32>>, tensor<128xi32>",
            "    tt.store %15, %12 : tensor<128x!tt.ptr<f32>>",
            "    tt.return",
            "  }",
            "}",
            "",
        ]
    )
    assert launch.target == "__gpu$xla.gpu.triton"
    assert launch.api_version == 4
    config = dict(launch.config)
    assert config.pop("ir") == text
    assert config == {
        "name": "add",
        "num_stages": 1,
        "num_warps": 1,
        "grid_x": 4,
        "grid_y": 1,
        "grid_z": 1,
        "debug": False,
    }
    assert all(
        config[k].dtype == np.int32 for k in config if k not in ("name", "debug")
    )


@pytest.mark.parametrize(("n", "block"), [(100, 128), (1000, 96), (7, 3), (1, 1)])
def test_vector_add_of_odd_shapes(n: int, block: int):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, n)).astype(np.float32)
    text, _ = compiled(vector_add(n, block))
    assert ("slt" in text) == (n % block != 0 or block & (block - 1) != 0)
    np.testing.assert_array_equal(simulated(vector_add(n, block), [x, y])[0], x + y)


def test_compiler_params_set_warps_and_stages():
    _, launch = compiled(vector_add(512, 128), num_warps=2, num_stages=5)
    assert (launch.config["num_warps"], launch.config["num_stages"]) == (2, 5)


def test_large_products_get_eight_warps():
    tile = TileType((128, 128), BF16)
    dot = dict(contract=((1,), (0,)), batch=((), ()), dtype=F32, precision=None)
    kernel = whole_kernel(
        lambda b, x, y: b.op("dot", x, y, **dot), [tile, tile], tile.with_dtype(F32)
    )
    _, launch = compiled(kernel)
    assert launch.config["num_warps"] == 8


DOTS = {
    "plain": ((16, 32), (32, 64), ((1,), (0,)), ((), ())),
    "odd": ((7, 9), (9, 5), ((1,), (0,)), ((), ())),
    "odd and large": ((50, 70), (70, 90), ((1,), (0,)), ((), ())),
    "shallow": ((64, 3), (3, 64), ((1,), (0,)), ((), ())),
    "one row": ((1, 128), (128, 256), ((1,), (0,)), ((), ())),
    "three rows": ((3, 128), (128, 256), ((1,), (0,)), ((), ())),
    "few columns": ((256, 128), (128, 2), ((1,), (0,)), ((), ())),
    "transposed": ((32, 64), (16, 64), ((1,), (1,)), ((), ())),
    "batch": ((3, 16, 20), (3, 20, 24), ((2,), (1,)), ((0,), (0,))),
    "batch of one": ((1, 16, 32), (1, 32, 16), ((2,), (1,)), ((0,), (0,))),
    "batch of two": ((16, 2, 32), (2, 32, 16), ((2,), (1,)), ((1,), (0,))),
    "two batch dimensions": (
        (2, 5, 17, 16),
        (5, 2, 16, 18),
        ((3,), (2,)),
        ((0, 1), (1, 0)),
    ),
    "many dimensions": ((4, 6, 5), (5, 2, 3), ((2,), (0,)), ((), ())),
    "two contracted": ((8, 4, 16), (4, 16, 32), ((1, 2), (0, 1)), ((), ())),
    "vector": ((40,), (40,), ((0,), (0,)), ((), ())),
}


@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("dtype", [F32, BF16, F64, I32], ids=str)
def test_dot(name: str, dtype):
    lhs, rhs, contract, batch = DOTS[name]
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-4, 5, s).astype(dtype.np) for s in (lhs, rhs))
    out = I32 if dtype is I32 else F64 if dtype is F64 else F32
    attrs = dict(contract=contract, batch=batch, dtype=out, precision=None)
    types = [TileType(lhs, dtype), TileType(rhs, dtype)]
    (free,) = _result(types, attrs)
    kernel = whole_kernel(lambda b, x, y: b.op("dot", x, y, **attrs), types, free)
    (got,) = simulated(kernel, [x, y])
    np.testing.assert_array_equal(got, _dot(x, y, contract, batch))
    text, _ = compiled(kernel)
    operands = re.findall(r"tt.dot .* : tensor<([\dx]*)x\w+> \*", text)
    assert all(sizes.count("x") == 1 for sizes in operands), operands


INTEGERS = [
    ("i32", "i32", "i32"),
    ("u32", "u32", "u32"),
    ("u8", "i8", "i32"),
    ("u8", "u8", "i32"),
    ("i8", "i8", "i16"),
    ("i16", "i16", "i32"),
    ("u16", "i8", "u16"),
    ("i64", "i64", "i64"),
    ("u32", "i8", "i64"),
    ("u4", "u8", "i32"),
]


@pytest.mark.parametrize(("left", "right", "out"), INTEGERS)
def test_large_dots_of_integers_are_of_bytes(left: str, right: str, out: str):
    kinds = [DTYPES[name] for name in (left, right, out)]
    attrs = dict(contract=((1,), (0,)), batch=((), ()), dtype=kinds[2], precision=None)
    types = [TileType((60, 64), kinds[0]), TileType((64, 128), kinds[1])]
    tile = TileType((60, 128), kinds[2])
    kernel = whole_kernel(lambda b, x, y: b.op("dot", x, y, **attrs), types, tile)
    rng = np.random.default_rng(0)
    ends = [[d.limits[0], d.limits[1], 0] for d in kinds[:2]]
    x, y = (
        np.where(
            rng.integers(0, 4, t.shape) == 0,
            rng.choice(np.array(some, dtype=object), t.shape),
            rng.integers(*(max(min(e, 2**62), -(2**62)) for e in some[:2]), t.shape),
        )
        for t, some in zip(types, ends, strict=True)
    )
    text, _ = compiled(kernel)
    assert all("tensor<64x64xi8> *" in s for s in text.splitlines() if "tt.dot" in s)
    got = simulated(kernel, [x.astype(kinds[0].np), y.astype(kinds[1].np)])[0]
    unit = 1 << kinds[2].bits
    want = x.astype(object) @ y.astype(object) % unit
    np.testing.assert_array_equal(got.astype(object) % unit, want)


def _result(types, attrs):
    from pallasite.ir.opdef import table

    return table()["dot"].type_rule(tuple(types), attrs)


def _dot(x, y, contract, batch):
    letters = iter("abcdefgh")
    left = [next(letters) for _ in x.shape]
    right = [next(letters) for _ in y.shape]
    for dims in (contract, batch):
        for a, b in zip(*dims, strict=True):
            right[b] = left[a]
    used = [left[d] for d in batch[0]]
    free = [c for d, c in enumerate(left) if d not in (*contract[0], *batch[0])]
    free += [c for d, c in enumerate(right) if d not in (*contract[1], *batch[1])]
    spec = f"{''.join(left)},{''.join(right)}->{''.join(used + free)}"
    return np.einsum(spec, x.astype(np.float64), y.astype(np.float64))


RESHAPES = [((6, 4), (24,)), ((24,), (2, 12)), ((3, 8), (3, 2, 4)), ((5, 1), (5,))]
RESHAPES += [((7, 3), (3, 7)), ((1,), ()), ((), (1, 1)), ((12, 5), (4, 15))]
RESHAPES += [((1, 3, 0), (0,)), ((0,), (1, 3, 0)), ((0, 2), (3, 0, 5))]


@pytest.mark.parametrize(("old", "new"), RESHAPES)
def test_reshape_across_padding(old, new):
    kernel = whole_kernel(
        lambda b, x: b.op("reshape", x, shape=new),
        [TileType(old, I32)],
        TileType(new, I32),
    )
    x = np.arange(np.prod(old), dtype=np.int32).reshape(old)
    np.testing.assert_array_equal(simulated(kernel, [x])[0], x.reshape(new))


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_reduce_ignores_padding(kind: str, axes):
    shape = (3, 5, 7)
    x = np.random.default_rng(0).uniform(0.5, 1.5, shape).astype(np.float32)
    rest = tuple(n for d, n in enumerate(shape) if d not in axes)
    kernel = whole_kernel(
        lambda b, x: b.op("reduce", x, kind=kind, axes=axes),
        [TileType(shape, F32)],
        TileType(rest, F32),
    )
    want = getattr(np, kind)(x, axis=axes)
    np.testing.assert_allclose(simulated(kernel, [x])[0], want, rtol=1e-5)


def test_refusal_names_op_shapes_line_and_fix():
    def body(builder, x):
        builder.loc = Loc("model.py", 88, "route")
        return builder.op("bitcast", x, dtype=U8)

    tile = TileType((8, 128), BOOL)
    with pytest.raises(UnsupportedError) as error:
        compiled(whole_kernel(body, [tile], TileType((8, 128), U8)))
    assert str(error.value) == "\n".join(
        [
            "backend 'triton' cannot run bitcast on bool[8,128]",
            "  op   %1: u8[8,128] = bitcast %0 {dtype=u8}",
            "  why  a bool has one bit in registers",
            "  at   model.py:88 in route",
            "  fix  convert it with astype",
        ]
    )


def test_block_too_large_for_triton_says_so():
    tile = TileType((1 << 21,), F32)

    def both_ways(b, x):  # cannot be cut
        for reverse in (False, True):
            x = b.op("scan", x, kind="sum", axis=0, reverse=reverse)
        return x

    kernel = whole_kernel(both_ways, [tile], tile)
    with pytest.raises(UnsupportedError, match="Triton's limit is 1048576") as error:
        compiled(kernel)
    assert "use smaller blocks" in str(error.value)


def test_an_operand_that_is_written_is_a_copy():
    kernel = parse_kernel("""
        kernel @k(%n: ref<i32[4] smem>, %o: ref<i32[4] any>) outputs 1 {
          pipeline %o {grid=(2,), semantics=("arbitrary",), windows=(out[4],)}
            map (%i: i32) { %z: i32 = constant {value=0, type=i32[]} yield %z }
            body (%p: i32, %ob: ref<i32[4] block>) {
              store %n[0] = %p
              %t: i32[4] = load %n[:]
              store %ob[:] = %t
            }
        }
    """)
    _, launch = compiled(kernel)
    assert launch.scratch_results == (((4,), "int32"),) and launch.aliases == ((0, 1),)
    given = np.arange(4, 8, dtype=np.int32)
    (result,) = simulated(kernel, [given])
    assert result.tolist() == [1, 5, 6, 7] and given[0] == 4


def test_atomics_on_memory_that_is_accessed_again_are_fenced():
    """Another thread may have the element at the next access."""
    text = """\
kernel @peaks(%x: ref<f32[4] any>, %o: ref<f32[4] any>, %p: ref<f32[4] any>) outputs 2 {
  pipeline %x, %o, %p {grid=(), windows=(in[4], out[4], out[4]), semantics=()}
    map () {
      %i: i32 = constant {value=0}
      yield %i
    }
    map () {
      %j: i32 = constant {value=0}
      yield %j
    }
    map () {
      %k: i32 = constant {value=0}
      yield %k
    }
    body (%xs: ref<f32[4] block>, %os: ref<f32[4] block>, %ps: ref<f32[4] block>) {
      %0: f32[4] = load %xs[:]
      store %os[:] = %0
      %1: f32[4] = atomic_rmw %os[:] = %0 {kind="max"}
      store %ps[:] = %1
    }
}
"""
    ttir, _ = compiled(parse_kernel(text))
    names = [
        "fence" if "gpu.barrier" in line else line.split(" = ")[-1].split()[0]
        for line in ttir.split("\n")
        if "gpu.barrier" in line or "atomic_rmw" in line
    ]
    assert names[2:] == ["fence", "tt.atomic_rmw", "tt.atomic_rmw", "fence"]


@pytest.mark.parametrize("results", (1, 2))
def test_reshapes_keep_unit_dimensions_where_an_if_has_several_results(results: int):
    """XLA moves such reshapes into the `scf.if`, past uses of its other results."""

    def rows(n_ref, x_ref, o_ref):
        x = x_ref[...]
        found = lax.cond(
            n_ref[0] > 0,
            lambda: (x.sum(1, keepdims=True), x.max(1, keepdims=True))[:results],
            lambda: (jnp.zeros((16, 1)),) * results,
        )
        o_ref[...] = (1 - found[0] - found[-1]).reshape(16)

    call = pl.pallas_call(rows, out_shape=jax.ShapeDtypeStruct((16,), jnp.float32))
    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    (kernel,) = kernels_in(call, np.array([1], np.int32), x)
    ttir, _ = compiled(kernel)
    assert "scf.if" in ttir
    assert ("efficient_layout : tensor<16x1x" in ttir) == (results == 2)
    last = x.sum(1) if results == 1 else x.max(1)
    for n, want in ((1, 1 - x.sum(1) - last), (0, np.ones(16))):
        (got,) = simulated(kernel, [np.array([n], np.int32), x])
        np.testing.assert_array_equal(got, want)


def test_the_fill_value_of_a_block_is_viewed_as_its_elements_are():
    kernel = parse_kernel("""
        kernel @k(%x: ref<f32[3] any>, %o: ref<i32[4] any>) outputs 1 {
          pipeline %x, %o {grid=(), semantics=(), windows=(in[4] fill 3.0, out[4])}
            map () { %z: i32 = constant {value=0} yield %z }
            map () { %y: i32 = constant {value=0} yield %y }
            body (%xb: ref<f32[4] block>, %ob: ref<i32[4] block>) {
              %v: ref<i32[4] block> = bitcast_view %xb {dtype=i32}
              %t: i32[4] = load %v[:]
              store %ob[:] = %t
            }
        }
    """)
    (result,) = simulated(kernel, [np.ones(3, np.float32)])
    assert result.view(np.float32).tolist() == [1, 1, 1, 3]


@pytest.mark.parametrize(
    ("width", "starts", "in_vectors"),
    [
        (512, (0, 0, 0), True),
        (512, (0, 64, 128), True),
        (513, (0, 0, 0), False),  # rows start anywhere
        (512, (0, 1, 2), False),  # stencils
        (512, (*range(0, 256, 32), 1), True),  # one read of nine is not worth it
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_threads_take_neighbours_where_vectors_cannot(width, starts, in_vectors, dtype):
    """Otherwise a read that is not aligned takes four times as long."""

    def kernel(x_ref, o_ref):
        o_ref[...] = sum(x_ref[:, pl.ds(s, 256)] for s in starts)

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((32, 256), dtype))
    (lowered,) = kernels_in(call, jax.ShapeDtypeStruct((32, width), dtype))
    text, _ = compiled(lowered)
    assert ("divisibility" in text) == in_vectors
