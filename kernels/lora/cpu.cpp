// Low-rank updates of packed tokens, each with the rows of its own adapter.
//
// A task is up to TOKENS tokens of one adapter: their products with its rows of A, scaled, then
// with its rows of B, added to y. Every number is summed in an order that depends on the widths
// and its own adapter's rows alone, so its bits are the same alone and in any batch. All sums are
// float32, and y is rounded once.

#include "../lanes.h"

#include <vector>

using namespace batten;

namespace {

constexpr int SQUARE = 4;                         // tokens and rows of a product block
constexpr int TALL = VECTORS > 1 ? 8 : 4;         // tokens of an update block
constexpr int WIDE = VECTORS > 1 ? 2 : 1;         // and its Lanes of columns

constexpr int64_t AHEAD = 256;  // columns of B that are fetched before they are read

struct Task {
  int64_t first, count, rows_from, rows_count;
};

// Of `hidden`: whole squares.
inline int64_t stride(const Task& task) {
  return (task.rows_count + SQUARE - 1) / SQUARE * SQUARE;
}

template <typename T>
struct Call {
  const T* x;
  T* y;
  const T *A, *B;
  const float* scales;
  const int64_t* rows;
  int64_t width, out, x_stride, y_stride;
};

// Rows of a pool are too short for the processor's own prefetching to find its way.
template <typename T>
void fetch(const T* from, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < int64_t(count * sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

// Lane 4 * i + j is dot(x[i], w[j]).
template <typename T>
Lanes products(const T* const (&x)[SQUARE], const T* const (&w)[SQUARE], int64_t width) {
  constexpr int64_t STEP = LANES * PER_STEP<T>;
  Lanes sums[SQUARE * SQUARE] = {};
  const auto add = [&](auto read) {
    Lanes weights[SQUARE];
    BATTEN_UNROLL
    for (int j = 0; j < SQUARE; j++) weights[j] = read(w[j]);
    BATTEN_UNROLL
    for (int i = 0; i < SQUARE; i++) {
      const Lanes numbers = read(x[i]);
      BATTEN_UNROLL
      for (int j = 0; j < SQUARE; j++) {
        sums[SQUARE * i + j] = multiply_add<T>(numbers, weights[j], sums[SQUARE * i + j]);
      }
    }
  };
  int64_t at = 0;
  for (; at + STEP <= width; at += STEP) add([&](const T* row) { return load_steps(row + at); });
  if (at < width) add([&](const T* row) { return load_steps(row + at, width - at); });
  return sums_of(sums);
}

// hidden[token][row] = scales[row] * dot(A[row], x[token]), up to whole squares.
template <typename T>
void shrink(const Call<T>& call, const Task& task, float* hidden) {
  const int64_t* rows = call.rows + task.rows_from;
  for (int64_t row = 0; row < task.rows_count; row += SQUARE) {
    const T* w[SQUARE];
    Lanes scales;
    BATTEN_UNROLL
    for (int j = 0; j < SQUARE; j++) {
      const int64_t index = rows[std::min(row + j, task.rows_count - 1)];
      w[j] = call.A + index * call.width;
      if (row + j + SQUARE < task.rows_count) {
        fetch(call.A + rows[row + j + SQUARE] * call.width, call.width);
      }
      fetch(call.B + index * call.out, std::min(call.out, AHEAD));
      BATTEN_UNROLL
      for (int i = 0; i < SQUARE; i++) scales[SQUARE * i + j] = call.scales[index];
    }
    for (int64_t token = 0; token < task.count; token += SQUARE) {
      const T* x[SQUARE];
      BATTEN_UNROLL
      for (int i = 0; i < SQUARE; i++) {
        x[i] = call.x + (task.first + std::min(token + i, task.count - 1)) * call.x_stride;
      }
      float block[LANES];
      store(block, products(x, w, call.width) * scales);
      BATTEN_UNROLL
      for (int i = 0; i < SQUARE; i++) {
        float* to = hidden + (token + i) * stride(task) + row;
        std::memcpy(to, block + SQUARE * i, SQUARE * sizeof(float));
      }
    }
  }
}

// y[token] += hidden[token] @ B[rows], for `count` tokens and `width` Lanes of columns.
template <int HEIGHT, typename T>
void update(const Call<T>& call, const Task& task, const float* hidden, int64_t token,
            int64_t column) {
  const int64_t* rows = call.rows + task.rows_from;
  Lanes sums[HEIGHT][WIDE] = {};
  const bool whole = column + WIDE * LANES <= call.out;
  for (int64_t row = 0; row < task.rows_count; row++) {
    const T* b = call.B + rows[row] * call.out + column;
    if (token == 0 && column + AHEAD < call.out) __builtin_prefetch(b + AHEAD, 0, 2);
    Lanes weights[WIDE];
    BATTEN_UNROLL
    for (int v = 0; v < WIDE; v++) {
      weights[v] =
          whole ? load(b + v * LANES) : load(b + v * LANES, call.out - column - v * LANES);
    }
    BATTEN_UNROLL
    for (int i = 0; i < HEIGHT; i++) {
      const Lanes number = broadcast(hidden[(token + i) * stride(task) + row]);
      BATTEN_UNROLL
      for (int v = 0; v < WIDE; v++) sums[i][v] = fma(number, weights[v], sums[i][v]);
    }
  }
  BATTEN_UNROLL
  for (int i = 0; i < HEIGHT; i++) {
    BATTEN_UNROLL
    for (int v = 0; v < WIDE; v++) {
      const int64_t at = column + v * LANES;
      T* y = call.y + (task.first + token + i) * call.y_stride + at;
      if (at < call.out) store(y, load(y, call.out - at) + sums[i][v], call.out - at);
    }
  }
}

template <typename T, int HEIGHT = TALL>
void expand(const Call<T>& call, const Task& task, const float* hidden, int64_t token,
            int64_t column) {
  for (; token + HEIGHT <= task.count; token += HEIGHT) {
    update<HEIGHT>(call, task, hidden, token, column);
  }
  if constexpr (HEIGHT > 1) {
    if (token < task.count) expand<T, HEIGHT / 2>(call, task, hidden, token, column);
  }
}

template <typename T>
void run(const Call<T>& call, const Task* tasks, int64_t count, int64_t hidden_size, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> hidden(hidden_size);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
      shrink(call, tasks[i], hidden.data());
      for (int64_t column = 0; column < call.out; column += WIDE * LANES) {
        expand(call, tasks[i], hidden.data(), 0, column);
      }
    }
  }
}

}  // namespace

// `tasks` [count, 4]: first token, tokens, first of its `rows`, rows. `hidden_size` is the largest
// tokens * rows of a task, both rounded up to multiples of 4.
extern "C" void batten_lora(const void* x, void* y, const void* A, const void* B,
                            const float* scales, const int64_t* rows, const int64_t* tasks,
                            int64_t count, int64_t hidden_size, int64_t width, int64_t out,
                            int64_t x_stride, int64_t y_stride, int is_bfloat16, int threads) {
  const auto call = [&](auto number) {
    using T = decltype(number);
    run(Call<T>{static_cast<const T*>(x), static_cast<T*>(y), static_cast<const T*>(A),
                static_cast<const T*>(B), scales, rows, width, out, x_stride, y_stride},
        reinterpret_cast<const Task*>(tasks), count, hidden_size, threads);
  };
  if (is_bfloat16) {
    call(bfloat16{});
  } else {
    call(float{});
  }
}
