// Compares words of memory with what they held, and fetches others ahead of their use.
//
// A guard reads a thousand places at each call. After other work they are no longer in the caches
// near the core, and waiting for one after another is most of what the guard costs.

#include <cstdint>

// Whether `count` addresses hold the expected words. Fetches what lies at `num_touched` further
// addresses too; these are never read, so that they may be those of memory that is gone.
extern "C" int lazyinline_same_words(const int64_t* const* addresses, const int64_t* expected,
                                     int64_t count, int64_t num_touched) {
  constexpr int64_t ahead = 24;
  const int64_t total = count + num_touched;
  for (int64_t i = 0; i < total && i < ahead; ++i) __builtin_prefetch(addresses[i]);
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < total) __builtin_prefetch(addresses[i + ahead]);
    if (*addresses[i] != expected[i]) return 0;
  }
  for (int64_t i = count + ahead; i < total; ++i) __builtin_prefetch(addresses[i]);
  return 1;
}
