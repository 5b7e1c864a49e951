// Epilogue: from a total to allreduce_out, residual_out and norm_out, a vector at a time.
#pragma once

#include <moe_ar/params.cuh>
#include <moe_ar/vec.cuh>

namespace moe_ar {

__device__ __forceinline__ u8* row_vector(void* base, const Params& p, int token, int column) {
  return static_cast<u8*>(base) +
         (static_cast<i64>(token) * p.row_vectors + column) * static_cast<i64>(sizeof(Vec16));
}

__device__ __forceinline__ const u8* row_vector(const void* base, const Params& p, int token,
                                                int column) {
  return row_vector(const_cast<void*>(base), p, token, column);
}

// Adds the residual and stores allreduce_out and residual_out. Returns the residual as rounded,
// which is what the norm is taken of. With a wire of T the total is rounded before the add.
__device__ __forceinline__ Vec16 store_residual(const Params& p, int token, int column,
                                                float (&total)[kElements],
                                                const Vec16& residual_in) {
  const Vec16 rounded_total = pack<kDType>(total);
  if (p.allreduce_out != nullptr) {
    ptx::st_v4(row_vector(p.allreduce_out, p, token, column), rounded_total);
  }
  if constexpr (kCommDType == kDType) unpack<kDType>(rounded_total, total);
  Vec16 residual = rounded_total;
  if (p.residual_in != nullptr) {
    float addend[kElements];
    unpack<kDType>(residual_in, addend);
#pragma unroll
    for (int i = 0; i < kElements; ++i) total[i] += addend[i];
    residual = pack<kDType>(total);
  }
  if (p.residual_out != nullptr) {
    ptx::st_v4(row_vector(p.residual_out, p, token, column), residual);
  }
  return residual;
}

__device__ __forceinline__ float square_sum(const Vec16& residual) {
  float x[kElements];
  unpack<kDType>(residual, x);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum = ptx::fma_f32(x[i], x[i], sum);
  return sum;
}

// weight_bias + gamma of a column.
struct Weight {
  float x[kElements];

  __device__ __forceinline__ void load(const Params& p, int column) {
    if (p.flags & kGammaIsFloat32) {
      const u8* gamma = static_cast<const u8*>(p.rms_gamma) + column * kElements * sizeof(float);
#pragma unroll
      for (int i = 0; i < kElements; i += 4) {
        unpack<DType::kFloat32>(ptx::ld_v4(gamma + i * sizeof(float)), x + i);
      }
    } else {
      unpack<kDType>(ptx::ld_v4(static_cast<const u8*>(p.rms_gamma) + column * sizeof(Vec16)), x);
    }
  }
};

__device__ __forceinline__ void store_norm(const Params& p, int token, int column,
                                           const Vec16& residual, const Weight& gamma,
                                           float row_square_sum) {
  const float rs = ptx::rsqrt_f32(ptx::fma_f32(row_square_sum, p.inverse_hidden, p.rms_eps));
  float x[kElements];
  unpack<kDType>(residual, x);
#pragma unroll
  for (int i = 0; i < kElements; ++i) x[i] = (x[i] * (p.weight_bias + gamma.x[i])) * rs;
  ptx::st_v4(row_vector(p.norm_out, p, token, column), pack<kDType>(x));
}

}  // namespace moe_ar
