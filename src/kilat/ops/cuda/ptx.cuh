// The instructions that CUDA C++ has no name for.

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ int lane_here() { return threadIdx.x & 31; }
__device__ __forceinline__ int thread_here() { return threadIdx.x; }
__device__ __forceinline__ int block_here() { return blockIdx.x; }
__device__ __forceinline__ char* shared_memory() {
    extern __shared__ __align__(128) char memory[];
    return memory;
}
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void sync_threads() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void fence() { __threadfence(); }

// Programmatic dependent launch, see ops/triton/launch.py.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 16 bytes to shared memory, zeros where not ``on``.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool on) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(on ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ int load_read_only(const int* p) { return __ldg(p); }
__device__ __forceinline__ float load_read_only(const float* p) { return __ldg(p); }
__device__ __forceinline__ uint4 load_16(const void* p) { return *(const uint4*)p; }
__device__ __forceinline__ void store_16(void* p, u32 a, u32 b, u32 c, u32 d) { *(uint4*)p = make_uint4(a, b, c, d); }
__device__ __forceinline__ void store_8(void* p, u32 a, u32 b) { *(uint2*)p = make_uint2(a, b); }
__device__ __forceinline__ void store_4(float* p, float a, float b, float c, float d) { __stcg((float4*)p, make_float4(a, b, c, d)); }
__device__ __forceinline__ void load_4(const float* p, float& a, float& b, float& c, float& d) {
    const float4 v = __ldcg((const float4*)p);
    a = v.x, b = v.y, c = v.z, d = v.w;
}
__device__ __forceinline__ u32 add_one(u32* p) { return atomicAdd(p, 1u); }

__device__ __forceinline__ float from_lane(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
__device__ __forceinline__ int from_lane_below(int v, int d) { return __shfl_up_sync(~0u, v, d); }
__device__ __forceinline__ u32 from_first_lane(u32 v) { return __shfl_sync(~0u, v, 0); }
__device__ __forceinline__ bool any_lane(bool v) { return __any_sync(~0u, v); }
__device__ __forceinline__ float max_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ int min_of(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ float abs_of(float a) { return fabsf(a); }
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 select) { return __byte_perm(a, b, select); }

// Two e4m3 in the low 16 bits -> two fp16.
__device__ __forceinline__ u32 half_from_fp8(u32 bits) {
    u32 both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"((u16)bits));
    return both;
}
__device__ __forceinline__ u32 two_half(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ u32 two_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float rounded(float v) { return __uint_as_float(two_bf16(v, 0.f) << 16); }
__device__ __forceinline__ u32 half_from_bf16(u32 both) {
    return two_half(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
}
__device__ __forceinline__ u32 four_e4m3(float a, float b, float c, float d) {
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | (u32)high << 16;
}

#if FP8
#define KIND "f16"
__device__ __forceinline__ u32 pair_of(float low, float high) { return two_half(low, high); }
#else
#define KIND "bf16"
__device__ __forceinline__ u32 pair_of(float low, float high) { return two_bf16(low, high); }
#endif

// c [16, 8] += a [16, 16] b [16, 8].
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit numbers, two of row lane / 4 in each lane, transposed.
__device__ __forceinline__ u32 transposed(u32 v) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
    return out;
}
