// Producer: one rank's part of a token, the weighted sum of what each of its active experts made of
// it.
#pragma once

#include <moe_ar/finalize.cuh>

namespace moe_ar {

// As Finalize, with a row and a float32 scale from every expert: `top_k` is their number. Expert
// e's row and scale of token t are number e * token_num + t.
template <int kInFlight>
class Reduction {
 public:
  __device__ __forceinline__ Reduction(const Params& p, int token, int column) {
    const u32 column_bytes = static_cast<u32>(column) * sizeof(Vec16);
    row_bytes_ = ptx::settled(static_cast<u32>(p.row_vectors) * static_cast<u32>(sizeof(Vec16)));
    experts_ = ptx::settled(p.top_k);
    token_num_ = ptx::settled(static_cast<u32>(p.token_num));
    token_ = ptx::settled(static_cast<u32>(token));
    rows_ = ptx::settled(static_cast<const u8*>(p.allreduce_in) + column_bytes);
    scale_ = ptx::settled(static_cast<const float*>(p.route_scale));
    const u8* own = static_cast<const u8*>(p.shared_expert);
    own_ = ptx::settled(own ? ptx::at(own + column_bytes, token_, row_bytes_) : nullptr);
  }

  // partial = (sum over experts of scale * row) + token input, as Finalize sums routes.
  __device__ __forceinline__ void operator()(u32 ahead, float (&partial)[kElements]) const {
    float sum[kElements] = {};
    Vec16 own = {};
    if (own_ != nullptr) own = ptx::ld_once_v4(own_ + ahead);
    for (int begin = 0; begin < experts_; begin += kRouteChunk) {
      float pair[kRouteChunk / 2][kElements];
#pragma unroll
      for (int first = 0; first < kRouteChunk; first += kInFlight) {
        Vec16 row[kInFlight];
        float scale[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          const int expert = begin + first + k;
          const u32 number = static_cast<u32>(expert) * token_num_ + token_;
          row[k] = Vec16{};
          scale[k] = 0.0f;
          if (expert < experts_) {
            row[k] = ptx::ld_once_v4(ptx::at(rows_ + ahead, number, row_bytes_));
            scale[k] = ptx::as_f32(ptx::ld_u32(scale_ + number));
          }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; k += 2) {
          weigh_pair(scale + k, row + k, pair[(first + k) / 2]);
        }
      }
      add_pairs(pair, sum);
    }
    unpack<kDType>(own, partial);
#pragma unroll
    for (int i = 0; i < kElements; ++i) partial[i] += sum[i];
  }

 private:
  u32 row_bytes_;
  int experts_;
  u32 token_num_;
  u32 token_;
  const u8* rows_;      // the vector's place in row 0
  const float* scale_;  // of all experts and tokens
  const u8* own_;       // the vector of the token input, or null
};

}  // namespace moe_ar
