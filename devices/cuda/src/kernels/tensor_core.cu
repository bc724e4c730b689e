// Tensor-core instructions of sm_80 and later: products of 16×16 by 16×8 blocks of bf16, loads of
// their operands from shared memory, and asynchronous copies into shared memory.

// d += a · b. A lane (group g = lane/4, t = lane%4) holds of a: rows g and g+8, columns 2t, 2t+1 and
// those + 8; of b: rows 2t, 2t+1 and those + 8 of column g; of d: rows g and g+8, columns 2t, 2t+1.
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef EMULATED
    emulator::mma(d, a, b0, b1);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Loads four 8×8 blocks of bf16. Lane i gives the address of row i%8 of block i/8, and receives
// elements 2t, 2t+1 of row g of each block.
DEVICE void load_blocks(u32 (&r)[4], const bf16* row) {
#ifdef EMULATED
    emulator::load_blocks(r, row, false);
#else
    u32 address = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#endif
}

// The same, but each block is transposed.
DEVICE void load_blocks_transposed(u32 (&r)[4], const bf16* row) {
#ifdef EMULATED
    emulator::load_blocks(r, row, true);
#else
    u32 address = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#endif
}

// Loads mma operand A, the 16×16 block at (m, k), of a tile [m][k], or [k][m] if TRANSPOSED.
template <bool TRANSPOSED> DEVICE void fragment_a(u32 (&a)[4], const bf16* tile, int pitch, int m, int k) {
    int lane = threadIdx.x & 31, in = lane & 7, block = lane >> 3;
    if (TRANSPOSED)
        load_blocks_transposed(a, tile + (k + in + (block >> 1) * 8) * pitch + m + (block & 1) * 8);
    else
        load_blocks(a, tile + (m + in + (block & 1) * 8) * pitch + k + (block >> 1) * 8);
}

// Loads operand B twice: the 16×8 blocks at (k, n), (k, n + 8) of a tile [n][k], or [k][n] if BY_K.
template <bool BY_K> DEVICE void fragment_b(u32 (&b)[4], const bf16* tile, int pitch, int k, int n) {
    int lane = threadIdx.x & 31, in = lane & 7, block = lane >> 3;
    if (BY_K)
        load_blocks_transposed(b, tile + (k + in + (block & 1) * 8) * pitch + n + (block >> 1) * 8);
    else
        load_blocks(b, tile + (n + in + (block >> 1) * 8) * pitch + k + (block & 1) * 8);
}

// Starts an asynchronous copy of 16 bytes to shared memory; of zeros if not `there`.
DEVICE void copy16(void* to, const void* from, bool there) {
#ifdef EMULATED
    emulator::copy16(to, from, there);
#else
    u32 address = (u32)__cvta_generic_to_shared(to);
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
                 : "memory");
#endif
}

DEVICE void copies_commit() {
#ifdef EMULATED
    emulator::copies_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the last N groups of this thread's copies are done.
template <int N> DEVICE void copies_wait() {
#ifdef EMULATED
    emulator::copies_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Waits for the current tile, while the copies of the next one, if there is one, go on.
template <typename Fetch> DEVICE void next_tile(bool more, Fetch fetch) {
    if (more) {
        fetch();
        copies_wait<1>();
    } else {
        copies_wait<0>();
    }
    __syncthreads();
}

// Copies a tile of bf16 to shared memory: ROWS × COLUMNS, rows `pitch` apart there and `stride`
// apart in the source. Elements outside `rows` × `columns` become 0.
template <int ROWS, int COLUMNS, int THREADS>
DEVICE void copy_tile(bf16* to, int pitch, const bf16* from, i64 stride, i64 rows, i64 columns) {
    bool whole = is_aligned(from) && stride % 8 == 0;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * (COLUMNS / 8); i += THREADS) {
        int row = i / (COLUMNS / 8), c = i % (COLUMNS / 8) * 8;
        bf16* there = to + row * pitch + c;
        bool in = row < rows && c < columns;
        if (whole && (!in || c + 8 <= columns)) {
            copy16(there, in ? from + row * stride + c : from, in);
            continue;
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            there[j].bits = in && c + j < columns ? from[row * stride + c + j].bits : (u16)0;
        }
    }
}
