/* 3 x 3 convolutions of few channels with batch normalisation, ReLU and 2 x 2 max pooling, forward and backward.

   A vector holds one number of each of LANES examples, so that neither channels nor pixels need to fill it: images of
   a batch lie in groups of LANES examples, [groups][side][side][channels] of vectors. Lanes of the last group that
   have no example are kept out of every sum. A layer is kept as what its convolution gave, z; what its norm and ReLU
   make of it is computed again where it is read, group by group, in a border of zeros and in the cache.

   Every sum has one order: one build gives one result, whatever the machine is doing besides. */

#include <stdlib.h>
#include <string.h>
#include <math.h>

#ifndef REAL
#define REAL float
#endif
/* As wide as the machine's: compilers break up wider vectors through memory, and that is ten times as slow. */
#ifdef __AVX__
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define LANES (VECTOR_BYTES / (int)sizeof(REAL))
#define BLOCK 4 /* output channels that are computed together */

typedef REAL vec __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef __typeof__((vec){0} > (vec){0}) bits;
#define INLINE static inline __attribute__((always_inline))

/* Rows of the table that describes a norm. */
enum { MEAN, FACTOR, SHIFT, INVERSE };

int alma_lanes(void) { return LANES; }

static void *room(size_t vectors) {
    size_t bytes = (vectors * sizeof(vec) + 63) / 64 * 64;
    return aligned_alloc(64, bytes ? bytes : 64);
}

INLINE vec same(REAL value) {
    vec result = {0};
    return result + value;
}

/* What is not a number stays so here, as it does in torch: a network that has diverged must not look as if it had not. */

INLINE vec where(bits mask, vec value) { return (vec)(mask & (bits)value); }

/* 0 where `decides` is 0 or less, else value: what is not a number passes, as in torch, so that a network which has
   diverged does not look as if it had not. */
INLINE vec passed(vec value, vec decides) { return where(~(decides <= 0), value); }

INLINE vec larger(vec a, vec b) {
    bits first = (a > b) | (a != a);
    return (vec)((first & (bits)a) | (~first & (bits)b));
}

INLINE double lanes_sum(vec value) {
    double total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

/* The lanes that have an example. Others are cut off by it, not multiplied by 0, which infinity would survive. */
INLINE bits lanes_mask(long examples) {
    vec number = {0};
    for (int lane = 0; lane < LANES; lane++) number[lane] = lane;
    return number < (REAL)examples;
}

INLINE vec activated(vec z, const REAL *norm, long D, long d) {
    vec y = (z - norm[MEAN * D + d]) * norm[FACTOR * D + d] + norm[SHIFT * D + d];
    return passed(y, y);
}

/* Weights [D][3][3][C] for `convolve`, [D / BLOCK][3][3][C][BLOCK]; turned: those that take gradients back. */
static void pack_weights(const REAL *w, REAL *packed, long C, long D, int turned) {
    long out = turned ? C : D, in = turned ? D : C;
    for (long block = 0; block < (out + BLOCK - 1) / BLOCK; block++)
        for (long tap = 0; tap < 9; tap++)
            for (long i = 0; i < in; i++)
                for (long o = 0; o < BLOCK; o++) {
                    long at = block * BLOCK + o;
                    REAL value = 0;
                    if (at < out) value = turned ? w[(i * 9 + 8 - tap) * C + at] : w[(at * 9 + tap) * C + i];
                    packed[((block * 9 + tap) * in + i) * BLOCK + o] = value;
                }
}

/* PIXELS neighbours of a row, BLOCK output channels. */
#define TILE(PIXELS)                                                                                                   \
    INLINE void tile_##PIXELS(const vec *x, long row, long C, const REAL *w, vec *z, long D, long valid) {             \
        vec sums[PIXELS][BLOCK];                                                                                       \
        _Pragma("GCC unroll 8") for (int p = 0; p < PIXELS; p++)                                                       \
            _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++) sums[p][o] = same(0);                              \
        for (int ky = 0; ky < 3; ky++)                                                                                 \
            for (int kx = 0; kx < 3; kx++) {                                                                           \
                const vec *from = x + ky * row + kx * C;                                                               \
                for (long c = 0; c < C; c++, w += BLOCK) {                                                             \
                    _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++) {                                          \
                        vec weight = same(w[o]);                                                                       \
                        _Pragma("GCC unroll 8") for (int p = 0; p < PIXELS; p++)                                       \
                            sums[p][o] += from[p * C + c] * weight;                                                    \
                    }                                                                                                  \
                }                                                                                                      \
            }                                                                                                          \
        for (int p = 0; p < PIXELS; p++)                                                                               \
            for (int o = 0; o < valid; o++) z[p * D + o] = sums[p][o];                                                 \
    }
TILE(1)
TILE(2)
TILE(3)

/* x [side + 2][side + 2][C] with its border, z [side][side][D]. */
static void convolve(const vec *x, const REAL *packed, vec *z, long side, long C, long D) {
    long row = (side + 2) * C;
    for (long y = 0; y < side; y++)
        for (long d = 0; d < D; d += BLOCK) {
            const REAL *w = packed + d * 9 * C;
            long valid = D - d < BLOCK ? D - d : BLOCK, at = 0;
            const vec *from = x + y * row;
            vec *to = z + y * side * D + d;
            for (; side - at >= 3 && side - at != 4; at += 3) tile_3(from + at * C, row, C, w, to + at * D, D, valid);
            for (; side - at >= 2; at += 2) tile_2(from + at * C, row, C, w, to + at * D, D, valid);
            for (; at < side; at++) tile_1(from + at * C, row, C, w, to + at * D, D, valid);
        }
}

/* What a layer reads, inside its border: the images themselves (no norm), or what the layer below makes of its z. */
static void read_input(const vec *z, const REAL *norm, vec *padded, long side, long C) {
    for (long y = 0; y < side; y++) {
        vec *to = padded + ((y + 1) * (side + 2) + 1) * C;
        const vec *from = z + y * side * C;
        if (!norm) {
            memcpy(to, from, side * C * sizeof(vec));
            continue;
        }
        for (long x = 0; x < side; x++)
            for (long c = 0; c < C; c++) to[x * C + c] = activated(from[x * C + c], norm, C, c);
    }
}

/* Sums of each channel over the pixels of a group: of z, or of its squared distance to `mean`. */
static void channel_sums(const vec *z, long pixels, long D, const double *mean, bits mask, double *sums) {
    for (long d = 0; d < D; d += BLOCK) {
        long valid = D - d < BLOCK ? D - d : BLOCK;
        vec totals[BLOCK], centre[BLOCK];
        for (int o = 0; o < BLOCK; o++) {
            totals[o] = same(0);
            centre[o] = same(mean && o < valid ? (REAL)mean[d + o] : 0);
        }
        const vec *from = z + d;
        for (long p = 0; p < pixels; p++, from += D)
            if (valid == BLOCK)
                _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++) {
                    vec value = where(mask, from[o] - centre[o]);
                    if (mean) value *= value;
                    totals[o] += value;
                }
            else
                for (int o = 0; o < valid; o++) {
                    vec value = where(mask, from[o] - centre[o]);
                    if (mean) value *= value;
                    totals[o] += value;
                }
        for (int o = 0; o < valid; o++) sums[d + o] = lanes_sum(totals[o]);
    }
}

/* x [examples][pixels][C] to [groups][pixels][C] of vectors. */
void alma_pack(const REAL *x, vec *packed, long examples, long pixels, long C) {
    long numbers = pixels * C;
    for (long first = 0; first < examples; first += LANES, packed += numbers, x += LANES * numbers) {
        long valid = examples - first < LANES ? examples - first : LANES;
        if (valid < LANES) memset(packed, 0, numbers * sizeof(vec));
        for (long n = 0; n < numbers; n++)
            if (valid == LANES) {
                vec value;
                for (int lane = 0; lane < LANES; lane++) value[lane] = x[lane * numbers + n];
                packed[n] = value;
            } else
                for (int lane = 0; lane < valid; lane++) packed[n][lane] = x[lane * numbers + n];
    }
}

/* The other way. */
void alma_unpack(const vec *packed, REAL *x, long examples, long pixels, long C) {
    long numbers = pixels * C;
    for (long first = 0; first < examples; first += LANES, packed += numbers, x += LANES * numbers) {
        long valid = examples - first < LANES ? examples - first : LANES;
        for (long n = 0; n < numbers; n++)
            for (int lane = 0; lane < valid; lane++) x[lane * numbers + n] = packed[n][lane];
    }
}

/* z = conv(input), and the layer's norm: from the batch in training, which moves the running statistics by `momentum`,
   else from them. below: the norm of the layer that gave the input, NULL where the input is images. 0, or 1: no memory. */
int alma_conv_forward(const vec *input, const REAL *below, const REAL *w, const REAL *scale, const REAL *shift,
                      REAL *running_mean, REAL *running_variance, vec *z, REAL *norm, long examples, long side, long C,
                      long D, int training, double momentum, double eps) {
    long groups = (examples + LANES - 1) / LANES, pixels = side * side, padded = (side + 2) * (side + 2) * C;
    long blocks = (D + BLOCK - 1) / BLOCK;
    vec *x = room(padded);
    REAL *packed = room(blocks * 9 * C * BLOCK / LANES + 1);
    double *table = malloc(4 * D * sizeof(double));
    int failed = !x || !packed || !table;
    if (!failed) {
        double *mean = table, *squares = table + D, *sums = table + 2 * D, *local = table + 3 * D, count = 0;
        memset(x, 0, padded * sizeof(vec));
        memset(table, 0, 4 * D * sizeof(double));
        pack_weights(w, packed, C, D, 0);
        for (long g = 0; g < groups; g++) {
            vec *own = z + g * pixels * D;
            read_input(input + g * pixels * C, below, x, side, C);
            convolve(x, packed, own, side, C, D);
            long valid = examples - g * LANES < LANES ? examples - g * LANES : LANES;
            bits mask = lanes_mask(valid);
            if (valid < LANES)
                for (long n = 0; n < pixels * D; n++) own[n] = where(mask, own[n]);
            if (!training) continue;
            /* Mean and squares of the group while it is in the cache, then joined to those before (Chan et al.). */
            double more = (double)valid * pixels, total = count + more;
            channel_sums(own, pixels, D, NULL, mask, sums);
            for (long d = 0; d < D; d++) local[d] = (REAL)(sums[d] / more);
            channel_sums(own, pixels, D, local, mask, sums);
            for (long d = 0; d < D; d++) {
                double apart = local[d] - mean[d];
                squares[d] += sums[d] + apart * apart * count * more / total;
                mean[d] += apart * more / total;
            }
            count = total;
        }
        for (long d = 0; d < D; d++) {
            double centre = running_mean[d], variance = running_variance[d];
            if (training) {
                centre = mean[d];
                variance = squares[d] / count;
                double unbiased = squares[d] / (count > 1 ? count - 1 : 1);
                running_mean[d] += momentum * (centre - running_mean[d]);
                running_variance[d] += momentum * (unbiased - running_variance[d]);
            }
            double inverse = 1 / sqrt(variance + eps);
            norm[MEAN * D + d] = centre;
            norm[FACTOR * D + d] = scale[d] * inverse;
            norm[SHIFT * D + d] = shift[d];
            norm[INVERSE * D + d] = inverse;
        }
    }
    free(x), free(packed), free(table);
    return failed;
}

/* The largest of 2 x 2 pixels of relu(norm(z)): out [examples][side / 2][side / 2][D]. */
void alma_pool_forward(const vec *z, const REAL *norm, REAL *out, long examples, long side, long D) {
    long groups = (examples + LANES - 1) / LANES, half = side / 2;
    for (long g = 0; g < groups; g++) {
        long valid = examples - g * LANES < LANES ? examples - g * LANES : LANES;
        for (long y = 0; y < half; y++)
            for (long x = 0; x < half; x++) {
                const vec *from = z + ((g * side + 2 * y) * side + 2 * x) * D;
                REAL *to = out + ((g * LANES * half + y) * half + x) * D;
                for (long d = 0; d < D; d++) {
                    vec left = larger(activated(from[d], norm, D, d), activated(from[side * D + d], norm, D, d));
                    vec right = larger(activated(from[D + d], norm, D, d), activated(from[side * D + D + d], norm, D, d));
                    vec largest = larger(left, right);
                    for (int lane = 0; lane < valid; lane++) to[lane * half * half * D + d] = largest[lane];
                }
            }
    }
}

/* The gradient before ReLU, d, from that of the pooled output, and for each channel the sums of d and of d (z - mean).
   Of equals the upper one takes it, then the left one. */
void alma_pool_backward(const REAL *d_out, const vec *z, const REAL *norm, vec *d_z, double *sums, long examples,
                        long side, long D) {
    long groups = (examples + LANES - 1) / LANES, half = side / 2;
    memset(sums, 0, 2 * D * sizeof(double));
    for (long g = 0; g < groups; g++) {
        long valid = examples - g * LANES < LANES ? examples - g * LANES : LANES;
        for (long d = 0; d < D; d++) {
            vec total = same(0), along = same(0), centre = same(norm[MEAN * D + d]);
            for (long y = 0; y < half; y++)
                for (long x = 0; x < half; x++) {
                    long at = ((g * side + 2 * y) * side + 2 * x) * D + d;
                    const REAL *from = d_out + ((g * LANES * half + y) * half + x) * D + d;
                    vec gradient = {0};
                    if (valid == LANES)
                        for (int lane = 0; lane < LANES; lane++) gradient[lane] = from[lane * half * half * D];
                    else
                        for (int lane = 0; lane < valid; lane++) gradient[lane] = from[lane * half * half * D];
                    vec z_ul = z[at], z_ur = z[at + D], z_ll = z[at + side * D], z_lr = z[at + side * D + D];
                    vec ul = activated(z_ul, norm, D, d), ur = activated(z_ur, norm, D, d);
                    vec ll = activated(z_ll, norm, D, d), lr = activated(z_lr, norm, D, d);
                    vec left = larger(ul, ll), right = larger(ur, lr);
                    bits of_left = left >= right, upper_left = ul >= ll, upper_right = ur >= lr;
                    /* Where the largest is 0, ReLU lets nothing pass. */
                    gradient = passed(gradient, larger(left, right));
                    vec d_left = where(of_left, gradient), d_right = where(~of_left, gradient);
                    vec d_ul = where(upper_left, d_left), d_ll = where(~upper_left, d_left);
                    vec d_ur = where(upper_right, d_right), d_lr = where(~upper_right, d_right);
                    d_z[at] = d_ul, d_z[at + D] = d_ur, d_z[at + side * D] = d_ll, d_z[at + side * D + D] = d_lr;
                    total += gradient;
                    along += d_ul * (z_ul - centre) + d_ur * (z_ur - centre) + d_ll * (z_ll - centre) + d_lr * (z_lr - centre);
                }
            sums[d] += lanes_sum(total);
            sums[D + d] += lanes_sum(along);
        }
    }
}

/* Adds to totals [D / BLOCK][3][C][3][BLOCK], of vectors, what a group says of the weights. */
static void weight_gradient(const vec *x, const vec *d_z, vec *totals, long side, long C, long D) {
    long x_row = (side + 2) * C, d_row = (side + 2) * D;
    long rows = 8192 / (side * D * LANES * (long)sizeof(REAL));
    rows = rows < 1 ? 1 : rows > side ? side : rows;
    for (long first = 0; first < side; first += rows) {
        long last = first + rows < side ? first + rows : side;
        vec *to = totals;
        for (long d = 0; d < D; d += BLOCK)
            for (int ky = 0; ky < 3; ky++)
                for (long c = 0; c < C; c++, to += 3 * BLOCK) {
                    vec sums[3][BLOCK];
                    _Pragma("GCC unroll 8") for (int kx = 0; kx < 3; kx++)
                        _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++) sums[kx][o] = to[kx * BLOCK + o];
                    for (long y = first; y < last; y++) {
                        const vec *from = x + (y + ky) * x_row + c, *by = d_z + (y + 1) * d_row + D + d;
                        for (long at = 0; at < side; at++, from += C, by += D)
                            _Pragma("GCC unroll 8") for (int kx = 0; kx < 3; kx++)
                                _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++)
                                    sums[kx][o] += from[kx * C] * by[o];
                    }
                    _Pragma("GCC unroll 8") for (int kx = 0; kx < 3; kx++)
                        _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++) to[kx * BLOCK + o] = sums[kx][o];
                }
    }
}

/* From d, the gradient after the layer's norm, and its sums: those of weights, scale and shift, and, where d_input is
   not NULL, the gradient of the input; of an input that another layer gave, before its ReLU and with its sums. */
int alma_conv_backward(const vec *d, const double *sums, const vec *z, const REAL *norm, const vec *input,
                       const REAL *below, const REAL *w, REAL *d_w, REAL *d_scale, REAL *d_shift, vec *d_input,
                       double *sums_below, long examples, long side, long C, long D) {
    long groups = (examples + LANES - 1) / LANES, pixels = side * side, wide = side + 2;
    long blocks = (D + BLOCK - 1) / BLOCK, back = (C + BLOCK - 1) / BLOCK, num_totals = blocks * BLOCK * 9 * C;
    vec *x = room(wide * wide * C), *d_z = room(wide * wide * D), *totals = room(num_totals);
    REAL *packed = room(back * 9 * D * BLOCK / LANES + 1), *factors = malloc(3 * D * sizeof(REAL));
    int failed = !x || !d_z || !totals || !packed || !factors;
    if (!failed) {
        double count = (double)examples * pixels;
        memset(x, 0, wide * wide * C * sizeof(vec));
        memset(d_z, 0, wide * wide * D * sizeof(vec));
        memset(totals, 0, num_totals * sizeof(vec));
        if (d_input) pack_weights(w, packed, C, D, 1);
        if (sums_below) memset(sums_below, 0, 2 * C * sizeof(double));
        for (long o = 0; o < D; o++) {
            double factor = norm[FACTOR * D + o], inverse = norm[INVERSE * D + o];
            d_shift[o] = sums[o];
            d_scale[o] = sums[D + o] * inverse;
            factors[o] = factor;
            factors[D + o] = -factor * sums[o] / count;
            factors[2 * D + o] = -factor * inverse * inverse * sums[D + o] / count;
        }
        for (long g = 0; g < groups; g++) {
            long valid = examples - g * LANES < LANES ? examples - g * LANES : LANES;
            bits mask = lanes_mask(valid);
            const vec *own_d = d + g * pixels * D, *own_z = z + g * pixels * D, *own_input = input + g * pixels * C;
            for (long y = 0; y < side; y++)
                for (long at = 0; at < side; at++) {
                    vec *to = d_z + ((y + 1) * wide + at + 1) * D;
                    for (long o = 0; o < D; o++, own_d++, own_z++)
                        to[o] = where(mask, *own_d * factors[o] + factors[D + o] +
                                              (*own_z - norm[MEAN * D + o]) * factors[2 * D + o]);
                }
            read_input(own_input, below, x, side, C);
            weight_gradient(x, d_z, totals, side, C, D);
            if (!d_input) continue;
            vec *own = d_input + g * pixels * C;
            convolve(d_z, packed, own, side, D, C);
            if (!below) continue;
            for (long c = 0; c < C; c++) {
                vec total = same(0), along = same(0), centre = same(below[MEAN * C + c]);
                for (long y = 0; y < side; y++)
                    for (long at = 0; at < side; at++) {
                        long place = (y * side + at) * C + c;
                        vec gradient = passed(own[place], x[((y + 1) * wide + at + 1) * C + c]);
                        own[place] = gradient;
                        total += gradient;
                        along += gradient * (own_input[place] - centre);
                    }
                sums_below[c] += lanes_sum(total);
                sums_below[C + c] += lanes_sum(along);
            }
        }
        for (long o = 0; o < D; o++)
            for (int ky = 0; ky < 3; ky++)
                for (int kx = 0; kx < 3; kx++)
                    for (long c = 0; c < C; c++)
                        d_w[((o * 3 + ky) * 3 + kx) * C + c] =
                            lanes_sum(totals[((((o / BLOCK) * 3 + ky) * C + c) * 3 + kx) * BLOCK + o % BLOCK]);
    }
    free(x), free(d_z), free(totals), free(packed), free(factors);
    return failed;
}
