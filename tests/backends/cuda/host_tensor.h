// Tensor memory and tensor cores on a CPU, as kernels call them; `tensor_core.h` does it.
// Addresses of shared memory in a cluster have the number of their block, plus one, in
// the highest bits; without it they are those of the thread's own block.
constexpr int BLOCK_SHIFT = 24;

namespace host {
void tensor_alloc(int group, int columns, u32 to);
void tensor_free(int group, int columns, u32 at);
void tensor_multiply(int kind, int group, bool in_tensor_memory, u32 d, u64 a, u64 b,
                     u32 how, bool more, u32 by_a = 0, u32 by_b = 0);
void tensor_copy(u32 to, u64 from);
void tensor_commit(u32 barrier, u32 blocks);
void tensor_load(u32* x, u32 at, int words);
void tensor_store(u32 at, const u32* x, int words);
void copy_for_first(const void* map, u32 at, u32 barrier, const int* first, int rank);
}  // namespace host

template <int GROUP, int COLUMNS> void tensor_alloc(u32 to) {
  host::tensor_alloc(GROUP, COLUMNS, to);
}
template <int GROUP, int COLUMNS> void tensor_free(u32 at) {
  host::tensor_free(GROUP, COLUMNS, at);
}
template <int GROUP> void tensor_commit(u32 barrier) { host::tensor_commit(barrier, 0); }
inline void tensor_copy(u32 to, u64 from) { host::tensor_copy(to, from); }
inline void tensor_commit_to(u32 barrier, u32 to) { host::tensor_commit(barrier, to); }
inline u32 this_thread() { return threadIdx.x; }
void tensor_stored();
void tensor_loaded();
void tensor_before();
void tensor_after();
inline u32 block_address(u32 at, u32 block) { return at | block + 1 << BLOCK_SHIFT; }
void barrier_arrive_for(u32 at, u32 arrivals);
template <class... C> void copy_for_first(u32 to, const void* map, u32 barrier, C... c) {
  const int first[] = {c...};
  host::copy_for_first(map, to, barrier, first, sizeof...(c));
}
