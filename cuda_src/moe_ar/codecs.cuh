// Small number formats in software, for machines that do not convert: included by ptx.cuh, whose
// primitives they stand behind, so that they are the same on GPUs and in the emulator. Rounding is
// to nearest even and saturates, but for UE8M0; infinities are large numbers. Without branches.
#pragma once

namespace moe_ar::soft {

constexpr u32 kInfinity = 0x7f800000u;

// 4 bits of exponent, 3 of fraction, largest 448. A NaN is 0x7f.
__device__ __forceinline__ u32 e4m3(float x) {
  const u32 sign = ptx::as_u32(x) >> 24 & 0x80;
  const u32 all = ptx::as_u32(x) & 0x7fffffffu;
  const u32 bits = all < 0x43e00000u ? all : 0x43e00000u;  // 448
  const u32 normal = (bits - (120u << 23) + 0x7ffff + (bits >> 20 & 1)) >> 20;
  // Below 2^-6 it counts in units of 2^-9, as a float does between 2^14 and 2^15.
  const u32 small = ptx::as_u32(ptx::as_f32(bits) + 16384.0f) - ptx::as_u32(16384.0f);
  const u32 code = sign | (bits < 0x3c800000u ? small : normal);
  return all > kInfinity ? 0x7f : code;
}

// Codes of four numbers that are not negative, the first in the low half of the low byte. 2 bits of
// exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
__device__ __forceinline__ u32 e2m1x4(const float* x) {
  // Added to this a float is rounded to a whole number, to the even one of two.
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23
  u32 codes = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    // Codes count in steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6: four, two and one of them.
    float code = ptx::fma_f32(ptx::fma_sat_f32(x[i], 0.5f, 0.0f), 4.0f, kWhole);
    code = ptx::fma_f32(ptx::fma_sat_f32(x[i], 0.5f, -1.0f), 2.0f, code);
    code += ptx::fma_sat_f32(x[i], 0.5f, -2.0f);
    codes = codes * 16 + (ptx::as_u32(code) - ptx::as_u32(kWhole));
  }
  return codes;
}

__device__ __forceinline__ float e4m3_value(u32 code) {
  const u32 sign = (code & 0x80) << 24;
  if ((code & 0x7f) == 0x7f) return ptx::as_f32(0x7fffffffu);
  // A float that has these bits on top of its own is 2^120 too small, subnormals too.
  return ptx::as_f32(sign | (code & 0x7f) << 20) * 0x1p120f;
}

}  // namespace moe_ar::soft
