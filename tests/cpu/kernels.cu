// Small kernels that use each primitive, with faults to plant.
#include <moe_ar/ptx.cuh>

#include "kernels.h"

namespace {

using namespace moe_ar;
using namespace moe_ar::ptx;

__device__ u32 grid_thread() { return block_index() * block_threads() + thread_index(); }

struct Words {
  u32 w[1024];
};

struct Partials {
  float of_block[2][16];
};

}  // namespace

// Turns the words of each block round, `rounds` times.
// Planted: 1 no barrier before the reads, 2 none after them.
MOE_AR_DEFINE_KERNEL(barrier, TestParams, p) {
  Words& shared = block_shared<Words>();
  const u32 me = thread_index(), n = block_threads();
  u32 word = ld_u32(p.in + grid_thread());
  for (u32 round = 0; round < p.rounds; ++round) {
    shared.w[me] = word;
    if (p.planted != 1) block_sync();
    word = shared.w[(me + 1) % n];
    if (p.planted != 2) block_sync();
  }
  p.out[grid_thread()] = word;
}

// Sum over the warp of the inputs as numbers; all lanes get it.
MOE_AR_DEFINE_KERNEL(shuffle, TestParams, p) {
  const float own = static_cast<float>(ld_u32(p.in + grid_thread()) % 1000);
  float sum = own;
  for (u32 round = 0; round < p.rounds; ++round) {
    sum = own;
    for (u32 mask = 16; mask != 0; mask /= 2) sum += shfl_xor_f32(sum, mask);
  }
  p.out[grid_thread()] = static_cast<u32>(sum);
}

// Every block sends its weight times the round to all blocks of its cluster; each adds them up.
// Planted: 1 no wait, 2 store to a block that nobody knows to have started, 3 wait without arrive,
// 4 store to a block that has returned.
MOE_AR_DEFINE_KERNEL(cluster, TestParams, p) {
  Partials& shared = block_shared<Partials>();
  const u32 blocks = cluster_blocks(), me = block_index() % blocks;
  const float weight = static_cast<float>(ld_u32(p.in + block_index()) % 1000);
  if (p.planted == 3) cluster_wait_acquire();
  if (p.planted != 2) {
    cluster_arrive_release();
    cluster_wait_acquire();
  }
  if (p.planted == 4 && me == 1) return;
  float sum = 0;
  for (u32 round = 0; round < p.rounds; ++round) {
    float* row = shared.of_block[round % 2];
    if (thread_index() < blocks) {
      st_cluster_f32(row + me, thread_index(), weight * static_cast<float>(round + 1));
      if (p.planted == 4) {
        while (ld_relaxed_sys_u32(p.flag) == 0) spin_pause();
      }
    }
    cluster_arrive_release();
    sum += 1;  // something between both halves
    if (p.planted != 1) cluster_wait_acquire();
    for (u32 b = 0; b < blocks; ++b) sum += row[b];
    if (p.planted == 1) cluster_wait_acquire();
  }
  // Nobody's memory goes before its peers stored to it for the last time.
  cluster_arrive_release();
  cluster_wait_acquire();
  p.out[grid_thread()] = static_cast<u32>(sum);
}

// The protocol of the library in small: each thread pushes 16 bytes to every peer, polls its own
// slots, restores them and adds up. Planted: 1 polls see the last word alone, 2 no restoring.
MOE_AR_DEFINE_KERNEL(exchange, TestParams, p) {
  const u32 threads = grid_blocks() * block_threads();
  const u32 epoch = ld_relaxed_gpu_u32(&p.control->epoch);
  block_sync();
  if (thread_index() == 0 &&
      atom_add_acq_rel_gpu_u32(&p.control->arrived, 1) == grid_blocks() - 1) {
    st_relaxed_gpu_u32(&p.control->epoch, epoch ^ 1);
    st_relaxed_gpu_u32(&p.control->arrived, 0);
  }
  const u32 x = ld_u32(p.in + grid_thread());
  const auto slot = [&](u32 rank, u32 writer) {
    return p.slots[rank] + 4 * (u64{epoch * p.ranks + writer} * threads + grid_thread());
  };
  for (u32 peer = 0; peer < p.ranks; ++peer) {
    if (peer != p.rank) st_relaxed_sys_v4(slot(peer, p.rank), {{x, x + 1, x + 2, x + 3}});
  }
  u32 sum = 0;
  for (u32 writer = 0; writer < p.ranks; ++writer) {
    if (writer == p.rank) continue;
    u32* own = slot(p.rank, writer);
    Vec16 v;
    for (;;) {
      v = ld_relaxed_sys_v4(own);
      const bool rest = v.w[0] != kEmpty && v.w[1] != kEmpty && v.w[2] != kEmpty;
      if ((rest || p.planted == 1) && v.w[3] != kEmpty) break;
      spin_pause();
    }
    if (p.planted != 2) st_relaxed_sys_v4(own, {{kEmpty, kEmpty, kEmpty, kEmpty}});
    sum += v.w[0] + v.w[1] + v.w[2] + v.w[3];
  }
  p.out[grid_thread()] = sum;
}

// Thread 0 hands 16 bytes to the last thread of the grid by a flag. Planted: 1 the flag is relaxed.
MOE_AR_DEFINE_KERNEL(publish, TestParams, p) {
  u32* data = p.slots[0];
  if (grid_thread() == 0) {
    st_v4(data, {{1, 2, 3, 4}});
    if (p.planted == 1) {
      st_relaxed_gpu_u32(p.flag, 1);
    } else {
      atom_add_acq_rel_gpu_u32(p.flag, 1);
    }
  }
  if (grid_thread() == grid_blocks() * block_threads() - 1) {
    if (p.planted == 1) {
      while (ld_relaxed_gpu_u32(p.flag) == 0) spin_pause();
    } else {
      while (atom_add_acq_rel_gpu_u32(p.flag, 0) == 0) spin_pause();
    }
    p.out[0] = ld_v4(data).w[3];
  }
}

// Never ends well. Planted: 1 a thread returns before the barrier, 2 half a warp does not shuffle,
// 3 a slot stays empty, 4 an address is off, 5 overruns shared memory, 6 overruns the inputs.
MOE_AR_DEFINE_KERNEL(stuck, TestParams, p) {
  Words& shared = block_shared<Words>();
  if (p.planted == 1 && grid_thread() == 7) return;
  if (p.planted == 2 && thread_index() % 32 < 16) shfl_xor_f32(1, 1);
  if (p.planted == 3 && grid_thread() == 7) {
    while (ld_relaxed_sys_v4(p.slots[0]).w[0] == kEmpty) spin_pause();
  }
  if (p.planted == 4) ld_v4(p.in + 1);
  if (p.planted == 5) (&shared)[1].w[0] = 0;
  if (p.planted == 6) p.out[0] = ld_u32(p.in + grid_blocks() * block_threads());
  block_sync();
}

MOE_AR_DEFINE_KERNEL(convert, ConvertParams, p) {
  const auto* floats = static_cast<const float*>(p.in);
  const auto* words = static_cast<const u32*>(p.in);
  for (u32 i = grid_thread(); i < p.count; i += grid_blocks() * block_threads()) {
    u32* out = static_cast<u32*>(p.out) + i;
    if (p.what == 0) *out = pack_bf16x2(floats[2 * i], floats[2 * i + 1]);
    if (p.what == 1) *out = pack_f16x2(floats[2 * i], floats[2 * i + 1]);
    if (p.what == 2) *out = as_u32(unpack_f16(static_cast<const u16*>(p.in)[i]));
    if (p.what == 3) *out = drop_negative_zero_bf16x2(words[i]);
    if (p.what == 4) *out = drop_negative_zero_f16x2(words[i]);
    if (p.what == 5) *out = as_u32(rsqrt_f32(floats[i]));
    if (p.what == 6) *out = as_u32(fma_f32(floats[i], 2, 0));
  }
}
