// The library's own division for codes.
#define MOE_AR_DELAYS 0
#define MOE_AR_PRODUCER 1
#define MOE_AR_PROTOCOL 0
#define MOE_AR_DTYPE 2
#define MOE_AR_COMM_DTYPE 2
#define MOE_AR_QUANT 1
#define MOE_AR_WORLD_SIZE 1
#include <moe_ar/quant.cuh>

#include "kernels.h"

// A code of E4M3 in the low byte, one of E2M1 above it; 0 where the divisor is of no use.
MOE_AR_DEFINE_KERNEL(quotients, 1024, QuotientParams, p) {
  using namespace moe_ar;
  using namespace moe_ar::ptx;
  const u32 step = grid_blocks() * block_threads();
  for (u32 i = block_index() * block_threads() + thread_index(); i < p.count; i += step) {
    const Divisor divide(p.divisor[i]);
    const float q[4] = {divide(p.x[i])};
    p.out[i] = divide.usable() ? pack_e4m3x2(q[0], 0) | pack_e2m1x4(q) << 8 : 0;
  }
}
