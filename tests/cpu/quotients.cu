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
    const float x = p.x[i], magnitude = as_f32(as_u32(x) & 0x7fffffffu);
    u32* out = p.out + 4 * i;
    for (u32 way = 0; way < 2; ++way) {
      float q[1] = {x}, divisor = p.divisor[i];
      if (way == 1 || !(divisor >= kLeast && divisor <= kMost && magnitude <= divisor * 1024.0f)) {
        tame(q, divisor);
      }
      divide(q, divisor, reciprocal_f32(divisor));
      const float number[4] = {as_f32(as_u32(q[0]) & 0x7fffffffu)};
      out[way] = pack_e4m3x2(q[0], 0) | pack_e2m1x4(number) << 8;
    }
    out[2] = as_u32(divide_by_448(magnitude));
    out[3] = ue8m0_code(magnitude);
  }
}
