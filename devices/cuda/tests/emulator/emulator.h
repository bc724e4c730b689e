// Runs CUDA kernels on the host, for tests: the blocks of a grid one after the other, the threads of a
// block as fibers that take turns at barriers. Shared memory, shuffles, tensor-core products and
// asynchronous copies behave as the PTX manual says; memory that nothing wrote holds NaNs, and warps run
// apart, so that a missing wait or barrier shows.

#pragma once
#define EMULATED
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

#define DEVICE inline
#define KERNEL static void
#define BOUNDED_KERNEL(threads) static void
#define LOAD_CONSTANT(p) (*(p))
#define __device__
#define __shared__ static __attribute__((section("shared_memory")))
#define __align__(n) alignas(n)
#define DYNAMIC_SHARED(name) unsigned char* name = emulator::dynamic

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

struct Dim {
    unsigned x, y, z;
};

// Where the kernels' own shared memory lies.
extern unsigned char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

namespace emulator {

const int STACK = 256 << 10;
const int MOST_THREADS = 1024;

// Where a fiber waits: nowhere, at the block's barrier, or at its warp's.
enum Wait { RUNNING, BLOCK, WARP, DONE };

struct Copy {
    void* to;
    unsigned char data[16];
};

struct Fiber {
    // Where it begins, and, once it has, where it goes on: jumps need no system calls.
    ucontext_t context;
    jmp_buf place;
    bool begun;
    Wait wait;
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
};

static Fiber fibers[MOST_THREADS];
static ucontext_t first_scheduler;
static jmp_buf scheduler;
static unsigned char* stacks;
static unsigned char* dynamic;
static Dim grid, block, block_index;
static int current, threads;
// The order of warps, and whether asynchronous copies land at once or when they are waited for: both are
// allowed to a device, so results must not depend on them.
static bool backwards, early;
// What the lanes of each warp show each other.
alignas(64) static unsigned char shown[MOST_THREADS][64];
static void (*entry)(void*);
static void* entry_arguments;

inline void wait(Wait where) {
    fibers[current].wait = where;
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

static void begin() {
    entry(entry_arguments);
    fibers[current].wait = DONE;
    _longjmp(scheduler, 1);
}

// Lets a fiber go on until it waits.
__attribute__((noinline)) static void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    swapcontext(&first_scheduler, &fiber.context);
}

// Lets everyone go who waits where all others that are not done wait too.
inline bool release(int first, int count, Wait where) {
    bool any = false;
    for (int i = first; i < first + count; i++) {
        if (fibers[i].wait == DONE) continue;
        if (fibers[i].wait != where) return false;
        any = true;
    }
    for (int i = first; i < first + count; i++)
        if (fibers[i].wait == where) fibers[i].wait = RUNNING;
    return any;
}

// Runs a warp as far as it comes without the others: whoever relies on them without a barrier fails.
inline void run_warp(int warp) {
    int first = warp * 32, count = threads - first < 32 ? threads - first : 32;
    do {
        for (int i = first; i < first + count; i++) {
            if (fibers[i].wait != RUNNING) continue;
            current = i;
            resume(fibers[i]);
        }
    } while (release(first, count, WARP));
}

inline void run_block() {
    if (!stacks) stacks = (unsigned char*)malloc((size_t)STACK * MOST_THREADS);
    for (int i = 0; i < threads; i++) {
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = stacks + (size_t)STACK * i;
        fibers[i].context.uc_stack.ss_size = STACK;
        fibers[i].context.uc_link = nullptr;
        fibers[i].begun = false;
        fibers[i].wait = RUNNING;
        fibers[i].groups.clear();
        fibers[i].open.clear();
        makecontext(&fibers[i].context, begin, 0);
    }
    int warps = (threads + 31) / 32;
    do {
        for (int i = 0; i < warps; i++) run_warp(backwards ? warps - 1 - i : i);
    } while (release(0, threads, BLOCK));
    for (int i = 0; i < threads; i++)
        if (fibers[i].wait != DONE) {
            fprintf(stderr, "emulator: thread %d waits for others that never come\n", i);
            abort();
        }
}

template <class... P> struct Call {
    void (*kernel)(P...);
    void** arguments;
    template <size_t... I> void run(std::index_sequence<I...>) { kernel(*(P*)arguments[I]...); }
    static void start(void* self) { ((Call*)self)->run(std::index_sequence_for<P...>()); }
};

template <class... P>
void launch(void (*kernel)(P...), const unsigned* sizes, unsigned shared, void** arguments, unsigned mode) {
    backwards = mode & 1;
    early = mode & 2;
    grid = {sizes[0], sizes[1], sizes[2]};
    block = {sizes[3], sizes[4], sizes[5]};
    threads = (int)(block.x * block.y * block.z);
    Call<P...> call = {kernel, arguments};
    entry = Call<P...>::start;
    entry_arguments = &call;
    std::vector<unsigned char> memory(shared + 128);
    dynamic = (unsigned char*)(((uintptr_t)memory.data() + 127) & ~(uintptr_t)127);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                block_index = {x, y, z};
                memset(memory.data(), 0xff, memory.size());
                if (__start_shared_memory)
                    memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
                run_block();
            }
}

struct Index {
    struct X {
        operator unsigned() const { return (unsigned)current % block.x; }
    } x;
    struct Y {
        operator unsigned() const { return (unsigned)current / block.x % block.y; }
    } y;
};

// Shows `own` to the warp and returns what `lane` of it shows.
template <class T> T exchange(T own, int lane) {
    memcpy(shown[current], &own, sizeof(T));
    wait(WARP);
    T theirs;
    memcpy(&theirs, shown[(current & ~31) + lane], sizeof(T));
    wait(WARP);
    return theirs;
}

inline float widened(unsigned half) {
    unsigned bits = half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// m16n8k16 with the operands' places of the PTX manual.
inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(shown[current], own, sizeof(own));
    wait(WARP);
    int warp = current & ~31, lane = current & 31;
    for (int e = 0; e < 4; e++) {
        int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        double sum = 0.0;
        for (int k = 0; k < 16; k++) {
            const unsigned* left = (const unsigned*)shown[warp + row % 8 * 4 + k % 8 / 2];
            const unsigned* right = (const unsigned*)shown[warp + column * 4 + k % 8 / 2];
            unsigned x = left[row / 8 + k / 8 * 2], y = right[4 + k / 8];
            sum += (double)widened(x >> (k % 2 * 16) & 0xffff) * widened(y >> (k % 2 * 16) & 0xffff);
        }
        d[e] += (float)sum;
    }
    wait(WARP);
}

// ldmatrix.x4, transposed or not.
inline void load_blocks(unsigned (&r)[4], const void* row, bool transposed) {
    if ((uintptr_t)row % 16) {
        fprintf(stderr, "emulator: a row of a block at no multiple of 16 bytes\n");
        abort();
    }
    memcpy(shown[current], &row, sizeof(row));
    wait(WARP);
    int warp = current & ~31, lane = current & 31;
    for (int block = 0; block < 4; block++) {
        unsigned short pair[2];
        for (int i = 0; i < 2; i++) {
            int down = transposed ? lane % 4 * 2 + i : lane / 4;
            int across = transposed ? lane / 4 : lane % 4 * 2 + i;
            const unsigned short* from;
            memcpy(&from, shown[warp + block * 8 + down], sizeof(from));
            pair[i] = from[across];
        }
        r[block] = pair[0] | (unsigned)pair[1] << 16;
    }
    wait(WARP);
}

inline void copy16(void* to, const void* from, bool there) {
    Copy copy = {to, {}};
    if (there) memcpy(copy.data, from, 16);
    if (early) memcpy(to, copy.data, 16);
    fibers[current].open.push_back(copy);
}

inline void copies_commit() {
    fibers[current].groups.push_back(fibers[current].open);
    fibers[current].open.clear();
}

inline void copies_wait(int left) {
    auto& groups = fibers[current].groups;
    while ((int)groups.size() > left) {
        for (const Copy& copy : groups.front()) memcpy(copy.to, copy.data, 16);
        groups.erase(groups.begin());
    }
}

} // namespace emulator

static emulator::Index threadIdx;
#define blockIdx emulator::block_index
#define blockDim emulator::block
#define gridDim emulator::grid

inline void __syncthreads() { emulator::wait(emulator::BLOCK); }
template <class T> T __shfl_xor_sync(unsigned, T x, int mask) {
    return emulator::exchange(x, (emulator::current & 31) ^ mask);
}
inline void __syncwarp() { emulator::wait(emulator::WARP); }
// The lanes that show the same.
inline unsigned __match_any_sync(unsigned, unsigned x) {
    unsigned same = 0;
    for (int lane = 0; lane < 32; lane++) same |= (unsigned)(emulator::exchange(x, lane) == x) << lane;
    return same;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned atomicAdd(unsigned* to, unsigned x) {
    unsigned before = *to;
    *to += x;
    return before;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}
