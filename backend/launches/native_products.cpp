// Products of small matrices, for which BLAS spends more time on choosing a way than on the way.
//
// Each element is one chain of fused multiply-adds from zero along the inner dimension: never less
// exact than the bound of any sum of so many products, and the same bits on every CPU, wherever the
// matrices lie. BLAS promises only the former: its bits depend on the CPU and on addresses.

#include <algorithm>
#include <cstdint>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

namespace {

struct Vector8 {
  static constexpr int width = 8;
  __m256 v;
  static Vector8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vector8 all(const float* p) { return {_mm256_broadcast_ss(p)}; }
  static Vector8 zero() { return {_mm256_setzero_ps()}; }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void add_product(Vector8 a, Vector8 b) { v = _mm256_fmadd_ps(a.v, b.v, v); }
};

#if defined(__AVX512F__)
struct Vector16 {
  static constexpr int width = 16;
  __m512 v;
  static Vector16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vector16 all(const float* p) { return {_mm512_set1_ps(*p)}; }
  static Vector16 zero() { return {_mm512_setzero_ps()}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void add_product(Vector16 a, Vector16 b) { v = _mm512_fmadd_ps(a.v, b.v, v); }
};
#endif

// Columns of a matrix are `column` apart, its rows `row`.
struct Matrix {
  const float* at;
  int64_t row, column;
};

template <typename V, int num_vectors, int num_columns>
inline void tile(int inner, const float* a, int64_t lda, Matrix b, float* c, int64_t ldc) {
  V sum[num_columns][num_vectors];
  for (auto& column : sum)
    for (auto& part : column) part = V::zero();
  for (int p = 0; p < inner; ++p) {
    V left[num_vectors];
    for (int i = 0; i < num_vectors; ++i) left[i] = V::load(a + p * lda + i * V::width);
    for (int j = 0; j < num_columns; ++j) {
      const V right = V::all(b.at + p * b.row + j * b.column);
      for (int i = 0; i < num_vectors; ++i) sum[j][i].add_product(left[i], right);
    }
  }
  for (int j = 0; j < num_columns; ++j)
    for (int i = 0; i < num_vectors; ++i) sum[j][i].store(c + j * ldc + i * V::width);
}

template <typename V, int num_vectors>
inline void rows(int n, int inner, const float* a, int64_t lda, Matrix b, float* c, int64_t ldc) {
  constexpr int wide = V::width == 16 ? 8 : 4;
  int j = 0;
  for (; j + wide <= n; j += wide)
    tile<V, num_vectors, wide>(inner, a, lda, {b.at + j * b.column, b.row, b.column}, c + j * ldc, ldc);
  for (; j < n; ++j)
    tile<V, num_vectors, 1>(inner, a, lda, {b.at + j * b.column, b.row, b.column}, c + j * ldc, ldc);
}

template <typename V>
inline void product(int m, int n, int inner, const float* a, int64_t lda, Matrix b, float* c, int64_t ldc) {
  int i = 0;
  for (; i + 2 * V::width <= m; i += 2 * V::width) rows<V, 2>(n, inner, a + i, lda, b, c + i, ldc);
  for (; i < m; i += V::width) rows<V, 1>(n, inner, a + i, lda, b, c + i, ldc);
}

// Rows of 4 floats at p and at q, side by side.
inline __m256 halves(const float* p, const float* q) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(q), 1);
}

// Writes the transpose of 8 x 8 floats. Halves of rows change places as they are loaded, which the
// shuffle unit, the bottleneck, has no part in.
inline void transpose_8(const float* from, int64_t from_step, float* to, int64_t to_step) {
  for (int half = 0; half < 2; ++half, from += 4, to += 4 * to_step) {
    __m256 r[4], t[4];
    for (int i = 0; i < 4; ++i) r[i] = halves(from + i * from_step, from + (i + 4) * from_step);
    for (int i = 0; i < 4; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    _mm256_storeu_ps(to, _mm256_shuffle_ps(t[0], t[2], 0x44));
    _mm256_storeu_ps(to + to_step, _mm256_shuffle_ps(t[0], t[2], 0xEE));
    _mm256_storeu_ps(to + 2 * to_step, _mm256_shuffle_ps(t[1], t[3], 0x44));
    _mm256_storeu_ps(to + 3 * to_step, _mm256_shuffle_ps(t[1], t[3], 0xEE));
  }
}

constexpr int MAX_TRANSPOSED = 8192;

// What sgemm computes with alpha 1 and beta 0, by columns. The caller has asked is_small.
void small_product(bool trans_a, bool trans_b, int m, int n, int inner, const float* a, int64_t lda,
                   const float* b, int64_t ldb, float* c, int64_t ldc) {
  alignas(64) float turned[MAX_TRANSPOSED];
  if (trans_a) {
    for (int i = 0; i < m; i += 8)
      for (int p = 0; p < inner; p += 8) transpose_8(a + i * lda + p, lda, turned + p * m + i, m);
    a = turned, lda = m;
  }
  const Matrix right = trans_b ? Matrix{b, ldb, 1} : Matrix{b, 1, ldb};
#if defined(__AVX512F__)
  if (m % 16 == 0) return product<Vector16>(m, n, inner, a, lda, right, c, ldc);
#endif
  product<Vector8>(m, n, inner, a, lda, right, c, ldc);
}

// Most multiply-adds of a product for which our way was seen to be the faster one.
constexpr int64_t MAX_SMALL = 65536;
// A longer sum rounds less in parts, which is how BLAS does it.
constexpr int MAX_INNER = 256;

// Whether our way is the better one. A product with a vector costs no more than reading the matrix.
bool is_small(bool trans_a, int m, int n, int inner) {
  if (n == 1 || inner > MAX_INNER || static_cast<int64_t>(m) * n * inner > MAX_SMALL) return false;
  return m % 8 == 0 && (!trans_a || (inner % 8 == 0 && m * inner <= MAX_TRANSPOSED));
}

}  // namespace

#else

namespace {
void small_product(bool, bool, int, int, int, const float*, int64_t, const float*, int64_t, float*, int64_t) {}
bool is_small(bool, int, int, int) { return false; }
}  // namespace

#endif
