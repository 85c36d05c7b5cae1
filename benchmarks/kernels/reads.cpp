// How fast a processor reads blocks that lie anywhere: a later one is fetched into the second-level
// cache, then one is read, and nothing else is done.

#include <cstdint>
#include <cstring>

constexpr int64_t AHEAD = 8;

typedef uint64_t Line __attribute__((vector_size(64)));

extern "C" void batten_read_blocks(const char* memory, const int64_t* order, int64_t count,
                                   int64_t bytes, int threads, uint64_t* sums) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) {
    const char* next = memory + order[i + AHEAD < count ? i + AHEAD : i] * bytes;
    const char* block = memory + order[i] * bytes;
    for (int64_t at = 0; at < bytes; at += sizeof(Line)) __builtin_prefetch(next + at, 0, 2);
    Line sum = {};
    for (int64_t at = 0; at < bytes; at += sizeof(Line)) {
      Line line;
      std::memcpy(&line, block + at, sizeof(line));
      sum += line;
    }
    sums[i] = sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
  }
}
