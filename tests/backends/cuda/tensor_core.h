// Tensor memory, and the tensor core that multiplies into it, after the PTX document; part
// of host.cpp. Matmuls and commits run in the order in which they were issued: at once,
// or not before somebody waits for a barrier of a commit. What threads store is there
// once they have waited for it.
//
// Who accesses tensor memory after somebody else must know that this has happened, by
// a commit or by fences on both sides of a synchronisation of threads. So warps and the
// tensor core have clocks: an access that others did not tell a warp about is a race,
// whatever the numbers are.
constexpr int SCALED = 4, COPY = 5;  // kinds of work
constexpr int COLUMNS = 512, LANES = 128, QUARTERS = 4;
typedef std::vector<int> Clock;  // accesses of each warp, and of each tensor core
static void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t n = 0; n < from.size(); ++n) to[n] = std::max(to[n], from[n]);
}
static int& at(Clock& clock, int who) {
  if ((int)clock.size() <= who) clock.resize(who + 1);
  return clock[who];
}
struct Knowledge {
  Clock acquired;  // may be relied on
  Clock told;      // by others, before a fence
  Clock tells;     // others
};
struct Cell { int writer = -1, when = 0; Clock readers; };  // of 32 lanes of a column
struct Work {
  bool is_commit;
  int kind, group;  // of matmuls; kind COPY: of scales, from `a` to `d`
  bool in_tensor_memory, more;
  u32 d, how, barrier, to;
  u64 a, b;
  u32 by_a, by_b;  // scales
  int number;   // of matmuls up to it
  Clock knows;  // of a commit: what its thread knew
};
struct Stored { u32 at; std::vector<u32> words; };
struct TensorMemory {
  u32 words[LANES][COLUMNS];
  int allocated = 0;
  Cell cells[QUARTERS][COLUMNS];
  std::vector<Work> queue;
  int products = 0;
  std::map<unsigned, Clock> now, done;  // by barrier: of its phase, and of those before
};
static std::map<int, TensorMemory> tensor_memories;  // by block of the cluster
static std::map<int, Knowledge> knowledge;           // by warp of the cluster
static std::map<int, std::vector<Stored>> storing;   // by thread
static std::map<const void*, Clock> meeting_clocks;
static bool uses_tensors() { return !tensor_memories.empty(); }
static int block_of(int thread) { return thread / block_threads; }
static int this_warp() { return current / 32; }
static int core_of(int block) { return (int)(fibers.size() + 31) / 32 + block; }
static TensorMemory& tensor_memory(int block) {
  check(tensor_memories.count(block) && tensor_memories[block].allocated,
        "tensor memory that is not allocated");
  return tensor_memories[block];
}
static TensorMemory& tensor_memory() { return tensor_memory(block_of(current)); }
static void check_columns(const TensorMemory& t, u32 at, int columns) {
  check((at & 0xffff) + columns <= (u32)t.allocated, "an access outside tensor memory");
}

// --- who knows of what ---

static Clock told_on(int warp) {  // by an arrival
  Clock clock = knowledge[warp].tells;
  join(clock, knowledge[warp].told);
  return clock;
}
static void note_arrival(int block, unsigned at, const Clock& clock) {
  if (tensor_memories.count(block)) join(tensor_memories[block].now[at], clock);
}
static void note_phase(int block, unsigned at) {
  if (!tensor_memories.count(block)) return;
  TensorMemory& t = tensor_memories[block];
  join(t.done[at], t.now[at]);
}
static void note_wait(unsigned at) {
  if (uses_tensors())
    join(knowledge[this_warp()].told, tensor_memories[block_of(current)].done[at]);
}
static void note_meeting(const void* which, bool is_over) {
  if (!uses_tensors()) return;
  Clock& clock = meeting_clocks[which];
  if (!is_over) join(clock, told_on(this_warp()));
  else join(knowledge[this_warp()].told, clock);
}
static void touch(TensorMemory& t, int first, int columns, int quarter, int who, int when,
                  Clock& knows, bool writes) {
  for (int c = first; c < first + columns; ++c) {
    Cell& cell = t.cells[quarter][c];
    if (cell.writer >= 0 && cell.writer != who)
      check(at(knows, cell.writer) >= cell.when,
            writes ? "tensor memory is written before its last write is known to be over"
                   : "tensor memory is read before its last write is known to be over");
    if (writes) {
      for (size_t r = 0; r < cell.readers.size(); ++r)
        check((int)r == who || at(knows, r) >= cell.readers[r],
              "tensor memory is written before its last read is known to be over");
      cell.writer = who;
      cell.when = when;
      cell.readers.clear();
    } else {
      at(cell.readers, who) = when;
    }
  }
}

// --- matmuls ---

static float tensor_number(const char* p, int kind, int type) {
  if (kind == 0) return number(p, type == 1 ? 0 : 1);  // f16 or bf16
  if (kind == 1) return number(p, 2);                  // copies have rounded it to 19 bits
  const unsigned char byte = *(const unsigned char*)p;
  if (kind == 3) return type == 1 ? (float)(signed char)byte : (float)byte;
  const int fraction_bits = type == 0 ? 3 : 2, bias = type == 0 ? 7 : 15;
  const int exponent = (byte & 0x7f) >> fraction_bits;
  const int fraction = byte & ((1 << fraction_bits) - 1), most = 0x7f >> fraction_bits;
  float x = exponent ? ldexpf(1 + ldexpf(fraction, -fraction_bits), exponent - bias)
                     : ldexpf(fraction, 1 - bias - fraction_bits);
  if (type == 0 && (byte & 0x7f) == 0x7f) x = NAN;
  if (type == 1 && exponent == most) x = fraction ? NAN : INFINITY;
  return byte >> 7 ? -x : x;
}
// An element of an operand in shared memory; see `element`.
static const char* tensor_element(const Block& there, u64 o, int row, int k, bool turned,
                                  int bytes) {
  const unsigned base = (o & 0x3fff) << 4, apart = (o >> 16 & 0x3fff) << 4;
  const unsigned step = (o >> 32 & 0x3fff) << 4;
  check((o >> 46 & 7) == 1, "a descriptor of another version");
  check((o >> 49 & 0xfff) == 0, "a descriptor with an offset or mode");
  const int code = o >> 61, by = code == 2 ? 128 : code == 4 ? 64 : code == 6 ? 32 : 0;
  check(by, "an operand is not swizzled");
  const int fast = turned ? row : k, slow = turned ? k : row, in_row = by / bytes;
  check(base % (8 * by) < (unsigned)by,
        "an operand starts inside a pattern of its swizzle");
  check(turned || base % by + (fast + 1) * bytes <= (unsigned)by,
        "an instruction reads past a row of its panel");
  unsigned place = base + slow / 8 * step + slow % 8 * by;
  place += turned ? fast / in_row * apart + fast % in_row * bytes : fast * bytes;
  check_inside(swizzled(place, by), bytes);
  return there.engine + swizzled(place, by);
}
struct Told {
  int rows, columns, sums, left, right;
  bool turned_left, turned_right;
  int scale_left, scale_right;  // which of the four in a word
};
// With scales: which of them, in place of the type of sums, and their type.
static Told decoded_scaled(const Work& w) {
  const u32 h = w.how;
  check((h & 0xf) == 0 && (h >> 6 & 1) == 0 && (h >> 13 & 3) == 0 && (h >> 24 & 7) == 0 &&
            h >> 31 == 0,
        "bits of an instruction");
  check(h >> 23 & 1, "a type of scales");
  Told t = {(int)(h >> 27 & 3) * 128, (int)(h >> 17 & 63) * 8, 1, (int)(h >> 7 & 7),
            (int)(h >> 10 & 7), (bool)(h >> 15 & 1), (bool)(h >> 16 & 1),
            (int)(h >> 29 & 3), (int)(h >> 4 & 3)};
  check(t.left <= 1 && t.right <= 1, "a type of operands");
  check(t.rows == LANES * w.group, "rows of an instruction");
  check(t.columns % (16 * w.group) == 0 && t.columns > 0 && t.columns <= 256,
        "columns of an instruction");
  return t;
}
static Told decoded(const Work& w) {
  if (w.kind == SCALED) return decoded_scaled(w);
  const u32 h = w.how;
  check((h & 0xf) == 0 && (h >> 13 & 3) == 0 && h >> 29 == 0, "bits of an instruction");
  Told t = {(int)(h >> 24 & 31) * 16, (int)(h >> 17 & 63) * 8, (int)(h >> 4 & 3),
            (int)(h >> 7 & 7), (int)(h >> 10 & 7), (bool)(h >> 15 & 1), (bool)(h >> 16 & 1)};
  check(t.sums == (w.kind == 3 ? 2 : 1), "a type of accumulators");
  const int most[] = {1, 0, 1, 1};
  check(w.kind == 1 ? t.left == 2 && t.right == 2
                    : t.left <= most[w.kind] && t.right <= most[w.kind],
        "a type of operands");
  check(t.rows == LANES * w.group, "rows of an instruction");
  check(t.columns % (16 * w.group) == 0 && t.columns > 0 && t.columns <= 256,
        "columns of an instruction");
  check(!(t.turned_left || t.turned_right) || w.kind != 1,
        "an operand that is not contiguous along k");
  return t;
}
// Powers of two of rows, 32 of which are in the lanes of a column; each warp has all.
static float scale(const TensorMemory& t, u32 at, int row, int which) {
  const int column = (at & 0xffff) + row / 32;
  const u32 word = t.words[row % 32][column];
  for (int part = 1; part < QUARTERS; ++part)
    check(t.words[part * 32 + row % 32][column] == word, "scales that a warp does not have");
  const int byte = word >> 8 * which & 255;
  return byte == 255 ? NAN : ldexpf(1, byte - 127);
}
static void copy_scales(int block, const Work& w) {
  const unsigned base = (w.a & 0x3fff) << 4, step = (w.a >> 32 & 0x3fff) << 4;
  check((w.a >> 46 & 7) == 1 && w.a >> 49 == 0, "a descriptor with a swizzle or mode");
  TensorMemory& t = tensor_memory(block);
  for (int row = 0; row < 32; ++row) {
    const unsigned from = base + row / 8 * step + row % 8 * 16;
    check_inside(from, 16);
    for (int part = 0; part < QUARTERS; ++part)
      memcpy(&t.words[part * 32 + row][w.d & 0xffff], blocks[block]->engine + from, 16);
  }
}
static void multiply(int block, const Work& w) {
  const Told t = decoded(w);
  const int bytes = w.kind == 0 ? 2 : w.kind == 1 ? 4 : 1, depth = 32 / bytes;
  std::vector<float> right(t.columns * depth);
  for (int n = 0; n < t.columns; ++n) {  // each block has some of the columns
    const int each = t.columns / w.group, who = block + n / each;
    for (int k = 0; k < depth; ++k)
      right[n * depth + k] = tensor_number(
          tensor_element(*blocks[who], w.b, n % each, k, t.turned_right, bytes), w.kind,
          t.right);
    if (w.kind == SCALED) {
      const float by = scale(tensor_memory(block), w.by_b, n, t.scale_right);
      for (int k = 0; k < depth; ++k) right[n * depth + k] *= by;
    }
  }
  for (int part = 0; part < w.group; ++part) {
    TensorMemory& memory = tensor_memory(block + part);
    check_columns(memory, w.d, t.columns);
    for (int row = 0; row < LANES; ++row) {
      float left[32];
      for (int k = 0; k < depth; ++k) {
        const char* p =
            w.in_tensor_memory
                ? (const char*)&memory.words[row][w.a & 0xffff] + k * bytes
                : tensor_element(*blocks[block + part], w.a, row, k, t.turned_left, bytes);
        left[k] = tensor_number(p, w.kind, t.left);
        if (w.kind == SCALED) left[k] *= scale(memory, w.by_a, row, t.scale_left);
      }
      for (int n = 0; n < t.columns; ++n) {
        u32& to = memory.words[row][(w.d & 0xffff) + n];
        double sum = 0;
        if (w.more) sum = w.kind == 3 ? (double)(int)to : (double)__uint_as_float(to);
        for (int k = 0; k < depth; ++k) sum += (double)left[k] * right[n * depth + k];
        to = w.kind == 3 ? (u32)(int)sum : __float_as_uint(sum != sum ? NAN : (float)sum);
      }
    }
  }
}
static void do_commit(int block, const Work& w) {
  for (size_t n = 0; n < blocks.size(); ++n) {
    if (w.to ? !(w.to >> n & 1) : (int)n != block) continue;
    Clock clock = w.knows;
    at(clock, core_of(block)) = std::max(at(clock, core_of(block)), w.number);
    note_arrival(n, w.barrier, clock);
    Barrier& b = barrier(*blocks[n], w.barrier);
    check(b.count > 0, "an arrival at a barrier that is none");
    check(b.left > 0, "more arrivals than a barrier counts");
    --b.left;
    ++events;
    complete(b);
  }
}
static void run_work(int block, const Work& w) {
  w.is_commit ? do_commit(block, w) : w.kind == COPY ? copy_scales(block, w)
                                                     : multiply(block, w);
}
static void issue(Work w) {
  const int block = block_of(current);
  TensorMemory& t = tensor_memory();
  w.number = t.products += !w.is_commit;
  if (!late_products) return run_work(block, w);
  t.queue.push_back(w);
}
// Whatever a barrier still waits for.
static void tensor_cores_go_on(unsigned barrier) {
  const int here = block_of(current);
  for (auto& each : tensor_memories) {
    auto& queue = each.second.queue;
    size_t end = 0;
    for (size_t n = 0; n < queue.size() && !end; ++n) {
      const Work& w = queue[n];
      const bool arrives = w.to ? w.to >> here & 1 : each.first == here;
      if (w.is_commit && w.barrier == barrier && arrives) end = n + 1;
    }
    const std::vector<Work> now(queue.begin(), queue.begin() + end);
    queue.erase(queue.begin(), queue.begin() + end);
    for (const Work& w : now) run_work(each.first, w);
  }
}
static void end_tensor_memory(int block) {
  if (!tensor_memories.count(block)) return;
  const TensorMemory& t = tensor_memories[block];
  if (t.allocated) problem = "tensor memory that is not freed";
  if (!t.queue.empty()) problem = "a matmul that nothing waited for";
  for (int n = block * block_threads; n < (block + 1) * block_threads; ++n)
    if (!storing[n].empty()) problem = "a store to tensor memory that nothing waited for";
}
static void start_tensor_memory() {
  tensor_memories.clear();
  knowledge.clear();
  storing.clear();
  meeting_clocks.clear();
}

// --- what kernels call ---

void tensor_alloc(int group, int columns, u32 to) {
  check(columns >= 32 && columns <= COLUMNS && !(columns & (columns - 1)),
        "an allocation of tensor memory of another size");
  __syncwarp();  // as the instruction does
  if (threadIdx.x % 32) return;
  TensorMemory& t = tensor_memories[block_of(current)];
  check(!t.allocated, "tensor memory is allocated twice");
  t.allocated = columns;
  memset(t.words, 0xff, sizeof t.words);
  const u32 first = 0;
  check_inside(to, 4);
  memcpy(shared + to, &first, 4);
}
void tensor_free(int group, int columns, u32 at) {
  __syncwarp();
  if (threadIdx.x % 32) return;
  TensorMemory& t = tensor_memory();
  check(at == 0 && t.allocated == columns, "other tensor memory is freed");
  for (const Work& w : t.queue)
    check(w.is_commit, "tensor memory is freed that a matmul adds to");
  t.queue.clear();
  t.allocated = 0;
}
void tensor_multiply(int kind, int group, bool in_tensor_memory, u32 d, u64 a, u64 b,
                     u32 how, bool more, u32 by_a, u32 by_b) {
  const Work w = {false, kind, group, in_tensor_memory, more, d, how, 0, 0, a, b, by_a, by_b, 0, {}};
  const Told told = decoded(w);
  const int block = block_of(current), core = core_of(block);
  Clock& knows = knowledge[this_warp()].acquired;
  check(group == 1 || block % 2 == 0, "the second block of a pair starts a matmul");
  for (int part = 0; part < group; ++part) {
    TensorMemory& t = tensor_memory(block + part);
    check_columns(t, d, told.columns);
    const int when = tensor_memory().products + 1;
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
      if (in_tensor_memory)
        touch(t, a & 0xffff, 8, quarter, core, when, knows, false);
      if (kind == SCALED) {
        touch(t, by_a & 0xffff, LANES / 32, quarter, core, when, knows, false);
        touch(t, by_b & 0xffff, (told.columns + 31) / 32, quarter, core, when, knows, false);
      }
      touch(t, d & 0xffff, told.columns, quarter, core, when, knows, true);
    }
  }
  issue(w);
}
void tensor_copy(u32 to, u64 from) {
  TensorMemory& t = tensor_memory();
  check_columns(t, to, 4);
  const int core = core_of(block_of(current));
  Clock& knows = knowledge[this_warp()].acquired;
  for (int quarter = 0; quarter < QUARTERS; ++quarter)
    touch(t, to & 0xffff, 4, quarter, core, t.products + 1, knows, true);
  issue({false, COPY, 1, false, false, to, 0, 0, 0, from, 0, 0, 0, 0, {}});
}
void tensor_commit(u32 barrier, u32 to) {
  Work w = {true, 0, 1, false, false, 0, 0, barrier & ((1 << BLOCK_SHIFT) - 1), to, 0, 0,
            0, 0, 0, knowledge[this_warp()].acquired};
  issue(w);
}
static int check_lanes(u32 at) {
  const int lane = at >> 16;
  check(lane == (int)(threadIdx.x / 32 % 4 * 32), "a warp accesses the lanes of another");
  return lane + threadIdx.x % 32;
}
static void access(u32 at, int words, bool writes) {
  if (threadIdx.x % 32) return;
  Knowledge& own = knowledge[this_warp()];
  const int who = this_warp(), when = ++host::at(own.acquired, who);
  touch(tensor_memory(), at & 0xffff, words, threadIdx.x / 32 % 4, who, when, own.acquired,
        writes);
}
void tensor_load(u32* x, u32 at, int words) {
  TensorMemory& t = tensor_memory();
  check_columns(t, at, words);
  const int lane = check_lanes(at);
  __syncwarp();
  access(at, words, false);
  memcpy(x, &t.words[lane][at & 0xffff], 4 * words);
  __syncwarp();
}
void tensor_store(u32 at, const u32* x, int words) {
  check_columns(tensor_memory(), at, words);
  check_lanes(at);
  __syncwarp();
  access(at, words, true);
  storing[current].push_back({at, std::vector<u32>(x, x + words)});
}
