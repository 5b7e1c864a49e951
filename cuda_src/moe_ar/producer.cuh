// What a rank contributes to a token, a vector at a time: Part<kInFlight> is the class of this
// variant. Each reads parameters only when it is made, and has operator()(ahead, partial).
#pragma once

#include <moe_ar/epilogue.cuh>
#include <moe_ar/finalize.cuh>
#include <moe_ar/reduction.cuh>

namespace moe_ar {

// A row as it is.
class Dense {
 public:
  __device__ __forceinline__ Dense(const Params& p, int row, int column)
      : from_(ptx::settled(static_cast<const u8*>(p.allreduce_in) + row_offset(p, row, column))) {}

  __device__ __forceinline__ void operator()(u32 ahead, float (&partial)[kElements]) const {
    unpack<kDType>(ptx::ld_once_v4(from_ + ahead), partial);
  }

 private:
  const u8* from_;
};

template <Producer kWhich, int kInFlight>
struct PartOf {
  using Type = Dense;
};

template <int kInFlight>
struct PartOf<Producer::kMoeFinalize, kInFlight> {
  using Type = Finalize<kInFlight>;
};

template <int kInFlight>
struct PartOf<Producer::kMoeReduction, kInFlight> {
  using Type = Reduction<kInFlight>;
};

// `kInFlight` loads at a time: 8 where latency counts, 4 where many threads hide it and registers
// are short.
template <int kInFlight>
using Part = typename PartOf<kProducer, kInFlight>::Type;

// A vector of the part as it travels.
template <class Source>
__device__ __forceinline__ Payload produce(const Source& part, u32 ahead = 0) {
  float partial[kElements];
  part(ahead, partial);
  return to_wire(partial);
}

}  // namespace moe_ar
