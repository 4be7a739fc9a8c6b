/* The vector type of narrow.c, and operations on vectors. A vector contains LANES numbers, one for each of LANES
   examples. Lane l of every vector of a group belongs to example l of the group. */

#include <stdlib.h>
#include <string.h>
#include <math.h>

#ifndef REAL
#define REAL float
#endif
/* Make vectors as wide as the registers, because compilers pass wider vectors through memory, which is ten times
   slower. */
#ifdef __AVX__
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES (VECTOR_BYTES / (int)sizeof(REAL))

typedef REAL vec __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef __typeof__((vec){0} > (vec){0}) bits;
#define INLINE static inline __attribute__((always_inline))

/* Rows of the table [4][D] of a norm (a batch normalisation). The norm computes (z - mean) * factor + shift, where
   factor = scale * inverse and inverse = 1 / sqrt(variance + eps). */
enum { MEAN, FACTOR, SHIFT, INVERSE };

/* Allocate memory for this number of vectors. Return NULL if there is not enough memory. */
static void *allocate(size_t vectors) {
    size_t bytes = (vectors * sizeof(vec) + 63) / 64 * 64;
    return aligned_alloc(64, bytes ? bytes : 64);
}

INLINE vec broadcast(REAL value) {
    vec result = {0};
    return result + value;
}

/* Return `value` in the lanes where the mask is set, and 0 in the other lanes. */
INLINE vec masked(bits mask, vec value) { return (vec)(mask & (bits)value); }

/* Return 0 in the lanes where z <= 0, and `value` in the other lanes. As in torch, a NaN in `z` keeps `value`, so that
   NaN is not hidden if a network diverges. */
INLINE vec relu_gate(vec value, vec z) { return masked(~(z <= 0), value); }

/* Return the larger number in each lane, or NaN if one of the two is NaN, as in torch. */
INLINE vec maximum(vec a, vec b) {
    bits first = (a > b) | (a != a);
    return (vec)((first & (bits)a) | (~first & (bits)b));
}

INLINE double sum_lanes(vec value) {
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

/* Return the number of examples in the group with this index. The last group can have fewer than LANES. */
INLINE long count_lanes(long examples, long group) {
    long left = examples - group * LANES;
    return left < LANES ? left : LANES;
}

/* Return a mask that is set in the first `examples` lanes. Use a mask and not a product with 0, because a product would
   turn infinity into NaN. */
INLINE bits lanes_mask(long examples) {
    vec number = {0};
    for (int lane = 0; lane < LANES; lane++) number[lane] = lane;
    return number < (REAL)examples;
}

/* Return relu(norm(z)) for channel d of D channels. */
INLINE vec activated(vec z, const REAL *norm, long D, long d) {
    vec y = (z - norm[MEAN * D + d]) * norm[FACTOR * D + d] + norm[SHIFT * D + d];
    return relu_gate(y, y);
}
