/* Narrow a matrix in one pass over each block: codes, scales, and the values that codes and scales stand for. And the
 * values of codes that were kept.
 *
 * The reference is precision/quantize.py, to the last bit: every step below is rounded where torch rounds it, so this
 * file is compiled without reassociation and without fused multiply-adds.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum element { E4M3, E5M2, E2M1 };
enum rule { FLOAT32, POWER_OF_TWO, E8M0_RCEIL, E8M0_FLOOR, TWO_LEVEL };

struct cast {
    long rows, columns; /* of a block */
    int element, rule, hadamard, stochastic;
    uint64_t seed; /* of the noise of stochastic rounding */
};

struct matrix {
    const void *x; /* m x k numbers with strides; bfloat16 or float32 */
    long m, k, row_stride, column_stride;
    int is_bf16;
    const float *amax;   /* instead of the matrix's own; NULL for that */
    float *values;       /* m x k */
    uint8_t *codes;      /* m x k, or NULL */
    void *scales;        /* per block: float, or uint8_t where the rule stores a byte; or NULL */
    float *tensor_scale; /* one number, of two_level; or NULL */
};

static const float TOP[] = {448.0f, 57344.0f, 6.0f};
static const int TOP_EXPONENT[] = {8, 15, 2}, FRACTION_BITS[] = {3, 2, 1}, SMALLEST_EXPONENT[] = {-6, -14, 0};
static const float LARGEST = 3.4028234663852886e38f;
static const float SIGNS[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1};

static inline float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float power_of_two(int exponent) { return from_bits((uint32_t)(exponent + 127) << 23); }
static inline int is_finite(float x) { return (to_bits(x) & 0x7f800000) != 0x7f800000; }

static inline float to_bf16(float x) {
    uint32_t bits = to_bits(x);
    float rounded = from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
    return x != x ? x : rounded;
}

/* Of at least TOP's magnitude: TOP; NaN stays NaN. */
static inline float saturate(float magnitude, float top) { return magnitude > top ? top : magnitude; }

/* Nearest, ties to even, of a magnitude within the format: the spacing is that of its exponent, or of the smallest. */
static inline float nearest(float magnitude, int bits, int smallest) {
    int cut = 23 - bits;
    uint32_t u = to_bits(magnitude);
    float normal = from_bits((u + ((1u << (cut - 1)) - 1) + ((u >> cut) & 1)) >> cut << cut);
    float small = rintf(magnitude * power_of_two(bits - smallest)) * power_of_two(smallest - bits);
    return magnitude < power_of_two(smallest) ? small : normal;
}

static inline float stochastic(float magnitude, float noise, int bits, int smallest) {
    int exponent = (int)(to_bits(magnitude) >> 23) - 127;
    float spacing = power_of_two((exponent < smallest ? smallest : exponent) - bits);
    return floorf(magnitude / spacing + noise) * spacing;
}

static inline uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* A value's part of the hash of its block: of its bfloat16 bits; what is far below the largest or not finite counts
 * for nothing. */
static inline uint64_t content(float x, float amax, uint64_t place) {
    uint32_t bits = to_bits(to_bf16(x)) >> 16;
    int counts = x != 0.0f && fabsf(x) >= amax * 0x1p-32f && (bits & 0x7f80) != 0x7f80;
    return counts ? mix64(bits + place * 0xD1B54A32D192ED03u) : 0;
}

/* Uniform in [0, 1). */
static inline float uniform(uint64_t block, uint64_t place) {
    return (float)(mix64(block + place * 0x9E3779B97F4A7C15u) >> 40) * 0x1p-24f;
}

/* The byte of a number of the format. */
static inline uint8_t code_of(float value, int element, int bits, int smallest) {
    uint32_t u = to_bits(value), magnitude = u & 0x7fffffff;
    uint32_t normal = (magnitude >> (23 - bits)) - ((uint32_t)(126 + smallest) << bits);
    uint32_t small = (uint32_t)(int)(from_bits(magnitude) * power_of_two(bits - smallest));
    uint32_t code = magnitude < to_bits(power_of_two(smallest)) ? small : normal;
    code |= u >> 31 << (element == E2M1 ? 3 : 7);
    return (uint8_t)(magnitude > 0x7f800000 ? (element == E2M1 ? 0 : 0x7f) : code);
}

static float nearest_e4m3(float x) { return nearest(saturate(x, 448.0f), 3, -6); }

/* By what values are multiplied (encode), and codes (decode). ``whole`` is the scale of the matrix, two_level's. */
static void scales_of(float amax, const struct cast *cast, float whole, float *encode, float *decode, void *stored, long at) {
    float top = TOP[cast->element];
    if (cast->rule == FLOAT32 || cast->rule == POWER_OF_TWO) {
        float e = top / amax;
        e = e > LARGEST ? LARGEST : e;
        if (cast->rule == POWER_OF_TWO && e == e) e = from_bits(to_bits(e) & 0xff800000u);
        *encode = amax == 0.0f ? 1.0f : e;
        *decode = 1.0f / *encode;
        if (stored) ((float *)stored)[at] = *decode;
    } else if (cast->rule == TWO_LEVEL) {
        float inverse = 1.0f / whole, scaled = amax * (whole * (1.0f / 6.0f));
        float block = amax != amax || whole != whole ? NAN : nearest_e4m3(scaled);
        *decode = block * inverse;
        float e = 1.0f / *decode;
        *encode = e > LARGEST ? LARGEST : e;
        if (stored) ((uint8_t *)stored)[at] = code_of(block, E4M3, 3, -6);
    } else {
        int exponent;
        if (cast->rule == E8M0_RCEIL) {
            uint32_t bits = to_bits(amax * (1.0f / top)), fraction = bits & 0x7fffff;
            exponent = (int)((bits >> 23) & 0xff);
            exponent += exponent == 0 ? fraction > 0x400000 : fraction != 0;
        } else {
            exponent = (int)((to_bits(amax) >> 23) & 0xff) - TOP_EXPONENT[cast->element];
            exponent = exponent < 0 ? 0 : exponent;
        }
        if (amax != amax) exponent = 255;
        *decode = exponent == 255 ? NAN : exponent == 0 ? 0x1p-127f : power_of_two(exponent - 127);
        *encode = exponent == 255 ? NAN : exponent == 254 ? 0x1p-127f : power_of_two(127 - exponent);
        if (stored) ((uint8_t *)stored)[at] = (uint8_t)exponent;
    }
}

static inline const float *float_at(const struct matrix *a, long row, long column) {
    return (const float *)a->x + row * a->row_stride + column * a->column_stride;
}

static inline float bf16_at(const struct matrix *a, long row, long column) {
    return from_bits((uint32_t)((const uint16_t *)a->x)[row * a->row_stride + column * a->column_stride] << 16);
}

/* Tiles: a transposed matrix is read along its own rows, and written in whole lines of the cache. What is not finite
 * becomes NaN. */
static void load_all(const struct matrix *a) {
    float *restrict values = a->values;
    for (long top = 0; top < a->m; top += 16)
        for (long left = 0; left < a->k; left += 64) {
            long rows = a->m - top < 16 ? a->m - top : 16, columns = a->k - left < 64 ? a->k - left : 64;
            float tile[16][64];
            if (a->is_bf16)
                for (long i = 0; i < rows; i++)
                    for (long j = 0; j < columns; j++) tile[i][j] = bf16_at(a, top + i, left + j);
            else if (a->column_stride == 1)
                for (long i = 0; i < rows; i++) memcpy(tile[i], float_at(a, top + i, left), 4 * columns);
            else
                for (long j = 0; j < columns; j++) {
                    const float *x = float_at(a, top, left + j);
                    for (long i = 0; i < rows; i++) tile[i][j] = x[i * a->row_stride];
                }
            for (long i = 0; i < rows; i++)
                for (long j = 0; j < columns; j++)
                    values[(top + i) * a->k + left + j] = is_finite(tile[i][j]) ? tile[i][j] : NAN;
        }
}

static void transform(float *restrict x, long groups) {
    for (long group = 0; group < groups; group++, x += 16) {
        float y[16], z[16];
        for (int i = 0; i < 16; i++) y[i] = x[i] * SIGNS[i];
        for (int distance = 1; distance < 16; distance *= 2) {
            for (int i = 0; i < 16; i++) z[i] = i & distance ? y[i - distance] - y[i] : y[i] + y[i + distance];
            memcpy(y, z, sizeof y);
        }
        for (int i = 0; i < 16; i++) x[i] = to_bf16(y[i] * 0.25f);
    }
}

/* The largest magnitude so far, as bits: they are ordered as magnitudes are, with NaN above all. */
static inline uint32_t largest_of(const float *x, long count, uint32_t amax) {
    for (long i = 0; i < count; i++) {
        uint32_t magnitude = to_bits(x[i]) & 0x7fffffff;
        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

/* A row of a block: its codes, and the values that codes and scale stand for. Inlined for each element and the usual
 * lengths, since blocks are short: with a length that is known only at run time most of the time goes into loops' ends. */
static inline __attribute__((always_inline)) void narrow(
    float *restrict row, uint8_t *restrict codes, long count, float encode, float decode, int element) {
    int bits = FRACTION_BITS[element], smallest = SMALLEST_EXPONENT[element];
    for (long j = 0; j < count; j++) {
        float scaled = row[j] * encode, magnitude = saturate(fabsf(scaled), TOP[element]);
        float rounded = copysignf(nearest(magnitude, bits, smallest), scaled);
        if (codes) codes[j] = code_of(rounded, element, bits, smallest);
        row[j] = rounded * decode;
    }
}

static inline __attribute__((always_inline)) void narrow_element(
    float *restrict row, uint8_t *restrict codes, long count, float encode, float decode, int element) {
    if (codes && count == 32) narrow(row, codes, 32, encode, decode, element);
    else if (codes && count == 128) narrow(row, codes, 128, encode, decode, element);
    else if (codes) narrow(row, codes, count, encode, decode, element);
    else if (count == 32) narrow(row, NULL, 32, encode, decode, element);
    else narrow(row, NULL, count, encode, decode, element);
}

static void narrow_row(float *restrict row, uint8_t *restrict codes, long count, float encode, float decode, int element) {
    if (element == E4M3) narrow_element(row, codes, count, encode, decode, E4M3);
    else if (element == E5M2) narrow_element(row, codes, count, encode, decode, E5M2);
    else narrow_element(row, codes, count, encode, decode, E2M1);
}

static inline __attribute__((always_inline)) void widen(
    const uint8_t *restrict codes, float *restrict values, long count, const float *restrict numbers, float scale) {
    for (long j = 0; j < count; j++) values[j] = numbers[codes[j]] * scale;
}

static void quantize(const struct matrix *a, const struct cast *cast) {
    int element = cast->element, bits = FRACTION_BITS[element], smallest = SMALLEST_EXPONENT[element];
    long at = 0;
    load_all(a);
    if (cast->hadamard) {
        transform(a->values, a->m * a->k / 16);
        for (long i = 0; i < a->m * a->k; i++) a->values[i] = is_finite(a->values[i]) ? a->values[i] : NAN;
    }
    float whole = 1.0f;
    if (cast->rule == TWO_LEVEL) {
        float amax = from_bits(largest_of(a->values, a->m * a->k, 0));
        if (a->amax) amax = *a->amax;
        whole = 2688.0f / amax;
        whole = whole > LARGEST ? LARGEST : whole;
        if (amax == 0.0f || whole == 0.0f) whole = 1.0f;
        if (a->tensor_scale) *a->tensor_scale = 1.0f / whole;
    }
    for (long top = 0; top < a->m; top += cast->rows)
        for (long left = 0; left < a->k; left += cast->columns) {
            long bottom = top + cast->rows < a->m ? top + cast->rows : a->m;
            long right = left + cast->columns < a->k ? left + cast->columns : a->k;
            uint32_t bits_of_amax = 0;
            for (long i = top; i < bottom; i++)
                bits_of_amax = largest_of(a->values + i * a->k + left, right - left, bits_of_amax);
            float largest = from_bits(bits_of_amax), amax = largest, encode, decode;
            if (a->amax && cast->rule != TWO_LEVEL) amax = *a->amax;
            scales_of(amax, cast, whole, &encode, &decode, a->scales, at++);
            uint64_t block = cast->seed;
            if (cast->stochastic)
                for (long i = top; i < bottom; i++)
                    for (long j = left; j < right; j++)
                        block += content(a->values[i * a->k + j], largest, (uint64_t)((i - top) * cast->columns + j - left + 1));
            for (long i = top; i < bottom; i++) {
                float *row = a->values + i * a->k + left;
                uint8_t *codes = a->codes ? a->codes + i * a->k + left : NULL;
                if (!cast->stochastic) {
                    narrow_row(row, codes, right - left, encode, decode, element);
                    continue;
                }
                for (long j = 0; j < right - left; j++) {
                    float scaled = row[j] * encode, magnitude = saturate(fabsf(scaled), TOP[element]);
                    float noise = uniform(block, (uint64_t)((i - top) * cast->columns + j + 1));
                    float rounded = copysignf(saturate(stochastic(magnitude, noise, bits, smallest), TOP[element]), scaled);
                    if (codes) codes[j] = code_of(rounded, element, bits, smallest);
                    row[j] = rounded * decode;
                }
            }
        }
}

/* A stack of equal matrices, ``stride`` numbers apart; all that is written, and amax, lies one after another. */
void quantize_stack(const struct matrix *first, const struct cast *cast, long count, long stride) {
    long rows = (first->m + cast->rows - 1) / cast->rows, columns = (first->k + cast->columns - 1) / cast->columns;
    long scale_bytes = cast->rule == FLOAT32 || cast->rule == POWER_OF_TWO ? 4 : 1;
    for (long i = 0; i < count; i++) {
        struct matrix a = *first;
        a.x = (const char *)a.x + i * stride * (a.is_bf16 ? 2 : 4);
        a.values += i * a.m * a.k;
        if (a.codes) a.codes += i * a.m * a.k;
        if (a.scales) a.scales = (char *)a.scales + i * rows * columns * scale_bytes;
        if (a.amax) a.amax += i;
        if (a.tensor_scale) a.tensor_scale += i;
        quantize(&a, cast);
    }
}

/* The number of a code. E4M3's only NaN has all bits but the sign, E5M2 has infinities too. */
static float number_of(int code, int element) {
    int bits = FRACTION_BITS[element], sign = element == E2M1 ? 8 : 128, magnitude = code & (sign - 1);
    int exponent = magnitude >> bits, fraction = magnitude & ((1 << bits) - 1);
    float number;
    if (element == E4M3 && magnitude == 0x7f) number = NAN;
    else if (element == E5M2 && exponent == 31) number = fraction ? NAN : INFINITY;
    else if (exponent == 0) number = (float)fraction * power_of_two(SMALLEST_EXPONENT[element] - bits);
    else number = (1.0f + (float)fraction / (float)(1 << bits)) * power_of_two(exponent - 1 + SMALLEST_EXPONENT[element]);
    return code & sign ? -number : number;
}

/* ``decode`` is what codes are multiplied by, one per block; all matrices of a stack lie one after another. */
void dequantize_stack(const uint8_t *codes, const float *decode, float *values, const struct cast *cast, long count, long m, long k) {
    float numbers[256];
    for (int code = 0; code < 256; code++) numbers[code] = number_of(cast->element == E2M1 ? code & 15 : code, cast->element);
    long rows = (m + cast->rows - 1) / cast->rows, columns = (k + cast->columns - 1) / cast->columns;
    for (long matrix = 0; matrix < count; matrix++, codes += m * k, values += m * k, decode += rows * columns)
        for (long i = 0; i < m; i++) {
            const float *scales = decode + i / cast->rows * columns;
            for (long block = 0; block < columns; block++) {
                long left = block * cast->columns, right = left + cast->columns < k ? left + cast->columns : k;
                float scale = scales[block];
                const uint8_t *from = codes + i * k + left;
                if (right - left == 32) widen(from, values + i * k + left, 32, numbers, scale);
                else widen(from, values + i * k + left, right - left, numbers, scale);
            }
        }
}
