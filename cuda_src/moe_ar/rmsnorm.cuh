// The sum of squares of a row that is spread over the threads of a cluster.
//
// Its shape is fixed, whatever the launch: the elements of a 16-byte vector in order, an xor tree
// over 32 consecutive vectors (a group: one warp holds one), the group sums by one tree. Each warp
// sends the sum of its group to every block of the cluster: one hop, no barrier around it.
#pragma once

#include <moe_ar/config.cuh>
#include <moe_ar/ptx.cuh>

namespace moe_ar {

// Two of everything, by parity of the row: a block that is ahead by a row finds the other half
// free. It cannot be ahead by two, since its row ends with sums from every warp of the cluster, and
// a warp gives its sum of a row after it has read those of the row before.
struct RowSums {
  u32 group[2][kMaxRowGroups];
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
  // Before pdl_wait. `first_group` is the warp's first.
  __device__ __forceinline__ RowReduction(RowSums& sums, u32 cluster_blocks, int first_group)
      : blocks_(ptx::settled(cluster_blocks)),
        lane_(ptx::settled(ptx::thread_index() % 32)),
        leader_(ptx::thread_index() == 0),
        own_(ptx::settled(ptx::shared_place(&sums.group[0][lane_]))),
        ready_(ptx::settled(ptx::shared_place(&sums.ready[0]))) {
    const u32 block = lane_ < blocks_ ? lane_ : 0;
    there_ =
        ptx::settled(ptx::cluster_place(ptx::shared_place(&sums.group[0][first_group]), block));
    ready_there_ = ptx::settled(ptx::cluster_place(ready_, block));
    if (blocks_ == 1) return;
    if (leader_) {
      ptx::tx_barrier_init(ready_);
      ptx::tx_barrier_init(ready_ + sizeof(ptx::TxBarrier));
    }
    ptx::cluster_arrive_relaxed();
  }

  // Once, before the first publish: from here on every block of the cluster runs and has its
  // barriers, so its shared memory may be written.
  __device__ __forceinline__ void begin() const {
    ptx::warp_sync();
    if (blocks_ > 1) ptx::cluster_wait();
  }

  // A converged warp gives the sum of squares of the group `step` after its first.
  __device__ __forceinline__ void publish(int step, float square_sum) const {
    const u32 sum = ptx::as_u32(warp_sum(square_sum));
    const u32 offset = (half() * kMaxRowGroups + step) * 4;
    if (blocks_ > 1) {
      if (lane_ < blocks_) {
        ptx::st_async_u32(there_ + offset, ready_there_ + half() * sizeof(ptx::TxBarrier), sum);
      }
    } else if (lane_ == 0) {
      ptx::st_shared_u32(there_ + offset, sum);
    }
  }

  // The row's sum, once every group of it is published. Ends the row.
  __device__ __forceinline__ float collect(u32 groups) {
    if (blocks_ > 1) {
      const ptx::SharedPlace ready = ready_ + half() * sizeof(ptx::TxBarrier);
      if (leader_) ptx::tx_barrier_expect(ready, groups * 4);
      ptx::tx_barrier_wait(ready, row_ >> 1 & 1);
    } else {
      ptx::block_sync();
    }
    float sum = 0.0f;
#pragma unroll 1
    for (u32 g = lane_, at = half() * kMaxRowGroups * 4; g < groups; g += 32, at += 128) {
      sum += ptx::as_f32(ptx::ld_shared_u32(own_ + at));
    }
    ++row_;
    ptx::warp_sync();
    return warp_sum(sum);
  }

 private:
  __device__ __forceinline__ u32 half() const { return row_ & 1; }

  u32 blocks_;
  u32 lane_;
  bool leader_;
  ptx::SharedPlace own_;    // this lane's first sum in this block
  ptx::SharedPlace ready_;  // this block's barriers
  ptx::SharedPlace there_;  // this warp's first sum in the block numbered as this lane
  ptx::SharedPlace ready_there_;
  u32 row_ = 0;
};

}  // namespace moe_ar
