// 16-byte vectors of T, and the payload in which a vector of T travels as C.
#pragma once

#include <moe_ar/config.cuh>
#include <moe_ar/ptx.cuh>

namespace moe_ar {

template <DType D>
inline constexpr int kElementsOf = D == DType::kFloat32 ? 4 : 8;  // in 16 bytes

inline constexpr int kElements = kElementsOf<kDType>;                     // of a vector of T
inline constexpr int kWireVectors = kElements / kElementsOf<kCommDType>;  // 1, or 2 when T grows

// body(0), body(1), ...: a loop that no compiler leaves rolled, where registers are indexed.
template <int kCount, int kFirst = 0, class Body>
__device__ __forceinline__ void each(const Body& body) {
  if constexpr (kFirst < kCount) {
    body(kFirst);
    each<kCount, kFirst + 1>(body);
  }
}

template <DType D>
__device__ __forceinline__ void unpack(const Vec16& v, float* x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (D == DType::kFloat32) {
      x[i] = ptx::as_f32(v.w[i]);
    } else if constexpr (D == DType::kBFloat16) {
      x[2 * i] = ptx::as_f32(v.w[i] << 16);
      x[2 * i + 1] = ptx::as_f32(v.w[i] & 0xffff0000u);
    } else {
      x[2 * i] = ptx::unpack_f16(static_cast<u16>(v.w[i]));
      x[2 * i + 1] = ptx::unpack_f16(static_cast<u16>(v.w[i] >> 16));
    }
  }
}

// Rounds to nearest even.
template <DType D>
__device__ __forceinline__ Vec16 pack(const float* x) {
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (D == DType::kFloat32) {
      v.w[i] = ptx::as_u32(x[i]);
    } else if constexpr (D == DType::kBFloat16) {
      v.w[i] = ptx::pack_bf16x2(x[2 * i], x[2 * i + 1]);
    } else {
      v.w[i] = ptx::pack_f16x2(x[2 * i], x[2 * i + 1]);
    }
  }
  return v;
}

template <DType D>
__device__ __forceinline__ float load_scalar(const void* base, i64 index) {
  if constexpr (D == DType::kFloat32) {
    return ptx::as_f32(ptx::ld_u32(static_cast<const u32*>(base) + index));
  } else {
    const u16 bits = ptx::ld_u16(static_cast<const u16*>(base) + index);
    if constexpr (D == DType::kBFloat16) return ptx::as_f32(static_cast<u32>(bits) << 16);
    return ptx::unpack_f16(bits);
  }
}

// A vector of T as it travels: rounded to C, every -0.0 made +0.0, so that no word equals the
// sentinel.
struct Payload {
  Vec16 v[kWireVectors];
};

__device__ __forceinline__ Payload to_wire(const float (&x)[kElements]) {
  Payload payload;
#pragma unroll
  for (int plane = 0; plane < kWireVectors; ++plane) {
    Vec16 v = pack<kCommDType>(x + plane * kElementsOf<kCommDType>);
#pragma unroll
    for (u32& word : v.w) {
      if constexpr (kCommDType == DType::kBFloat16) {
        word = ptx::drop_negative_zero_bf16x2(word);
      } else if constexpr (kCommDType == DType::kFloat16) {
        word = ptx::drop_negative_zero_f16x2(word);
      } else {
        word = word == 0x80000000u ? 0u : word;
      }
    }
    payload.v[plane] = v;
  }
  return payload;
}

__device__ __forceinline__ void from_wire(const Payload& payload, float (&x)[kElements]) {
#pragma unroll
  for (int plane = 0; plane < kWireVectors; ++plane) {
    unpack<kCommDType>(payload.v[plane], x + plane * kElementsOf<kCommDType>);
  }
}

}  // namespace moe_ar
