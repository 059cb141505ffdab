/* SwiGLU on a CPU in one pass, forward and backward: out = gate * sigmoid(gate) * up.
 *
 * Rows of 2F numbers hold the gates, then the ups. Everything is computed in float32, whatever the format of the rows;
 * loops are plain, and compilers vectorise them. The reference is SwiGLU in ops/activations.py.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

static inline float wide_bf16(bf16 x) { return from_bits((uint32_t)x << 16); }
static inline float wide_f32(float x) { return x; }

/* Round to nearest, ties to even; NaN stays NaN. */
static inline bf16 narrow_bf16(float x) {
    uint32_t bits = to_bits(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : rounded);
}
static inline float narrow_f32(float x) { return x; }

/* e^x to float32's rounding for x in [-87, 87], without a branch: 2^n times a polynomial of the remainder. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * from_bits((uint32_t)((int32_t)n + 127) << 23);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

#define GLU(NAME, TYPE)                                                                                            \
    /* One row. Pointers are parameters so that each can be declared restrict. */                                  \
    static void forward_row_##NAME(const TYPE *restrict gate, const TYPE *restrict up, TYPE *restrict act,         \
                                   long hidden) {                                                                  \
        for (long i = 0; i < hidden; i++) {                                                                        \
            float g = wide_##NAME(gate[i]);                                                                        \
            act[i] = narrow_##NAME(g * sigmoid(g) * wide_##NAME(up[i]));                                           \
        }                                                                                                          \
    }                                                                                                              \
                                                                                                                   \
    static float backward_row_##NAME(const TYPE *restrict gate, const TYPE *restrict up, const TYPE *restrict dact, \
                                     float weight, TYPE *restrict dgate, TYPE *restrict dup, TYPE *restrict act,   \
                                     long hidden) {                                                                \
        float sum = 0.0f;                                                                                          \
        for (long i = 0; i < hidden; i++) {                                                                        \
            float g = wide_##NAME(gate[i]), u = wide_##NAME(up[i]), d = wide_##NAME(dact[i]);                      \
            float s = sigmoid(g), silu = g * s;                                                                    \
            sum += d * silu * u;                                                                                   \
            d *= weight;                                                                                           \
            act[i] = narrow_##NAME(silu * u * weight);                                                             \
            dup[i] = narrow_##NAME(d * silu);                                                                      \
            dgate[i] = narrow_##NAME(d * u * (s + silu * (1.0f - s)));                                             \
        }                                                                                                          \
        return sum;                                                                                                \
    }                                                                                                              \
                                                                                                                   \
    void forward_##NAME(const TYPE *gate_up, TYPE *act, long rows, long hidden) {                                  \
        for (long row = 0; row < rows; row++)                                                                      \
            forward_row_##NAME(gate_up + 2 * row * hidden, gate_up + (2 * row + 1) * hidden, act + row * hidden,   \
                               hidden);                                                                            \
    }                                                                                                              \
                                                                                                                   \
    /* From the gradient of the unweighted activation: the gradient of its input and the activation, both times the \
     * row's weight, and the gradient of the weight. */                                                            \
    void backward_##NAME(const TYPE *gate_up, const TYPE *dact, const float *weight, TYPE *dgate_up, TYPE *act,    \
                         float *dweight, long rows, long hidden) {                                                 \
        for (long row = 0; row < rows; row++) {                                                                    \
            long gate = 2 * row * hidden, up = gate + hidden, half = row * hidden;                                 \
            dweight[row] = backward_row_##NAME(gate_up + gate, gate_up + up, dact + half, weight[row],             \
                                               dgate_up + gate, dgate_up + up, act + half, hidden);                \
        }                                                                                                          \
    }

GLU(bf16, bf16)
GLU(f32, float)
