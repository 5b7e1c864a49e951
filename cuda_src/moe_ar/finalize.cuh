// Producer: one rank's part of a token, gathered from the permuted rows of its experts.
#pragma once

#include <moe_ar/params.cuh>
#include <moe_ar/vec.cuh>

namespace moe_ar {

constexpr int kRouteChunk = 8;  // routes whose rows are in flight together

template <DType D>
__device__ __forceinline__ void load_scales(const void* base, i64 first, int count, bool wide,
                                            float (&scale)[kRouteChunk]) {
  const u8* scales = static_cast<const u8*>(base) + first * (16 / kElementsOf<D>);
  if (wide) {
#pragma unroll
    for (int k = 0; k < kRouteChunk; k += kElementsOf<D>) {
      unpack<D>(ptx::ld_v4(scales + k * (16 / kElementsOf<D>)), scale + k);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRouteChunk; ++k) scale[k] = k < count ? load_scalar<D>(scales, k) : 0.0f;
  }
}

struct Routes {
  i32 index[kRouteChunk];
  float scale[kRouteChunk];
};

// Routes `first` to `first + 7` of all; past the token's last they count as absent.
__device__ __forceinline__ Routes load_routes(const Params& p, i64 first, int count) {
  Routes routes;
  const i32* index = static_cast<const i32*>(p.route_index) + first;
  const bool wide = p.flags & kVectorRoutes;
  if (wide) {
#pragma unroll
    for (int k = 0; k < kRouteChunk; k += 4) {
      const Vec16 v = ptx::ld_v4(index + k);
#pragma unroll
      for (int i = 0; i < 4; ++i) routes.index[k + i] = static_cast<i32>(v.w[i]);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRouteChunk; ++k) {
      routes.index[k] = k < count ? static_cast<i32>(ptx::ld_u32(index + k)) : -1;
    }
  }
  if (p.route_scale == nullptr) {
#pragma unroll
    for (float& scale : routes.scale) scale = 1.0f;
  } else if (p.flags & kScaleIsFloat32) {
    load_scales<DType::kFloat32>(p.route_scale, first, count, wide, routes.scale);
  } else {
    load_scales<kDType>(p.route_scale, first, count, wide, routes.scale);
  }
  return routes;
}

// partial = routed_scaling_factor * (sum over routes of scale * row) + shared_expert, in float32,
// not yet rounded. Routes in chunks of 8 by a pairwise tree, chunks in order: the bits depend on
// nothing else.
__device__ __forceinline__ void finalize(const Params& p, int token, int column,
                                         float (&partial)[kElements]) {
  const u32 row_bytes = static_cast<u32>(p.row_vectors) * sizeof(Vec16);
  const u32 column_bytes = static_cast<u32>(column) * sizeof(Vec16);
  const u8* rows = static_cast<const u8*>(p.allreduce_in) + column_bytes;
  const i64 first_route = static_cast<i64>(token) * p.top_k;

  float routed[kElements] = {};
  Vec16 shared = {};
  for (int begin = 0; begin < p.top_k; begin += kRouteChunk) {
    Routes routes = load_routes(p, first_route + begin, p.top_k - begin);
    if (begin == 0 && p.shared_expert != nullptr) {
      shared = ptx::ld_once_v4(static_cast<const u8*>(p.shared_expert) +
                               static_cast<u64>(token) * row_bytes + column_bytes);
    }
    Vec16 row[kRouteChunk];
#pragma unroll
    for (int k = 0; k < kRouteChunk; ++k) {
      row[k] = Vec16{};
      const u32 index = static_cast<u32>(routes.index[k]);
      if (index < p.num_permuted_rows) {
        row[k] = ptx::ld_once_v4(rows + static_cast<u64>(index) * row_bytes);
      } else {
        routes.scale[k] = 0.0f;  // it may be NaN
      }
    }
    float pair[kRouteChunk / 2][kElements];
#pragma unroll
    for (int k = 0; k < kRouteChunk; k += 2) {
      float low[kElements], high[kElements];
      unpack<kDType>(row[k], low);
      unpack<kDType>(row[k + 1], high);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        pair[k / 2][i] = ptx::fma_f32(routes.scale[k + 1], high[i], routes.scale[k] * low[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      routed[i] += (pair[0][i] + pair[1][i]) + (pair[2][i] + pair[3][i]);
    }
  }
  unpack<kDType>(shared, partial);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    partial[i] = ptx::fma_f32(p.routed_scaling_factor, routed[i], partial[i]);
  }
}

}  // namespace moe_ar
