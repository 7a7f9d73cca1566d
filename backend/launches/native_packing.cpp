// First fit, as in packing.py: each buffer, in an order, gets the lowest address free all its life.
// And a search for plans that no order tried gives (ExactSearch).

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
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

// Depth-first search for a plan within a limit, after Moffitt, "MiniMalloc", 2023. Buffers are
// placed from the lowest address up, each right above what was placed below it.
// - No buffer is placed where another one would still fit below it all its life.
// - A section is a time at which most is live. What has no place yet comes above its floor: if that
//   is more than the limit together, there is no plan this way.
// - Times that no buffer without a place joins any more are solved apart.
// It counts steps, not seconds: what it finds is the same on every machine.
class ExactSearch {
 public:
  ExactSearch(int64_t count, const int64_t* birth, const int64_t* death, const int64_t* size)
      : count_(count), size_(size), life_(count), begin_(count), end_(count), beside_(count) {
    std::vector<std::pair<int64_t, int>> events;
    for (int64_t i = 0; i < count; ++i) {
      events.emplace_back(birth[i], 1);
      events.emplace_back(death[i], 0);
      life_[i] = double(death[i]) - double(birth[i]);
    }
    std::sort(events.begin(), events.end());
    Indices times;
    for (size_t k = 0; k + 1 < events.size(); ++k)
      if (events[k].second && !events[k + 1].second) times.push_back(events[k].first);
    inside_.resize(times.size());
    for (int64_t i = 0; i < count; ++i) {
      begin_[i] = std::lower_bound(times.begin(), times.end(), birth[i]) - times.begin();
      end_[i] = std::lower_bound(times.begin(), times.end(), death[i]) - times.begin();
      for (int64_t s = begin_[i]; s < end_[i]; ++s) inside_[s].push_back(i);
      for (int64_t j = 0; j < i; ++j) {
        if (begin_[j] >= end_[i] || begin_[i] >= end_[j]) continue;
        beside_[i].push_back(j);
        beside_[j].push_back(i);
      }
    }
  }

  // Looks for a plan of `enough` bytes, then halfway between what was not found and what was, to
  // half a percent. Returns its peak, or `peak` if none of fewer bytes is found.
  int64_t lowest(int64_t enough, int64_t peak, int64_t steps, int64_t* offsets) {
    const int64_t close = enough / 200 + 1;
    for (limit_ = enough; limit_ < peak && steps > 0; limit_ = enough + (peak - enough) / 2) {
      int64_t half = (steps + 1) / 2;
      steps -= half;
      if (find(half)) {
        std::copy(offset_.begin(), offset_.end(), offsets);
        for (int64_t i = peak = 0; i < count_; ++i) peak = std::max(peak, offset_[i] + size_[i]);
      } else {
        enough = limit_ + close;
      }
      steps += half;
    }
    return peak;
  }

 private:
  enum Answer { kNone, kFound, kGivenUp };
  using Indices = std::vector<int64_t>;

  int64_t count_;
  const int64_t* size_;
  std::vector<double> life_;
  Indices begin_, end_;                   // sections of each buffer
  std::vector<Indices> beside_, inside_;  // buffers beside each buffer, and in each section
  int64_t limit_ = 0, steps_ = 0;
  bool by_area_ = false;
  // Of each buffer: its place, and the lowest address that it can still have.
  Indices offset_, is_placed_, low_;
  // Of each section: its lowest free address, bytes without a place, and how many buffers without a
  // place live on in the next one; whether the floor may have risen.
  Indices floor_, rest_, joints_, is_stale_, stale_;
  std::vector<std::pair<int64_t*, int64_t>> undo_;

  // Tries two orders in turns, each time with more steps, and takes them from `steps`.
  bool find(int64_t& steps) {
    Indices all;
    for (int64_t i = 0; i < count_; ++i) all.push_back(i);
    by_area_ = false;
    for (int64_t turn = std::max<int64_t>(4000000, 40 * count_ * count_);; turn *= by_area_ ? 1 : 4) {
      undo_.clear();
      for (Indices* each : {&offset_, &is_placed_, &low_}) each->assign(count_, 0);
      for (Indices* each : {&floor_, &rest_, &joints_, &is_stale_}) each->assign(inside_.size(), 0);
      for (int64_t i : all)
        for (int64_t s = begin_[i]; s < end_[i]; ++s) {
          rest_[s] += size_[i];
          joints_[s] += s + 1 < end_[i];
        }
      steps_ = std::min(turn, steps);
      steps -= steps_;
      const Answer answer = place_apart(all, 0, inside_.size());
      steps += std::max<int64_t>(steps_, 0);
      if (answer != kGivenUp || steps <= 0) return answer == kFound;
      by_area_ = !by_area_;
    }
  }

  // Places the buffers of each run of sections that none joins to the next.
  Answer place_apart(const Indices& buffers, int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      for (stop = begin + 1; stop < end && joints_[stop - 1] > 0;) ++stop;
      Indices part;
      for (int64_t i : buffers)
        if (!is_placed_[i] && begin_[i] < stop && end_[i] > begin) part.push_back(i);
      sort(part);
      const Answer answer = place_next(part, begin, stop, 0, -1);
      if (answer != kFound) return answer;
    }
    return kFound;
  }

  // What lives when most has no place comes first, then what lives longest, or has the most area.
  void sort(Indices& part) {
    std::vector<std::tuple<double, double, double, int64_t>> keys;
    for (int64_t i : part) {
      const double most = *std::max_element(&rest_[begin_[i]], &rest_[end_[i] - 1] + 1);
      const double area = life_[i] * size_[i];
      keys.emplace_back(-most, -(by_area_ ? area : life_[i]), -(by_area_ ? life_[i] : area), i);
    }
    std::sort(keys.begin(), keys.end());
    std::transform(keys.begin(), keys.end(), part.begin(), [](auto& k) { return std::get<3>(k); });
  }

  // Places the rest of `part` at `base` or above, at `base` itself only those after `last`: so no
  // plan is met twice.
  Answer place_next(const Indices& part, int64_t begin, int64_t end, int64_t base, int64_t last) {
    steps_ -= part.size();
    if (steps_ < 0) return kGivenUp;
    std::vector<std::pair<int64_t, int64_t>> choices;
    int64_t lowest_top = INT64_MAX;
    for (int64_t at = 0; at < int64_t(part.size()); ++at) {
      const int64_t i = part[at];
      if (is_placed_[i]) continue;
      lowest_top = std::min(lowest_top, low_[i] + size_[i]);
      if (std::make_pair(low_[i], at) > std::make_pair(base, last))
        choices.emplace_back(low_[i], at);
    }
    if (lowest_top == INT64_MAX) return kFound;
    std::sort(choices.begin(), choices.end());
    for (const auto& [low, at] : choices) {
      if (low >= lowest_top) break;
      const int64_t i = part[at];
      const size_t before = undo_.size();
      bool is_beside = false, is_cut = false;
      if (place(i, low, begin, end, is_beside)) {
        for (int64_t s = begin_[i]; s + 1 < end_[i]; ++s) is_cut |= --joints_[s] == 0;
        const Answer answer = is_cut ? place_apart(part, begin, end)
                                     : place_next(part, begin, end, low, at);
        for (int64_t s = begin_[i]; s + 1 < end_[i]; ++s) ++joints_[s];
        if (answer != kNone) return answer;
      }
      for (; undo_.size() > before; undo_.pop_back()) *undo_.back().first = undo_.back().second;
      if (!is_beside) break;  // here it is in nobody's way: the others alone have no plan
    }
    return kNone;
  }

  // Gives a buffer its address; returns false if some section has no room for the rest. Nothing in
  // these sections is placed below it any more.
  bool place(int64_t i, int64_t low, int64_t begin, int64_t end, bool& is_beside) {
    const int64_t high = low + size_[i];
    bool fits = high <= limit_;
    offset_[i] = low;
    set(is_placed_[i], 1);
    for (int64_t s = begin_[i]; s < end_[i]; ++s) {
      set(floor_[s], high);
      set(rest_[s], rest_[s] - size_[i]);
      mark(s);
    }
    for (int64_t s = begin; s < end; ++s) fits &= !rest_[s] || low + rest_[s] <= limit_;
    steps_ -= beside_[i].size() + end_[i] - begin_[i] + (end - begin) / 4;
    for (int64_t j : beside_[i]) {
      if (is_placed_[j]) continue;
      is_beside = true;
      if (!fits) break;
      const int64_t before = low_[j];
      if (before >= high) continue;
      set(low_[j], high);
      fits = high + size_[j] <= limit_;
      for (int64_t s = begin_[j]; s < end_[j]; ++s)
        if (before <= floor_[s]) mark(s);
      steps_ -= end_[j] - begin_[j];
    }
    for (int64_t s : stale_) {
      is_stale_[s] = 0;
      fits = fits && raise_floor(s);
    }
    stale_.clear();
    return fits;
  }

  void set(int64_t& place, int64_t value) {
    undo_.emplace_back(&place, place);
    place = value;
  }

  void mark(int64_t section) {
    if (rest_[section] && !std::exchange(is_stale_[section], 1)) stale_.push_back(section);
  }

  bool raise_floor(int64_t section) {
    int64_t least = INT64_MAX;
    for (int64_t i : inside_[section])
      if (!is_placed_[i]) least = std::min(least, low_[i]);
    steps_ -= inside_[section].size();
    if (floor_[section] < least) set(floor_[section], least);
    return floor_[section] + rest_[section] <= limit_;
  }
};

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

extern "C" int64_t lazyinline_exact_search(
    const int64_t* birth, const int64_t* death, const int64_t* size, int64_t* offsets,
    int64_t count, int64_t enough, int64_t peak, int64_t steps) {
  return ExactSearch(count, birth, death, size).lowest(enough, peak, steps, offsets);
}
