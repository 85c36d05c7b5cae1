// Decode attention over paged keys and values: one query per sequence.
//
// Every (sequence, kv head) is one task that walks its blocks in order, so a result depends on
// nothing but its own sequence: bitwise the same alone as in any batch, on any thread count.
// Scores, weights and sums are float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

inline float widen(float x) { return x; }

inline float widen(uint16_t bits) {  // bfloat16
  uint32_t wide = uint32_t(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

inline void narrow(float x, float* out) { *out = x; }

inline void narrow(float x, uint16_t* out) {  // round to nearest even, keep NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    *out = uint16_t(bits >> 16) | 0x40;
  } else {
    *out = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

// exp(x) for x <= 0 without a call, so that the loop vectorises. Relative error below 2e-7
// (Cephes' expf); NaN stays NaN.
inline float exp_negative(float x) {
  float clamped = x < -87.0f ? -87.0f : x;
  float n = std::floor(clamped * 1.44269504f + 0.5f);
  float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t exponent = (int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &exponent, 4);
  return x < -87.0f ? 0.0f : p * power;
}

// Sixteen float lanes; the compiler splits them where the processor's are narrower.
typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t HalfBits __attribute__((vector_size(32)));

inline Lanes load(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof(lanes));
  return lanes;
}

inline Lanes load(const uint16_t* x) {
  HalfBits half;
  std::memcpy(&half, x, sizeof(half));
  return Lanes(__builtin_convertvector(half, Bits) << 16);
}

inline float sum(Lanes x) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
            __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  Four b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// One row of a cache against the group's queries, or into the group's sums. DIM 0 takes any size.
template <int DIM, typename T>
inline void score_row(const T* key, const float* queries, int64_t dim, int64_t group, float* scores,
                      int64_t stride) {
  if constexpr (DIM > 0) {
    Lanes lanes[DIM / 16];
    for (int i = 0; i < DIM / 16; i++) lanes[i] = load(key + 16 * i);
    for (int64_t g = 0; g < group; g++) {
      Lanes products = lanes[0] * load(queries + g * DIM);
      for (int i = 1; i < DIM / 16; i++) products += lanes[i] * load(queries + g * DIM + 16 * i);
      scores[g * stride] = sum(products);
    }
  } else {
    for (int64_t g = 0; g < group; g++) {
      float dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < dim; d++) dot += queries[g * dim + d] * widen(key[d]);
      scores[g * stride] = dot;
    }
  }
}

template <int DIM, typename T>
inline void add_row(const T* value, const float* weights, int64_t stride, int64_t dim,
                    int64_t group, float* sums) {
  if constexpr (DIM > 0) {
    Lanes lanes[DIM / 16];
    for (int i = 0; i < DIM / 16; i++) lanes[i] = load(value + 16 * i);
    for (int64_t g = 0; g < group; g++) {
      for (int i = 0; i < DIM / 16; i++) {
        float* target = sums + g * DIM + 16 * i;
        Lanes total = load(target) + weights[g * stride] * lanes[i];
        std::memcpy(target, &total, sizeof(total));
      }
    }
  } else {
    for (int64_t g = 0; g < group; g++) {
      const float weight = weights[g * stride];
#pragma omp simd
      for (int64_t d = 0; d < dim; d++) sums[g * dim + d] += weight * widen(value[d]);
    }
  }
}

struct Shape {
  int64_t heads, kv_heads, key_dim, value_dim, block_size, table_width;
  float scale, softcap;
  int64_t window;  // 0: none
};

// Calls visit(row, position) for positions [first, length), and fetches a block ahead: blocks lie
// anywhere in memory, where the processor's own prefetching doesn't follow.
template <typename T, typename Visit>
inline void walk(const Shape& s, const T* cache, int64_t dim, const int64_t* table, int64_t first,
                 int64_t length, int64_t kv_head, Visit visit) {
  const int64_t size = s.block_size * dim;
  const auto start = [&](int64_t column) {
    return cache + (table[column] * s.kv_heads + kv_head) * size;
  };
  for (int64_t column = first / s.block_size; column * s.block_size < length; column++) {
    const int64_t position = column * s.block_size;
    const int64_t from = std::max<int64_t>(first - position, 0);
    const int64_t to = std::min(length - position, s.block_size);
    if (position + s.block_size < length) {
      const char* next = reinterpret_cast<const char*>(start(column + 1));
      for (int64_t line = 0; line < int64_t(size * sizeof(T)); line += 64) {
        __builtin_prefetch(next + line);
      }
    }
    const T* block = start(column);
    for (int64_t i = from; i < to; i++) visit(block + i * dim, position + i);
  }
}

template <typename T, int FIXED>
void attend(const Shape& s, const T* query, const T* keys, const T* values, const int64_t* table,
            int64_t length, int64_t kv_head, const float* sinks, T* out, float* scratch) {
  const int64_t key_dim = FIXED ? FIXED : s.key_dim;
  const int64_t value_dim = FIXED ? FIXED : s.value_dim;
  const int64_t group = s.heads / s.kv_heads;
  const int64_t first = s.window && length > s.window ? length - s.window : 0;
  float* queries = scratch;                      // [group, key_dim]
  float* sums = queries + group * key_dim;       // [group, value_dim]
  float* scores = sums + group * value_dim;      // [group, length]

  for (int64_t i = 0; i < group * key_dim; i++) {
    queries[i] = widen(query[kv_head * group * key_dim + i]) * s.scale;
  }
  walk(s, keys, key_dim, table, first, length, kv_head, [&](const T* key, int64_t p) {
    score_row<FIXED>(key, queries, key_dim, group, scores + p, length);
  });
  for (int64_t g = 0; g < group; g++) {
    float* score = scores + g * length;
    if (s.softcap > 0) {
      for (int64_t p = first; p < length; p++) {
        score[p] = s.softcap * std::tanh(score[p] / s.softcap);
      }
    }
    float highest = sinks ? sinks[kv_head * group + g] : -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : highest)
    for (int64_t p = first; p < length; p++) highest = std::max(highest, score[p]);
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t p = first; p < length; p++) {
      score[p] = exp_negative(score[p] - highest);
      total += score[p];
    }
    if (sinks) total += std::exp(sinks[kv_head * group + g] - highest);
    const float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t p = first; p < length; p++) score[p] *= inverse;
  }
  std::fill(sums, sums + group * value_dim, 0.0f);
  walk(s, values, value_dim, table, first, length, kv_head, [&](const T* value, int64_t p) {
    add_row<FIXED>(value, scores + p, length, value_dim, group, sums);
  });
  for (int64_t i = 0; i < group * value_dim; i++) {
    narrow(sums[i], out + kv_head * group * value_dim + i);
  }
}

template <typename T>
void decode(const Shape& s, const T* query, const T* keys, const T* values, const int64_t* tables,
            const int64_t* lengths, const int64_t* rows, int64_t sequences, const float* sinks,
            T* out, int threads) {
  const int64_t longest = *std::max_element(lengths, lengths + sequences);
  const int64_t group = s.heads / s.kv_heads;
  const int64_t size = group * (s.key_dim + s.value_dim + longest);
  const int64_t tasks = sequences * s.kv_heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch(size);
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < tasks; task++) {
      const int64_t i = task / s.kv_heads, kv_head = task % s.kv_heads;
      const T* q = query + rows[i] * s.heads * s.key_dim;
      T* o = out + rows[i] * s.heads * s.value_dim;
      const int64_t* table = tables + i * s.table_width;
      const bool same = s.key_dim == s.value_dim;
      if (same && s.key_dim == 64) {
        attend<T, 64>(s, q, keys, values, table, lengths[i], kv_head, sinks, o, scratch.data());
      } else if (same && s.key_dim == 128) {
        attend<T, 128>(s, q, keys, values, table, lengths[i], kv_head, sinks, o, scratch.data());
      } else {
        attend<T, 0>(s, q, keys, values, table, lengths[i], kv_head, sinks, o, scratch.data());
      }
    }
  }
}

}  // namespace

// `rows` are the queries' rows in the pack; `tables` [sequences, table_width] and `lengths` are
// theirs in the same order. `sinks` may be null; `window` 0 and `softcap` 0 are off.
extern "C" void batten_decode_attention(
    const void* query, const void* keys, const void* values, const int64_t* tables,
    const int64_t* lengths, const int64_t* rows, int64_t sequences, int64_t table_width,
    int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, int64_t block_size,
    float scale, int64_t window, float softcap, const float* sinks, void* out, int bfloat16,
    int threads) {
  const Shape shape{heads,      kv_heads,    key_dim, value_dim, block_size,
                    table_width, scale, softcap, window};
  if (bfloat16) {
    using T = uint16_t;
    decode<T>(shape, static_cast<const T*>(query), static_cast<const T*>(keys),
              static_cast<const T*>(values), tables, lengths, rows, sequences, sinks,
              static_cast<T*>(out), threads);
  } else {
    using T = float;
    decode<T>(shape, static_cast<const T*>(query), static_cast<const T*>(keys),
              static_cast<const T*>(values), tables, lengths, rows, sequences, sinks,
              static_cast<T*>(out), threads);
  }
}
