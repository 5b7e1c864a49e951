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
constexpr bool kBlocks = kGroups || kSwizzles;  // a scale for each block
constexpr int kBlockElements = kGroups ? 128 : kQuant == Quant::kMxfp8 ? 32 : 16;
constexpr u32 kBlockLanes = kBlocks ? kBlockElements / kElements : 1;
constexpr u32 kCodeBytes = kElements / (kFp4 ? 2 : 1);  // of a vector

// The scale that a launch is given.
__device__ __forceinline__ float given_scale(const Params& p) {
  return p.scale_in != nullptr ? ptx::as_f32(ptx::ld_u32(p.scale_in)) : p.scale_factor;
}

// Division of several x by one divisor, rounded as one division is wherever that matters for a
// code. The compiler's division takes turns with the next one; this does not. It is right where the
// divisor is from kLeast to kMost and every |x| is at most about 1024 times as large: elsewhere
// something overflows, is rounded twice, or a zero loses its sign.
constexpr float kLeast = 0x1p-90f;
constexpr float kMost = 0x1p90f;

template <int kCount>
__device__ __forceinline__ void divide(float (&x)[kCount], float divisor, float inverse) {
#pragma unroll
  for (float& value : x) {
    const float q = value * inverse;  // at most 1.5 units in the last place off
    // One correction can leave it off by one unit, but not where that changes a code: see
    // test_emulator.py, which has every case that could. With this sign of the remainder -0.0
    // stays.
    value = ptx::fma_f32(ptx::fma_f32(q, divisor, -value), -inverse, q);
  }
}

// Makes any x and divisor such as it takes, whose quotients have the same codes: a divisor that is
// 0 or infinite makes zeros.
template <int kCount>
__device__ __forceinline__ void tame(float (&x)[kCount], float& divisor) {
  const float magnitude = ptx::as_f32(ptx::as_u32(divisor) & 0x7fffffffu);
  const bool usable = magnitude != 0.0f && ptx::as_u32(magnitude) != soft::kInfinity;
  float shift = magnitude < kLeast ? 0x1p100f : magnitude > kMost ? 0x1p-100f : 1.0f;
  if (divisor < 0.0f) shift = -shift;
  divisor = usable ? divisor * shift : 1.0f;
#pragma unroll
  for (float& value : x) value = usable ? ptx::clamp_f32(value * shift, divisor * 1024.0f) : 0.0f;
}

// x / 448, for x from 2^-90.
__device__ __forceinline__ float divide_by_448(float x) {
  constexpr float kInverse = 1.0f / 448.0f;
  const float q = x * kInverse;
  return ptx::fma_f32(ptx::fma_f32(q, -448.0f, x), kInverse, q);  // right for every fraction
}

// The UE8M0 code of most / 448, for most from 2^-100 and finite: of the least power of two that is
// not below.
__device__ __forceinline__ u32 ue8m0_code(float most) {
  return ((ptx::as_u32(most) + 0x1fffff) >> 23) - 8;  // 448 is 1.75 * 2^8
}

// A nibble for each element, 8 where its sign is set.
__device__ __forceinline__ u32 sign_nibbles(const Vec16& v) {
  u32 even, odd;  // bytes with the signs of elements 0, 2, 4, 6 and 1, 3, 5, 7
  if constexpr (kElements == 8) {
    const u32 low = ptx::byte_perm(v.w[0], v.w[1], 0x7351);
    const u32 high = ptx::byte_perm(v.w[2], v.w[3], 0x7351);
    even = ptx::byte_perm(low, high, 0x5410);
    odd = ptx::byte_perm(low, high, 0x7632);
  } else {
    even = ptx::byte_perm(v.w[0], v.w[2], 0x73) & 0xffff;
    odd = ptx::byte_perm(v.w[1], v.w[3], 0x73) & 0xffff;
  }
  return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

__device__ __forceinline__ void store_e4m3(u8* to, const float (&x)[kElements]) {
  u32 words[2] = {};
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    words[i / 4] = ptx::pack_e4m3x2(x[i], x[i + 1]) | ptx::pack_e4m3x2(x[i + 2], x[i + 3]) << 16;
  }
  if constexpr (kElements == 8) {
    ptx::st_v2(to, words[0], words[1]);
  } else {
    ptx::st_u32(to, words[0]);
  }
}

// `x` without their signs.
__device__ __forceinline__ void store_e2m1(u8* to, const float (&x)[kElements], u32 signs) {
  u32 codes = signs;
#pragma unroll
  for (int i = 0; i < kElements; i += 4) codes |= ptx::pack_e2m1x4(x + i) << 4 * i;
  if constexpr (kElements == 8) {
    ptx::st_u32(to, codes);
  } else {
    ptx::st_u16(to, static_cast<u16>(codes));
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

  // Of a row, the same in all threads, and a column.
  __device__ __forceinline__ u8* operator()(u32 row, u32 column) const {
    const u32 bytes = wide_ ? 4 : 1;
    // From row to row, from four columns to the next four, and from column to column.
    u32 from = columns_ * bytes, four = 4 * bytes, one = bytes;
    if (kSwizzles && tiled_) {
      from = (columns_ + 3) / 4 * 512;
      four = 512;
    } else if (tiled_) {
      from = 4;
      four = (rows_ + 3) / 4 * 4 * (wide_ ? 16 : 4);
      if (wide_) one = four / 4;
    }
    u8* to = out_;
    if (kSwizzles && tiled_) to += row % 32 * 16 + row % 128 / 32 * 4;
    to = ptx::at(to, kSwizzles && tiled_ ? row / 128 : row, from);
    return ptx::at(to + column % 4 * one, column / 4, four);
  }

  // Stores 0 into the padding that lies beyond a scale: columns, and rows of columns.
  __device__ __forceinline__ void clear_beyond(u32 row, u32 column) const {
    const bool ends_row = !wide_ && column + 1 == columns_ && columns_ % 4 != 0;
    const bool ends_column = kGroups && row + 1 == rows_ && rows_ % 4 != 0;
    if (!tiled_ || !(ends_row || ends_column)) return;
    const u32 last_row = ends_column ? row | 3 : row;
    const u32 last_column = ends_row ? column | 3 : column;
#pragma unroll 1
    for (u32 r = row; r <= last_row; ++r) {
#pragma unroll 1
      for (u32 c = column; c <= last_column; ++c) {
        if (r != row || c != column) store((*this)(r, c), 0);
      }
    }
  }

  __device__ __forceinline__ void store(u8* to, u32 scale) const {
    if (wide_) {
      ptx::st_u32(to, scale);
    } else {
      ptx::st_u8(to, static_cast<u8>(scale));
    }
  }

 private:
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
    const u32 threads = ptx::grid_blocks() * ptx::block_threads();
    // 16 bytes have four columns of the rows `row`, + 32, + 64 and + 96: a thread's always the
    // same.
    const u32 row = first % 32;
    const u32 taken = rows > row ? (rows - row + 31) / 32 : 0;
    const bool store[4] = {taken == 0, taken == 1, taken - 1 < 2, taken - 1 < 3};
    // Without branches, so that a thread's stores do not wait for each other's addresses; rolled
    // where registers are short.
    [[maybe_unused]] constexpr int kUnroll = kWireVectors == 1 ? 4 : 1;
#pragma unroll kUnroll
    for (u32 i = first; i < tiles * 32; i += threads) {
      u8* to = begin + i * sizeof(Vec16);
      if (store[0]) ptx::st_v4(to, Vec16{});
      if (store[1]) ptx::st_u32(to + 4, 0);
      if (store[2]) ptx::st_u32(to + 8, 0);
      if (store[3]) ptx::st_u32(to + 12, 0);
    }
  }
}

// Largest |x| of the vector; a NaN is larger than all numbers.
__device__ __forceinline__ float largest_of(const float (&x)[kElements]) {
  float most = 0.0f;
#pragma unroll
  for (float value : x) most = ptx::max_magnitude_f32(most, value);
  return most;
}

// Of the vectors of the block, its bits. Every lane of the warp.
__device__ __forceinline__ u32 largest_of_block(u32 most) {
#pragma unroll
  for (u32 step = 1; step < kBlockLanes; step *= 2) {
    most = ptx::max_u32(most, ptx::shfl_xor_u32(most, step));
  }
  return most;
}

// Makes quant_out and scale_out of a vector of the norm. Every lane of a warp, those outside of the
// row too; they store nothing. Usual numbers take a way without branches, on which the vectors of a
// thread do not wait for each other; any others send them all on a detour.
class Quantiser {
 public:
  // Where everything goes; `offset` is the vector's in rows of T.
  __device__ __forceinline__ void place(const Params& p, int token, int column, u64 offset,
                                        bool inside) {
    const u32 row = static_cast<u32>(token);
    codes_ = static_cast<u8*>(p.quant_out) + offset / sizeof(Vec16) * kCodeBytes;
    scale_ = nullptr;
    if constexpr (kQuant == Quant::kFp8PerToken) {
      if (inside && column == 0) scale_ = ptx::at(static_cast<u8*>(p.scale_out), row, 4);
    } else if constexpr (kBlocks) {
      if (!inside || static_cast<u32>(column) % kBlockLanes != 0) return;
      const ScalePlaces places(p);
      scale_ = places(row, static_cast<u32>(column) / kBlockLanes);
      places.clear_beyond(row, static_cast<u32>(column) / kBlockLanes);
    }
  }

  // Then what else needs no totals of the row. `most` is the largest |weighted| of the block, of
  // the vector where the scale is given; times the row's factor that is the norm.
  __device__ __forceinline__ void prepare(float most, float given) {
    most_ = most;
    if constexpr (kGivenScale) {
      given_ = given;
      divisor_ = kFp4 ? 6.0f * given_ : given_;
      usual_ = divisor_ >= 0x1p-70f && divisor_ <= 0x1p70f;
      inverse_ = ptx::reciprocal_f32(usual_ ? divisor_ : 1.0f);
    }
  }

  // Then the scale. `norm` is as rounded to T, `row_most` the largest |weighted| of the row. False
  // if detour must come next.
  __device__ __forceinline__ bool begin(const Params& p, const Vec16& norm, float factor,
                                        float row_most) {
    unpack<kDType>(norm, x_);
    if constexpr (kQuant == Quant::kFp8Static)
      return usual_ && most_ * factor <= divisor_ * 1024.0f;
    // Rounding keeps the order, so that this is the largest |norm| as rounded.
    float most[kElements] = {(kQuant == Quant::kFp8PerToken ? row_most : most_) * factor};
    unpack<kDType>(pack<kDType>(most), most);
    most_ = most[0];
    if constexpr (kFp4) {
      signs_ = sign_nibbles(norm);
#pragma unroll
      for (float& value : x_) value = ptx::abs_f32(value);
      divide(most, divisor_, inverse_);
      code_ = ptx::pack_e4m3x2(most[0], 0.0f);
      // Neither 0, nor so large that it saturates.
      const bool usual = usual_ && most_ <= divisor_ * 1024.0f && code_ - 1 < 0x7d;
      divisor_ = ptx::unpack_e4m3(code_) * given_;
      inverse_ = ptx::reciprocal_f32(divisor_);
      return usual;
    }
    if constexpr (kQuant == Quant::kMxfp8) {
      code_ = ue8m0_code(most_);
      inverse_ = ptx::as_f32((254 - code_) << 23);
    } else {
      divisor_ = divide_by_448(most_);
      code_ = ptx::as_u32(divisor_);
      if (by_power(p)) {
        code_ = ue8m0_code(most_);
        divisor_ = ptx::as_f32(code_ << 23);
      }
      inverse_ = ptx::reciprocal_f32(divisor_);
    }
    return most_ >= 0x1p-80f && most_ <= kMost;
  }

  // The scale and x_ of any numbers; the scale of usual ones stays.
  __device__ __forceinline__ void detour(const Params& p, float factor) {
    if constexpr (kQuant != Quant::kFp8Static) most_ = finite_most(factor);
    if constexpr (kFp4) {
      code_ = most_ == 0.0f ? 0 : ptx::pack_e4m3x2(most_ / (6.0f * given_), 0.0f);
      const float value = ptx::unpack_e4m3(code_);
      divisor_ = value == 0.0f ? 0.0f : value * given_;  // not negative, or NaN
      const bool number = divisor_ == divisor_;
      if (!(number && divisor_ > 0.0f && ptx::as_u32(divisor_) < soft::kInfinity)) signs_ = 0;
#pragma unroll
      for (float& x : x_) x = number ? x : 6.0f;
      divisor_ = number ? divisor_ : 1.0f;
    } else if (by_power(p)) {
      const bool number = most_ == most_;
      const float least = 1.75f * 0x1p-119f;  // 448 * 2^-127
      code_ = number ? ue8m0_code(most_ > least ? most_ : least) : 0xff;
      const float inverse = ptx::as_f32(number ? (254 - code_) << 23 : 0x7fffffffu);
#pragma unroll
      for (float& x : x_) x = most_ == 0.0f ? 0.0f : ptx::clamp_f32(x * inverse, 1024.0f);
      divisor_ = inverse_ = 1.0f;
      return;
    } else if (kQuant != Quant::kFp8Static) {
      divisor_ = most_ / 448.0f;
      code_ = ptx::as_u32(divisor_);
    }
    tame(x_, divisor_);
    inverse_ = ptx::reciprocal_f32(divisor_);
  }

  // Last, the codes.
  __device__ __forceinline__ void finish(const Params& p, bool inside) {
    if constexpr (kQuant == Quant::kMxfp8) {
#pragma unroll
      for (float& x : x_) x *= inverse_;  // exact wherever that matters for a code
    } else {
      divide(x_, divisor_, inverse_);
    }
    if (inside) {
      if constexpr (kFp4) {
        store_e2m1(codes_, x_, signs_);
      } else {
        store_e4m3(codes_, x_);
      }
    }
    if (kQuant == Quant::kFp8Static || scale_ == nullptr) return;
    if constexpr (kQuant == Quant::kFp8PerToken) {
      ptx::st_u32(scale_, code_);
    } else {
      ScalePlaces(p).store(scale_, code_);
    }
  }

 private:
  // Whether scales are powers of two.
  static __device__ __forceinline__ bool by_power(const Params& p) {
    return kQuant == Quant::kMxfp8 || (kGroups && p.flags & kScaleIsUe8m0);
  }

  // The largest |norm|, but finite, or NaN.
  __device__ __forceinline__ float finite_most(float factor) const {
    float most = most_;
    // Of infinity times 0 and times more the former is the larger one.
    if (kQuant != Quant::kFp8PerToken && ptx::as_u32(factor) == soft::kInfinity) {
      most = ptx::as_f32(largest_of_block(ptx::as_u32(largest_of(x_))));
    }
    const u32 bits = ptx::as_u32(most) & 0x7fffffffu;
    return ptx::as_f32(bits == soft::kInfinity ? soft::kInfinity - 1 : bits);
  }

  float given_;    // scale of the launch
  float divisor_;  // first of the block's largest, where the scale is given; then of x_
  float inverse_;  // of the divisor
  bool usual_;     // whether the given scale is
  float most_;     // largest |weighted| of the block, of the vector if the scale is given; then
                   // largest |norm|
  float x_[kElements];  // of the norm; FP4: without signs
  u32 signs_;           // FP4: of x_, as bits of codes
  u32 code_;            // of the scale
  u8* codes_;           // where the vector's codes go
  u8* scale_;           // where this lane stores the block's scale, or null
};

}  // namespace moe_ar
