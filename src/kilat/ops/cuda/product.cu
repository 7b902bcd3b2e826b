// y [T, N] = x [T, K] W [N, K]^T on Hopper (sm_90a), e4m3 with scales or bf16. One variant a compilation, chosen by these macros:
//   FP8      1: e4m3 with a scale per row and group of 128 of x, and per 128 x 128 block of W; 0: bf16
//   BM, BN   rows and outputs of a CTA's tile; BM is 64 (the two consumer warpgroups share the rows and halve the outputs) or 128
//            (they share the outputs and halve the rows)
//   CUTS     CTAs of a cluster that each sum a part of K of one tile
//   SHARE_X  CTAs of a cluster with the same rows and other outputs: each fetches a part of the x tile and multicasts it
//   SHARE_W  CTAs of a cluster with the same outputs and other rows: each fetches a part of the W tile and multicasts it
//   STAGES   places of the ring, each 128 bytes of K wide
//   GATE     0; 1: silu(first half of the outputs) * second half; 2: the same in e4m3 with scales per group of 128
//
// Threads: warps 0..7 are two consumer warpgroups; lane 0 of warp 8 is the producer, whose warpgroup gives its registers to the others.
//
// The ring. full[s] completes when the bytes of a stage have landed: one arrival (this CTA's producer, which also says how many bytes to
// expect) and the bytes, whichever CTA of the cluster asked for them. A peer's bytes may land before this producer's arrival: the phase
// cannot end without the arrival, and a peer sends the next round of a place only after this CTA's consumers have freed it, thus after
// the phase before ended. empty[s] of a CTA completes when every CTA that it sends parts of the stage to has freed the place: each
// consumer warp arrives at empty[s] of every CTA from which its own CTA gets parts. These are the CTAs with equal rows (x) and those with
// equal outputs (W), all with the same part of K, so all have the same number of stages and go through them in the same order.
// Only places that will be filled again are freed: so every arrival is waited for by the producer that it is meant for, and none can
// reach a CTA that has left. Before the first remote write or arrival a barrier of the cluster says that all barriers are initialised; the
// last one says that no CTA reads from another any more, and that what this one sent has arrived, so each may leave.
//
// The sum. A consumer warpgroup sums a group of 128 of K in the matrix units (e4m3: from zero), multiplies it by the scales and adds it
// in fp32. At the end every CTA puts its sums into its own shared memory, where its ring was (all its bytes have landed and been used);
// row r of a tile is then added up, in the order of the cuts, by the CTA with cut r % CUTS. So the bits never depend on timing.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Sizes {
    int n_rows;      // of y
    int n_out;       // of y
    int steps;       // of 128 bytes along K
    int row_groups;  // clusters side by side along the rows
    int x_rows;      // rows of x in a stage: all of the tile's that are needed, a multiple of 8 * SHARE_X
    int w_stride;    // of w_scale, in values
    int x_stride;    // of x_scale
    int out_stride;  // of out_scale
};

constexpr int CONSUMERS = 256;
constexpr int HALF = BN / 2;                        // outputs of one of the two boxes of W in a stage
constexpr int WN = BM == 64 || BN > 128 ? HALF : BN;  // outputs of one matrix instruction
constexpr int SUBS = BM == 64 ? 1 : BN / WN;          // of them a warpgroup's
constexpr int W_BYTES = BN * 128, X_BYTES = BM * 128, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int PEERS = SHARE_X + SHARE_W - 1;  // CTAs that send parts of a stage to this one, itself included
constexpr int CLUSTER = CUTS * SHARE_X * SHARE_W;
constexpr int PITCH = BN + 8;  // floats from row to row of the sums in shared memory: no two of a half-warp's pairs in one bank
constexpr int GATES = GATE ? HALF : BN;                     // outputs of y of a tile
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull;

static_assert(BM == 64 || BM == 128, "rows");
static_assert(WN == 64 || WN == 96 || WN == 128, "outputs");
static_assert(GATE != 2 || HALF == 128, "a group of quantized outputs is a tile's");
static_assert(!GATE || WN == HALF, "a matrix instruction never holds gates and ups");
static_assert(SHARE_W == 1 || SHARE_W == 2, "a box of W each");
static_assert(BM * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums lie where the ring was");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Says only that matrix products have read a place, and they are over: nothing that was written has to be seen there. A release for the
// whole cluster would wait for all of this thread's memory accesses, every step.
__device__ __forceinline__ void arrive_there(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// One box of a tensor to the same place of every CTA in ``mask``, or of this CTA alone; counted on the barrier at the same place there.
template <bool MULTICAST>
__device__ __forceinline__ void fetch(u32 to, const TensorMap& map, int inner, int row, u32 barrier, u16 mask, u64 policy) {
    if constexpr (MULTICAST)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
            " [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
            "l"(&map), "r"(inner), "r"(row), "r"(barrier), "h"(mask), "l"(policy)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
            " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
            "l"(&map), "r"(inner), "r"(row), "r"(barrier), "l"(policy)
            : "memory");
}

// Descriptor of a K-major operand with rows of 128 bytes, swizzled by 128 bytes; 8 rows are 1,024 bytes. Further along K: + bytes / 16.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define R8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define R32(i) R8(i), R8(i + 8), R8(i + 16), R8(i + 24)
#define P16A "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define P16B "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define P16C "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define P16D "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#if FP8
#define MMA(n, registers, a, b, more)                                                                                     \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " more ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" registers \
    "}, " a ", " b ", p, 1, 1;\n}"
#else
#define MMA(n, registers, a, b, more)                                                                                     \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " more ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" registers \
    "}, " a ", " b ", p, 1, 1, 0, 0;\n}"
#endif

// d [64 rows, N outputs] = (more ? d : 0) + a b^T over 32 bytes of K. A thread holds d[4 j + i]: row lane / 4 + 8 (i / 2) of its warp's 16,
// output 8 j + 2 (lane % 4) + i % 2.
template <int N>
__device__ __forceinline__ void mma(float (&d)[N / 2], u64 a, u64 b, int more) {
    if constexpr (N == 64)
        asm volatile(MMA("64", P16A ", " P16B, "%32", "%33", "%34") : R32(0) : "l"(a), "l"(b), "r"(more));
    else if constexpr (N == 96)
        asm volatile(MMA("96", P16A ", " P16B ", " P16C, "%48", "%49", "%50")
                     : R32(0), R8(32), R8(40)
                     : "l"(a), "l"(b), "r"(more));
    else
        asm volatile(MMA("128", P16A ", " P16B ", " P16C ", " P16D, "%64", "%65", "%66")
                     : R32(0), R32(32)
                     : "l"(a), "l"(b), "r"(more));
}

__device__ __forceinline__ float4 sums_at(u32 address) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ u32 two_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float rounded(float v) { return from_bf16(two_bf16(v, 0.f) & 0xFFFF); }

__device__ __forceinline__ u32 four_e4m3(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | (u32)high << 16;
}

__device__ __forceinline__ float gated(float gate, float up) {
    gate = rounded(gate);
    return rounded(rounded(__fdividef(gate, 1.f + __expf(-gate))) * rounded(up));
}

__device__ __forceinline__ void add_bias(float4& v, const u16* bias) {
    const uint2 b = *reinterpret_cast<const uint2*>(bias);
    v.x += from_bf16(b.x & 0xFFFF), v.y += from_bf16(b.x >> 16), v.z += from_bf16(b.y & 0xFFFF), v.w += from_bf16(b.y >> 16);
}

struct Place {
    int cut, cn, cm;       // of this CTA in its cluster
    int row0, out0;        // first row and output of y of its tile
    int first, last;       // its steps of K
    __device__ u32 rank(int of_cut, int of_cn, int of_cm) const { return (of_cut * SHARE_X + of_cn) * SHARE_W + of_cm; }
};

__device__ __forceinline__ Place place(const Sizes& z) {
    Place p;
    const int rank = CLUSTER == 1 ? 0 : (int)cluster_rank(), cluster = blockIdx.x / CLUSTER;
    p.cm = rank % SHARE_W, p.cn = rank / SHARE_W % SHARE_X, p.cut = rank / (SHARE_W * SHARE_X);
    p.row0 = (cluster % z.row_groups * SHARE_W + p.cm) * BM;
    p.out0 = (cluster / z.row_groups * SHARE_X + p.cn) * GATES;
    p.first = z.steps * p.cut / CUTS, p.last = z.steps * (p.cut + 1) / CUTS;
    return p;
}

__device__ __forceinline__ int output_of_half(const Sizes& z, const Place& p, int half) {
    return GATE ? half * z.n_out + p.out0 : p.out0 + half * HALF;
}

// W does not depend on the kernel before, x does: the first places of the ring get their W before the wait.
__device__ __forceinline__ void produce(
    const TensorMap& w_map, const TensorMap& x_map, const Sizes& z, const Place& p, u32 ring, u32 full, u32 empty) {
    const int n = p.last - p.first;
    const u32 bytes = W_BYTES + z.x_rows * 128;
    const int x_part = z.x_rows / SHARE_X;
    u16 x_mask = 0, w_mask = 0;
    for (int i = 0; i < SHARE_X; ++i) x_mask |= 1 << p.rank(p.cut, i, p.cm);
    for (int i = 0; i < SHARE_W; ++i) w_mask |= 1 << p.rank(p.cut, p.cn, i);
    auto fetch_w = [&](int i) {
        const u32 s = i % STAGES, to = ring + s * STAGE_BYTES;
        expect_bytes(full + 8 * s, bytes);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (SHARE_W == 1 || half == p.cm)
                fetch<(SHARE_W > 1)>(
                    to + half * HALF * 128, w_map, (p.first + i) * (FP8 ? 128 : 64), output_of_half(z, p, half), full + 8 * s, w_mask,
                    z.row_groups > 1 ? EVICT_NORMAL : EVICT_FIRST);
    };
    auto fetch_x = [&](int i) {
        const u32 s = i % STAGES, to = ring + s * STAGE_BYTES + W_BYTES + p.cn * x_part * 128;
        fetch<(SHARE_X > 1)>(
            to, x_map, (p.first + i) * (FP8 ? 128 : 64), p.row0 + p.cn * x_part, full + 8 * s, x_mask, EVICT_NORMAL);
    };
    const int ahead = n < STAGES ? n : STAGES;
    for (int i = 0; i < ahead; ++i) fetch_w(i);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    for (int i = 0; i < ahead; ++i) fetch_x(i);
    for (int i = STAGES; i < n; ++i) {
        wait(empty + 8 * (i % STAGES), (i / STAGES + 1) & 1);
        fetch_w(i);
        fetch_x(i);
    }
}

__device__ __forceinline__ void free_place(const Place& p, u32 empty) {
    const int lane = threadIdx.x % 32;
    if constexpr (PEERS == 1) {
        if (lane == 0) arrive(empty);
    } else if (lane < PEERS) {
        const int other = lane - SHARE_X;  // of the other CTAs with the same outputs
        const u32 peer = lane < SHARE_X ? p.rank(p.cut, lane, p.cm) : p.rank(p.cut, p.cn, other < p.cm ? other : other + 1);
        arrive_there(address_in(empty, peer));
    }
}

#if FP8
constexpr bool STRADDLES = WN % 128 != 0 && 128 % WN != 0;  // a warpgroup's outputs may lie in two blocks of scales

struct Scales {
    float x[2], w[SUBS], w_next[SUBS];
};

__device__ __forceinline__ void sum_steps(
    float (&acc)[SUBS][WN / 2], const float* w_scale, const float* x_scale, const Sizes& z, const Place& p, u32 ring, u32 full,
    u32 empty) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4, n = p.last - p.first;
    const int row = p.row0 + (BM == 64 ? 0 : group * 64) + warp % 4 * 16 + lane / 4;
    const bool has[2] = {row < z.n_rows, row + 8 < z.n_rows};
    const float* xs = x_scale + (long long)p.first * z.x_stride + row;
    const float *ws[SUBS], *ws_next[SUBS];
    int edge[SUBS];  // the first output of a warpgroup's that lies in the next block
#pragma unroll
    for (int b = 0; b < SUBS; ++b) {
        const int half = BM == 64 ? group : b;
        const int first = SUBS == 1 && BM != 64 ? p.out0 : output_of_half(z, p, half), most = (GATE ? 2 : 1) * z.n_out - 1;
        const int end = first + WN - 1;
        ws[b] = w_scale + (long long)((first < most ? first : most) / 128) * z.w_stride + p.first;
        ws_next[b] = w_scale + (long long)((end < most ? end : most) / 128) * z.w_stride + p.first;
        edge[b] = 128 - first % 128;
    }
    auto load = [&](Scales& s, int i) {
        s.x[0] = has[0] ? xs[(long long)i * z.x_stride] : 0.f;
        s.x[1] = has[1] ? xs[(long long)i * z.x_stride + 8] : 0.f;
#pragma unroll
        for (int b = 0; b < SUBS; ++b) {
            s.w[b] = __ldg(ws[b] + i);
            if (STRADDLES) s.w_next[b] = __ldg(ws_next[b] + i);
        }
    };
#pragma unroll
    for (int b = 0; b < SUBS; ++b)
#pragma unroll
        for (int j = 0; j < WN / 2; ++j) acc[b][j] = 0.f;
    Scales now, next;
    if (n > 0) load(now, 0);
    float part[WN / 2];
    for (int i = 0; i < n; ++i) {
        if (i + 1 < n) load(next, i + 1);
        const u32 s = i % STAGES, stage = ring + s * STAGE_BYTES;
        wait(full + 8 * s, i / STAGES & 1);
        const u64 a = operand(stage + W_BYTES + (BM == 64 ? 0 : group * 8192));
#pragma unroll
        for (int b = 0; b < SUBS; ++b) {
            const u64 w = operand(stage + (BM == 64 ? group : b) * WN * 128);
            mma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) mma<WN>(part, a + 2 * k, w + 2 * k, k > 0);
            mma_commit();
            mma_wait<0>();
            if (b == SUBS - 1 && i + STAGES < n) free_place(p, empty + 8 * s);
            const float s0 = now.x[0] * now.w[b], s1 = now.x[1] * now.w[b];
            const float t0 = STRADDLES ? now.x[0] * now.w_next[b] : s0, t1 = STRADDLES ? now.x[1] * now.w_next[b] : s1;
#pragma unroll
            for (int j = 0; j < WN / 8; ++j) {
                const bool over = STRADDLES && 8 * j >= edge[b];
                const float u0 = over ? t0 : s0, u1 = over ? t1 : s1;
                acc[b][4 * j] += part[4 * j] * u0;
                acc[b][4 * j + 1] += part[4 * j + 1] * u0;
                acc[b][4 * j + 2] += part[4 * j + 2] * u1;
                acc[b][4 * j + 3] += part[4 * j + 3] * u1;
            }
        }
        now = next;
    }
}
#else
__device__ __forceinline__ void sum_steps(
    float (&acc)[SUBS][WN / 2], const float*, const float*, const Sizes&, const Place& p, u32 ring, u32 full, u32 empty) {
    const int group = threadIdx.x / 128, n = p.last - p.first;
    for (int i = 0; i < n; ++i) {
        const u32 s = i % STAGES, stage = ring + s * STAGE_BYTES;
        wait(full + 8 * s, i / STAGES & 1);
        const u64 a = operand(stage + W_BYTES + (BM == 64 ? 0 : group * 8192));
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int b = 0; b < SUBS; ++b)
                mma<WN>(acc[b], a + 2 * k, operand(stage + (BM == 64 ? group : b) * WN * 128) + 2 * k, i > 0 || k > 0);
        mma_commit();
        // the step before is done: its place is free
        mma_wait<1>();
        if (i > 0 && i - 1 + STAGES < n) free_place(p, empty + 8 * ((i - 1) % STAGES));
    }
    mma_wait<0>();
}
#endif

// Every CTA adds up and writes its rows of the tile: those with row % CUTS == cut.
__device__ __forceinline__ void write_rows(
    const u16* bias, void* out, float* out_scale, const Sizes& z, const Place& p, u32 sums) {
    const int rows = z.n_rows - p.row0 < BM ? z.n_rows - p.row0 : BM;
    const int mine = (rows - p.cut + CUTS - 1) / CUTS;
    constexpr int FOURS = GATES / 4;
    u32 from[CUTS];
#pragma unroll
    for (int c = 0; c < CUTS; ++c) from[c] = CLUSTER == 1 ? sums : address_in(sums, p.rank(c, p.cn, p.cm));
    auto total = [&](int row, int column) {
        float4 v[CUTS];
#pragma unroll
        for (int c = 0; c < CUTS; ++c) v[c] = sums_at(from[c] + (row * PITCH + column) * 4);
#pragma unroll
        for (int c = 1; c < CUTS; ++c) v[0].x += v[c].x, v[0].y += v[c].y, v[0].z += v[c].z, v[0].w += v[c].w;
        return v[0];
    };
    for (int u = threadIdx.x; u < mine * FOURS; u += CONSUMERS) {
        const int row = p.cut + u / FOURS * CUTS, column = u % FOURS * 4, output = p.out0 + column;
        const long long at = (long long)(p.row0 + row) * z.n_out + output;
        float4 y = total(row, column);
        if (output < z.n_out) {  // the same for a whole warp where the gate is quantized
            if (bias) add_bias(y, bias + output);
            if constexpr (GATE > 0) {
                float4 up = total(row, HALF + column);
                if (bias) add_bias(up, bias + z.n_out + output);
                y = make_float4(gated(y.x, up.x), gated(y.y, up.y), gated(y.z, up.z), gated(y.w, up.w));
            }
            if constexpr (GATE == 2) {
                float top = fmaxf(fmaxf(fabsf(y.x), fabsf(y.y)), fmaxf(fabsf(y.z), fabsf(y.w)));
#pragma unroll
                for (int far = 16; far > 0; far /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, far));
                const float scale = fmaxf(__fdiv_rn(top, 448.f), 1.1754943508222875e-38f);
                *reinterpret_cast<u32*>((char*)out + at) =
                    four_e4m3(__fdiv_rn(y.x, scale), __fdiv_rn(y.y, scale), __fdiv_rn(y.z, scale), __fdiv_rn(y.w, scale));
                if (column == 0) out_scale[(long long)(output / 128) * z.out_stride + p.row0 + row] = scale;
            } else {
                *reinterpret_cast<uint2*>((u16*)out + at) = make_uint2(two_bf16(y.x, y.y), two_bf16(y.z, y.w));
            }
        }
    }
}

// All threads of the cluster. ``SHOWS``: what they wrote to shared memory before is seen by all after it.
template <bool SHOWS>
__device__ __forceinline__ void cluster_meets() {
    __syncwarp();
    if (SHOWS)
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else
        asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The sums of a consumer thread go where the ring was.
__device__ __forceinline__ void put_sums(const float (&acc)[SUBS][WN / 2], u32 sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
    const int row = (BM == 64 ? 0 : group * 64) + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int b = 0; b < SUBS; ++b) {
        const u32 to = sums + (row * PITCH + (BM == 64 ? group : b) * WN + lane % 4 * 2) * 4;
#pragma unroll
        for (int j = 0; j < WN / 8; ++j)
#pragma unroll
            for (int below = 0; below < 2; ++below)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (below * 8 * PITCH + 8 * j) * 4),
                             "f"(acc[b][4 * j + 2 * below]), "f"(acc[b][4 * j + 2 * below + 1])
                             : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 128, 1) product(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const __grid_constant__ Sizes z,
    const float* w_scale, const float* x_scale, const u16* bias, void* out, float* out_scale) {
    asm volatile("griddepcontrol.launch_dependents;");
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u, full = shared_address(barriers), empty = full + 8 * STAGES;
    const Place p = place(z);
    if (threadIdx.x == CONSUMERS) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
        for (int s = 0; s < STAGES; ++s) {
            init_barrier(full + 8 * s, 1);
            init_barrier(empty + 8 * s, 8 * PEERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_meets<false>();  // the barriers' initialisation has a release of its own
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS) produce(w_map, x_map, z, p, ring, full, empty);
        if (CUTS > 1) cluster_meets<true>();
        if (CLUSTER > 1) cluster_meets<false>();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        float acc[SUBS][WN / 2];
        sum_steps(acc, w_scale, x_scale, z, p, ring, full, empty);
        // the last matrix products of the other warpgroup may still read the ring
        consumers_meet();
        put_sums(acc, ring);
        if (CUTS > 1)
            cluster_meets<true>();
        else
            consumers_meet();
        write_rows(bias, out, out_scale, z, p, ring);
        if (CLUSTER > 1) cluster_meets<false>();  // all sums that this thread read have been used
    }
}
