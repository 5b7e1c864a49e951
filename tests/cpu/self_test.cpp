// Runs the kernels of kernels.cu: self_test TEST SEED [PLANTED [SECONDS]]. Exit status 0: as
// expected, 1: wrong values, 2: and a launch after it failed too, 10 + s: status s of the launch.
#include <emulator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace {

using u32 = std::uint32_t;

struct Shape {
  u32 blocks, threads, cluster = 1, resident = 0;
};

std::uint64_t seed;
u32 planted;
double watchdog_seconds = 20;

int launch(void (*kernel)(const void*), const TestParams& params, Shape shape, u32 rank = 0) {
  const MoeArEmulatorConfig config{shape.blocks,
                                   shape.threads,
                                   shape.cluster,
                                   shape.resident,
                                   seed ? seed + 1000 * rank : 0,
                                   watchdog_seconds,
                                   nullptr,
                                   0};
  const int status = moe_ar_emulator_launch(kernel, &params, &config);
  if (status != 0) std::printf("rank %u: status %d: %s\n", rank, status, moe_ar_emulator_error());
  return status == 0 ? 0 : 10 + status;
}

std::vector<u32> inputs(std::size_t n, u32 salt) {
  std::vector<u32> words(n);
  for (std::size_t i = 0; i < n; ++i) words[i] = static_cast<u32>(i * 2654435761u + salt) >> 4;
  return words;
}

int check(const char* what, u32 i, u32 got, u32 expected) {
  if (got == expected) return 0;
  std::printf("%s: word %u is %u, not %u\n", what, i, got, expected);
  return 1;
}

// Runs `kernel` and compares its outputs with expected(i).
template <class Expected>
int run(const char* name, void (*kernel)(const void*), Shape shape, u32 rounds,
        Expected expected_of) {
  const u32 n = shape.blocks * shape.threads;
  const std::vector<u32> in = inputs(n, rounds);
  std::vector<u32> out(n, 0xdeadbeef);
  u32 flag = 0;
  TestParams p{};
  p.in = in.data(), p.out = out.data(), p.flag = &flag;
  p.rounds = rounds, p.planted = planted, p.cluster_blocks = shape.cluster;
  int status = launch(kernel, p, shape);
  for (u32 i = 0; i < n && status == 0; ++i) status = check(name, i, out[i], expected_of(in, i));
  return status;
}

int barrier_test(Shape shape) {
  return run("barrier", barrier, shape, 5, [&](const std::vector<u32>& in, u32 i) {
    return in[i / shape.threads * shape.threads + (i + 5) % shape.threads];
  });
}

int shuffle_test(Shape shape) {
  return run("shuffle", shuffle, shape, 3, [](const std::vector<u32>& in, u32 i) {
    u32 sum = 0;
    for (u32 lane = 0; lane < 32; ++lane) sum += in[i / 32 * 32 + lane] % 1000;
    return sum;
  });
}

int cluster_test(Shape shape) {
  constexpr u32 kRounds = 4;
  return run("cluster", cluster, shape, kRounds, [&](const std::vector<u32>& in, u32 i) {
    const u32 first = i / shape.threads / shape.cluster * shape.cluster;
    u32 sum = 0;
    for (u32 b = 0; b < shape.cluster; ++b) sum += 10 * (in[first + b] % 1000);
    return sum;
  });
}

int row_sums_test(Shape shape) {
  constexpr u32 kRounds = 5;
  return run("row_sums", row_sums, shape, kRounds, [&](const std::vector<u32>& in, u32 i) {
    const u32 threads = shape.threads * shape.cluster, first = i / threads * threads;
    u32 sum = 0;
    u32 most = 0;
    for (u32 t = 0; t < threads; ++t) {
      sum += in[first + t] % 100;
      most = std::max(most, in[first + t] % 100);
    }
    return (1 + 2 + 3 + 4 + 5) * (3 * sum + most);
  });
}

int misuse_test() {
  return run("misuse", misuse, {4, 64, 2}, 0,
             [](const std::vector<u32>&, u32) { return 0xdeadbeef; });
}

// `ranks` OS threads, each with launches of changing shape.
int exchange_test(u32 ranks) {
  const Shape shapes[] = {{2, 64}, {3, 32}, {1, 96, 1, 1}, {4, 32, 2, 1}, {2, 64}, {4, 64, 2}};
  std::vector<std::vector<u32>> slots(ranks);
  for (auto& s : slots) s.assign(2 * ranks * kMaxTestThreads * 4 + 4, kEmpty);
  std::vector<int> statuses(ranks);
  const auto run_rank = [&](u32 rank) {
    TestControl control{};
    u32 launches = 0, blocks = 0;
    for (const Shape& shape : shapes) {
      blocks += shape.blocks;
      const u32 n = shape.blocks * shape.threads;
      const std::vector<u32> in = inputs(n, 1000 * launches + rank);
      std::vector<u32> out(n, 0xdeadbeef);
      TestParams p{};
      for (u32 r = 0; r < ranks; ++r) {  // vectors start at multiples of 16 bytes
        p.slots[r] = reinterpret_cast<u32*>(
            (reinterpret_cast<std::uintptr_t>(slots[r].data()) + 15) & ~std::uintptr_t{15});
      }
      p.in = in.data(), p.out = out.data(), p.control = &control;
      p.rank = rank, p.ranks = ranks, p.planted = planted;
      int status = launch(exchange, p, shape, rank);
      for (u32 i = 0; i < n && status == 0; ++i) {
        u32 sum = 0;
        for (u32 r = 0; r < ranks; ++r) {
          if (r != rank) sum += 4 * inputs(n, 1000 * launches + r)[i] + 6;
        }
        status = check("exchange", i, out[i], sum);
      }
      if (status == 0) status = check("blocks", 0, static_cast<u32>(control.blocks), blocks);
      if (status != 0) {
        statuses[rank] = status;
        return;
      }
      ++launches;
    }
  };
  std::vector<std::thread> threads;
  for (u32 r = 0; r < ranks; ++r) threads.emplace_back(run_rank, r);
  for (auto& t : threads) t.join();
  for (u32 r = 0; r < ranks; ++r) {
    if (statuses[r] != 0) return statuses[r];
    for (u32 word : slots[r]) {
      if (word != kEmpty) return check("slot left", r, word, kEmpty);
    }
  }
  return 0;
}

int publish_test() {
  alignas(16) u32 data[4] = {};
  u32 out = 0, flag = 0;
  TestParams p{};
  p.out = &out, p.flag = &flag, p.slots[0] = data, p.planted = planted;
  const int status = launch(publish, p, {1, 64});
  return status != 0 ? status : check("publish", 0, out, 4);
}

int stuck_test() {
  alignas(16) u32 data[4] = {kEmpty, kEmpty, kEmpty, kEmpty};
  std::vector<u32> in = inputs(128, 0), out(128);
  TestParams p{};
  p.in = in.data(), p.out = out.data(), p.slots[0] = data, p.planted = planted;
  return launch(stuck, p, {2, 64});
}

int config_test() {
  for (const Shape& shape : {Shape{0, 32}, Shape{1, 0}, Shape{1, 33}, Shape{1, 1056},
                             Shape{4, 32, 3}, Shape{17, 32, 17}, Shape{4, 32, 0}}) {
    if (launch(barrier, {}, shape) != 10 + kMoeArEmulatorConfig) return 1;
  }
  return 0;
}

// Twice a subnormal, rounded to nearest, whatever the caller's floating-point environment.
int environment_test() {
  const float in[] = {1e-39f, 3.0f};
  float out[2] = {};
  const ConvertParams p{in, out, 2, 6};
  const MoeArEmulatorConfig config{1, 32, 1, 0, seed, watchdog_seconds, nullptr, 0};
#ifdef __SSE__
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero, denormals are zero
#endif
  std::fesetround(FE_UPWARD);
  const int status = moe_ar_emulator_launch(convert, &p, &config);
  const bool restored = std::fegetround() == FE_UPWARD;
  std::fesetenv(FE_DFL_ENV);
  return status == 0 && restored && out[0] == 2e-39f && out[1] == 6.0f ? 0 : 1;
}

// An emulator that goes with its OS thread leaves memory that others can use.
int reuse_test() {
  int status = 0;
  std::thread([&] { status = barrier_test({64, 32}); }).join();
  for (int i = 0; i < 64; ++i) {
    const std::size_t bytes = 1 << 18;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return 1;
    std::memset(p, 1, bytes);
  }
  return status;
}

// Everything that must be right, in many shapes.
int clean_test() {
  for (const Shape& shape : {Shape{1, 32}, Shape{1, 1024}, Shape{5, 96}, Shape{5, 96, 1, 2},
                             Shape{4, 64, 2, 1}, Shape{12, 256}}) {
    if (const int status = barrier_test(shape)) return status;
    if (const int status = shuffle_test(shape)) return status;
  }
  for (const Shape& shape : {Shape{3, 64}, Shape{8, 32, 8}, Shape{12, 64, 4, 1}, Shape{16, 32, 16},
                             Shape{8, 96, 2, 3}}) {
    if (const int status = cluster_test(shape)) return status;
    if (const int status = row_sums_test(shape)) return status;
  }
  if (const int status = misuse_test()) return status;
  for (u32 ranks : {2, 3}) {
    if (const int status = exchange_test(ranks)) return status;
  }
  if (const int status = publish_test()) return status;
  if (const int status = reuse_test()) return status;
  if (const int status = environment_test()) return status;
  return config_test();
}

int run_test(const std::string& test) {
  if (test == "clean") return clean_test();
  if (test == "barrier") return barrier_test({2, 128});
  if (test == "shuffle") return shuffle_test({2, 64});
  if (test == "cluster") return cluster_test({4, 64, 2});
  if (test == "row_sums") return row_sums_test({8, 96, 4});
  if (test == "row_sums_of_blocks") return row_sums_test({2, 96});
  if (test == "misuse") return misuse_test();
  if (test == "exchange") return exchange_test(2);
  if (test == "publish") return publish_test();
  if (test == "stuck") return stuck_test();
  std::printf("no test %s\n", test.c_str());
  return 3;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) seed = std::strtoull(argv[2], nullptr, 0);
  if (argc > 3) planted = static_cast<u32>(std::atoi(argv[3]));
  if (argc > 4) watchdog_seconds = std::atof(argv[4]);
  const int status = run_test(argc > 1 ? argv[1] : "clean");
  if (status > 10) {  // the emulator is as good as new
    planted = 0;
    if (barrier_test({3, 96}) != 0) return 2;
  }
  return status;
}
