// Parameters of the kernels that test the emulator.
#pragma once

#include <cstdint>

constexpr int kMaxTestRanks = 3;
constexpr std::uint32_t kMaxTestThreads = 256;  // of a grid that exchanges
constexpr std::uint32_t kEmpty = 0x80000000;

// Control words of a rank, advanced on the "device".
struct TestControl {
  std::uint32_t epoch, arrived;
  std::uint64_t blocks;  // that took part in an exchange
};

enum Misuse : std::uint32_t {
  kNoMisuse,
  kNoInit,
  kInitTwice,
  kInitOfPeer,
  kInitAfterArrive,
  kUseBeforeWait,
  kUseAfterArrive,
  kUnalignedBarrier,
  kExpectTwice,
  kExpectOfPeer,
  kWaitForPeer,
  kTooManyBytes,
  kOtherBarrier,
  kWaitBeforeArrive,
  kArriveTwice,
  kStoreBeforeWait,
  kStoreToReturned,
  kPlainStoreToPeer,
  kPlainLoadFromPeer,
  kPlaceOfPeer,
  kPlaceBeyondCluster,
  kPlaceOutside,
  kTwoTypes,
};

struct TestParams {
  std::uint32_t* out;       // a word a thread of the grid
  const std::uint32_t* in;  // likewise
  std::uint32_t* flag;      // [1]
  // exchange: slots[rank] holds [2 epochs][writer][kMaxTestThreads] of 16 bytes.
  std::uint32_t* slots[kMaxTestRanks];
  TestControl* control;
  std::uint32_t rank, ranks;
  std::uint32_t cluster_blocks;
  std::uint32_t rounds;
  std::uint32_t planted;  // 0, or which fault of this kernel
};

struct ConvertParams {
  const void* in;
  void* out;
  std::uint32_t count;
  std::uint32_t what;  // 0: float2 to bf16x2, 1: float2 to f16x2, 2: f16 to float,
                       // 3, 4: drop -0 of bf16x2, f16x2, 5: rsqrt, 6: float doubled by fma,
                       // 7: float2 to e4m3x2, 8: float4 to e2m1x4, 9: e4m3 to float
};

struct QuotientParams {
  const float* x;
  const float* divisor;
  std::uint32_t* out;  // [count][4]: E4M3 code of x / divisor in the low byte, E2M1's of its
                       // magnitude above; the same the long way; |x| / 448; its UE8M0 code
  std::uint32_t count;
};

extern "C" {
void barrier(const void* params);
void shuffle(const void* params);
void cluster(const void* params);
void misuse(const void* params);
void row_sums(const void* params);
void exchange(const void* params);
void publish(const void* params);
void stuck(const void* params);
void convert(const void* params);
void quotients(const void* params);
}
