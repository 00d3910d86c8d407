/* Attention of rows that are each one token of a text of its own, over keys that stand in a slab: alcoda.engine.kernels.

   out[w, h] = softmax(scale * q[w, h] . k[w, g, s] over s) @ v[w, g, s], h of group g, s from 0 to length[w] - 1.
   Each row is summed by itself and in one order: its bits do not depend on the rows beside it, or on threads. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float of_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static inline bf16 to_bf16(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 64u);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float of_f32(float x) { return x; }
static inline float to_f32(float x) { return x; }
static inline double of_f64(double x) { return x; }
static inline double to_f64(double x) { return x; }

/* e^x of x <= 0, in vector instructions; a NaN stays one. Cephes' polynomial, within 2 units of the last place. */
static inline float exp_f32(float x) {
    float y = x < -87.0f ? -87.0f : x;
    float n = floorf(y * 1.44269504088896341f + 0.5f);
    float r = y - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)(n == n ? n : 0.0f) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

static inline double exp_f64(double x) { return exp(x); }

#define KEYS 4 /* whose products with a query are summed side by side */

#define ATTEND(NAME, T, A, OF, TO, EXP)                                                                                \
    static void NAME##_row(const T *q, const T *k, const T *v, T *out, A *score, int64_t length, int64_t width,        \
                           int64_t step, A scale) {                                                                    \
        A most = -INFINITY, sum = 0;                                                                                   \
        A own[width], drawn[width];                                                                                    \
        for (int64_t i = 0; i < width; i++) own[i] = OF(q[i]) * scale, drawn[i] = 0;                                   \
        int64_t s = 0;                                                                                                 \
        for (; s + KEYS <= length; s += KEYS) {                                                                        \
            const T *a = k + s * step, *b = a + step, *c = b + step, *d = c + step;                                    \
            A w = 0, x = 0, y = 0, z = 0;                                                                              \
            for (int64_t i = 0; i < width; i++) {                                                                      \
                w += own[i] * OF(a[i]);                                                                                \
                x += own[i] * OF(b[i]);                                                                                \
                y += own[i] * OF(c[i]);                                                                                \
                z += own[i] * OF(d[i]);                                                                                \
            }                                                                                                          \
            score[s] = w, score[s + 1] = x, score[s + 2] = y, score[s + 3] = z;                                        \
        }                                                                                                              \
        for (; s < length; s++) {                                                                                      \
            A w = 0;                                                                                                   \
            for (int64_t i = 0; i < width; i++) w += own[i] * OF(k[s * step + i]);                                     \
            score[s] = w;                                                                                              \
        }                                                                                                              \
        for (s = 0; s < length; s++) most = score[s] > most ? score[s] : most;                                         \
        for (s = 0; s < length; s++) score[s] = EXP(score[s] - most);                                                  \
        for (s = 0; s < length; s++) sum += score[s];                                                                  \
        for (s = 0; s + KEYS <= length; s += KEYS) {                                                                   \
            const T *a = v + s * step, *b = a + step, *c = b + step, *d = c + step;                                    \
            A w = score[s], x = score[s + 1], y = score[s + 2], z = score[s + 3];                                      \
            for (int64_t i = 0; i < width; i++)                                                                        \
                drawn[i] += w * OF(a[i]) + x * OF(b[i]) + y * OF(c[i]) + z * OF(d[i]);                                 \
        }                                                                                                              \
        for (; s < length; s++)                                                                                        \
            for (int64_t i = 0; i < width; i++) drawn[i] += score[s] * OF(v[s * step + i]);                            \
        for (int64_t i = 0; i < width; i++) out[i] = TO(drawn[i] / sum);                                               \
    }                                                                                                                  \
                                                                                                                       \
    /* q: [rows, heads, width], of_row elements from one row to the next; out the same without holes; first: where     \
       each row's keys of head 0 begin, in elements; of_head, of_token: elements from one head of the keys to the      \
       next, from one token to the next; scratch: [rows, heads, most]. */                                              \
    void NAME(const T *q, const T *k, const T *v, T *out, A *scratch, const int64_t *first, const int64_t *length,     \
              int64_t rows, int64_t heads, int64_t groups, int64_t width, int64_t of_row, int64_t of_head,             \
              int64_t of_token, int64_t most, double scale, int threads) {                                             \
        int64_t n = rows * heads, share = heads / groups;                                                              \
        _Pragma("omp parallel for num_threads(threads) if(threads > 1)") for (int64_t i = 0; i < n; i++) {             \
            int64_t row = i / heads, at = first[row] + (i % heads) / share * of_head;                                  \
            NAME##_row(q + row * of_row + i % heads * width, k + at, v + at, out + i * width, scratch + i * most, length[row], width, \
                       of_token, (A)scale);                                                                            \
        }                                                                                                              \
    }

ATTEND(attend_bf16, bf16, float, of_bf16, to_bf16, exp_f32)
ATTEND(attend_f32, float, float, of_f32, to_f32, exp_f32)
ATTEND(attend_f64, double, double, of_f64, to_f64, exp_f64)
