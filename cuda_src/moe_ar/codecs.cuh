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

// 2 bits of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6. A NaN is 6.
__device__ __forceinline__ u32 e2m1(float x) {
  const u32 sign = ptx::as_u32(x) >> 28 & 8;
  const u32 all = ptx::as_u32(x) & 0x7fffffffu;
  const u32 bits = all < 0x40c00000u ? all : 0x40c00000u;  // 6
  const u32 normal = (bits - (126u << 23) + 0x1fffff + (bits >> 22 & 1)) >> 22;
  // Below 1 it counts in units of 0.5, as a float does between 2^22 and 2^23.
  const u32 small = ptx::as_u32(ptx::as_f32(bits) + 4194304.0f) - ptx::as_u32(4194304.0f);
  const u32 code = bits < 0x3f800000u ? small : normal;
  return all > kInfinity ? 7 : sign | code;
}

// The exponent of the least power of two that is not below x, plus 127: at most 254, 255 for NaN.
// x is not negative.
__device__ __forceinline__ u32 ue8m0_up(float x) {
  const u32 bits = ptx::as_u32(x) & 0x7fffffffu;
  if (bits > kInfinity) return 0xff;
  if (bits <= 0x400000u) return 0;  // 2^-127, half of the least normal float
  return bits > 0x7f000000u ? 0xfe : (bits + 0x7fffff) >> 23;
}

__device__ __forceinline__ float e4m3_value(u32 code) {
  const u32 sign = (code & 0x80) << 24;
  if ((code & 0x7f) == 0x7f) return ptx::as_f32(0x7fffffffu);
  // A float that has these bits on top of its own is 2^120 too small, subnormals too.
  return ptx::as_f32(sign | (code & 0x7f) << 20) * 0x1p120f;
}

}  // namespace moe_ar::soft
