// What a launch is given. cupy_moe_ar/abi.py mirrors this file; a test compares both.
#pragma once

#include <moe_ar/config.cuh>
#include <moe_ar/ptx.cuh>

namespace moe_ar {

// Written once by the rank that gives up waiting; host memory mapped into the device.
struct TimeoutRecord {
  u32 valid;  // 1 once the rest is there
  u32 rank;
  u32 missing_rank;
  u32 token;
  u64 launch;
};

// Local to a rank, never exported.
struct ControlBlock {
  // Which epoch a launch uses, a copy for each block of a grid. A block reads its own copy and
  // nobody else touches that during the launch, so the block can advance it without asking when the
  // others have read theirs.
  alignas(128) u32 epoch[kMaxGridBlocks];
  alignas(128) u8* slab[kMaxRanks];  // as mapped here; [rank] is the own one
  TimeoutRecord* record;
  u32 broken;    // 0, or 1 + the rank that is blamed
  u64 launches;  // for records only
};

// First bytes of a slab, written by peers.
struct SlabHeader {
  u32 abort[kMaxRanks];  // by writer: 0, or 1 + the rank that the writer blames
};
constexpr u64 kSlabHeaderBytes = 4096;  // the rest of it is the hosts'

enum Flag : u32 {
  kScaleIsFloat32 = 1,  // else the scales have type T
  kGammaIsFloat32 = 2,
  kTriggerEarly = 4,   // at once
  kVectorRoutes = 8,   // top_k a multiple of 8, index and scales on 16-byte boundaries
  kWarmUp = 16,        // return before touching anything
  kScaleTiled = 32,    // scale_out in the layout of tiles or columns, else row after row
  kScaleIsUe8m0 = 64,  // of a group; else float32
  kTriggerHeard = 128  // once a block has all that it waits for from peers, if that is one row
};

struct Params {
  ControlBlock* control;
  const void* allreduce_in;   // T [num_permuted_rows, hidden]
  const void* route_index;    // int32 [token_num, top_k]
  const void* route_scale;    // T or float32 [token_num, top_k], or null: 1
  const void* shared_expert;  // T [token_num, hidden], or null
  const void* residual_in;    // T [token_num, hidden], or null
  const void* rms_gamma;      // T or float32 [hidden]; null without norm_out
  void* allreduce_out;        // T [token_num, hidden], or null, as the other outputs
  void* residual_out;
  void* norm_out;
  u64 epoch_bytes;        // from epoch 0's slots to epoch 1's
  u64 timeout_ns;         // 0: wait for ever
  u32 num_permuted_rows;  // at most 2^31: more cannot be indexed
  i32 rank;
  i32 token_num;
  i32 row_vectors;  // hidden / elements in 16 bytes of T
  i32 top_k;
  float routed_scaling_factor;
  float rms_eps;
  float weight_bias;
  float inverse_hidden;  // 1 / hidden
  u32 flags;
  u32 cluster_log2;    // blocks of a cluster, as a power of 2
  u32 delays;          // of test builds, see delay.cuh
  float scale_factor;  // of a format that is given a scale
  u32 reserved;
  const void* scale_in;  // float32 [1]: the scale in place of scale_factor, or null
  void* quant_out;       // codes [token_num, hidden]; null without kQuant
  void* scale_out;       // null where the scale is given
};

}  // namespace moe_ar
