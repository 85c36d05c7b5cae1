// Sixteen float lanes, and what the kernels do with them, in the widest instructions that the
// compiler's target has. Every sum is an explicit sequence of these, so that a number's bits
// don't depend on where in a tile it is computed (-ffp-contract=off).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace batten {

typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t HalfBits __attribute__((vector_size(32)));
typedef float HalfLanes __attribute__((vector_size(32)));
typedef float QuarterLanes __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(64)));
typedef double HalfDoubles __attribute__((vector_size(32)));

struct bfloat16 {
  uint16_t bits;
};

// Every function that takes or returns Lanes: for a call with arguments of their alignment GCC takes
// stack that it gives back only where the caller ends, and a loop of calls runs out of it.
#define BATTEN_ALWAYS __attribute__((always_inline))
#define BATTEN_INLINE inline BATTEN_ALWAYS

// Loops over a register tile: left rolled, the compiler would keep the tile in memory.
#define BATTEN_UNROLL _Pragma("GCC unroll 16")

constexpr int64_t LANES = 16;
constexpr float INF = std::numeric_limits<float>::infinity();

#if defined(__AVX512BF16__)
constexpr bool BF16_DOT = true;
#else
constexpr bool BF16_DOT = false;
#endif

#if defined(__AVX512F__)
constexpr int VECTORS = 4;  // of Lanes that a register tile is wide
#else
constexpr int VECTORS = 1;
#endif

BATTEN_INLINE Lanes broadcast(float x) {  // every bit of it: what it holds may be two numbers
  return Lanes{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

BATTEN_INLINE Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) || defined(__aarch64__)
  Lanes out;
  for (int i = 0; i < LANES; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
#else
  return a * b + c;
#endif
}

BATTEN_INLINE Lanes raw(const void* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof(lanes));
  return lanes;
}

// Loaded once: the compiler may otherwise load it anew for every use.
BATTEN_INLINE Lanes in_register(Lanes x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#endif
  return x;
}

BATTEN_INLINE Lanes load(const float* x) { return raw(x); }

BATTEN_INLINE Lanes load(const bfloat16* x) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
#else
  HalfBits half;
  std::memcpy(&half, x, sizeof(half));
  return (Lanes)(__builtin_convertvector(half, Bits) << 16);
#endif
}

template <typename T>
BATTEN_INLINE Lanes load(const T* x, int64_t count) {  // zeros from `count` on
  if (count >= LANES) return load(x);
  if (count <= 0) return Lanes{};
  T padded[LANES] = {};
  std::memcpy(padded, x, std::max<int64_t>(count, 0) * sizeof(T));
  return load(padded);
}

BATTEN_INLINE void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof(x)); }

BATTEN_INLINE Bits rounded_bits(Lanes x) {  // to the nearest even bfloat16, in the upper half; keeps NaN
  const Bits bits = (Bits)x;
  return (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
}

BATTEN_INLINE void store(bfloat16* to, Lanes x) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
  const HalfBits half = __builtin_convertvector(rounded_bits(x) >> 16, HalfBits);
#endif
  std::memcpy(to, &half, sizeof(half));
}

template <typename T>
BATTEN_INLINE void store(T* to, Lanes x, int64_t count) {
  if (count >= LANES) return store(to, x);
  T padded[LANES];
  store(padded, x);
  std::memcpy(to, padded, std::max<int64_t>(count, 0) * sizeof(T));
}

// 2 * LANES numbers of a row. Of bfloat16 the even and the odd ones, which takes one instruction
// each to load: all that is done with them must keep to T's order.
struct Wide {
  Lanes first, second;
};

BATTEN_INLINE Wide load_wide(const float* x) { return {load(x), load(x + LANES)}; }

BATTEN_INLINE Wide load_wide(const bfloat16* x) {
  const Bits bits = (Bits)raw(x);
  return {(Lanes)(bits << 16), (Lanes)(bits & 0xffff0000)};
}

template <typename T>
BATTEN_INLINE Wide load_wide(const T* x, int64_t count) {  // zeros from `count` on
  if (count >= 2 * LANES) return load_wide(x);
  T padded[2 * LANES] = {};
  std::memcpy(padded, x, std::max<int64_t>(count, 0) * sizeof(T));
  return load_wide(padded);
}

BATTEN_INLINE Wide in_order_of(float, Wide x) { return x; }

BATTEN_INLINE Wide in_order_of(bfloat16, Wide x) {
  return {__builtin_shufflevector(x.first, x.second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24,
                                  26, 28, 30),
          __builtin_shufflevector(x.first, x.second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25,
                                  27, 29, 31)};
}

BATTEN_INLINE void store_wide(float* to, Wide x) {
  store(to, x.first);
  store(to + LANES, x.second);
}

BATTEN_INLINE void store_wide(bfloat16* to, Wide x) {
#if defined(__AVX512BF16__)
  typedef uint16_t Halves __attribute__((vector_size(64)));
  const Halves halves = (Halves)_mm512_cvtne2ps_pbh((__m512)x.second, (__m512)x.first);
  const Halves both = __builtin_shufflevector(
      halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26,
      11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  const Bits both = (rounded_bits(x.first) >> 16) | (rounded_bits(x.second) & 0xffff0000);
#endif
  std::memcpy(to, &both, sizeof(both));
}

template <typename T>
BATTEN_INLINE void store_wide(T* to, Wide x, int64_t count) {
  if (count >= 2 * LANES) return store_wide(to, x);
  T padded[2 * LANES];
  store_wide(padded, x);
  std::memcpy(to, padded, std::max<int64_t>(count, 0) * sizeof(T));
}

// A row of T as steps of 32 bits, each one or two numbers that one multiply-add takes.
template <typename T>
constexpr int64_t PER_STEP = 1;
template <>
constexpr int64_t PER_STEP<bfloat16> = BF16_DOT ? 2 : 1;

template <typename T>
BATTEN_INLINE Lanes load_steps(const T* x) {
  if constexpr (PER_STEP<T> == 2) {
    return raw(x);
  } else {
    return load(x);
  }
}

template <typename T>
BATTEN_INLINE Lanes load_steps(const T* x, int64_t count) {  // `count` numbers, then zeros
  if (count >= LANES * PER_STEP<T>) return load_steps(x);
  T padded[LANES * PER_STEP<T>] = {};
  std::memcpy(padded, x, std::max<int64_t>(count, 0) * sizeof(T));
  return load_steps(padded);
}

// Steps that hold as many numbers of type T as `x` has, rounded.
template <typename T>
BATTEN_INLINE Lanes to_steps(const Lanes (&x)[PER_STEP<T>]) {
#if defined(__AVX512BF16__)
  if constexpr (PER_STEP<T> == 2) return (Lanes)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
#endif
  return x[0];
}

// Eight steps of each.
template <typename T>
BATTEN_INLINE Lanes load_halves(const T* low, const T* high) {
#define BATTEN_JOIN(a, b) \
  __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
  if constexpr (PER_STEP<T> * sizeof(T) == sizeof(float)) {
    typedef float Half __attribute__((vector_size(32)));
    Half a, b;
    std::memcpy(&a, low, sizeof(a));
    std::memcpy(&b, high, sizeof(b));
    return BATTEN_JOIN(a, b);
  } else {
    typedef uint16_t Half __attribute__((vector_size(16)));
    Half a, b;
    std::memcpy(&a, low, sizeof(a));
    std::memcpy(&b, high, sizeof(b));
    return (Lanes)(__builtin_convertvector(BATTEN_JOIN(a, b), Bits) << 16);
  }
#undef BATTEN_JOIN
}

template <typename T>
BATTEN_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes sums) {
#if defined(__AVX512BF16__)
  if constexpr (PER_STEP<T> == 2) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
  }
#endif
  return fma(a, b, sums);
}

#define BATTEN_PAIR(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

BATTEN_INLINE Lanes low32(Lanes a, Lanes b) {
  return BATTEN_PAIR(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
BATTEN_INLINE Lanes high32(Lanes a, Lanes b) {
  return BATTEN_PAIR(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
BATTEN_INLINE Lanes low64(Lanes a, Lanes b) {
  return BATTEN_PAIR(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
BATTEN_INLINE Lanes high64(Lanes a, Lanes b) {
  return BATTEN_PAIR(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
BATTEN_INLINE Lanes low128(Lanes a, Lanes b) {  // quarters 0 and 2 of each
  return BATTEN_PAIR(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
BATTEN_INLINE Lanes high128(Lanes a, Lanes b) {  // quarters 1 and 3 of each
  return BATTEN_PAIR(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// Lane i of the result is the sum of all lanes of x[i]; all of them are summed in one order.
BATTEN_INLINE Lanes sums_of(const Lanes (&x)[16]) {
  Lanes quads[4];
  for (int i = 0; i < 4; i++) {
    const Lanes a = low32(x[4 * i], x[4 * i + 1]) + high32(x[4 * i], x[4 * i + 1]);
    const Lanes b = low32(x[4 * i + 2], x[4 * i + 3]) + high32(x[4 * i + 2], x[4 * i + 3]);
    quads[i] = low64(a, b) + high64(a, b);
  }
  const Lanes c = low128(quads[0], quads[1]) + high128(quads[0], quads[1]);
  const Lanes d = low128(quads[2], quads[3]) + high128(quads[2], quads[3]);
  return low128(c, d) + high128(c, d);
}

BATTEN_INLINE float sum(Lanes x) {
  const Lanes a = x + BATTEN_PAIR(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  const Lanes b = a + BATTEN_PAIR(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// Lanes of a where x < y, elsewhere of b. GCC compares what is wider than a register number by
// number.
BATTEN_INLINE Lanes where_less(Lanes x, Lanes y, Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return x < y ? a : b;
#else
  HalfLanes halves[4][2];
  std::memcpy(halves[0], &x, sizeof(x));
  std::memcpy(halves[1], &y, sizeof(y));
  std::memcpy(halves[2], &a, sizeof(a));
  std::memcpy(halves[3], &b, sizeof(b));
  HalfLanes out[2];
  for (int i = 0; i < 2; i++) {
    out[i] = halves[0][i] < halves[1][i] ? halves[2][i] : halves[3][i];
  }
  Lanes lanes;
  std::memcpy(&lanes, out, sizeof(out));
  return lanes;
#endif
}

BATTEN_INLINE Lanes larger(Lanes a, Lanes b) {  // b where one is no number
#if defined(__AVX512F__)
  return (Lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return where_less(b, a, a, b);
#endif
}

BATTEN_INLINE float largest(Lanes x) {
  const Lanes a =
      larger(x, BATTEN_PAIR(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  const Lanes b =
      larger(a, BATTEN_PAIR(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  const Lanes c =
      larger(b, BATTEN_PAIR(b, b, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return std::max(c[0], c[1]);
}

// Each step takes sixteen numbers from i on, the last maybe fewer.
template <typename Step>
BATTEN_INLINE void in_lanes(int64_t begin, int64_t end, Step step) {
#pragma GCC unroll 4
  for (; begin + LANES <= end; begin += LANES) step(begin, LANES);
  if (begin < end) step(begin, end - begin);
}

template <typename T>
BATTEN_INLINE Lanes load(const T* x, int64_t count, float rest) {  // `rest` from `count` on
  if (count >= LANES) return load(x);
  float padded[LANES];
  store(padded, load(x, count));
  std::fill(padded + std::max<int64_t>(count, 0), padded + LANES, rest);
  return load(padded);
}

// Sixteen running sums in float64.
struct WideSums {
  Doubles low{}, high{};

  void add(Lanes x) {
#if defined(__AVX512F__)
    const __m256 upper = (__m256)_mm512_extractf64x4_pd((__m512d)x, 1);
    low += (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
    high += (Doubles)_mm512_cvtps_pd(upper);
#else
    QuarterLanes quarters[4];
    HalfDoubles wide[4];
    std::memcpy(quarters, &x, sizeof(x));
    for (int i = 0; i < 4; i++) wide[i] = __builtin_convertvector(quarters[i], HalfDoubles);
    Doubles halves[2];
    std::memcpy(halves, wide, sizeof(wide));
    low += halves[0];
    high += halves[1];
#endif
  }

  double total() const {
    const Doubles x = low + high;
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
  }
};

// Bit i says whether a[i] >= b[i].
BATTEN_INLINE uint32_t at_least(Lanes a, Lanes b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#elif defined(__AVX__)
  __m256 x[2], y[2];
  std::memcpy(x, &a, sizeof(a));
  std::memcpy(y, &b, sizeof(b));
  return _mm256_movemask_ps(_mm256_cmp_ps(x[0], y[0], _CMP_GE_OQ)) |
         _mm256_movemask_ps(_mm256_cmp_ps(x[1], y[1], _CMP_GE_OQ)) << 8;
#else
  const Ints kept = a >= b;
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits |= uint32_t(kept[i] & 1) << i;
  return bits;
#endif
}

// Writes the lanes whose bit is set one after another, and maybe others behind them; `to` has room
// for sixteen. Returns how many were set.
BATTEN_INLINE int64_t compress(float* to, Lanes x, uint32_t kept) {
#if defined(__AVX512F__)
  store(to, (Lanes)_mm512_maskz_compress_ps(kept, (__m512)x));
#else
  int64_t at = 0;
  for (uint32_t left = kept; left; left &= left - 1) to[at++] = x[__builtin_ctz(left)];
#endif
  return __builtin_popcount(kept);
}

// exp(x) for x <= 0; relative error below 2e-7 (Cephes' expf), 0 below -87, NaN stays NaN.
BATTEN_INLINE Lanes exp_negative(Lanes x) {
  const Lanes lowest = broadcast(-87.0f);
  const Lanes clamped = where_less(x, lowest, lowest, x);
  const Lanes shifted = fma(clamped, broadcast(1.44269504f), broadcast(12582912.0f));
  const Lanes n = shifted - 12582912.0f;  // rounded to the nearest integer
  Lanes r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Lanes p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
  const Lanes power = (Lanes)(((Ints)shifted - 0x4b400000 + 127) << 23);
  return where_less(x, lowest, Lanes{}, p * power);
}

// 2^x for x <= 0; relative error below 2e-7 (Cephes' exp2f), 0 below -126, NaN stays NaN.
BATTEN_INLINE Lanes exp2_negative(Lanes x) {
  const Lanes clamped = larger(broadcast(-126.0f), x);
#if defined(__AVX512F__)
  const Lanes n = (Lanes)_mm512_roundscale_ps((__m512)clamped, 8);  // to the nearest integer
#else
  const Lanes shifted = clamped + 12582912.0f;
  const Lanes n = shifted - 12582912.0f;
#endif
  const Lanes r = clamped - n;
  Lanes p = broadcast(1.535336188e-4f);
  p = fma(p, r, broadcast(1.339887440e-3f));
  p = fma(p, r, broadcast(9.618437357e-3f));
  p = fma(p, r, broadcast(5.550332471e-2f));
  p = fma(p, r, broadcast(2.402264791e-1f));
  p = fma(p, r, broadcast(6.931472028e-1f));
  p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Lanes)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
#else
  const Lanes power = (Lanes)(((Ints)shifted - 0x4b400000 + 127) << 23);
  return where_less(x, broadcast(-126.0f), Lanes{}, p * power);
#endif
}

BATTEN_INLINE float exp2_negative(float x) { return exp2_negative(broadcast(x))[0]; }

BATTEN_INLINE Lanes hyperbolic_tangent(Lanes x) {
  const Lanes size = x < 0.0f ? -x : x;
  const Lanes e = exp_negative(size * -2.0f);
  const Lanes quotient = (1.0f - e) / (1.0f + e);
  const Lanes square = x * x;  // near 0 the quotient would lose digits
  Lanes series = fma(square, broadcast(-17.0f / 315), broadcast(2.0f / 15));
  series = fma(series, square, broadcast(-1.0f / 3));
  series = fma(series * square, x, x);
  return size < 0.1f ? series : (x < 0.0f ? -quotient : quotient);
}

}  // namespace batten
