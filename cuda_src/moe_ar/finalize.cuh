// Producer: one rank's part of a token, gathered from the permuted rows of its experts.
#pragma once

#include <moe_ar/params.cuh>
#include <moe_ar/vec.cuh>

namespace moe_ar {

constexpr int kRouteChunk = 8;  // routes that are summed as one tree

struct Routes {
  u32 index[kRouteChunk];
  float scale[kRouteChunk];
};

// Eight numbers of type D; those from `count` on are `absent` and not read.
template <DType D>
__device__ __forceinline__ void load_eight(const u8* from, int count, bool wide, float absent,
                                           float* x) {
  constexpr int kBytes = 16 / kElementsOf<D>;
  if (wide) {
#pragma unroll
    for (int k = 0; k < kRouteChunk; k += kElementsOf<D>) {
      unpack<D>(ptx::ld_v4(from + k * kBytes), x + k);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRouteChunk; ++k) x[k] = k < count ? load_scalar<D>(from, k) : absent;
  }
}

// Leaf of the tree: scale[0] * row[0] + scale[1] * row[1].
__device__ __forceinline__ void weigh_pair(const float* scale, const Vec16* row,
                                           float (&pair)[kElements]) {
  float low[kElements], high[kElements];
  unpack<kDType>(row[0], low);
  unpack<kDType>(row[1], high);
#pragma unroll
  for (int i = 0; i < kElements; ++i) pair[i] = ptx::fma_f32(scale[1], high[i], scale[0] * low[i]);
}

// The rest of the tree, and the sum over chunks.
__device__ __forceinline__ void add_pairs(const float (&pair)[kRouteChunk / 2][kElements],
                                          float (&sum)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    sum[i] += (pair[0][i] + pair[1][i]) + (pair[2][i] + pair[3][i]);
  }
}

// Gathers vectors of a token from the rows of its experts, `kInFlight` rows at a time: 8 where
// latency counts, 4 where many threads hide it and registers are short.
template <int kInFlight>
class Finalize {
 public:
  // Reads parameters only, so that it may stand before pdl_wait: what the gather needs is then in
  // registers when the inputs are there.
  __device__ __forceinline__ Finalize(const Params& p, int token, int column) : p_(p) {
    const u32 t = static_cast<u32>(token);
    const u32 column_bytes = static_cast<u32>(column) * sizeof(Vec16);
    const u32 scale_bytes = p.flags & kScaleIsFloat32 ? 4 : 16 / kElements;
    row_bytes_ = ptx::settled(static_cast<u32>(p.row_vectors) * static_cast<u32>(sizeof(Vec16)));
    num_rows_ = ptx::settled(p.num_permuted_rows);
    top_k_ = ptx::settled(p.top_k);
    flags_ = ptx::settled(p.flags);
    rows_ = ptx::settled(static_cast<const u8*>(p.allreduce_in) + column_bytes);
    const u8* shared = static_cast<const u8*>(p.shared_expert);
    shared_ = ptx::settled(shared ? ptx::at(shared + column_bytes, t, row_bytes_) : nullptr);
    index_ = ptx::settled(
        ptx::at(static_cast<const u8*>(p.route_index), t, static_cast<u32>(top_k_) * 4));
    const u8* scale = static_cast<const u8*>(p.route_scale);
    scale_ =
        ptx::settled(scale ? ptx::at(scale, t, static_cast<u32>(top_k_) * scale_bytes) : nullptr);
  }

  // partial = routed_scaling_factor * (sum over routes of scale * row) + shared_expert, in float32,
  // not yet rounded. Routes in chunks of 8 by a pairwise tree, chunks in order: the bits depend on
  // nothing else. The vector is the one `ahead` bytes after the constructor's.
  __device__ __forceinline__ void operator()(u32 ahead, float (&partial)[kElements]) const {
    float routed[kElements] = {};
    Vec16 shared = {};
    // In a loop that begins with the routes the compiler has their loads wait for all loads before
    // it, the session's too: 3.35 in place of 3.24 us at 1 token. Elsewhere this way takes too many
    // registers: 15.5 in place of 14.6 us at 256 tokens (both on one H200).
    if constexpr (kInFlight == kRouteChunk) {
      Routes routes = load_routes(0);
      if (shared_ != nullptr) shared = ptx::ld_once_v4(shared_ + ahead);
#pragma unroll 1
      for (int begin = kRouteChunk;; begin += kRouteChunk) {
        add_chunk(routes, ahead, routed);
        if (begin >= top_k_) break;
        routes = load_routes(begin);
      }
    } else {
      for (int begin = 0; begin < top_k_; begin += kRouteChunk) {
        const Routes routes = load_routes(begin);
        if (begin == 0 && shared_ != nullptr) shared = ptx::ld_once_v4(shared_ + ahead);
        add_chunk(routes, ahead, routed);
      }
    }
    unpack<kDType>(shared, partial);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      partial[i] = ptx::fma_f32(p_.routed_scaling_factor, routed[i], partial[i]);
    }
  }

 private:
  __device__ __forceinline__ void add_chunk(Routes routes, u32 ahead,
                                            float (&sum)[kElements]) const {
    float pair[kRouteChunk / 2][kElements];
#pragma unroll
    for (int first = 0; first < kRouteChunk; first += kInFlight) {
      Vec16 row[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        row[k] = Vec16{};
        if (routes.index[first + k] < num_rows_) {
          row[k] = ptx::ld_once_v4(ptx::at(rows_ + ahead, routes.index[first + k], row_bytes_));
        } else {
          routes.scale[first + k] = 0.0f;  // it may be NaN
        }
      }
#pragma unroll
      for (int k = 0; k < kInFlight; k += 2) {
        weigh_pair(routes.scale + first + k, row + k, pair[(first + k) / 2]);
      }
    }
    add_pairs(pair, sum);
  }

  // The token's routes from `begin` on; past its last they are out of range.
  __device__ __forceinline__ Routes load_routes(int begin) const {
    Routes routes;
    const int count = top_k_ - begin;
    const bool wide = flags_ & kVectorRoutes;
    float index[kRouteChunk];  // int32 bits
    load_eight<DType::kFloat32>(index_ + begin * 4, count, wide, ptx::as_f32(0xffffffffu), index);
#pragma unroll
    for (int k = 0; k < kRouteChunk; ++k) routes.index[k] = ptx::as_u32(index[k]);
    if (scale_ == nullptr) {
#pragma unroll
      for (float& x : routes.scale) x = 1.0f;
    } else if (flags_ & kScaleIsFloat32) {
      load_eight<DType::kFloat32>(scale_ + begin * 4, count, wide, 0.0f, routes.scale);
    } else {
      load_eight<kDType>(scale_ + begin * (16 / kElements), count, wide, 0.0f, routes.scale);
    }
    return routes;
  }

  const Params& p_;
  u32 row_bytes_;
  u32 num_rows_;
  int top_k_;
  u32 flags_;
  const u8* rows_;    // the vector's place in row 0
  const u8* shared_;  // the vector, or null
  const u8* index_;   // the token's first route
  const u8* scale_;   // its scale, or null
};

}  // namespace moe_ar
