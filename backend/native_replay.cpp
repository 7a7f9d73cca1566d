// Replays launches: the step's inner loop, below Python.
//
// A program is a list of 64-bit words. Each operation is its code, then its operands; an address
// is two words, a slot of the table and an offset in bytes. The table holds where the arena and the
// tensors of one run are, so that the same words serve every run.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

namespace {

using word = int64_t;

// The numbers are those of native_ops.py.
enum Code : word {
  KERNEL, GEMM, BATCHED_GEMM, COPY, COPY_ROW, ADD, GATHER_ROWS, ADD_ROWS, SMALL, BATCHED_SMALL
};
enum Type : word { F32, F64 };

struct Reader {
  const word* at;
  char* const* table;
  word next() { return *at++; }
  char* address() {
    const word slot = *at++;
    return table[slot] + *at++;
  }
};

// Kernels take addresses and 64-bit sizes only, which one calling convention covers.
#define PARAMETERS_4 word, word, word, word
#define PARAMETERS_16 PARAMETERS_4, PARAMETERS_4, PARAMETERS_4, PARAMETERS_4
#define ARGS_4(i) a[i], a[i + 1], a[i + 2], a[i + 3]
#define ARGS_16(i) ARGS_4(i), ARGS_4(i + 4), ARGS_4(i + 8), ARGS_4(i + 12)
constexpr word MAX_ARGS = 64;

// A callee reads only the arguments it has (the caller cleans up), so spare ones do no harm.
void launch(Reader& in) {
  void* const function = reinterpret_cast<void*>(in.next());
  const word num_addresses = in.next();
  const word count = num_addresses + in.next();
  word a[MAX_ARGS] = {};
  for (word i = 0; i < num_addresses; ++i) a[i] = reinterpret_cast<word>(in.address());
  for (word i = num_addresses; i < count; ++i) a[i] = in.next();
  if (count <= 4)
    reinterpret_cast<void (*)(PARAMETERS_4)>(function)(ARGS_4(0));
  else if (count <= 8)
    reinterpret_cast<void (*)(PARAMETERS_4, PARAMETERS_4)>(function)(ARGS_4(0), ARGS_4(4));
  else if (count <= 16)
    reinterpret_cast<void (*)(PARAMETERS_16)>(function)(ARGS_16(0));
  else if (count <= 32)
    reinterpret_cast<void (*)(PARAMETERS_16, PARAMETERS_16)>(function)(ARGS_16(0), ARGS_16(16));
  else
    reinterpret_cast<void (*)(PARAMETERS_16, PARAMETERS_16, PARAMETERS_16, PARAMETERS_16)>(
        function)(ARGS_16(0), ARGS_16(16), ARGS_16(32), ARGS_16(48));
}

struct Shape {
  char trans_a, trans_b;
  int m, n, k, lda, ldb, ldc;
};

Shape read_shape(Reader& in) {
  Shape s;
  s.trans_a = static_cast<char>(in.next());
  s.trans_b = static_cast<char>(in.next());
  for (int* field : {&s.m, &s.n, &s.k, &s.lda, &s.ldb, &s.ldc}) *field = static_cast<int>(in.next());
  return s;
}

template <typename T>
void gemm(Reader& in) {
  using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*,
                        const T*, const int*, const T*, const int*, const T*, T*, const int*);
  const auto function = reinterpret_cast<Gemm>(in.next());
  const T alpha = 1, beta = static_cast<T>(in.next());
  const Shape s = read_shape(in);
  const T* a = reinterpret_cast<const T*>(in.address());
  const T* b = reinterpret_cast<const T*>(in.address());
  T* c = reinterpret_cast<T*>(in.address());
  function(&s.trans_a, &s.trans_b, &s.m, &s.n, &s.k, &alpha, a, &s.lda, b, &s.ldb, &beta, c,
           &s.ldc);
}

template <typename T>
void batched_gemm(Reader& in) {
  using Batched = void (*)(int, const int*, const int*, const int*, const int*, const int*,
                           const T*, const T**, const int*, const T**, const int*, const T*, T**,
                           const int*, int, const int*);
  constexpr int column_major = 102, no_transpose = 111, transpose = 112, chunk = 64;
  const auto function = reinterpret_cast<Batched>(in.next());
  const T alpha = 1, beta = static_cast<T>(in.next());
  const Shape s = read_shape(in);
  const int trans_a = s.trans_a == 'N' ? no_transpose : transpose;
  const int trans_b = s.trans_b == 'N' ? no_transpose : transpose;
  const word batch = in.next(), step_a = in.next(), step_b = in.next(), step_c = in.next();
  const T* a = reinterpret_cast<const T*>(in.address());
  const T* b = reinterpret_cast<const T*>(in.address());
  T* c = reinterpret_cast<T*>(in.address());
  for (word first = 0; first < batch; first += chunk) {
    const T *as[chunk], *bs[chunk];
    T* cs[chunk];
    const int size = static_cast<int>(std::min<word>(chunk, batch - first));
    for (int i = 0; i < size; ++i) {
      as[i] = a + (first + i) * step_a;
      bs[i] = b + (first + i) * step_b;
      cs[i] = c + (first + i) * step_c;
    }
    function(column_major, &trans_a, &trans_b, &s.m, &s.n, &s.k, &alpha, as, &s.lda, bs, &s.ldb,
             &beta, cs, &s.ldc, 1, &size);
  }
}

// The words of a product, for native_products.cpp.
void small(Reader& in) {
  in.at += 3;  // type, routine, beta
  const Shape s = read_shape(in);
  const float* a = reinterpret_cast<const float*>(in.address());
  const float* b = reinterpret_cast<const float*>(in.address());
  float* c = reinterpret_cast<float*>(in.address());
  small_product(s.trans_a == 'T', s.trans_b == 'T', s.m, s.n, s.k, a, s.lda, b, s.ldb, c, s.ldc);
}

void batched_small(Reader& in) {
  in.at += 3;
  const Shape s = read_shape(in);
  const word batch = in.next(), step_a = in.next(), step_b = in.next(), step_c = in.next();
  const float* a = reinterpret_cast<const float*>(in.address());
  const float* b = reinterpret_cast<const float*>(in.address());
  float* c = reinterpret_cast<float*>(in.address());
  for (word i = 0; i < batch; ++i, a += step_a, b += step_b, c += step_c)
    small_product(s.trans_a == 'T', s.trans_b == 'T', s.m, s.n, s.k, a, s.lda, b, s.ldb, c, s.ldc);
}

template <typename T>
void add(Reader& in) {
  const word count = in.next();
  const T* a = reinterpret_cast<const T*>(in.address());
  const T* b = reinterpret_cast<const T*>(in.address());
  T* out = reinterpret_cast<T*>(in.address());
#pragma omp parallel for if (count > 32768)
  for (word i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

void copy(Reader& in) {
  const word bytes = in.next();
  char* to = in.address();
  const char* from = in.address();
  std::memcpy(to, from, bytes);
}

void copy_row(Reader& in) {
  const word rows = in.next(), row_bytes = in.next();
  char* to = in.address();
  const char* from = in.address();
  for (word i = 0; i < rows; ++i) std::memcpy(to + i * row_bytes, from, row_bytes);
}

bool in_range(const word* indices, word count, word num_rows) {
  for (word i = 0; i < count; ++i)
    if (indices[i] < 0 || indices[i] >= num_rows) return false;
  return true;
}

bool gather_rows(Reader& in) {
  const word count = in.next(), num_rows = in.next(), row_bytes = in.next();
  char* to = in.address();
  const char* from = in.address();
  const word* indices = reinterpret_cast<const word*>(in.address());
  if (!in_range(indices, count, num_rows)) return false;
#pragma omp parallel for if (count * row_bytes > 131072)
  for (word i = 0; i < count; ++i)
    std::memcpy(to + i * row_bytes, from + indices[i] * row_bytes, row_bytes);
  return true;
}

// Rows are added in the order of their indices' positions, as PyTorch does.
template <typename T>
bool add_rows(Reader& in) {
  const word count = in.next(), num_rows = in.next(), width = in.next(), skipped = in.next();
  T* to = reinterpret_cast<T*>(in.address());
  const T* from = reinterpret_cast<const T*>(in.address());
  const word* indices = reinterpret_cast<const word*>(in.address());
  if (!in_range(indices, count, num_rows)) return false;
  std::memset(to, 0, num_rows * width * sizeof(T));
  for (word i = 0; i < count; ++i) {
    if (indices[i] == skipped) continue;
    T* row = to + indices[i] * width;
    for (word j = 0; j < width; ++j) row[j] += from[i * width + j];
  }
  return true;
}

bool step(Reader& in) {
  switch (in.next()) {
    case KERNEL: launch(in); return true;
    case GEMM: in.next() == F32 ? gemm<float>(in) : gemm<double>(in); return true;
    case BATCHED_GEMM: in.next() == F32 ? batched_gemm<float>(in) : batched_gemm<double>(in); return true;
    case COPY: copy(in); return true;
    case COPY_ROW: copy_row(in); return true;
    case ADD: in.next() == F32 ? add<float>(in) : add<double>(in); return true;
    case GATHER_ROWS: return gather_rows(in);
    case ADD_ROWS: return in.next() == F32 ? add_rows<float>(in) : add_rows<double>(in);
    case SMALL: small(in); return true;
    case BATCHED_SMALL: batched_small(in); return true;
  }
  return false;
}

enum Failure : int { NONE, INDEX, ZERO_DIVISION, OTHER };

// What a kernel threw must not leave through C, which would end the process.
int failure_of(const std::exception& error) {
  const char* text = error.what();
  if (std::strstr(text, "ZeroDivisionError")) return ZERO_DIVISION;
  return std::strstr(text, "out of bounds") ? INDEX : OTHER;
}

// Numbers of both signs and many sizes; some are zero, some are minus zero.
std::vector<float> numbers(size_t count, uint32_t seed) {
  std::vector<float> found(count);
  for (float& x : found) {
    seed = seed * 1664525u + 1013904223u;
    const int power = static_cast<int>(seed >> 8 & 15) - 8;
    const float sign = seed >> 13 & 1 ? -1.0f : 1.0f;
    const float size = seed >> 14 & 7 ? std::ldexp(1.0f + (seed >> 17) / 32768.0f, power) : 0.0f;
    x = sign * size;
  }
  return found;
}

// Most multiply-adds of a product for which our way was seen to be the faster one.
constexpr word MAX_SMALL = 65536;

}  // namespace

// Whether a product of words, GEMM or BATCHED_GEMM, is small and our way gives the bits of BLAS.
extern "C" int lazyinline_is_exact(const word* program) {
  Reader in{program, nullptr};
  const word code = in.next(), type = in.next();
  const word function = in.next(), beta = in.next();
  const Shape s = read_shape(in);
  const word work = static_cast<word>(s.m) * s.n * s.k;
  if (type != F32 || beta != 0 || work > MAX_SMALL) return 0;
  if (!can_multiply(s.trans_a == 'T', s.m, s.k)) return 0;
  const bool batched = code == BATCHED_GEMM;
  const word batch = batched ? 3 : 1;
  const word size_a = static_cast<word>(s.lda) * (s.trans_a == 'T' ? s.m : s.k);
  const word size_b = static_cast<word>(s.ldb) * (s.trans_b == 'T' ? s.k : s.n);
  const word size_c = static_cast<word>(s.ldc) * s.n;
  std::vector<float> a = numbers(batch * size_a, 1), b = numbers(batch * size_b, 2);
  std::vector<float> expected(batch * size_c), found(batch * size_c);
  char* table[] = {reinterpret_cast<char*>(a.data()), reinterpret_cast<char*>(b.data()),
                   reinterpret_cast<char*>(expected.data()), reinterpret_cast<char*>(found.data())};
  std::vector<word> words = {type, function, beta, s.trans_a, s.trans_b, s.m, s.n, s.k, s.lda, s.ldb, s.ldc};
  if (batched) words.insert(words.end(), {batch, size_a, size_b, size_c});
  words.insert(words.end(), {0, 0, 1, 0, 2, 0});
  Reader theirs{words.data() + 1, table};
  batched ? batched_gemm<float>(theirs) : gemm<float>(theirs);
  words[words.size() - 2] = 3;
  Reader ours{words.data(), table};
  batched ? batched_small(ours) : small(ours);
  return std::memcmp(expected.data(), found.data(), expected.size() * sizeof(float)) == 0;
}

// Runs `count` operations; returns what went wrong (native_ops.py knows the numbers), or 0.
extern "C" int lazyinline_replay(const word* program, word count, char* const* table) {
  Reader in{program, table};
  try {
    for (word i = 0; i < count; ++i)
      if (!step(in)) return INDEX;
  } catch (const std::exception& error) {
    return failure_of(error);
  } catch (...) {
    return OTHER;
  }
  return NONE;
}
