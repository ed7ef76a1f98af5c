// The explicit level on a CPU: barriers, the copy engine, products of a warpgroup.
// Addresses of shared memory are offsets; copies and products are done at once.
extern char shared[];

namespace host {
struct Barrier { int count, left, phase; long long bytes; };
static Barrier barriers[1 << 15];  // by address / 8
inline Barrier& barrier(unsigned at) { return barriers[at / 8]; }
inline void complete(Barrier& b) {
  if (b.left == 0 && b.bytes == 0) { ++b.phase; b.left = b.count; }
}
struct Map {
  char* array;
  int rank, bytes, swizzle, size[5], box[5];
  long long stride[5];
};
inline Map& map_at(unsigned at) { return *(Map*)(shared + at); }
// By 16 (not at all), 32, 64 or 128 bytes.
inline unsigned swizzled(unsigned at, int by) {
  return at ^ (at >> 7 & (by / 16 - 1)) << 4;
}
inline void check(bool fine, const char* what) {
  if (!fine) { fprintf(stderr, "host: %s\n", what); abort(); }
}
// Every element of a box with its place in shared memory; outside ones have none.
template <class F> void each(const Map& m, unsigned at, const int* first, F&& f) {
  check(at % 128 == 0, "a box is not aligned");
  check(m.box[0] * m.bytes % 16 == 0, "a box is not of multiples of 16 bytes");
  check(m.swizzle == 16 || m.box[0] * m.bytes <= m.swizzle, "a box is too wide");
  int n[5] = {0, 0, 0, 0, 0}, number = 0;
  for (;;) {
    char* there = m.array;
    bool inside = true;
    for (int d = 0; d < m.rank; ++d) {
      const long long c = (long long)first[d] + n[d];
      inside = inside && c >= 0 && c < m.size[d];
      there += c * (d ? m.stride[d - 1] : m.bytes);
    }
    f(shared + swizzled(at + number++ * m.bytes, m.swizzle), inside ? there : nullptr);
    int d = 0;
    while (d < m.rank && ++n[d] == m.box[d]) n[d++] = 0;
    if (d == m.rank) return;
  }
}
inline float number(const char* p, int kind) {  // 0 bf16, 1 f16, 2 f32, 3 i8
  unsigned short h;
  memcpy(&h, p, 2);
  if (kind == 0) return __uint_as_float((unsigned)h << 16);
  if (kind == 1) return host_from_f16(h);
  float f;
  memcpy(&f, p, 4);
  return kind == 2 ? f : (float)*(const signed char*)p;
}
// An element of an operand in shared memory: row of its free dimension, k.
inline float element(u64 o, int row, int k, bool turned, int kind, int bytes) {
  const unsigned base = (o & 0x3fff) << 4, apart = (o >> 16 & 0x3fff) << 4;
  const unsigned step = (o >> 32 & 0x3fff) << 4;
  check(o >> 62 >= 1, "an operand is not swizzled");
  const int by = o >> 62 == 1 ? 128 : o >> 62 == 2 ? 64 : 32;
  const int fast = turned ? row : k, slow = turned ? k : row, in_row = by / bytes;
  unsigned at = base + slow / 8 * step + slow % 8 * by;
  at += turned ? fast / in_row * apart + fast % in_row * bytes : fast * bytes;
  return number(shared + swizzled(at, by), kind);
}
template <class S, class A>
void multiply(S* d, A&& left, u64 b, int more, int columns, int depth, bool turned,
              int kind, int bytes) {
  const int lane = threadIdx.x % 32;
  for (int j = 0; j < columns / 8; ++j)
    for (int h = 0; h < 2; ++h)
      for (int e = 0; e < 2; ++e) {
        double sum = more ? d[4 * j + 2 * h + e] : 0;
        for (int k = 0; k < depth; ++k)
          sum += (double)left(h, k) *
                 element(b, 8 * j + 2 * (lane % 4) + e, k, turned, kind, bytes);
        d[4 * j + 2 * h + e] = (S)sum;
      }
}
}  // namespace host

inline u32 shared_address(const void* p) { return (u32)((const char*)p - shared); }
inline void barrier_init(u32 at, u32 n) { host::barrier(at) = {(int)n, (int)n, 0, 0}; }
inline void barriers_made() {}
inline void barrier_arrive(u32 at) {
  host::Barrier& b = host::barrier(at);
  host::check(b.left > 0, "more arrivals than a barrier counts");
  --b.left;
  ++host::events;
  host::complete(b);
}
inline void barrier_expect(u32 at, u32 bytes) {
  host::barrier(at).bytes += bytes;
  barrier_arrive(at);
}
inline void barrier_expect_for(u32 at, u32 bytes, u32 arrivals) {
  host::barrier(at).bytes += bytes;
  for (u32 n = 0; n < arrivals; ++n) barrier_arrive(at);
}
inline void barrier_wait(u32 at, u32 parity) {
  while ((host::barrier(at).phase & 1) == (int)parity) host::spin();
}
inline void meet(int id, int threads) { host::meet(id, threads); }
inline void pass_by(int id, int threads) { host::meet(id, threads, false); }
template <int N> void fewer_registers() {}
template <int N> void more_registers() {}
template <int N> void products_left() {}
inline void products_start() {}
inline void products_together() {}
template <class T, int N> void settled(T (&)[N]) {}
template <int N> void copies_reading() {}
template <int N> void copies_left() {}
inline void copies_together() {}
inline void stores_before_copies() {}
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
  const host::Map& m = *(const host::Map*)map;
  const int first[] = {c...};
  host::check(sizeof...(c) == (size_t)m.rank, "a copy of another rank");
  host::Barrier& b = host::barrier(barrier);
  host::each(m, to, first, [&](char* here, const char* there) {
    there ? memcpy(here, there, m.bytes) : memset(here, 0, m.bytes);
    b.bytes -= m.bytes;
  });
  host::complete(b);
}
inline void copy_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  host::check(to % 16 == 0 && (u64)from % 16 == 0, "a line not at 16 bytes");
  host::Barrier& b = host::barrier(barrier);
  memcpy(shared + to, from, bytes);
  b.bytes -= bytes;
  host::complete(b);
}
template <class... C> void copy_out(const void* map, u32 from, C... c) {
  const host::Map& m = *(const host::Map*)map;
  const int first[] = {c...};
  host::each(m, from, first, [&](const char* here, char* there) {
    if (there) memcpy(there, here, m.bytes);
  });
}
template <int COLUMNS, int KIND, bool LEFT, bool RIGHT, class S>
void product_shared(S* d, u64 a, u64 b, int more) {
  const int bytes = KIND == 3 ? 1 : KIND == 2 ? 4 : 2, lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  auto left = [&](int h, int k) {
    return host::element(a, row + 8 * h, k, LEFT, KIND, bytes);
  };
  host::multiply(d, left, b, more, COLUMNS, 32 / bytes, RIGHT, KIND, bytes);
}
template <int COLUMNS, int KIND, bool RIGHT>
void product_registers(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more) {
  float own[2][16];
  const u32 words[4] = {a0, a1, a2, a3};
  for (int q = 0; q < 4; ++q)
    for (int n = 0; n < 4; ++n) {
      const u32 word = exchange(words[n], threadIdx.x / 4 * 4 + q);
      for (int e = 0; e < 2; ++e) {
        const unsigned short half = word >> 16 * e;
        own[n % 2][n / 2 * 8 + 2 * q + e] = host::number((const char*)&half, KIND);
      }
    }
  auto left = [&](int h, int k) { return own[h][k]; };
  host::multiply(d, left, b, more, COLUMNS, 16, RIGHT, KIND, 2);
}
