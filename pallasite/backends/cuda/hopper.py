"""The instructions of Hopper GPUs as functions of CUDA C++: barriers, copies, matmuls.

Texts only; `explicit.py` calls them. Functions are named by what they do; each body has
the instruction.
"""

BARRIERS: dict[str, str] = {
    "shared_address": (
        "DEVICE u32 shared_address(const void* p) "
        "{ return (u32)__cvta_generic_to_shared(p); }\n"
    ),
    "barrier_init": (
        "DEVICE void barrier_init(u32 at, u32 arrivals) {\n"
        '  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"'
        ' :: "r"(at), "r"(arrivals));\n}\n'
    ),
    "barrier_end": (
        "DEVICE void barrier_end(u32 at) {\n"
        '  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(at));\n}\n'
    ),
    "barriers_made": (
        "DEVICE void barriers_made() {\n"
        '  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");\n'
        # A fence of all memory would wait for everything stored so far.
        '  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n}\n'
    ),
    "barrier_expect": (
        "DEVICE void barrier_expect(u32 at, u32 bytes) {\n"
        '  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"'
        ' :: "r"(at), "r"(bytes) : "memory");\n}\n'
    ),
    "barrier_expect_for": (
        "DEVICE void barrier_expect_for(u32 at, u32 bytes, u32 arrivals) {\n"
        '  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"'
        ' :: "r"(at), "r"(bytes) : "memory");\n'
        '  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;"'
        ' :: "r"(at), "r"(arrivals) : "memory");\n}\n'
    ),
    "barrier_arrive": (
        "DEVICE void barrier_arrive(u32 at) {\n"
        '  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"'
        ' :: "r"(at) : "memory");\n}\n'
    ),
    "barrier_wait": (
        "DEVICE void barrier_wait(u32 at, u32 parity) {\n"
        '  asm volatile("{\\n.reg .pred p;\\nAGAIN:\\n"\n'
        '    "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n"\n'
        '    "@p bra DONE;\\nbra AGAIN;\\nDONE:\\n}"'
        ' :: "r"(at), "r"(parity) : "memory");\n}\n'
    ),
    "barrier_test": (
        "DEVICE int barrier_test(u32 at, u32 parity) {\n"
        "  int is_over;\n"
        '  asm volatile("{\\n.reg .pred p;\\n"\n'
        '    "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\\n"\n'
        '    "selp.s32 %0, 1, 0, p;\\n}"'
        ' : "=r"(is_over) : "r"(at), "r"(parity) : "memory");\n'
        "  return is_over;\n}\n"
    ),
    "meet": (
        "DEVICE void meet(int id, int threads) {\n"
        '  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");\n}\n'
    ),
    "pass_by": (
        "DEVICE void pass_by(int id, int threads) {\n"
        '  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");\n}\n'
    ),
    # Elects one thread of a warp; all of its threads must call this together.
    "elected": (
        "DEVICE bool elected() {\n  u32 is;\n"
        '  asm volatile("{\\n.reg .pred p;\\nelect.sync _|p, 0xffffffff;\\n"\n'
        '    "selp.u32 %0, 1, 0, p;\\n}" : "=r"(is));\n  return is;\n}\n'
    ),
    "fewer_registers": (
        "template <int N> DEVICE void fewer_registers() "
        '{ asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }\n'
    ),
    "more_registers": (
        "template <int N> DEVICE void more_registers() "
        '{ asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }\n'
    ),
    "products_left": (
        "template <int N> DEVICE void products_left() {\n"
        '  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");\n}\n'
    ),
    "products_start": (
        "DEVICE void products_start() "
        '{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }\n'
    ),
    "products_together": (
        "DEVICE void products_together() "
        '{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }\n'
    ),
    # Code after this point may not use values from before it.
    "settled": (
        "template <int N> DEVICE void settled(float (&x)[N]) "
        '{ EACH(N) asm volatile("" : "+f"(x[i]) :: "memory"); }\n'
        "template <int N> DEVICE void settled(int (&x)[N]) "
        '{ EACH(N) asm volatile("" : "+r"(x[i]) :: "memory"); }\n'
    ),
    # Rows of SWIZZLE bytes: k-major panels have rows along the other dimension; other
    # panels have rows along k and are `apart` bytes apart.
    "operand": (
        "template <int SWIZZLE = 128> DEVICE u64 operand(u32 at, u32 apart) {\n"
        "  return (u64)((at & 0x3ffff) >> 4) | (u64)(apart >> 4) << 16"
        " | (u64)(8 * SWIZZLE >> 4) << 32\n"
        "    | (SWIZZLE == 128 ? 1ull : SWIZZLE == 64 ? 2ull : 3ull) << 62;\n}\n"
    ),
}

# --- tensor maps of arrays, built in the kernel ---


def _field(name: str, bits: int, value: str, index: str = "") -> str:
    at = f"tensormap.replace.tile.{name}.shared::cta.b1024.b{bits} [%0]"
    return f'asm volatile("{at}, {index}{value};"'


MAPS: dict[str, str] = {
    "map_array": (
        "template <int RANK, int TYPE, int SWIZZLE> "
        "DEVICE void map_array(u32 at, const void* p) {\n"
        f'  {_field("global_address", 64, "%1")} :: "r"(at), "l"(p));\n'
        f'  {_field("rank", 32, "%1")} :: "r"(at), "n"(RANK - 1));\n'
        f'  {_field("elemtype", 32, "%1")} :: "r"(at), "n"(TYPE));\n'
        f'  {_field("interleave_layout", 32, "0")} :: "r"(at));\n'
        f'  {_field("swizzle_mode", 32, "%1")} :: "r"(at), "n"(SWIZZLE));\n'
        f'  {_field("fill_mode", 32, "0")} :: "r"(at));\n}}\n'
    ),
    "map_dim": (
        "template <int N> DEVICE void map_dim(u32 at, u32 size, u32 box) {\n"
        f'  {_field("box_dim", 32, "%2", "%1, ")} :: "r"(at), "n"(N), "r"(box));\n'
        f"  {_field('global_dim', 32, '%2', '%1, ')}"
        ' :: "r"(at), "n"(N), "r"(size));\n'
        f"  {_field('element_stride', 32, '%2', '%1, ')}"
        ' :: "r"(at), "n"(N), "r"(1));\n}\n'
    ),
    "map_stride": (
        "template <int N> DEVICE void map_stride(u32 at, u64 bytes) {\n"
        f"  {_field('global_stride', 64, '%2', '%1, ')}"
        ' :: "r"(at), "n"(N), "l"(bytes));\n}\n'
    ),
    "map_publish": (
        "DEVICE void map_publish(u32 at, void* to) {\n"
        '  asm volatile("tensormap.cp_fenceproxy.global.shared::cta'
        '.tensormap::generic.release.cta.sync.aligned [%0], [%1], 128;"'
        ' :: "l"(to), "r"(at) : "memory");\n}\n'
    ),
    "map_seen": (
        "DEVICE void map_seen(const void* map) {\n"
        '  asm volatile("fence.proxy.tensormap::generic.acquire.cta [%0], 128;"'
        ' :: "l"(map) : "memory");\n}\n'
    ),
}
ELEMENT_CODES = {"f16": 6, "f32": 7, "bf16": 10, "i8": 0, "f8e4m3fn": 0, "f8e5m2": 0}
ELEMENT_CODES |= {
    "u8": 0,
    "bool": 0,
    "i16": 1,
    "u16": 1,
    "u32": 2,
    "i32": 3,
    "tf32": 11,
}


def coordinates(rank: int, first: int) -> tuple[str, str, str]:
    """The start of a box: as parameters, as operands from `first` on, as arguments."""
    names = [f"c{n}" for n in range(rank)]
    return (
        ", ".join(f"int {name}" for name in names),
        ", ".join(f"%{first + n}" for n in range(rank)),
        ", ".join(f'"r"({name})' for name in names),
    )


def copy_in(rank: int) -> str:
    """A copy of a box of an array of some rank into shared memory."""
    numbers, places, given = coordinates(rank, 3)
    return (
        f"DEVICE void copy_in_{rank}(u32 to, const void* map, u32 barrier, {numbers}) "
        "{\n"
        f'  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile'
        f'.mbarrier::complete_tx::bytes [%0], [%1, {{{places}}}], [%2];"\n'
        f'    :: "r"(to), "l"(map), "r"(barrier), {given} : "memory");\n}}\n'
    )


def copy_out(rank: int) -> str:
    """A copy from shared memory to a box of an array, clipped to the array."""
    numbers, places, given = coordinates(rank, 2)
    return (
        f"DEVICE void copy_out_{rank}(const void* map, u32 from, {numbers}) {{\n"
        f'  asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.tile'
        f'.bulk_group [%0, {{{places}}}], [%1];"\n'
        f'    :: "l"(map), "r"(from), {given} : "memory");\n}}\n'
    )


def copy_to_blocks(rank: int) -> str:
    """A multicast copy: to that offset in each thread block whose bit is set."""
    numbers, places, given = coordinates(rank, 4)
    return (
        f"DEVICE void copy_to_blocks_{rank}(u32 to, const void* map, u32 barrier, "
        f"u32 blocks, {numbers}) {{\n"
        f'  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile'
        ".mbarrier::complete_tx::bytes.multicast::cluster"
        f' [%0], [%1, {{{places}}}], [%2], %3;"\n'
        f'    :: "r"(to), "l"(map), "r"(barrier), "h"((u16)blocks), {given}'
        ' : "memory");\n}\n'
    )


CLUSTERS: dict[str, str] = {
    # An arrival at the barrier at that offset in another thread block. It orders the
    # warp's reads of shared memory, but its writes only after a fence, which takes as
    # long as a matmul.
    "arrive_at": (
        "DEVICE void arrive_at(u32 barrier, u32 block) {\n"
        '  asm volatile("{\\n.reg .b32 there;\\n"\n'
        '    "mapa.shared::cluster.u32 there, %0, %1;\\n"\n'
        '    "mbarrier.arrive.shared::cluster.b64 _, [there];\\n}"\n'
        '    :: "r"(barrier), "r"(block) : "memory");\n}\n'
    ),
    "writes_before_arrival": (
        "DEVICE void writes_before_arrival() {\n"
        '  asm volatile("fence.acq_rel.cluster;" ::: "memory");\n}\n'
    ),
    # The same place in another thread block, for ordinary loads and stores.
    "in_block": (
        "template <class T> DEVICE T* in_block(T* at, u32 block) {\n"
        "  u64 there;\n"
        '  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(at), "r"(block));\n'
        "  return (T*)there;\n}\n"
    ),
    "blocks_meet": (
        "DEVICE void blocks_meet() {\n"
        '  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");\n'
        '  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");\n}\n'
    ),
    **{f"copy_to_blocks_{rank}": copy_to_blocks(rank) for rank in range(1, 6)},
}

# Counters in main or shared memory. A wait takes its amount in one step, so that two of
# them never take the same.
SEMAPHORES: dict[str, str] = {
    "main_before_copies": (
        "DEVICE void main_before_copies() "
        '{ asm volatile("fence.proxy.async;" ::: "memory"); }\n'
    ),
    "semaphore_count": (
        "DEVICE int semaphore_count(const int* at) {\n  int n;\n"
        '  asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(n) : "l"(at) : '
        '"memory");\n  return n;\n}\n'
    ),
    "semaphore_signal": (
        "DEVICE void semaphore_signal(int* at, int n) {\n"
        '  asm volatile("red.release.gpu.add.s32 [%0], %1;" :: "l"(at), "r"(n) : '
        '"memory");\n}\n'
    ),
    "semaphore_reach": (
        "DEVICE void semaphore_reach(const int* at, int n) {\n"
        "  while (semaphore_count(at) < n) { }\n"
        "}\n"
    ),
    "semaphore_wait": (
        "DEVICE void semaphore_wait(int* at, int n) {\n"
        "  for (int seen = 0, found;; ) {\n"
        "    while ((seen = semaphore_count(at)) < n) { }\n"
        '    asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], %2, %3;"\n'
        '      : "=r"(found) : "l"(at), "r"(seen), "r"(seen - n) : "memory");\n'
        "    if (found == seen) break;\n  }\n}\n"
    ),
}

PEERS: dict[str, str] = {
    # What `here` is on the device of another row of the table of addresses.
    "on_device": (
        "template <class T> DEVICE T* on_device(T* here, const u64* own, "
        "const u64* there, int n) {\n"
        "  return (T*)((const char*)here + (i64)(there[n] - own[n]));\n}\n"
    ),
}

COPIES = {
    **{f"copy_in_{rank}": copy_in(rank) for rank in range(1, 6)},
    **{f"copy_out_{rank}": copy_out(rank) for rank in range(1, 6)},
    # Contiguous bytes, a multiple of 16.
    "copy_line": (
        "DEVICE void copy_line(u32 to, const void* from, u32 bytes, u32 barrier) {\n"
        '  asm volatile("cp.async.bulk.shared::cluster.global'
        '.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"\n'
        '    :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");\n}\n'
    ),
    # The same, but only into the L2 cache.
    "prefetch": (
        "DEVICE void prefetch(const void* from, u32 bytes) {\n"
        '  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"'
        ' :: "l"(from), "r"(bytes));\n}\n'
    ),
    # Commits the copies out since the last call as a group.
    "copies_together": (
        "DEVICE void copies_together() "
        '{ asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }\n'
    ),
    # Waits until at most N groups of copies out are reading shared memory, or pending.
    "copies_reading": (
        "template <int N> DEVICE void copies_reading() {\n"
        '  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(N) : "memory");\n}\n'
    ),
    "copies_left": (
        "template <int N> DEVICE void copies_left() {\n"
        '  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : "memory");\n}\n'
    ),
    "stores_before_copies": (
        "DEVICE void stores_before_copies() {\n"
        '  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n}\n'
    ),
    # Four 8 x 8 matrices of 16-bit elements, each in the accumulator layout. Thread n
    # gives the address of row n % 8 of matrix n / 8.
    "put_matrices": (
        "DEVICE void put_matrices(u32 at, const u32* x) {\n"
        '  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 '
        '[%0], {%1, %2, %3, %4};"\n'
        '    :: "r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");\n}\n'
    ),
    "put_vector": (
        "DEVICE void put_vector(u32 at, const u32* x) {\n"
        '  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"'
        ' :: "r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");\n}\n'
    ),
    "put_shared": (
        "DEVICE void put_shared(u32 at, u32 x) {\n"
        '  asm volatile("st.shared.b32 [%0], %1;" :: "r"(at), "r"(x) : "memory");\n}\n'
        "DEVICE void put_shared(u32 at, float x, float y) {\n"
        '  asm volatile("st.shared.v2.f32 [%0], {%1, %2};"'
        ' :: "r"(at), "f"(x), "f"(y) : "memory");\n}\n'
    ),
}

_OPERANDS = {
    "bf16": ("f32.bf16.bf16", 16),
    "f16": ("f32.f16.f16", 16),
    "f8e4m3fn": ("f32.e4m3.e4m3", 32),
    "f8e5m2": ("f32.e5m2.e5m2", 32),
    "f32": ("f32.tf32.tf32", 8),
    "i8": ("s32.s8.s8", 32),
}


def has_product(dtype: str, sums: str) -> bool:
    """Whether there is an instruction for operands and accumulators of these types."""
    return dtype in _OPERANDS and sums == ("i32" if dtype == "i8" else "f32")


def product_name(columns: int, dtype: str, registers: bool, turned: str) -> str:
    """`turned`: a letter per operand that is not stored along k."""
    how = "registers" if registers else "shared"
    return f"product_{columns}_{dtype}_{how}" + (f"_{turned}" if turned else "")


def product(columns: int, dtype: str, registers: bool, turned: str) -> str:
    """A `wgmma` of 64 rows: accumulates into `d`, or overwrites it if `more` is 0."""
    count = columns // 2
    types, depth = _OPERANDS[dtype]
    kind, letter = ("int", "r") if dtype == "i8" else ("float", "f")
    sums = ", ".join(f"%{n}" for n in range(count))
    outs = ", ".join(f'"+{letter}"(d[{n}])' for n in range(count))
    n = count
    if registers:
        params = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more"
        left = f"{{%{n}, %{n + 1}, %{n + 2}, %{n + 3}}}, %{n + 4}"
        ins = '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(more)'
        flag = n + 5
    else:
        params = "u64 a, u64 b, int more"
        left, ins, flag = f"%{n}, %{n + 1}", '"l"(a), "l"(b), "r"(more)', n + 2
    tail = "" if dtype == "i8" else ", 1, 1"
    if dtype in ("bf16", "f16"):
        ways = [int("b" in turned)] if registers else [int(s in turned) for s in "ab"]
        tail += "".join(f", {way}" for way in ways)
    name = product_name(columns, dtype, registers, turned)
    return (
        f"DEVICE void {name}({kind}* d, {params}) {{\n"
        f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{flag}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{types} {{{sums}}}, '
        f'{left}, p{tail};\\n}}"\n'
        f"    : {outs}\n    : {ins});\n}}\n"
    )
