// A denoise step's kernels for the few rows of one robot's chunk: products that read their weights once, and attention over small heads.
//
// R rows, K inputs, N outputs; `KIND` is f16 or bf16. Every kernel starts while its predecessor still runs
// (programmatic dependent launch): it asks for its weights at once, and waits before it reads what the predecessor wrote.
//
// Products: a cluster of C blocks shares a tile of N outputs. Each block multiplies a slice of K, weights as the left operand (64 outputs to
// a warp group), and the C partial sums meet over the cluster's shared memory, always in the same order. A norm costs no pass of its own:
// who writes rows scales them by (1 + scale) of the norm that reads them next, and adds up their sums and squares as whole numbers, so that
// the order does not matter; who reads multiplies the scaled rows and applies the norm to the products, since
// sum_k w_k ((x_k - m) r (1 + s_k) + t_k) = r (sum_k w_k (1 + s_k) x_k - m u) + c.
//
// Rows lie as wgmma reads them, eight numbers of every row together: [K / 8, R, 8]. A slice of K is then one piece of memory. wgmma multiplies
// 16 or 48 rows; those beyond R are whatever lies behind, and nobody reads what comes of them.

DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void leave_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }  // orders no memory
DEVICE void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE u32 cluster_rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE u32 in_block(u32 address, u32 rank) { u32 r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank)); return r; }
DEVICE float load_one_from_cluster(u32 address) {
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}
DEVICE float4 load_from_cluster(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
    return v;
}

DEVICE void barrier_init(u32 barrier, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory"); }
DEVICE void barrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory"); }
DEVICE void barrier_wait(u32 barrier, u32 phase) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\nbra AGAIN;\nREADY:\n}"
                 :: "r"(barrier), "r"(phase) : "memory");
}
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void load_part(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void load_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
    barrier_expect(barrier, bytes);
    load_part(to, from, bytes, barrier);
}
DEVICE void prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}

DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where wgmma finds an operand: 8 x 8 matrices of 128 bytes each, `along_k` and `across` bytes apart.
DEVICE u64 operand(u32 address, u32 along_k, u32 across) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(along_k >> 4) << 16 | (u64)(across >> 4) << 32;
}
// 64 outputs x 8 R8 rows += 64 x 16 weights times 16 x 8 R8 inputs.
template <int R8> DEVICE void multiply_group(float (&d)[R8][4], u64 a, u64 b);
#define SUM(r) "+f"(d[r][0]), "+f"(d[r][1]), "+f"(d[r][2]), "+f"(d[r][3])
template <> DEVICE void multiply_group<2>(float (&d)[2][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32." KIND "." KIND " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
                 : SUM(0), SUM(1) : "l"(a), "l"(b));
}
template <> DEVICE void multiply_group<6>(float (&d)[6][4], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." KIND "." KIND " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
                 "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, 1, 1, 1, 0, 0;"
                 : SUM(0), SUM(1), SUM(2), SUM(3), SUM(4), SUM(5) : "l"(a), "l"(b));
}

DEVICE float gelu_tanh(float x) {  // 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
    float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-2.0f * u));
}
DEVICE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

struct Product {
    const u8* weight;      // packed
    const float* bias;     // [N], or null; with a norm: the product's bias and the norm's shift times the weights
    const float* lost;     // [N]: what the mean takes away, sum_k w_k (1 + s_k); of GATE_UP: the bias of the second half
    const u64* stats;      // [COPIES, R, 2] sums and squares of the rows that come in, as whole numbers to be added up
    const void* in;        // half [K / 8, R, 8]
    const u16* late;       // [N] added to the bias, or null
    const float* gate;     // [N] that the product is multiplied by, or null
    const float* base;     // [N / 8, R, 8] that the product is added to
    const float* scale;    // [N]: 1 + scale of the next norm, for `narrow`, or null
    float* wide;           // [N / 8, R, 8]; of VELOCITY: [rows - first, out_width]
    u16* narrow;           // [N / 8, R, 8], or [rows, out_width] where out_width is not 0
    u64* told;             // [COPIES, R, 2] for the next norm, zero so far, or null
    int rows, first, out_width;
    float eps;
};

enum Norm { NONE, LAYER, RMS };
enum Out { LINEAR, GELU, SILU, RELU, RESIDUAL, VELOCITY, GATE_UP };
#define SUM_UNIT 16777216.0   // of `stats`: 2^24 for sums, 2^18 for squares
#define SQUARE_UNIT 262144.0
#define MOST_SQUARES 9e10f    // of four numbers, whose row is 1,536 wide at most: 2^63 / 2^18 / 384
#define COPIES 8              // blocks add to one of them: few wait for one another

// What a norm of K numbers does to a row: its factor, and its mean times that.
template <int R, int K, int NORM>
DEVICE float2 norm_of(const u64* stats, int row, float eps) {
    long long total = 0, squares = 0;
    #pragma unroll
    for (int copy = 0; copy < COPIES; copy++) total += stats[(copy * R + row) * 2], squares += stats[(copy * R + row) * 2 + 1];
    const double mean = NORM == LAYER ? (double)total * (1.0 / SUM_UNIT / K) : 0.0;
    const double spread = (double)squares * (1.0 / SQUARE_UNIT / K) - mean * mean;
    const float factor = rsqrtf((float)(spread > 0.0 ? spread : 0.0) + eps);
    return make_float2(factor, (float)mean * factor);
}

// R rows, K inputs, C blocks a cluster, TN outputs of a cluster (a block has G groups of 64 for them), W warp groups that split a block's
// slice of K, J steps of 16 that arrive together, S of those of the weights and A of the rows that a block has room for.
template <int R, int K, int C, int TN, int W, int J, int S, int A, int OUT>
struct Tile {
    static constexpr bool RESIDUAL_OLD = OUT == RESIDUAL;
    static constexpr int R8 = R > 16 ? 6 : 2, KS = K / C, G = (TN + 63) / 64, CHUNKS = KS / 16 / J, THREADS = 128 * G * W + 64;
    static constexpr int COLUMN = R * 16, PS = TN + 4;  // bytes of eights of K; words between rows of sums: banks stay apart
    static constexpr int STEP = TN * 32, CHUNK = J * STEP, ROWS_CHUNK = J * 2 * COLUMN;
    static constexpr int F = TN / C;  // outputs that a block finishes
    static constexpr int STATS = (8 * (1 + 3 * CHUNKS) + 127) / 128 * 128, FAR = (STATS + COPIES * R * 16 + R * 8 + 15) / 16 * 16;
    static constexpr int X = (FAR + 4 * F * 4 + (RESIDUAL_OLD ? F * R * 4 : 0) + 127) / 128 * 128, RING = (X + A * ROWS_CHUNK + 127) / 128 * 128;
    static constexpr int WITH_RING = RING + S * CHUNK + (64 * G - TN) * 16;  // the last group reads as if it had 64 outputs
    static constexpr int WITH_SUMS = X + 8 * R8 * PS * 4 * (W > 2 ? W - 1 : 1);
    static constexpr int BYTES = WITH_RING > WITH_SUMS ? WITH_RING : WITH_SUMS;
    static_assert(R <= 48 && K % (16 * C * J) == 0 && J % W == 0 && S <= CHUNKS && A <= CHUNKS && TN % 16 == 0 && TN % (8 * C) == 0, "tile");
};

template <int C>
DEVICE void add_parts(float (&y)[4], const float* sums, u32 address) {
    float4 part[C];
    #pragma unroll
    for (int c = 0; c < C; c++) part[c] = C > 1 ? load_from_cluster(in_block(address, c)) : *(const float4*)sums;
    y[0] = part[0].x, y[1] = part[0].y, y[2] = part[0].z, y[3] = part[0].w;
    #pragma unroll
    for (int c = 1; c < C; c++) y[0] += part[c].x, y[1] += part[c].y, y[2] += part[c].z, y[3] += part[c].w;
}
DEVICE void get(float (&to)[4], const float* from) {
    const float4 a = *(const float4*)from;
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
}

template <int R, int K, int C, int TN, int W, int J, int S, int A, int NORM, int OUT>
DEVICE void product(const Product& p) {
    using L = Tile<R, K, C, TN, W, J, S, A, OUT>;
    constexpr int R8 = L::R8, G = L::G, PS = L::PS, THREADS = L::THREADS, CHUNKS = L::CHUNKS;
    extern __shared__ __align__(128) u8 memory[];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group = warp / 4, g = group % G, w = group / G;
    const u32 base = shared_address(memory), rank = C > 1 ? cluster_rank() : 0, tile = blockIdx.x / C;
    // of each arrival of weights, of rows, and of its products; of vectors
    const u32 full = base, here = full + 8 * CHUNKS, done = here + 8 * CHUNKS, near = done + 8 * CHUNKS;
    float* sums = (float*)(memory + L::X);
    const bool multiplies = warp < 4 * G * W, loads = warp == 4 * G * W;

    const u8* weights = p.weight + (size_t)blockIdx.x * CHUNKS * L::CHUNK;
    auto load_weights = [&](int c) { load_bulk(base + L::RING + c % S * L::CHUNK, weights + (size_t)c * L::CHUNK, L::CHUNK, full + 8 * c); };
    if (loads && lane == 0) {
        for (int c = 0; c < CHUNKS; c++) barrier_init(full + 8 * c, 1), barrier_init(here + 8 * c, 1), barrier_init(done + 8 * c, G * W);
        barrier_init(near, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
        for (int c = 0; c < S; c++) load_weights(c);
        if (S < CHUNKS) prefetch(weights + (size_t)S * L::CHUNK, (CHUNKS - S) * L::CHUNK);  // the rest, into the second level cache
    }
    let_successor_start();
    __syncthreads();  // barriers stand

    // What each thread will finish: four outputs of a row. What that takes comes into shared memory meanwhile.
    constexpr int F = L::F, DONE = OUT == GATE_UP ? F / 2 : F, ITEMS = DONE / 4 * R, TURNS = (ITEMS + THREADS - 1) / THREADS;
    const int n0 = OUT == GATE_UP ? (tile * TN + rank * F) / 2 : tile * TN + rank * F;
    float *bias = (float*)(memory + L::FAR), *lost = bias + F, *scale = lost + F, *gate = scale + F, *old = gate + F;
    u16* late = (u16*)gate;
    const u64* stats = (const u64*)(memory + L::STATS);
    float2* norms = (float2*)(memory + L::STATS + COPIES * R * 16);
    wait_for_predecessor();

    float sum[R8][4];
    #pragma unroll
    for (int r = 0; r < R8; r++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sum[r][e] = 0;
    if (loads) {
        if (lane == 0) {
            const u8* rows = (const u8*)p.in + (size_t)rank * (L::KS / 8) * L::COLUMN;
            auto load_rows = [&](int c) { load_bulk(base + L::X + c % A * L::ROWS_CHUNK, rows + (size_t)c * L::ROWS_CHUNK, L::ROWS_CHUNK, here + 8 * c); };
            for (int c = 0; c < A; c++) load_rows(c);
            for (int c = 0; c + (A < S ? A : S) < CHUNKS; c++) {
                barrier_wait(done + 8 * c, 0);
                if (c + A < CHUNKS) load_rows(c + A);
                if (c + S < CHUNKS) load_weights(c + S);
            }
        }
        __syncwarp();
    } else if (!multiplies) {
        if (lane == 0) {
            constexpr int BYTES = DONE * 4;
            barrier_expect(near, (p.bias ? BYTES : 0) + (p.lost ? BYTES : 0) + (OUT == RESIDUAL ? (p.scale ? BYTES : 0) + (p.gate ? BYTES : 0) + F * R * 4 : 0) +
                           (OUT == SILU ? DONE * 2 : 0) + (NORM != NONE ? COPIES * R * 16 : 0));
            if constexpr (NORM != NONE) load_part(base + L::STATS, p.stats, COPIES * R * 16, near);
            if (p.bias) load_part(shared_address(bias), p.bias + n0, BYTES, near);
            if (p.lost) load_part(shared_address(lost), p.lost + n0, BYTES, near);
            if constexpr (OUT == SILU) load_part(shared_address(late), p.late + n0, DONE * 2, near);
            if constexpr (OUT == RESIDUAL) {
                if (p.scale) load_part(shared_address(scale), p.scale + n0, BYTES, near);
                if (p.gate) load_part(shared_address(gate), p.gate + n0, BYTES, near);
                load_part(shared_address(old), p.base + (size_t)n0 * R, F * R * 4, near);
            }
        }
        __syncwarp();
        if constexpr (NORM != NONE) {
            barrier_wait(near, 0);
            for (int row = lane; row < p.rows; row += 32) norms[row] = norm_of<R, K, NORM>(stats, row, p.eps);
        }
        __syncwarp();
    } else {
        for (int c = 0; c < CHUNKS; c++) {
            barrier_wait(here + 8 * c, 0);
            barrier_wait(full + 8 * c, 0);
            const u32 stage = base + L::RING + c % S * L::CHUNK + g * 1024, rows = base + L::X + c % A * L::ROWS_CHUNK;
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            #pragma unroll
            for (int j = 0; j < J / W; j++) {
                const int k = w * (J / W) + j;
                multiply_group<R8>(sum, operand(stage + k * L::STEP, TN * 16, 128), operand(rows + k * 2 * L::COLUMN, L::COLUMN, 128));
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if constexpr (S < CHUNKS || A < CHUNKS) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (c > 0 && thread % 128 == 0) barrier_arrive(done + 8 * (c - 1));
            }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        #pragma unroll
        for (int r = 0; r < R8; r++)
            #pragma unroll
            for (int e = 0; e < 4; e++) asm volatile("" : "+f"(sum[r][e]) :: "memory");
    }

    __syncthreads();  // the sums lie where rows and weights were
    float* own = sums + (lane & 3) * 2 * PS + g * 64 + (warp & 3) * 16 + (lane >> 2);
    constexpr int PART = 8 * R8 * PS;
    const bool has = multiplies && g * 64 + (warp & 3) * 16 < TN;
    if constexpr (W > 1) {
        if (w > 0 && has) {
            #pragma unroll
            for (int r = 0; r < R8; r++) {
                float* at = own + (w - 1) * PART + r * 8 * PS;
                at[0] = sum[r][0], at[PS] = sum[r][1], at[8] = sum[r][2], at[PS + 8] = sum[r][3];
            }
        }
        __syncthreads();
        if (w == 0 && has) {
            #pragma unroll
            for (int other = 0; other < W - 1; other++)
                #pragma unroll
                for (int r = 0; r < R8; r++) {
                    const float* at = own + other * PART + r * 8 * PS;
                    sum[r][0] += at[0], sum[r][1] += at[PS], sum[r][2] += at[8], sum[r][3] += at[PS + 8];
                }
        }
    }
    if (w == 0 && has) {
        #pragma unroll
        for (int r = 0; r < R8; r++) {
            float* at = own + r * 8 * PS;
            at[0] = sum[r][0], at[PS] = sum[r][1], at[8] = sum[r][2], at[PS + 8] = sum[r][3];
        }
    }
    if constexpr (C > 1) arrive_at_cluster(); else __syncthreads();

    barrier_wait(near, 0);
    if constexpr (C > 1) wait_for_cluster();
    #pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = thread + turn * THREADS, row = i % R, f = i / R * 4, n = n0 + f;
        const bool there = i < ITEMS && row < p.rows;
        float y[4], up[4], more[4], squares = 0;
        if (there) {
            add_parts<C>(y, sums + row * PS + rank * F + f, base + L::X + (row * PS + rank * F + f) * 4);
            if constexpr (OUT == GATE_UP)
                add_parts<C>(up, sums + row * PS + rank * F + f + DONE, base + L::X + (row * PS + rank * F + f + DONE) * 4);
        }
        if constexpr (C > 1) {
            __syncwarp();
            if (turn == TURNS - 1) leave_cluster();
        }
        if (!there) continue;
        const size_t packed = ((size_t)(n / 8) * R + row) * 8 + n % 8;
        if constexpr (NORM != NONE) {
            const float2 norm = norms[row];
            #pragma unroll
            for (int e = 0; e < 4; e++) y[e] *= norm.x;
            if constexpr (OUT == GATE_UP)
                #pragma unroll
                for (int e = 0; e < 4; e++) up[e] *= norm.x;
            if constexpr (NORM == LAYER) {
                get(more, lost + f);
                #pragma unroll
                for (int e = 0; e < 4; e++) y[e] -= norm.y * more[e];
            }
        }
        if (p.bias) {
            get(more, bias + f);
            #pragma unroll
            for (int e = 0; e < 4; e++) y[e] += more[e];
        }
        if constexpr (OUT == GATE_UP) {
            if (p.lost) {
                get(more, lost + f);
                #pragma unroll
                for (int e = 0; e < 4; e++) up[e] += more[e];
            }
            #pragma unroll
            for (int e = 0; e < 4; e++) y[e] = gelu_tanh(y[e]) * up[e];
        }
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            if constexpr (OUT == GELU) y[e] = gelu_tanh(y[e]);
            if constexpr (OUT == SILU) y[e] = row < p.first ? 0.0f : silu(y[e] + widen(late[f + e]));
            if constexpr (OUT == RELU) y[e] = fmaxf(y[e], 0.0f);
        }
        if constexpr (OUT == VELOCITY) {
            if (p.first <= row)
                #pragma unroll
                for (int e = 0; e < 4; e++)
                    if (n + e < p.out_width) p.wide[(size_t)(row - p.first) * p.out_width + n + e] = y[e];
            continue;
        }
        if constexpr (OUT == RESIDUAL) {
            if (p.gate) {
                get(more, gate + f);
                #pragma unroll
                for (int e = 0; e < 4; e++) y[e] *= more[e];
            }
            get(more, old + (f / 8 * R + row) * 8 + f % 8);
            #pragma unroll
            for (int e = 0; e < 4; e++) y[e] += more[e];
            squares = y[0] * y[0] + y[1] * y[1] + (y[2] * y[2] + y[3] * y[3]);
            // beyond it a row's squares might not fit their whole number: rather no numbers, which is noticed, than wrong ones
            if (!(squares < MOST_SQUARES)) y[0] = y[1] = y[2] = y[3] = __int_as_float(0x7fffffff);
        }
        if (p.wide) *(float4*)(p.wide + packed) = make_float4(y[0], y[1], y[2], y[3]);
        if constexpr (OUT == RESIDUAL) {
            if (p.told) {
                const float total = y[0] + y[1] + (y[2] + y[3]);
                u64* to = p.told + ((blockIdx.x % COPIES) * R + row) * 2;
                const u64 a = (u64)__float2ll_rn(total * (float)SUM_UNIT), b = (u64)__float2ll_rn(squares * (float)SQUARE_UNIT);
                asm volatile("red.global.add.u64 [%0], %1;" :: "l"(to), "l"(a) : "memory");
                asm volatile("red.global.add.u64 [%0], %1;" :: "l"(to + 1), "l"(b) : "memory");
            }
            if (p.scale) {
                get(more, scale + f);
                #pragma unroll
                for (int e = 0; e < 4; e++) y[e] *= more[e];
            }
        }
        if (p.narrow)
            *(uint2*)(p.out_width ? p.narrow + (size_t)row * p.out_width + n : p.narrow + packed) = make_uint2(rounded(y[0], y[1]), rounded(y[2], y[3]));
    }
    if constexpr (C > 1) {  // nobody leaves while another still reads its sums
        __syncwarp();
        wait_for_cluster();
    }
}

struct Begin {
    const float* x;  // [rows - first, width]
    u16* out;        // [padded / 8, R, 8]
    u64* stats;      // [slots, COPIES, R, 2]
    int rows, first, width, padded, slots;
};

// A step begins: its rows as the first product reads them, and norms' sums that are zero again.
template <int R>
DEVICE void begin(const Begin& p) {
    let_successor_start();
    wait_for_predecessor();
    const int thread = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
    for (int i = thread; i < R * p.padded; i += all) {
        const int row = i / p.padded, k = i % p.padded;
        const bool there = p.first <= row && row < p.rows && k < p.width;
        p.out[(k / 8 * R + row) * 8 + k % 8] = there ? rounded(p.x[(row - p.first) * p.width + k]) : (u16)0;
    }
    for (int i = thread; i < p.slots * COPIES * R * 2; i += all) p.stats[i] = 0;
}

struct Look {
    const u8* weight;   // packed: [head, block of it, arrival, step of 16, 2, D, 8]
    const float* bias;  // [3 W], or [W]: as of `Product` behind a LayerNorm
    const float* lost;
    const u64* stats;   // [COPIES, R, 2]
    const void* in;     // half [W / 8, R, 8]
    const u16 *k, *v;   // [keys, W] of a context that stood before the predecessor began, or null: the rows look at one another
    const u8* mask;     // [keys]: which of them are seen
    u16* out;           // [W / 8, R, 8]
    int rows, keys;
    float scale, eps;   // of the scores, times log2(e)
};

// To another block of the cluster, whose barrier counts the bytes.
DEVICE void give(u32 to, u32 barrier, u32 rank, float a, float b, float c, float d) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(in_block(to, rank)), "f"(a), "f"(b), "f"(c), "f"(d), "r"(in_block(barrier, rank)) : "memory");
}
DEVICE void give(u32 to, u32 barrier, u32 rank, u32 a, u32 b) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];"
                 :: "r"(in_block(to, rank)), "r"(a), "r"(b), "r"(in_block(barrier, rank)) : "memory");
}
DEVICE void consumers_meet() { asm volatile("bar.sync 1, 512;" ::: "memory"); }

// A head's cluster of three blocks. Where rows look at one another, one block makes the head's queries, one its keys, one its values, each from
// all W inputs, and gives them to the others; where they look at a context, every block takes a third of the inputs, and the parts of the
// queries' sums go to who needs them. Each block then looks for 16 rows, 16 keys a warp.
template <int T, int W, int D, bool OWN>
struct Glance {
    static constexpr int R = 48, C = 3, KS = OWN ? W : W / C, STEPS = KS / 16, J = 8, CHUNKS = STEPS / J, COLUMN = T * 16;
    static constexpr int STEP = 2 * D * 16, CHUNK = J * STEP, ROWS_CHUNK = J * 2 * COLUMN, S = CHUNKS < 5 ? CHUNKS : 5;
    static constexpr int HS = D + 8, PS = D + 4, WARP = 16 * HS * 2 * 2, MOST = 512;  // bytes of a warp's keys and values; keys
    static constexpr int STATS = 512, NORMS = STATS + COPIES * T * 16, VECTORS = (NORMS + T * 8 + 15) / 16 * 16, CHOSEN = VECTORS + 2 * D * 4;
    static constexpr int Q = (CHOSEN + (OWN ? 0 : (MOST + 8) * 2) + 127) / 128 * 128, GOT = Q + 16 * HS * 2;  // 16 queries; what others give
    static constexpr int KEYS = GOT + (OWN ? 2 * R * HS * 2 : C * 16 * PS * 4), X = (KEYS + (OWN ? 0 : 16 * WARP) + 127) / 128 * 128;
    static constexpr int ROOM = KS / 8 * COLUMN > 4 * R * PS * 4 ? KS / 8 * COLUMN : 4 * R * PS * 4;  // of rows, then of sums
    static constexpr int RING = (X + ROOM + 127) / 128 * 128, BYTES = RING + S * CHUNK + 256, THREADS = 576;  // a product reads a little beyond its D outputs
    static_assert(T <= R && R == 16 * C && D % 16 == 0 && D <= 64 && W % (C * J * 16) == 0 && CHUNKS <= 12, "a head's cluster");
    static_assert(C * WARP <= ROOM && 16 * PS * 4 + 128 <= WARP, "what warps have seen lies where sums were");
};

template <int T, int W, int D, bool OWN>
DEVICE void glance(const Look& p) {
    using L = Glance<T, W, D, OWN>;
    constexpr int R = L::R, R8 = R / 8, HS = L::HS, PS = L::PS;
    extern __shared__ __align__(128) u8 memory[];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, head = blockIdx.x / L::C;
    const u32 base = shared_address(memory), rank = cluster_rank();
    const u32 full = base, empty = base + 40, here = base + 80, near = base + 176, normed = base + 184, given = base + 192;
    const u8* weights = p.weight + (size_t)blockIdx.x * L::CHUNKS * L::CHUNK;
    if (thread == 512) {
        for (int s = 0; s < L::S; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 4);
        for (int c = 0; c < L::CHUNKS; c++) barrier_init(here + 8 * c, 1);
        barrier_init(near, 1), barrier_init(normed, 1), barrier_init(given, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        fence_async();
        for (int s = 0; s < L::S; s++) load_bulk(base + L::RING + s * L::CHUNK, weights + (size_t)s * L::CHUNK, L::CHUNK, full + 8 * s);
        barrier_expect(given, OWN ? (16 + 2 * R) * D * 2 : L::C * 16 * D * 4);
    }
    let_successor_start();
    u16* chosen = (u16*)(memory + L::CHOSEN);
    int keys = p.rows;
    if constexpr (!OWN) {
        if (warp == 0) {  // which keys are seen, in order
            int found = 0;
            for (int i = lane; i < (p.keys + 31) / 32 * 32; i += 32) {
                const bool seen = i < p.keys && p.mask[i];
                const u32 votes = __ballot_sync(~0u, seen);
                if (seen) chosen[found + __popc(votes & ((1u << lane) - 1))] = (u16)i;
                found += __popc(votes);
            }
            if (lane == 0) chosen[L::MOST] = (u16)found;
        }
    }
    __syncthreads();
    arrive_at_cluster();  // barriers stand
    u8* own = memory + L::KEYS + warp * L::WARP;
    auto fetch = [&](int from) {  // this warp's 16 keys and values, D / 8 eights each
        #pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const int at = i * 32 + lane, key = from + at / (D / 8), d = at % (D / 8) * 8, place = at / (D / 8) * HS + d;
            const size_t there = key < keys ? (size_t)chosen[key] * W + head * D + d : 0;
            *(uint4*)(own + place * 2) = key < keys ? *(const uint4*)(p.k + there) : make_uint4(0, 0, 0, 0);
            *(uint4*)(own + (16 * HS + place) * 2) = key < keys ? *(const uint4*)(p.v + there) : make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
    };
    if constexpr (!OWN) {
        keys = chosen[L::MOST];
        if (warp < 16 && warp * 16 < keys) fetch(warp * 16);
    }
    wait_for_predecessor();

    if (warp == 16) {  // weights and rows
        if (lane == 0) {
            const u8* rows = (const u8*)p.in + (OWN ? 0 : (size_t)rank * L::CHUNKS * L::ROWS_CHUNK);
            for (int c = 0; c < L::CHUNKS; c++) load_bulk(base + L::X + c * L::ROWS_CHUNK, rows + (size_t)c * L::ROWS_CHUNK, L::ROWS_CHUNK, here + 8 * c);
            for (int c = L::S; c < L::CHUNKS; c++) {
                barrier_wait(empty + 8 * (c % L::S), (c / L::S - 1) & 1);
                load_bulk(base + L::RING + (c % L::S) * L::CHUNK, weights + (size_t)c * L::CHUNK, L::CHUNK, full + 8 * (c % L::S));
            }
        }
        __syncwarp();
        wait_for_cluster();
        return;
    }
    if (warp == 17) {  // norms
        const int n0 = (OWN ? rank * W : 0) + head * D;
        if (lane == 0) {
            barrier_expect(near, 2 * D * 4 + COPIES * T * 16);
            load_part(base + L::STATS, p.stats, COPIES * T * 16, near);
            load_part(base + L::VECTORS, p.bias + n0, D * 4, near);
            load_part(base + L::VECTORS + D * 4, p.lost + n0, D * 4, near);
        }
        barrier_wait(near, 0);
        const u64* stats = (const u64*)(memory + L::STATS);
        for (int row = lane; row < T; row += 32) ((float2*)(memory + L::NORMS))[row] = norm_of<T, W, LAYER>(stats, row, p.eps);
        __syncwarp();
        if (lane == 0) barrier_arrive(normed);
        wait_for_cluster();
        return;
    }

    const int group = warp / 4, g = lane >> 2, t = lane & 3;
    float sum[R8][4];
    #pragma unroll
    for (int r = 0; r < R8; r++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sum[r][e] = 0;
    for (int c = 0; c < L::CHUNKS; c++) {
        barrier_wait(here + 8 * c, 0);
        barrier_wait(full + 8 * (c % L::S), (c / L::S) & 1);
        const u32 stage = base + L::RING + (c % L::S) * L::CHUNK;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        #pragma unroll
        for (int j = 0; j < L::J / 4; j++) {
            const int k = j * 4 + group;
            multiply_group<R8>(sum, operand(stage + k * L::STEP, D * 16, 128), operand(base + L::X + (c * L::J + k) * 2 * L::COLUMN, L::COLUMN, 128));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if constexpr (L::S < L::CHUNKS) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (c > 0 && thread % 128 == 0) barrier_arrive(empty + 8 * ((c - 1) % L::S));
        }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    #pragma unroll
    for (int r = 0; r < R8; r++)
        #pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(sum[r][e]) :: "memory");

    consumers_meet();  // the sums lie where the rows were
    float* sums = (float*)(memory + L::X);
    if ((warp & 3) * 16 < D) {  // of 64 outputs, D are ours
        float* at = sums + group * R * PS + t * 2 * PS + (warp & 3) * 16 + g;
        #pragma unroll
        for (int r = 0; r < R8; r++, at += 8 * PS) at[0] = sum[r][0], at[PS] = sum[r][1], at[8] = sum[r][2], at[PS + 8] = sum[r][3];
    }
    consumers_meet();
    wait_for_cluster();  // the others' barriers stand
    const float *bias = (const float*)(memory + L::VECTORS), *lost = bias + D;
    const float2* norms = (const float2*)(memory + L::NORMS);
    if constexpr (OWN) barrier_wait(near, 0), barrier_wait(normed, 0);
    for (int i = thread; i < R * D / 4; i += 512) {
        const int row = i / (D / 4), f = i % (D / 4) * 4;
        float4 part[4];
        #pragma unroll
        for (int w = 0; w < 4; w++) part[w] = *(const float4*)(sums + (w * R + row) * PS + f);
        float y[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
        #pragma unroll
        for (int w = 1; w < 4; w++) y[0] += part[w].x, y[1] += part[w].y, y[2] += part[w].z, y[3] += part[w].w;
        if constexpr (OWN) {
            const float2 norm = norms[row];
            #pragma unroll
            for (int e = 0; e < 4; e++) y[e] = row < p.rows ? y[e] * norm.x - norm.y * lost[f + e] + bias[f + e] : 0.0f;
            const u32 a = rounded(y[0], y[1]), b = rounded(y[2], y[3]);
            if (rank == 0) give(base + L::Q + ((row % 16) * HS + f) * 2, given, row / 16, a, b);
            else
                #pragma unroll
                for (int c = 0; c < L::C; c++) give(base + L::GOT + (((rank - 1) * R + row) * HS + f) * 2, given, c, a, b);
        } else {
            give(base + L::GOT + ((rank * 16 + row % 16) * PS + f) * 4, given, row / 16, y[0], y[1], y[2], y[3]);
        }
    }
    barrier_wait(given, 0);
    const int first = rank * 16;
    if constexpr (!OWN) {
        barrier_wait(near, 0), barrier_wait(normed, 0);
        if (thread < 16 * D / 4) {
            const int row = thread / (D / 4), f = thread % (D / 4) * 4;
            const float2 norm = norms[first + row];
            float y[4] = {0, 0, 0, 0}, part[4];
            #pragma unroll
            for (int c = 0; c < L::C; c++) {
                get(part, (const float*)(memory + L::GOT) + (c * 16 + row) * PS + f);
                #pragma unroll
                for (int e = 0; e < 4; e++) y[e] += part[e];
            }
            #pragma unroll
            for (int e = 0; e < 4; e++) y[e] = first + row < p.rows ? y[e] * norm.x - norm.y * lost[f + e] + bias[f + e] : 0.0f;
            *(uint2*)(memory + L::Q + (row * HS + f) * 2) = make_uint2(rounded(y[0], y[1]), rounded(y[2], y[3]));
        }
    }
    consumers_meet();  // queries stand, and nobody reads the sums

    float best[2] = {-1e30f, -1e30f}, total[2] = {0, 0}, seen[D / 8][4];
    #pragma unroll
    for (int d = 0; d < D / 8; d++)
        #pragma unroll
        for (int e = 0; e < 4; e++) seen[d][e] = 0;
    u8* told = OWN ? memory + L::X + warp * L::WARP : own;  // what this warp has seen, for all of them
    const u32 q_at = base + L::Q + ((lane & 7) + ((lane >> 3) & 1) * 8) * HS * 2 + (lane >> 4) * 16;
    for (int from = warp * 16; from < keys; from += 256) {
        if (!OWN && from >= 256) fetch(from);
        const u32 k_first = OWN ? base + L::GOT + from * HS * 2 : shared_address(own);
        const u32 v_first = OWN ? k_first + R * HS * 2 : k_first + 16 * HS * 2;
        const u32 k_at = k_first + ((lane & 7) + (lane >> 4) * 8) * HS * 2 + ((lane >> 3) & 1) * 16;
        const u32 v_at = v_first + ((lane & 7) + ((lane >> 3) & 1) * 8) * HS * 2 + (lane >> 4) * 16;
        float score[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        #pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 a[4], b[4];
            load_matrices(a, q_at + d * 32);
            load_matrices(b, k_at + d * 32);
            multiply(score[0], a, b[0], b[1]);
            multiply(score[1], a, b[2], b[3]);
        }
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = best[h];
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                float& s = score[e >> 1][2 * h + (e & 1)];
                s = from + (e >> 1) * 8 + t * 2 + (e & 1) < keys ? s * p.scale : __int_as_float(0xff800000);
                top = fmaxf(top, s);
            }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float shrink = power_of_two(best[h] - top);
            best[h] = top, total[h] *= shrink;
            #pragma unroll
            for (int d = 0; d < D / 8; d++) seen[d][2 * h] *= shrink, seen[d][2 * h + 1] *= shrink;
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                float& s = score[e >> 1][2 * h + (e & 1)];
                s = power_of_two(s - top), total[h] += s;
            }
        }
        const u32 shares[4] = {rounded(score[0][0], score[0][1]), rounded(score[0][2], score[0][3]),
                               rounded(score[1][0], score[1][1]), rounded(score[1][2], score[1][3])};
        #pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 b[4];
            load_matrices_turned(b, v_at + d * 32);
            multiply(seen[2 * d], shares, b[0], b[1]);
            multiply(seen[2 * d + 1], shares, b[2], b[3]);
        }
        __syncwarp();
    }
    const int parts = (keys + 15) / 16 < 16 ? (keys + 15) / 16 : 16;
    if (warp < parts) {
        float* at = (float*)told;  // [16, PS], then each row's best and total
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            total[h] += __shfl_xor_sync(~0u, total[h], 1);
            total[h] += __shfl_xor_sync(~0u, total[h], 2);
            #pragma unroll
            for (int d = 0; d < D / 8; d++) *(float2*)(at + (g + 8 * h) * PS + d * 8 + t * 2) = make_float2(seen[d][2 * h], seen[d][2 * h + 1]);
            if (t == 0) *(float2*)(at + 16 * PS + (g + 8 * h) * 2) = make_float2(best[h], total[h]);
        }
    }
    consumers_meet();
    if (thread < 16 * D / 4) {
        const int row = thread / (D / 4), d = thread % (D / 4) * 4;
        const float* part = (const float*)(OWN ? memory + L::X : memory + L::KEYS);
        float top = -1e30f, all = 0, y[4] = {0, 0, 0, 0};
        #pragma unroll 4
        for (int w = 0; w < parts; w++) top = fmaxf(top, part[w * (L::WARP / 4) + 16 * PS + row * 2]);
        #pragma unroll 4
        for (int w = 0; w < parts; w++) {
            const float2 known = *(const float2*)(part + w * (L::WARP / 4) + 16 * PS + row * 2);
            const float4 o = *(const float4*)(part + w * (L::WARP / 4) + row * PS + d);
            const float factor = power_of_two(known.x - top);
            all = fmaf(factor, known.y, all);
            y[0] = fmaf(factor, o.x, y[0]), y[1] = fmaf(factor, o.y, y[1]), y[2] = fmaf(factor, o.z, y[2]), y[3] = fmaf(factor, o.w, y[3]);
        }
        const float inverse = 1.0f / all;
        const int at = head * D + d;
        if (first + row < p.rows)
            *(uint2*)(p.out + ((size_t)(at / 8) * T + first + row) * 8 + at % 8) =
                make_uint2(rounded(y[0] * inverse, y[1] * inverse), rounded(y[2] * inverse, y[3] * inverse));
    }
}

struct Project {
    const float* x;       // [rows, K]
    const float* weight;  // [K, N]
    const float* bias;    // [N]
    const float* scale;   // [N]: 1 + scale of the next norm
    float* wide;          // [N / 8, R, 8]
    u16* narrow;          // [N / 8, R, 8], scaled
    u64* told;            // [COPIES, R, 2]
    int rows, inputs, outputs;
};

// A product in float32 throughout, for a few inputs: four outputs of a row a thread.
template <int R>
DEVICE void project_in(const Project& p) {
    let_successor_start();
    wait_for_predecessor();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.outputs / 4 * R; i += gridDim.x * blockDim.x) {
        const int row = i % R, n = i / R * 4;
        if (row >= p.rows) continue;
        float4 y = *(const float4*)(p.bias + n);
        for (int k = 0; k < p.inputs; k++) {
            const float a = p.x[row * p.inputs + k];
            const float4 w = *(const float4*)(p.weight + (size_t)k * p.outputs + n);
            y.x = fmaf(a, w.x, y.x), y.y = fmaf(a, w.y, y.y), y.z = fmaf(a, w.z, y.z), y.w = fmaf(a, w.w, y.w);
        }
        // what the engine keeps in half precision is rounded here too, once
        y.x = widen(rounded(y.x)), y.y = widen(rounded(y.y)), y.z = widen(rounded(y.z)), y.w = widen(rounded(y.w));
        const size_t at = ((size_t)(n / 8) * R + row) * 8 + n % 8;
        *(float4*)(p.wide + at) = y;
        const float4 s = *(const float4*)(p.scale + n);
        *(uint2*)(p.narrow + at) = make_uint2(rounded(y.x * s.x, y.y * s.y), rounded(y.z * s.z, y.w * s.w));
        u64* to = p.told + ((blockIdx.x % COPIES) * R + row) * 2;
        const u64 squares = (u64)__float2ll_rn((y.x * y.x + y.y * y.y + (y.z * y.z + y.w * y.w)) * (float)SQUARE_UNIT);
        asm volatile("red.global.add.u64 [%0], %1;" :: "l"(to + 1), "l"(squares) : "memory");
    }
}

struct Finish {
    const float* wide;    // [K / 8, R, 8]
    const float* scale;   // [K]: 1 + scale of the last norm
    const float* shift;   // [K]
    const float* weight;  // [N, K]
    const float* bias;    // [N]
    float* out;           // [rows, N]
    int rows, inputs, outputs;
    float eps;
};

// The last norm and a product in float32: one output of a row a warp.
template <int R>
DEVICE void project_out(const Finish& p) {
    const int lane = threadIdx.x & 31, at = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    let_successor_start();
    wait_for_predecessor();
    if (at >= p.rows * p.outputs) return;
    const int row = at / p.outputs, n = at % p.outputs;
    float squares = 0, scaled = 0, shifted = 0;
    for (int k = lane; k < p.inputs; k += 32) {
        const float x = p.wide[((size_t)(k / 8) * R + row) * 8 + k % 8], w = p.weight[(size_t)n * p.inputs + k];
        squares = fmaf(x, x, squares), scaled = fmaf(x * p.scale[k], w, scaled), shifted = fmaf(p.shift[k], w, shifted);
    }
    #pragma unroll
    for (int d = 16; d; d /= 2) {
        squares += __shfl_xor_sync(~0u, squares, d);
        scaled += __shfl_xor_sync(~0u, scaled, d);
        shifted += __shfl_xor_sync(~0u, shifted, d);
    }
    if (lane == 0) p.out[at] = scaled * rsqrtf(squares / p.inputs + p.eps) + shifted + p.bias[n];
}

struct Shared {
    const u16* own;       // [rows, (heads + 2) * D]: queries of all heads, keys, values, before rotary
    const u16 *k, *v;     // [keys, D] of the prefix, after rotary; they stood before the predecessor began
    const float* rotary;  // [rows, D]: cosines, then sines, of half a head's width
    u16* out;             // [heads * D / 8, R, 8]
    int rows, keys, heads;
    float scale;          // of the scores, times log2(e)
};

// Rotary by halves of eight numbers and of those half a head further on.
template <int D>
DEVICE void rotate_eight(const u16* from, const float* table, u16* to) {
    const uint4 x = *(const uint4*)from, y = *(const uint4*)(from + D / 2);
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
    u32 first[4], second[4];
    #pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 c = *(const float2*)(table + 2 * e), s = *(const float2*)(table + D / 2 + 2 * e);
        first[e] = rounded(low(a[e]) * c.x - low(b[e]) * s.x, high(a[e]) * c.y - high(b[e]) * s.y);
        second[e] = rounded(low(b[e]) * c.x + low(a[e]) * s.x, high(b[e]) * c.y + high(a[e]) * s.y);
    }
    *(uint4*)to = make_uint4(first[0], first[1], first[2], first[3]);
    *(uint4*)(to + D / 2) = make_uint4(second[0], second[1], second[2], second[3]);
}

// Up to 16 rows of one head over a slice of the keys that all heads share; a cluster of eight blocks covers all keys.
template <int T, int D>
DEVICE void attend_shared(const Shared& p) {
    constexpr int R = 16, C = 8, DS = D + 8, WORDS = D / 8, WARPS = 4, DIMS = D / WARPS, PART = D / C;
    extern __shared__ __align__(128) u8 memory[];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    const u32 rank = cluster_rank(), head = blockIdx.x / C;
    const int all = p.keys + p.rows, share = ((all + C - 1) / C + 15) / 16 * 16, first = rank * share;
    const int count = all - first < 0 ? 0 : all - first < share ? all - first : share, padded = (count + 15) / 16 * 16;
    u16 *k = (u16*)memory, *v = k + share * DS, *q = v + share * DS, *weights = q + R * DS;
    float *scores = (float*)(weights + R * (share + 8)), *seen = scores + R * (share + 4), *top = seen + R * (D + 4), *total = top + R;
    const int ws = share + 8, ss = share + 4, os = D + 4, width = (p.heads + 2) * D;
    let_successor_start();
    for (int i = thread; i < padded * WORDS; i += 32 * WARPS) {
        const int key = i / WORDS, d = i % WORDS * 8, at = first + key;
        const bool there = at < p.keys;
        *(uint4*)(k + key * DS + d) = there ? *(const uint4*)(p.k + (size_t)at * D + d) : make_uint4(0, 0, 0, 0);
        *(uint4*)(v + key * DS + d) = there ? *(const uint4*)(p.v + (size_t)at * D + d) : make_uint4(0, 0, 0, 0);
    }
    for (int i = thread; i < (R - p.rows) * WORDS; i += 32 * WARPS)
        *(uint4*)(q + (p.rows + i / WORDS) * DS + i % WORDS * 8) = make_uint4(0, 0, 0, 0);
    wait_for_predecessor();
    __syncthreads();
    for (int i = thread; i < p.rows * WORDS / 2; i += 32 * WARPS) {
        const int row = i / (WORDS / 2), d = i % (WORDS / 2) * 8, key = p.keys + row - first;
        const u16* own = p.own + (size_t)row * width;
        rotate_eight<D>(own + head * D + d, p.rotary + row * D + d, q + row * DS + d);
        if (0 <= key && key < count) {
            rotate_eight<D>(own + p.heads * D + d, p.rotary + row * D + d, k + key * DS + d);
            *(uint4*)(v + key * DS + d) = *(const uint4*)(own + (p.heads + 1) * D + d);
            *(uint4*)(v + key * DS + D / 2 + d) = *(const uint4*)(own + (p.heads + 1) * D + D / 2 + d);
        }
    }
    __syncthreads();
    const u32 row_corner = ((lane & 7) + ((lane >> 3) & 1) * 8) * 2, column = (lane >> 4) * 16;  // of a left operand
    for (int n = warp * 16; n < padded; n += WARPS * 16) {
        float score[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        #pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 a[4], b[4];
            load_matrices(a, shared_address(q) + row_corner * DS + column + d * 32);
            load_matrices(b, shared_address(k) + (n + (lane & 7) + (lane >> 4) * 8) * DS * 2 + ((lane >> 3) & 1) * 16 + d * 32);
            multiply(score[0], a, b[0], b[1]);
            multiply(score[1], a, b[2], b[3]);
        }
        #pragma unroll
        for (int h = 0; h < 2; h++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const int key = n + h * 8 + t * 2 + (e & 1);
                scores[(g + (e >> 1) * 8) * ss + key] = key < count ? score[h][e] * p.scale : __int_as_float(0xff800000);
            }
    }
    __syncthreads();
    for (int row = warp; row < R; row += WARPS) {
        float best = -1e30f, sum = 0;
        for (int key = lane; key < padded; key += 32) best = fmaxf(best, scores[row * ss + key]);
        #pragma unroll
        for (int d = 16; d; d /= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, d));
        for (int key = lane; key < padded; key += 32) {
            const float weight = power_of_two(scores[row * ss + key] - best);
            sum += weight;
            weights[row * ws + key] = rounded(weight);
        }
        #pragma unroll
        for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (lane == 0) top[row] = best, total[row] = sum;
    }
    __syncthreads();
    float sum[DIMS / 8][4];
    #pragma unroll
    for (int d = 0; d < DIMS / 8; d++)
        #pragma unroll
        for (int e = 0; e < 4; e++) sum[d][e] = 0;
    for (int key = 0; key < padded; key += 16) {
        u32 a[4];
        load_matrices(a, shared_address(weights) + row_corner * ws + column + key * 2);
        #pragma unroll
        for (int d = 0; d < DIMS / 16; d++) {
            u32 b[4];
            load_matrices_turned(b, shared_address(v) + (key + (lane & 7) + ((lane >> 3) & 1) * 8) * DS * 2 + (warp * DIMS + d * 16) * 2 + (lane >> 4) * 16);
            multiply(sum[2 * d], a, b[0], b[1]);
            multiply(sum[2 * d + 1], a, b[2], b[3]);
        }
    }
    #pragma unroll
    for (int d = 0; d < DIMS / 8; d++) {
        float* at = seen + g * os + warp * DIMS + d * 8 + t * 2;
        *(float2*)at = make_float2(sum[d][0], sum[d][1]);
        *(float2*)(at + 8 * os) = make_float2(sum[d][2], sum[d][3]);
    }
    arrive_at_cluster();
    wait_for_cluster();
    for (int i = thread; i < R * PART / 4; i += 32 * WARPS) {
        const int row = i % R, d = rank * PART + i / R * 4;
        if (row >= p.rows) continue;
        float tops[C], totals[C], best = -1e30f, sum = 0, y[4] = {0, 0, 0, 0};
        float4 parts[C];
        #pragma unroll
        for (int c = 0; c < C; c++) {
            tops[c] = load_one_from_cluster(in_block(shared_address(top + row), c));
            totals[c] = load_one_from_cluster(in_block(shared_address(total + row), c));
            parts[c] = load_from_cluster(in_block(shared_address(seen + row * os + d), c));
        }
        #pragma unroll
        for (int c = 0; c < C; c++) best = fmaxf(best, tops[c]);
        #pragma unroll
        for (int c = 0; c < C; c++) {
            const float factor = power_of_two(tops[c] - best);
            sum = fmaf(factor, totals[c], sum);
            y[0] = fmaf(factor, parts[c].x, y[0]), y[1] = fmaf(factor, parts[c].y, y[1]);
            y[2] = fmaf(factor, parts[c].z, y[2]), y[3] = fmaf(factor, parts[c].w, y[3]);
        }
        const float inverse = 1.0f / sum;
        const int n = head * D + d;
        *(uint2*)(p.out + ((size_t)(n / 8) * T + row) * 8 + n % 8) = make_uint2(rounded(y[0] * inverse, y[1] * inverse), rounded(y[2] * inverse, y[3] * inverse));
    }
    __syncwarp();
    arrive_at_cluster();
    wait_for_cluster();
}
