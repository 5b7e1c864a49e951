// Quantised outputs: what is made of the norm besides norm_out, a vector at a time.
// cupy_moe_ar/codecs.py has the arithmetic in NumPy, formats.py the sizes.
//
// What is quantised is the norm as rounded to T. x is about code * scale (NVFP4: and * the given
// scale). Blocks of a scale are whole lanes of a warp: a row has whole blocks, so that all lanes of
// a block are inside of it, or none.
#pragma once

#include <moe_ar/params.cuh>
#include <moe_ar/vec.cuh>

namespace moe_ar {

constexpr bool kQuantises = kQuant != Quant::kNone;  // then a launch always needs the norm
constexpr bool kGivenScale = kQuant == Quant::kFp8Static || kQuant == Quant::kNvfp4;
constexpr bool kFp4 = kQuant == Quant::kNvfp4;
constexpr bool kGroups = kQuant == Quant::kFp8PerTokenGroup;
constexpr bool kSwizzles = kQuant == Quant::kNvfp4 || kQuant == Quant::kMxfp8;
constexpr int kBlockElements = kGroups ? 128 : kQuant == Quant::kMxfp8 ? 32 : 16;
constexpr u32 kBlockLanes = kBlockElements / kElements;  // where a scale has a block
constexpr u32 kCodeBytes = kElements / (kFp4 ? 2 : 1);   // of a vector

// The scale that a launch is given: loaded early, since it may lie in memory.
template <bool kIsGiven>
struct GivenScaleOf {
  __device__ __forceinline__ void load_scale(const Params&) {}
  __device__ __forceinline__ float scale() const { return 1.0f; }
};

template <>
struct GivenScaleOf<true> {
  float scale_;

  __device__ __forceinline__ void load_scale(const Params& p) {
    scale_ = p.scale_in != nullptr ? ptx::as_f32(ptx::ld_u32(p.scale_in)) : p.scale_factor;
  }
  __device__ __forceinline__ float scale() const { return scale_; }
};

using GivenScale = GivenScaleOf<kGivenScale>;

// x / divisor for several x, rounded as one division is, where the quotient rounds to a code other
// than 0. The compiler's division takes turns with the next one; this does not.
class Divisor {
 public:
  __device__ __forceinline__ explicit Divisor(float divisor) {
    const u32 bits = ptx::as_u32(divisor) & 0x7fffffffu;
    const float magnitude = ptx::as_f32(bits);
    usable_ = bits != 0 && bits != soft::kInfinity;
    // In the middle of the range, so that nothing that counts overflows or is rounded twice.
    const float shift = magnitude < 0x1p-90f ? 0x1p100f : magnitude > 0x1p90f ? 0x1p-100f : 1.0f;
    shift_ = divisor < 0.0f ? -shift : shift;
    divisor_ = divisor * shift_;
    inverse_ = 1.0f / divisor_;
    most_ = divisor_ * 1024.0f;  // beyond what any code has
  }

  // Without it all codes are 0.
  __device__ __forceinline__ bool usable() const { return usable_; }

  __device__ __forceinline__ float operator()(float x) const {
    x *= shift_;
    x = x > most_ ? most_ : x;  // a NaN stays
    x = x < -most_ ? -most_ : x;
    float q = x * inverse_;
    // The remainder is exact in the second step, and the quotient then the nearest (Markstein). It
    // is taken with this sign so that -0.0 stays.
    q = ptx::fma_f32(ptx::fma_f32(q, divisor_, -x), -inverse_, q);
    return ptx::fma_f32(ptx::fma_f32(q, divisor_, -x), -inverse_, q);
  }

 private:
  bool usable_;
  float shift_;
  float divisor_;
  float inverse_;
  float most_;
};

// `offset` is the vector's in rows of T.
__device__ __forceinline__ void store_codes(const Params& p, u64 offset,
                                            const float (&x)[kElements], float divisor) {
  const Divisor divide(divisor);
  float q[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) q[i] = divide(x[i]);
  u32 words[2] = {};
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    if constexpr (kFp4) {
      words[0] |= ptx::pack_e2m1x4(q + i) << 4 * i;
    } else {
      words[i / 4] = ptx::pack_e4m3x2(q[i], q[i + 1]) | ptx::pack_e4m3x2(q[i + 2], q[i + 3]) << 16;
    }
  }
#pragma unroll
  for (u32& word : words) word = divide.usable() ? word : 0;
  u8* to = static_cast<u8*>(p.quant_out) + offset / sizeof(Vec16) * kCodeBytes;
  if constexpr (kCodeBytes == 8) {
    ptx::st_v2(to, words[0], words[1]);
  } else if constexpr (kCodeBytes == 4) {
    ptx::st_u32(to, words[0]);
  } else {
    ptx::st_u16(to, static_cast<u16>(words[0]));
  }
}

// Stores the scale of a block, and 0 into padding that lies beyond it: columns, and in column-major
// order rows. See codecs.py, scale_places.
__device__ __forceinline__ void store_scale(const Params& p, u32 row, u32 column, u32 scale) {
  u8* out = static_cast<u8*>(p.scale_out);
  const u32 columns = static_cast<u32>(p.row_vectors) / kBlockLanes;
  const bool wide = kGroups && !(p.flags & kScaleIsUe8m0);
  const auto store = [&](u64 place, u32 value) {
    if (wide) {
      ptx::st_u32(out + place * 4, value);
    } else {
      ptx::st_u8(out + place, static_cast<u8>(value));
    }
  };
  if (!(p.flags & kScaleTiled)) {
    store(ptx::mad_wide(row, columns, column), scale);
    return;
  }
  const u32 rows = static_cast<u32>(p.token_num);
  const u32 padded_rows = (rows + 3) / 4 * 4;
  const u32 last_row = kGroups && row + 1 == rows ? padded_rows - 1 : row;
  const u32 last_column = !wide && column + 1 == columns ? column | 3 : column;
#pragma unroll 1
  for (u32 r = row; r <= last_row; ++r) {
#pragma unroll 1
    for (u32 c = column; c <= last_column; ++c) {
      const u32 value = r == row && c == column ? scale : 0;
      if constexpr (kSwizzles) {
        store(ptx::mad_wide(r / 128, (columns + 3) / 4 * 512,
                            c / 4 * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4),
              value);
      } else if (wide) {
        store(ptx::mad_wide(c, padded_rows, r), value);
      } else {
        store(ptx::mad_wide(c / 4, padded_rows, r) * 4 + c % 4, value);
      }
    }
  }
}

// Zeroes the rows past the last token in its tile of 128. Every thread of the grid, after pdl_wait.
__device__ __forceinline__ void clear_scale_padding(const Params& p) {
  if constexpr (kSwizzles) {
    const u32 rows = static_cast<u32>(p.token_num) % 128;
    if (!(p.flags & kScaleTiled) || rows == 0) return;
    const u32 tiles = (static_cast<u32>(p.row_vectors) / kBlockLanes + 3) / 4;
    u8* begin = static_cast<u8*>(p.scale_out);
    begin = ptx::at(begin, static_cast<u32>(p.token_num) / 128, tiles * 512);
    const u32 first = ptx::block_index() * ptx::block_threads() + ptx::thread_index();
    for (u32 i = first; i < tiles * 32; i += ptx::grid_blocks() * ptx::block_threads()) {
      // 16 bytes have four columns of the rows `row`, + 32, + 64 and + 96.
      const u32 row = i % 32;
      const u32 taken = rows > row ? (rows - row + 31) / 32 : 0;
      if (taken == 0) {
        ptx::st_v4(begin + i * sizeof(Vec16), Vec16{});
        continue;
      }
#pragma unroll 1
      for (u32 word = taken; word < 4; ++word) {
        ptx::st_u32(begin + i * sizeof(Vec16) + word * 4, 0);
      }
    }
  }
}

// Bits of the largest magnitude of the block; a NaN is larger than all numbers.
__device__ __forceinline__ u32 block_magnitude(const float (&x)[kElements], u32 lane) {
  u32 most = 0;
#pragma unroll
  for (float value : x) most = ptx::max_u32(most, ptx::as_u32(value) & 0x7fffffffu);
  const u32 members = 0xffffffffu >> (32 - kBlockLanes) << (lane & ~(kBlockLanes - 1));
#pragma unroll
  for (u32 step = 1; step < kBlockLanes; step *= 2) {
    most = ptx::max_u32(most, ptx::shfl_xor_u32(most, step, members));
  }
  return most;
}

// Makes quant_out and scale_out of a vector of the norm, together with the other lanes of its
// block. `row_magnitude`: of the whole row's norm.
__device__ __forceinline__ void store_quantised(const Params& p, int token, int column, u64 offset,
                                                const Vec16& norm, float row_magnitude,
                                                const GivenScale& given) {
  float x[kElements];
  unpack<kDType>(norm, x);
  if constexpr (kQuant == Quant::kFp8Static) {
    store_codes(p, offset, x, given.scale());
    return;
  }
  constexpr bool kRows = kQuant == Quant::kFp8PerToken;
  u32 bits = 0;
  if constexpr (kRows) {
    bits = ptx::as_u32(row_magnitude) & 0x7fffffffu;
  } else {
    bits = block_magnitude(x, static_cast<u32>(column) % 32);
  }
  const float most = ptx::as_f32(bits == soft::kInfinity ? soft::kInfinity - 1 : bits);
  float divisor = most / (kFp4 ? 6.0f * given.scale() : 448.0f);
  u32 scale = ptx::as_u32(divisor);
  if constexpr (kFp4) {
    scale = bits == 0 ? 0 : ptx::pack_e4m3x2(divisor, 0.0f);
    const float value = ptx::unpack_e4m3(scale);
    divisor = value == 0.0f ? 0.0f : value * given.scale();
  } else if (kQuant == Quant::kMxfp8 || (kGroups && p.flags & kScaleIsUe8m0)) {
    scale = ptx::ue8m0_up(divisor);
    // 2^-127 is subnormal, and no float has the exponent of a NaN and is a number.
    divisor = ptx::as_f32(scale == 0 ? 0x400000u : scale == 0xff ? 0x7fffffffu : scale << 23);
    if (bits == 0) divisor = 0.0f;
  }
  if constexpr (kRows) {
    u8* to = static_cast<u8*>(p.scale_out);
    if (column == 0) ptx::st_u32(ptx::at(to, static_cast<u32>(token), 4), scale);
  } else if (static_cast<u32>(column) % kBlockLanes == 0) {
    store_scale(p, static_cast<u32>(token), static_cast<u32>(column) / kBlockLanes, scale);
  }
  store_codes(p, offset, x, divisor);
}

}  // namespace moe_ar
