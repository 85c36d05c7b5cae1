// Keys and values of packed tokens to their slots.
//
// Of one head, a block holds keys step by step: first the numbers of step 0 of all its tokens, then
// those of step 1, where a step is what one multiply-add of lanes.h takes. So paged attention finds
// the same step of neighbouring keys side by side, and never has to transpose them. Values lie
// token by token, or, where one multiply-add takes two numbers, pair by pair of tokens.
//
//     keys    [blocks, kv_heads, key_dim / PER_STEP, block_size, PER_STEP]
//     values  [blocks, kv_heads, block_size / PER_STEP, value_dim, PER_STEP]

#include "../lanes.h"

using namespace batten;

namespace {

struct Rows {  // [tokens, heads, dim] with gaps
  const void* data;
  int64_t dim, stride, head_stride;
};

struct Target {
  int64_t kv_heads, block_size;
  const int64_t* slots;
};

template <typename T>
void write_keys(const Rows& keys, T* cache, const Target& to, int64_t token) {
  const int64_t block = to.slots[token] / to.block_size, offset = to.slots[token] % to.block_size;
  for (int64_t head = 0; head < to.kv_heads; head++) {
    const T* key =
        static_cast<const T*>(keys.data) + token * keys.stride + head * keys.head_stride;
    T* slot = cache + (block * to.kv_heads + head) * to.block_size * keys.dim +
              offset * PER_STEP<T>;
    for (int64_t i = 0; i < keys.dim; i += PER_STEP<T>) {
      std::memcpy(slot + i * to.block_size, key + i, PER_STEP<T> * sizeof(T));
    }
  }
}

template <typename T>
void write_values(const Rows& values, T* cache, const Target& to, int64_t token) {
  constexpr int64_t EACH = PER_STEP<T>;
  const int64_t block = to.slots[token] / to.block_size, offset = to.slots[token] % to.block_size;
  for (int64_t head = 0; head < to.kv_heads; head++) {
    const T* value =
        static_cast<const T*>(values.data) + token * values.stride + head * values.head_stride;
    T* slot = cache + (block * to.kv_heads + head) * to.block_size * values.dim +
              offset / EACH * EACH * values.dim + offset % EACH;
    for (int64_t i = 0; i < values.dim; i++) slot[i * EACH] = value[i];
  }
}

}  // namespace

// `slots` [tokens]. Strides are counted in numbers.
extern "C" void batten_kv_write(const void* key, const void* value, void* key_cache,
                                void* value_cache, const int64_t* slots, int64_t tokens,
                                int64_t kv_heads, int64_t block_size, int64_t key_dim,
                                int64_t key_stride, int64_t key_head_stride, int64_t value_dim,
                                int64_t value_stride, int64_t value_head_stride, int is_bfloat16,
                                int threads) {
  const Rows keys{key, key_dim, key_stride, key_head_stride};
  const Rows values{value, value_dim, value_stride, value_head_stride};
  const Target to{kv_heads, block_size, slots};
  const auto write = [&](auto number) {
    using T = decltype(number);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
      write_keys(keys, static_cast<T*>(key_cache), to, token);
      write_values(values, static_cast<T*>(value_cache), to, token);
    }
  };
  if (is_bfloat16) {
    write(bfloat16{});
  } else {
    write(float{});
  }
}
