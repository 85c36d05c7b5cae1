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
#include <deque>
#include <memory>
#include <vector>

using namespace batten;

namespace {

constexpr int64_t KEYS = 64;
constexpr int GROUPS = KEYS / LANES;
constexpr int64_t SPLIT = 1024;
constexpr int ROWS = 6;           // of a register tile
constexpr float LOG2_E = 1.44269504f;
constexpr int64_t AHEAD = 192 << 10;  // of what comes next that is fetched
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

  const int64_t* table_of(int64_t item) const {
    return tables + items[item].sequence * s.table_width;
  }
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

struct Visit {  // of items [first, last) to keys [position, position + count)
  int64_t first, last, position, count;
};

// What a thread computes in, kept from task to task and from call to call.
struct Scratch {
  Buffer<float> keys, values, queries, scores, tops, shrinks, parts, totals;
  Buffer<Range> ranges;
  Buffer<int64_t> offsets;
};

// Some parts of the rows of items [first, stop), over some kv heads; whole: all their parts.
struct Piece {
  int64_t first, stop, head, heads, split, splits;
  bool whole;
};

template <typename T>
int64_t begin(const Call<T>& call, int64_t item) {
  return call.s.window ? std::max<int64_t>(call.items[item].position - call.s.window + 1, 0) : 0;
}

// Adds visits to tiles [tile, stop) of items [first, last), those that share a tile together.
template <typename T>
void plan_visits(const Call<T>& call, int64_t first, int64_t last, int64_t tile, int64_t stop,
                 std::vector<Visit>& visits) {
  int64_t from = begin(call, first), to = call.items[first].end();
  for (int64_t i = first + 1; i < last; i++) {
    from = std::min(from, begin(call, i));
    to = std::max(to, call.items[i].end());
  }
  tile = std::max(tile, from / KEYS);
  stop = std::min(stop, (to + KEYS - 1) / KEYS);
  for (; tile < stop; tile++) {
    const auto shares = [&](int64_t i) { return call.items[i].shared >= (tile + 1) * KEYS; };
    int64_t run = first + 1;
    while (run < last && shares(run)) run++;
    if (run < last) {
      for (int64_t start = first; start < last; start = run) {
        for (run = start + 1; run < last && shares(run);) run++;
        plan_visits(call, start, run, tile, stop, visits);
      }
      return;
    }
    visits.push_back({first, last, tile * KEYS, std::min(to - tile * KEYS, KEYS)});
  }
}

// Blocks lie anywhere in memory, where the processor's own prefetching doesn't follow. What comes
// next is fetched a few lines at a time, between computations: all at once there is no room for.
class Ahead {
 public:
  void add(const void* from, int64_t bytes) {
    if (next_ > MANY) {
      chunks_.erase(chunks_.begin(), chunks_.begin() + next_);
      next_ = 0;
    }
    Chunk& chunk = chunks_.emplace_back();
    chunk.from = static_cast<const char*>(from);
    chunk.stop = chunk.from + bytes;
    added_++;
  }

  // How many chunks there have been.
  int64_t added() const { return added_; }

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

  // The first `chunks` of all there have been.
  void fetch_until(int64_t chunks) {
    while (begun_ < chunks || (begun_ == chunks && at_ < stop_)) {
      if (at_ >= stop_) advance();
      for (; at_ < stop_; at_ += LINE) __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  static constexpr int64_t LINE = 64;
  static constexpr size_t MANY = 512;
  struct Chunk {
    const char *from, *stop;
  };

  bool advance() {
    if (next_ == chunks_.size()) return false;
    at_ = chunks_[next_].from;
    stop_ = chunks_[next_].stop;
    next_++;
    begun_++;
    return true;
  }

  std::vector<Chunk> chunks_;
  size_t next_ = 0;
  const char *at_ = nullptr, *stop_ = nullptr;
  int64_t added_ = 0, begun_ = 0;
};

// A piece, and which tiles its rows walk to in which order.
struct Plan {
  const Piece* piece = nullptr;
  std::vector<Visit> visits;
  size_t fetched = 0;  // visits whose keys and values are being fetched, or have been
};

// What a thread computes, and fetches meanwhile. It claims a piece while it computes another.
template <typename T>
class Course {
 public:
  Course(const Call<T>& call, const std::vector<Piece>& pieces, std::atomic<size_t>& claimed)
      : call_(call), pieces_(pieces), claimed_(claimed), visits_ahead_(AHEAD / visit_bytes()) {}

  // To the next piece, or null.
  const Plan* advance() {
    now_.piece = nullptr;
    std::swap(now_, then_);
    return now_.piece || claim(now_) ? &now_ : nullptr;
  }

  Ahead& ahead() { return ahead_; }

  void begin_visit() {
    while (ends_.size() < visits_ahead_ + 2) {
      Plan& plan = now_.fetched < now_.visits.size() ? now_ : then_;
      if (!plan.piece && !claim(plan)) return;
      if (plan.fetched == plan.visits.size()) return;
      add(*plan.piece, plan.visits[plan.fetched++]);
      ends_.push_back(ahead_.added());
    }
  }

  // The next visit's keys and values are fetched.
  void end_visit() {
    ends_.pop_front();
    if (!ends_.empty()) ahead_.fetch_until(ends_.front());
  }

 private:
  bool claim(Plan& plan) {
    const size_t number = claimed_++;
    if (number >= pieces_.size()) return false;
    const Piece& piece = pieces_[number];
    plan.piece = &piece;
    plan.fetched = 0;
    plan.visits.clear();
    for (int64_t split = piece.split; split < piece.split + piece.splits; split++) {
      plan_visits(call_, piece.first, piece.stop, split * SPLIT / KEYS,
                  (split + 1) * SPLIT / KEYS, plan.visits);
    }
    return true;
  }

  void add(const Piece& piece, const Visit& visit) {
    const Shape& s = call_.s;
    if (s.block_size > KEYS) return;  // the processor follows these
    const int64_t* table = call_.table_of(visit.first);
    const int64_t last = (visit.position + visit.count - 1) / s.block_size;
    const int64_t bytes = piece.heads * s.block_size * sizeof(T);
    for (int64_t block = visit.position / s.block_size; block <= last; block++) {
      const int64_t at = (table[block] * s.kv_heads + piece.head) * s.block_size;
      ahead_.add(call_.keys + at * s.key_dim, bytes * s.key_dim);
      ahead_.add(call_.values + at * s.value_dim, bytes * s.value_dim);
    }
  }

  int64_t visit_bytes() const {
    const Shape& s = call_.s;
    return KEYS * s.kv_heads * (s.key_dim + s.value_dim) * sizeof(T);
  }

  const Call<T>& call_;
  const std::vector<Piece>& pieces_;
  std::atomic<size_t>& claimed_;
  const size_t visits_ahead_;  // after the next one
  Ahead ahead_;
  Plan now_, then_;
  std::deque<int64_t> ends_;  // of this visit's chunks, and of those of later ones
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
    for (int v = 0; v < WIDTH; v++) value[v] = in_register(visible(load_steps(values + v * LANES * EACH)));
    BATTEN_UNROLL
    for (int r = 0; r < COUNT; r++) {
      const Lanes weight = broadcast(weights[r * KEYS + step]);
      BATTEN_UNROLL
      for (int v = 0; v < WIDTH; v++) {
        totals[r][v] = multiply_add<T>(weight, value[v], totals[r][v]);
      }
    }
  };
  const int64_t begin = tile.first + range.from / EACH;
  const T* const* block = tile.blocks + (begin < tile.size ? 0 : begin / tile.size);
  int64_t step = range.from / EACH, row = begin < tile.size ? begin : begin % tile.size;
  const auto next = [&](int64_t steps) {
    step += steps;
    row += steps;
    if (row == tile.size) row = 0, block++;
  };
  // A hidden key's weight is 0, but what lies in its place may be anything.
  if (range.from % EACH) {
    add(*block + row * tile.stride + column * EACH, step,
        [](Lanes pairs) BATTEN_ALWAYS { return (Lanes)((Bits)pairs & 0xffff0000); });
    next(1);
  }
  while (step < range.to / EACH) {
    const T* values = *block + row * tile.stride + column * EACH;
    Ahead::Share share =
        ahead.share(LINES, std::min(tile.size - row, range.to / EACH - step), weights);
    for (int64_t i = step; i < step + share.turns; i++, values += tile.stride) {
      Ahead::fetch<LINES>(share);
      add(values, i, [](Lanes whole) BATTEN_ALWAYS { return whole; });
    }
    next(share.turns);
  }
  if (range.to % EACH) {
    add(*block + row * tile.stride + column * EACH, step,
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
  Walk(const Call<T>& call, const Plan& plan, Scratch& scratch, Course<T>& course)
      : call_(call), s_(call.s), piece_(*plan.piece), visits_(plan.visits), course_(course),
        steps_(call.s.key_dim / PER_STEP<T>), padded_(call.s.padded_value()),
        factor_(call.s.softcap > 0 ? call.s.scale / call.s.softcap : call.s.scale * LOG2_E) {
    offsets_ = scratch.offsets.at_least(piece_.stop - piece_.first + 1);
    for (int64_t i = piece_.first; i < piece_.stop; i++) {
      offsets_[i - piece_.first] = rows_;
      rows_ += call.items[i].count * s_.group();
    }
    offsets_[piece_.stop - piece_.first] = rows_;
    packed_ = reinterpret_cast<T*>(scratch.keys.at_least(steps_ * KEYS));
    wide_ = reinterpret_cast<T*>(scratch.values.at_least(KEYS * padded_));
    queries_ = scratch.queries.at_least(piece_.heads * rows_ * steps_ + LANES);
    scores_ = scratch.scores.at_least(rows_ * KEYS);
    tops_ = scratch.tops.at_least(rows_ + LANES);
    shrinks_ = scratch.shrinks.at_least(rows_ + LANES);
    ranges_ = scratch.ranges.at_least(rows_);
    parts_ = scratch.parts.at_least(piece_.heads * rows_ * Part::size(s_));
    totals_ = piece_.splits > 1 ? scratch.totals.at_least(numbers()) : parts_;
    load_queries();
  }

  void compute() {
    clear_parts();
    if (totals_ != parts_) std::copy_n(parts_, numbers(), totals_);
    int64_t split = piece_.split;
    for (const Visit& visit : visits_) {
      if (visit.position / SPLIT != split) end_split();
      split = visit.position / SPLIT;
      course_.begin_visit();
      attend(visit);
      course_.end_visit();
    }
    end_split();
  }

  // What `compute` has found: each row's part, `numbers` in all.
  float* totals() const { return totals_; }
  int64_t numbers() const { return piece_.heads * rows_ * Part::size(s_); }

 private:
  Part part(int64_t row) const { return Part(parts_ + row * Part::size(s_)); }

  void clear_parts() const {
    for (int64_t row = 0; row < piece_.heads * rows_; row++) part(row).clear(s_);
  }

  void end_split() const {
    if (parts_ == totals_) return;
    for (int64_t at = 0; at < numbers(); at += Part::size(s_)) {
      Part(totals_ + at).merge(Part(parts_ + at), s_);
    }
    clear_parts();
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

  void attend(const Visit& visit) {
    const int64_t from = offsets_[visit.first - piece_.first];
    const int64_t to = offsets_[visit.last - piece_.first];
    const int64_t* table = call_.table_of(visit.first);
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
            course_.ahead());
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
            part(head * rows_ + row).sums(), Part::size(s_), course_.ahead());
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
  const std::vector<Visit>& visits_;
  Course<T>& course_;
  const int64_t steps_, padded_;
  const float factor_;
  int64_t rows_ = 0;  // of one kv head
  int64_t* offsets_;
  T *packed_, *wide_;
  float *queries_, *scores_, *tops_, *shrinks_, *parts_, *totals_;
  Range* ranges_;
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
    Course<T> course(call, pieces, claimed);
    while (const Plan* plan = course.advance()) {
      Walk<T> walk(call, *plan, scratch, course);
      walk.compute();
      if (plan->piece->whole) {
        finish_all(*plan->piece, walk.totals());
      } else {
        totals[plan->piece - pieces.data()].assign(walk.totals(), walk.totals() + walk.numbers());
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
