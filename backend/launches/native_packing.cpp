// First fit, as in packing.py: each buffer, in an order, gets the lowest address free all its life.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

struct Placed {
  int64_t low, high, birth, death;
};

// Lowest address with `size` free bytes beside the placed buffers that live in [birth, death).
int64_t lowest_gap(const std::vector<Placed>& by_address, int64_t birth, int64_t death, int64_t size) {
  int64_t top = 0;
  for (const Placed& other : by_address) {
    if (other.birth >= death || other.death <= birth) continue;
    if (other.low - top >= size) break;
    top = std::max(top, other.high);
  }
  return top;
}

}  // namespace

extern "C" void lazyinline_first_fit(
    int64_t count, const int64_t* birth, const int64_t* death, const int64_t* size,
    const int64_t* order, int64_t* offsets) {
  std::vector<Placed> by_address;
  by_address.reserve(count);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t i = order[n];
    const int64_t low = lowest_gap(by_address, birth[i], death[i], size[i]);
    const Placed placed{low, low + size[i], birth[i], death[i]};
    offsets[i] = low;
    const auto at = std::lower_bound(
        by_address.begin(), by_address.end(), low,
        [](const Placed& other, int64_t address) { return other.low < address; });
    by_address.insert(at, placed);
  }
}
