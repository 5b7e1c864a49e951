// Epilogue: from a total to allreduce_out, residual_out, norm_out and what is quantised of it, a
// vector at a time.
#pragma once

#include <moe_ar/params.cuh>
#include <moe_ar/quant.cuh>
#include <moe_ar/rmsnorm.cuh>
#include <moe_ar/vec.cuh>

namespace moe_ar {

// A vector's place in every array of rows of T.
__device__ __forceinline__ u64 row_offset(const Params& p, int token, int column) {
  return ptx::mad_wide(static_cast<u32>(token), static_cast<u32>(p.row_vectors) * sizeof(Vec16),
                       static_cast<u32>(column) * sizeof(Vec16));
}

__device__ __forceinline__ Vec16 load_residual(const Params& p, u64 offset) {
  if (p.residual_in == nullptr) return Vec16{};
  return ptx::ld_once_v4(static_cast<const u8*>(p.residual_in) + offset);
}

__device__ __forceinline__ void store_vector(void* base, u64 offset, const Vec16& v) {
  ptx::st_v4(static_cast<u8*>(base) + offset, v);
}

// Adds the residual and stores allreduce_out and residual_out. Returns the residual as rounded,
// which is what the norm is taken of. With a wire of T the total is rounded before the add.
__device__ __forceinline__ Vec16 store_residual(const Params& p, u64 offset,
                                                float (&total)[kElements],
                                                const Vec16& residual_in) {
  const Vec16 rounded_total = pack<kDType>(total);
  if (p.allreduce_out != nullptr) store_vector(p.allreduce_out, offset, rounded_total);
  if constexpr (kCommDType == kDType) unpack<kDType>(rounded_total, total);
  Vec16 residual = rounded_total;
  if (p.residual_in != nullptr) {
    float addend[kElements];
    unpack<kDType>(residual_in, addend);
#pragma unroll
    for (int i = 0; i < kElements; ++i) total[i] += addend[i];
    residual = pack<kDType>(total);
  }
  if (p.residual_out != nullptr) store_vector(p.residual_out, offset, residual);
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

// gamma of a column, as it lies in memory, and the scale that the launch is given: nothing waits
// for the loads until the norm does.
struct Gamma {
  Vec16 v[kElements / 4];
  float given;

  __device__ __forceinline__ void load(const Params& p, int column) {
    const bool wide = p.flags & kGammaIsFloat32;
    const u8* from = static_cast<const u8*>(p.rms_gamma) +
                     column * (wide ? kElements * sizeof(float) : sizeof(Vec16));
    v[0] = ptx::ld_v4(from);
    if (kElements > 4 && wide) v[kElements / 4 - 1] = ptx::ld_v4(from + sizeof(Vec16));
    if constexpr (kGivenScale) given = given_scale(p);
  }

  __device__ __forceinline__ void get(const Params& p, float (&x)[kElements]) const {
    if (kElements > 4 && p.flags & kGammaIsFloat32) {
#pragma unroll
      for (int i = 0; i < kElements; i += 4) unpack<DType::kFloat32>(v[i / 4], x + i);
    } else {
      unpack<kDType>(v[0], x);
    }
  }
};

// Zeros outside of the row.
__device__ __forceinline__ Gamma gamma_of(const Params& p, int column, bool inside) {
  Gamma gamma = {};
  if (inside) gamma.load(p, column);
  return gamma;
}

// A vector of the norm, in steps. Those before `begin` need no totals of the row, so that they can
// be done before those are waited for. Every lane of a warp, those outside of the row too, with
// zeros.
class Norm {
 public:
  __device__ __forceinline__ void place(const Params& p, int token, int column, u64 offset,
                                        bool inside) {
    if constexpr (kQuantises) quantiser_.place(p, token, column, offset, inside);
  }

  __device__ __forceinline__ void weigh(const Params& p, const Vec16& residual,
                                        const Gamma& gamma) {
    float weight[kElements];
    unpack<kDType>(residual, weighted_);
    gamma.get(p, weight);
#pragma unroll
    for (int i = 0; i < kElements; ++i) weighted_[i] *= p.weight_bias + weight[i];
  }

  // The vector's largest magnitude, its bits.
  __device__ __forceinline__ u32 magnitude() const { return ptx::as_u32(largest_of(weighted_)); }

  // `magnitude` is the largest of the vector's block.
  __device__ __forceinline__ void prepare(u32 magnitude, const Gamma& gamma) {
    if constexpr (kQuantises) quantiser_.prepare(ptx::as_f32(magnitude), gamma.given);
  }

  // All of that, at once.
  __device__ __forceinline__ void prepare(const Params& p, int token, int column, u64 offset,
                                          bool inside, const Vec16& residual, const Gamma& gamma) {
    place(p, token, column, offset, inside);
    weigh(p, residual, gamma);
    if constexpr (kQuantises) prepare(largest_of_block(magnitude()), gamma);
  }

  // With the totals first this, then detour for a thread with any vector that is told to take
  // it, then finish.
  __device__ __forceinline__ bool begin(const Params& p, u64 offset, bool inside, float factor,
                                        u32 row_magnitude) {
    float x[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = weighted_[i] * factor;
    const Vec16 norm = pack<kDType>(x);
    if (inside && (!kQuantises || p.norm_out != nullptr)) store_vector(p.norm_out, offset, norm);
    if constexpr (!kQuantises) return true;
    // What lies outside of the row, zeros, sends nobody on the detour.
    return quantiser_.begin(p, norm, factor, ptx::as_f32(row_magnitude)) || !inside;
  }

  __device__ __forceinline__ void detour(const Params& p, float factor) {
    if constexpr (kQuantises) quantiser_.detour(p, factor);
  }

  __device__ __forceinline__ void finish(const Params& p, bool inside) {
    if constexpr (kQuantises) quantiser_.finish(p, inside);
  }

 private:
  float weighted_[kElements];  // residual * (weight_bias + gamma)
  Quantiser quantiser_;
};

// What the norm multiplies by.
__device__ __forceinline__ float norm_factor(const Params& p, const RowTotals& row) {
  return ptx::rsqrt_f32(ptx::fma_f32(row.square_sum, p.inverse_hidden, p.rms_eps));
}

}  // namespace moe_ar
