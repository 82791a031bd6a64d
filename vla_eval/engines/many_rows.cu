// What stands between the products of a network over many rows (prompts, pictures): norms, rotary, attention, gates. The products themselves
// are cuBLASLt's.
//
// T rows of W numbers lie row after row; `KIND` is f16 or bf16, sums are float32. Every kernel may start while its predecessor still runs
// (programmatic dependent launch) and waits before it touches memory.

DEVICE void begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
DEVICE void widen_eight(const uint4& from, float (&to)[8]) {
    const u32 words[4] = {from.x, from.y, from.z, from.w};
    #pragma unroll
    for (int e = 0; e < 4; e++) to[2 * e] = widen((u16)(words[e] & 0xffff)), to[2 * e + 1] = widen((u16)(words[e] >> 16));
}
DEVICE uint4 round_eight(const float (&from)[8]) {
    return make_uint4(rounded(from[0], from[1]), rounded(from[2], from[3]), rounded(from[4], from[5]), rounded(from[6], from[7]));
}
DEVICE void read_eight(const float* from, float (&to)[8]) {
    const float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

DEVICE float over_block(float value, float* scratch) {  // the sum over all threads, to all of them
    #pragma unroll
    for (int d = 16; d; d /= 2) value += __shfl_xor_sync(~0u, value, d);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int w = 0; w < (int)blockDim.x / 32; w++) value += scratch[w];
    return value;
}

struct Norm {
    u16* x;               // [T, W]
    const u16* more;      // [T, W] that is added to x first, or null; x then keeps the sum
    const float* weight;  // [W], or null
    const float* bias;    // [W], or null
    const u16* scale;     // [W] in the weight's place, less one, or null
    const u16* shift;     // [W] in the bias's place
    u16* out;             // [T, W]
    int width, layer;     // layer: subtract the mean
    float eps;
};

// A row a block, N eights of it a thread; the weights are there before the row is.
template <int N>
DEVICE void norm(const Norm& p) {
    __shared__ float scratch[2][8];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    float x[N][8], w[N][8], b[N][8], sum = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = (i * blockDim.x + threadIdx.x) * 8;
        #pragma unroll
        for (int e = 0; e < 8; e++) x[i][e] = b[i][e] = 0, w[i][e] = 1;
        if (at >= p.width) continue;
        if (p.weight) read_eight(p.weight + at, w[i]);
        if (p.bias) read_eight(p.bias + at, b[i]);
        if (p.scale) {
            widen_eight(*(const uint4*)(p.scale + at), w[i]), widen_eight(*(const uint4*)(p.shift + at), b[i]);
            #pragma unroll
            for (int e = 0; e < 8; e++) w[i][e] += 1;
        }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const size_t row = (size_t)blockIdx.x * p.width;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = (i * blockDim.x + threadIdx.x) * 8;
        if (at >= p.width) continue;
        widen_eight(*(const uint4*)(p.x + row + at), x[i]);
        if (p.more) {
            float more[8];
            widen_eight(*(const uint4*)(p.more + row + at), more);
            #pragma unroll
            for (int e = 0; e < 8; e++) x[i][e] += more[e];
            const uint4 kept = round_eight(x[i]);
            *(uint4*)(p.x + row + at) = kept;
            widen_eight(kept, x[i]);
        }
        #pragma unroll
        for (int e = 0; e < 8; e++) sum += x[i][e];
    }
    const float mean = p.layer ? over_block(sum, scratch[0]) / p.width : 0.0f;
    float squares = 0;
    #pragma unroll
    for (int i = 0; i < N; i++)
        if ((int)(i * blockDim.x + threadIdx.x) * 8 < p.width)
            #pragma unroll
            for (int e = 0; e < 8; e++) squares += (x[i][e] - mean) * (x[i][e] - mean);
    const float factor = rsqrtf(over_block(squares, scratch[1]) / p.width + p.eps);
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = (i * blockDim.x + threadIdx.x) * 8;
        if (at >= p.width) continue;
        #pragma unroll
        for (int e = 0; e < 8; e++) x[i][e] = (x[i][e] - mean) * factor * w[i][e] + b[i][e];
        *(uint4*)(p.out + row + at) = round_eight(x[i]);
    }
}
extern "C" __global__ void __launch_bounds__(256) norm_narrow(const __grid_constant__ Norm p) { norm<1>(p); }
extern "C" __global__ void __launch_bounds__(256) norm_wide(const __grid_constant__ Norm p) { norm<4>(p); }

struct Turn {
    const u16* x;         // [T, stride]: heads of `q`, then of `k`, then of `v`, D wide each
    const float* table;   // [T, D]: cosines, then sines, of half a head's width
    const float* q_norm;  // [D] weights of the queries' RMSNorm, or null
    const float* k_norm;
    u16 *q, *k, *v;       // where they go, a row `q_stride` …; v may be null: then values stay where they are
    int rows, stride, q_heads, k_heads, q_stride, kv_stride;
    float eps;
};

// Rotary by halves: eight numbers of either half, from `part` on; `table` is the row's cosines, then sines.
template <int D>
DEVICE void rotate(float (&a)[8], float (&b)[8], const float* table, int part) {
    float c[8], s[8];
    read_eight(table + part, c), read_eight(table + D / 2 + part, s);
    #pragma unroll
    for (int e = 0; e < 8; e++) {
        const float x = a[e], y = b[e];
        a[e] = x * c[e] - y * s[e], b[e] = y * c[e] + x * s[e];
    }
}

// Rotary by halves, after an RMSNorm of each head where there is one: D / 16 threads a head, eight numbers of either half each.
template <int D>
DEVICE void turn(const Turn& p) {
    begin();
    constexpr int THREADS = D / 16;
    const int heads = p.q_heads + p.k_heads + (p.v ? p.k_heads : 0), i = blockIdx.x * blockDim.x + threadIdx.x;
    const int part = i % THREADS * 8, head = i / THREADS % heads, row = i / THREADS / heads;
    if (i / THREADS >= p.rows * heads) return;  // whole groups of THREADS leave together
    const u16* from = p.x + (size_t)row * p.stride + head * D + part;
    if (head >= p.q_heads + p.k_heads) {
        u16* to = p.v + (size_t)row * p.kv_stride + (head - p.q_heads - p.k_heads) * D + part;
        *(uint4*)to = *(const uint4*)from, *(uint4*)(to + D / 2) = *(const uint4*)(from + D / 2);
        return;
    }
    float a[8], b[8];
    widen_eight(*(const uint4*)from, a), widen_eight(*(const uint4*)(from + D / 2), b);
    const float* weight = head < p.q_heads ? p.q_norm : p.k_norm;
    if (weight) {
        float squares = 0, w[8], u[8];
        #pragma unroll
        for (int e = 0; e < 8; e++) squares += a[e] * a[e] + b[e] * b[e];
        #pragma unroll
        for (int d = THREADS / 2; d; d /= 2) squares += __shfl_xor_sync(__activemask(), squares, d);
        const float factor = rsqrtf(squares / D + p.eps);
        read_eight(weight + part, w), read_eight(weight + D / 2 + part, u);
        #pragma unroll
        for (int e = 0; e < 8; e++) a[e] *= factor * w[e], b[e] *= factor * u[e];
    }
    rotate<D>(a, b, p.table + (size_t)row * D, part);
    u16* to = head < p.q_heads ? p.q + (size_t)row * p.q_stride + head * D + part
                               : p.k + (size_t)row * p.kv_stride + (head - p.q_heads) * D + part;
    *(uint4*)to = round_eight(a), *(uint4*)(to + D / 2) = round_eight(b);
}

struct Attention {
    const u16 *q, *k, *v;  // rows of `q_stride` and `kv_stride` numbers, heads side by side
    const float* table;    // [T, D]: where queries and keys are turned here, as of `Turn`; it stands before the predecessor begins
    const u8* mask;        // [sequences, length]: which keys are seen, or null
    u16* out;              // rows of `out_stride` numbers
    int q_stride, kv_stride, out_stride, queries, length;  // rows of a sequence's queries, and of its keys
    int groups, causal;    // groups: query heads that share keys; causal: for as many queries as keys
    float scale;           // of the scores, times log2(e)
};

DEVICE void copy_eight(u32 to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
DEVICE void copies_sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copies_arrived() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
template <int D> struct Room {
    static constexpr int P = (D + 15) / 16 * 16, S = P + 8;  // a head padded with zeros; numbers between rows in shared memory
    static constexpr int Q = 64, K = D > 128 ? 32 : 64;      // query rows of a block, keys that a warp looks at together
    static constexpr int STAGE = 2 * 2 * K * S;              // numbers: keys and values, for either half of the warps
    static constexpr int BYTES = (Q * S + 2 * STAGE) * 2;
    static_assert(2 * STAGE * 2 >= Q * (P + 4) * 4 + 2 * Q * 4, "what one half of the warps tells the other fits where keys stood");
};

// 64 queries of one head and sequence a block, 16 a warp; four warps look at every other piece of the keys, four at those between, and both
// are put together at the end. Keys and values go by in two alternating places of shared memory.
template <int D, bool TURN>
DEVICE void attend(const Attention& p) {
    using L = Room<D>;
    constexpr int P = L::P, S = L::S, K = L::K, THREADS = 256;
    constexpr int HALVES = TURN ? 2 : 1, ITEMS = P / 8 / HALVES;  // who turns eight numbers copies those half a head further on, too
    extern __shared__ __align__(128) u16 memory[];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5 & 3, half = thread >> 7, g = lane >> 2, t = lane & 3;
    const int head = blockIdx.y, first = blockIdx.x * L::Q;
    const size_t asks = (size_t)blockIdx.z * p.queries, sequence = (size_t)blockIdx.z * p.length;
    const u16* keys = p.k + sequence * p.kv_stride + head / p.groups * D;
    const u16* values = p.v + sequence * p.kv_stride + head / p.groups * D;
    const u8* mask = p.mask ? p.mask + sequence : nullptr;
    const u32 q = shared_address(memory), kv = q + L::Q * S * 2;
    const int end = p.causal ? min(p.length, first + L::Q) : p.length, turns = (end + 2 * K - 1) / (2 * K);
    const float* table = TURN ? p.table + sequence * D : nullptr;
    if constexpr (TURN)  // a part comes into the first level cache
        for (int i = thread; i < min(end * D / 32, 512); i += THREADS)
            asm volatile("{\n.reg .f32 x;\nld.global.f32 x, [%0];\n}" :: "l"(table + i * 32));
    begin();

    auto copy = [&](u32 to, const u16* row, int d, bool there) {
        #pragma unroll
        for (int h = 0; h < HALVES; h++, d += P / 2) copy_eight(to + d * 2, there && d < D ? row + d : row, there && d < D);
    };
    auto turn_here = [&](u16* at, int row, int d) {
        float a[8], b[8];
        widen_eight(*(const uint4*)(at + d), a), widen_eight(*(const uint4*)(at + d + D / 2), b);
        rotate<D>(a, b, table + (size_t)min(row, p.length - 1) * D, d);
        *(uint4*)(at + d) = round_eight(a), *(uint4*)(at + d + D / 2) = round_eight(b);
    };
    for (int i = thread; i < L::Q * ITEMS; i += THREADS) {
        const int row = i / ITEMS;
        const bool there = first + row < p.queries;
        copy(q + row * S * 2, there ? p.q + (asks + first + row) * p.q_stride + head * D : p.q, i % ITEMS * 8, there);
    }
    auto fetch = [&](int turn) {  // 2 K keys, then as many values
        const u32 to = kv + (turn & 1) * L::STAGE * 2;
        for (int i = thread; i < 2 * K * ITEMS; i += THREADS) {
            const int key = turn * 2 * K + i / ITEMS;
            const bool there = key < p.length;
            const size_t from = there ? (size_t)key * p.kv_stride : 0;
            copy(to + i / ITEMS * S * 2, keys + from, i % ITEMS * 8, there);
            copy(to + (2 * K + i / ITEMS) * S * 2, values + from, i % ITEMS * 8, there);
        }
        copies_sent();
    };
    fetch(0);
    if (turns > 1) fetch(1);

    float best[2] = {-1e30f, -1e30f}, total[2] = {0, 0}, seen[P / 8][4];
    #pragma unroll
    for (int d = 0; d < P / 8; d++)
        #pragma unroll
        for (int e = 0; e < 4; e++) seen[d][e] = 0;
    const int row[2] = {first + warp * 16 + g, first + warp * 16 + g + 8};
    const u32 q_corner = q + ((warp * 16 + (lane & 7) + ((lane >> 3) & 1) * 8) * S + (lane >> 4) * 8) * 2;
    const u32 k_corner = ((half * K + (lane & 7) + (lane >> 4) * 8) * S + ((lane >> 3) & 1) * 8) * 2;
    const u32 v_corner = (((2 + half) * K + (lane & 7) + ((lane >> 3) & 1) * 8) * S + (lane >> 4) * 8) * 2;
    for (int turn = 0; turn < turns; turn++) {
        if (turn + 1 < turns) copies_arrived<1>();
        else copies_arrived<0>();
        if constexpr (TURN) {
            if (turn == 0)
                for (int i = thread; i < L::Q * ITEMS; i += THREADS) turn_here(memory + i / ITEMS * S, first + i / ITEMS, i % ITEMS * 8);
            u16* here = memory + L::Q * S + (turn & 1) * L::STAGE;
            for (int i = thread; i < 2 * K * ITEMS; i += THREADS) turn_here(here + i / ITEMS * S, turn * 2 * K + i / ITEMS, i % ITEMS * 8);
        }
        __syncthreads();
        const u32 here = kv + (turn & 1) * L::STAGE * 2;
        const int begins = (2 * turn + half) * K;
        if (begins < end) {
            float score[K / 8][4];
            #pragma unroll
            for (int n = 0; n < K / 8; n++)
                #pragma unroll
                for (int e = 0; e < 4; e++) score[n][e] = 0;
            #pragma unroll
            for (int d = 0; d < P / 16; d++) {
                u32 a[4];
                load_matrices(a, q_corner + d * 32);
                #pragma unroll
                for (int n = 0; n < K / 16; n++) {
                    u32 b[4];
                    load_matrices(b, here + k_corner + n * 16 * S * 2 + d * 32);
                    multiply(score[2 * n], a, b[0], b[1]);
                    multiply(score[2 * n + 1], a, b[2], b[3]);
                }
            }
            float top[2] = {best[0], best[1]};
            #pragma unroll
            for (int n = 0; n < K / 8; n++)
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int key = begins + n * 8 + t * 2 + (e & 1);
                    const bool there = key < p.length && (!p.causal || key <= row[e >> 1]) && (!mask || mask[key]);
                    score[n][e] = there ? score[n][e] * p.scale : __int_as_float(0xff800000);
                    top[e >> 1] = fmaxf(top[e >> 1], score[n][e]);
                }
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
                top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
                const float shrink = power_of_two(best[h] - top[h]);
                best[h] = top[h], total[h] *= shrink;
                #pragma unroll
                for (int d = 0; d < P / 8; d++) seen[d][2 * h] *= shrink, seen[d][2 * h + 1] *= shrink;
            }
            #pragma unroll
            for (int n = 0; n < K / 8; n++)
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    score[n][e] = power_of_two(score[n][e] - best[e >> 1]);
                    total[e >> 1] += score[n][e];
                }
            #pragma unroll
            for (int n = 0; n < K / 16; n++) {
                const u32 a[4] = {rounded(score[2 * n][0], score[2 * n][1]), rounded(score[2 * n][2], score[2 * n][3]),
                                  rounded(score[2 * n + 1][0], score[2 * n + 1][1]), rounded(score[2 * n + 1][2], score[2 * n + 1][3])};
                #pragma unroll
                for (int d = 0; d < P / 16; d++) {
                    u32 b[4];
                    load_matrices_turned(b, here + v_corner + n * 16 * S * 2 + d * 32);
                    multiply(seen[2 * d], a, b[0], b[1]);
                    multiply(seen[2 * d + 1], a, b[2], b[3]);
                }
            }
        }
        __syncthreads();
        if (turn + 2 < turns) fetch(turn + 2);
    }
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(~0u, total[h], 1);
        total[h] += __shfl_xor_sync(~0u, total[h], 2);
    }
    constexpr int W = P + 4;  // words between rows of what the second half tells
    float *told = (float*)(memory + L::Q * S), *bests = told + L::Q * W, *totals = bests + L::Q;
    if (half) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = warp * 16 + g + 8 * h;
            #pragma unroll
            for (int d = 0; d < P / 8; d++) *(float2*)(told + at * W + d * 8 + t * 2) = make_float2(seen[d][2 * h], seen[d][2 * h + 1]);
            if (t == 0) bests[at] = best[h], totals[at] = total[h];
        }
    }
    __syncthreads();
    if (half) return;
    #pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row[h] >= p.queries) continue;
        const int at = warp * 16 + g + 8 * h;
        const float top = fmaxf(best[h], bests[at]), mine = power_of_two(best[h] - top), theirs = power_of_two(bests[at] - top);
        const float inverse = 1.0f / (total[h] * mine + totals[at] * theirs);
        u16* to = p.out + (asks + row[h]) * p.out_stride + head * D + t * 2;
        #pragma unroll
        for (int d = 0; d < D / 8; d++) {
            const float2 more = *(const float2*)(told + at * W + d * 8 + t * 2);
            *(u32*)(to + d * 8) = rounded((seen[d][2 * h] * mine + more.x * theirs) * inverse, (seen[d][2 * h + 1] * mine + more.y * theirs) * inverse);
        }
    }
}

struct Gate {
    const u16* x;     // [T, W], or [T, 2 W]: gate, then up
    const u16* more;  // [W] that is added to each row first, of SILU
    u16* out;         // [T, W]
    int rows, width, kind, period;  // of SILU: every so many rows, one that is zero
};
enum { GELU, GATED_GELU, GATED_SILU, SILU };

// gelu(x) with the error function, gelu_tanh(gate) up, silu(gate) up, silu(x + more): eight numbers a thread.
extern "C" __global__ void __launch_bounds__(256) gate_rows(const __grid_constant__ Gate p) {
    begin();
    const int eights = p.width / 8;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.rows * eights; i += gridDim.x * blockDim.x) {
        const int row = i / eights, at = i % eights * 8;
        const bool gated = p.kind == GATED_GELU || p.kind == GATED_SILU, silent = p.kind == SILU && row % p.period == 0;
        const u16* from = p.x + (size_t)row * p.width * (gated ? 2 : 1) + at;
        float x[8], up[8];
        widen_eight(*(const uint4*)from, x);
        if (gated) widen_eight(*(const uint4*)(from + p.width), up);
        if (p.kind == SILU) {
            widen_eight(*(const uint4*)(p.more + at), up);
            #pragma unroll
            for (int e = 0; e < 8; e++) x[e] += up[e], up[e] = silent ? 0.0f : 1.0f;
        }
        #pragma unroll
        for (int e = 0; e < 8; e++) {
            const float y = x[e], u = 0.7978845608028654f * (y + 0.044715f * y * y * y);
            if (p.kind == GELU) x[e] = 0.5f * y * (1.0f + erff(y * 0.70710678118654752f));
            else x[e] = up[e] * __fdividef(y, 1.0f + __expf(p.kind == GATED_GELU ? -2.0f * u : -y));
        }
        *(uint4*)(p.out + (size_t)row * p.width + at) = round_eight(x);
    }
}

struct Corners {
    const u16* table;      // [N, W]
    const long long* index;  // [4, T] rows of the table
    const u16* share;      // [4, T]
    u16* out;              // [T, W]
    int rows, width;
};

// The weighted mean of four rows of a table.
extern "C" __global__ void __launch_bounds__(256) mix_corners(const __grid_constant__ Corners p) {
    begin();
    const int eights = p.width / 8;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.rows * eights; i += gridDim.x * blockDim.x) {
        const int row = i / eights, at = i % eights * 8;
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}, x[8];
        #pragma unroll
        for (int c = 0; c < 4; c++) {
            const float share = widen(p.share[c * p.rows + row]);
            widen_eight(*(const uint4*)(p.table + p.index[c * p.rows + row] * p.width + at), x);
            #pragma unroll
            for (int e = 0; e < 8; e++) sum[e] += share * x[e];
        }
        *(uint4*)(p.out + (size_t)row * p.width + at) = round_eight(sum);
    }
}

struct Angles {
    const float* angles;  // [T, H]
    float* table;         // [T, 2 H]: cosines, then sines
    int rows, half;
};

extern "C" __global__ void __launch_bounds__(256) table_of(const __grid_constant__ Angles p) {
    begin();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.rows * p.half; i += gridDim.x * blockDim.x) {
        const int row = i / p.half, at = i % p.half;
        p.table[row * 2 * p.half + at] = cosf(p.angles[i]), p.table[row * 2 * p.half + p.half + at] = sinf(p.angles[i]);
    }
}

struct Patches {
    const u16* x;  // [V, 3, side, side]
    u16* out;      // [V (side / patch)^2, width], zeros behind 3 patch^2
    int views, side, patch, width;
};

// Pictures cut into patches, channel by channel, row by row.
extern "C" __global__ void __launch_bounds__(256) cut_patches(const __grid_constant__ Patches p) {
    begin();
    const int across = p.side / p.patch, area = p.patch * p.patch, all = p.views * across * across * p.width;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < all; i += gridDim.x * blockDim.x) {
        const int at = i % p.width, place = i / p.width % (across * across), view = i / p.width / (across * across);
        const int channel = at / area, y = place / across * p.patch + at % area / p.patch, x = place % across * p.patch + at % p.patch;
        p.out[i] = at < 3 * area ? p.x[((size_t)(view * 3 + channel) * p.side + y) * p.side + x] : (u16)0;
    }
}


struct Spread {
    const float* x;  // [sequences, per, K]
    u16* out;        // [sequences, skip + per, W]: `skip` rows of zeros, then those of x, zeros behind their K numbers
    int rows, inputs, width, per, skip;  // rows: of `out`
};

extern "C" __global__ void __launch_bounds__(256) spread_rows(const __grid_constant__ Spread p) {
    begin();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.rows * p.width; i += gridDim.x * blockDim.x) {
        const int row = i / p.width, at = i % p.width, sequence = row / (p.per + p.skip), place = row % (p.per + p.skip) - p.skip;
        p.out[i] = place >= 0 && at < p.inputs ? rounded(p.x[(sequence * p.per + place) * p.inputs + at]) : (u16)0;
    }
}

struct Gather {
    const u16* x;  // [sequences, skip + per, W]
    float* out;    // [sequences, per, K]
    int rows, outputs, width, per, skip;  // rows: of `out`
};

extern "C" __global__ void __launch_bounds__(256) gather_rows(const __grid_constant__ Gather p) {
    begin();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.rows * p.outputs; i += gridDim.x * blockDim.x) {
        const int row = i / p.outputs, at = i % p.outputs, from = row / p.per * (p.per + p.skip) + p.skip + row % p.per;
        p.out[i] = widen(p.x[(size_t)from * p.width + at]);
    }
}
