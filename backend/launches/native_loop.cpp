// Runs launches: the step's inner loop, below Python.
//
// A program is a list of 64-bit words. Each operation is its code, then its operands; an address
// is two words, a slot of the table and an offset in bytes. The table holds where the arena and the
// tensors of one run are, so that the same words serve every run.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

namespace {

using word = int64_t;

// The numbers are those of native_ops.py.
enum Code : word {
  KERNEL, GEMM, BATCHED_GEMM, COPY, COPY_ROW, ADD, GATHER_ROWS, ADD_ROWS,
  CHOOSE, REPEAT, REPEAT_WHILE
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

struct Steps {
  word a, b, c;
};

// Multiplies by the routine of native_products.cpp; false if the matrices are not for it.
bool multiplied(const Shape& s, word batch, Steps step, float beta, const float* a, const float* b,
                float* c) {
  const bool trans_a = s.trans_a == 'T', trans_b = s.trans_b == 'T';
  if (beta != 0 || !is_small(trans_a, s.m, s.n, s.k)) return false;
  for (word i = 0; i < batch; ++i, a += step.a, b += step.b, c += step.c)
    small_product(trans_a, trans_b, s.m, s.n, s.k, a, s.lda, b, s.ldb, c, s.ldc);
  return true;
}

bool multiplied(const Shape&, word, Steps, double, const double*, const double*, double*) {
  return false;
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
  if (multiplied(s, 1, {}, beta, a, b, c)) return;
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
  const word batch = in.next();
  const Steps step = {in.next(), in.next(), in.next()};
  const T* a = reinterpret_cast<const T*>(in.address());
  const T* b = reinterpret_cast<const T*>(in.address());
  T* c = reinterpret_cast<T*>(in.address());
  if (multiplied(s, batch, step, beta, a, b, c)) return;
  for (word first = 0; first < batch; first += chunk) {
    const T *as[chunk], *bs[chunk];
    T* cs[chunk];
    const int size = static_cast<int>(std::min<word>(chunk, batch - first));
    for (int i = 0; i < size; ++i) {
      as[i] = a + (first + i) * step.a;
      bs[i] = b + (first + i) * step.b;
      cs[i] = c + (first + i) * step.c;
    }
    function(column_major, &trans_a, &trans_b, &s.m, &s.n, &s.k, &alpha, as, &s.lda, bs, &s.ldb,
             &beta, cs, &s.ldc, 1, &size);
  }
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

bool run_words(Reader& in, word count);

// A body of control flow: words of its own over a table of its own, in which some slots move on by a
// row from step to step.
struct Body {
  struct Binding {
    word slot, stride;
    char* base;
  };
  std::vector<char*> table;
  std::vector<Binding> bindings;
  const word* words;
  word count;

  explicit Body(Reader& in) : table(in.next()) {
    count = in.next();
    const word num_words = in.next();
    words = in.at;
    in.at += num_words;
    bindings.resize(in.next());
    for (Binding& b : bindings) {
      b.slot = in.next();
      b.stride = in.next();
      b.base = in.address();
    }
  }

  bool operator()(word row) {
    for (const Binding& b : bindings) table[b.slot] = b.base + row * b.stride;
    Reader in{words, table.data()};
    return run_words(in, count);
  }
};

bool choose(Reader& in) {
  const bool flag = *in.address();
  Body if_true(in), if_false(in);
  return flag ? if_true(0) : if_false(0);
}

bool repeat(Reader& in) {
  const word steps = in.next(), reversed = in.next();
  Body body(in);
  for (word i = 0; i < steps; ++i)
    if (!body(reversed ? steps - 1 - i : i)) return false;
  return true;
}

// Asks Python whether a signal came, such as Ctrl-C; none where the loop is called without it.
bool (*interrupted)() = nullptr;
struct Interrupted {};

bool repeat_while(Reader& in) {
  const char* const flag = in.address();
  Body test(in), body(in);
  for (word step = 1;; ++step) {
    if (step % 256 == 0 && interrupted != nullptr && interrupted()) throw Interrupted();
    if (!test(0)) return false;
    if (!*flag) return true;
    if (!body(0)) return false;
  }
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
    case CHOOSE: return choose(in);
    case REPEAT: return repeat(in);
    case REPEAT_WHILE: return repeat_while(in);
  }
  return false;
}

bool run_words(Reader& in, word count) {
  for (word i = 0; i < count; ++i)
    if (!step(in)) return false;
  return true;
}

enum Failure : int { NONE, INDEX, ZERO_DIVISION, OTHER };

thread_local std::string reason;  // of the newest OTHER, without PyTorch's backtrace

// What a kernel threw must not leave through C, which would end the process.
int failure_of(const std::exception& error) {
  const char* text = error.what();
  reason.assign(text, std::strcspn(text, "\n"));
  if (std::strstr(text, "ZeroDivisionError")) return ZERO_DIVISION;
  return std::strstr(text, "out of bounds") ? INDEX : OTHER;
}

}  // namespace

// Runs `count` operations; returns what went wrong (native_ops.py knows the numbers), or 0.
extern "C" int lazyinline_run(const word* program, word count, char* const* table) {
  Reader in{program, table};
  try {
    if (!run_words(in, count)) return INDEX;
  } catch (const std::exception& error) {
    return failure_of(error);
  } catch (...) {
    reason = "a kernel failed";
    return OTHER;
  }
  return NONE;
}
