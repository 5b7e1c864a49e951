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

// By parity of the round.
struct ClusterWords {
  u32 of_block[2][16];
  TxBarrier ready[2];
};

}  // namespace

// Turns the words of each block round, `rounds` times.
// Planted: 1 no barrier before the reads, 2 none after them.
MOE_AR_DEFINE_KERNEL(barrier, 1024, TestParams, p) {
  Words& shared = block_shared<Words>();
  const u32 me = thread_index(), n = block_threads();
  u32 word = ld_u32(at(p.in, settled(grid_thread()), 4));
  for (u32 round = 0; round < p.rounds; ++round) {
    shared.w[me] = word;
    if (p.planted != 1) block_sync();
    word = shared.w[(me + 1) % n];
    if (p.planted != 2) block_sync();
  }
  p.out[grid_thread()] = word;
}

// Sum over the warp of the inputs as numbers; all lanes get it, by way of shared memory.
// Planted: 1 takes a shuffle for something that orders memory.
MOE_AR_DEFINE_KERNEL(shuffle, 1024, TestParams, p) {
  const float own = static_cast<float>(ld_u32(p.in + grid_thread()) % 1000);
  float sum = own;
  for (u32 round = 0; round < p.rounds; ++round) {
    sum = own;
    for (u32 mask = 16; mask != 0; mask /= 2) sum += shfl_xor_f32(sum, mask);
  }
  const SharedPlace words = shared_place(&block_shared<Words>());
  st_shared_u32(words + thread_index() * 4, static_cast<u32>(sum));
  if (p.planted == 1) {
    shfl_xor_f32(sum, 1);
  } else {
    warp_sync();
  }
  p.out[grid_thread()] = ld_shared_u32(words + (thread_index() ^ 31) * 4);
}

// In each round every block sends its weight times the round to all blocks of its cluster, and each
// adds them up. Planted: 1 does not wait for them, 2 waits for the same parity in every round, 3
// all rounds in the same place, 4 takes the cluster's barrier for one that orders memory, 5 a block
// does not arrive, 6 a block does not send, 7 expects too much.
MOE_AR_DEFINE_KERNEL(cluster, 1024, TestParams, p) {
  ClusterWords& shared = block_shared<ClusterWords>();
  const u32 blocks = p.cluster_blocks, cta = block_index() % blocks, me = thread_index();
  const float weight = static_cast<float>(ld_u32(p.in + block_index()) % 1000);
  if (me == 0) {
    tx_barrier_init(shared_place(&shared.ready[0]));
    tx_barrier_init(shared_place(&shared.ready[1]));
  }
  u32* first_out = p.out + block_index() * block_threads();
  if (me == 0) *first_out = 0;
  if (p.planted == 5 && cta == 1) return;
  cluster_arrive_relaxed();
  cluster_wait();
  if (p.planted == 4 && me == block_threads() - 1) *first_out += 1;

  float sum = 0;
  for (u32 round = 0; round < p.rounds; ++round) {
    const u32 half = round % 2;
    const SharedPlace row = shared_place(shared.of_block[p.planted == 3 ? 0 : half]);
    const SharedPlace ready = shared_place(&shared.ready[half]);
    if (me < blocks && !(p.planted == 6 && cta == 1)) {
      const float share = weight * static_cast<float>(round + 1);
      st_async_u32(cluster_place(row + cta * 4, me), cluster_place(ready, me), as_u32(share));
    }
    if (me == 0) tx_barrier_expect(ready, (p.planted == 7 ? blocks + 1 : blocks) * 4);
    if (p.planted != 1) tx_barrier_wait(ready, p.planted == 2 ? 0 : round / 2 % 2);
    for (u32 b = 0; b < blocks; ++b) sum += as_f32(ld_shared_u32(row + b * 4));
    block_sync();  // the first warp, which sends, is not ahead of those that read
  }
  p.out[grid_thread()] = static_cast<u32>(sum);
}

// What would be undefined on a GPU; `planted` says which. For clusters of two blocks.
MOE_AR_DEFINE_KERNEL(misuse, 1024, TestParams, p) {
  ClusterWords& shared = block_shared<ClusterWords>();
  const auto planted = static_cast<Misuse>(p.planted);
  const u32 cta = block_index() % 2, me = thread_index();
  const SharedPlace word = shared_place(&shared.of_block[0][0]);
  const SharedPlace ready = shared_place(&shared.ready[0]);
  const SharedPlace peer_word = cluster_place(word, cta ^ 1);
  const SharedPlace peer_ready = cluster_place(ready, cta ^ 1);

  if (planted == kWaitBeforeArrive) cluster_wait();
  if (me == 0 && planted != kNoInit && planted != kInitAfterArrive) tx_barrier_init(ready);
  if (planted == kUseBeforeWait && me == 1) tx_barrier_expect(ready, 4);
  if (planted == kStoreBeforeWait && me == 0) st_async_u32(peer_word, peer_ready, 1);
  cluster_arrive_relaxed();
  if (planted == kArriveTwice) cluster_arrive_relaxed();
  if (planted == kInitAfterArrive && me == 0) tx_barrier_init(ready);
  if (planted == kUseAfterArrive && me == 1) tx_barrier_wait(ready, 0);
  cluster_wait();
  if (planted == kStoreToReturned) {
    if (cta == 1) return;
    for (u32 i = 0; i < 1000; ++i) spin_pause();
  }
  if (me == 1) {
    if (planted == kInitTwice) tx_barrier_init(ready);
    if (planted == kInitOfPeer) tx_barrier_init(peer_ready);
    if (planted == kExpectTwice) {
      for (u32 i = 0; i < 2; ++i) tx_barrier_expect(ready, 4);
    }
    if (planted == kExpectOfPeer) tx_barrier_expect(peer_ready, 4);
    if (planted == kWaitForPeer) tx_barrier_wait(peer_ready, 0);
    if (planted == kTooManyBytes) {
      st_async_u32(word, ready, 1);
      st_async_u32(word + 4, ready, 1);
      tx_barrier_expect(ready, 4);
    }
    if (planted == kOtherBarrier) st_async_u32(peer_word, ready, 1);
    if (planted == kUnalignedBarrier) tx_barrier_wait(ready + 4, 0);
    if (planted == kPlainStoreToPeer) st_shared_u32(peer_word, 1);
    if (planted == kPlainLoadFromPeer) ld_shared_u32(peer_word);
    if (planted == kPlaceOfPeer) cluster_place(peer_word, 0);
    if (planted == kPlaceBeyondCluster) cluster_place(word, 2);
    if (planted == kPlaceOutside) st_async_u32(shared_place(p.out), ready, 1);
    if (planted == kTwoTypes) block_shared<Words>();
    st_async_u32(peer_word, peer_ready, 1);
  }
  if (me == 0) tx_barrier_expect(ready, 4);
  tx_barrier_wait(ready, 0);
}

// The protocol of the library in small: each thread pushes 16 bytes to every peer, polls its own
// slots, restores them and adds up. Planted: 1 polls see the last word alone, 2 no restoring.
MOE_AR_DEFINE_KERNEL(exchange, 1024, TestParams, p) {
  const u32 epoch = ld_relaxed_gpu_u32(&p.control->epoch);
  block_sync();
  if (thread_index() == 0) {
    red_add_relaxed_gpu_u64(&p.control->blocks, 1);
    u32 arrived = ld_relaxed_gpu_u32(&p.control->arrived), seen;
    while ((seen = atom_cas_relaxed_gpu_u32(&p.control->arrived, arrived, arrived + 1)) !=
           arrived) {
      arrived = seen;
    }
    if (arrived == grid_blocks() - 1) {
      st_relaxed_gpu_u32(&p.control->arrived, 0);
      st_relaxed_gpu_u32(&p.control->epoch, epoch ^ 1);
    }
  }
  const u32 x = ld_u32(p.in + grid_thread());
  const auto slot = [&](u32 rank, u32 writer) {
    return p.slots[rank] + 4 * ((epoch * p.ranks + writer) * kMaxTestThreads + grid_thread());
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

// Thread 0 hands 16 bytes to the last one of the block. Planted: 1 by a flag that orders no memory.
MOE_AR_DEFINE_KERNEL(publish, 1024, TestParams, p) {
  u32* data = p.slots[0];
  const bool last = thread_index() == block_threads() - 1;
  if (thread_index() == 0) {
    st_v4(data, {{1, 2, 3, 4}});
    st_relaxed_gpu_u32(p.flag, 1);
  }
  if (p.planted != 1) block_sync();
  while (last && ld_relaxed_gpu_u32(p.flag) == 0) spin_pause();
  if (last) p.out[0] = ld_v4(data).w[3];
}

// Never ends well. Planted: 1 a thread returns before the barrier, 2 half a warp does not shuffle,
// 3 a slot stays empty, 4 an address is off, 5 overruns shared memory, 6 overruns the inputs.
MOE_AR_DEFINE_KERNEL(stuck, 1024, TestParams, p) {
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

MOE_AR_DEFINE_KERNEL(convert, 1024, ConvertParams, p) {
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
    if (p.what == 7) *out = pack_e4m3x2(floats[2 * i], floats[2 * i + 1]);
    if (p.what == 8) *out = pack_e2m1x4(floats + 4 * i);
    if (p.what == 9) *out = as_u32(unpack_e4m3(words[i]));
  }
}
