// The explicit level on a CPU: barriers, the copy engine, products of a warpgroup.
// Addresses of shared memory are offsets. What runs beside the threads runs at once, or
// as late as the rules allow: a product reads its operands and a copy out its source in
// the wait for it, a copy in brings its bytes in a wait for its barrier. The copy engine
// and products see what threads have written once a thread has called
// `stores_before_copies` after it; by which thread it was written is not known.
extern char shared[];

namespace host {
static char engine[1 << 18] __attribute__((aligned(1024)));  // shared, as they see it
static unsigned shared_bytes;
static bool late_copies, late_products;
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
static const char* problem;  // the first; the block goes no further
inline void check(bool fine, const char* what) {
  if (fine) return;
  problem = what;
  swapcontext(&contexts[current], &scheduler);
}
// Shared memory is written by the copy engine; `from` null: by what nobody may read.
inline void arrive(unsigned at, const char* from, int bytes) {
  for (char* to : {shared + at, engine + at})
    from ? memcpy(to, from, bytes) : memset(to, 0xff, bytes);
}
// Copies that a thread has started, in groups; and those into shared memory.
struct Copy {
  Map map;
  unsigned at, barrier;
  int first[5];
  const char* line;  // its source, if it is bytes next to each other
  int line_bytes;
};
struct Groups {
  std::vector<std::vector<Copy>> whole;
  std::vector<Copy> open;
};
static std::vector<Copy> arriving;
static std::vector<Groups> leaving;  // by thread
static std::vector<int> copiers;  // threads that copy into shared memory
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
    f(swizzled(at + number++ * m.bytes, m.swizzle), inside ? there : nullptr);
    int d = 0;
    while (d < m.rank && ++n[d] == m.box[d]) n[d++] = 0;
    if (d == m.rank) return;
  }
}
inline int copied_bytes(const Copy& c) {
  if (c.line) return c.line_bytes;
  int bytes = c.map.bytes;
  for (int d = 0; d < c.map.rank; ++d) bytes *= c.map.box[d];
  return bytes;
}
inline void bring(const Copy& c, bool is_there) {
  static const char zeros[8] = {};
  if (c.line) return arrive(c.at, is_there ? c.line : nullptr, c.line_bytes);
  each(c.map, c.at, c.first, [&](unsigned here, const char* there) {
    arrive(here, !is_there ? nullptr : there ? there : zeros, c.map.bytes);
  });
}
inline void arrived(const Copy& c) {
  bring(c, true);
  Barrier& b = barrier(c.barrier);
  b.bytes -= copied_bytes(c);
  ++events;
  complete(b);
}
inline void start(const Copy& c) {
  if (std::find(copiers.begin(), copiers.end(), current) == copiers.end())
    copiers.push_back(current);
  if (!late_copies) return arrived(c);
  bring(c, false);
  arriving.push_back(c);
}
// The copies that a barrier waits for.
inline void all_arrive(unsigned at) {
  std::vector<Copy> others, now;
  for (const Copy& c : arriving) (c.barrier == at ? now : others).push_back(c);
  arriving = others;
  for (const Copy& c : now) arrived(c);
}
inline void leave(const Copy& c) {
  each(c.map, c.at, c.first, [&](unsigned here, char* there) {
    if (there) memcpy(there, engine + here, c.map.bytes);
  });
}
inline void leave_but(size_t groups) {
  auto& whole = leaving[current].whole;
  for (; whole.size() > groups; whole.erase(whole.begin()))
    for (const Copy& c : whole[0]) leave(c);
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
  return number(engine + swizzled(at, by), kind);
}
// A product in flight leaves tickets in place of its sums: numbers that no sum is (NaN),
// which code may hand on but not compute with. `settled` looks up what became of them.
struct Product {
  int columns, kind;
  bool turned_a, turned_b, in_registers;
  u64 a, b;
  float own[2][16];  // the left side of a thread's rows, if it is in registers
  bool more;
  std::vector<u32> starts, tickets;
};
struct Flights {
  std::vector<u32> sums = {0};  // by ticket
  size_t ended = 1;  // sums that there are
  std::vector<std::vector<Product>> whole;
  std::vector<Product> open;
};
static std::vector<Flights> flights;  // by thread
constexpr u32 TICKET = 0x7fc00000, NUMBER = 0x3fffff;
inline u32 bits_of(float x) { return __float_as_uint(x); }
inline u32 bits_of(int x) { return (u32)x; }
inline bool is_ticket(u32 bits) {
  return (bits & ~NUMBER) == TICKET && (bits & NUMBER) &&
         (bits & NUMBER) < flights[current].sums.size();
}
inline u32 ticket(u32 sum) {
  auto& sums = flights[current].sums;
  sums.push_back(sum);
  check(sums.size() < NUMBER, "too many products");
  return TICKET | (u32)(sums.size() - 1);
}
inline u32 settle(u32 bits) {  // a number, if its product has ended
  const u32 n = bits & NUMBER;
  return is_ticket(bits) && n < flights[current].ended ? flights[current].sums[n] : bits;
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
        d[4 * j + 2 * h + e] = sum != sum ? (S)NAN : (S)sum;
      }
}
template <class S> void multiply(S* d, const Product& p) {
  const int bytes = p.kind == 3 ? 1 : p.kind == 2 ? 4 : 2, lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  auto left = [&](int h, int k) {
    return p.in_registers ? p.own[h][k]
                          : element(p.a, row + 8 * h, k, p.turned_a, p.kind, bytes);
  };
  multiply(d, left, p.b, p.more, p.columns, 32 / bytes, p.turned_b, p.kind, bytes);
}
template <class S> void end(const Product& p) {
  auto& sums = flights[current].sums;
  std::vector<S> d(p.tickets.size());
  for (size_t n = 0; n < d.size(); ++n) {
    const u32 start = is_ticket(p.starts[n]) ? sums[p.starts[n] & NUMBER] : p.starts[n];
    memcpy(&d[n], &start, 4);
  }
  multiply(d.data(), p);
  for (size_t n = 0; n < d.size(); ++n) sums[p.tickets[n] & NUMBER] = bits_of(d[n]);
}
template <class S> void start(S* d, Product p) {
  if (!late_products) return multiply(d, p);
  auto& open = flights[current].open;
  for (int n = 0; n < p.columns / 2; ++n) {
    p.starts.push_back(bits_of(d[n]));
    p.tickets.push_back(ticket(0));
    memcpy(d + n, &p.tickets[n], 4);
  }
  open.push_back(p);
}
inline void end_but(size_t groups) {
  auto& mine = flights[current];
  for (; mine.whole.size() > groups; mine.whole.erase(mine.whole.begin()))
    for (const Product& p : mine.whole[0]) {
      p.kind == 3 ? end<int>(p) : end<float>(p);
      mine.ended = (p.tickets.back() & NUMBER) + 1;
    }
}
inline void start_block(int threads) {
  memset(engine, 0x7f, sizeof engine);
  problem = nullptr;
  arriving.clear();
  leaving.assign(threads, {});
  flights.assign(threads, {});
  copiers.clear();
}
inline void end_block() {
  if (!arriving.empty()) problem = "a copy into shared memory that nothing waited for";
  for (auto& each : leaving)
    if (!each.whole.empty() || !each.open.empty())
      problem = "a copy out of shared memory that nothing waited for";
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
  while ((host::barrier(at).phase & 1) == (int)parity) {
    host::all_arrive(at);
    if ((host::barrier(at).phase & 1) == (int)parity) host::spin();
  }
}
inline void meet(int id, int threads) { host::meet(id, threads); }
inline void pass_by(int id, int threads) { host::meet(id, threads, false); }
template <int N> void fewer_registers() {}
template <int N> void more_registers() {}
// The warp runs these as one.
inline void products_start() { __syncwarp(); }
inline void products_together() {
  auto& mine = host::flights[host::current];
  if (host::late_products) mine.whole.push_back(mine.open);
  mine.open.clear();
  __syncwarp();
}
template <int N> void products_left() {
  host::end_but(N);
  __syncwarp();
}
template <class T, int N> void settled(T (&x)[N]) {
  for (T& each : x) {
    const u32 sum = host::settle(host::bits_of(each));
    memcpy(&each, &sum, 4);
  }
}
template <int N> void copies_reading() { host::leave_but(N); }
template <int N> void copies_left() { host::leave_but(N); }
inline void copies_together() {
  auto& mine = host::leaving[host::current];
  if (host::late_products) mine.whole.push_back(mine.open);
  mine.open.clear();
}
inline void stores_before_copies() {
  memcpy(host::engine, shared, host::shared_bytes);
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
template <class... C> host::Copy copy_of(const void* map, u32 at, C... c) {
  host::Copy copy = {*(const host::Map*)map, at, 0, {c...}, nullptr, 0};
  host::check(sizeof...(c) == (size_t)copy.map.rank, "a copy of another rank");
  return copy;
}
template <class... C> void copy_in(u32 to, const void* map, u32 barrier, C... c) {
  host::Copy copy = copy_of(map, to, c...);
  copy.barrier = barrier;
  host::start(copy);
}
inline void copy_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  host::check(to % 16 == 0 && (u64)from % 16 == 0, "a line not at 16 bytes");
  host::start({{}, to, barrier, {}, (const char*)from, (int)bytes});
}
template <class... C> void copy_out(const void* map, u32 from, C... c) {
  const host::Copy copy = copy_of(map, from, c...);
  if (host::late_products) host::leaving[host::current].open.push_back(copy);
  else host::leave(copy);
}
template <int COLUMNS, int KIND, bool LEFT, bool RIGHT, class S>
void product_shared(S* d, u64 a, u64 b, int more) {
  host::start(d, {COLUMNS, KIND, LEFT, RIGHT, false, a, b, {}, (bool)more});
}
template <int COLUMNS, int KIND, bool RIGHT>
void product_registers(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int more) {
  host::Product p = {COLUMNS, KIND, false, RIGHT, true, 0, b, {}, (bool)more};
  const u32 words[4] = {a0, a1, a2, a3};
  for (int q = 0; q < 4; ++q)
    for (int n = 0; n < 4; ++n) {
      const u32 word = exchange(words[n], threadIdx.x / 4 * 4 + q);
      for (int e = 0; e < 2; ++e) {
        const unsigned short half = word >> 16 * e;
        p.own[n % 2][n / 2 * 8 + 2 * q + e] = host::number((const char*)&half, KIND);
      }
    }
  host::start(d, p);
}
