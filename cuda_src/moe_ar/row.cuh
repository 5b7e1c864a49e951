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

// Vectors that a thread polls together, as registers allow.
template <int kVectors>
inline constexpr int kPolled = kVectors == 1 && kWorldSize <= 8 ? 8 : 4;

// Whether gamma is loaded, and all that can be made of the norm is, before the row's totals are
// there: as registers allow.
template <int kVectors>
inline constexpr bool kGammaEarly = kRowMax || kVectors * kWireVectors <= 2;
inline constexpr bool kNormEarly = kQuantises && kWireVectors == 1;

// The norm of a row of `columns` vectors, of which a thread holds `column`, `column + step`...;
// `offset` is the first one's in rows of T; gamma is loaded where kGammaEarly. Every thread of the
// cluster.
template <int kVectors>
__device__ __forceinline__ void norm_row(const Params& p, RowReduction& reduction, int token,
                                         int columns, int column, int step, u64 offset,
                                         const Vec16 (&residual)[kVectors],
                                         const Gamma (&gamma)[kVectors]) {
  const int groups = (p.row_vectors + 31) / 32;
  const auto has_group = [&](int v) { return (column + v * step) / 32 < groups; };
  const auto place = [&](int v) { return offset + v * step * sizeof(Vec16); };
  const auto inside = [&](int v) { return column + v * step < columns; };
  Norm norm[kVectors];
  const auto prepare = [&](int v) {
    const int own = column + v * step;
    norm[v].prepare(p, token, own, place(v), inside(v), residual[v],
                    kGammaEarly<kVectors> ? gamma[v] : gamma_of(p, own, inside(v)));
  };
  ptx::warp_sync();
  each<kVectors>([&](int v) {
    if (!has_group(v)) return;
    RowTotals own = {square_sum(residual[v]), 0};
    if constexpr (kRowMax) {
      norm[v].weigh(p, residual[v], gamma[v]);
      own.magnitude = norm[v].magnitude();
    }
    reduction.publish(v * step / 32, own);
  });
  // Not before: the other blocks of the cluster wait for what is published.
  if constexpr (kNormEarly) each<kVectors>(prepare);
  const RowTotals row = reduction.collect(groups);
  if constexpr (!kNormEarly) each<kVectors>(prepare);
  const float factor = norm_factor(p, row);
  bool usual = true;
  each<kVectors>(
      [&](int v) { usual &= norm[v].begin(p, place(v), inside(v), factor, row.magnitude); });
  if (!usual) each<kVectors>([&](int v) { norm[v].detour(p, factor); });
  each<kVectors>([&](int v) { norm[v].finish(p, inside(v)); });
}

// The same where a thread holds any number of vectors, one at a time: first all of them are
// published, then all are stored. Whole warps.
__device__ __forceinline__ void publish_one(const Params& p, const RowReduction& reduction,
                                            int columns, int column, int step,
                                            const Vec16& residual) {
  RowTotals own = {square_sum(residual), 0};
  if constexpr (kRowMax) {
    Norm norm;
    norm.weigh(p, residual, gamma_of(p, column, column < columns));
    own.magnitude = norm.magnitude();
  }
  reduction.publish(step, own);
}

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
