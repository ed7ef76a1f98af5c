// What an emitted kernel needs to run on a CPU: the threads of a block, or of the blocks
// of a cluster, take turns as coroutines, each running until the next barrier or shuffle. Every kernel's text
// includes this, so what is no template and not small is in `host.cpp`, which is
// compiled once.
#include <cmath>
#include <cstring>

#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))
#undef __restrict__
#define __restrict__

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Index { int x, y, z; };
extern Index threadIdx, blockIdx, gridDim;

namespace host {
extern unsigned long long* exchanged;  // of the block whose thread runs
void check(bool fine, const char* what);
void meet(int id, int threads, bool waits = true);
int threads();
}  // namespace host

// Vectors are moved to and from multiples of their size.
template <int BYTES> void aligned(const void* p) {
  host::check((unsigned long long)p % BYTES == 0, "a vector is not aligned");
}
template <class T> void __stcs(T* to, T x) { *to = x; }
template <class T> T __ldcg(const T* from) { return *from; }

inline void __syncthreads() { host::meet(0, host::threads()); }
inline void __syncwarp() { host::meet(100 + threadIdx.x / 32, 32); }
template <class T> T exchange(T x, int from) {
  memcpy(&host::exchanged[threadIdx.x], &x, sizeof x);
  __syncwarp();
  T r;
  memcpy(&r, &host::exchanged[from], sizeof r);
  __syncwarp();
  return r;
}
// As on the device, a narrow integer comes back as an int.
template <class T> auto __shfl_xor_sync(unsigned, T x, int mask) -> decltype(+x) {
  return exchange(x, threadIdx.x ^ mask);
}
template <class T> T __shfl_sync(unsigned, T x, int lane) {
  return exchange(x, threadIdx.x / 32 * 32 + lane);
}
inline bool __all_sync(unsigned, bool x) {
  bool all = true;
  for (int lane = 0; lane < 32; ++lane) all = __shfl_sync(~0u, x, lane) && all;
  return all;
}
inline float __uint_as_float(unsigned x) { float r; memcpy(&r, &x, 4); return r; }
inline unsigned __float_as_uint(float x) { unsigned r; memcpy(&r, &x, 4); return r; }
inline double __longlong_as_double(long long x) { double r; memcpy(&r, &x, 8); return r; }
#define CHOICE(T) \
  inline T min(T x, T y) { return x < y ? x : y; } \
  inline T max(T x, T y) { return x > y ? x : y; }
CHOICE(int) CHOICE(unsigned) CHOICE(long long) CHOICE(unsigned long long)
inline float __expf(float x) { return expf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
// As PTX converts: past the ends of the type its end. NaN is 0 only between types of at
// most 32 bits, and else the number whose highest bit is set.
template <class I, class F> I saturated(F x) {
  const bool is_signed = (I)-1 < 0, wide = sizeof(I) == 8 || sizeof(F) == 8;
  const I top = (I)1 << (8 * sizeof(I) - 1);
  const double low = is_signed ? (double)top : 0;
  const double past = is_signed ? -low : ldexp(1.0, 8 * sizeof(I));
  if (x != x) return wide ? top : 0;
  if (x <= low) return (I)low;
  return x >= past ? (is_signed ? (I)~top : (I)-1) : (I)x;
}
inline int __float2int_rz(float x) { return saturated<int>(x); }
inline unsigned __float2uint_rz(float x) { return saturated<unsigned>(x); }
inline long long __float2ll_rz(float x) { return saturated<long long>(x); }
inline unsigned long long __float2ull_rz(float x) {
  return saturated<unsigned long long>(x);
}
inline int __double2int_rz(double x) { return saturated<int>(x); }
inline unsigned __double2uint_rz(double x) { return saturated<unsigned>(x); }
inline long long __double2ll_rz(double x) { return saturated<long long>(x); }
inline unsigned long long __double2ull_rz(double x) {
  return saturated<unsigned long long>(x);
}
double erfinv(double x);
inline float erfinvf(float x) { return (float)erfinv((double)x); }

// Functions whose CUDA form is an instruction.
inline unsigned short host_to_bf16(float x) {
  unsigned u = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
float host_from_f16(unsigned short h);
unsigned short host_to_f16(float x);
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
  const unsigned long long both = (unsigned long long)y << 32 | x;
  unsigned r = 0;
  for (int n = 0; n < 4; ++n)
    r |= (unsigned)(both >> 8 * (which >> 4 * n & 7) & 255) << 8 * n;
  return r;
}
template <int F16, class F> unsigned host_pairs(unsigned x, unsigned y, F&& f) {
  unsigned r = 0;
  for (int n = 0; n < 32; n += 16) {
    const unsigned short a = x >> n, b = y >> n;
    const float z = F16 ? f(host_from_f16(a), host_from_f16(b))
                        : f(__uint_as_float(a << 16), __uint_as_float(b << 16));
    r |= (unsigned)(F16 ? host_to_f16(z) : host_to_bf16(z)) << n;
  }
  return r;
}
