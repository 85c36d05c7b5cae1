// Tokens and log-probabilities from rows of logits, without ordering the vocabulary.
//
// A weight is exp((logit - highest) / temperature) in float32, so the largest is 1. Weights are
// summed in float64: within a chunk lane by lane, then chunk after chunk. For a row with filters a
// logit is found first that nothing they keep lies below, and from then on only the candidates of
// at least that are looked at. No row looks at another.

#include "../lanes.h"

#include <numeric>
#include <utility>
#include <vector>

using namespace batten;

namespace {

constexpr int64_t CHUNK = 64 * LANES;
constexpr float LOG2_E = 1.44269504f;
constexpr float COLDEST = std::numeric_limits<float>::min();
constexpr float HOTTEST = 1e38f;  // LOG2_E over them is a normal number, too

// What a thread computes in, kept from call to call: new memory would cost page faults.
struct Scratch {
  std::vector<float> maxima;  // of each lane of each chunk
  std::vector<double> sums;   // of the weights of each chunk
  std::vector<float> values;  // of candidates: their logits, then their weights
  std::vector<float> tokens;  // of candidates: the bits of an int32
  std::vector<float> reordered;

  static Scratch& of_thread(int64_t vocabulary) {
    static thread_local Scratch scratch;
    const int64_t chunks = (vocabulary + CHUNK - 1) / CHUNK;
    scratch.maxima.resize(chunks * LANES);
    scratch.sums.resize(chunks);
    scratch.values.resize(vocabulary + LANES);
    scratch.tokens.resize(vocabulary + LANES);
    scratch.reordered.resize(vocabulary + LANES);
    return scratch;
  }
};

struct Row {
  const float* logits;
  int64_t count;
  float highest;  // infinite where the row is broken
  int64_t first;  // token of the highest
};

Row read(const float* logits, int64_t count, float* maxima) {
  Row row{logits, count, -INF, 0};
  uint32_t numbers = 0xffff;
  for (int64_t begin = 0; begin < count; begin += CHUNK, maxima += LANES) {
    Lanes top = broadcast(-INF);
    in_lanes(begin, std::min(begin + CHUNK, count), [&](int64_t i, int64_t left) {
      const Lanes x = load(logits + i, left, -INF);
      numbers &= at_least(x, broadcast(-INF));
      top = larger(x, top);
    });
    store(maxima, top);
    if (largest(top) > row.highest) {
      row.highest = largest(top);
      row.first = begin;
    }
  }
  if (numbers != 0xffff) row.highest = INF;
  if (std::isfinite(row.highest)) {
    while (logits[row.first] != row.highest) row.first++;
  }
  return row;
}

BATTEN_INLINE Lanes weigh(Lanes logits, float highest, float factor) {
  return exp2_negative((logits - highest) * factor);
}

// Sums of `weights(i, left)`, sixteen from i on, chunk by chunk; returns the sum of all.
template <typename Weights>
double sum_chunks(int64_t count, double* sums, Weights weights) {
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += CHUNK) {
    WideSums sum;
    in_lanes(begin, std::min(begin + CHUNK, count),
             [&](int64_t i, int64_t left) { sum.add(weights(i, left)); });
    *sums = sum.total();
    total += *sums++;
  }
  return total;
}

// Where the sum of all weights so far first exceeds uniform * total.
template <typename Weights>
int64_t pick(int64_t count, double uniform, double* sums, Weights weights) {
  const double total = sum_chunks(count, sums, weights);
  const double target = std::min(uniform * total, std::nextafter(total, 0.0));
  double passed = 0;
  int64_t begin = 0;
  for (; passed + *sums <= target; begin += CHUNK) passed += *sums++;
  const int64_t end = std::min(begin + CHUNK, count);
  float chunk[CHUNK];
  in_lanes(begin, end,
           [&](int64_t i, int64_t left) { store(chunk + i - begin, weights(i, left)); });
  int64_t last = begin;  // in this order a chunk's sum may round below its sum by lanes
  for (int64_t i = begin; i < end; i++) {
    passed += chunk[i - begin];
    if (passed > target) return i;
    if (chunk[i - begin] > 0) last = i;
  }
  return last;
}

// Integers that are ordered as the numbers are.
inline int32_t key(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float number(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

struct Count {
  static double of(const float* values, int64_t count, float floor) {
    int64_t kept = 0;
    in_lanes(0, count, [&](int64_t i, int64_t left) {
      kept += __builtin_popcount(at_least(load(values + i, left, -INF), broadcast(floor)));
    });
    return kept;
  }
};

struct Sum {
  static double of(const float* values, int64_t count, float floor) {
    WideSums sum;
    in_lanes(0, count, [&](int64_t i, int64_t left) {
      const Lanes x = load(values + i, left, -INF);
      sum.add(where_less(x, broadcast(floor), Lanes{}, x));
    });
    return sum.total();
  }
};

inline uint32_t first_bits(int64_t count) { return (1u << count) - 1; }

// The highest number of `low` to `high` such that the values of at least it have a mass of at least
// `wanted`; `low` where there is none. Loses the values.
template <typename Mass>
float raise_floor(float* values, int64_t count, double wanted, float low, float high) {
  int64_t from = key(low), to = key(high);
  double above = 0;  // of values that are gone because they are higher
  while (from < to) {
    const int64_t middle = from + (to - from + 1) / 2;
    const float floor = number(middle);
    const double mass = above + Mass::of(values, count, floor);
    const bool enough = mass >= wanted;
    if (enough) {
      from = middle;
    } else {
      to = middle - 1;
      above = mass;
    }
    int64_t kept = 0;
    in_lanes(0, count, [&](int64_t i, int64_t left) {
      const Lanes x = load(values + i);
      const uint32_t higher = at_least(x, broadcast(floor));
      kept += compress(values + kept, x, (enough ? higher : ~higher) & first_bits(left));
    });
    count = kept;
  }
  return number(from);
}

struct Candidates {
  float* values;
  float* tokens;
  int64_t count;

  void keep(float floor) {
    int64_t kept = 0;
    in_lanes(0, count, [&](int64_t i, int64_t left) {
      const Lanes x = load(values + i);
      const uint32_t higher = at_least(x, broadcast(floor)) & first_bits(left);
      compress(tokens + kept, load(tokens + i), higher);
      kept += compress(values + kept, x, higher);
    });
    count = kept;
  }

  int64_t token(int64_t index) const {
    int32_t token;
    std::memcpy(&token, tokens + index, sizeof(token));
    return token;
  }
};

// Tokens with logits of at least `floor`, in order.
Candidates collect(const Row& row, float floor, Scratch& scratch) {
  Candidates out{scratch.values.data(), scratch.tokens.data(), 0};
  const Ints first = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  in_lanes(0, row.count, [&](int64_t i, int64_t left) {
    const Lanes x = load(row.logits + i, left, -INF);
    const uint32_t kept = at_least(x, broadcast(floor)) & first_bits(left);
    if (!kept) return;
    compress(out.tokens + out.count, (Lanes)(first + int32_t(i)), kept);
    out.count += compress(out.values + out.count, x, kept);
  });
  return out;
}

template <typename Mass>
float floor_of(const Candidates& of, double wanted, float low, float high, Scratch& scratch) {
  std::copy(of.values, of.values + of.count, scratch.reordered.data());
  return raise_floor<Mass>(scratch.reordered.data(), of.count, wanted, low, high);
}

// A logit below which there are none of the `wanted` largest.
float below_largest(const Row& row, int64_t wanted, Scratch& scratch) {
  const int64_t groups = scratch.maxima.size();
  if (wanted > groups) return -INF;
  return raise_floor<Count>(scratch.maxima.data(), groups, wanted, -INF, row.highest);
}

struct Filters {
  float temperature;
  int64_t top_k;
  double top_p;
  float min_p;
};

// A logit below which no weight is as large as `weight`.
float logit_of(const Row& row, double weight, float temperature) {
  const double logit = row.highest + temperature * (std::log(weight) * (1 + 1e-5) - 1e-5);
  return std::nextafter(float(std::max(logit, -double(std::numeric_limits<float>::max()))), -INF);
}

int64_t sample(const Row& row, const Filters& filters, double uniform, Scratch& scratch) {
  const float temperature = std::min(std::max(filters.temperature, COLDEST), HOTTEST);
  const float factor = LOG2_E / temperature, min_p = std::min(filters.min_p, 1.0f);
  const bool top_k = filters.top_k > 0 && filters.top_k < row.count, top_p = filters.top_p < 1;
  double* sums = scratch.sums.data();
  const auto weights = [&](int64_t i, int64_t left) {
    return weigh(load(row.logits + i, left, -INF), row.highest, factor);
  };
  if (!top_k && !top_p && min_p <= 0) return pick(row.count, uniform, sums, weights);

  float floor = top_k ? below_largest(row, filters.top_k, scratch) : -INF;
  if (min_p > 0) floor = std::max(floor, logit_of(row, min_p, temperature));
  double mass = 0, lowest = 0;
  const bool nucleus = !top_k && min_p <= 0;
  if (nucleus) {  // all weights below the floor are not worth 1 - top_p
    mass = sum_chunks(row.count, sums, weights);
    lowest = (1 - filters.top_p) * mass / row.count;
    floor = logit_of(row, lowest, temperature);
  }
  Candidates kept = collect(row, floor, scratch);
  if (top_k) kept.keep(floor_of<Count>(kept, filters.top_k, floor, row.highest, scratch));
  for (int64_t i = 0; i < kept.count; i += LANES) {
    store(kept.values + i, weigh(load(kept.values + i), row.highest, factor));
  }
  if (min_p > 0) kept.keep(min_p);
  const auto kept_weights = [&](int64_t i, int64_t left) { return load(kept.values + i, left); };
  if (top_p) {
    if (!nucleus) mass = sum_chunks(kept.count, sums, kept_weights);
    kept.keep(floor_of<Sum>(kept, filters.top_p * mass, lowest, 1, scratch));
  }
  return kept.token(pick(kept.count, uniform, sums, kept_weights));
}

// In this order the highest, however large, takes no digits from the total.
inline float logprob(const Row& row, double logit, double log_total) {
  return float(logit - row.highest - log_total);
}

// The largest log-probabilities in descending order, of equal ones the first token first; NaN of
// the first tokens in a broken row.
void rank(const Row& row, double log_total, int64_t count, Scratch& scratch, float* logprobs,
          int64_t* tokens) {
  if (!std::isfinite(row.highest)) {
    std::fill(logprobs, logprobs + count, std::numeric_limits<float>::quiet_NaN());
    return std::iota(tokens, tokens + count, 0);
  }
  const Candidates found = collect(row, below_largest(row, count, scratch), scratch);
  std::vector<std::pair<float, int64_t>> order(found.count);
  for (int64_t i = 0; i < found.count; i++) order[i] = {-found.values[i], found.token(i)};
  std::partial_sort(order.begin(), order.begin() + count, order.end());
  for (int64_t i = 0; i < count; i++) {
    logprobs[i] = logprob(row, -order[i].first, log_total);
    tokens[i] = order[i].second;
  }
}

}  // namespace

extern "C" void batten_sample(const float* logits, const float* temperatures,
                              const int64_t* top_ks, const double* top_ps, const float* min_ps,
                              const double* uniforms, int64_t* chosen, int64_t rows,
                              int64_t vocabulary, int64_t stride, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Scratch& scratch = Scratch::of_thread(vocabulary);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < rows; i++) {
      const Row row = read(logits + i * stride, vocabulary, scratch.maxima.data());
      const Filters filters{temperatures[i], top_ks[i], top_ps[i], min_ps[i]};
      chosen[i] = !std::isfinite(row.highest)  ? -1
                  : filters.temperature == 0 ? row.first
                                             : sample(row, filters, uniforms[i], scratch);
    }
  }
}

extern "C" void batten_logprobs(const float* logits, const int64_t* rows, const int64_t* tokens,
                                float* chosen, float* top, int64_t* top_tokens, int64_t count,
                                int64_t vocabulary, int64_t stride, int64_t top_count,
                                int threads) {
#pragma omp parallel num_threads(threads)
  {
    Scratch& scratch = Scratch::of_thread(vocabulary);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
      const Row row = read(logits + rows[i] * stride, vocabulary, scratch.maxima.data());
      const auto weights = [&](int64_t at, int64_t left) {
        return weigh(load(row.logits + at, left, -INF), row.highest, LOG2_E);
      };
      const double total = sum_chunks(vocabulary, scratch.sums.data(), weights);
      const double log_total = std::log(total);
      chosen[i] = logprob(row, row.logits[tokens[i]], log_total);
      rank(row, log_total, top_count, scratch, top + i * top_count, top_tokens + i * top_count);
    }
  }
}
