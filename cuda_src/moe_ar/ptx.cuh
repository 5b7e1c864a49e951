// The hardware, one primitive at a time. No other file holds inline assembly or asks for the
// architecture. Names carry memory order and scope: `ld_relaxed_sys` is ld.relaxed.sys. Where no
// order is named the access is weak. Every memory primitive is volatile and clobbers memory, so the
// compiler moves none of them above `pdl_wait`.
//
// cpu/moe_ar/ptx.cuh gives the same primitives to the CPU emulator.
#pragma once

namespace moe_ar {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// 16 bytes: what a thread loads, pushes and polls at a time.
struct alignas(16) Vec16 {
  u32 w[4];
};

// Defines a kernel that takes one struct by value and runs in blocks of at most `max_threads`.
#define MOE_AR_DEFINE_KERNEL(name, max_threads, type, params)  \
  extern "C" __global__ void __launch_bounds__(max_threads, 1) \
      name(const __grid_constant__ type params)

namespace ptx {

// ---- where am I ---------------------------------------------------------------------------------

__device__ __forceinline__ u32 thread_index() { return threadIdx.x; }
__device__ __forceinline__ u32 block_threads() { return blockDim.x; }
__device__ __forceinline__ u32 block_index() { return blockIdx.x; }
__device__ __forceinline__ u32 grid_blocks() { return gridDim.x; }

// A value that the compiler takes as it is here: computed by now, and not taken apart later.
template <class T>
__device__ __forceinline__ T settled(T value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
  return value;
}

// base + a * b in one instruction.
__device__ __forceinline__ u64 mad_wide(u32 a, u32 b, u64 base) {
  u64 r;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(r) : "r"(a), "r"(b), "l"(base));
  return r;
}

template <class T>
__device__ __forceinline__ T* at(T* base, u32 a, u32 b) {
  return reinterpret_cast<T*>(mad_wide(a, b, reinterpret_cast<u64>(base)));
}

// Shared memory of this block, as one struct.
template <class T>
__device__ __forceinline__ T& block_shared() {
  __shared__ T storage;
  return storage;
}

// ---- weak global memory: inputs and outputs -----------------------------------------------------

__device__ __forceinline__ Vec16 ld_v4(const void* p) {
  Vec16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}

// For data that this SM reads once.
__device__ __forceinline__ Vec16 ld_once_v4(const void* p) {
  Vec16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ u32 ld_u32(const void* p) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u16 ld_u16(const void* p) {
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u64 ld_u64(const void* p) {
  u64 v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void st_v4(void* p, const Vec16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]),
               "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}

__device__ __forceinline__ void st_v2(void* p, u32 first, u32 second) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(first), "r"(second) : "memory");
}

__device__ __forceinline__ void st_u32(void* p, u32 v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void st_u16(void* p, u16 v) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}

__device__ __forceinline__ void st_u8(void* p, u8 v) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(static_cast<u32>(v)) : "memory");
}

// ---- slots: relaxed at system scope; each 32-bit word stands for itself
// --------------------------

__device__ __forceinline__ Vec16 ld_relaxed_sys_v4(const void* p) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_relaxed_sys_v4(void* p, const Vec16& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.w[0]),
               "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}

__device__ __forceinline__ u32 ld_relaxed_sys_u32(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void st_relaxed_sys_u32(void* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys_u64(void* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void st_release_sys_u32(void* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- control words: relaxed at device scope
// ------------------------------------------------------

__device__ __forceinline__ u64 ld_relaxed_gpu_u64(const void* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u32 ld_relaxed_gpu_u32(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void st_relaxed_gpu_u32(void* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void red_add_relaxed_gpu_u64(void* p, u64 v) {
  asm volatile("red.add.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u32 atom_cas_relaxed_gpu_u32(void* p, u32 expected, u32 desired) {
  u32 old;
  asm volatile("atom.cas.relaxed.gpu.global.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(p), "r"(expected), "r"(desired)
               : "memory");
  return old;
}

// ---- meeting other threads ----------------------------------------------------------------------

__device__ __forceinline__ void block_sync() { __syncthreads(); }

// All threads of the cluster arrive, then wait, in converged warps. Orders no memory: a release
// would wait for every store in flight, over NVLink too.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// A place in the shared memory of this block or of another one of its cluster.
using SharedPlace = u32;

__device__ __forceinline__ SharedPlace shared_place(const void* local) {
  return static_cast<u32>(__cvta_generic_to_shared(local));
}

// The same place in block `cta` of the cluster.
__device__ __forceinline__ SharedPlace cluster_place(SharedPlace place, u32 cta) {
#if __CUDA_ARCH__ >= 900
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(cta));
  return there;
#else
  return place;  // the planner gives these architectures clusters of one block
#endif
}

__device__ __forceinline__ u32 ld_shared_u32(SharedPlace place) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(place) : "memory");
  return v;
}

__device__ __forceinline__ void st_shared_u32(SharedPlace place, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(place), "r"(v) : "memory");
}

// A barrier in shared memory that completes a phase once its one arrival has come and as many bytes
// as that announced have been stored to it. Clusters only.
struct TxBarrier {
  u64 state;
};

// By one thread, before cluster_arrive_relaxed.
__device__ __forceinline__ void tx_barrier_init(SharedPlace barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// The arrival, by one thread of the block a phase; it may come before or after the stores.
__device__ __forceinline__ void tx_barrier_expect(SharedPlace barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// Waits for the end of the phase of that parity; what was stored to the barrier is visible then.
__device__ __forceinline__ void tx_barrier_wait(SharedPlace barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Stores to a block of the cluster and counts 4 bytes on that block's barrier.
__device__ __forceinline__ void st_async_u32(SharedPlace place, SharedPlace barrier, u32 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(place),
      "r"(v), "r"(barrier)
      : "memory");
#endif
}

// Brings the lanes of a warp together. Shuffles do so too, but each of them slowly where the lanes
// have run apart.
__device__ __forceinline__ void warp_sync() { __syncwarp(); }

// All 32 lanes take part.
__device__ __forceinline__ float shfl_xor_f32(float v, u32 mask) {
  return __shfl_xor_sync(0xffffffffu, v, mask);
}

__device__ __forceinline__ u32 shfl_xor_u32(u32 v, u32 mask) {
  return __shfl_xor_sync(0xffffffffu, v, mask);
}

// All 32 lanes take part and get the largest.
__device__ __forceinline__ u32 warp_max_u32(u32 v) { return __reduce_max_sync(0xffffffffu, v); }

// ---- programmatic launch ------------------------------------------------------------------------

__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- arithmetic and conversion; round to nearest even, no flush to zero -------------------------

__device__ __forceinline__ float fma_f32(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// At most 2 units in the last place off.
__device__ __forceinline__ float rsqrt_f32(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, for 2^-100 <= |x| <= 2^100: what the compiler makes of a division, without its branch.
__device__ __forceinline__ float reciprocal_f32(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fma_f32(y, fma_f32(-x, y, 1.0f), y);
}

// fma_f32 into 0..1.
__device__ __forceinline__ float fma_sat_f32(float a, float b, float c) {
  float r;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
  return r;
}

__device__ __forceinline__ float abs_f32(float x) { return fabsf(x); }

// |a| or |b|; a NaN, positive and above all numbers in its bits, where there is one.
__device__ __forceinline__ float max_magnitude_f32(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(abs_f32(a)), "f"(abs_f32(b)));
  return r;
}

// Into -most..most; a NaN stays one.
__device__ __forceinline__ float clamp_f32(float x, float most) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-most));
  return x;
}

// Four of the eight bytes of a (0 to 3) and b (4 to 7), one for each nibble of `which`.
__device__ __forceinline__ u32 byte_perm(u32 a, u32 b, u32 which) {
  return __byte_perm(a, b, which);
}

__device__ __forceinline__ float as_f32(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 as_u32(float x) { return __float_as_uint(x); }

__device__ __forceinline__ u32 pack_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ u32 pack_f16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float unpack_f16(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// x * 1 + 0 in each half: -0.0 becomes +0.0, a NaN the canonical NaN, all else stays.
__device__ __forceinline__ u32 drop_negative_zero_bf16x2(u32 x) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0x3f803f80u), "r"(0u));
  return r;
}

__device__ __forceinline__ u32 drop_negative_zero_f16x2(u32 x) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(0x3c003c00u), "r"(0u));
  return r;
}

__device__ __forceinline__ u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }

}  // namespace ptx
}  // namespace moe_ar

#include <moe_ar/codecs.cuh>

namespace moe_ar {
namespace ptx {

// Two codes, the first in the low byte.
__device__ __forceinline__ u32 pack_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
#else
  return soft::e4m3(low) | soft::e4m3(high) << 8;
#endif
}

// The value of the code in the low byte.
__device__ __forceinline__ float unpack_e4m3(u32 code) {
#if __CUDA_ARCH__ >= 890
  float x;
  asm("{\n\t.reg .b32 pair;\n\t.reg .b16 low, high;\n\t"
      "cvt.rn.f16x2.e4m3x2 pair, %1;\n\t"
      "mov.b32 {low, high}, pair;\n\t"
      "cvt.f32.f16 %0, low;\n\t}"
      : "=f"(x)
      : "h"(static_cast<u16>(code)));
  return x;
#else
  return soft::e4m3_value(code & 0xff);
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define MOE_AR_CONVERTS_FP4 1
#endif

// Codes of four numbers that are not negative, the first in the low half of the low byte.
__device__ __forceinline__ u32 pack_e2m1x4(const float* x) {
#ifdef MOE_AR_CONVERTS_FP4
  u16 r;
  asm("{\n\t.reg .b8 low, high;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e2m1x2.f32 high, %4, %3;\n\t"
      "mov.b16 %0, {low, high};\n\t}"
      : "=h"(r)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
  return r;
#else
  return soft::e2m1x4(x);
#endif
}

// ---- time ---------------------------------------------------------------------------------------

__device__ __forceinline__ u64 globaltimer_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

// Between two polls. The hardware needs nothing; the emulator lets other threads run.
__device__ __forceinline__ void spin_pause() {}

}  // namespace ptx
}  // namespace moe_ar
