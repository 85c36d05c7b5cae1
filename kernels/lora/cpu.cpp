// Low-rank updates of packed tokens, each with the rows of its own adapter, for all modules that
// share an input.
//
// A task is up to TOKENS tokens of one adapter in one module: their products with its rows of A,
// scaled, then with its rows of B, added to y, then the adapter's gain and shift. Every number is
// summed in an order that depends on the widths and its own adapter's rows alone, so its bits are
// the same alone and in any batch. All of it is float32, and y is rounded once.
//
// A module's rows are read once a step, from memory: while a thread computes, it fetches what it
// will read next, to the first rows of its next task.

#include "../lanes.h"

#include <atomic>
#include <vector>

using namespace batten;

namespace {

constexpr int64_t TOKENS = 16;                    // most of a task
constexpr int SQUARE = 4;                         // tokens and rows of a product block
constexpr int TALL = VECTORS > 1 ? 8 : 2;         // tokens of an update block
constexpr int64_t WIDE = 2 * LANES;               // and its columns
constexpr int64_t AHEAD = 192;                    // columns of B fetched before they are read

// What Python passes is packed into int64s, which cost it less than arguments.
struct Tile {  // of one span, with at least one row; rows_from counts in Plan::rows
  int64_t first, count, rows_from, rows_count;
};

struct Plan {
  const Tile* tiles;
  const int64_t* rows;
  int64_t tiles_count;
  int64_t most_rows;  // of a tile
};

struct Pool {
  const void *A, *B;
  const float* scales;
  const float* const (*affines)[2];  // gain and shift by an adapter's first row, or null
  int64_t width, out, is_bfloat16;
};

struct Target {
  const Pool* pool;
  void* y;
  int64_t y_stride;
};

struct Call {  // with its targets behind it
  const void* x;
  const Plan* plan;
  int64_t threads, modules;

  const Target* targets() const { return reinterpret_cast<const Target*>(this + 1); }
};

template <typename T>
struct Task {
  const T *x, *A, *B;
  T* y;
  const float *scales, *gain, *shift;
  const int64_t* rows;  // those that this module has no scale for come last, and are not counted
  int64_t count, ranks, width, out, y_stride;
};

inline void fetch(const void* from) { __builtin_prefetch(from, 0, 2); }

// Lane 4 * j + i is dot(w[j], x[i]).
template <bool FETCH, typename T>
Lanes products(const T* const (&x)[SQUARE], const T* const (&w)[SQUARE],
               const T* const (&next)[SQUARE], int64_t width) {
  constexpr int64_t STEP = LANES * PER_STEP<T>;
  Lanes sums[SQUARE * SQUARE] = {};
  const auto add = [&](auto read) {
    Lanes numbers[SQUARE];
    BATTEN_UNROLL
    for (int i = 0; i < SQUARE; i++) numbers[i] = read(x[i]);
    BATTEN_UNROLL
    for (int j = 0; j < SQUARE; j++) {
      const Lanes weights = read(w[j]);
      BATTEN_UNROLL
      for (int i = 0; i < SQUARE; i++) {
        sums[SQUARE * j + i] = multiply_add<T>(weights, numbers[i], sums[SQUARE * j + i]);
      }
    }
  };
  int64_t at = 0;
  for (; at + STEP <= width; at += STEP) {
    add([&](const T* row) { return load_steps(row + at); });
    if constexpr (FETCH) {
      BATTEN_UNROLL
      for (int j = 0; j < SQUARE; j++) fetch(next[j] + at);
    }
  }
  if (at < width) add([&](const T* row) { return load_steps(row + at, width - at); });
  return sums_of(sums);
}

// hidden[row][token] = scales[row] * dot(A[row], x[token]), up to whole squares.
template <typename T>
void shrink(const Task<T>& task, float (*hidden)[TOKENS]) {
  for (int64_t row = 0; row < task.ranks; row += SQUARE) {
    const T *w[SQUARE], *next[SQUARE];
    Lanes scales;
    BATTEN_UNROLL
    for (int j = 0; j < SQUARE; j++) {
      const int64_t index = task.rows[std::min(row + j, task.ranks - 1)];
      w[j] = task.A + index * task.width;
      next[j] = task.A + task.rows[std::min(row + j + SQUARE, task.ranks - 1)] * task.width;
      BATTEN_UNROLL
      for (int i = 0; i < SQUARE; i++) scales[SQUARE * j + i] = task.scales[index];
    }
    const bool last = row + SQUARE >= task.ranks;
    for (int64_t at = 0; last && at < std::min(task.out, AHEAD); at += WIDE) {
      for (int64_t i = 0; i < task.ranks; i++) fetch(task.B + task.rows[i] * task.out + at);
    }
    for (int64_t token = 0; token < task.count; token += SQUARE) {
      const T* x[SQUARE];
      BATTEN_UNROLL
      for (int i = 0; i < SQUARE; i++) {
        x[i] = task.x + std::min(token + i, task.count - 1) * task.width;
      }
      const Lanes sums = token == 0 && !last ? products<true>(x, w, next, task.width)
                                             : products<false>(x, w, next, task.width);
      float block[LANES];
      store(block, sums * scales);
      BATTEN_UNROLL
      for (int j = 0; j < SQUARE; j++) {
        std::memcpy(hidden[row + j] + token, block + SQUARE * j, SQUARE * sizeof(float));
      }
    }
  }
}

// y[token] = (y[token] + hidden[token] @ B[rows]) * gain + shift, for HEIGHT tokens and WIDE
// columns. `following` is fetched where B ends.
template <int HEIGHT, bool AFFINE, typename T>
inline void update(const Task<T>& task, const float (*hidden)[TOKENS], int64_t token,
                   int64_t column, const char*& following) {
  const int64_t left = task.out - column;
  Wide sums[HEIGHT] = {};
  const auto add = [&](auto read, auto fetch_next) {
    for (int64_t row = 0; row < task.ranks; row++) {
      const T* b = task.B + task.rows[row] * task.out + column;
      const Wide weights = read(b);
      fetch_next(b);
      BATTEN_UNROLL
      for (int i = 0; i < HEIGHT; i++) {
        const Lanes number = broadcast(hidden[row][token + i]);
        sums[i].first = fma(number, weights.first, sums[i].first);
        sums[i].second = fma(number, weights.second, sums[i].second);
      }
    }
  };
  const auto whole = [](const T* b) { return load_wide(b); };
  if (left > AHEAD && token == 0) {
    add(whole, [](const T* b) { fetch(b + AHEAD); });
  } else if (left >= WIDE) {
    add(whole, [&](const T*) {
      fetch(following);
      following += 64;
    });
  } else {
    add([&](const T* b) { return load_wide(b, left); }, [](const T*) {});
  }
  Wide gain = {broadcast(1.0f), broadcast(1.0f)}, shift = {};
  if (AFFINE && task.gain) gain = in_order_of(T{}, load_wide(task.gain + column, left));
  if (AFFINE && task.shift) shift = in_order_of(T{}, load_wide(task.shift + column, left));
  BATTEN_UNROLL
  for (int i = 0; i < HEIGHT; i++) {
    T* y = task.y + (token + i) * task.y_stride + column;
    Wide total = load_wide(y, left);
    total.first += sums[i].first;
    total.second += sums[i].second;
    if constexpr (AFFINE) {
      total.first = fma(total.first, gain.first, shift.first);
      total.second = fma(total.second, gain.second, shift.second);
    }
    store_wide(y, total, left);
  }
}

template <bool AFFINE, typename T, int HEIGHT = TALL>
inline void update_all(const Task<T>& task, const float (*hidden)[TOKENS], int64_t token,
                       int64_t column, const char*& following) {
  for (; token + HEIGHT <= task.count; token += HEIGHT) {
    update<HEIGHT, AFFINE>(task, hidden, token, column, following);
  }
  if constexpr (HEIGHT > 1) {
    if (token < task.count) {
      update_all<AFFINE, T, HEIGHT / 2>(task, hidden, token, column, following);
    }
  }
}

template <bool AFFINE, typename T>
void expand(const Task<T>& task, const float (*hidden)[TOKENS], const T* next) {
  const char* following = reinterpret_cast<const char*>(next);
  for (int64_t column = 0; column < task.out; column += WIDE) {
    update_all<AFFINE>(task, hidden, 0, column, following);
  }
}

// Task `index` of a call. `rows` gets those of its rows that have a scale.
template <typename T>
Task<T> task_of(const Call& call, int64_t index, int64_t* rows) {
  const Tile& tile = call.plan->tiles[index / call.modules];
  const Target& target = call.targets()[index % call.modules];
  const Pool& pool = *target.pool;
  const int64_t* own = call.plan->rows + tile.rows_from;
  int64_t ranks = 0;
  for (int64_t i = 0; i < tile.rows_count; i++) {
    rows[ranks] = own[i];
    ranks += pool.scales[own[i]] != 0.0f;
  }
  const auto affine = pool.affines[own[0]];
  return {static_cast<const T*>(call.x) + tile.first * pool.width,
          static_cast<const T*>(pool.A),
          static_cast<const T*>(pool.B),
          static_cast<T*>(target.y) + tile.first * target.y_stride,
          pool.scales,
          affine[0],
          affine[1],
          rows,
          tile.count,
          ranks,
          pool.width,
          pool.out,
          target.y_stride};
}

template <typename T>
void run_tasks(const Call& call, std::atomic<int64_t>& taken) {
  const int64_t all = call.plan->tiles_count * call.modules;
  std::vector<float> numbers((call.plan->most_rows + SQUARE) * TOKENS);
  const auto hidden = reinterpret_cast<float(*)[TOKENS]>(numbers.data());
  std::vector<int64_t> rows(call.plan->most_rows), next_rows(call.plan->most_rows);
  int64_t next = taken++;
  Task<T> following = next < all ? task_of<T>(call, next, next_rows.data()) : Task<T>{};
  while (next < all) {
    const Task<T> task = following;
    std::swap(rows, next_rows);
    shrink(task, hidden);
    next = taken++;  // not sooner: at the end, threads would wait longer for each other
    const T* first = task.x;
    if (next < all) {
      following = task_of<T>(call, next, next_rows.data());
      first = following.ranks > 0 ? following.A + following.rows[0] * following.width : following.x;
    }
    if (task.gain || task.shift) {
      expand<true>(task, hidden, first);
    } else if (task.ranks > 0) {
      expand<false>(task, hidden, first);
    }
  }
}

template <typename T>
void run(const Call& call) {
  std::atomic<int64_t> taken{0};
  if (call.threads == 1) return run_tasks<T>(call, taken);  // a team of one takes longer
#pragma omp parallel num_threads(call.threads)
  run_tasks<T>(call, taken);
}

}  // namespace

extern "C" void batten_lora(const Call* call) {
  if (call->targets()->pool->is_bfloat16) {
    run<bfloat16>(*call);
  } else {
    run<float>(*call);
  }
}
