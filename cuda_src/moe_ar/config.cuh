// What is fixed when a variant is compiled. The only reader of -D macros.
#pragma once

namespace moe_ar {

enum class DType : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };
// What a rank contributes to a token: the rows of its routes, a row, the rows of all its experts.
enum class Producer : int { kMoeFinalize = 0, kDense = 1, kMoeReduction = 2 };
// The halves of two-shot stand for themselves too.
enum class Protocol : int { kOneShot = 0, kTwoShot = 1, kReduceScatter = 2, kAllGather = 3 };
// What is made of the norm besides (quant.cuh).
enum class Quant : int {
  kNone = 0,
  kFp8Static = 1,
  kFp8PerTokenGroup = 2,
  kNvfp4 = 3,
  kMxfp8 = 4,
  kFp8PerToken = 5
};

constexpr DType kDType = static_cast<DType>(MOE_AR_DTYPE);           // T: activations
constexpr DType kCommDType = static_cast<DType>(MOE_AR_COMM_DTYPE);  // C: what travels
constexpr Producer kProducer = static_cast<Producer>(MOE_AR_PRODUCER);
constexpr Protocol kProtocol = static_cast<Protocol>(MOE_AR_PROTOCOL);
constexpr Quant kQuant = static_cast<Quant>(MOE_AR_QUANT);
constexpr int kWorldSize = MOE_AR_WORLD_SIZE;
constexpr bool kDelays = MOE_AR_DELAYS;  // a test build, see delay.cuh

constexpr int kMaxRanks = 16;
constexpr int kMaxBlockThreads = 512;  // 128 registers: the rows of 8 routes are in flight
constexpr int kMaxGridBlocks = 2048;
constexpr int kMaxRowGroups = 128;  // groups of 32 vectors of 16 bytes: rows up to 64 KiB

static_assert(kWorldSize >= 1 && kWorldSize <= kMaxRanks, "world size out of range");
static_assert(kCommDType == kDType || kCommDType == DType::kFloat32, "the wire is T or float32");

}  // namespace moe_ar

#define MOE_AR_PASTE_(a, b) a##b
#define MOE_AR_PASTE(a, b) MOE_AR_PASTE_(a, b)
// Name of a kernel of this variant, as profilers show it.
#define MOE_AR_KERNEL(suffix) MOE_AR_PASTE(MOE_AR_KERNEL_NAME, suffix)
