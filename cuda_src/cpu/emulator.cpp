#include "emulator.h"

#include <sched.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cfenv>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#ifdef __has_feature  // Clang's spelling
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN(...) __VA_ARGS__
#else
#define ASAN(...)
#endif

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif

#if !defined(__x86_64__) || defined(MOE_AR_EMULATOR_UCONTEXT)
#include <ucontext.h>
#define MOE_AR_ASSEMBLY 0
#else
#define MOE_AR_ASSEMBLY 1
#endif

// To ThreadSanitizer every fiber is a thread of its own, and a switch orders nothing: only what
// orders threads on a GPU does (barriers, atomics, the launch itself). So it must not look at the
// emulator's own variables, which fibers share because just one of them runs at a time.
#define UNSEEN __attribute__((no_sanitize("thread")))

namespace moe_ar::emulator {

constinit thread_local State state{};

namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u32 kWarp = 32;

#if defined(__SANITIZE_THREAD__)
constexpr u32 kMaxFibers = 2048;     // resident in a launch, unless one cluster needs more
constexpr u32 kProcessFibers = 8000;  // libtsan dies a little later
constexpr std::size_t kStackBytes = 256 * 1024;
#elif defined(__SANITIZE_ADDRESS__)
constexpr u32 kMaxFibers = 8192;
constexpr std::size_t kStackBytes = 256 * 1024;
#else
constexpr u32 kMaxFibers = 8192;
constexpr std::size_t kStackBytes = 64 * 1024;
#endif
// Stacks a power of two apart would share a few sets of the caches.
constexpr std::size_t kStackStride = kStackBytes + 9 * 64;
constexpr u64 kCanary = 0x5ca1ab1e0ddba115;  // lowest word of each stack

// ---- contexts -----------------------------------------------------------------------------------

struct Context {
#if MOE_AR_ASSEMBLY
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
  ASAN(void* fake_stack = nullptr;)
  TSAN(void* tsan = nullptr;)
};

#if MOE_AR_ASSEMBLY
// Saves what a callee must keep, and goes on where `load` was saved.
extern "C" __attribute__((visibility("hidden"))) void moe_ar_emulator_swap(void** save, void* load);
asm(R"(
.text
.p2align 4
.hidden moe_ar_emulator_swap
.globl moe_ar_emulator_swap
.type moe_ar_emulator_swap, @function
moe_ar_emulator_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size moe_ar_emulator_swap, . - moe_ar_emulator_swap
)");
#endif

UNSEEN void make_context(Context& context, void (*entry)()) {
#if MOE_AR_ASSEMBLY
  // Six registers and the entry; above it, where its return address would be, zero.
  const auto top = reinterpret_cast<std::uintptr_t>(context.stack) + context.stack_bytes;
  void** frame = reinterpret_cast<void**>(top & ~std::uintptr_t{15}) - 8;
  std::fill(frame, frame + 8, nullptr);
  frame[6] = reinterpret_cast<void*>(entry);
  context.stack_pointer = frame;
#else
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = const_cast<void*>(context.stack);
  context.registers.uc_stack.ss_size = context.stack_bytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
#endif
}

// `last`: nobody will come back to `from`.
UNSEEN void switch_context(Context& from, Context& to, bool last = false) {
  (void)last;
  ASAN(__sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);)
  TSAN(__tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);)
#if MOE_AR_ASSEMBLY
  moe_ar_emulator_swap(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.registers, &to.registers);
#endif
  ASAN(__sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);)
}

// ---- the threads of a launch ----------------------------------------------------------------------

enum class At : u8 { kRunnable, kSpinPause, kBlockSync, kClusterWait, kShuffle, kReturned };
constexpr const char* kAtNames[] = {"runnable",        "spinning",    "in block_sync",
                                    "in cluster_wait", "in a shuffle", "returned"};

// A meeting that each member joins once a phase. Nobody can be two phases ahead of anybody, so what
// belongs to a phase is kept twice, by parity.
struct Meeting {
  u32 members, arrived, phase;
  u8 order[2];  // their addresses stand for the order that ThreadSanitizer sees

  void* tag(u32 of_phase) { return &order[of_phase % 2]; }
};

struct Warp : Meeting {
  float value[2][kWarp];
};

struct Cluster : Meeting {
  u32 live;  // threads that have not returned
};

struct Block : Meeting {
  u32 live;
  bool started;
  u8* shared;
  const void* shared_type;
};

struct alignas(64) Fiber : Thread {
  At at;
  bool arrived;       // at the cluster's meeting, and did not wait yet
  u32 cluster_phase;  // at which it arrived
  Warp* warp;
  Block* block;
  Cluster* cluster;
  Context context;
};

struct Unmap {
  std::size_t bytes;
  void operator()(char* p) const { munmap(p, bytes); }
};
using Mapping = std::unique_ptr<char, Unmap>;

Mapping map_memory(std::size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return Mapping(nullptr, Unmap{0});
  return Mapping(static_cast<char*>(p), Unmap{bytes});
}

// Of an OS thread; kept from launch to launch.
struct Runtime {
  // Sized for the largest launch so far. A cluster that is resident has a slot; slot s has the
  // s-th part of each array.
  std::vector<Fiber> fiber_pool;
  std::vector<Warp> warp_pool;
  std::vector<Block> block_pool;
  std::vector<Cluster> cluster_pool;
  std::vector<Fiber*> queue_pool;
  Mapping stacks{nullptr, Unmap{0}};
  Mapping shared{nullptr, Unmap{0}};

  // The launch that runs.
  MoeArEmulatorConfig config;
  void (*kernel)(const void*);
  const void* params;
  Context scheduler;
  Cluster* finished;  // all its threads returned
  int status;
  char error[1024];

  // Runnable fibers: a ring, its length a power of two.
  Fiber** queue;
  u32 queue_mask, queue_head, queue_size;

  u64 random;
  u64 spins, spin_progress;  // since anything else happened
  u64 lap_progress, lap_ns;
};

constinit thread_local Runtime* runtime = nullptr;
thread_local std::unique_ptr<Runtime> runtime_owner;

UNSEEN u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<u64>(t.tv_sec) * 1'000'000'000 + static_cast<u64>(t.tv_nsec);
}

UNSEEN u64 next_random(Runtime& rt) {  // xorshift64*
  rt.random ^= rt.random >> 12;
  rt.random ^= rt.random << 25;
  rt.random ^= rt.random >> 27;
  return rt.random * 0x2545f4914f6cdd1d >> 16;
}

UNSEEN Fiber& self() { return *static_cast<Fiber*>(state.thread); }

UNSEEN void make_runnable(Runtime& rt, Fiber& fiber) {
  fiber.at = At::kRunnable;
  rt.queue[(rt.queue_head + rt.queue_size++) & rt.queue_mask] = &fiber;
}

UNSEEN Fiber* pop_runnable(Runtime& rt) {
  if (rt.queue_size == 0) return nullptr;
  Fiber** head = &rt.queue[rt.queue_head & rt.queue_mask];
  if (state.preemptive) {
    const u64 pick = next_random(rt) % rt.queue_size;
    Fiber** picked = &rt.queue[(rt.queue_head + pick) & rt.queue_mask];
    Fiber* fiber = *picked;
    *picked = *head;
    *head = fiber;
  }
  ++rt.queue_head;
  --rt.queue_size;
  return *head;
}

// Runs others until this thread is runnable and its turn comes. Where nobody can run, the scheduler
// takes over and finds a deadlock.
UNSEEN void run_others(Runtime& rt, bool last = false) {
  Fiber& from = self();
  Fiber* to = pop_runnable(rt);
  if (to == &from) return;
  state.thread = to;
  switch_context(from.context, to ? to->context : rt.scheduler, last);
}

UNSEEN void set_error(Runtime& rt, int status, const char* format, va_list arguments) {
  rt.status = status;
  vsnprintf(rt.error, sizeof rt.error, format, arguments);
}

// Ends the launch from inside a thread of it.
[[noreturn]] UNSEEN __attribute__((format(printf, 2, 3))) void fail(int status, const char* format,
                                                                    ...) {
  Runtime& rt = *runtime;
  va_list arguments;
  va_start(arguments, format);
  set_error(rt, status, format, arguments);
  va_end(arguments);
  Fiber& from = self();
  state.thread = nullptr;
  switch_context(from.context, rt.scheduler);
  __builtin_unreachable();
}

UNSEEN void check_stack(const Fiber& fiber) {
  if (*static_cast<const u64*>(fiber.context.stack) == kCanary) return;
  std::fprintf(stderr, "moe_ar emulator: thread %u of block %u overflowed its stack of %zu bytes\n",
               fiber.thread_index, fiber.block_index, kStackBytes);
  std::abort();  // its neighbour's stack is gone
}

UNSEEN void fiber_main() {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
#ifdef __SANITIZE_ADDRESS__
  Context& main = rt.scheduler;  // always runs before the first fiber
  const bool first = main.stack == nullptr;
  __sanitizer_finish_switch_fiber(nullptr, first ? &main.stack : nullptr,
                                  first ? &main.stack_bytes : nullptr);
#endif
  fiber.block->started = true;
  rt.kernel(rt.params);

  check_stack(fiber);
  fiber.at = At::kReturned;
  ++state.progress;
  --fiber.block->live;
  if (--fiber.cluster->live == 0) {
    rt.finished = fiber.cluster;
    state.thread = nullptr;
    switch_context(fiber.context, rt.scheduler, true);
  }
  run_others(rt, true);
}

// Every thread spins: let other ranks have the core.
UNSEEN void pass_core(Runtime& rt) {
  sched_yield();
  if (rt.config.watchdog_seconds <= 0) return;
  const u64 now = now_ns();
  if (state.progress != rt.lap_progress) {
    rt.lap_progress = state.progress;
    rt.lap_ns = now;
  } else if (static_cast<double>(now - rt.lap_ns) > rt.config.watchdog_seconds * 1e9) {
    fail(kMoeArEmulatorWatchdog, "no progress for %g s", rt.config.watchdog_seconds);
  }
}

// The last to arrive wakes those of the `count` fibers that wait, and goes on.
UNSEEN void meet(Runtime& rt, Meeting& meeting, Fiber* fibers, u32 count, At waiting) {
  meeting.arrived = 0;
  ++meeting.phase;
  ++state.progress;
  for (Fiber* f = fibers; f != fibers + count; ++f) {
    if (f->at == waiting) make_runnable(rt, *f);
  }
}

UNSEEN void wait(Runtime& rt, Fiber& fiber, At waiting) {
  fiber.at = waiting;
  run_others(rt);
}

// ---- launching --------------------------------------------------------------------------------------

TSAN(std::atomic<u32> process_fibers;)

UNSEEN bool start_cluster(Runtime& rt, u32 slot, u32 index) {
  const u32 blocks = rt.config.cluster_blocks, threads = rt.config.block_threads;
#ifdef __SANITIZE_THREAD__
  if (process_fibers.fetch_add(blocks * threads) + blocks * threads > kProcessFibers) {
    process_fibers.fetch_sub(blocks * threads);
    rt.status = kMoeArEmulatorConfig;
    std::snprintf(rt.error, sizeof rt.error, "ThreadSanitizer bears %u threads of all ranks",
                  kProcessFibers);
    return false;
  }
#endif
  Cluster& cluster = rt.cluster_pool.data()[slot];
  cluster = {};
  cluster.members = cluster.live = blocks * threads;
  for (u32 b = 0; b < blocks; ++b) {
    Block& block = rt.block_pool.data()[slot * blocks + b];
    block = {};
    block.members = block.live = threads;
    block.shared = reinterpret_cast<u8*>(rt.shared.get()) + (slot * blocks + b) * kSharedBytes;
    ASAN(__asan_unpoison_memory_region(block.shared, kSharedBytes);)
    std::memset(block.shared, 0xff, kSharedBytes);
    ASAN(__asan_poison_memory_region(block.shared, kSharedBytes);)
    for (u32 t = 0; t < threads; ++t) {
      const std::size_t place = std::size_t{slot * blocks + b} * threads + t;
      Fiber& fiber = rt.fiber_pool.data()[place];
      static_cast<Thread&>(fiber) = {t, threads, index * blocks + b, rt.config.grid_blocks, blocks};
      fiber.arrived = false;
      fiber.warp = &rt.warp_pool.data()[place / kWarp];
      if (t % kWarp == 0) {
        *fiber.warp = {};
        fiber.warp->members = kWarp;
      }
      fiber.block = &block;
      fiber.cluster = &cluster;
      make_context(fiber.context, fiber_main);
      TSAN(fiber.context.tsan = __tsan_create_fiber(0);)
      make_runnable(rt, fiber);
    }
  }
  return true;
}

// After its last thread returned, or where threads are left half-way.
UNSEEN void end_cluster(Runtime& rt, u32 slot) {
  const u32 fibers = rt.config.cluster_blocks * rt.config.block_threads;
  for (u32 i = 0; i < fibers; ++i) {
    Fiber& fiber = rt.fiber_pool.data()[slot * fibers + i];
    (void)fiber;
    ASAN(__asan_unpoison_memory_region(fiber.context.stack, kStackBytes);)
    // What the fiber did comes before what follows the launch: a switch with order, there and back.
    TSAN(__tsan_switch_to_fiber(fiber.context.tsan, 0);)
    TSAN(__tsan_switch_to_fiber(rt.scheduler.tsan, 0);)
    TSAN(__tsan_destroy_fiber(fiber.context.tsan);)
  }
  TSAN(process_fibers.fetch_sub(fibers);)
}

// Grows what the launch needs; nothing is in use.
bool reserve(Runtime& rt, u32 clusters, u32 blocks, u32 fibers) {
  if (rt.cluster_pool.size() < clusters) rt.cluster_pool.resize(clusters);
  if (rt.block_pool.size() < blocks) {
    rt.shared = map_memory(blocks * kSharedBytes);
    rt.block_pool.resize(rt.shared ? blocks : 0);
  }
  if (rt.fiber_pool.size() < fibers) {
    rt.stacks = map_memory(fibers * kStackStride);
    rt.fiber_pool.resize(rt.stacks ? fibers : 0);
    rt.warp_pool.resize(fibers / kWarp);
    rt.queue_pool.resize(std::bit_ceil(fibers));
    for (u32 i = 0; i < rt.fiber_pool.size(); ++i) {
      char* stack = rt.stacks.get() + i * kStackStride;
      *reinterpret_cast<u64*>(stack) = kCanary;
      rt.fiber_pool[i].context.stack = stack;
      rt.fiber_pool[i].context.stack_bytes = kStackBytes;
    }
  }
  return rt.shared && rt.stacks;
}

// Appends to the error where the threads of the first blocks stand.
UNSEEN void describe_threads(Runtime& rt, u32 blocks) {
  std::size_t length = std::strlen(rt.error);
  for (u32 b = 0; b < std::min(blocks, 4u); ++b) {
    const Fiber* fibers = rt.fiber_pool.data() + b * rt.config.block_threads;
    u32 count[std::size(kAtNames)] = {};
    for (u32 t = 0; t < rt.config.block_threads; ++t) ++count[static_cast<u32>(fibers[t].at)];
    const char* separator = ":";
    const auto append = [&](const char* format, auto... values) {
      length += static_cast<std::size_t>(
          std::snprintf(rt.error + length, sizeof rt.error - length, format, values...));
      length = std::min(length, sizeof rt.error - 1);
    };
    append("; block %u", fibers->block_index);
    for (u32 i = 0; i < std::size(count); ++i) {
      if (count[i] == 0) continue;
      append("%s %u %s", separator, count[i], kAtNames[i]);
      separator = ",";
    }
  }
}

UNSEEN int run(Runtime& rt) {
  const MoeArEmulatorConfig& config = rt.config;
  const u32 cluster_fibers = config.cluster_blocks * config.block_threads;
  const u32 clusters = config.grid_blocks / config.cluster_blocks;
  const u32 wanted = config.resident_clusters ? config.resident_clusters : clusters;
  const u32 slots = std::min({wanted, clusters, std::max(1u, kMaxFibers / cluster_fibers)});
  if (!reserve(rt, slots, slots * config.cluster_blocks, slots * cluster_fibers)) {
    std::snprintf(rt.error, sizeof rt.error, "no memory for %u threads", slots * cluster_fibers);
    return rt.status = kMoeArEmulatorConfig;
  }
  rt.queue = rt.queue_pool.data();
  rt.queue_mask = static_cast<u32>(rt.queue_pool.size()) - 1;
  rt.queue_head = rt.queue_size = 0;
  rt.random = (config.seed + 1) * 0x9e3779b97f4a7c15 | 1;
  rt.spins = 0;
  rt.lap_progress = rt.spin_progress = state.progress;
  rt.lap_ns = now_ns();
  rt.finished = nullptr;
  rt.scheduler = {};
  TSAN(rt.scheduler.tsan = __tsan_get_current_fiber();)
  state.preemptive = config.seed != 0;

  u32 next = 0, live = 0;
  while (live < slots && start_cluster(rt, live, next)) ++next, ++live;
  std::vector<bool> occupied(slots);
  std::fill(occupied.begin(), occupied.begin() + live, true);
  while (live != 0 && rt.status == kMoeArEmulatorOk) {
    state.thread = pop_runnable(rt);
    if (state.thread == nullptr) {
      rt.status = kMoeArEmulatorDeadlock;
      std::snprintf(rt.error, sizeof rt.error, "deadlock: no thread can run");
      break;
    }
    switch_context(rt.scheduler, self().context);
    if (rt.finished == nullptr) continue;
    const u32 slot = static_cast<u32>(rt.finished - rt.cluster_pool.data());
    rt.finished = nullptr;
    end_cluster(rt, slot);
    occupied[slot] = next < clusters && start_cluster(rt, slot, next++);
    live -= !occupied[slot];
  }
  if (rt.status == kMoeArEmulatorDeadlock || rt.status == kMoeArEmulatorWatchdog) {
    describe_threads(rt, slots * config.cluster_blocks);
  }
  for (u32 slot = 0; slot < slots; ++slot) {
    if (occupied[slot]) end_cluster(rt, slot);
  }
  state.thread = nullptr;
  state.preemptive = false;
  return rt.status;
}

}  // namespace

// ---- primitives: called by a thread of the kernel -----------------------------------------------

UNSEEN u32 preempt() {
  Runtime& rt = *runtime;
  const u64 random = next_random(rt);
  if (random % 4 == 0) {
    make_runnable(rt, self());
    run_others(rt);
  }
  return random / 4 % 4;
}

UNSEEN void spin_pause() {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  make_runnable(rt, fiber);
  fiber.at = At::kSpinPause;
  if (state.progress != rt.spin_progress) {
    rt.spin_progress = state.progress;
    rt.spins = 0;
  }
  if (++rt.spins >= rt.queue_size) {
    rt.spins = 0;
    pass_core(rt);
  }
  run_others(rt);
  fiber.at = At::kRunnable;
}

UNSEEN void block_sync() {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  Block& block = *fiber.block;
  void* tag = block.tag(block.phase);
  (void)tag;
  TSAN(__tsan_release(tag);)
  if (++block.arrived == block.members) {
    meet(rt, block, &fiber - fiber.thread_index, block.members, At::kBlockSync);
  } else {
    wait(rt, fiber, At::kBlockSync);
  }
  TSAN(__tsan_acquire(tag);)
}

UNSEEN void cluster_arrive() {
  Fiber& fiber = self();
  Cluster& cluster = *fiber.cluster;
  if (fiber.arrived) fail(kMoeArEmulatorMisuse, "cluster_arrive twice without a wait");
  fiber.arrived = true;
  fiber.cluster_phase = cluster.phase;
  TSAN(__tsan_release(cluster.tag(cluster.phase));)
  if (++cluster.arrived == cluster.members) {
    Runtime& rt = *runtime;
    Fiber* first = rt.fiber_pool.data() + (&cluster - rt.cluster_pool.data()) * cluster.members;
    meet(rt, cluster, first, cluster.members, At::kClusterWait);
  }
}

UNSEEN void cluster_wait() {
  Fiber& fiber = self();
  Cluster& cluster = *fiber.cluster;
  if (!fiber.arrived) fail(kMoeArEmulatorMisuse, "cluster_wait without an arrive");
  if (cluster.phase == fiber.cluster_phase) wait(*runtime, fiber, At::kClusterWait);
  fiber.arrived = false;
  TSAN(__tsan_acquire(cluster.tag(fiber.cluster_phase));)
}

// Orders no memory, as on a GPU.
UNSEEN float shfl_xor(float v, u32 mask) {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  Warp& warp = *fiber.warp;
  const u32 lane = fiber.thread_index % kWarp;
  float* value = warp.value[warp.phase % 2];
  value[lane] = v;
  if (++warp.arrived == warp.members) {
    meet(rt, warp, &fiber - lane, kWarp, At::kShuffle);
  } else {
    wait(rt, fiber, At::kShuffle);
  }
  return value[lane ^ (mask % kWarp)];
}

UNSEEN void* block_shared(std::size_t bytes, const void* type) {
  (void)bytes;
  Block& block = *self().block;
  if (block.shared_type == nullptr) {
    block.shared_type = type;
    ASAN(__asan_unpoison_memory_region(block.shared, bytes);)
  } else if (block.shared_type != type) {
    fail(kMoeArEmulatorMisuse, "block_shared of two types in one block");
  }
  return block.shared;
}

UNSEEN void* cluster_shared(void* local, u32 cta) {
  Fiber& fiber = self();
  const u32 blocks = fiber.cluster_blocks;
  const auto offset = static_cast<std::size_t>(static_cast<u8*>(local) - fiber.block->shared);
  if (cta >= blocks) fail(kMoeArEmulatorMisuse, "block %u of a cluster of %u", cta, blocks);
  if (offset >= kSharedBytes) fail(kMoeArEmulatorMisuse, "%p is not in shared memory", local);
  Block& target = fiber.block[static_cast<int>(cta) - static_cast<int>(fiber.block_index % blocks)];
  if (!target.started || target.live == 0) {
    fail(kMoeArEmulatorMisuse, "store to block %u of the cluster, which %s", cta,
         target.started ? "has returned" : "may not have started");
  }
  return target.shared + offset;
}

UNSEEN void misaligned(const void* p, std::size_t alignment) {
  fail(kMoeArEmulatorMisuse, "access to %p, which is no multiple of %zu", p, alignment);
}

}  // namespace moe_ar::emulator

using moe_ar::emulator::Runtime;

int moe_ar_emulator_launch(void (*kernel)(const void*), const void* params,
                           const MoeArEmulatorConfig* config) {
  using namespace moe_ar::emulator;
  if (!runtime_owner) runtime_owner = std::make_unique<Runtime>();
  runtime = runtime_owner.get();
  Runtime& rt = *runtime;
  rt.error[0] = '\0';
  if (config->grid_blocks == 0 || config->block_threads == 0 || config->block_threads > 1024 ||
      config->block_threads % kWarp != 0 || config->cluster_blocks == 0 ||
      config->cluster_blocks > 16 || config->grid_blocks % config->cluster_blocks != 0) {
    std::snprintf(rt.error, sizeof rt.error, "no launch: %u blocks of %u threads, clusters of %u",
                  config->grid_blocks, config->block_threads, config->cluster_blocks);
    return kMoeArEmulatorConfig;
  }
  rt.status = kMoeArEmulatorOk;
  rt.config = *config;
  rt.kernel = kernel;
  rt.params = params;
  // Rounding to nearest, subnormals kept, whatever other libraries of the process have set.
  std::fenv_t environment;
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  run(rt);
  std::fesetenv(&environment);
  return rt.status;
}

const char* moe_ar_emulator_error() {
  return moe_ar::emulator::runtime ? moe_ar::emulator::runtime->error : "";
}
