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

__device__ __forceinline__ u32 row_groups(const Params& p) {
  return (static_cast<u32>(p.row_vectors) + 31) / 32;
}

// Whether the norm of a row is wanted.
__device__ __forceinline__ bool norms(const Params& p) {
  return kQuantises || p.norm_out != nullptr;
}

// Vectors that a thread polls together, as registers allow.
template <int kVectors>
inline constexpr int kPolled = kVectors == 1 && kWorldSize <= 8 ? 8 : 4;

// Whether gamma is loaded, and all that can be made of the norm is, before the row's totals are
// there: as registers allow. Then the shuffles of a block's magnitude go with those of the sum of
// squares, and places are computed while parts are on their way.
template <int kVectors>
inline constexpr bool kGammaEarly = kRowMax || kVectors * kWireVectors <= 2;
inline constexpr bool kNormEarly = kQuantises && kWireVectors == 1;

// What becomes of the totals of a row, for a thread's vectors of it: `column`, `column + step`...
// Every thread of the cluster makes the same calls in the same order. `kLeaves`: what lies outside
// of the row leaves by branches, which takes longer, but fewer registers: 64 in place of 72,
// and 25.7 in place of 26.4 us, for 512 dense tokens in two-shot. `kGamma`: begin loads gamma; else
// finish does, before it waits.
template <int kVectors, bool kLeaves, bool kGamma = kGammaEarly<kVectors>>
class RowEpilogue {
 public:
  __device__ __forceinline__ RowEpilogue(const Params& p, int column, int step)
      : p_(p),
        column_(column),
        step_(step),
        published_(ptx::settled(moe_ar::norms(p) ? row_groups(p) : 0)) {}

  __device__ __forceinline__ bool norms() const { return kQuantises || published_ != 0; }

  __device__ __forceinline__ int column(int v) const { return column_ + v * step_; }
  __device__ __forceinline__ u32 bytes(int v) const {
    return static_cast<u32>(v * step_) * static_cast<u32>(sizeof(Vec16));
  }

  // Loads what is needed besides the totals; `offset` is that of the thread's first vector in rows
  // of T.
  __device__ __forceinline__ void begin(int token, int columns, u64 offset) {
    token_ = token;
    offset_ = offset;
    each<kVectors>([&](int v) {
      // Whole, lest what a thread outside of the row has takes registers from row to row.
      residual_[v] = {};
      gamma_[v] = {};
      norm_[v] = {};
      if (column(v) >= columns) return;
      residual_[v] = load_residual(p_, place(v));
      if (kGamma && norms()) gamma_[v].load(p_, column(v));
    });
  }

  // Then, while the totals are on their way.
  __device__ __forceinline__ void prepare(int columns) {
    if constexpr (kNormEarly) {
      each<kVectors>(
          [&](int v) { norm_[v].place(p_, token_, column(v), place(v), column(v) < columns); });
    }
  }

  // The total of a vector that it has.
  __device__ __forceinline__ void take(int v, float (&total)[kElements]) {
    residual_[v] = store_residual(p_, place(v), total, residual_[v]);
  }

  // Gives what the warp has of the row's totals, of its v-th vectors, of which its last lanes' may
  // lie outside of the row, or all. Brings the warp together.
  __device__ __forceinline__ void publish(const RowReduction& reduction, int v) {
    ptx::warp_sync();
    const bool outside = group_is_outside(v);
    if (kLeaves && !kNormEarly && outside) return;
    RowTotals own = {square_sum(residual_[v]), 0};
    if constexpr (kNormEarly || kRowMax) {
      norm_[v].weigh(p_, residual_[v], gamma_[v]);
      own.magnitude = norm_[v].magnitude();
    }
    if (!outside) own.magnitude = reduction.publish<kShared>(v * step_ / 32, own);
    if constexpr (kNormEarly) norm_[v].prepare(own.magnitude, gamma_[v]);
  }

  // Once all is published.
  __device__ __forceinline__ void finish(RowReduction& reduction, int columns) {
    const auto inside = [&](int v) { return column(v) < columns; };
    // A warp without a group of the row: nobody waits for it, so it might come so late that the
    // mbarrier's phase has gone round.
    if (kLeaves && kVectors == 1 && reduction.spread() && group_is_outside(0)) return;
    if constexpr (!kGamma) {
      each<kVectors>([&](int v) { gamma_[v] = gamma_of(p_, column(v), inside(v)); });
    }
    const RowTotals row = reduction.collect(published_);
    if (kLeaves && !kQuantises && kVectors == 1 && column_ >= columns) return;
    if constexpr (!kNormEarly) {
      each<kVectors>([&](int v) {
        norm_[v].prepare(p_, token_, column(v), place(v), inside(v), residual_[v], gamma_[v]);
      });
    }
    const float factor = norm_factor(p_, row);
    bool usual = true;
    each<kVectors>(
        [&](int v) { usual &= norm_[v].begin(p_, place(v), inside(v), factor, row.magnitude); });
    if (!usual) each<kVectors>([&](int v) { norm_[v].detour(p_, factor); });
    each<kVectors>([&](int v) { norm_[v].finish(p_, inside(v)); });
  }

 private:
  static constexpr u32 kShared = kNormEarly ? kBlockLanes : 1;

  // Whether all of a warp's v-th vectors lie outside of the row, or there is no norm.
  __device__ __forceinline__ bool group_is_outside(int v) const {
    return static_cast<u32>(column(v)) / 32 >= published_;
  }

  __device__ __forceinline__ u64 place(int v) const { return offset_ + v * step_ * sizeof(Vec16); }

  const Params& p_;
  int column_;
  int step_;
  u32 published_;  // groups of the row, 0 without a norm; in a register when totals are there
  int token_ = 0;
  u64 offset_ = 0;
  Vec16 residual_[kVectors] = {};
  Gamma gamma_[kVectors] = {};
  Norm norm_[kVectors];
};

// RowEpilogue's publish and finish, for one vector of a thread that holds any number of them.
__device__ __forceinline__ void publish_one(const Params& p, const RowReduction& reduction,
                                            int first, int column, const Vec16& residual) {
  ptx::warp_sync();
  RowTotals own = {square_sum(residual), 0};
  if constexpr (kRowMax) {
    Norm norm;
    norm.weigh(p, residual, gamma_of(p, column, column < p.row_vectors));
    own.magnitude = norm.magnitude();
  }
  reduction.publish((column - first) / 32, own);
}

__device__ __forceinline__ void store_one(const Params& p, int token, int column,
                                          const Vec16& residual, const RowTotals& row) {
  const bool inside = column < p.row_vectors;
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
