// Attention of rows with few tokens over paged keys and values of 128 elements, bf16 or e4m3, on Hopper. Macros:
//   FP8      1: e4m3 pages, multiplied as fp16, which holds them exactly; 0: bf16
//   STAGES   places of a warp's ring
//
// Tiles of 16 tokens of all rows lie in one line, cut into equal shares; a share belongs to one warp a key/value head, and neighbouring warps
// have the same share of neighbouring heads. A warp works alone, with a ring of its own in shared memory. A share is at most the end of one
// row, some whole rows, and the beginning of another; what a warp computes of a row that it shares with others goes to a workspace, and who
// finishes a row and head last merges the parts in order.
//
// A lane copies pieces of whole rows of 128 or 256 bytes, whichever lane reads them later: requests of half as much reach 3.4 TB/s instead
// of 4.4. Tiles without tokens of this step are asked for before the kernel in front is over: earlier steps have written them.
//
// S^T [16 tokens, 8 queries] = K Q^T, O^T [128, 8 queries] += V^T P^T: tokens and elements are the high side of the matrix instruction, the
// few queries of a head the narrow one. Lane (g, t) = (lane / 4, lane % 4). Which element of a head stands at which place of an instruction is
// free as long as both sides agree, so a lane takes 16 bytes of a token at once:
//   K: tokens g and g + 8, pieces t + 4 j of 16 bytes; q likewise.
//   V: tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9, pieces g (+ 8 in bf16); so the lane gets these elements of O for queries 2 t and 2 t + 1.

struct Args {
    const u16* q;           // [T, heads, 128] bf16
    const char* kv;         // of the layer
    void* out;              // [T, heads, 128] bf16, or e4m3 with out_scale
    float* out_scale;       // [heads, out_stride] or null
    const float* k_scale;   // [n_kv] or null
    const float* v_scale;
    float* part;            // [shares * 2, n_kv, 36 * 32]: parts of shared rows
    u32* done;              // [rows * n_kv] parts written; zero before and after
    const int* row_start;   // [rows + 1]
    const int* kv_len;      // [rows]
    const int* table;       // [rows, table_width] pages
    long long page_stride;  // bytes
    long long v_offset;     // bytes from K to V
    int token_stride;       // bytes
    int head_stride;        // bytes
    int table_width;
    int page_tiles;         // tiles of a page
    int n_rows;
    int n_kv;
    int group;              // query heads of a key/value head
    int few;                // the most tokens of a row that are taken here; few * group <= 8
    int shares;
    int least;              // tiles of a share, at least
    int out_stride;
    float scale;            // of scores, times log2(e)
};

constexpr int TILE = 16, DIM = 128, WARPS = 8;
constexpr int ROW_BYTES = FP8 ? DIM : 2 * DIM;
constexpr int TILE_BYTES = 2 * TILE * ROW_BYTES;  // K, then V
constexpr int ROW_PIECES = ROW_BYTES / 16;
constexpr int PIECES = ROW_BYTES / 64;            // of 16 bytes of K that a lane takes of a token
constexpr int V_PIECES = ROW_BYTES / 128;
constexpr int PART = 36 * 32;                     // floats: 32 of O, the maxima and sums of two queries, for each lane
#define NONE (__uint_as_float(0xff800000u))

// Where a piece stands in its row, so that eight lanes that read at once find their pieces in different banks.
__device__ __forceinline__ int k_swizzle(int token) { return (token & 1) * 4; }
__device__ __forceinline__ int v_swizzle(int token) { return token & 6; }

// What all warps of a block know of the rows, in shared memory.
struct Rows {
    const int* end;   // [rows] of the row in the line
    const int* len;   // [rows] kv_len
    const int* from;  // [rows] first token * 16 + tokens
    __device__ int begin(int row) const { return row ? end[row - 1] : 0; }
    __device__ int tiles(int row) const { return end[row] - begin(row); }
};

// Copies tiles ahead of what is computed.
struct Ahead {
    int row, tile, left, page;
    __device__ void find_page(const Args& a) {
        if (left > 0) page = load_read_only(a.table + (long long)row * a.table_width + tile / a.page_tiles);
    }
    // Whether the tile has tokens of this step, which the kernel before writes.
    __device__ bool fresh(const Rows& r) const { return left > 0 && TILE * (tile + 1) > r.len[row] - (r.from[row] & 15); }
    __device__ void issue(const Args& a, const Rows& r, int head, u32 to) {
        if (left > 0) {
            const int lane = lane_here(), valid = r.len[row] - tile * TILE;
            const char* k = a.kv + page * a.page_stride + (long long)(tile % a.page_tiles * TILE) * a.token_stride + head * a.head_stride;
#pragma unroll
            for (int i = 0; i < TILE / (32 / ROW_PIECES); ++i) {
                const int token = (i * 32 + lane) / ROW_PIECES, piece = lane % ROW_PIECES;
                copy_16(to + token * ROW_BYTES + (piece ^ k_swizzle(token)) * 16, k + token * a.token_stride + piece * 16, token < valid);
            }
#pragma unroll
            for (int i = 0; i < TILE / (32 / ROW_PIECES); ++i) {
                const int token = (i * 32 + lane) / ROW_PIECES, piece = lane % ROW_PIECES;
                copy_16(to + TILE_BYTES / 2 + token * ROW_BYTES + (piece ^ v_swizzle(token)) * 16, k + a.v_offset + token * a.token_stride + piece * 16, token < valid);
            }
            --left;
            if (++tile == r.tiles(row) && left > 0) {
                tile = 0;
                do ++row;
                while (r.tiles(row) == 0);
            }
            find_page(a);
        }
        copy_commit();
    }
};

struct State {
    float o[8][4];  // [2 elements of 16, (element of two, query of two)]
    float top[2], total[2];
    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
        top[0] = top[1] = NONE, total[0] = total[1] = 0.f;
    }
    __device__ void shrink(float f0, float f1) {
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i][0] *= f0, o[i][1] *= f1, o[i][2] *= f0, o[i][3] *= f1;
        total[0] *= f0, total[1] *= f1;
    }
    __device__ void store(float* part) const {
        part += lane_here() * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) store_4(part + i * 128, o[i][0], o[i][1], o[i][2], o[i][3]);
        store_4(part + 1024, top[0], top[1], total[0], total[1]);
    }
    __device__ void load(const float* part) {
        part += lane_here() * 4;
#pragma unroll
        for (int i = 0; i < 8; ++i) load_4(part + i * 128, o[i][0], o[i][1], o[i][2], o[i][3]);
        load_4(part + 1024, top[0], top[1], total[0], total[1]);
    }
    // Adds a later part of the keys.
    __device__ void merge(const State& p) {
        float old[2], now[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float both = max_of(top[c], p.top[c]), base = both == NONE ? 0.f : both;
            old[c] = exp2_of(top[c] - base), now[c] = exp2_of(p.top[c] - base);
            top[c] = both, total[c] = total[c] * old[c] + p.total[c] * now[c];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[i][e] = o[i][e] * old[e & 1] + p.o[i][e] * now[e & 1];
    }
};

// q of a row and head as right operand: query column lane / 4, zero past the row's.
__device__ __forceinline__ void load_q(const Args& a, int from, int head, u32 (&q)[8][2]) {
    const int lane = lane_here(), g = lane >> 2, t = lane & 3, n = from & 15;
    const bool real = g < n * a.group;
    const long long token = (from >> 4) + g / a.group;
    const u16* place = a.q + (token * a.n_kv * a.group + head * a.group + g % a.group) * DIM;
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
        constexpr int ELEMENTS = 64 / PIECES / 4 * 2;  // of a piece of 16 bytes of K: 16 or 8
        const u16* at = place + (t + j * 4) * ELEMENTS;
#pragma unroll
        for (int h = 0; h < ELEMENTS / 8; ++h) {
            uint4 w = make_uint4(0, 0, 0, 0);
            if (real) w = load_16(at + h * 8);
            const int s = (j * ELEMENTS + h * 8) / 4;
            if (FP8) w.x = half_from_bf16(w.x), w.y = half_from_bf16(w.y), w.z = half_from_bf16(w.z), w.w = half_from_bf16(w.w);
            q[s][0] = w.x, q[s][1] = w.y, q[s + 1][0] = w.z, q[s + 1][1] = w.w;
        }
    }
}

__device__ __forceinline__ void attend(State& z, const u32 (&q)[8][2], u32 from, float scale, int limit0, int limit1, bool edge) {
    const int lane = lane_here(), g = lane >> 2, t = lane & 3;
    const u32 k_from = from + g * ROW_BYTES;
    float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
        const u32 at = k_from + ((t + 4 * j) ^ k_swizzle(g)) * 16;
        const uint4 low = load_shared(at), high = load_shared(at + 8 * ROW_BYTES);
        const u32 l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
        if (FP8) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float(&sum)[4] = w & 1 ? d : c;
                multiply(sum, half_from_fp8(l[w]), half_from_fp8(h[w]), half_from_fp8(l[w] >> 16), half_from_fp8(h[w] >> 16), q[j * 4 + w][0], q[j * 4 + w][1]);
            }
        } else {
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                float(&sum)[4] = w & 1 ? d : c;
                multiply(sum, l[2 * w], h[2 * w], l[2 * w + 1], h[2 * w + 1], q[j * 2 + w][0], q[j * 2 + w][1]);
            }
        }
    }
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = (c[i] + d[i]) * scale;
    if (edge) {
        if (g >= limit0) s[0] = NONE;
        if (g >= limit1) s[1] = NONE;
        if (g + 8 >= limit0) s[2] = NONE;
        if (g + 8 >= limit1) s[3] = NONE;
    }
    float m0 = max_of(s[0], s[2]), m1 = max_of(s[1], s[3]);
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) m0 = max_of(m0, from_lane(m0, mask)), m1 = max_of(m1, from_lane(m1, mask));
    m0 = max_of(m0, z.top[0]), m1 = max_of(m1, z.top[1]);
    // a query that has seen no key yet keeps its maximum; 0 stands in so that no inf - inf appears
    const float b0 = m0 == NONE ? 0.f : m0, b1 = m1 == NONE ? 0.f : m1;
    if (any_lane(m0 != z.top[0] || m1 != z.top[1])) {
        z.shrink(exp2_of(z.top[0] - b0), exp2_of(z.top[1] - b1));
        z.top[0] = m0, z.top[1] = m1;
    }
    const float p0 = exp2_of(s[0] - b0), p1 = exp2_of(s[1] - b1), p2 = exp2_of(s[2] - b0), p3 = exp2_of(s[3] - b1);
    z.total[0] += p0 + p2, z.total[1] += p1 + p3;
    const u32 right0 = transposed(pair_of(p0, p1)), right1 = transposed(pair_of(p2, p3));
    const u32 v_from = from + TILE_BYTES / 2 + 2 * t * ROW_BYTES;
#pragma unroll
    for (int j = 0; j < V_PIECES; ++j) {
        const u32 at = v_from + ((g + 8 * j) ^ v_swizzle(2 * t)) * 16;
        const uint4 r0 = load_shared(at), r1 = load_shared(at + ROW_BYTES);
        const uint4 r2 = load_shared(at + 8 * ROW_BYTES), r3 = load_shared(at + 9 * ROW_BYTES);
        const u32 v0[4] = {r0.x, r0.y, r0.z, r0.w}, v1[4] = {r1.x, r1.y, r1.z, r1.w};
        const u32 v2[4] = {r2.x, r2.y, r2.z, r2.w}, v3[4] = {r3.x, r3.y, r3.z, r3.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (FP8) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const u32 select = h ? 0x7362 : 0x5140;
                    const u32 low = bytes_of(v0[w], v1[w], select), high = bytes_of(v2[w], v3[w], select);
                    multiply(z.o[2 * w + h], half_from_fp8(low), half_from_fp8(low >> 16), half_from_fp8(high), half_from_fp8(high >> 16), right0, right1);
                }
            } else {
                multiply(z.o[4 * j + w], bytes_of(v0[w], v1[w], 0x5410), bytes_of(v0[w], v1[w], 0x7632), bytes_of(v2[w], v3[w], 0x5410),
                         bytes_of(v2[w], v3[w], 0x7632), right0, right1);
            }
        }
    }
}

// Elements of O^T of half h (8 of a lane's 16) begin here.
__device__ __forceinline__ int element(int g, int h) { return FP8 ? g * 16 + h * 8 : h * 64 + g * 8; }

__device__ __forceinline__ void write_out(const Args& a, const State& z, int from, int head) {
    const int lane = lane_here(), g = lane >> 2, t = lane & 3, n = from & 15;
    const float v_scale = a.v_scale ? load_read_only(a.v_scale + head) : 1.f;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int column = 2 * t + c;
        const bool real = column < n * a.group;
        const long long token = (from >> 4) + column / a.group;
        const int q_head = head * a.group + column % a.group;
        const long long at = (token * a.n_kv * a.group + q_head) * DIM;
        const float factor = v_scale / z.total[c];
        float y[16];
#pragma unroll
        for (int e = 0; e < 16; ++e) y[e] = z.o[e / 2][(e & 1) * 2 + c] * factor;
        if (a.out_scale) {
            float top = 0.f;
#pragma unroll
            for (int e = 0; e < 16; ++e) y[e] = rounded(y[e]), top = max_of(top, abs_of(y[e]));
#pragma unroll
            for (int mask = 4; mask < 32; mask *= 2) top = max_of(top, from_lane(top, mask));
            const float scale = max_of(top / 448.f, 1.1754943508222875e-38f);
            if (real) {
                if (g == 0) a.out_scale[(long long)q_head * a.out_stride + token] = scale;
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    store_8((char*)a.out + at + element(g, h), four_e4m3(y[8 * h] / scale, y[8 * h + 1] / scale, y[8 * h + 2] / scale, y[8 * h + 3] / scale),
                            four_e4m3(y[8 * h + 4] / scale, y[8 * h + 5] / scale, y[8 * h + 6] / scale, y[8 * h + 7] / scale));
            }
        } else if (real) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                store_16((u16*)a.out + at + element(g, h), two_bf16(y[8 * h], y[8 * h + 1]), two_bf16(y[8 * h + 2], y[8 * h + 3]),
                         two_bf16(y[8 * h + 4], y[8 * h + 5]), two_bf16(y[8 * h + 6], y[8 * h + 7]));
        }
    }
}

// A row whose tiles several shares have: this one's part, and the merging if it is the last.
__device__ __forceinline__ bool finish_shared(const Args& a, State& z, int row, int head, int origin, int first, int last, int share, int length, bool begins) {
    float* base = a.part + (long long)head * PART;
    const long long step = (long long)a.n_kv * PART;
    z.store(base + (share * 2 + (begins ? 0 : 1)) * step);
    fence();
    sync_warp();
    u32* counter = a.done + row * a.n_kv + head;
    u32 before = 0;
    if (lane_here() == 0) before = add_one(counter);
    if (from_first_lane(before) != (u32)(last - first)) return false;
    fence();
    if (lane_here() == 0) *counter = 0;
    z.load(base + (first * 2 + (origin > first * length ? 1 : 0)) * step);
    for (int p = first + 1; p <= last; ++p) {
        State other;
        other.load(base + p * 2 * step);
        z.merge(other);
    }
    return true;
}

// Where each row ends in the line, into shared memory: 256 threads.
__device__ __forceinline__ int lay_line(const Args& a, int* end, int* len, int* from, int* sums) {
    const int thread = thread_here(), each = (a.n_rows + 255) / 256, first = thread * each;
    int sum = 0;
    for (int i = 0; i < each; ++i) {
        const int row = first + i;
        if (row >= a.n_rows) break;
        const int start = load_read_only(a.row_start + row), n = load_read_only(a.row_start + row + 1) - start;
        const int tokens = load_read_only(a.kv_len + row);
        len[row] = tokens, from[row] = start * 16 + (n & 15);
        sum += n > 0 && n <= a.few ? (tokens + TILE - 1) / TILE : 0;
        end[row] = sum;
    }
    int upto = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = from_lane_below(upto, d);
        if (lane_here() >= d) upto += other;
    }
    if (lane_here() == 31) sums[thread / 32] = upto;
    sync_threads();
    int before = upto - sum, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < thread / 32) before += sums[w];
        total += sums[w];
    }
    for (int i = 0; i < each && first + i < a.n_rows; ++i) end[first + i] += before;
    sync_threads();
    return total;
}

extern "C" __global__ void __launch_bounds__(256, 1) decode(const __grid_constant__ Args a) {
    let_next_start();
    char* memory = shared_memory();
    int* sums = (int*)memory;
    int *end = sums + 8, *len = end + a.n_rows, *from = len + a.n_rows;
    const int line = lay_line(a, end, len, from, sums);
    const Rows r{end, len, from};
    const int warp = thread_here() / 32, worker = block_here() * WARPS + warp;
    const int head = worker % a.n_kv, share = worker / a.n_kv;
    const int even = (line + a.shares - 1) / a.shares, length = even > a.least ? even : a.least;
    int at = share * length;
    const int stop = at + length < line ? at + length : line;
    if (share >= a.shares || at >= stop) {
        wait_for_previous();  // the kernel after this one takes it for granted that the one before is over
        return;
    }
    const u32 ring = shared_address(memory) + (32 + 12 * a.n_rows + 127) / 128 * 128 + warp * STAGES * TILE_BYTES;
    int row = 0;
    for (int step = 512; step > 0; step /= 2)
        if (row + step < a.n_rows && end[row + step - 1] <= at) row += step;
    while (end[row] <= at) ++row;
    const float scale = a.scale * (a.k_scale ? load_read_only(a.k_scale + head) : 1.f);

    Ahead ahead{row, at - r.begin(row), stop - at, 0};
    ahead.find_page(a);
    int issued = 0;
    // keys and values of older tokens are there already
    while (issued < STAGES - 1 && !ahead.fresh(r)) ahead.issue(a, r, head, ring + issued++ * TILE_BYTES);
    wait_for_previous();
    while (issued < STAGES - 1) ahead.issue(a, r, head, ring + issued++ * TILE_BYTES);

    State z;
    u32 q[8][2];
    int place = 0, refill = STAGES - 1;
    bool begins = true;
    while (at < stop) {
        const int origin = r.begin(row), tiles = r.tiles(row), piece_end = origin + tiles < stop ? origin + tiles : stop;
        const int oldest = r.len[row] - (r.from[row] & 15);  // tokens that every query of the row sees
        load_q(a, r.from[row], head, q);
        z.clear();
        const int t2 = (lane_here() & 3) * 2, limit0 = oldest + t2 / a.group + 1, limit1 = oldest + (t2 + 1) / a.group + 1;
        for (; at < piece_end; ++at) {
            copy_wait<STAGES - 2>();
            sync_warp();  // what other lanes copied is there, and all have read the place that is filled next
            ahead.issue(a, r, head, ring + refill * TILE_BYTES);
            const int token = (at - origin) * TILE;
            attend(z, q, ring + place * TILE_BYTES, scale, min_of(limit0, r.len[row]) - token, min_of(limit1, r.len[row]) - token, token + TILE > oldest);
            place = place + 1 == STAGES ? 0 : place + 1;
            refill = refill + 1 == STAGES ? 0 : refill + 1;
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2)
            z.total[0] += from_lane(z.total[0], mask), z.total[1] += from_lane(z.total[1], mask);
        const int first = origin / length, last = (origin + tiles - 1) / length;
        if (first == last || finish_shared(a, z, row, head, origin, first, last, share, length, begins)) write_out(a, z, r.from[row], head);
        begins = false;
        if (at < stop) do ++row;
            while (r.tiles(row) == 0);
    }
}
