// moe_ar/ptx.cuh for the CPU emulator: the same primitives, and the language's own words.
//
// Weak accesses are plain, so ThreadSanitizer sees their races; slots and control words are
// atomics. In a preemptive launch other threads may run at every access and between the words of a
// slot, whose order is then random too.
#pragma once

#include <emulator.h>
#include <time.h>

#include <bit>
#include <cmath>
#include <typeinfo>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

// Followed by the body, which sees `const type& params`. The kernel's symbol takes the address of
// its parameters: what moe_ar_emulator_launch calls.
#define MOE_AR_DEFINE_KERNEL(name, max_threads, type, params)                          \
  static void name(const type& params);                                                \
  MOE_AR_EMULATOR_API void name(const void* p) { name(*static_cast<const type*>(p)); } \
  static void name(const type& params)

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

namespace ptx {

// ---- where am I ---------------------------------------------------------------------------------

inline u32 thread_index() { return emulator::state.thread->thread_index; }
inline u32 block_threads() { return emulator::state.thread->block_threads; }
inline u32 block_index() { return emulator::state.thread->block_index; }
inline u32 grid_blocks() { return emulator::state.thread->grid_blocks; }

template <class T>
inline T settled(T value) {
  return value;
}

inline u64 mad_wide(u32 a, u32 b, u64 base) { return base + u64{a} * b; }

template <class T>
inline T* at(T* base, u32 a, u32 b) {
  return reinterpret_cast<T*>(mad_wide(a, b, reinterpret_cast<u64>(base)));
}

// Shared memory of this block, as one struct; NaN until written.
template <class T>
inline T& block_shared() {
  static_assert(sizeof(T) <= emulator::kSharedBytes && alignof(T) <= 128);
  return *static_cast<T*>(emulator::block_shared(sizeof(T), &typeid(T)));
}

// ---- building blocks of this file ---------------------------------------------------------------

// Words of memory that other code sees as other types.
using Word16 = u16 __attribute__((may_alias));
using Word32 = u32 __attribute__((may_alias));
using Word64 = u64 __attribute__((may_alias));
typedef u32 Word128 __attribute__((vector_size(16), may_alias));

inline void preempt() {
  if (emulator::state.preemptive) [[unlikely]]
    emulator::preempt();
}

template <class T>
inline T* aligned(const void* p) {
  if (reinterpret_cast<std::uintptr_t>(p) % sizeof(T)) [[unlikely]] {
    emulator::misaligned(p, sizeof(T));
  }
  return static_cast<T*>(const_cast<void*>(p));
}

template <class T>
inline T load(const void* p) {
  preempt();
  return *aligned<T>(p);
}

template <class T>
inline T load_atomic(const void* p) {
  preempt();
  return __atomic_load_n(aligned<T>(p), __ATOMIC_RELAXED);
}

template <class T>
inline void store_atomic(void* p, T v, int order) {
  preempt();
  emulator::note_progress();
  __atomic_store_n(aligned<T>(p), v, order);
  preempt();
}

// Calls access(word) for the four words of 16 bytes, each of which stands for itself.
template <class Access>
inline void each_word(Access access) {
  if (!emulator::state.preemptive) [[likely]] {
    for (u32 word = 0; word < 4; ++word) access(word);
    return;
  }
  const u32 first = emulator::preempt();
  for (u32 i = 0; i < 4; ++i) {
    access((first + i) % 4);
    emulator::preempt();
  }
}

// ---- weak global memory: inputs and outputs -----------------------------------------------------

inline Vec16 ld_v4(const void* p) { return std::bit_cast<Vec16>(load<Word128>(p)); }
inline Vec16 ld_once_v4(const void* p) { return ld_v4(p); }
inline u32 ld_u32(const void* p) { return load<Word32>(p); }
inline u16 ld_u16(const void* p) { return load<Word16>(p); }
inline u64 ld_u64(const void* p) { return load<Word64>(p); }

inline void st_v4(void* p, const Vec16& v) {
  preempt();
  emulator::note_progress();
  *aligned<Word128>(p) = std::bit_cast<Word128>(v);
}

template <class Word>
inline void store(void* p, Word v) {
  preempt();
  emulator::note_progress();
  *aligned<Word>(p) = v;
}

inline void st_v2(void* p, u32 first, u32 second) { store<Word64>(p, u64{second} << 32 | first); }
inline void st_u32(void* p, u32 v) { store<Word32>(p, v); }
inline void st_u16(void* p, u16 v) { store<Word16>(p, v); }
inline void st_u8(void* p, u8 v) { store<u8>(p, v); }

// ---- slots: relaxed at system scope; each 32-bit word stands for itself -------------------------

inline Vec16 ld_relaxed_sys_v4(const void* p) {
  Vec16 v;
  const auto* words = reinterpret_cast<Word32*>(aligned<Word128>(p));
  each_word([&](u32 i) { v.w[i] = __atomic_load_n(words + i, __ATOMIC_RELAXED); });
  return v;
}

inline void st_relaxed_sys_v4(void* p, const Vec16& v) {
  auto* words = reinterpret_cast<Word32*>(aligned<Word128>(p));
  emulator::note_progress();
  each_word([&](u32 i) { __atomic_store_n(words + i, v.w[i], __ATOMIC_RELAXED); });
}

inline u32 ld_relaxed_sys_u32(const void* p) { return load_atomic<Word32>(p); }
inline void st_relaxed_sys_u32(void* p, u32 v) { store_atomic<Word32>(p, v, __ATOMIC_RELAXED); }
inline void st_relaxed_sys_u64(void* p, u64 v) { store_atomic<Word64>(p, v, __ATOMIC_RELAXED); }
inline void st_release_sys_u32(void* p, u32 v) { store_atomic<Word32>(p, v, __ATOMIC_RELEASE); }

// ---- control words: relaxed at device scope -----------------------------------------------------

inline u64 ld_relaxed_gpu_u64(const void* p) { return load_atomic<Word64>(p); }
inline u32 ld_relaxed_gpu_u32(const void* p) { return load_atomic<Word32>(p); }
inline void st_relaxed_gpu_u32(void* p, u32 v) { store_atomic<Word32>(p, v, __ATOMIC_RELAXED); }

inline void red_add_relaxed_gpu_u64(void* p, u64 v) {
  preempt();
  emulator::note_progress();
  __atomic_fetch_add(aligned<Word64>(p), v, __ATOMIC_RELAXED);
  preempt();
}

inline u32 atom_cas_relaxed_gpu_u32(void* p, u32 expected, u32 desired) {
  preempt();
  emulator::note_progress();
  __atomic_compare_exchange_n(aligned<Word32>(p), &expected, desired, false, __ATOMIC_RELAXED,
                              __ATOMIC_RELAXED);
  preempt();
  return expected;
}

// ---- meeting other threads ----------------------------------------------------------------------

inline void block_sync() { emulator::block_sync(); }

// All threads of the cluster arrive, then wait. Orders no memory.
inline void cluster_arrive_relaxed() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }

// A place in the shared memory of this block or of another one of its cluster.
struct SharedPlace {
  u8* address;

  SharedPlace operator+(u32 bytes) const { return {address + bytes}; }
};

inline SharedPlace shared_place(const void* local) {
  return {static_cast<u8*>(const_cast<void*>(local))};
}

// The same place in block `cta` of the cluster.
inline SharedPlace cluster_place(SharedPlace place, u32 cta) {
  return {static_cast<u8*>(emulator::cluster_address(place.address, cta))};
}

inline u32 ld_shared_u32(SharedPlace place) {
  emulator::require_own(place.address);
  return load<Word32>(place.address);
}

inline void st_shared_u32(SharedPlace place, u32 v) {
  emulator::require_own(place.address);
  preempt();
  emulator::note_progress();
  *aligned<Word32>(place.address) = v;
}

// A barrier in shared memory that completes a phase once its one arrival has come and as many bytes
// as that announced have been stored to it.
using TxBarrier = emulator::TxBarrier;

inline TxBarrier* tx_barrier(SharedPlace place) {
  return reinterpret_cast<TxBarrier*>(place.address);
}

// By one thread, before cluster_arrive_relaxed.
inline void tx_barrier_init(SharedPlace barrier) { emulator::tx_init(tx_barrier(barrier)); }

// The arrival, by one thread of the block a phase; it may come before or after the stores.
inline void tx_barrier_expect(SharedPlace barrier, u32 bytes) {
  preempt();
  emulator::tx_expect(tx_barrier(barrier), bytes);
}

// Waits for the end of the phase of that parity; what was stored to the barrier is visible then.
inline void tx_barrier_wait(SharedPlace barrier, u32 parity) {
  preempt();
  emulator::tx_wait(tx_barrier(barrier), parity);
}

// Stores to a block of the cluster and counts 4 bytes on that block's barrier.
inline void st_async_u32(SharedPlace place, SharedPlace barrier, u32 v) {
  preempt();
  emulator::require_running(place.address);
  *aligned<Word32>(place.address) = v;
  preempt();
  emulator::tx_complete(tx_barrier(barrier), place.address, sizeof v);
}

// All 32 lanes take part; orders memory among them.
inline void warp_sync() { emulator::warp_sync(); }

// All 32 lanes take part. Orders no memory.
inline float shfl_xor_f32(float v, u32 mask) {
  return std::bit_cast<float>(emulator::shfl_xor(std::bit_cast<u32>(v), mask));
}
inline u32 shfl_xor_u32(u32 v, u32 mask) { return emulator::shfl_xor(v, mask); }

// All 32 lanes take part and get the largest.
inline u32 warp_max_u32(u32 v) {
  for (u32 mask = 16; mask > 0; mask /= 2) {
    const u32 other = shfl_xor_u32(v, mask);
    v = v > other ? v : other;
  }
  return v;
}

// ---- programmatic launch ------------------------------------------------------------------------

inline void pdl_wait() { emulator::pdl_wait(); }
inline void pdl_trigger() { emulator::pdl_trigger(); }

// ---- arithmetic and conversion; round to nearest even, no flush to zero -------------------------

inline float fma_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float rsqrt_f32(float x) { return static_cast<float>(1.0 / std::sqrt(double{x})); }

// 1 / x, for 2^-100 <= |x| <= 2^100.
inline float reciprocal_f32(float x) { return 1.0f / x; }

// fma_f32 into 0..1.
inline float fma_sat_f32(float a, float b, float c) {
  const float x = fma_f32(a, b, c);
  return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f;
}

inline float abs_f32(float x) { return __builtin_fabsf(x); }

// |a| or |b|; a NaN, positive and above all numbers in its bits, where there is one.
inline float max_magnitude_f32(float a, float b) {
  if (a != a || b != b) return std::bit_cast<float>(0x7fffffffu);
  return __builtin_fmaxf(abs_f32(a), abs_f32(b));
}

// Into -most..most; a NaN stays one.
inline float clamp_f32(float x, float most) { return x > most ? most : x < -most ? -most : x; }

// Four of the eight bytes of a (0 to 3) and b (4 to 7), one for each nibble of `which`.
inline u32 byte_perm(u32 a, u32 b, u32 which) {
  const u64 bytes = u64{b} << 32 | a;
  u32 r = 0;
  for (u32 i = 0; i < 4; ++i)
    r |= static_cast<u32>(bytes >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}

inline float as_f32(u32 bits) { return std::bit_cast<float>(bits); }
inline u32 as_u32(float x) { return std::bit_cast<u32>(x); }

constexpr u32 kCanonicalNaN = 0x7fff;  // of both 16-bit types

inline u32 to_bf16(float x) {
  const u32 bits = as_u32(x);
  if (x != x) return kCanonicalNaN;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline u32 to_f16(float x) {
  const u32 sign = (as_u32(x) >> 16) & 0x8000;
  const u32 bits = as_u32(x) & 0x7fffffff;
  if (x != x) return kCanonicalNaN;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
  // Below 2^-14 a half counts in units of 2^-24, as a float does between 0.5 and 1.
  if (bits < 0x38800000) return sign | (as_u32(as_f32(bits) + 0.5f) - as_u32(0.5f));
  const u32 rebiased = bits - (112u << 23);
  return sign | ((rebiased + 0xfff + ((bits >> 13) & 1)) >> 13);
}

inline u32 pack_bf16x2(float low, float high) { return to_bf16(high) << 16 | to_bf16(low); }
inline u32 pack_f16x2(float low, float high) { return to_f16(high) << 16 | to_f16(low); }

inline float unpack_f16(u16 bits) {
  const u32 sign = (bits & 0x8000u) << 16;
  const u32 magnitude = bits & 0x7fffu;
  if (magnitude > 0x7c00) return as_f32(0x7fffffff);
  if (magnitude == 0x7c00) return as_f32(sign | 0x7f800000);
  if (magnitude < 0x400) return as_f32(sign | as_u32(static_cast<float>(magnitude) * 0x1p-24f));
  return as_f32(sign | ((magnitude << 13) + (112u << 23)));
}

// In each half -0.0 becomes +0.0, a NaN (above `infinity` without its sign) the canonical NaN.
inline u32 drop_negative_zero(u32 x, u32 infinity) {
  const auto half = [infinity](u32 h) {
    if ((h & 0x7fff) > infinity) return kCanonicalNaN;
    return h == 0x8000 ? 0 : h;
  };
  return half(x >> 16) << 16 | half(x & 0xffff);
}

inline u32 drop_negative_zero_bf16x2(u32 x) { return drop_negative_zero(x, 0x7f80); }
inline u32 drop_negative_zero_f16x2(u32 x) { return drop_negative_zero(x, 0x7c00); }

inline u32 max_u32(u32 a, u32 b) { return a > b ? a : b; }

}  // namespace ptx
}  // namespace moe_ar

#include <moe_ar/codecs.cuh>

namespace moe_ar {
namespace ptx {

// Two codes, the first in the low byte.
inline u32 pack_e4m3x2(float low, float high) { return soft::e4m3(low) | soft::e4m3(high) << 8; }

// The value of the code in the low byte.
inline float unpack_e4m3(u32 code) { return soft::e4m3_value(code & 0xff); }

// Codes of four numbers that are not negative, the first in the low half of the low byte.
inline u32 pack_e2m1x4(const float* x) { return soft::e2m1x4(x); }

// ---- time ---------------------------------------------------------------------------------------

// One clock for all processes of the machine.
inline u64 globaltimer_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<u64>(t.tv_sec) * 1'000'000'000 + static_cast<u64>(t.tv_nsec);
}

// Between two polls.
inline void spin_pause() { emulator::spin_pause(); }

}  // namespace ptx
}  // namespace moe_ar
