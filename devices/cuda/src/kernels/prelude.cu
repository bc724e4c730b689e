// Beginning of every kernel file: types, 16-byte accesses, sums over warps and blocks, random
// numbers. Compiled by NVRTC for a device, or by a C++ compiler over the emulator of the tests,
// which defines EMULATED and replacements of CUDA's keywords.

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define BOUNDED_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]
#define INFINITY __int_as_float(0x7f800000)
#define LOAD_CONSTANT(p) __ldg(p)
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

DEVICE float as_float(float x) { return x; }
DEVICE float as_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
DEVICE u32 round_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Packs two numbers into a word as bf16, the first in the low half.
DEVICE u32 pack_bf16(float low, float high) {
#ifdef EMULATED
    return round_bf16(low) | (round_bf16(high) << 16);
#else
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#endif
}

template <class T> DEVICE T rounded(float x);
template <> DEVICE float rounded<float>(float x) { return x; }
template <> DEVICE bf16 rounded<bf16>(float x) {
    bf16 y;
    y.bits = (u16)round_bf16(x);
    return y;
}

struct __align__(16) Words {
    u32 word[4];
};

DEVICE bool is_aligned(const void* p) { return ((u64)p & 15) == 0; }
DEVICE bool is_aligned8(const void* p) { return ((u64)p & 7) == 0; }

// Eight elements as they lie in memory.
template <class T> struct Raw;
template <> struct Raw<float> {
    Words low, high;
};
template <> struct Raw<bf16> {
    Words all;
};

DEVICE void unpack(const Raw<float>& raw, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = __uint_as_float(raw.low.word[i]);
        x[4 + i] = __uint_as_float(raw.high.word[i]);
    }
}

DEVICE void unpack(const Raw<bf16>& raw, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(raw.all.word[i] << 16);
        x[2 * i + 1] = __uint_as_float(raw.all.word[i] & 0xffff0000u);
    }
}

template <class T> DEVICE void load_each(const T* p, i64 count, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = i < count ? as_float(p[i]) : 0.0f;
}

// Loads eight elements of each tensor, or the first `count` of them; the rest is 0. All loads are
// issued before the first is unpacked, so that a thread waits for memory once.
template <class T> DEVICE void load8(const T* p, i64 count, float (&x)[8]) {
    if (count >= 8 && is_aligned(p)) return unpack(*(const Raw<T>*)p, x);
    load_each(p, count, x);
}

template <class T, class U>
DEVICE void load8(const T* p, float (&x)[8], const U* q, float (&y)[8], i64 count) {
    if (count >= 8 && is_aligned(p) && is_aligned(q)) {
        Raw<T> a = *(const Raw<T>*)p;
        Raw<U> b = *(const Raw<U>*)q;
        unpack(a, x);
        unpack(b, y);
        return;
    }
    load_each(p, count, x);
    load_each(q, count, y);
}

template <class T, class U, class V>
DEVICE void load8(const T* p, float (&x)[8], const U* q, float (&y)[8], const V* r, float (&z)[8],
                  i64 count) {
    if (count >= 8 && is_aligned(p) && is_aligned(q) && is_aligned(r)) {
        Raw<T> a = *(const Raw<T>*)p;
        Raw<U> b = *(const Raw<U>*)q;
        Raw<V> c = *(const Raw<V>*)r;
        unpack(a, x);
        unpack(b, y);
        unpack(c, z);
        return;
    }
    load_each(p, count, x);
    load_each(q, count, y);
    load_each(r, count, z);
}

DEVICE void store8(float* p, i64 count, const float (&x)[8]) {
    if (count >= 8 && is_aligned(p)) {
        Words a, b;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a.word[i] = __float_as_uint(x[i]);
            b.word[i] = __float_as_uint(x[4 + i]);
        }
        ((Words*)p)[0] = a;
        ((Words*)p)[1] = b;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) p[i] = x[i];
}

DEVICE void store8(bf16* p, i64 count, const float (&x)[8]) {
    if (count >= 8 && is_aligned(p)) {
        Words a;
#pragma unroll
        for (int i = 0; i < 4; i++) a.word[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
        *(Words*)p = a;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) p[i] = rounded<bf16>(x[i]);
}

// Loads eight bytes, or the first `count` of them.
DEVICE void load8(const u8* p, i64 count, u8 (&x)[8]) {
    bool whole = count >= 8 && is_aligned8(p);
    u64 word = whole ? *(const u64*)p : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = whole ? (u8)(word >> 8 * i) : i < count ? p[i] : 0;
}

DEVICE void store8(u8* p, i64 count, const u8 (&x)[8]) {
    if (count >= 8 && is_aligned8(p)) {
        u64 word = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) word |= (u64)x[i] << 8 * i;
        *(u64*)p = word;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) p[i] = x[i];
}

// Stores four elements, or the first `count` of them. A thread's eight 32-bit numbers are stored as
// two such halves, so that neighbouring threads write adjacent words.
DEVICE void store4(float* p, i64 count, const float* x) {
    if (count >= 4 && is_aligned(p)) {
        Words a;
#pragma unroll
        for (int i = 0; i < 4; i++) a.word[i] = __float_as_uint(x[i]);
        *(Words*)p = a;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) p[i] = x[i];
}

DEVICE void store4(bf16* p, i64 count, const float* x) {
    if (count >= 4 && is_aligned8(p)) {
        *(u64*)p = pack_bf16(x[0], x[1]) | (u64)pack_bf16(x[2], x[3]) << 32;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (i < count) p[i] = rounded<bf16>(x[i]);
}

// Index of this thread's first eight elements, and the distance to its next eight.
DEVICE i64 first8() { return ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; }
DEVICE i64 stride8() { return (i64)gridDim.x * blockDim.x * 8; }

// out[i] = f(x[i]), or f(x[i], y[i]), of flat tensors.
template <class To, class From, class F>
DEVICE void each(To* out, const From* x, i64 n, F f, i64 first = first8(), i64 stride = stride8()) {
    for (i64 i = first; i < n; i += stride) {
        float v[8];
        load8(x + i, n - i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = f(v[j]);
        store8(out + i, n - i, v);
    }
}

template <class T, class F>
DEVICE void each(T* out, const T* x, const T* y, i64 n, F f, i64 first = first8(), i64 stride = stride8()) {
    for (i64 i = first; i < n; i += stride) {
        float v[8], w[8];
        load8(x + i, v, y + i, w, n - i);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = f(v[j], w[j]);
        store8(out + i, n - i, v);
    }
}

// The same of one row, which a block has to itself.
template <class... A> DEVICE void each_of_row(A... arguments) {
    each(arguments..., (i64)threadIdx.x * 8, (i64)blockDim.x * 8);
}

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// The sum over a block of whole warps, returned to every thread; `scratch` holds 32 numbers.
DEVICE float block_sum(float x, float* scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

DEVICE float block_max(float x, float* scratch) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : -INFINITY);
}

// The sum by column of what a block's 256 threads have: 32 of them stand side by side on eight columns each, eight rows
// of them below each other; each thread gets the sum of its own column of 256.
DEVICE float column_total(const float (&sum)[8], float (&lines)[8][256]) {
    int across = threadIdx.x & 31, down = threadIdx.x >> 5;
#pragma unroll
    for (int j = 0; j < 8; j++) lines[down][across * 8 + j] = sum[j];
    __syncthreads();
    float total = 0.0f;
    for (int line = 0; line < 8; line++) total += lines[line][threadIdx.x];
    return total;
}

// 2^x and 1/x by the special function units, within 2 ulp; subnormal numbers become 0. CUDA's own
// functions take three times as many instructions: too many for a kernel that should be limited
// only by memory bandwidth.
DEVICE float power_of_2(float x) {
#ifdef EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

DEVICE float reciprocal(float x) {
#ifdef EMULATED
    return 1.0f / x;
#else
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

#define LOG2_E 1.4426950408889634f

DEVICE float exponential(float x) { return power_of_2(x * LOG2_E); }
DEVICE float sigmoid(float x) { return reciprocal(1.0f + exponential(-x)); }

// Philox4x32-10 (Salmon et al. 2011): the random words of four elements of a stream. The step
// number is read when a kernel runs, so that replays of a captured launch draw new numbers.
struct Stream {
    u32 key[2];
    const u32* step;
    u32 operation;
};

DEVICE void philox(Stream stream, u64 block, u32 (&word)[4]) {
    u32 c0 = (u32)block, c1 = (u32)(block >> 32), c2 = LOAD_CONSTANT(stream.step),
        c3 = stream.operation;
    u32 k0 = stream.key[0], k1 = stream.key[1];
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
        u32 low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    word[0] = c0;
    word[1] = c1;
    word[2] = c2;
    word[3] = c3;
}

// The random words of eight consecutive elements of a stream.
DEVICE void philox8(Stream stream, u64 first, u32 (&word)[8]) {
    u32 one[4], two[4];
    philox(stream, first / 4, one);
    philox(stream, first / 4 + 1, two);
    int skip = (int)(first & 3);
    if (skip == 0) {
#pragma unroll
        for (int i = 0; i < 8; i++) word[i] = i < 4 ? one[i] : two[i - 4];
        return;
    }
    u32 all[12];
    u32 three[4];
    philox(stream, first / 4 + 2, three);
#pragma unroll
    for (int i = 0; i < 12; i++) all[i] = i < 4 ? one[i] : i < 8 ? two[i - 4] : three[i - 8];
#pragma unroll
    for (int i = 0; i < 8; i++) word[i] = skip == 1 ? all[i + 1] : skip == 2 ? all[i + 2] : all[i + 3];
}

// Whether an element is kept: its uniform number, of 24 bits, is not below the threshold.
DEVICE bool is_kept(u32 word, u32 threshold) { return (word >> 8) >= threshold; }
