// The library's own sum over the row of a cluster, and its maximum.
#define MOE_AR_PRODUCER 1
#define MOE_AR_PROTOCOL 0
#define MOE_AR_DTYPE 2
#define MOE_AR_COMM_DTYPE 2
#define MOE_AR_QUANT 5
#define MOE_AR_WORLD_SIZE 1
#define MOE_AR_DELAYS 0
#include <moe_ar/rmsnorm.cuh>

#include "kernels.h"

// In each round a thread gives its input times the round, and twice that, in two groups; all
// threads of the cluster add up the sums and the maxima of all rounds.
MOE_AR_DEFINE_KERNEL(row_sums, 1024, TestParams, p) {
  using namespace moe_ar;
  using namespace moe_ar::ptx;
  const u32 blocks = p.cluster_blocks, groups = block_threads() / 32 * blocks;
  const u32 first_group = thread_index() / 32 * blocks + block_index() % blocks;
  RowReduction reduction(block_shared<RowSums>(), blocks, static_cast<int>(first_group));
  const u32 thread = block_index() * block_threads() + thread_index();
  const u32 own = ld_u32(p.in + thread) % 100;
  reduction.begin();
  float sum = 0;
  for (u32 round = 0; round < p.rounds; ++round) {
    const float x = static_cast<float>(own * (round + 1));
    reduction.publish(0, {x, 0});
    reduction.publish(static_cast<int>(groups), {2 * x, own * (round + 1)});
    const RowTotals row = reduction.collect(2 * groups);
    sum += row.square_sum + static_cast<float>(row.magnitude);
  }
  p.out[thread] = static_cast<u32>(sum);
}
