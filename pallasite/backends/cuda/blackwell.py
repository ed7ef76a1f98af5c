"""The instructions of Blackwell GPUs as functions of CUDA C++: tensor memory (tcgen05).

Texts only; `tensor_memory.py` calls them. `GROUP` is 2 where a pair of thread blocks
multiplies together; all instructions of a kernel must then say so.
"""

from pallasite.backends.cuda.hopper import coordinates

# Type encodings of an instruction: of its kind, of accumulators, of operands.
KINDS = {
    "f16": ("f16", 1, 0),
    "bf16": ("f16", 1, 1),
    "f32": ("tf32", 1, 2),
    "f8e4m3fn": ("f8f6f4", 1, 0),
    "f8e5m2": ("f8f6f4", 1, 1),
    "i8": ("i8", 2, 1),
}
SCALED = "mxf8f6f4"  # the kind of matmuls with a scale for each 32 elements along k
SUMS = {"i8": "i32"}  # f32 for all other types
COLUMNS = 512  # of tensor memory
LANES = 128


def instruction(
    rows: int, columns: int, dtype: str, turned_left: bool, turned_right: bool
) -> int:
    """What a matmul is told about its operands (PTX, "Instruction descriptor")."""
    _, sums, side = KINDS[dtype]
    number = sums << 4 | side << 7 | side << 10
    number |= turned_left << 15 | turned_right << 16
    return number | (columns >> 3) << 17 | (rows >> 4) << 24


def scaled_instruction(rows: int, columns: int, dtype: str, number: int) -> int:
    """The same with scales that are powers of two: which of the four in a word."""
    _, _, side = KINDS[dtype]
    told = number << 4 | side << 7 | side << 10 | 1 << 23 | number << 29
    return told | (columns >> 3) << 17 | (rows >> 4) << 24


TENSORS: dict[str, str] = {
    "tensor_alloc": (
        "template <int GROUP, int COLUMNS> DEVICE void tensor_alloc(u32 to) {\n"
        '  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32'
        ' [%0], %1;" :: "r"(to), "n"(COLUMNS), "n"(GROUP) : "memory");\n'
        '  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;"'
        ' :: "n"(GROUP));\n}\n'
    ),
    "tensor_free": (
        "template <int GROUP, int COLUMNS> DEVICE void tensor_free(u32 at) {\n"
        '  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;"'
        ' :: "r"(at), "n"(COLUMNS), "n"(GROUP) : "memory");\n}\n'
    ),
    # `threadIdx.x`, read anew: kept through all roles, it would be spilled.
    "this_thread": (
        "DEVICE u32 this_thread() "
        '{ u32 x; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x)); return x; }\n'
    ),
    # Rows of SWIZZLE bytes, as in `operand`; version 1 of such descriptors.
    "tensor_operand": (
        "template <int SWIZZLE> DEVICE u64 tensor_operand(u32 at, u32 apart) {\n"
        "  return (u64)((at & 0x3ffff) >> 4) | (u64)(apart >> 4) << 16"
        " | (u64)(8 * SWIZZLE >> 4) << 32 | 1ull << 46\n"
        "    | (SWIZZLE == 128 ? 2ull : SWIZZLE == 64 ? 4ull : 6ull) << 61;\n}\n"
    ),
    # Eight rows of 16 bytes after each other, without a swizzle.
    "tensor_rows": (
        "DEVICE u64 tensor_rows(u32 at) "
        "{ return (u64)((at & 0x3ffff) >> 4) | (u64)(128 >> 4) << 32 | 1ull << 46; }\n"
    ),
    # 32 rows of 16 bytes to four columns, for each of the four warps.
    "tensor_copy": (
        "DEVICE void tensor_copy(u32 to, u64 from) {\n"
        '  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;"'
        ' :: "r"(to), "l"(from) : "memory");\n}\n'
    ),
    # An arrival when all matmuls that this thread has issued so far have completed.
    "tensor_commit": (
        "template <int GROUP> DEVICE void tensor_commit(u32 barrier) {\n"
        '  asm volatile("tcgen05.commit.cta_group::%1.mbarrier::arrive::one'
        '.shared::cluster.b64 [%0];" :: "r"(barrier), "n"(GROUP) : "memory");\n}\n'
    ),
    "tensor_commit_to": (
        "DEVICE void tensor_commit_to(u32 barrier, u32 blocks) {\n"
        '  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one'
        '.shared::cluster.multicast::cluster.b64 [%0], %1;"'
        ' :: "r"(barrier), "h"((u16)blocks) : "memory");\n}\n'
    ),
    "tensor_stored": (
        "DEVICE void tensor_stored() "
        '{ asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }\n'
    ),
    "tensor_loaded": (
        "DEVICE void tensor_loaded() "
        '{ asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }\n'
    ),
    # Orders the tensor core's accesses with synchronisation between threads.
    "tensor_before": (
        "DEVICE void tensor_before() "
        '{ asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }\n'
    ),
    "tensor_after": (
        "DEVICE void tensor_after() "
        '{ asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }\n'
    ),
    "block_address": (
        "DEVICE u32 block_address(u32 at, u32 block) { u32 r; "
        'asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(block)); '
        "return r; }\n"
    ),
    "barrier_arrive_for": (
        "DEVICE void barrier_arrive_for(u32 at, u32 arrivals) {\n"
        '  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"'
        ' :: "r"(at), "r"(arrivals) : "memory");\n}\n'
    ),
}


def copy_for_first(rank: int) -> str:
    """A copy into shared memory that a barrier of the first thread block counts."""
    numbers, places, given = coordinates(rank, 3)
    return (
        f"DEVICE void copy_for_first_{rank}(u32 to, const void* map, u32 barrier, "
        f"{numbers}) {{\n"
        f'  asm volatile("cp.async.bulk.tensor.{rank}d.cta_group::2.shared::cluster'
        f'.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {{{places}}}], [%2];"\n'
        f'    :: "r"(to), "l"(map), "r"(barrier), {given} : "memory");\n}}\n'
    )


TENSORS |= {f"copy_for_first_{rank}": copy_for_first(rank) for rank in range(1, 6)}


def product_name(kind: str, group: int, in_tensor_memory: bool) -> str:
    how = "tensor" if in_tensor_memory else "shared"
    return f"tensor_product_{kind}_{group}_{how}"


def product(kind: str, group: int, in_tensor_memory: bool) -> str:
    """A `tcgen05.mma`: accumulates into `d`, or overwrites it where `more` is 0.

    Its operands are `A` and `B` further than `a` and `b`. The sums are made where
    they are used: those before a loop would take many registers of one thread.
    """
    name = product_name(kind, group, in_tensor_memory)
    more, scales, given = "", "", ""
    if kind == SCALED:
        more, scales = ", u32 by_a, u32 by_b", ", [%7], [%8]"
        kind, given = f"{kind}.block_scale.scale_vec::1X", ', "r"(by_a), "r"(by_b)'
    left = ("32", "[a]", "r") if in_tensor_memory else ("64", "a", "l")
    return (
        f"template <int A, int B> DEVICE void {name}(u32 d, u{left[0]} a, u64 b, "
        f"u32 how, int more{more}) {{\n"
        '  asm volatile("{\\n.reg .pred p;\\n'
        f'.reg .b{left[0]} a;\\n.reg .b64 b;\\n"\n'
        f'    "setp.ne.b32 p, %4, 0;\\nadd.s{left[0]} a, %1, %5;\\n'
        'add.s64 b, %2, %6;\\n"\n'
        f'    "tcgen05.mma.cta_group::{group}.kind::{kind} [%0], {left[1]}, b, %3'
        f'{scales}, p;\\n}}"\n'
        f'    :: "r"(d), "{left[2]}"(a), "l"(b), "r"(how), "r"(more), "n"(A), "n"(B)'
        f'{given} : "memory");\n}}\n'
    )


def load_name(words: int) -> str:
    return f"tensor_load_{words}"


def load(words: int) -> str:
    """A load of consecutive columns: each thread gets the words of its lane."""
    places = ", ".join(f"%{n}" for n in range(words))
    outs = ", ".join(f'"=r"(x[{n}])' for n in range(words))
    return (
        f"DEVICE void {load_name(words)}(u32* x, u32 at) {{\n"
        f'  asm volatile("tcgen05.ld.sync.aligned.32x32b.x{words}.b32 {{{places}}}, '
        f'[%{words}];\\n"\n    "tcgen05.wait::ld.sync.aligned;"\n'
        f'    : {outs} : "r"(at) : "memory");\n}}\n'
    )


def store_name(words: int) -> str:
    return f"tensor_store_{words}"


def store(words: int) -> str:
    places = ", ".join(f"%{n + 1}" for n in range(words))
    given = ", ".join(f'"r"(x[{n}])' for n in range(words))
    return (
        f"DEVICE void {store_name(words)}(u32 at, const u32* x) {{\n"
        f'  asm volatile("tcgen05.st.sync.aligned.32x32b.x{words}.b32 [%0], '
        f'{{{places}}};"\n    :: "r"(at), {given} : "memory");\n}}\n'
    )
