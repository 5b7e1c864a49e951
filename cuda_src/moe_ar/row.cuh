// How the threads of a cluster share a row.
#pragma once

#include <moe_ar/delay.cuh>
#include <moe_ar/epilogue.cuh>
#include <moe_ar/params.cuh>
#include <moe_ar/rmsnorm.cuh>

namespace moe_ar {

// Vectors of a row go to threads by groups of 32, groups to warps in turn over the blocks of the
// cluster, so that blocks differ by one group at most.
struct Placement {
  int cluster;  // index of the cluster in the grid
  int clusters;
  int first_group;
  int group_step;  // groups the cluster holds at a time
  int lane;

  __device__ __forceinline__ explicit Placement(const Params& p) {
    const u32 log2 = p.cluster_log2;
    cluster = static_cast<int>(ptx::block_index() >> log2);
    clusters = static_cast<int>(ptx::grid_blocks() >> log2);
    const u32 block = ptx::block_index() - (cluster << log2);
    first_group = static_cast<int>((ptx::thread_index() / 32 << log2) + block);
    group_step = static_cast<int>(ptx::block_threads() / 32 << log2);
    lane = static_cast<int>(ptx::thread_index() % 32);
  }
};

__device__ __forceinline__ int row_groups(const Params& p) { return (p.row_vectors + 31) / 32; }

// Whether the norm of a row is wanted.
__device__ __forceinline__ bool norms(const Params& p) {
  return kQuantises || p.norm_out != nullptr;
}

// Vectors that a thread polls together, as registers allow.
template <int kVectors>
inline constexpr int kPolled = kVectors == 1 && kWorldSize <= 8 ? 8 : 4;

// Whether gamma is loaded, and all that can be made of the norm is, before the row's totals are
// there: as registers allow.
template <int kVectors>
inline constexpr bool kGammaEarly = kRowMax || kVectors * kWireVectors <= 2;
inline constexpr bool kNormEarly = kQuantises && kWireVectors == 1;

// Gives what a warp has of a row's totals: of the vectors `ahead` columns after its first ones, of
// which its last lanes' may lie outside of the row, or all. Brings the warp together.
__device__ __forceinline__ void publish(const Params& p, const RowReduction& reduction, int column,
                                        int ahead, const Vec16& residual, const Gamma& gamma) {
  ptx::warp_sync();
  if ((column + ahead) / 32 >= row_groups(p)) return;
  RowTotals own = {square_sum(residual), 0};
  if constexpr (kRowMax) {
    Norm norm;
    norm.weigh(p, residual, gamma);
    own.magnitude = norm.magnitude();
  }
  reduction.publish(ahead / 32, own);
}

// The norm of a row of `columns` vectors that is published, of which a thread holds `column`,
// `column + step`...; `offset` is the first one's in rows of T; gamma is loaded where kGammaEarly.
// Every thread of the cluster.
template <int kVectors>
__device__ __forceinline__ void norm_row(const Params& p, RowReduction& reduction, int token,
                                         int columns, int column, int step, u64 offset,
                                         const Vec16 (&residual)[kVectors],
                                         const Gamma (&gamma)[kVectors]) {
  const auto place = [&](int v) { return offset + v * step * sizeof(Vec16); };
  const auto inside = [&](int v) { return column + v * step < columns; };
  Norm norm[kVectors];
  const auto prepare = [&](int v) {
    const int own = column + v * step;
    norm[v].prepare(p, token, own, place(v), inside(v), residual[v],
                    kGammaEarly<kVectors> ? gamma[v] : gamma_of(p, own, inside(v)));
  };
  // Not before all is published: the other blocks of the cluster wait for that.
  if constexpr (kNormEarly) each<kVectors>(prepare);
  const RowTotals row = reduction.collect(row_groups(p));
  if constexpr (!kNormEarly) each<kVectors>(prepare);
  const float factor = norm_factor(p, row);
  bool usual = true;
  each<kVectors>(
      [&](int v) { usual &= norm[v].begin(p, place(v), inside(v), factor, row.magnitude); });
  if (!usual) each<kVectors>([&](int v) { norm[v].detour(p, factor); });
  each<kVectors>([&](int v) { norm[v].finish(p, inside(v)); });
}

// The same for one vector of a thread that holds any number of them.
__device__ __forceinline__ void store_one(const Params& p, int token, int columns, int column,
                                          const Vec16& residual, const RowTotals& row) {
  const bool inside = column < columns;
  const u64 offset = row_offset(p, token, column);
  const float factor = norm_factor(p, row);
  Norm norm;
  norm.prepare(p, token, column, offset, inside, residual, gamma_of(p, column, inside));
  if (!norm.begin(p, offset, inside, factor, row.magnitude)) norm.detour(p, factor);
  norm.finish(p, inside);
}

}  // namespace moe_ar

// Defines a kernel of this variant from a function of parameters and placement. Blocks have at most
// kMaxBlockThreads; to name more `threads` bounds the registers.
#define MOE_AR_DEFINE_ROW_KERNEL(suffix, threads, run)                           \
  MOE_AR_DEFINE_KERNEL(MOE_AR_KERNEL(suffix), threads, moe_ar::Params, params) { \
    if (params.flags & moe_ar::kWarmUp) return;                                  \
    run(params, moe_ar::Placement(params));                                      \
    moe_ar::delay(params, moe_ar::Point::kEnd);                                  \
    moe_ar::ptx::pdl_trigger();                                                  \
  }
