// What scripts/bench.py compares with: floors of the machine, and the separate kernels that users
// run without a fused one. GPU only. Compiled for one dtype and world size, as the library's own.
#include <moe_ar/vec.cuh>

namespace moe_ar {
namespace {

// ---- parameters; _baselines.py mirrors them -----------------------------------------------------

struct Nothing {
  u32 unused;
};

struct Exchange {
  u8* slots[kMaxRanks];  // of each rank, as mapped here
  u32* control;          // [0]: epoch, 0 to 2; [1]: CTAs that have read it
  u32 vectors;           // 16-byte vectors of a rank's message
  u32 rank;
};

struct Store {
  Vec16* to;
  u64 vectors;
};

struct Finalize {
  const u8* rows;       // T [num_rows, hidden]
  const i32* index;     // [tokens, top_k]
  const u8* scale;      // T [tokens, top_k], or null: 1
  const Vec16* shared;  // T [tokens, hidden], or null
  Vec16* partial;       // T [tokens, hidden]
  u32 num_rows;
  u32 row_vectors;
  i32 tokens;
  i32 top_k;
  float factor;
};

struct ResidualNorm {
  const Vec16* total;  // T [tokens, hidden], as the next
  const Vec16* residual_in;
  const Vec16* gamma;  // T [hidden]
  Vec16* residual_out;
  Vec16* norm_out;
  u32 row_vectors;
  float eps;
  float weight_bias;
  float inverse_hidden;
};

// ---- the bare exchange --------------------------------------------------------------------------

constexpr u32 kEmpty = 0x80000000u;  // slabs come filled with it

__device__ __forceinline__ bool full(const Vec16& v) {
  return v.w[0] != kEmpty && v.w[1] != kEmpty && v.w[2] != kEmpty && v.w[3] != kEmpty;
}

// Push the own message to every peer, empty the slots of the launch before, poll the peers'
// messages. Three epochs in turn: a peer is one launch ahead at most, and never writes where this
// launch empties.
__device__ __forceinline__ void exchange(const Exchange& p) {
  ptx::pdl_wait();
  const u32 epoch = *static_cast<volatile u32*>(p.control);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 step = gridDim.x * blockDim.x;
  const auto slot = [&](u32 owner, u32 of_epoch, u32 writer, u32 v) {
    const u64 vector = static_cast<u64>(of_epoch * kWorldSize + writer) * p.vectors + v;
    return reinterpret_cast<Vec16*>(p.slots[owner]) + vector;
  };

  for (u32 v = first; v < p.vectors; v += step) {
#pragma unroll
    for (u32 i = 1; i < kWorldSize; ++i) {
      const u32 peer = (p.rank + i) % kWorldSize;
      ptx::st_relaxed_sys_v4(slot(peer, epoch, p.rank, v), Vec16{{7, 7, 7, 7}});
    }
  }
  __syncthreads();  // the epoch has been read
  u32 arrived = 0;
  if (threadIdx.x == 0) arrived = atomicAdd(p.control + 1, 1u);
  for (u32 v = first; v < p.vectors; v += step) {
#pragma unroll
    for (u32 i = 1; i < kWorldSize; ++i) {
      const u32 peer = (p.rank + i) % kWorldSize;
      *slot(p.rank, (epoch + 2) % 3, peer, v) = Vec16{{kEmpty, kEmpty, kEmpty, kEmpty}};
    }
  }
  for (u32 v = first; v < p.vectors; v += step) {
#pragma unroll
    for (u32 i = 1; i < kWorldSize; ++i) {
      const Vec16* from = slot(p.rank, epoch, (p.rank + i) % kWorldSize, v);
      while (!full(ptx::ld_relaxed_sys_v4(from))) {
      }
    }
  }
  if (threadIdx.x == 0 && arrived == gridDim.x - 1) {
    p.control[1] = 0;
    p.control[0] = (epoch + 1) % 3;
  }
  ptx::pdl_trigger();
}

// ---- what users run instead: finalize | all-reduce of a library | residual + RMSNorm ------------

// One thread for 16 bytes of a token: rows of eight routes in flight, float32 sums.
__device__ __forceinline__ void finalize(const Finalize& p, u32 token, u32 column) {
  constexpr int kChunk = 8;
  float sum[kElements] = {};
  for (int begin = 0; begin < p.top_k; begin += kChunk) {
    const i64 route = static_cast<i64>(token) * p.top_k + begin;
    u32 index[kChunk];
    float scale[kChunk];
    Vec16 row[kChunk];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      const bool there = begin + k < p.top_k;
      index[k] = there ? static_cast<u32>(p.index[route + k]) : ~0u;
      scale[k] = there && p.scale ? load_scalar<kDType>(p.scale, route + k) : 1.0f;
    }
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      row[k] = Vec16{};
      const u64 vector = static_cast<u64>(index[k]) * p.row_vectors + column;
      if (index[k] < p.num_rows) row[k] = reinterpret_cast<const Vec16*>(p.rows)[vector];
    }
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      float x[kElements];
      unpack<kDType>(row[k], x);
      for (int e = 0; e < kElements; ++e) sum[e] += scale[k] * x[e];
    }
  }
  const u64 at = static_cast<u64>(token) * p.row_vectors + column;
  float shared[kElements] = {};
  if (p.shared) unpack<kDType>(p.shared[at], shared);
  for (int e = 0; e < kElements; ++e) sum[e] = p.factor * sum[e] + shared[e];
  p.partial[at] = pack<kDType>(sum);
}

constexpr int kNormThreads = 1024;
constexpr int kNormVectors = kMaxRowGroups * 32 / kNormThreads;

__device__ __forceinline__ float block_sum(float x) {
  __shared__ float warp_sum[kNormThreads / 32];
  for (u32 mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  if (threadIdx.x % 32 == 0) warp_sum[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? warp_sum[threadIdx.x % 32] : 0.0f;
  for (u32 mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// One CTA for a token, which stays in registers between its two halves.
__device__ __forceinline__ void residual_norm(const ResidualNorm& p) {
  const u64 first = static_cast<u64>(blockIdx.x) * p.row_vectors;
  Vec16 residual[kNormVectors];
  float square_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const u32 column = threadIdx.x + static_cast<u32>(i) * blockDim.x;
    if (column >= p.row_vectors) continue;
    float x[kElements], more[kElements];
    unpack<kDType>(p.total[first + column], x);
    unpack<kDType>(p.residual_in[first + column], more);
    for (int e = 0; e < kElements; ++e) x[e] += more[e];
    residual[i] = pack<kDType>(x);
    p.residual_out[first + column] = residual[i];
    unpack<kDType>(residual[i], x);
    for (int e = 0; e < kElements; ++e) square_sum += x[e] * x[e];
  }
  const float scale = rsqrtf(block_sum(square_sum) * p.inverse_hidden + p.eps);
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const u32 column = threadIdx.x + static_cast<u32>(i) * blockDim.x;
    if (column >= p.row_vectors) continue;
    float x[kElements], gamma[kElements];
    unpack<kDType>(residual[i], x);
    unpack<kDType>(p.gamma[column], gamma);
    for (int e = 0; e < kElements; ++e) x[e] *= (p.weight_bias + gamma[e]) * scale;
    p.norm_out[first + column] = pack<kDType>(x);
  }
}

}  // namespace
}  // namespace moe_ar

extern "C" {

__global__ void bench_empty(moe_ar::Nothing) {
  moe_ar::ptx::pdl_wait();
  moe_ar::ptx::pdl_trigger();
}

__global__ void __launch_bounds__(128) bench_exchange(const __grid_constant__ moe_ar::Exchange p) {
  moe_ar::exchange(p);
}

__global__ void bench_store(moe_ar::Store p) {
  const moe_ar::u64 step = static_cast<moe_ar::u64>(gridDim.x) * blockDim.x;
  moe_ar::u64 v = static_cast<moe_ar::u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; v < p.vectors; v += step) p.to[v] = moe_ar::Vec16{{1, 2, 3, 4}};
}

__global__ void __launch_bounds__(128) bench_finalize(moe_ar::Finalize p) {
  const unsigned vector = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned token = vector / p.row_vectors;
  if (token < static_cast<unsigned>(p.tokens)) {
    moe_ar::finalize(p, token, vector % p.row_vectors);
  }
}

__global__ void __launch_bounds__(moe_ar::kNormThreads)
    bench_residual_norm(moe_ar::ResidualNorm p) {
  moe_ar::residual_norm(p);
}

}  // extern "C"
