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

// Over the whole row, of which a thread holds the vectors of its groups `group`, `group + step`...
// Every thread of the cluster.
template <int kVectors>
__device__ __forceinline__ RowTotals row_totals(const Params& p, RowReduction& reduction,
                                                const Vec16 (&residual)[kVectors],
                                                const Gamma (&gamma)[kVectors], int group, int step,
                                                int groups) {
  ptx::warp_sync();
  each<kVectors>([&](int v) {
    if (group + v * step < groups)
      reduction.publish(v * step, own_totals(p, residual[v], gamma[v]));
  });
  return reduction.collect(groups);
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
