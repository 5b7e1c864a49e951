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

// x / divisor for several x, rounded as one division is wherever that matters for a code. The
// compiler's division takes turns with the next one; this does not.
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
    x = ptx::clamp_f32(x * shift_, most_);
    const float q = x * inverse_;  // at most 1.5 units in the last place off
    // One correction can leave it off by one unit, but not where that changes a code: see
    // test_emulator.py, which has every case that could. With this sign of the remainder -0.0
    // stays.
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

// Where the scales of blocks lie: see codecs.py, scale_places.
class ScalePlaces {
 public:
  __device__ __forceinline__ explicit ScalePlaces(const Params& p)
      : out_(static_cast<u8*>(p.scale_out)),
        rows_(static_cast<u32>(p.token_num)),
        columns_(static_cast<u32>(p.row_vectors) / kBlockLanes),
        tiled_(p.flags & kScaleTiled),
        wide_(kGroups && !(p.flags & kScaleIsUe8m0)) {}

  // Stores a scale, and 0 into the padding that lies beyond it: columns, and rows of columns.
  __device__ __forceinline__ void store(u32 row, u32 column, u32 scale) const {
    put(row, column, scale);
    const bool ends_row = !wide_ && column + 1 == columns_ && columns_ % 4 != 0;
    const bool ends_column = kGroups && row + 1 == rows_ && rows_ % 4 != 0;
    if (!tiled_ || !(ends_row || ends_column)) return;
    const u32 last_row = ends_column ? row | 3 : row;
    const u32 last_column = ends_row ? column | 3 : column;
#pragma unroll 1
    for (u32 r = row; r <= last_row; ++r) {
#pragma unroll 1
      for (u32 c = column; c <= last_column; ++c) {
        if (r != row || c != column) put(r, c, 0);
      }
    }
  }

 private:
  __device__ __forceinline__ void put(u32 row, u32 column, u32 value) const {
    u64 place;
    if (!tiled_) {
      place = ptx::mad_wide(row, columns_, column);
    } else if constexpr (kSwizzles) {
      const u32 in_tile = row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
      place = ptx::mad_wide(row / 128, (columns_ + 3) / 4 * 512, column / 4 * 512 + in_tile);
    } else {
      const u32 padded_rows = (rows_ + 3) / 4 * 4;
      place = wide_ ? ptx::mad_wide(column, padded_rows, row)
                    : ptx::mad_wide(column / 4, padded_rows, row) * 4 + column % 4;
    }
    if (wide_) {
      ptx::st_u32(out_ + place * 4, value);
    } else {
      ptx::st_u8(out_ + place, static_cast<u8>(value));
    }
  }

  u8* out_;
  u32 rows_;
  u32 columns_;
  bool tiled_;
  bool wide_;
};

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
  store_codes(p, offset, x, divisor);
  if constexpr (kRows) {
    u8* to = static_cast<u8*>(p.scale_out);
    if (column == 0) ptx::st_u32(ptx::at(to, static_cast<u32>(token), 4), scale);
  } else if (static_cast<u32>(column) % kBlockLanes == 0) {
    ScalePlaces(p).store(static_cast<u32>(token), static_cast<u32>(column) / kBlockLanes, scale);
  }
}

}  // namespace moe_ar
