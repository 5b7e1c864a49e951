// The sum of squares of a row that is spread over the threads of a cluster.
//
// Its shape is fixed, whatever the launch: the elements of a 16-byte vector in order, an xor tree
// over 32 consecutive vectors (a group: one warp holds one), the group sums by one tree.
#pragma once

#include <moe_ar/config.cuh>
#include <moe_ar/ptx.cuh>

namespace moe_ar {

// Two of everything, by parity of the row: a block that is ahead by a row finds the other half
// free. It cannot be ahead by two, since its row ends with sums from every warp of the cluster, and
// a warp gives its sum of a row after it has read those of the row before.
struct RowSums {
  float group[2][kMaxRowGroups];
  ptx::TxBarrier ready[2];
};

// Sum over the 32 lanes, the same bits in each: a + b = b + a.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (u32 mask = 16; mask > 0; mask >>= 1) x += ptx::shfl_xor_f32(x, mask);
  return x;
}

// Every thread of every block of the cluster makes the same calls in the same order.
class RowReduction {
 public:
  __device__ __forceinline__ RowReduction(RowSums& sums, u32 cluster_blocks)
      : sums_(sums), blocks_(cluster_blocks), row_(0) {
    if (blocks_ == 1) return;
    if (ptx::thread_index() == 0) {
      ptx::tx_barrier_init(&sums_.ready[0]);
      ptx::tx_barrier_init(&sums_.ready[1]);
    }
    ptx::cluster_arrive_relaxed();
  }

  // Once, before the first publish: from here on every block of the cluster runs and has its
  // barriers, so its shared memory may be written.
  __device__ __forceinline__ void begin() const {
    if (blocks_ > 1) ptx::cluster_wait();
  }

  // A warp gives the sum of squares of a whole group.
  __device__ __forceinline__ void publish(int group, float square_sum) {
    const float sum = warp_sum(square_sum);
    const u32 lane = ptx::thread_index() % 32;
    float* slot = &sums_.group[row_ & 1][group];
    if (blocks_ == 1) {
      if (lane == 0) *slot = sum;
    } else if (lane < blocks_) {
      ptx::st_async_cluster_f32(slot, &sums_.ready[row_ & 1], lane, sum);
    }
  }

  // The row's sum, once every group of it is published.
  __device__ __forceinline__ float collect(int groups) {
    if (blocks_ == 1) {
      ptx::block_sync();
    } else {
      ptx::TxBarrier* ready = &sums_.ready[row_ & 1];
      if (ptx::thread_index() == 0) ptx::tx_barrier_expect(ready, groups * sizeof(float));
      ptx::tx_barrier_wait(ready, row_ >> 1 & 1);
    }
    float sum = 0.0f;
    for (int g = ptx::thread_index() % 32; g < groups; g += 32) sum += sums_.group[row_ & 1][g];
    ++row_;
    return warp_sum(sum);
  }

 private:
  RowSums& sums_;
  u32 blocks_;
  u32 row_;
};

}  // namespace moe_ar
