// Attention over paged keys and values: decodes, chunks of prompts, and shared prefixes.
//
// A row (one query of one head) walks its own keys in tiles of KEYS positions and keeps a running
// maximum, totals and a weighted sum; after SPLIT positions it begins anew and the parts are merged
// in order. Tiles and parts begin at multiples of their size, and no step of a row looks at other
// rows: its bits depend on its own query, keys and values alone. Which rows are computed side by
// side, so that they read a tile once, is free; so is which thread computes which part.
//
// Scores, weights and sums are float32. Method: online softmax, as in FlashAttention. Keys lie as
// kernels/kv_write/cpu.cpp writes them.

#include "../lanes.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <vector>

using namespace batten;

namespace {

constexpr int64_t KEYS = 64;
constexpr int GROUPS = KEYS / LANES;
constexpr int64_t SPLIT = 1024;
constexpr int ROWS = 6;           // of a register tile
constexpr float LOG2_E = 1.44269504f;
constexpr int64_t ENOUGH = 4;     // tasks of a thread, for all to end at about the same time

struct Item {  // neighbouring queries of one sequence
  int64_t sequence, row, count, position;
  int64_t shared;  // positions whose blocks are also those of the item before

  int64_t end() const { return position + count; }
};

struct Shape {
  int64_t heads, kv_heads, key_dim, value_dim, block_size, table_width;
  int64_t query_stride, query_head_stride;
  float scale, softcap;
  int64_t window;  // 0: none

  int64_t group() const { return heads / kv_heads; }
  int64_t padded_value() const { return (value_dim + LANES - 1) / LANES * LANES; }
};

template <typename T>
struct Call {
  Shape s;
  const T *query, *keys, *values;
  const int64_t* tables;
  const Item* items;
  const float* sinks;
  T* out;
};

struct Range {  // of keys of a tile
  int64_t from, to;
};

inline bool operator==(Range a, Range b) { return a.from == b.from && a.to == b.to; }

// Begins at a cache line and is not filled.
template <typename T>
class Buffer {
 public:
  T* at_least(size_t size) {
    if (size_ < size) {
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64)));
      if (!data_) std::abort();
      size_ = size;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

// Blocks lie anywhere in memory, where the processor's own prefetching doesn't follow. What comes
// next is fetched a few lines at a time, between computations: all at once there is no room for.
class Ahead {
 public:
  void add(const void* from, int64_t bytes) {
    chunks_.push_back({static_cast<const char*>(from), bytes});
  }

  // Lines for `turns` of a loop at most, of which each fetches so many from `at` on, or, where
  // there are none left, its own again.
  struct Share {
    const char* at;
    int64_t turns, step;
  };

  Share share(int lines, int64_t turns, const void* own) {
    if (at_ >= stop_ && !advance()) return {static_cast<const char*>(own), turns, 0};
    const Share share{at_, std::min(turns, (stop_ - at_ + lines * LINE - 1) / (lines * LINE)),
                      lines * LINE};
    at_ += share.turns * share.step;
    return share;
  }

  template <int LINES>
  static void fetch(Share& share) {
    BATTEN_UNROLL
    for (int i = 0; i < LINES; i++) __builtin_prefetch(share.at + i * LINE, 0, 2);
    share.at += share.step;
  }

  // What is left.
  void fetch_all() {
    for (; at_ < stop_ || advance(); at_ += LINE) __builtin_prefetch(at_, 0, 2);
  }

 private:
  static constexpr int64_t LINE = 64;
  struct Chunk {
    const char* from;
    int64_t bytes;
  };

  bool advance() {
    if (chunks_.empty()) return false;
    const Chunk chunk = chunks_.back();
    chunks_.pop_back();
    at_ = chunk.from;
    stop_ = at_ + chunk.bytes;
    return true;
  }

  std::vector<Chunk> chunks_;
  const char *at_ = nullptr, *stop_ = nullptr;
};

struct Visit {  // of items [first, last) to keys [position, position + count)
  int64_t first, last, position, count;
};

// What a thread computes in, kept from task to task and from call to call.
struct Scratch {
  Buffer<float> keys, values, queries, scores, tops, shrinks, parts, totals;
  Buffer<Range> ranges;
  Buffer<int64_t> offsets;
  std::vector<Visit> visits;
  Ahead ahead;
};

// Numbers of step i of the keys of group v are at low[v] + i * stride; where a block may have but
// eight of them, those of its later half are at high[v].
template <typename T>
struct KeyTile {
  const T *low[GROUPS], *high[GROUPS];
  int64_t stride;
};

// Numbers of step i of a tile's values, one row for PER_STEP keys, are row (first + i) % size of
// block (first + i) / size.
template <typename T>
struct ValueTile {
  const T* blocks[KEYS + 1];
  int64_t first, size, stride;
};

// The step that sums up those it is multiplied with.
template <typename T>
const Lanes ONES = PER_STEP<T> == 2 ? (Lanes)(Bits{} + 0x3f803f80) : broadcast(1.0f);

// What a row knows after some of its keys: the highest of their scores (a power of two), and the
// sums of 2^(score - highest), in lanes, and of that times values.
class Part {
 public:
  static int64_t size(const Shape& s) { return 2 * LANES + s.padded_value(); }
  explicit Part(float* data) : data_(data) {}

  void clear(const Shape& s) const {
    std::fill(data_, data_ + size(s), 0.0f);
    highest() = -INF;
  }
  float* data() const { return data_; }
  float& highest() const { return data_[0]; }
  float* totals() const { return data_ + LANES; }
  float* sums() const { return data_ + 2 * LANES; }

  void merge(const Part& other, const Shape& s) const {
    const float highest = std::max(this->highest(), other.highest());
    if (highest == -INF && sum(load(other.totals())) == 0) return;  // it saw no key
    const float kept = exp2_negative(this->highest() - highest);
    const float added = exp2_negative(other.highest() - highest);
    this->highest() = highest;
    for (int64_t i = LANES; i < size(s); i += LANES) {
      store(data_ + i, fma(load(other.data_ + i), broadcast(added), load(data_ + i) * kept));
    }
  }

 private:
  float* data_;
};

// scores[row][key] = dot(query[row], key), for groups [group, group + WIDTH) of keys.
template <typename T, int COUNT, int WIDTH, bool HALVES>
void score(const float* queries, int64_t steps, const KeyTile<T>& tile, int group, float* scores,
           Ahead& ahead) {
  Lanes sums[COUNT][WIDTH] = {};
  for (int64_t step = 0; step < steps;) {
    Ahead::Share share = ahead.share(WIDTH, steps - step, queries);
    for (const int64_t stop = step + share.turns; step < stop; step++) {
      Ahead::fetch<WIDTH>(share);
      Lanes keys[WIDTH];
      BATTEN_UNROLL
      for (int v = 0; v < WIDTH; v++) {
        const T* low = tile.low[group + v] + step * tile.stride;
        keys[v] = HALVES ? load_halves(low, tile.high[group + v] + step * tile.stride)
                         : load_steps(low);
      }
      BATTEN_UNROLL
      for (int r = 0; r < COUNT; r++) {
        const Lanes number = broadcast(queries[r * steps + step]);
        BATTEN_UNROLL
        for (int v = 0; v < WIDTH; v++) sums[r][v] = multiply_add<T>(number, keys[v], sums[r][v]);
      }
    }
  }
  BATTEN_UNROLL
  for (int r = 0; r < COUNT; r++) {
    BATTEN_UNROLL
    for (int v = 0; v < WIDTH; v++) store(scores + r * KEYS + (group + v) * LANES, sums[r][v]);
  }
}

// sums[row] = sums[row] * shrinks[row] + weights[row] @ values, for keys of `range` and `WIDTH`
// Lanes of values from `column` on. Rows of `weights` are KEYS floats apart, those of `sums` are
// `stride`.
template <typename T, int COUNT, int WIDTH>
void add_values(const ValueTile<T>& tile, const float* weights, const float* shrinks, Range range,
                int64_t column, float* sums, int64_t stride, Ahead& ahead) {
  constexpr int64_t EACH = PER_STEP<T>;
  constexpr int LINES = EACH == 2 ? WIDTH : (WIDTH + 1) / 2;
  Lanes totals[COUNT][WIDTH];
  BATTEN_UNROLL
  for (int r = 0; r < COUNT; r++) {
    BATTEN_UNROLL
    for (int v = 0; v < WIDTH; v++) {
      totals[r][v] = load(sums + r * stride + column + v * LANES) * shrinks[r];
    }
  }
  const auto add = [&](const T* values, int64_t step, auto visible) {
    Lanes value[WIDTH];
    BATTEN_UNROLL
    for (int v = 0; v < WIDTH; v++) value[v] = visible(load_steps(values + v * LANES * EACH));
    BATTEN_UNROLL
    for (int r = 0; r < COUNT; r++) {
      const Lanes weight = broadcast(weights[r * KEYS + step]);
      BATTEN_UNROLL
      for (int v = 0; v < WIDTH; v++) {
        totals[r][v] = multiply_add<T>(weight, value[v], totals[r][v]);
      }
    }
  };
  const auto row = [&](int64_t step) {
    const int64_t at = tile.first + step;
    return tile.blocks[at / tile.size] + at % tile.size * tile.stride + column * EACH;
  };
  // A hidden key's weight is 0, but what lies in its place may be anything.
  if (range.from % EACH) {
    add(row(range.from / EACH), range.from / EACH,
        [](Lanes pairs) BATTEN_ALWAYS { return (Lanes)((Bits)pairs & 0xffff0000); });
  }
  for (int64_t step = (range.from + EACH - 1) / EACH; step < range.to / EACH;) {
    const int64_t left = tile.size - (tile.first + step) % tile.size;
    const int64_t turns = std::min(left, range.to / EACH - step);
    const T* values = row(step);
    Ahead::Share share = ahead.share(LINES, turns, weights);
    for (const int64_t stop = step + share.turns; step < stop; step++, values += tile.stride) {
      Ahead::fetch<LINES>(share);
      add(values, step, [](Lanes whole) BATTEN_ALWAYS { return whole; });
    }
  }
  if (range.to % EACH) {
    add(row(range.to / EACH), range.to / EACH,
        [](Lanes pairs) BATTEN_ALWAYS { return (Lanes)((Bits)pairs & 0x0000ffff); });
  }
  BATTEN_UNROLL
  for (int r = 0; r < COUNT; r++) {
    BATTEN_UNROLL
    for (int v = 0; v < WIDTH; v++) store(sums + r * stride + column + v * LANES, totals[r][v]);
  }
}

// Calls visit(first, integral_constant) for runs of at most COUNT of [first, stop).
template <int COUNT, typename Visit>
void in_runs(int64_t first, int64_t stop, Visit visit) {
  for (; stop - first >= COUNT; first += COUNT) {
    visit(first, std::integral_constant<int, COUNT>{});
  }
  if constexpr (COUNT > 1) {
    if (first < stop) in_runs<COUNT - 1>(first, stop, visit);
  }
}

// Some parts of the rows of items [first, stop), over some kv heads; whole: all their parts.
struct Piece {
  int64_t first, stop, head, heads, split, splits;
  bool whole;
};

// Calls visit(row of the piece, token, head).
template <typename T, typename Visit>
void each_row(const Call<T>& call, const Piece& piece, Visit visit) {
  const int64_t group = call.s.group();
  int64_t row = 0;
  for (int64_t kv_head = piece.head; kv_head < piece.head + piece.heads; kv_head++) {
    for (int64_t i = piece.first; i < piece.stop; i++) {
      const Item& item = call.items[i];
      for (int64_t n = 0; n < item.count * group; n++) {
        visit(row++, item.row + n / group, kv_head * group + n % group);
      }
    }
  }
}

// A piece in work.
template <typename T>
class Walk {
 public:
  Walk(const Call<T>& call, const Piece& piece, Scratch& scratch)
      : call_(call), s_(call.s), piece_(piece), steps_(call.s.key_dim / PER_STEP<T>),
        padded_(call.s.padded_value()),
        factor_(call.s.softcap > 0 ? call.s.scale / call.s.softcap : call.s.scale * LOG2_E),
        visits_(scratch.visits), ahead_(scratch.ahead) {
    offsets_ = scratch.offsets.at_least(piece.stop - piece.first + 1);
    for (int64_t i = piece.first; i < piece.stop; i++) {
      offsets_[i - piece.first] = rows_;
      rows_ += call.items[i].count * s_.group();
    }
    offsets_[piece.stop - piece.first] = rows_;
    packed_ = reinterpret_cast<T*>(scratch.keys.at_least(steps_ * KEYS));
    wide_ = reinterpret_cast<T*>(scratch.values.at_least(KEYS * padded_));
    queries_ = scratch.queries.at_least(piece.heads * rows_ * steps_ + LANES);
    scores_ = scratch.scores.at_least(rows_ * KEYS);
    tops_ = scratch.tops.at_least(rows_ + LANES);
    shrinks_ = scratch.shrinks.at_least(rows_ + LANES);
    ranges_ = scratch.ranges.at_least(rows_);
    parts_ = scratch.parts.at_least(piece.heads * rows_ * Part::size(s_));
    totals_ = piece.splits > 1 ? scratch.totals.at_least(numbers()) : parts_;
    load_queries();
  }

  // `then`: what this thread computes after it, or null.
  void compute(const Piece* then) {
    for (int64_t split = piece_.split; split < piece_.split + piece_.splits; split++) {
      for (int64_t row = 0; row < piece_.heads * rows_; row++) part(row).clear(s_);
      compute(split, split + 1 < piece_.split + piece_.splits ? nullptr : then);
      if (parts_ == totals_) return;
      if (split == piece_.split) {
        std::copy_n(parts_, numbers(), totals_);
        continue;
      }
      for (int64_t at = 0; at < numbers(); at += Part::size(s_)) {
        Part(totals_ + at).merge(Part(parts_ + at), s_);
      }
    }
  }

  // What `compute` has found: each row's part, `numbers` in all.
  float* totals() const { return totals_; }
  int64_t numbers() const { return piece_.heads * rows_ * Part::size(s_); }

 private:
  Part part(int64_t row) const { return Part(parts_ + row * Part::size(s_)); }

  void compute(int64_t split, const Piece* then) {
    constexpr int64_t TILES = SPLIT / KEYS;
    visits_.clear();
    plan(piece_.first, piece_.stop, split * TILES, (split + 1) * TILES);
    for (size_t i = 0; i < visits_.size(); i++) {
      if (i + 1 < visits_.size()) {
        look_ahead(visits_[i + 1], piece_);
      } else if (then) {
        look_ahead(first_visit(*then), *then);
      }
      attend(visits_[i]);
      ahead_.fetch_all();
    }
  }

  void load_queries() {
    each_row(call_, piece_, [&](int64_t row, int64_t token, int64_t head) {
      const T* query = call_.query + token * s_.query_stride + head * s_.query_head_stride;
      for (int64_t step = 0; step < steps_; step += LANES) {
        const Lanes lanes = load_steps(query + step * PER_STEP<T>,
                                       s_.key_dim - step * PER_STEP<T>);
        store(queries_ + row * steps_ + step, lanes);  // later rows overwrite what is too much
      }
    });
  }

  int64_t begin(const Item& item) const {
    return s_.window ? std::max<int64_t>(item.position - s_.window + 1, 0) : 0;
  }

  // Visits to tiles [tile, stop) of items [first, last), those that share a tile together.
  void plan(int64_t first, int64_t last, int64_t tile, int64_t stop) {
    int64_t from = begin(call_.items[first]), to = call_.items[first].end();
    for (int64_t i = first + 1; i < last; i++) {
      from = std::min(from, begin(call_.items[i]));
      to = std::max(to, call_.items[i].end());
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
          plan(start, run, tile, stop);
        }
        return;
      }
      visits_.push_back({first, last, tile * KEYS, std::min(to - tile * KEYS, KEYS)});
    }
  }

  // About where a piece begins.
  Visit first_visit(const Piece& piece) const {
    const Item& item = call_.items[piece.first];
    const int64_t position = std::max(begin(item) / KEYS * KEYS, piece.split * SPLIT);
    return {piece.first, piece.first + 1, position, std::min(item.end() - position, KEYS)};
  }

  void look_ahead(const Visit& visit, const Piece& piece) {
    const int64_t size = s_.block_size;
    if (size > KEYS) return;  // the processor follows these
    const int64_t* table = table_of(visit.first);
    const int64_t first = visit.position / size;
    for (int64_t block = (visit.position + visit.count - 1) / size; block >= first; block--) {
      const int64_t at = (table[block] * s_.kv_heads + piece.head) * size;
      const int64_t bytes = piece.heads * size * sizeof(T);
      ahead_.add(call_.values + at * s_.value_dim, bytes * s_.value_dim);
      ahead_.add(call_.keys + at * s_.key_dim, bytes * s_.key_dim);
    }
  }

  const int64_t* table_of(int64_t item) const {
    return call_.tables + call_.items[item].sequence * s_.table_width;
  }

  void attend(const Visit& visit) {
    const int64_t from = offsets_[visit.first - piece_.first];
    const int64_t to = offsets_[visit.last - piece_.first];
    const int64_t* table = table_of(visit.first);
    const int64_t position = visit.position, count = visit.count;
    find_ranges(visit.first, visit.last, position);
    for (int64_t head = 0; head < piece_.heads; head++) {
      score_rows(table, head, position, count, from, to);
      weigh(head, from, to, count);
      const ValueTile<T> values = value_tile(table, piece_.head + head, position, count);
      add(padded_ == s_.value_dim ? values : widen(values, count), head, from, to);
    }
  }

  void find_ranges(int64_t first, int64_t last, int64_t position) {
    for (int64_t i = first; i < last; i++) {
      const Item& item = call_.items[i];
      for (int64_t n = 0; n < item.count; n++) {
        const int64_t at = item.position + n;
        const int64_t from = s_.window ? std::max<int64_t>(at - s_.window + 1 - position, 0) : 0;
        const Range range{from, std::min(at + 1 - position, KEYS)};
        std::fill_n(ranges_ + offsets_[i - piece_.first] + n * s_.group(), s_.group(), range);
      }
    }
  }

  void score_rows(const int64_t* table, int64_t head, int64_t position, int64_t count,
                  int64_t from, int64_t to) {
    const bool halves = s_.block_size % LANES && s_.block_size % (LANES / 2) == 0;
    const KeyTile<T> tile = key_tile(table, piece_.head + head, position, count);
    const int groups = (count + LANES - 1) / LANES;
    in_runs<ROWS>(from, to, [&](int64_t row, auto rows) {
      in_runs<VECTORS>(0, groups, [&](int64_t group, auto width) {
        constexpr int COUNT = decltype(rows)::value, WIDTH = decltype(width)::value;
        const auto run = halves ? score<T, COUNT, WIDTH, true> : score<T, COUNT, WIDTH, false>;
        run(queries_ + (head * rows_ + row) * steps_, steps_, tile, group, scores_ + row * KEYS,
            ahead_);
      });
    });
  }

  KeyTile<T> key_tile(const int64_t* table, int64_t kv_head, int64_t position, int64_t count) {
    constexpr int64_t NUMBERS = PER_STEP<T>, HALF = LANES / 2;
    const int64_t size = s_.block_size;
    const auto key = [&](int64_t number) {  // past the last: some that may be read
      const int64_t at = position + (number < count ? number : 0);
      const T* block = call_.keys + (table[at / size] * s_.kv_heads + kv_head) * size * s_.key_dim;
      return block + at % size * NUMBERS;
    };
    KeyTile<T> tile;
    if (size % HALF == 0) {
      tile.stride = size * NUMBERS;
      for (int v = 0; v < GROUPS; v++) {
        tile.low[v] = key(v * LANES);
        tile.high[v] = key(v * LANES + HALF);
      }
      return tile;
    }
    tile.stride = KEYS * NUMBERS;
    for (int64_t number = 0; number < KEYS; number++) {
      const T* numbers = key(number);
      for (int64_t step = 0; step < steps_; step++) {
        std::memcpy(packed_ + step * tile.stride + number * NUMBERS,
                    numbers + step * size * NUMBERS, NUMBERS * sizeof(T));
      }
    }
    for (int v = 0; v < GROUPS; v++) tile.low[v] = packed_ + v * LANES * NUMBERS;
    return tile;
  }

  // Scores to weights, in their place; what each row knows of its highest and its totals goes on.
  void weigh(int64_t head, int64_t from, int64_t to, int64_t count) {
    const int groups = (count + LANES - 1) / LANES;
    for (int64_t row = from; row < to; row++) tops_[row] = scale_scores(row, groups);
    for (int64_t row = from; row < to; row += LANES) raise(head, row, std::min(row + LANES, to));
    for (int64_t row = from; row < to; row++) {
      exponentiate(row, part(head * rows_ + row).totals(), groups);
    }
  }

  // To powers of two, of which it returns the highest; those of hidden keys are -INF.
  float scale_scores(int64_t row, int groups) const {
    const Range range = ranges_[row];
    float* scores = scores_ + row * KEYS;
    Lanes highest = broadcast(-INF);
    Ints key = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int v = 0; v < groups; v++, key += LANES) {
      Lanes x = load(scores + v * LANES) * factor_;
      if (s_.softcap > 0) x = hyperbolic_tangent(x) * (s_.softcap * LOG2_E);
      if (range.from > v * LANES || range.to < (v + 1) * LANES) {
        const Ints visible = (key >= int32_t(range.from)) & (key < int32_t(range.to));
        x = visible ? x : broadcast(-INF);
      }
      store(scores + v * LANES, x);
      highest = larger(x, highest);
    }
    return largest(highest);
  }

  // Of up to LANES rows: the highest of all their keys so far, and what that makes of older sums.
  void raise(int64_t head, int64_t from, int64_t to) {
    Lanes old = broadcast(-INF);
    for (int64_t row = from; row < to; row++) old[row - from] = part(head * rows_ + row).highest();
    const Lanes raised = larger(load(tops_ + from), old);
    const Lanes finite = raised == -INF ? Lanes{} : raised;
    store(tops_ + from, finite);
    store(shrinks_ + from, exp2_negative(old - finite));
    for (int64_t row = from; row < to; row++) {
      part(head * rows_ + row).highest() = raised[row - from];
    }
  }

  void exponentiate(int64_t row, float* totals, int groups) const {
    float* scores = scores_ + row * KEYS;
    Lanes numbers[GROUPS], total = load(totals) * shrinks_[row];
    for (int v = 0; v < GROUPS; v++) {  // a rounded pair's second half may be nobody's: 0 then
      numbers[v] = v < groups ? exp2_negative(load(scores + v * LANES) - tops_[row]) : Lanes{};
    }
    for (int v = 0; v < groups; v += PER_STEP<T>) {
      Lanes pair[PER_STEP<T>];
      std::copy_n(numbers + v, PER_STEP<T>, pair);
      const Lanes weights = to_steps<T>(pair);
      store(scores + v / PER_STEP<T> * LANES, weights);
      total = multiply_add<T>(weights, ONES<T>, total);
    }
    store(totals, total);
  }

  ValueTile<T> value_tile(const int64_t* table, int64_t kv_head, int64_t position,
                          int64_t count) const {
    const int64_t size = s_.block_size, first = position / size;
    ValueTile<T> tile;
    tile.first = position % size / PER_STEP<T>;
    tile.size = size / PER_STEP<T>;
    tile.stride = s_.value_dim * PER_STEP<T>;
    for (int64_t block = first; block * size < position + count; block++) {
      const int64_t at = table[block] * s_.kv_heads + kv_head;
      tile.blocks[block - first] = call_.values + at * size * s_.value_dim;
    }
    return tile;
  }

  // The same with rows filled up with zeros.
  ValueTile<T> widen(const ValueTile<T>& tile, int64_t count) {
    const int64_t stride = padded_ * PER_STEP<T>;
    for (int64_t step = 0; step * PER_STEP<T> < count; step++) {
      const int64_t at = tile.first + step;
      T* to = wide_ + step * stride;
      std::copy_n(tile.blocks[at / tile.size] + at % tile.size * tile.stride, tile.stride, to);
      std::fill(to + tile.stride, to + stride, T{});
    }
    return {{wide_}, 0, KEYS, stride};
  }

  void add(const ValueTile<T>& tile, int64_t head, int64_t from, int64_t to) {
    const auto run = [&](int64_t row, auto rows) {
      if (ranges_[row].to <= ranges_[row].from) return;
      in_runs<VECTORS>(0, padded_ / LANES, [&](int64_t column, auto width) {
        add_values<T, decltype(rows)::value, decltype(width)::value>(
            tile, scores_ + row * KEYS, shrinks_ + row, ranges_[row], column * LANES,
            part(head * rows_ + row).sums(), Part::size(s_), ahead_);
      });
    };
    in_runs<ROWS>(from, to, [&](int64_t row, auto rows) {
      bool alike = true;
      for (int r = 1; r < decltype(rows)::value; r++) alike &= ranges_[row + r] == ranges_[row];
      if (alike) return run(row, rows);
      for (int r = 0; r < decltype(rows)::value; r++) {
        run(row + r, std::integral_constant<int, 1>{});
      }
    });
  }

  const Call<T>& call_;
  const Shape& s_;
  const Piece& piece_;
  const int64_t steps_, padded_;
  const float factor_;
  int64_t rows_ = 0;  // of one kv head
  int64_t* offsets_;
  T *packed_, *wide_;
  float *queries_, *scores_, *tops_, *shrinks_, *parts_, *totals_;
  Range* ranges_;
  std::vector<Visit>& visits_;
  Ahead& ahead_;
};

template <typename T>
void finish(const Call<T>& call, const Part& part, int64_t token, int64_t head) {
  const Shape& s = call.s;
  float shrink = 1.0f, total = sum(load(part.totals()));
  if (call.sinks) {
    const float sink = call.sinks[head] * LOG2_E, highest = std::max(part.highest(), sink);
    shrink = exp2_negative(part.highest() - highest);
    total = total * shrink + exp2_negative(sink - highest);
  }
  const float factor = shrink / total;
  T* out = call.out + (token * s.heads + head) * s.value_dim;
  for (int64_t i = 0; i < s.value_dim; i += LANES) {
    store(out + i, load(part.sums() + i) * factor, s.value_dim - i);
  }
}

// A block's heads lie side by side: one thread takes them all where that leaves enough for others.
// Where even single heads are too few, their parts are handed out one by one.
template <typename T>
std::vector<Piece> plan_pieces(const Call<T>& call, const int64_t* tasks, int64_t count,
                               int64_t threads) {
  const int64_t kv_heads = call.s.kv_heads, enough = ENOUGH * threads;
  const int64_t heads = count < enough ? 1 : kv_heads;
  std::vector<Piece> pieces;
  for (int64_t task = 0; task < count; task++) {
    const int64_t first = tasks[task], stop = tasks[task + 1];
    int64_t longest = 0;
    for (int64_t i = first; i < stop; i++) longest = std::max(longest, call.items[i].end());
    const int64_t splits = (longest + SPLIT - 1) / SPLIT;
    const int64_t together = count * kv_heads < enough ? 1 : splits;
    for (int64_t head = 0; head < kv_heads; head += heads) {
      for (int64_t split = 0; split < splits; split += together) {
        pieces.push_back({first, stop, head, heads, split, together, together == splits});
      }
    }
  }
  return pieces;
}

template <typename T>
void run(const Call<T>& call, const std::vector<Piece>& pieces, int threads) {
  const size_t count = pieces.size();
  std::vector<std::vector<float>> totals(count);  // of pieces that are not whole
  std::atomic<size_t> claimed{0};
  const auto finish_all = [&](const Piece& piece, float* totals) {
    each_row(call, piece, [&](int64_t row, int64_t token, int64_t head) {
      finish(call, Part(totals + row * Part::size(call.s)), token, head);
    });
  };
#pragma omp parallel num_threads(threads)
  {
    thread_local Scratch scratch;
    for (size_t i = claimed++, then; i < count; i = then) {
      then = claimed++;
      Walk<T> walk(call, pieces[i], scratch);
      walk.compute(then < count ? &pieces[then] : nullptr);
      if (pieces[i].whole) {
        finish_all(pieces[i], walk.totals());
      } else {
        totals[i].assign(walk.totals(), walk.totals() + walk.numbers());
      }
    }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < count; i++) {
      if (pieces[i].whole || pieces[i].split) continue;
      for (size_t other = i + 1; other < count && pieces[other].split; other++) {
        for (size_t at = 0; at < totals[i].size(); at += Part::size(call.s)) {
          Part(&totals[i][at]).merge(Part(&totals[other][at]), call.s);
        }
      }
      finish_all(pieces[i], totals[i].data());
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
    const Call<T> call{shape, static_cast<const T*>(query), static_cast<const T*>(keys),
                       static_cast<const T*>(values), tables,
                       reinterpret_cast<const Item*>(items), sinks, static_cast<T*>(out)};
    run(call, plan_pieces(call, tasks, count, threads), threads);
  };
  if (is_bfloat16) {
    call(bfloat16{});
  } else {
    call(float{});
  }
}
