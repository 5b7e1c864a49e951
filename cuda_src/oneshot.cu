// One-shot: every rank sends its part of every token to every peer and sums all parts itself.
#include <moe_ar/epilogue.cuh>
#include <moe_ar/finalize.cuh>
#include <moe_ar/lamport.cuh>
#include <moe_ar/rmsnorm.cuh>

namespace moe_ar {
namespace {

// Vectors of a row go to threads by groups of 32, groups to warps in turn over the blocks of the
// cluster, so that blocks differ by one group at most.
struct Placement {
  u32 blocks;    // of the cluster
  u32 cluster;   // index of the cluster in the grid
  u32 clusters;
  int first_group;
  int group_step;  // groups the cluster holds at a time
  int lane;

  __device__ __forceinline__ Placement() {
    blocks = ptx::cluster_blocks();
    cluster = ptx::block_index() / blocks;
    clusters = ptx::grid_blocks() / blocks;
    const u32 warp = ptx::thread_index() / 32;
    first_group = static_cast<int>(warp * blocks + ptx::block_index() % blocks);
    group_step = static_cast<int>(ptx::block_threads() / 32 * blocks);
    lane = static_cast<int>(ptx::thread_index() % 32);
  }
};

__device__ __forceinline__ Payload produce(const Params& p, int token, int column) {
  float partial[kElements];
  finalize(p, token, column, partial);
  return to_wire(partial);
}

__device__ __forceinline__ Vec16 load_residual(const Params& p, int token, int column) {
  if (p.residual_in == nullptr) return Vec16{};
  return ptx::ld_once_v4(row_vector(p.residual_in, p, token, column));
}

// A thread holds one vector of a row, in registers from its push to its norm.
__device__ __forceinline__ void run_rows(const Params& p, const Placement& at, Session& session,
                                         RowReduction& reduction) {
  const int groups = (p.row_vectors + 31) / 32;
  const int column = at.first_group * 32 + at.lane;
  const bool active = column < p.row_vectors;
  Weight gamma = {};

  for (int token = at.cluster; token < p.token_num; token += at.clusters) {
    const bool first_token = token == static_cast<int>(at.cluster);
    Payload own = {};
    Vec16 residual = {};
    if (active) {
      own = produce(p, token, column);
      session.push(token, column, own);
      residual = load_residual(p, token, column);
      if (first_token && p.norm_out != nullptr) gamma.load(p, column);
    }
    if (first_token) {
      session.arrive();
      reduction.begin();
    }
    if (active) {
      float total[kElements] = {};
      session.reduce(token, column, own, total);
      residual = store_residual(p, token, column, total, residual);
    }
    if (p.norm_out == nullptr) continue;
    if (at.first_group < groups) reduction.publish(at.first_group, square_sum(residual));
    const float row_square_sum = reduction.collect(groups);
    if (active) store_norm(p, token, column, residual, gamma, row_square_sum);
  }
}

// A thread holds several vectors of a row, parked in the own slots in between.
__device__ __forceinline__ void run_long_rows(const Params& p, const Placement& at,
                                              Session& session, RowReduction& reduction) {
  const int groups = (p.row_vectors + 31) / 32;

  for (int token = at.cluster; token < p.token_num; token += at.clusters) {
    for (int group = at.first_group; group < groups; group += at.group_step) {
      const int column = group * 32 + at.lane;
      if (column >= p.row_vectors) continue;
      const Payload own = produce(p, token, column);
      session.push(token, column, own);
      session.keep(token, column, own);
    }
    if (token == static_cast<int>(at.cluster)) {
      session.arrive();
      reduction.begin();
    }
    for (int group = at.first_group; group < groups; group += at.group_step) {
      const int column = group * 32 + at.lane;
      Vec16 residual = {};
      if (column < p.row_vectors) {
        const Payload own = session.look(p.rank, token, column);
        float total[kElements] = {};
        session.reduce(token, column, own, total);
        residual = store_residual(p, token, column, total, load_residual(p, token, column));
        if (p.norm_out != nullptr) {
          Payload parked = own;
          parked.v[0] = residual;
          session.keep(token, column, parked);
        } else {
          session.restore(p.rank, token, column);
        }
      }
      if (p.norm_out != nullptr) reduction.publish(group, square_sum(residual));
    }
    if (p.norm_out == nullptr) continue;
    const float row_square_sum = reduction.collect(groups);
    for (int group = at.first_group; group < groups; group += at.group_step) {
      const int column = group * 32 + at.lane;
      if (column >= p.row_vectors) continue;
      Weight gamma;
      gamma.load(p, column);
      store_norm(p, token, column, session.look(p.rank, token, column).v[0], gamma, row_square_sum);
      session.restore(p.rank, token, column);
    }
  }
}

template <bool kLongRows>
__device__ __forceinline__ void oneshot(const Params& p) {
  if (p.flags & kWarmUp) return;
  const Placement at;
  RowReduction reduction(ptx::block_shared<RowSums>(), p.norm_out != nullptr ? at.blocks : 1);
  ptx::pdl_wait();
  if (p.flags & kTriggerEarly) ptx::pdl_trigger();
  Session session(p);
  if constexpr (kLongRows) {
    run_long_rows(p, at, session, reduction);
  } else {
    run_rows(p, at, session, reduction);
  }
  ptx::pdl_trigger();
}

}  // namespace
}  // namespace moe_ar

MOE_AR_DEFINE_KERNEL(MOE_AR_KERNEL(), moe_ar::kMaxBlockThreads, moe_ar::Params, p) {
  moe_ar::oneshot<false>(p);
}

MOE_AR_DEFINE_KERNEL(MOE_AR_KERNEL(_long), moe_ar::kMaxBlockThreads, moe_ar::Params, p) {
  moe_ar::oneshot<true>(p);
}
