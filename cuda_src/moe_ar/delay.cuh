// Test builds: launches that come late at chosen points. Elsewhere nothing is left of it.
#pragma once

#include <moe_ar/params.cuh>

namespace moe_ar {

enum class Point : u32 {
  kPush = 1,     // before a push
  kPoll = 2,     // before the first look whether a row has arrived
  kRestore = 4,  // when it has
  kAdvance = 8,  // before the block advances its epoch
  kEnd = 16,     // before the kernel ends
};

// Every thread waits where Params::delays has the point among its bits 0 to 7, as many microseconds
// as the other bits say.
__device__ __forceinline__ void delay([[maybe_unused]] const Params& p,
                                      [[maybe_unused]] Point point) {
  if constexpr (kDelays) {
    if ((p.delays & static_cast<u32>(point)) == 0) return;
    const u64 begin = ptx::globaltimer_ns();
    while (ptx::globaltimer_ns() - begin < (p.delays >> 8) * u64{1000}) ptx::spin_pause();
  }
}

}  // namespace moe_ar
