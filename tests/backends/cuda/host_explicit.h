// The explicit level on a CPU: barriers, the copy engine, products of a warpgroup.
// Addresses of shared memory are offsets. What runs beside the threads runs at once, or
// as late as the rules allow: a product reads its operands and a copy out its source in
// the wait for it, a copy in brings its bytes in a wait for its barrier. The copy engine
// and products see what threads have written once a thread has called
// `stores_before_copies` after it; by which thread it was written is not known.
extern char* shared;  // of the block whose thread runs

namespace host {
struct Map {
  char* array;
  int rank, bytes, swizzle, size[5], box[5];
  long long stride[5];
};
inline Map& map_at(unsigned at) { return *(Map*)(shared + at); }
// `first` has an element per dimension.
void copy_in(const void* map, unsigned at, unsigned barrier, const int* first, int rank);
void copy_out(const void* map, unsigned at, const int* first, int rank);
void copy_to_blocks(const void* map, unsigned at, unsigned barrier, unsigned blocks,
                    const int* first, int rank);
struct Form { int columns, kind; bool turned_a, turned_b; };  // kind: see `number`
template <class S> void product(S* d, const Form& form, u64 a, u64 b, bool more);
void product(float* d, const Form& form, const u32* words, u64 b, bool more);
void end_but(size_t groups);
void leave_but(size_t groups);
void settle(void* numbers, int count);
}  // namespace host

inline u32 shared_address(const void* p) { return (u32)((const char*)p - shared); }
void barrier_init(u32 at, u32 n);
void barrier_end(u32 at);
inline void barriers_made() {}
void barrier_arrive(u32 at);
void barrier_expect(u32 at, u32 bytes);
void barrier_expect_for(u32 at, u32 bytes, u32 arrivals);
void barrier_wait(u32 at, u32 parity);
inline void meet(int id, int threads) { host::meet(id, threads); }
inline void pass_by(int id, int threads) { host::meet(id, threads, false); }
inline bool elected() { return threadIdx.x % 32 == 0; }
template <int N> void fewer_registers() {}
template <int N> void more_registers() {}
// The warp runs these as one.
inline void products_start() { __syncwarp(); }
void products_together();
template <int N> void products_left() {
  host::end_but(N);
  __syncwarp();
}
template <class T, int N> void settled(T (&x)[N]) { host::settle(x, N); }
template <int N> void copies_reading() { host::leave_but(N); }
template <int N> void copies_left() { host::leave_but(N); }
void copies_together();
void stores_before_copies();
// Semaphores, in main memory or at their place in shared memory.
inline void main_before_copies() {}
int semaphore_count(const int* at);
void semaphore_signal(int* at, int n);
void semaphore_wait(int* at, int n);
void semaphore_reach(const int* at, int n);
// Copies that a thread makes itself, and waits for; products of fragments.
namespace host {
void copy_chunk(unsigned to, const void* from, unsigned bytes, unsigned size);
void chunks_but(size_t groups);
void multiply_fragments(void* d, const u32* a, const u32* b, int kind);
}  // namespace host
template <int B> void copy_chunk(u32 to, const void* from, u32 bytes) {
  host::copy_chunk(to, from, bytes, B);
}
void chunks_together();
template <int N> void chunks_left() { host::chunks_but(N); }
inline u32 to_tf32(float x) {  // to nearest, ties away from zero
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fffffffu : (bits + 0x1000u) & ~0x1fffu;
}
#define MMA(NAME, S, KIND) \
  inline void mma_##NAME(S* d, const u32* a, const u32* b) { \
    host::multiply_fragments(d, a, b, KIND); \
  }
MMA(bf16, float, 0) MMA(f16, float, 1) MMA(f32, float, 2) MMA(i8, int, 3) MMA(u8, int, 4)
inline void put_matrices(u32 at, const u32* x) {
  const int lane = threadIdx.x % 32;
  for (int n = 0; n < 4; ++n) {
    const u32 row = __shfl_sync(~0u, at, 8 * n + lane / 4);
    memcpy(shared + row + lane % 4 * 4, x + n, 4);
  }
}
inline void put_vector(u32 at, const u32* x) {
  host::check(at % 16 == 0, "a vector is not aligned");
  memcpy(shared + at, x, 16);
}
inline void put_shared(u32 at, u32 x) { memcpy(shared + at, &x, 4); }
inline void put_shared(u32 at, float x, float y) {
  memcpy(shared + at, &x, 4);
  memcpy(shared + at + 4, &y, 4);
}
template <int RANK, int TYPE, int SWIZZLE> void map_array(u32 at, const void* p) {
  host::Map& m = host::map_at(at);
  m.array = (char*)p;
  m.rank = RANK;
  m.bytes = TYPE == 0 ? 1 : TYPE == 1 || TYPE == 6 || TYPE == 10 ? 2 : 4;
  m.swizzle = 16 << SWIZZLE;
}
template <int N> void map_dim(u32 at, u32 size, u32 box) {
  host::check(box <= 256, "a box of more than 256 elements");
  host::map_at(at).size[N] = size;
  host::map_at(at).box[N] = box;
}
template <int N> void map_stride(u32 at, u64 bytes) {
  host::check(bytes % 16 == 0, "a stride is not a multiple of 16 bytes");
  host::map_at(at).stride[N] = bytes;
}
inline void map_publish(u32 at, void* to) {
  if (threadIdx.x % 32 == 0) memcpy(to, shared + at, sizeof(host::Map));
  __syncwarp();  // as the instruction does
}
inline void map_seen(const void*) {}
template <class... C> void copy_in(u32 to, const void* map, u32 barrier, C... c) {
  const int first[] = {c...};
  host::copy_in(map, to, barrier, first, sizeof...(c));
}
void copy_line(u32 to, const void* from, u32 bytes, u32 barrier);
template <class... C> void copy_out(const void* map, u32 from, C... c) {
  const int first[] = {c...};
  host::copy_out(map, from, first, sizeof...(c));
}
template <class... C>
void copy_to_blocks(u32 to, const void* map, u32 barrier, u32 blocks, C... c) {
  const int first[] = {c...};
  host::copy_to_blocks(map, to, barrier, blocks, first, sizeof...(c));
}
void arrive_at(u32 barrier, u32 block);
int barrier_test(u32 barrier, u32 parity);
char* in_block_at(const char* at, u32 block);
template <class T> T* in_block(T* at, u32 block) {
  return (T*)in_block_at((const char*)at, block);
}
inline void writes_before_arrival() {}
void blocks_meet();
template <int COLUMNS, int KIND, bool LEFT, bool RIGHT, class S>
void product_shared(S* d, u64 a, u64 b, int more) {
  host::product(d, {COLUMNS, KIND, LEFT, RIGHT}, a, b, (bool)more);
}
template <int COLUMNS, int KIND, bool RIGHT>
void product_registers(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more) {
  const u32 words[] = {a0, a1, a2, a3};
  host::product(d, {COLUMNS, KIND, false, RIGHT}, words, b, (bool)more);
}
