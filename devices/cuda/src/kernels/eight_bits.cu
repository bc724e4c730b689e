// Casts to 8 bits, scaled so that the tensor's largest magnitude becomes the format's: E4M3 and E5M2 of
// Micikevicius et al. 2022.

// partial[block] = largest magnitude of its elements. NaNs are ignored; the cast keeps them.
KERNEL largest_bf16(float* partial, const bf16* x, i64 n) {
    __shared__ float scratch[32];
    float most = 0.0f;
    for (i64 i = first8(); i < n; i += stride8()) {
        float v[8];
        load8(x + i, n - i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) most = fmaxf(most, fabsf(v[j]));
    }
    most = block_max(most, scratch);
    if (threadIdx.x == 0) partial[blockIdx.x] = most;
}

// A format: its bits of mantissa, the bias of its exponent and the code of its largest number.
struct E4m3 {
    static const u32 mantissa = 3, bias = 7, largest = 0x7e;
};
struct E5m2 {
    static const u32 mantissa = 2, bias = 15, largest = 0x7b;
};

// The bits of a float that holds a format's largest number.
template <class F> DEVICE u32 largest_bits() {
    return (F::largest + ((127 - F::bias) << F::mantissa)) << (23 - F::mantissa);
}

// Rounds to nearest, ties to even. Too large magnitudes become the largest; NaN stays NaN.
template <class F> DEVICE u32 narrowed(float x) {
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
    const u32 shift = 23 - F::mantissa;
    if (size > 0x7f800000u) return 0x7fu;
    if (size >= largest_bits<F>()) return sign | F::largest;
    if (size < (128 - F::bias) << 23) {
        // Subnormal: adding a float whose ulp is the format's step rounds to multiples of it.
        const u32 steps = (128 - F::bias + shift) << 23;
        return sign | (__float_as_uint(__uint_as_float(size) + __uint_as_float(steps)) - steps);
    }
    u32 up = size + ((1u << (shift - 1)) - 1u) + (size >> shift & 1u);
    return sign | ((up >> shift) - ((127 - F::bias) << F::mantissa));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
DEVICE u32 pair(E4m3, float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}
DEVICE u32 pair(E5m2, float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}
#else
template <class F> DEVICE u32 pair(F, float low, float high) {
    return narrowed<F>(low) | narrowed<F>(high) << 8;
}
#endif

struct __align__(8) Codes {
    u32 word[2];
};

// Casts tiles of 128 rows × 64 columns, with 256 threads, into `out` and, transposed, into
// `transposed`; one of the two may be null. Rows and columns are multiples of 16. `largest` has
// `count` partial maxima. `factor` receives the factor that turns codes back into values.
template <class F>
DEVICE void cast_scaled(u8* out, u8* transposed, float* factor, const float* largest, i64 count,
                        const bf16* x, i64 rows, i64 columns) {
    __shared__ float scratch[32];
    // Words of four codes. A word's place in its row depends on the row, so that the threads of a
    // warp, which read down a column, use different banks.
    __shared__ u32 tile[128][16];
    float most = 0.0f;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) most = fmaxf(most, largest[i]);
    // torchao's lower bound: it gives a tensor of zeros a finite scale.
    most = fmaxf(block_max(most, scratch), 1e-12f);
    float scale = __uint_as_float(largest_bits<F>()) / most;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *factor = 1.0f / scale;
    i64 first_row = (i64)blockIdx.y * 128, first_column = (i64)blockIdx.x * 64;
    for (int piece = threadIdx.x; piece < 128 * 8; piece += 256) {
        int down = piece / 8, across = piece % 8;
        i64 row = first_row + down, column = first_column + across * 8;
        if (row >= rows || column >= columns) continue;
        float v[8];
        load8(x + row * columns + column, columns - column, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= scale;
        Codes codes;
#pragma unroll
        for (int j = 0; j < 2; j++)
            codes.word[j] = pair(F(), v[4 * j], v[4 * j + 1]) | pair(F(), v[4 * j + 2], v[4 * j + 3]) << 16;
        if (out) *(Codes*)(out + row * columns + column) = codes;
#pragma unroll
        for (int j = 0; j < 2; j++) tile[down][(across * 2 + j) ^ (down / 4 & 15)] = codes.word[j];
    }
    if (!transposed) return;
    __syncthreads();
    for (int piece = threadIdx.x; piece < 32 * 16; piece += 256) {
        int down = piece % 32, across = piece / 32;
        i64 row = first_row + down * 4, column = first_column + across * 4;
        if (row >= rows || column >= columns) continue;
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) word[i] = tile[down * 4 + i][across ^ (down & 15)];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 below = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) below |= (word[i] >> (8 * j) & 0xffu) << (8 * i);
            *(u32*)(transposed + (column + j) * rows + row) = below;
        }
    }
}

#define CAST(name, F)                                                                              \
    KERNEL cast_##name(u8* out, u8* transposed, float* factor, const float* largest, i64 count,    \
                       const bf16* x, i64 rows, i64 columns) {                                     \
        cast_scaled<F>(out, transposed, factor, largest, count, x, rows, columns);                 \
    }

CAST(e4m3, E4m3)
CAST(e5m2, E5m2)
