// What a kernel's text runs on, compiled once (`host.py`); see the headers.
#include <algorithm>
#include <map>
#include <vector>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "host.h"
typedef unsigned u32;
typedef unsigned long long u64;
#include "host_explicit.h"
#include "host_tensor.h"

char* shared;
Index threadIdx, blockIdx, gridDim;
void call_kernel(void** arguments);  // by one thread; in the kernel's own file

double erfinv(double x) {  // Newton's steps from Winitzki's formula
  const double size = fabs(x), pi = 3.14159265358979323846;
  if (!(size < 1)) return size == 1 ? x / 0.0 : NAN;
  const double rest = log1p(-size * size), half = 2 / (pi * 0.147) + rest / 2;
  double y = sqrt(sqrt(half * half - rest / 0.147) - half);
  for (int n = 0; n < 4; ++n) {
    const double rest = size < 0.5 ? size - erf(y) : erfc(y) - (1 - size);
    y += rest / (2 / sqrt(pi) * exp(-y * y));
  }
  return copysign(y, x);
}
float host_from_f16(unsigned short h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  float x = exponent == 31 ? (fraction ? NAN : INFINITY)
          : exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
  return h >> 15 ? -x : x;
}
unsigned short host_to_f16(float x) {
  const unsigned short sign = __float_as_uint(x) >> 31 << 15;
  const float size = fabsf(x);
  if (x != x) return 0x7fff;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent = size < ldexpf(1, -14) ? -14 : ilogbf(size);
  const int whole = (int)rintf(ldexpf(size, 10 - exponent));  // nearest even
  return sign | (whole >= 1024 ? (exponent + 14) * 1024 + whole : whole);
}

namespace host {
constexpr size_t STACK = 1 << 17;
// A context only starts a thread. Threads are switched by `_longjmp`, which makes no
// system call, as `swapcontext` does.
struct Fiber { ucontext_t start; jmp_buf place; bool started; };
static jmp_buf scheduler;
static std::vector<Fiber> fibers;  // of all threads of a cluster, block by block
static std::vector<char> done;
static int current, block_threads;
static long long events;  // what other threads may wait for
int threads() { return block_threads; }
static void others_go_on() {
  if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}
static const char* problem;  // the first; the block goes no further
void check(bool fine, const char* what) {
  if (fine) return;
  problem = what;
  others_go_on();
}
static void spin() {  // until what is waited for may have happened
  others_go_on();
}
struct Meeting { int arrived, times; };
// Who knows of accesses to tensor memory; see `tensor_core.h`.
static void note_arrival(int block, unsigned barrier);
static void note_phase(int block, unsigned barrier);
static void note_wait(unsigned barrier);
static void note_meeting(const void* which, bool is_over);
static void tensor_cores_go_on(unsigned barrier);
struct Barrier { int count, left, phase; long long bytes; int waiting; };
constexpr unsigned MOST_SHARED = 1 << 18;
static const unsigned PAGE = sysconf(_SC_PAGESIZE), MAPPED = MOST_SHARED + 2 * PAGE;
struct Block {
  char* mapped;
  char* memory;  // between forbidden pages; what is left before the second is a pattern
  char engine[MOST_SHARED];  // shared memory, as the copy engine and products see it
  Meeting meetings[256];
  Barrier barriers[MOST_SHARED / 8];  // by address / 8
  unsigned long long exchanged[2048];
  u32 fragments[1024][6];  // of a thread's operands of a product
  int number, running;  // threads that have not ended
};
static std::vector<Block*> blocks;  // of a cluster
static unsigned shared_bytes;
static Block& block() { return *blocks[current / block_threads]; }
unsigned long long* exchanged;
static void met(Meeting& m, int threads, bool waits) {
  const int before = m.times;
  ++events;
  note_meeting(&m, false);
  if (++m.arrived == threads) {
    m.arrived = 0;
    ++m.times;
  } else {
    while (waits && m.times == before) spin();
  }
  if (waits) note_meeting(&m, true);
}
void meet(int id, int threads, bool waits) { met(block().meetings[id], threads, waits); }
static Meeting cluster_meeting;

static bool late_copies, late_products;
static Barrier& barrier(Block& there, unsigned at) {
  check(at % 8 == 0 && at + 8 <= shared_bytes, "a barrier outside shared memory");
  return there.barriers[at / 8];
}
static Barrier& barrier(unsigned at) { return barrier(block(), at); }
constexpr long long MOST_BYTES = (1 << 20) - 1;  // that a phase can wait for
static void expect(Barrier& b, unsigned bytes) {
  b.bytes += bytes;
  check(b.bytes <= MOST_BYTES, "a barrier waits for too many bytes");
}
static void complete(Barrier& b) {
  if (b.left || b.bytes) return;
  ++b.phase;
  b.left = b.count;
  for (size_t n = 0; n < blocks.size(); ++n)
    if (&b >= blocks[n]->barriers && &b < std::end(blocks[n]->barriers))
      note_phase(n, (&b - blocks[n]->barriers) * 8);
}
// By 16 (not at all), 32, 64 or 128 bytes.
static unsigned swizzled(unsigned at, int by) {
  return at ^ (at >> 7 & (by / 16 - 1)) << 4;
}
static void check_inside(unsigned at, unsigned bytes) {
  check(at + (u64)bytes <= shared_bytes, "an access outside shared memory");
}
// Shared memory is written by the copy engine; `from` null: by what nobody may read.
static void arrive(Block& there, unsigned at, const char* from, int bytes) {
  check_inside(at, bytes);
  for (char* to : {there.memory + at, there.engine + at})
    from ? memcpy(to, from, bytes) : memset(to, 0xff, bytes);
}
// Copies that a thread has started, in groups; and those into shared memory.
struct Copy {
  Map map;
  unsigned at, barrier;
  int first[5];
  const char* line;  // its source, if it is bytes next to each other
  int line_bytes;
  Block* to;  // whose shared memory it arrives in
  Block* counts;  // whose barrier it arrives at
};
struct Groups {
  std::vector<std::vector<Copy>> whole;
  std::vector<Copy> open;
};
static std::vector<Copy> arriving;
static std::vector<Groups> leaving;  // by thread
static std::vector<int> copiers;  // threads that copy into shared memory
// Every element of a box with its place in shared memory; outside ones have none.
template <class F> static void each(const Map& m, unsigned at, const int* first, F&& f) {
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
static int copied_bytes(const Copy& c) {
  if (c.line) return c.line_bytes;
  int bytes = c.map.bytes;
  for (int d = 0; d < c.map.rank; ++d) bytes *= c.map.box[d];
  return bytes;
}
static void bring(const Copy& c, bool is_there) {
  static const char zeros[8] = {};
  if (c.line) return arrive(*c.to, c.at, is_there ? c.line : nullptr, c.line_bytes);
  each(c.map, c.at, c.first, [&](unsigned here, const char* there) {
    arrive(*c.to, here, !is_there ? nullptr : there ? there : zeros, c.map.bytes);
  });
}
static void arrived(const Copy& c) {
  bring(c, true);
  Barrier& b = barrier(*c.counts, c.barrier);
  b.bytes -= copied_bytes(c);
  ++events;
  complete(b);
}
static void start(const Copy& c) {
  if (std::find(copiers.begin(), copiers.end(), current) == copiers.end())
    copiers.push_back(current);
  check(barrier(*c.counts, c.barrier).count > 0, "a copy arrives at a barrier that is none");
  check(c.to->running > 0, "a copy to a block that has ended");
  if (!late_copies) return arrived(c);
  bring(c, false);
  arriving.push_back(c);
}
// The copies that a barrier waits for.
static void all_arrive(unsigned at) {
  std::vector<Copy> others, now;
  for (const Copy& c : arriving)
    (c.barrier == at && c.counts == &block() ? now : others).push_back(c);
  arriving = others;
  for (const Copy& c : now) arrived(c);
}
static void leave(const Copy& c) {
  each(c.map, c.at, c.first, [&](unsigned here, char* there) {
    check_inside(here, c.map.bytes);
    if (there) memcpy(there, block().engine + here, c.map.bytes);
  });
}
void leave_but(size_t groups) {
  auto& whole = leaving[current].whole;
  for (; whole.size() > groups; whole.erase(whole.begin()))
    for (const Copy& c : whole[0]) leave(c);
}
static float number(const char* p, int kind) {  // 0 bf16, 1 f16, 2 f32, 3 i8, 4 u8
  unsigned short h;
  memcpy(&h, p, 2);
  if (kind == 0) return __uint_as_float((unsigned)h << 16);
  if (kind == 1) return host_from_f16(h);
  float f;
  memcpy(&f, p, 4);
  return kind == 2 ? f : kind == 3 ? *(const signed char*)p : *(const unsigned char*)p;
}
// An element of an operand in shared memory: row of its free dimension, k.
static float element(u64 o, int row, int k, bool turned, int kind, int bytes) {
  const unsigned base = (o & 0x3fff) << 4, apart = (o >> 16 & 0x3fff) << 4;
  const unsigned step = (o >> 32 & 0x3fff) << 4;
  check(o >> 62 >= 1, "an operand is not swizzled");
  const int by = o >> 62 == 1 ? 128 : o >> 62 == 2 ? 64 : 32;
  const int fast = turned ? row : k, slow = turned ? k : row, in_row = by / bytes;
  check(base % (8 * by) < by, "an operand starts inside a pattern of its swizzle");
  unsigned at = base + slow / 8 * step + slow % 8 * by;
  at += turned ? fast / in_row * apart + fast % in_row * bytes : fast * bytes;
  check_inside(swizzled(at, by), bytes);
  return number(block().engine + swizzled(at, by), kind);
}
// Copies of threads into shared memory, in groups: late ones come in the wait for them.
struct Chunk { char* to; const char* from; unsigned bytes, size; };
struct Chunks { std::vector<std::vector<Chunk>> whole; std::vector<Chunk> open; };
static std::vector<Chunks> loading;  // by thread
static void bring(const Chunk& c) {
  memcpy(c.to, c.from, c.bytes);
  memset(c.to + c.bytes, 0, c.size - c.bytes);
}
void copy_chunk(unsigned to, const void* from, unsigned bytes, unsigned size) {
  check(to % size == 0 && (u64)from % size == 0, "a chunk is not aligned");
  check(bytes == 0 || bytes == size, "a chunk of another size");
  check_inside(to, size);
  const Chunk c = {block().memory + to, (const char*)from, bytes, size};
  if (!late_copies) bring(c);
  else memset(c.to, 0xff, size);
  loading[current].open.push_back(c);
}
void chunks_but(size_t groups) {
  auto& whole = loading[current].whole;
  for (; whole.size() > groups; whole.erase(whole.begin()))
    for (const Chunk& c : whole[0]) if (late_copies) bring(c);
}
// A product of 16 rows and 8 columns, whose operands the threads of a warp have.
template <class S> static void multiply_fragments(S* d, int kind) {
  const int each = kind == 2 ? 1 : kind < 2 ? 2 : 4, lane = threadIdx.x % 32;
  const u32 (*words)[6] = block().fragments + threadIdx.x / 32 * 32;
  auto part = [&](int quad, int word, int k) {
    const u32 found[2] = {words[quad * 4 + k / each % 4][word], 0};
    return number((const char*)found + k % each * (4 / each), kind);
  };
  for (int n = 0; n < 4; ++n) {
    const int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
    double sum = d[n];
    for (int k = 0; k < 8 * each; ++k)
      sum += (double)part(row % 8, row / 8 + k / (4 * each) * 2, k) *
             part(column, 4 + k / (4 * each), k);
    d[n] = sum != sum ? (S)NAN : (S)sum;
  }
}
void multiply_fragments(void* d, const u32* a, const u32* b, int kind) {
  u32* own = block().fragments[threadIdx.x];
  memcpy(own, a, 16);
  memcpy(own + 4, b, 8);
  __syncwarp();
  kind < 3 ? multiply_fragments((float*)d, kind) : multiply_fragments((int*)d, kind);
  __syncwarp();
}
// A product in flight leaves tickets in place of its sums: numbers that no sum is (NaN),
// which code may hand on but not compute with. `settled` looks up what became of them.
struct Product {
  Form form;
  bool in_registers;
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
static u32 bits_of(float x) { return __float_as_uint(x); }
static u32 bits_of(int x) { return (u32)x; }
static bool is_ticket(u32 bits) {
  return (bits & ~NUMBER) == TICKET && (bits & NUMBER) &&
         (bits & NUMBER) < flights[current].sums.size();
}
static u32 ticket(u32 sum) {
  auto& sums = flights[current].sums;
  sums.push_back(sum);
  check(sums.size() < NUMBER, "too many products");
  return TICKET | (u32)(sums.size() - 1);
}
void settle(void* numbers, int count) {  // those whose product has ended
  for (int n = 0; n < count; ++n) {
    u32 bits;
    memcpy(&bits, (char*)numbers + 4 * n, 4);
    if (is_ticket(bits) && (bits & NUMBER) < flights[current].ended)
      memcpy((char*)numbers + 4 * n, &flights[current].sums[bits & NUMBER], 4);
  }
}
template <class S, class A>
static void multiply(S* d, A&& left, u64 b, int more, int columns, int depth, bool turned,
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
template <class S> static void multiply(S* d, const Product& p) {
  const int bytes = p.form.kind == 3 ? 1 : p.form.kind == 2 ? 4 : 2, lane = threadIdx.x % 32;
  const int row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  auto left = [&](int h, int k) {
    return p.in_registers ? p.own[h][k]
                          : element(p.a, row + 8 * h, k, p.form.turned_a, p.form.kind, bytes);
  };
  multiply(d, left, p.b, p.more, p.form.columns, 32 / bytes, p.form.turned_b, p.form.kind, bytes);
}
template <class S> static void end(const Product& p) {
  auto& sums = flights[current].sums;
  std::vector<S> d(p.tickets.size());
  for (size_t n = 0; n < d.size(); ++n) {
    const u32 start = is_ticket(p.starts[n]) ? sums[p.starts[n] & NUMBER] : p.starts[n];
    memcpy(&d[n], &start, 4);
  }
  multiply(d.data(), p);
  for (size_t n = 0; n < d.size(); ++n) sums[p.tickets[n] & NUMBER] = bits_of(d[n]);
}
template <class S> static void start(S* d, Product p) {
  if (!late_products) return multiply(d, p);
  auto& open = flights[current].open;
  for (int n = 0; n < p.form.columns / 2; ++n) {
    p.starts.push_back(bits_of(d[n]));
    p.tickets.push_back(ticket(0));
    memcpy(d + n, &p.tickets[n], 4);
  }
  open.push_back(p);
}
void end_but(size_t groups) {
  auto& mine = flights[current];
  for (; mine.whole.size() > groups; mine.whole.erase(mine.whole.begin()))
    for (const Product& p : mine.whole[0]) {
      p.form.kind == 3 ? end<int>(p) : end<float>(p);
      mine.ended = (p.tickets.back() & NUMBER) + 1;
    }
}
#include "tensor_core.h"
static void note_arrival(int block, unsigned barrier) {
  if (uses_tensors()) note_arrival(block, barrier, told_on(this_warp()));
}
constexpr char PATTERN = 0x7f;
static unsigned whole_shared() { return (shared_bytes + 1023) / 1024 * 1024; }
static Block* new_block() {
  Block* made = new Block;
  made->mapped = (char*)mmap(nullptr, MAPPED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS,
                             -1, 0);
  const unsigned pages = (whole_shared() + PAGE - 1) / PAGE * PAGE;
  mprotect(made->mapped + PAGE, pages, PROT_READ | PROT_WRITE);
  made->memory = made->mapped + PAGE + pages - whole_shared();
  return made;
}
static void forget(Block* one) {
  munmap(one->mapped, MAPPED);
  delete one;
}
static void start_block(Block& one, int number, int threads) {
  memset(one.memory, PATTERN, whole_shared());
  memset(one.engine, PATTERN, sizeof one.engine);
  memset(one.meetings, 0, sizeof one.meetings);
  std::fill(std::begin(one.barriers), std::end(one.barriers), Barrier());
  one.number = number;
  one.running = threads;
}
static void start_cluster(int threads) {
  problem = nullptr;
  cluster_meeting = {};
  arriving.clear();
  leaving.assign(threads, {});
  flights.assign(threads, {});
  loading.assign(threads, {});
  copiers.clear();
  start_tensor_memory();
}
static void end_block(Block& one, int first) {
  for (const Copy& c : arriving)
    if (c.to == &one) problem = "a copy into shared memory that nothing waited for";
  for (int n = first; n < first + block_threads; ++n)
    if (!loading[n].whole.empty() || !loading[n].open.empty())
      problem = "a copy into shared memory that nothing waited for";
  for (int n = first; n < first + block_threads; ++n)
    if (!leaving[n].whole.empty() || !leaving[n].open.empty())
      problem = "a copy out of shared memory that nothing waited for";
  end_tensor_memory(first / block_threads);
  for (const Barrier& b : one.barriers)
    if (b.bytes) problem = "a barrier waits for other bytes than come";
  for (unsigned n = shared_bytes; n < whole_shared(); ++n)
    if (one.memory[n] != PATTERN) problem = "an access outside shared memory";
}
static Copy copy_of(const void* map, u32 at, u32 barrier, const int* first, int rank) {
  Copy copy = {*(const Map*)map, at, barrier, {}, nullptr, 0, &block(), &block()};
  check(rank == copy.map.rank, "a copy of another rank");
  std::copy(first, first + rank, copy.first);
  return copy;
}
void copy_in(const void* map, u32 at, u32 barrier, const int* first, int rank) {
  start(copy_of(map, at, barrier, first, rank));
}
void copy_to_blocks(const void* map, u32 at, u32 barrier, u32 to, const int* first,
                    int rank) {
  check(to && to >> blocks.size() == 0, "a copy to a block that is not in the cluster");
  for (size_t n = 0; n < blocks.size(); ++n)
    if (to >> n & 1) {
      Copy copy = copy_of(map, at, barrier, first, rank);
      copy.to = copy.counts = blocks[n];
      start(copy);
    }
}
void copy_for_first(const void* map, u32 at, u32 barrier, const int* first, int rank) {
  Copy copy = copy_of(map, at, barrier & ((1 << BLOCK_SHIFT) - 1), first, rank);
  if (barrier >> BLOCK_SHIFT) copy.counts = blocks[(barrier >> BLOCK_SHIFT) - 1];
  start(copy);
}
void copy_out(const void* map, u32 at, const int* first, int rank) {
  const Copy copy = copy_of(map, at, 0, first, rank);
  if (late_products) leaving[current].open.push_back(copy);
  else leave(copy);
}
template <class S> void product(S* d, const Form& form, u64 a, u64 b, bool more) {
  start(d, {form, false, a, b, {}, more});
}
template void product(float*, const Form&, u64, u64, bool);
template void product(int*, const Form&, u64, u64, bool);
void product(float* d, const Form& form, const u32* words, u64 b, bool more) {
  Product p = {form, true, 0, b, {}, more};
  for (int q = 0; q < 4; ++q)
    for (int n = 0; n < 4; ++n) {
      const u32 word = exchange(words[n], threadIdx.x / 4 * 4 + q);
      for (int e = 0; e < 2; ++e) {
        const unsigned short half = word >> 16 * e;
        p.own[n % 2][n / 2 * 8 + 2 * q + e] = number((const char*)&half, form.kind);
      }
    }
  start(d, p);
}

static void** arguments;
static void body() {
  call_kernel(arguments);
  done[current] = 1;
  if (--block().running == 0) end_block(block(), current / block_threads * block_threads);
  others_go_on();
}
static void resume(int thread) {
  if (done[thread] || problem) return;
  current = thread;
  threadIdx.x = thread % block_threads;
  blockIdx.x = block().number;
  shared = block().memory;
  exchanged = block().exchanged;
  if (!_setjmp(scheduler)) {
    Fiber& t = fibers[thread];
    if (t.started) _longjmp(t.place, 1);
    t.started = true;
    setcontext(&t.start);
  }
  events += done[current];
}
// An access outside the shared memory of a block ends the run as other problems do.
static bool is_beside_shared(const char* at) {
  for (Block* each : blocks)
    if (at >= each->mapped && at < each->mapped + MAPPED) return true;
  return false;
}
static struct sigaction others_fault;
static void fault(int signal, siginfo_t* info, void* context) {
  if (is_beside_shared((const char*)info->si_addr))
    check(false, "an access outside shared memory");
  sigaction(signal, &others_fault, nullptr);  // and it happens again
}
static struct sigaction with_faults() {
  struct sigaction own = {};
  own.sa_sigaction = fault;
  own.sa_flags = SA_SIGINFO | SA_NODEFER;
  return own;
}
}  // namespace host

using namespace host;

void barrier_end(u32 at) {
  Barrier& b = barrier(at);
  check(b.count > 0, "a barrier is ended that is none");
  check(b.bytes == 0 && b.waiting == 0, "a barrier is ended that is still in use");
  const int first = current / block_threads * block_threads;
  for (int n = first; n < first + block_threads; ++n)
    check(leaving[n].whole.empty() && leaving[n].open.empty(),
          "a copy out is waited for too late");
  b = {};
}
void barrier_init(u32 at, u32 n) {
  check(barrier(at).count == 0, "a barrier is made twice");
  barrier(at) = {(int)n, (int)n, 0, 0, 0};
}
static void arrive_at(Barrier& b) {
  check(b.count > 0, "an arrival at a barrier that is none");
  check(b.left > 0, "more arrivals than a barrier counts");
  --b.left;
  ++events;
  complete(b);
}
void barrier_arrive(u32 at) {
  note_arrival(block_of(current), at);
  arrive_at(barrier(at));
}
void barrier_arrive_for(u32 at, u32 arrivals) {
  for (u32 n = 0; n < arrivals; ++n) barrier_arrive(at);
}
void arrive_at(u32 at, u32 number) {
  check(number < blocks.size(), "an arrival at a block that is not in the cluster");
  Block& there = *blocks[number];
  check(there.running > 0, "an arrival at a block that has ended");
  note_arrival(number, at);
  arrive_at(barrier(there, at));
}
char* in_block_at(const char* at, u32 number) {
  check(number < blocks.size(), "a ref of a block that is not in the cluster");
  check(blocks[number]->running > 0, "a ref of a block that has ended");
  return blocks[number]->memory + (at - block().memory);
}
void blocks_meet() { met(cluster_meeting, block_threads * blocks.size(), true); }
void barrier_expect(u32 at, u32 bytes) {
  expect(barrier(at), bytes);
  barrier_arrive(at);
}
void barrier_expect_for(u32 at, u32 bytes, u32 arrivals) {
  expect(barrier(at), bytes);
  for (u32 n = 0; n < arrivals; ++n) barrier_arrive(at);
}
void barrier_wait(u32 at, u32 parity) {
  Barrier& b = barrier(at);
  check(b.count > 0, "a wait for a barrier that is none");
  ++b.waiting;
  while ((b.phase & 1) == (int)parity) {
    all_arrive(at);
    tensor_cores_go_on(at);
    if ((b.phase & 1) == (int)parity) spin();
  }
  --b.waiting;
  note_wait(at);
}
int barrier_test(u32 at, u32 parity) {
  Barrier& b = barrier(at);
  check(b.count > 0, "a test of a barrier that is none");
  if ((b.phase & 1) == (int)parity) {
    spin();  // whoever looks again and again lets others run
    all_arrive(at);
  }
  const bool is_over = (b.phase & 1) != (int)parity;
  if (is_over) note_wait(at);
  return is_over;
}
int semaphore_count(const int* at) {
  const int n = *at;
  spin();  // whoever looks again and again lets others run
  return n;
}
void semaphore_signal(int* at, int n) {
  *at += n;
  ++events;
}
void semaphore_reach(const int* at, int n) {
  while (*(const volatile int*)at < n) spin();
}
void semaphore_wait(int* at, int n) {
  semaphore_reach(at, n);
  *at -= n;
}
void chunks_together() {
  auto& mine = loading[current];
  mine.whole.push_back(mine.open);
  mine.open.clear();
}
void products_together() {
  auto& mine = flights[current];
  if (late_products) mine.whole.push_back(mine.open);
  mine.open.clear();
  __syncwarp();
}
void copies_together() {
  auto& mine = leaving[current];
  if (late_products) mine.whole.push_back(mine.open);
  mine.open.clear();
}
void stores_before_copies() {
  memcpy(block().engine, shared, shared_bytes);
}
void tensor_stored() {
  for (const Stored& s : storing[current]) {
    u32* to = &tensor_memory().words[(s.at >> 16) + threadIdx.x % 32][s.at & 0xffff];
    std::copy(s.words.begin(), s.words.end(), to);
  }
  storing[current].clear();
  __syncwarp();
}
void tensor_loaded() { __syncwarp(); }
void tensor_before() {
  if (threadIdx.x % 32) return;
  Knowledge& own = knowledge[this_warp()];
  join(own.tells, own.acquired);
}
void tensor_after() {
  if (threadIdx.x % 32) return;
  Knowledge& own = knowledge[this_warp()];
  join(own.acquired, own.told);
}
void copy_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  check(to % 16 == 0 && (u64)from % 16 == 0, "a line not at 16 bytes");
  start({{}, to, barrier, {}, (const char*)from, (int)bytes, &block(), &block()});
}

// Runs a cluster, of one block or more, until all threads have ended or none can go on.
static void run_cluster(int late_warpgroup) {
  const int threads = fibers.size();
  for (bool going = true; going && !problem;) {
    const long long before = events;
    going = std::count(done.begin(), done.end(), 0);
    for (bool is_late : {false, true}) {
      if (is_late && events != before) break;  // the others can go on
      auto go_on = [&](int t) {
        if ((t % block_threads / 128 == late_warpgroup) == is_late) resume(t);
      };
      for (int turn = 0; turn < threads; ++turn) {
        go_on(late_copies ? threads - 1 - turn : turn);
        if (late_products)
          for (size_t c = 0; c < copiers.size(); ++c) go_on(copiers[c]);
      }
    }
    if (going && !problem && events == before)
      problem = "the threads of a block wait for each other";
  }
}
// What went wrong, if something did. Where products are late, a thread that copies
// operands goes on as soon as it can. A late warpgroup goes on where no other can.
extern "C" const char* run(void** given, const int* order, int clusters, int in_cluster,
                           int threads, int shared_bytes, int late_copies,
                           int late_products, int late_warpgroup) {
  arguments = given;
  gridDim.x = clusters * in_cluster;
  block_threads = threads;
  const int all = threads * in_cluster;
  fibers.resize(all);
  char* stacks = (char*)mmap(nullptr, all * STACK, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  host::shared_bytes = shared_bytes;
  host::late_copies = late_copies;
  host::late_products = late_products;
  for (int n = 0; n < in_cluster; ++n) blocks.push_back(new_block());
  const struct sigaction own_fault = with_faults();
  sigaction(SIGSEGV, &own_fault, &others_fault);
  problem = nullptr;
  for (int n = 0; n < clusters && !problem; ++n) {
    start_cluster(all);
    for (int b = 0; b < in_cluster; ++b)
      start_block(*blocks[b], order[n] * in_cluster + b, threads);
    done.assign(all, 0);
    for (int t = 0; t < all; ++t) {
      ucontext_t& start = fibers[t].start;
      getcontext(&start);
      start.uc_stack.ss_sp = &stacks[t * STACK];
      start.uc_stack.ss_size = STACK;
      start.uc_link = nullptr;
      makecontext(&start, body, 0);
      fibers[t].started = false;
    }
    run_cluster(late_warpgroup);
  }
  sigaction(SIGSEGV, &others_fault, nullptr);
  for (Block* each : blocks) forget(each);
  blocks.clear();
  munmap(stacks, all * STACK);
  return problem;
}
