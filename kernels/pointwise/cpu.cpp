// What a layer does to each token's numbers between its products.

#include "../lanes.h"

using namespace batten;

namespace {

BATTEN_INLINE Lanes rounded(Lanes x, float) { return x; }

BATTEN_INLINE Lanes rounded(Lanes x, bfloat16) {
  bfloat16 narrow[LANES];
  store(narrow, x);
  return load(narrow);
}

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t tokens, int64_t width, float epsilon,
              int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t token = 0; token < tokens; token++) {
    const T* row = x + token * width;
    Lanes squares[4] = {};
    for (int64_t i = 0; i < width; i += 4 * LANES) {
      BATTEN_UNROLL
      for (int v = 0; v < 4; v++) {
        const Lanes numbers = load(row + i + v * LANES, width - i - v * LANES);
        squares[v] = fma(numbers, numbers, squares[v]);
      }
    }
    const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / width;
    const float factor = 1.0f / std::sqrt(mean + epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
      const Lanes scaled = rounded(load(row + i, width - i) * factor, T{});
      store(out + token * width + i, load(weight + i, width - i) * scaled, width - i);
    }
  }
}

BATTEN_INLINE Lanes silu(Lanes x) {
  const Lanes e = exp_negative(x < 0.0f ? x : -x);
  return x * ((x < 0.0f ? e : broadcast(1.0f)) / (1.0f + e));
}

template <typename T>
void gated_silu(const T* gate, const T* up, T* out, int64_t count, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < count; i += LANES) {
    const Lanes activated = rounded(silu(load(gate + i, count - i)), T{});
    store(out + i, activated * load(up + i, count - i), count - i);
  }
}

template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t tokens, int64_t heads,
            int64_t dim, int64_t token_stride, int64_t head_stride, int threads) {
  const int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads)
  for (int64_t token = 0; token < tokens; token++) {
    const T *c = cos + token * dim, *s = sin + token * dim;
    for (int64_t head = 0; head < heads; head++) {
      const T* from = x + token * token_stride + head * head_stride;
      T* to = out + (token * heads + head) * dim;
      for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const Lanes a = load(from + i, left), b = load(from + half + i, left);
        store(to + i,
              rounded(a * load(c + i, left), T{}) + rounded(-b * load(s + i, left), T{}), left);
        store(to + half + i,
              rounded(b * load(c + half + i, left), T{}) + rounded(a * load(s + half + i, left), T{}),
              left);
      }
    }
  }
}

template <typename Call>
void with_type(int is_bfloat16, Call call) {
  if (is_bfloat16) {
    call(bfloat16{});
  } else {
    call(float{});
  }
}

}  // namespace

extern "C" void batten_rms_norm(const void* x, const void* weight, void* out, int64_t tokens,
                                int64_t width, float epsilon, int is_bfloat16, int threads) {
  with_type(is_bfloat16, [&](auto number) {
    using T = decltype(number);
    rms_norm(static_cast<const T*>(x), static_cast<const T*>(weight), static_cast<T*>(out), tokens,
             width, epsilon, threads);
  });
}

extern "C" void batten_gated_silu(const void* gate, const void* up, void* out, int64_t count,
                                  int is_bfloat16, int threads) {
  with_type(is_bfloat16, [&](auto number) {
    using T = decltype(number);
    gated_silu(static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(out), count,
               threads);
  });
}

extern "C" void batten_rotate(const void* x, const void* cos, const void* sin, void* out,
                              int64_t tokens, int64_t heads, int64_t dim, int64_t token_stride,
                              int64_t head_stride, int is_bfloat16, int threads) {
  with_type(is_bfloat16, [&](auto number) {
    using T = decltype(number);
    rotate(static_cast<const T*>(x), static_cast<const T*>(cos), static_cast<const T*>(sin),
           static_cast<T*>(out), tokens, heads, dim, token_stride, head_stride, threads);
  });
}
