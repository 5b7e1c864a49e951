// The sum of squares of a row that is spread over the threads of a cluster.
//
// Its shape is fixed, whatever the launch: the elements of a 16-byte vector in order, an xor tree
// over 32 consecutive vectors (a group: one warp holds one), the group sums by one tree. Each warp
// sends the sum of its group to every block of the cluster: one hop, no barrier around it. For a
// scale that the whole row shares the largest magnitude goes the same way.
#pragma once

#include <moe_ar/config.cuh>
#include <moe_ar/ptx.cuh>

namespace moe_ar {

// Whether rows have a largest magnitude, too.
constexpr bool kRowMax = kQuant == Quant::kFp8PerToken;

// Of a row, a group or a vector.
struct RowTotals {
  float square_sum;
  u32 magnitude;  // largest |residual * (weight_bias + gamma)|, its bits: a NaN is the largest; or
                  // 0
};

// Two of everything, by parity of the row: a block that is ahead by a row finds the other half
// free. It cannot be ahead by two, since its row ends with sums from every warp of the cluster, and
// a warp gives its sum of a row after it has read those of the row before.
struct RowSums {
  u32 group[kRowMax ? 4 : 2][kMaxRowGroups];  // sums, then magnitudes
  ptx::TxBarrier ready[2];
};

// Sum over the 32 lanes, the same bits in each: a + b = b + a. Meanwhile `most` becomes the largest
// of each kLanes lanes.
template <u32 kLanes>
__device__ __forceinline__ float warp_sum(float x, u32& most) {
#pragma unroll
  for (u32 mask = 16; mask > 0; mask >>= 1) {
    x += ptx::shfl_xor_f32(x, mask);
    if (mask < kLanes) most = ptx::max_u32(most, ptx::shfl_xor_u32(most, mask));
  }
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  u32 none = 0;
  return warp_sum<1>(x, none);
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

  __device__ __forceinline__ bool spread() const { return blocks_ > 1; }

  // Once, before the first publish: from here on every block of the cluster runs and has its
  // barriers, so its shared memory may be written.
  __device__ __forceinline__ void begin() const {
    ptx::warp_sync();
    if (blocks_ > 1) ptx::cluster_wait();
  }

  // A converged warp gives what its lanes have of the group `step` after its first. Returns the
  // largest magnitude of each kLanes lanes.
  template <u32 kLanes = 1>
  __device__ __forceinline__ u32 publish(int step, const RowTotals& own) const {
    u32 magnitude = own.magnitude;
    const u32 sum = ptx::as_u32(warp_sum<kLanes>(own.square_sum, magnitude));
    const u32 offset = (half() * kMaxRowGroups + step) * 4;
    send(offset, sum);
    if constexpr (kRowMax) send(offset + kMagnitudes, ptx::warp_max_u32(own.magnitude));
    return magnitude;
  }

  // The row's totals, once every group of it is published. Ends the row.
  __device__ __forceinline__ RowTotals collect(u32 groups) {
    if (blocks_ > 1) {
      const ptx::SharedPlace ready = ready_ + half() * sizeof(ptx::TxBarrier);
      if (leader_) ptx::tx_barrier_expect(ready, groups * kGroupBytes);
      ptx::tx_barrier_wait(ready, row_ >> 1 & 1);
    } else {
      ptx::block_sync();
    }
    RowTotals row = {};
#pragma unroll 1
    for (u32 g = lane_, at = half() * kMaxRowGroups * 4; g < groups; g += 32, at += 128) {
      row.square_sum += ptx::as_f32(ptx::ld_shared_u32(own_ + at));
      if constexpr (kRowMax) {
        row.magnitude = ptx::max_u32(row.magnitude, ptx::ld_shared_u32(own_ + at + kMagnitudes));
      }
    }
    ++row_;
    ptx::warp_sync();
    row.square_sum = warp_sum(row.square_sum);
    if constexpr (kRowMax) row.magnitude = ptx::warp_max_u32(row.magnitude);
    return row;
  }

 private:
  static constexpr u32 kGroupBytes = kRowMax ? 8 : 4;
  static constexpr u32 kMagnitudes = 2 * kMaxRowGroups * 4;  // bytes from sums to them

  __device__ __forceinline__ void send(u32 offset, u32 value) const {
    if (blocks_ > 1) {
      if (lane_ < blocks_) {
        ptx::st_async_u32(there_ + offset, ready_there_ + half() * sizeof(ptx::TxBarrier), value);
      }
    } else if (lane_ == 0) {
      ptx::st_shared_u32(there_ + offset, value);
    }
  }

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
