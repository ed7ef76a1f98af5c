"""cost: counts of hand-built kernels, against numbers worked out by hand."""

import pytest

from pallasite.ir.build import Builder
from pallasite.ir.nodes import Block, Kernel, Span, Value
from pallasite.ir.text import parse_kernel
from pallasite.ir.types import BF16, BOOL, F32, I32, INDEX, RefType, TileType, scalar
from pallasite.passes.analysis.cost import Cost, cost, most_trips
from tests.ir import kernels

TILE = TileType((8, 128), F32)


def straight(build, *refs: RefType) -> Kernel:
    b = Builder()
    params = [Value(ref) for ref in refs]
    build(b, *params)
    return Kernel("k", tuple(params), b.block(), 1)


ANY = RefType((8, 128), F32, "any")


def test_vector_add():
    assert cost(kernels.vector_add(1024, 128)) == Cost(1024, 0, 3 * 1024 * 4)


def test_narrow_types_move_fewer_bytes():
    assert cost(kernels.vector_add(1024, 128, BF16)).bytes_accessed == 3 * 1024 * 2


def test_matmul_counts_the_grid_and_each_fetch():
    found = cost(kernels.matmul(256, 256, 512, (128, 128, 128)))
    steps, block = 2 * 2 * 4, 128 * 128
    # Each step: a product, its addition, and the comparison that guards the start.
    assert found.flops == steps * (2 * 128 * block + block + 1 + 1)
    # Both inputs move at every step; the output stays along the last axis.
    assert found.bytes_accessed == (2 * steps + 4) * block * 4
    assert found.exact


def test_attention_counts_exponentials():
    found = cost(kernels.flash_attention(256, 256, 64, 128))
    assert found.transcendentals == 4 * (128 * 128 + 128)
    queries, keys = 2 * 128 * 64 * 4, 4 * 128 * 64 * 4
    assert found.bytes_accessed == 2 * queries + 2 * keys


def test_block_is_not_larger_than_its_array():
    assert cost(kernels.vector_add(100, 128)).bytes_accessed == 3 * 100 * 4


def test_main_memory_accesses_count_and_on_chip_ones_do_not():
    def body(b: Builder, x: Value, o: Value):
        (scratch,) = b.emit("alloc", type=RefType((8, 128), F32, "vmem"))
        b.store(scratch, b.load(x))
        index = (Span(0, 4), Span(0, 128))
        b.store(o, b.load(scratch, index), index)

    assert cost(straight(body, ANY, ANY)) == Cost(0, 0, 1024 * 4 + 512 * 4)


def test_async_copy_counts_each_main_memory_end():
    vmem = RefType((8, 128), F32, "vmem")

    def body(b: Builder, x: Value, o: Value):
        (scratch,) = b.emit("alloc", type=vmem)
        (sem,) = b.emit("alloc", type=RefType((), I32, "dma_sem"))
        b.emit("copy_start", x, scratch, sem, priority=0)
        b.emit("copy_wait", x, scratch, sem)
        b.emit("copy_start", x, o, sem, priority=0)
        b.emit("copy_wait", x, o, sem)

    assert cost(straight(body, ANY, ANY)).bytes_accessed == 3 * 4096


def test_prefetched_operand_counts_once():
    table = RefType((16,), I32, "smem")
    assert cost(straight(lambda b, t, o: None, table, ANY)) == Cost(0, 0, 64)


def loop(b: Builder, limit: Value, x: Value) -> Value:
    i, carried, inner = Value(INDEX), Value(TILE), Builder()
    body = Block((i, carried), yields=(inner.exp(carried),), ops=tuple(inner.ops))
    return b.emit("for", b.index(2), limit, b.index(3), x, regions=(body,))[0]


def test_static_loop_multiplies():
    def body(b: Builder, x: Value, o: Value):
        b.store(o, loop(b, b.index(12), b.load(x)))  # 2, 5, 8, 11

    assert cost(straight(body, ANY, ANY)) == Cost(0, 4 * 1024, 8192)


def test_dynamic_loop_counts_once_and_says_so():
    def body(b: Builder, n: Value, x: Value, o: Value):
        b.store(o, loop(b, b.load(n), b.load(x)))

    found = cost(straight(body, RefType((), I32, "smem"), ANY, ANY))
    assert found == Cost(0, 1024, 8192 + 4, exact=False)


def test_a_loop_up_to_a_number_of_the_grid_counts_as_the_longest():
    kernel = parse_kernel("""
        kernel @k(%x: ref<f32[8,128] any>, %o: ref<f32[40,128] any>) outputs 1 {
          pipeline %x, %o {grid=(5,), semantics=("arbitrary",),
              windows=(in[8, 128], out[8, 128])}
            map (%i: i32) { %z: i32 = constant {value=0} yield %z, %z }
            map (%j: i32) { %u: i32 = constant {value=0} yield %j, %u }
            body (%p: i32, %xb: ref<f32[8,128] block>, %ob: ref<f32[8,128] block>) {
              %zero: i32 = constant {value=0}
              %one: i32 = constant {value=1}
              %n: i32 = add %p, %one
              %a: f32[8,128] = load %xb[:, :]
              %b: f32[8,128] = for %zero, %n, %one, %a
                body (%k: i32, %c: f32[8,128]) {
                  %d: f32[8,128] = exp %c
                  yield %d
                }
              store %ob[:, :] = %b
            }
        }
    """)
    assert cost(kernel).transcendentals == 5 * 1024
    assert cost(kernel, most_trips(kernel)).transcendentals == 5 * 5 * 1024


def test_a_loop_up_to_what_data_says_has_no_most():
    def body(b: Builder, n: Value, x: Value, o: Value):
        b.store(o, loop(b, b.load(n), b.load(x)))

    assert not most_trips(straight(body, RefType((), I32, "smem"), ANY, ANY))


def test_while_loop_is_not_exact():
    def body(b: Builder, x: Value, o: Value):
        carried, test, inner = Value(TILE), Builder(), Builder()
        go_on = test.constant(True, scalar(BOOL))
        inner_carried = Value(TILE)
        regions = (
            test.block([carried], [go_on]),
            inner.block([inner_carried], [inner_carried]),
        )
        b.store(o, b.emit("while", b.load(x), regions=regions)[0])

    assert not cost(straight(body, ANY, ANY)).exact


def test_branches_count_the_worst():
    def body(b: Builder, x: Value, o: Value):
        value = b.load(x)
        left, right = Builder(), Builder()
        regions = (
            left.block(yields=[left.exp(value)]),
            right.block(yields=[right.mul(right.add(value, value), value)]),
        )
        b.store(o, b.emit("cond", b.index(1), regions=regions)[0])

    assert cost(straight(body, ANY, ANY)) == Cost(2048, 1024, 8192)


def test_dynamic_grid_counts_once():
    kernel = kernels.vector_add(1024, 128)
    (pipeline,) = kernel.body.ops
    b = Builder()
    size = b.index(4)
    attrs = {**pipeline.attrs, "grid": (None,)}
    dynamic = pipeline.with_(operands=(size, *pipeline.operands), attrs=attrs)
    found = cost(kernel.with_(body=Block((), (*b.ops, dynamic))))
    assert found == Cost(128, 0, 3 * 512, exact=False)


@pytest.mark.parametrize(
    ("name", "attrs", "flops"),
    [
        ("reduce", {"kind": "sum", "axes": (1,)}, 1024),
        ("scan", {"kind": "sum", "axis": 0, "reverse": False}, 1024),
        ("transpose", {"perm": (1, 0)}, 0),
        ("sort", {"axis": 1, "num_keys": 1, "stable": True}, 7 * 1024),
    ],
)
def test_tile_ops(name: str, attrs: dict, flops: int):
    def body(b: Builder, x: Value, o: Value):
        b.emit(name, b.load(x), **attrs)

    assert cost(straight(body, ANY, ANY)).flops == flops
