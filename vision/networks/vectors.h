/* Vectors of narrow.c, and operations on them. A vector contains one number of each of LANES examples. */

#include <stdlib.h>
#include <string.h>
#include <math.h>

#ifndef REAL
#define REAL float
#endif
/* As wide as the registers: compilers pass wider vectors through memory, which is ten times slower. */
#ifdef __AVX__
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES (VECTOR_BYTES / (int)sizeof(REAL))

typedef REAL vec __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef __typeof__((vec){0} > (vec){0}) bits;
#define INLINE static inline __attribute__((always_inline))

/* Rows of the table [4][D] of a norm, which computes (z - mean) * factor + shift. Its factor is scale * inverse, and
   its inverse is 1 / sqrt(variance + eps). */
enum { MEAN, FACTOR, SHIFT, INVERSE };

/* Return memory for some vectors, or NULL. */
static void *allocate(size_t vectors) {
    size_t bytes = (vectors * sizeof(vec) + 63) / 64 * 64;
    return aligned_alloc(64, bytes ? bytes : 64);
}

INLINE vec broadcast(REAL value) {
    vec result = {0};
    return result + value;
}

/* Return `value` in the lanes of the mask, else 0. */
INLINE vec masked(bits mask, vec value) { return (vec)(mask & (bits)value); }

/* Return 0 where `z` is 0 or less, else `value`. As in torch, NaN passes: networks that diverged must show it. */
INLINE vec relu_gate(vec value, vec z) { return masked(~(z <= 0), value); }

/* Return the larger number, or NaN if one is NaN, as in torch. */
INLINE vec maximum(vec a, vec b) {
    bits first = (a > b) | (a != a);
    return (vec)((first & (bits)a) | (~first & (bits)b));
}

INLINE double sum_lanes(vec value) {
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

/* Return the number of examples in a group. */
INLINE long count_lanes(long examples, long group) {
    long left = examples - group * LANES;
    return left < LANES ? left : LANES;
}

/* Return the mask of the first `examples` lanes. A mask also removes infinity, which a product with 0 would not. */
INLINE bits lanes_mask(long examples) {
    vec number = {0};
    for (int lane = 0; lane < LANES; lane++) number[lane] = lane;
    return number < (REAL)examples;
}

/* Return relu(norm(z)) of channel d. */
INLINE vec activated(vec z, const REAL *norm, long D, long d) {
    vec y = (z - norm[MEAN * D + d]) * norm[FACTOR * D + d] + norm[SHIFT * D + d];
    return relu_gate(y, y);
}
