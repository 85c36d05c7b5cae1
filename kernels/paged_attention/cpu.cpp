// Attention over paged keys and values: decodes, chunks of prompts, and shared prefixes.
//
// A row (one query of one head) walks its own keys in tiles of KEYS positions and keeps a running
// maximum, total and weighted sum; after SPLIT positions it begins anew and the parts are merged
// in order. Tiles and parts begin at multiples of their size, and no step of a row looks at other
// rows: its bits depend on its own query, keys and values alone. Which rows are computed side by
// side, so that they read a tile once, is free; so is which thread computes which part.
//
// Scores, weights and sums are float32. Method: online softmax, as in FlashAttention.

#include "../lanes.h"

#include <vector>

using namespace batten;

namespace {

constexpr int64_t KEYS = 64;
constexpr int64_t SPLIT = 1024;
constexpr int ROWS = 6;  // of a register tile

struct Item {  // neighbouring queries of one sequence
  int64_t sequence, row, count, position;
  int64_t shared;  // positions whose blocks are also those of the item before
};

struct Shape {
  int64_t heads, kv_heads, key_dim, value_dim, block_size, table_width;
  int64_t query_stride, query_head_stride;
  float scale, softcap;
  int64_t window;  // 0: none

  int64_t group() const { return heads / kv_heads; }
  int64_t padded_value() const { return (value_dim + LANES - 1) / LANES * LANES; }
  // Floats that hold one part of one row: its maximum, total and sums.
  int64_t part_size() const { return padded_value() + LANES; }
};

struct Range {  // of keys of a tile
  int64_t from, to;
};

inline bool operator==(Range a, Range b) { return a.from == b.from && a.to == b.to; }

template <typename T>
struct Call {
  Shape s;
  const T *query, *keys, *values;
  const int64_t* tables;
  const Item* items;
  const float* sinks;
  T* out;
};

// scores[row][key] = dot(query[row], key), of a row block; `tile` holds the keys transposed.
template <typename T, int COUNT>
void score_rows(const float* queries, const float* tile, int64_t steps, float* scores) {
  for (int64_t column = 0; column < KEYS; column += VECTORS * LANES) {
    Lanes sums[COUNT][VECTORS] = {};
    for (int64_t step = 0; step < steps; step++) {
      Lanes keys[VECTORS];
      BATTEN_UNROLL
      for (int v = 0; v < VECTORS; v++) keys[v] = load(tile + step * KEYS + column + v * LANES);
      BATTEN_UNROLL
      for (int r = 0; r < COUNT; r++) {
        const Lanes number = broadcast(queries[r * steps + step]);
        BATTEN_UNROLL
        for (int v = 0; v < VECTORS; v++) {
          sums[r][v] = multiply_add<T>(number, keys[v], sums[r][v]);
        }
      }
    }
    BATTEN_UNROLL
    for (int r = 0; r < COUNT; r++) {
      BATTEN_UNROLL
      for (int v = 0; v < VECTORS; v++) {
        store(scores + r * KEYS + column + v * LANES, sums[r][v]);
      }
    }
  }
}

// sums[row] = sums[row] * shrink[row] + weights[row] @ values, for keys of `range`.
template <typename V, int COUNT>
void add_values(const V* const* values, const float* weights, const float* shrinks, Range range,
                int64_t padded, float* sums, int64_t stride) {
  for (int64_t column = 0; column < padded; column += VECTORS * LANES) {
    const int64_t left = std::min<int64_t>(VECTORS, (padded - column) / LANES);
    const auto add = [&](auto width) {
      constexpr int WIDTH = decltype(width)::value;
      Lanes totals[COUNT][WIDTH];
      BATTEN_UNROLL
      for (int r = 0; r < COUNT; r++) {
        BATTEN_UNROLL
        for (int v = 0; v < WIDTH; v++) {
          totals[r][v] = load(sums + r * stride + column + v * LANES) * shrinks[r];
        }
      }
      for (int64_t key = range.from; key < range.to; key++) {
        Lanes value[WIDTH];
        BATTEN_UNROLL
        for (int v = 0; v < WIDTH; v++) value[v] = load(values[key] + column + v * LANES);
        BATTEN_UNROLL
        for (int r = 0; r < COUNT; r++) {
          const Lanes weight = broadcast(weights[r * KEYS + key]);
          BATTEN_UNROLL
          for (int v = 0; v < WIDTH; v++) totals[r][v] = fma(weight, value[v], totals[r][v]);
        }
      }
      BATTEN_UNROLL
      for (int r = 0; r < COUNT; r++) {
        BATTEN_UNROLL
        for (int v = 0; v < WIDTH; v++) store(sums + r * stride + column + v * LANES, totals[r][v]);
      }
    };
    if (left >= 4) {
      add(std::integral_constant<int, 4>{});
    } else if (left == 3) {
      add(std::integral_constant<int, 3>{});
    } else if (left == 2) {
      add(std::integral_constant<int, 2>{});
    } else {
      add(std::integral_constant<int, 1>{});
    }
  }
}

// Calls visit(first, integral_constant) for blocks of at most ROWS rows.
template <int COUNT = ROWS, typename Visit>
void by_rows(int64_t first, int64_t stop, Visit visit) {
  while (stop - first >= COUNT) {
    visit(first, std::integral_constant<int, COUNT>{});
    first += COUNT;
  }
  if constexpr (COUNT > 1) {
    if (first < stop) by_rows<COUNT - 1>(first, stop, visit);
  }
}

inline void merge(float* total, const float* part, int64_t padded) {
  const float highest = std::max(total[0], part[0]);
  if (!(part[0] > -INF) && part[1] == 0) return;  // saw no key
  const float old = total[1] == 0 ? 0 : exp_negative(total[0] - highest);
  const float added = exp_negative(part[0] - highest);
  total[0] = highest;
  total[1] = total[1] * old + part[1] * added;
  for (int64_t i = LANES; i < LANES + padded; i += LANES) {
    store(total + i, fma(load(part + i), broadcast(added), load(total + i) * old));
  }
}

// What a thread computes in, kept from task to task.
struct Scratch {
  std::vector<float> tile, wide, queries, scores, shrinks, parts, totals;
  std::vector<Range> ranges;
  std::vector<int64_t> offsets;
};

template <typename V>
auto* at_least(V& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
  return buffer.data();
}

// The rows of neighbouring items, and one kv head.
template <typename T>
class Walk {
 public:
  Walk(const Call<T>& call, int64_t kv_head, int64_t first, int64_t stop, Scratch& scratch)
      : call_(call), s_(call.s), kv_head_(kv_head), first_(first), stop_(stop) {
    steps_ = (s_.key_dim + PER_STEP<T> - 1) / PER_STEP<T>;
    padded_ = s_.padded_value();
    offsets_ = at_least(scratch.offsets, stop - first + 1);
    for (int64_t i = first; i < stop; i++) {
      offsets_[i - first] = rows_;
      rows_ += call.items[i].count * s_.group();
    }
    offsets_[stop - first] = rows_;
    tile_ = at_least(scratch.tile, (steps_ + LANES - 1) / LANES * LANES * KEYS);
    wide_ = at_least(scratch.wide, KEYS * padded_);
    queries_ = at_least(scratch.queries, rows_ * steps_);
    scores_ = at_least(scratch.scores, rows_ * KEYS);
    shrinks_ = at_least(scratch.shrinks, rows_);
    ranges_ = at_least(scratch.ranges, rows_);
    parts_ = at_least(scratch.parts, rows_ * s_.part_size());
    load_queries();
  }

  int64_t rows() const { return rows_; }
  const float* part(int64_t row) const { return parts_ + row * s_.part_size(); }

  void compute(int64_t split) {
    for (int64_t row = 0; row < rows_; row++) {
      float* part = parts_ + row * s_.part_size();
      std::fill(part, part + s_.part_size(), 0.0f);
      part[0] = -INF;
    }
    walk(first_, stop_, split * (SPLIT / KEYS), (split + 1) * (SPLIT / KEYS));
  }

  // Calls visit(row of this walk, token, head).
  template <typename Visit>
  void each_row(Visit visit) const {
    for (int64_t i = first_; i < stop_; i++) {
      const Item& item = call_.items[i];
      for (int64_t n = 0; n < item.count * s_.group(); n++) {
        visit(offsets_[i - first_] + n, item.row + n / s_.group(),
              kv_head_ * s_.group() + n % s_.group());
      }
    }
  }

 private:
  void load_queries() {
    each_row([&](int64_t row, int64_t token, int64_t head) {
      const T* query = call_.query + token * s_.query_stride + head * s_.query_head_stride;
      float* to = queries_ + row * steps_;
      for (int64_t step = 0; step < steps_; step += LANES) {
        const Lanes lanes =
            load_steps(query + step * PER_STEP<T>, s_.key_dim - step * PER_STEP<T>);
        std::memcpy(to + step, &lanes, std::min(LANES, steps_ - step) * sizeof(float));
      }
    });
  }

  static int64_t end(const Item& item) { return item.position + item.count; }

  int64_t begin(const Item& item) const {
    return s_.window ? std::max<int64_t>(item.position - s_.window + 1, 0) : 0;
  }

  // Tiles [tile, stop) of items [first, last), those that share a tile together.
  void walk(int64_t first, int64_t last, int64_t tile, int64_t stop) {
    int64_t from = begin(call_.items[first]), to = end(call_.items[first]);
    for (int64_t i = first + 1; i < last; i++) {
      from = std::min(from, begin(call_.items[i]));
      to = std::max(to, end(call_.items[i]));
    }
    tile = std::max(tile, from / KEYS);
    stop = std::min(stop, (to + KEYS - 1) / KEYS);
    for (; tile < stop; tile++) {
      const auto shares = [&](int64_t i) { return call_.items[i].shared >= (tile + 1) * KEYS; };
      int64_t run = first + 1;
      while (run < last && shares(run)) run++;
      if (run < last) {
        for (int64_t start = first; start < last; start = run) {
          for (run = start + 1; run < last && shares(run);) run++;
          walk(start, run, tile, stop);
        }
        return;
      }
      attend(first, last, tile, tile + 1 < stop);
    }
  }

  void attend(int64_t first, int64_t last, int64_t tile, bool more) {
    const int64_t rows_from = offsets_[first - first_], rows_to = offsets_[last - first_];
    const int64_t position = tile * KEYS;
    int64_t limit = 0;
    for (int64_t i = first; i < last; i++) {
      const Item& item = call_.items[i];
      limit = std::max(limit, end(item));
      for (int64_t n = 0; n < item.count; n++) {
        const int64_t at = item.position + n;
        const int64_t from = s_.window ? std::max<int64_t>(at - s_.window + 1 - position, 0) : 0;
        const Range range{from, std::min(at + 1 - position, KEYS)};
        std::fill_n(ranges_ + offsets_[i - first_] + n * s_.group(), s_.group(), range);
      }
    }
    point(first, position, std::min(limit, position + KEYS));
    std::copy_n(next_keys_, KEYS, keys_);
    std::copy_n(next_values_, KEYS, values_);
    if (more) point(first, position + KEYS, std::min(limit, position + 2 * KEYS));
    transpose(more);
    by_rows(rows_from, rows_to, [&](int64_t row, auto count) {
      score_rows<T, decltype(count)::value>(queries_ + row * steps_, tile_, steps_,
                                            scores_ + row * KEYS);
    });
    for (int64_t row = rows_from; row < rows_to; row++) weigh(row);
    for (int64_t key = 0; more && key < KEYS; key++) fetch(next_values_[key], s_.value_dim);
    if (rows_to - rows_from > ROWS || padded_ != s_.value_dim) {
      const float* wide[KEYS];
      for (int64_t key = 0; key < KEYS; key++) wide[key] = wide_ + key * padded_;
      for (int64_t key = 0; key < std::min(limit - position, KEYS); key++) {
        for (int64_t i = 0; i < padded_; i += LANES) {
          store(wide_ + key * padded_ + i, load(values_[key] + i, s_.value_dim - i));
        }
      }
      add(wide, rows_from, rows_to);
    } else {
      add(values_, rows_from, rows_to);
    }
  }

  // Where keys and values of positions [position, limit) lie; past them, some that may be read.
  void point(int64_t item, int64_t position, int64_t limit) {
    const int64_t* table = call_.tables + call_.items[item].sequence * s_.table_width;
    const int64_t size = s_.block_size;
    const int64_t spare = table[position / size] * s_.kv_heads + kv_head_;
    for (int64_t key = 0; key < KEYS;) {
      const int64_t at = position + key;
      const bool used = at < limit;
      const int64_t base = used ? table[at / size] * s_.kv_heads + kv_head_ : spare;
      const int64_t offset = used ? at % size : 0;
      const T* k = call_.keys + (base * size + offset) * s_.key_dim;
      const T* v = call_.values + (base * size + offset) * s_.value_dim;
      const int64_t count = used ? std::min({size - offset, limit - at, KEYS - key}) : KEYS - key;
      for (int64_t n = 0; n < count; n++) {
        next_keys_[key + n] = k + (used ? n * s_.key_dim : 0);
        next_values_[key + n] = v + (used ? n * s_.value_dim : 0);
      }
      key += count;
    }
  }

  // Blocks lie anywhere in memory, where the processor's own prefetching doesn't follow. Called in
  // pieces with work between them: what there is no room for is dropped.
  static void fetch(const T* from, int64_t count) {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (int64_t i = 0; i < int64_t(count * sizeof(T)); i += 64) {
      __builtin_prefetch(bytes + i, 0, 2);
    }
  }

  void transpose(bool more) {
    for (int64_t step = 0; step < steps_; step += LANES) {
      const int64_t done = step * PER_STEP<T>;
      for (int64_t key = 0; key < KEYS; key += LANES) {
        Lanes rows[LANES];
        for (int i = 0; i < LANES; i++) {
          rows[i] = load_steps(keys_[key + i] + done, s_.key_dim - done);
        }
        store_transposed(rows, tile_ + step * KEYS + key, KEYS);
        if (!more || step) continue;
        for (int i = 0; i < LANES; i++) fetch(next_keys_[key + i], s_.key_dim);
      }
    }
  }

  // Scores to weights; the row's maximum and total go on.
  void weigh(int64_t row) {
    const Range range = ranges_[row];
    float* scores = scores_ + row * KEYS;
    float* part = parts_ + row * s_.part_size();
    Lanes highest = broadcast(-INF), numbers[KEYS / LANES];
    Ints key = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int v = 0; v < KEYS / LANES; v++, key += LANES) {
      Lanes x = load(scores + v * LANES) * s_.scale;
      if (s_.softcap > 0) x = hyperbolic_tangent(x / s_.softcap) * s_.softcap;
      const Ints visible = (key >= int32_t(range.from)) & (key < int32_t(range.to));
      numbers[v] = visible ? x : broadcast(-INF);
      highest = larger(numbers[v], highest);
    }
    const float raised = std::max(part[0], largest(highest));
    const float finite = raised == -INF ? 0.0f : raised;
    Lanes total = {};
    for (int v = 0; v < KEYS / LANES; v++) {
      const Lanes weights = exp_negative(numbers[v] - finite);
      store(scores + v * LANES, weights);
      total += weights;
    }
    shrinks_[row] = exp_negative(part[0] - finite);
    part[0] = raised;
    part[1] = part[1] * shrinks_[row] + sum(total);
  }

  template <typename V>
  void add(const V* const* values, int64_t from, int64_t to) {
    by_rows(from, to, [&](int64_t row, auto count) {
      constexpr int COUNT = decltype(count)::value;
      const auto run = [&](int64_t row, auto count) {
        if (ranges_[row].to <= ranges_[row].from) return;
        add_values<V, decltype(count)::value>(
            values, scores_ + row * KEYS, shrinks_ + row, ranges_[row], padded_,
            parts_ + row * s_.part_size() + LANES, s_.part_size());
      };
      bool alike = true;
      for (int r = 1; r < COUNT; r++) alike &= ranges_[row + r] == ranges_[row];
      if (alike) {
        run(row, count);
      } else {
        BATTEN_UNROLL
        for (int r = 0; r < COUNT; r++) run(row + r, std::integral_constant<int, 1>{});
      }
    });
  }

  const Call<T>& call_;
  const Shape& s_;
  const int64_t kv_head_, first_, stop_;
  int64_t steps_, padded_, rows_ = 0;
  int64_t* offsets_;
  float *tile_, *wide_, *queries_, *scores_, *shrinks_, *parts_;
  Range* ranges_;
  const T *keys_[KEYS], *values_[KEYS], *next_keys_[KEYS], *next_values_[KEYS];
};

template <typename T>
void finish(const Call<T>& call, const float* part, int64_t token, int64_t head) {
  const Shape& s = call.s;
  float shrink = 1.0f, total = part[1];
  if (call.sinks) {
    const float highest = std::max(part[0], call.sinks[head]);
    shrink = exp_negative(part[0] - highest);
    total = total * shrink + exp_negative(call.sinks[head] - highest);
  }
  const float factor = shrink / total;
  T* out = call.out + (token * s.heads + head) * s.value_dim;
  for (int64_t i = 0; i < s.value_dim; i += LANES) {
    store(out + i, load(part + LANES + i) * factor, s.value_dim - i);
  }
}

int64_t splits_of(const Item* items, int64_t first, int64_t stop) {
  int64_t longest = 0;
  for (int64_t i = first; i < stop; i++) {
    longest = std::max(longest, items[i].position + items[i].count);
  }
  return (longest + SPLIT - 1) / SPLIT;
}

// Every part of a task by one thread, merged as they come.
template <typename T>
void run_whole(const Call<T>& call, int64_t kv_head, int64_t first, int64_t stop,
               Scratch& scratch) {
  const int64_t splits = splits_of(call.items, first, stop), size = call.s.part_size();
  Walk<T> walk(call, kv_head, first, stop, scratch);
  walk.compute(0);
  float* totals = at_least(scratch.totals, walk.rows() * size);
  std::copy(walk.part(0), walk.part(walk.rows()), totals);
  for (int64_t split = 1; split < splits; split++) {
    walk.compute(split);
    for (int64_t row = 0; row < walk.rows(); row++) {
      merge(totals + row * size, walk.part(row), call.s.padded_value());
    }
  }
  walk.each_row([&](int64_t row, int64_t token, int64_t head) {
    finish(call, totals + row * size, token, head);
  });
}

// Few tasks over long contexts: their parts are spread over the threads, then merged.
template <typename T>
void run_split(const Call<T>& call, const int64_t* tasks, int64_t count, int threads) {
  const int64_t heads = call.s.kv_heads, size = call.s.part_size();
  struct Part {
    int64_t task, kv_head, split, splits;
    std::vector<float> rows;
  };
  std::vector<Part> parts;
  for (int64_t task = 0; task < count; task++) {
    const int64_t splits = splits_of(call.items, tasks[task], tasks[task + 1]);
    for (int64_t i = 0; i < heads * splits; i++) {
      parts.push_back({task, i / splits, i % splits, splits, {}});
    }
  }
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < parts.size(); i++) {
      Part& part = parts[i];
      Walk<T> walk(call, part.kv_head, tasks[part.task], tasks[part.task + 1], scratch);
      walk.compute(part.split);
      part.rows.assign(walk.part(0), walk.part(walk.rows()));
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < parts.size(); i++) {
      Part& part = parts[i];
      if (part.split) continue;
      const Walk<T> walk(call, part.kv_head, tasks[part.task], tasks[part.task + 1], scratch);
      walk.each_row([&](int64_t row, int64_t token, int64_t head) {
        float* total = part.rows.data() + row * size;
        for (int64_t split = 1; split < part.splits; split++) {
          merge(total, parts[i + split].rows.data() + row * size, call.s.padded_value());
        }
        finish(call, total, token, head);
      });
    }
  }
}

template <typename T>
void run(const Call<T>& call, const int64_t* tasks, int64_t count, int threads) {
  const int64_t heads = call.s.kv_heads;
  if (count * heads < 4 * threads && splits_of(call.items, tasks[0], tasks[count]) > 1) {
    return run_split(call, tasks, count, threads);
  }
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count * heads; i++) {
      run_whole(call, i % heads, tasks[i / heads], tasks[i / heads + 1], scratch);
    }
  }
}

}  // namespace

// Tasks are runs of items: the i-th is [tasks[i], tasks[i + 1]). `tables` is
// [sequences, table_width]; `sinks` may be null; `window` 0 and `softcap` 0 are off.
extern "C" void batten_paged_attention(
    const void* query, const void* keys, const void* values, const int64_t* tables,
    const int64_t* items, const int64_t* tasks, int64_t count, int64_t table_width,
    int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim, int64_t block_size,
    int64_t query_stride, int64_t query_head_stride, float scale, int64_t window, float softcap,
    const float* sinks, void* out, int is_bfloat16, int threads) {
  const Shape shape{heads,      kv_heads,     key_dim,           value_dim, block_size, table_width,
                    query_stride, query_head_stride, scale, softcap,   window};
  const auto call = [&](auto number) {
    using T = decltype(number);
    run(Call<T>{shape, static_cast<const T*>(query), static_cast<const T*>(keys),
                static_cast<const T*>(values), tables, reinterpret_cast<const Item*>(items), sinks,
                static_cast<T*>(out)},
        tasks, count, threads);
  };
  if (is_bfloat16) {
    call(bfloat16{});
  } else {
    call(float{});
  }
}
