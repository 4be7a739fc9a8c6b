/* 3 x 3 convolutions with few channels, with batch normalisation, ReLU and 2 x 2 max pooling, forward and backward.

   A vector contains LANES numbers, one for each of LANES examples, so vectors are full even if there are few channels
   or pixels. The images of a batch are stored in groups of LANES examples, as vectors [groups][side][side][channels].
   The last group may have fewer examples than lanes. Sums do not include its unused lanes.

   For each layer, only z is stored, the output of the convolution. Its normalisation and ReLU are computed again
   wherever their result is needed, for one group at a time. The result is written to a buffer with a border of zeros,
   which is small enough for the cache.

   Every sum has a fixed order, so that one build always returns the same result.

   Names: C input channels, D output channels, side = side of an image in pixels, w = weights [D][3][3][C], norm = table
   of a batch normalisation (see the enum below), d_x = gradient of the loss with respect to x. "The layer below" is the
   layer before, whose z is the input. */

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

#define BLOCK 4 /* number of output channels that are computed together */

/* Return LANES, the number of examples in a group. */
int alma_lanes(void) { return LANES; }

/* Write the weights [D][3][3][C] to `packed` in the order in which `convolve` reads them, [D / BLOCK][3][3][C][BLOCK].
   If `turned` is 1, write the weights of the convolution that computes the gradient of the input from the gradient of
   the output, [C / BLOCK][3][3][D][BLOCK]. Missing channels of the last block are 0. */
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

/* Define the function tile_PIXELS, which computes BLOCK output channels for PIXELS neighbouring pixels of a row. It
   writes only the first `valid` channels. */
#define TILE(PIXELS)                                                                                                   \
    INLINE void tile_##PIXELS(const vec *x, long row, long C, const REAL *w, vec *z, long D, long valid) {             \
        vec sums[PIXELS][BLOCK];                                                                                       \
        _Pragma("GCC unroll 8") for (int p = 0; p < PIXELS; p++)                                                       \
            _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++) sums[p][o] = broadcast(0);                         \
        for (int ky = 0; ky < 3; ky++)                                                                                 \
            for (int kx = 0; kx < 3; kx++) {                                                                           \
                const vec *from = x + ky * row + kx * C;                                                               \
                for (long c = 0; c < C; c++, w += BLOCK) {                                                             \
                    _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++) {                                          \
                        vec weight = broadcast(w[o]);                                                                  \
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

/* Compute the convolution for one group. The input x [side + 2][side + 2][C] includes a border of zeros. The output is
   z [side][side][D]. */
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

/* Write the input of a layer to `padded`, inside the border. The input is relu(norm(z)), where z and norm belong to the
   layer below. In the first layer `norm` is NULL, and z contains the input images, which are copied. */
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

/* Return z - centre, or its square if `is_squared`, in the lanes where the mask is set, and 0 in the other lanes. */
INLINE vec channel_term(vec z, vec centre, bits mask, int is_squared) {
    vec value = masked(mask, z - centre);
    if (is_squared) value *= value;
    return value;
}

/* Sum z over the pixels and examples of a group, for each channel. If `mean` is not NULL, sum (z - mean)^2 instead. */
static void channel_sums(const vec *z, long pixels, long D, const double *mean, bits mask, double *sums) {
    for (long d = 0; d < D; d += BLOCK) {
        long valid = D - d < BLOCK ? D - d : BLOCK;
        vec totals[BLOCK], centre[BLOCK];
        for (int o = 0; o < BLOCK; o++) {
            totals[o] = broadcast(0);
            centre[o] = broadcast(mean && o < valid ? (REAL)mean[d + o] : 0);
        }
        const vec *from = z + d;
        for (long p = 0; p < pixels; p++, from += D)
            if (valid == BLOCK)
                _Pragma("GCC unroll 8") for (int o = 0; o < BLOCK; o++)
                    totals[o] += channel_term(from[o], centre[o], mask, mean != NULL);
            else
                for (int o = 0; o < valid; o++) totals[o] += channel_term(from[o], centre[o], mask, mean != NULL);
        for (int o = 0; o < valid; o++) sums[d + o] = sum_lanes(totals[o]);
    }
}

/* Copy x [examples][pixels][C] to vectors [groups][pixels][C]. */
void alma_pack(const REAL *x, vec *packed, long examples, long pixels, long C) {
    long numbers = pixels * C;
    for (long g = 0; g * LANES < examples; g++, packed += numbers, x += LANES * numbers) {
        long valid = count_lanes(examples, g);
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

/* Copy vectors [groups][pixels][C] to x [examples][pixels][C]. */
void alma_unpack(const vec *packed, REAL *x, long examples, long pixels, long C) {
    long numbers = pixels * C;
    for (long g = 0; g * LANES < examples; g++, packed += numbers, x += LANES * numbers) {
        long valid = count_lanes(examples, g);
        for (long n = 0; n < numbers; n++)
            for (int lane = 0; lane < valid; lane++) x[lane * numbers + n] = packed[n][lane];
    }
}

/* For each channel, the mean over `count` pixels, and the sum of the squared differences from the mean. Both arrays
   have the length D. */
typedef struct {
    double *mean, *squares, count;
} moments;

/* Compute the mean and the squared differences of one group while the group is in the cache, and merge them into `all`,
   which contains the moments of the groups before (Chan, Golub and LeVeque 1979). `valid` is the number of examples in
   the group. `sums` and `local` are work buffers [D]. */
static void add_group(moments *all, const vec *z, long pixels, long D, long valid, bits mask, double *sums,
                      double *local) {
    double more = (double)valid * pixels, total = all->count + more;
    channel_sums(z, pixels, D, NULL, mask, sums);
    for (long d = 0; d < D; d++) local[d] = (REAL)(sums[d] / more);
    channel_sums(z, pixels, D, local, mask, sums);
    for (long d = 0; d < D; d++) {
        double apart = local[d] - all->mean[d];
        all->squares[d] += sums[d] + apart * apart * all->count * more / total;
        all->mean[d] += apart * more / total;
    }
    all->count = total;
}

/* Forward pass of one layer: write z, the output of the convolution, and the table `norm` of the batch normalisation.
   In training, `norm` uses the mean and variance of the batch, and the running statistics are updated with weight
   `momentum` for the batch. In evaluation, `norm` uses the running statistics. `below` is the norm of the layer below,
   whose z is `input`. It is NULL in the first layer, where `input` contains images. Return 1 if there is not enough
   memory for the work buffers, else 0. */
int alma_conv_forward(const vec *input, const REAL *below, const REAL *w, const REAL *scale, const REAL *shift,
                      REAL *running_mean, REAL *running_variance, vec *z, REAL *norm, long examples, long side, long C,
                      long D, int training, double momentum, double eps) {
    long groups = (examples + LANES - 1) / LANES, pixels = side * side, padded = (side + 2) * (side + 2) * C;
    long blocks = (D + BLOCK - 1) / BLOCK;
    vec *x = allocate(padded);
    REAL *packed = allocate(blocks * 9 * C * BLOCK / LANES + 1);
    double *table = malloc(4 * D * sizeof(double));
    int failed = !x || !packed || !table;
    if (!failed) {
        moments batch = {table, table + D, 0};
        memset(x, 0, padded * sizeof(vec));
        memset(table, 0, 4 * D * sizeof(double));
        pack_weights(w, packed, C, D, 0);
        for (long g = 0; g < groups; g++) {
            vec *own = z + g * pixels * D;
            read_input(input + g * pixels * C, below, x, side, C);
            convolve(x, packed, own, side, C, D);
            long valid = count_lanes(examples, g);
            bits mask = lanes_mask(valid);
            if (valid < LANES)
                for (long n = 0; n < pixels * D; n++) own[n] = masked(mask, own[n]);
            if (training) add_group(&batch, own, pixels, D, valid, mask, table + 2 * D, table + 3 * D);
        }
        for (long d = 0; d < D; d++) {
            double centre = running_mean[d], variance = running_variance[d];
            if (training) {
                centre = batch.mean[d];
                variance = batch.squares[d] / batch.count;
                double unbiased = batch.squares[d] / (batch.count > 1 ? batch.count - 1 : 1);
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

/* Forward pass of the pooling: write the maximum of relu(norm(z)) over each 2 x 2 pixels to
   out [examples][side / 2][side / 2][D]. */
void alma_pool_forward(const vec *z, const REAL *norm, REAL *out, long examples, long side, long D) {
    long groups = (examples + LANES - 1) / LANES, half = side / 2;
    for (long g = 0; g < groups; g++) {
        long valid = count_lanes(examples, g);
        for (long y = 0; y < half; y++)
            for (long x = 0; x < half; x++) {
                const vec *up = z + ((g * side + 2 * y) * side + 2 * x) * D, *low = up + side * D;
                REAL *to = out + ((g * LANES * half + y) * half + x) * D;
                for (long d = 0; d < D; d++) {
                    vec left = maximum(activated(up[d], norm, D, d), activated(low[d], norm, D, d));
                    vec right = maximum(activated(up[D + d], norm, D, d), activated(low[D + d], norm, D, d));
                    vec largest = maximum(left, right);
                    for (int lane = 0; lane < valid; lane++) to[lane * half * half * D + d] = largest[lane];
                }
            }
    }
}

/* Backward pass of the pooling and the ReLU before it. From d_out, the gradient of the pooled output, compute the
   gradient of the output of the norm and write it to d_z. Write to `sums` [2][D], for each channel, the sum of d_z and
   the sum of d_z * (z - mean). If pixels are equal, the upper one of a column gets the gradient, and then the left one
   of the two columns. */
void alma_pool_backward(const REAL *d_out, const vec *z, const REAL *norm, vec *d_z, double *sums, long examples,
                        long side, long D) {
    long groups = (examples + LANES - 1) / LANES, half = side / 2;
    memset(sums, 0, 2 * D * sizeof(double));
    for (long g = 0; g < groups; g++) {
        long valid = count_lanes(examples, g);
        for (long d = 0; d < D; d++) {
            vec total = broadcast(0), along = broadcast(0), centre = broadcast(norm[MEAN * D + d]);
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
                    vec left = maximum(ul, ll), right = maximum(ur, lr);
                    bits of_left = left >= right, upper_left = ul >= ll, upper_right = ur >= lr;
                    /* Where the maximum is 0, ReLU has the gradient 0. */
                    gradient = relu_gate(gradient, maximum(left, right));
                    vec d_left = masked(of_left, gradient), d_right = masked(~of_left, gradient);
                    vec d_ul = masked(upper_left, d_left), d_ll = masked(~upper_left, d_left);
                    vec d_ur = masked(upper_right, d_right), d_lr = masked(~upper_right, d_right);
                    d_z[at] = d_ul, d_z[at + D] = d_ur, d_z[at + side * D] = d_ll, d_z[at + side * D + D] = d_lr;
                    total += gradient;
                    along += d_ul * (z_ul - centre) + d_ur * (z_ur - centre) + d_ll * (z_ll - centre) +
                             d_lr * (z_lr - centre);
                }
            sums[d] += sum_lanes(total);
            sums[D + d] += sum_lanes(along);
        }
    }
}

/* Add the weight gradient of one group to `totals`, vectors [D / BLOCK][3][C][3][BLOCK] that still have one sum per
   lane. x is the input and d_z the gradient of z, both with a border of zeros. The outer loop splits the image into
   bands of rows, so that the rows of d_z stay in the cache while they are read several times. */
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

/* Backward pass of the norm for one group: from d, the gradient of the output of the norm, compute the gradient of z
   and write it to d_z, inside the border. `factors` is a table [3][D] such that
   d_z = d * factors[0] + factors[1] + (z - mean) * factors[2]. */
static void norm_backward(const vec *d, const vec *z, const REAL *norm, const REAL *factors, bits mask, vec *d_z,
                          long side, long D) {
    for (long y = 0; y < side; y++)
        for (long at = 0; at < side; at++) {
            vec *to = d_z + ((y + 1) * (side + 2) + at + 1) * D;
            for (long o = 0; o < D; o++, d++, z++)
                to[o] = masked(mask, *d * factors[o] + factors[D + o] + (*z - norm[MEAN * D + o]) * factors[2 * D + o]);
        }
}

/* Backward pass of the ReLU below a layer, for one group. On entry, d is the gradient of the input of the layer. It is
   replaced by the gradient of the output of the norm below. Then the sums of d and of d * (z - mean) are added to
   `sums` [2][C]. x is the input of the layer with its border. z and `below` belong to the layer below. */
static void input_relu_backward(vec *d, const vec *x, const vec *z, const REAL *below, double *sums, long side,
                                long C) {
    for (long c = 0; c < C; c++) {
        vec total = broadcast(0), along = broadcast(0), centre = broadcast(below[MEAN * C + c]);
        for (long y = 0; y < side; y++)
            for (long at = 0; at < side; at++) {
                long place = (y * side + at) * C + c;
                vec gradient = relu_gate(d[place], x[((y + 1) * (side + 2) + at + 1) * C + c]);
                d[place] = gradient;
                total += gradient;
                along += gradient * (z[place] - centre);
            }
        sums[c] += sum_lanes(total);
        sums[C + c] += sum_lanes(along);
    }
}

/* Backward pass of one layer. d is the gradient of the output of the norm. `sums` [2][D] contains the sums of d and of
   d * (z - mean). Write the gradients of weights, scale and shift. If d_input is not NULL, also write a gradient to it:
   in the first layer (where `below` is NULL) the gradient of the input, in other layers the gradient of the output of
   the norm below, with its sums in sums_below [2][C]. Return 1 if there is not enough memory for the work buffers, else
   0. */
int alma_conv_backward(const vec *d, const double *sums, const vec *z, const REAL *norm, const vec *input,
                       const REAL *below, const REAL *w, REAL *d_w, REAL *d_scale, REAL *d_shift, vec *d_input,
                       double *sums_below, long examples, long side, long C, long D) {
    long groups = (examples + LANES - 1) / LANES, pixels = side * side, wide = side + 2;
    long blocks = (D + BLOCK - 1) / BLOCK, back = (C + BLOCK - 1) / BLOCK, num_totals = blocks * BLOCK * 9 * C;
    vec *x = allocate(wide * wide * C), *d_z = allocate(wide * wide * D), *totals = allocate(num_totals);
    REAL *packed = allocate(back * 9 * D * BLOCK / LANES + 1), *factors = malloc(3 * D * sizeof(REAL));
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
            bits mask = lanes_mask(count_lanes(examples, g));
            const vec *own_input = input + g * pixels * C;
            norm_backward(d + g * pixels * D, z + g * pixels * D, norm, factors, mask, d_z, side, D);
            read_input(own_input, below, x, side, C);
            weight_gradient(x, d_z, totals, side, C, D);
            if (!d_input) continue;
            vec *own = d_input + g * pixels * C;
            convolve(d_z, packed, own, side, D, C);
            if (below) input_relu_backward(own, x, own_input, below, sums_below, side, C);
        }
        for (long o = 0; o < D; o++)
            for (int ky = 0; ky < 3; ky++)
                for (int kx = 0; kx < 3; kx++)
                    for (long c = 0; c < C; c++)
                        d_w[((o * 3 + ky) * 3 + kx) * C + c] =
                            sum_lanes(totals[((((o / BLOCK) * 3 + ky) * C + c) * 3 + kx) * BLOCK + o % BLOCK]);
    }
    free(x), free(d_z), free(totals), free(packed), free(factors);
    return failed;
}
