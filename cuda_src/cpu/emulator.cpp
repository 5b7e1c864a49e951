#include <context.h>
#include <emulator.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

namespace moe_ar::emulator {

constinit thread_local State state{};

namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;

constexpr u32 kWarp = 32;
constexpr u16 kUnwritten = 0xffde;  // fills shared memory: a NaN in all types, and no sentinel
constexpr u32 kTxMagic = 0x7ba221e5;
constexpr u64 kCanary = 0x5ca1ab1e0ddba115;  // lowest word of each stack
// Resident in a launch, unless one cluster needs more. libtsan dies near 8128 in a process: enough
// for four ranks.
#ifdef __SANITIZE_THREAD__
constexpr u32 kMaxFibers = 1792;
#else
constexpr u32 kMaxFibers = 8192;
#endif

// ---- the threads of a launch --------------------------------------------------------------------

enum class At : u8 {
  kRunnable,
  kSpin,
  kBlockSync,
  kClusterWait,
  kTxWait,
  kShuffle,
  kWarpSync,
  kReturned
};
constexpr const char* kAtNames[] = {"runnable",        "spinning",           "in block_sync",
                                    "in cluster_wait", "in tx_barrier_wait", "in shfl_xor_f32",
                                    "in warp_sync",    "have returned"};

// A meeting that each member joins once a phase. Nobody can be two phases ahead of anybody, so what
// belongs to a phase is kept twice, by parity.
struct Meeting {
  u32 arrived, phase;
  char order[2];  // by address: what ThreadSanitizer is told of
};

struct Warp : Meeting {
  u32 value[2][kWarp];
};

struct Cluster : Meeting {
  u32 live;  // threads that have not returned
};

struct Block : Meeting {
  u32 live;
  u8* shared;
  const void* shared_type;
};

struct alignas(64) Fiber : Thread {
  At at;
  bool triggered;
  bool arrived;                 // at the cluster's meeting, and did not wait yet
  u32 meetings;                 // of the cluster that it knows to have ended
  const TxBarrier* tx_barrier;  // that it waits for
  Warp* warp;
  Block* block;
  Cluster* cluster;
  Context context;
};

// Of an OS thread; kept from launch to launch.
struct Runtime {
  // As large as any launch needed. A resident cluster has a slot: a part of each array.
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  std::vector<Cluster> clusters;
  Mapping stacks, shared;

  // Runnable fibers: a ring, its length a power of two.
  std::vector<Fiber*> ring;
  Fiber** queue;
  u32 queue_mask, queue_head, queue_size;

  // The launch that runs.
  MoeArEmulatorConfig config;
  void (*kernel)(const void*);
  const void* params;
  u32 cluster_fibers;
  u64 untriggered;  // threads that have neither triggered nor returned
  Context os_thread;
  Cluster* finished;  // its last thread has just returned
  int status;
  std::string error;
  u64 random;
  u64 spins, spin_progress;         // pauses since anything else happened
  u64 watch_since, watch_progress;  // ns

  ~Runtime() {
    for ([[maybe_unused]] Fiber& fiber : fibers) {
      TSAN(if (fiber.context.tsan) __tsan_destroy_fiber(fiber.context.tsan);)
    }
  }
};

thread_local std::unique_ptr<Runtime> runtime_owner;
constinit thread_local Runtime* runtime = nullptr;

UNSEEN Fiber& self() { return *static_cast<Fiber*>(state.thread); }

UNSEEN u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<u64>(t.tv_sec) * 1'000'000'000 + static_cast<u64>(t.tv_nsec);
}

// ---- who runs next ------------------------------------------------------------------------------

UNSEEN u64 next_random(Runtime& rt) {  // xorshift64*
  rt.random ^= rt.random >> 12;
  rt.random ^= rt.random << 25;
  rt.random ^= rt.random >> 27;
  return rt.random * 0x2545f4914f6cdd1d >> 16;
}

UNSEEN void make_runnable(Runtime& rt, Fiber& fiber, At at = At::kRunnable) {
  fiber.at = at;
  rt.queue[(rt.queue_head + rt.queue_size++) & rt.queue_mask] = &fiber;
}

UNSEEN Fiber* pop_runnable(Runtime& rt) {
  if (rt.queue_size == 0) return nullptr;
  Fiber*& head = rt.queue[rt.queue_head & rt.queue_mask];
  if (state.preemptive) {
    const u32 pick = static_cast<u32>(next_random(rt) % rt.queue_size);
    Fiber*& picked = rt.queue[(rt.queue_head + pick) & rt.queue_mask];
    Fiber* fiber = picked;
    picked = head;
    head = fiber;
  }
  ++rt.queue_head;
  --rt.queue_size;
  return head;
}

UNSEEN void switch_to(Runtime& rt, Fiber* to, bool last = false) {
  Fiber& from = self();
  if (to == &from) return;
  state.thread = to;
  switch_context(from.context, to ? to->context : rt.os_thread, last);
}

// Until another fiber makes this one runnable. Where nobody can run, run() finds a deadlock.
UNSEEN void wait(Runtime& rt, Fiber& fiber, At where) {
  fiber.at = where;
  switch_to(rt, pop_runnable(rt));
}

// Ends the launch from inside a thread of it.
[[noreturn]] UNSEEN __attribute__((format(printf, 2, 3))) void fail(int status, const char* format,
                                                                    ...) {
  Runtime& rt = *runtime;
  char words[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(words, sizeof words, format, arguments);
  va_end(arguments);
  rt.status = status;
  rt.error = words;
  switch_to(rt, nullptr);
  __builtin_unreachable();
}

// All runnable threads spin: lets other ranks have the core, but not for ever.
UNSEEN void pass_core(Runtime& rt) {
  sched_yield();
  const double limit = rt.config.watchdog_seconds;
  if (limit <= 0) return;
  const u64 now = now_ns();
  if (state.progress != rt.watch_progress) {
    rt.watch_progress = state.progress;
    rt.watch_since = now;
  } else if (static_cast<double>(now - rt.watch_since) > limit * 1e9) {
    fail(kMoeArEmulatorWatchdog, "no progress for %g s", limit);
  }
}

UNSEEN void trigger(Runtime& rt, Fiber& fiber) {
  if (fiber.triggered) return;
  fiber.triggered = true;
  if (--rt.untriggered != 0 || rt.config.order == nullptr) return;
  __atomic_store_n(&rt.config.order->triggered, rt.config.number + 1, __ATOMIC_RELEASE);
}

UNSEEN void fiber_main() {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  context_started(rt.os_thread);
  rt.kernel(rt.params);

  if (*static_cast<const u64*>(fiber.context.stack) != kCanary) {
    std::fprintf(stderr, "moe_ar emulator: a thread overflowed its stack of %zu bytes\n",
                 kStackBytes);
    std::abort();  // its neighbour's stack is gone
  }
  trigger(rt, fiber);
  fiber.at = At::kReturned;
  ++state.progress;
  --fiber.block->live;
  if (--fiber.cluster->live == 0) rt.finished = fiber.cluster;
  switch_to(rt, rt.finished ? nullptr : pop_runnable(rt), true);
}

// ---- meetings and shared memory -----------------------------------------------------------------

UNSEEN Fiber* first_fiber(Runtime& rt, const Block& block) {
  return rt.fibers.data() + (&block - rt.blocks.data()) * rt.config.block_threads;
}

// Joins a meeting of `count` fibers; true for the last one, which has woken those that wait.
UNSEEN bool join(Runtime& rt, Meeting& meeting, Fiber* fibers, u32 count, At where) {
  if (++meeting.arrived != count) return false;
  meeting.arrived = 0;
  ++meeting.phase;
  ++state.progress;
  for (Fiber* f = fibers; f != fibers + count; ++f) {
    if (f->at == where) make_runnable(rt, *f);
  }
  return true;
}

UNSEEN Block* first_block(const Runtime& rt, const Fiber& fiber) {  // of the fiber's cluster
  return fiber.block - fiber.block_index % rt.config.cluster_blocks;
}

// The block of the caller's cluster in whose shared memory an address lies.
UNSEEN Block& block_of(const void* address) {
  Block* first = first_block(*runtime, self());
  const u64 offset = reinterpret_cast<u64>(address) - reinterpret_cast<u64>(first->shared);
  if (offset >= runtime->config.cluster_blocks * kSharedBytes) {
    fail(kMoeArEmulatorMisuse, "%p is not in the cluster's shared memory", address);
  }
  return first[offset / kSharedBytes];
}

UNSEEN Block& running_block_of(const void* address) {
  const Fiber& fiber = self();
  Block& block = block_of(address);
  const bool known = &block == fiber.block || fiber.meetings != 0;
  if (!known || block.live == 0) {
    const auto cta = static_cast<u32>(&block - first_block(*runtime, fiber));
    fail(kMoeArEmulatorMisuse, "access to block %u of the cluster, which %s", cta,
         known ? "has returned" : "may not have started");
  }
  return block;
}

UNSEEN void require_initialised(const TxBarrier& barrier) {
  const Fiber& fiber = self();
  constexpr std::size_t kAlignment = alignof(TxBarrier);
  if (reinterpret_cast<u64>(&barrier) % kAlignment) misaligned(&barrier, kAlignment);
  if (barrier.magic != kTxMagic) {
    fail(kMoeArEmulatorMisuse, "a TxBarrier is used before tx_barrier_init");
  }
  if (barrier.owner != &fiber && barrier.owner_meetings >= fiber.meetings) {
    fail(kMoeArEmulatorMisuse, "a TxBarrier is used, but no cluster_wait came after its init");
  }
}

UNSEEN void tx_count(TxBarrier& barrier, Block& block, i32 arrivals, i32 bytes) {
  Runtime& rt = *runtime;
  require_initialised(barrier);
  if (arrivals > barrier.arrivals) {
    fail(kMoeArEmulatorMisuse, "tx_barrier_expect twice in a phase");
  }
  ++state.progress;
  TSAN(__tsan_release(&barrier.order[barrier.phase]);)
  barrier.arrivals -= arrivals;
  barrier.bytes += bytes;
  if (barrier.arrivals != 0 || barrier.bytes > 0) return;
  if (barrier.bytes < 0) {
    fail(kMoeArEmulatorMisuse, "%d bytes more in a phase than tx_barrier_expect was told",
         -barrier.bytes);
  }
  barrier.arrivals = 1;
  barrier.phase ^= 1;
  Fiber* fibers = first_fiber(rt, block);
  for (Fiber* f = fibers; f != fibers + rt.config.block_threads; ++f) {
    if (f->at == At::kTxWait && f->tx_barrier == &barrier) make_runnable(rt, *f);
  }
}

// ---- launching ----------------------------------------------------------------------------------

// Nothing is in use now.
bool reserve(Runtime& rt, u32 clusters, u32 blocks, u32 fibers) {
  if (rt.clusters.size() < clusters) rt.clusters.resize(clusters);
  if (rt.blocks.size() < blocks) {
    rt.shared = map_memory(blocks * kSharedBytes);
    rt.blocks.resize(rt.shared ? blocks : 0);
  }
  if (rt.fibers.size() < fibers) {
    rt.stacks = map_memory(fibers * kStackStride);
    rt.fibers.resize(rt.stacks ? fibers : 0);
    rt.warps.resize(fibers / kWarp);
    rt.ring.resize(std::bit_ceil(fibers));
    for (std::size_t i = 0; i < rt.fibers.size(); ++i) {
      char* stack = rt.stacks.get() + i * kStackStride;
      *reinterpret_cast<u64*>(stack) = kCanary;
      rt.fibers[i].context.stack = stack;
      rt.fibers[i].context.stack_bytes = kStackBytes;
    }
  }
  return rt.shared && rt.stacks;
}

// For ThreadSanitizer: what the fibers of a slot or the OS thread did comes before what the others
// do next.
UNSEEN void order_with_os_thread([[maybe_unused]] Runtime& rt, [[maybe_unused]] u32 slot) {
#ifdef __SANITIZE_THREAD__
  for (u32 i = 0; i < rt.cluster_fibers; ++i) {
    Context& context = rt.fibers.data()[slot * rt.cluster_fibers + i].context;
    if (!context.tsan) context.tsan = __tsan_create_fiber(0);
    __tsan_switch_to_fiber(context.tsan, 0);
    __tsan_switch_to_fiber(rt.os_thread.tsan, 0);
  }
#endif
}

UNSEEN void start_cluster(Runtime& rt, u32 slot, u32 index) {
  const u32 blocks = rt.config.cluster_blocks, threads = rt.config.block_threads;
  Cluster& cluster = rt.clusters.data()[slot];
  cluster = {};
  cluster.live = rt.cluster_fibers;
  for (u32 b = 0; b < blocks; ++b) {
    const u32 place = slot * blocks + b;
    Block& block = rt.blocks.data()[place];
    block = {};
    block.live = threads;
    block.shared = reinterpret_cast<u8*>(rt.shared.get()) + place * kSharedBytes;
    ASAN(__asan_unpoison_memory_region(block.shared, kSharedBytes);)
    std::fill_n(reinterpret_cast<u16*>(block.shared), kSharedBytes / 2, kUnwritten);
    ASAN(__asan_poison_memory_region(block.shared, kSharedBytes);)
    for (u32 t = 0; t < threads; ++t) {
      Fiber& fiber = first_fiber(rt, block)[t];
      static_cast<Thread&>(fiber) = {t, threads, index * blocks + b, rt.config.grid_blocks};
      fiber.triggered = false;
      fiber.arrived = false;
      fiber.meetings = 0;
      fiber.warp = &rt.warps.data()[(place * threads + t) / kWarp];
      if (t % kWarp == 0) *fiber.warp = {};
      fiber.block = &block;
      fiber.cluster = &cluster;
      start_context(fiber.context, fiber_main);
      make_runnable(rt, fiber);
    }
  }
  order_with_os_thread(rt, slot);
}

// Its threads have returned, or are left half-way.
UNSEEN void end_cluster(Runtime& rt, u32 slot) {
  order_with_os_thread(rt, slot);
  for (u32 i = 0; i < rt.cluster_fibers; ++i) {
    [[maybe_unused]] Fiber& fiber = rt.fibers.data()[slot * rt.cluster_fibers + i];
    ASAN(__asan_unpoison_memory_region(fiber.context.stack, kStackBytes);)
#ifdef __SANITIZE_THREAD__
    if (fiber.at != At::kReturned) {  // its call stack, as libtsan knows it, is of no more use
      __tsan_destroy_fiber(fiber.context.tsan);
      fiber.context.tsan = nullptr;
    }
#endif
  }
}

// Where the threads of the first blocks are.
UNSEEN std::string whereabouts(Runtime& rt, u32 blocks) {
  std::string words;
  for (u32 b = 0; b < std::min(blocks, 4u); ++b) {
    const Fiber* fibers = first_fiber(rt, rt.blocks.data()[b]);
    u32 count[std::size(kAtNames)] = {};
    for (u32 t = 0; t < rt.config.block_threads; ++t) ++count[static_cast<u32>(fibers[t].at)];
    words += "; block " + std::to_string(fibers->block_index);
    const char* separator = ": ";
    for (u32 i = 0; i < std::size(count); ++i) {
      if (count[i] == 0) continue;
      words += separator + std::to_string(count[i]) + " " + kAtNames[i];
      separator = ", ";
    }
  }
  return words;
}

UNSEEN void run(Runtime& rt) {
  const MoeArEmulatorConfig& config = rt.config;
  rt.cluster_fibers = config.cluster_blocks * config.block_threads;
  const u32 clusters = config.grid_blocks / config.cluster_blocks;
  const u32 wanted = config.resident_clusters ? config.resident_clusters : clusters;
  const u32 slots = std::min({wanted, clusters, std::max(1u, kMaxFibers / rt.cluster_fibers)});
  if (!reserve(rt, slots, slots * config.cluster_blocks, slots * rt.cluster_fibers)) {
    rt.status = kMoeArEmulatorConfig;
    rt.error = "no memory for the stacks of " + std::to_string(slots * rt.cluster_fibers);
    return;
  }
  rt.queue = rt.ring.data();
  rt.queue_mask = static_cast<u32>(rt.ring.size()) - 1;
  rt.queue_head = rt.queue_size = 0;
  rt.os_thread = {};
  TSAN(rt.os_thread.tsan = __tsan_get_current_fiber();)
  rt.finished = nullptr;
  rt.untriggered = u64{config.grid_blocks} * config.block_threads;
  rt.random = (config.seed + 1) * 0x9e3779b97f4a7c15 | 1;
  rt.spins = 0;
  rt.spin_progress = rt.watch_progress = state.progress;
  rt.watch_since = now_ns();
  state.preemptive = config.seed != 0;

  std::vector<bool> occupied(slots, true);
  u32 next = 0;
  for (; next < slots; ++next) start_cluster(rt, next, next);
  for (u32 live = slots; live != 0 && rt.status == kMoeArEmulatorOk;) {
    state.thread = pop_runnable(rt);
    if (state.thread == nullptr) {
      rt.status = kMoeArEmulatorDeadlock;
      rt.error = "deadlock: no thread can run";
      break;
    }
    switch_context(rt.os_thread, self().context);
    if (rt.finished == nullptr) continue;
    const u32 slot = static_cast<u32>(rt.finished - rt.clusters.data());
    rt.finished = nullptr;
    end_cluster(rt, slot);
    occupied[slot] = next < clusters;
    if (occupied[slot]) start_cluster(rt, slot, next++);
    live -= !occupied[slot];
  }
  for (u32 slot = 0; slot < slots; ++slot) {
    if (occupied[slot]) end_cluster(rt, slot);
  }
  if (rt.status == kMoeArEmulatorDeadlock || rt.status == kMoeArEmulatorWatchdog) {
    rt.error += whereabouts(rt, slots * config.cluster_blocks);
  }
  state.thread = nullptr;
  state.preemptive = false;
}

}  // namespace

// ---- primitives: called by a thread of the kernel -----------------------------------------------

UNSEEN u32 preempt() {
  Runtime& rt = *runtime;
  const u64 random = next_random(rt);
  if (random % 4 == 0) {
    make_runnable(rt, self());
    switch_to(rt, pop_runnable(rt));
  }
  return random / 4 % 4;
}

UNSEEN void spin_pause() {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  make_runnable(rt, fiber, At::kSpin);
  if (state.progress != rt.spin_progress) {
    rt.spin_progress = state.progress;
    rt.spins = 0;
  }
  if (++rt.spins >= rt.queue_size) {
    rt.spins = 0;
    pass_core(rt);
  }
  switch_to(rt, pop_runnable(rt));
  fiber.at = At::kRunnable;
}

UNSEEN void pdl_wait() {
  const MoeArEmulatorConfig& config = runtime->config;
  if (config.order == nullptr) return;
  while (__atomic_load_n(&config.order->ended, __ATOMIC_ACQUIRE) < config.number) spin_pause();
  TSAN(__tsan_acquire(&config.order->ended);)
}

UNSEEN void pdl_trigger() { trigger(*runtime, self()); }

UNSEEN void block_sync() {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  Block& block = *fiber.block;
  [[maybe_unused]] void* order = &block.order[block.phase % 2];
  TSAN(__tsan_release(order);)
  if (!join(rt, block, first_fiber(rt, block), rt.config.block_threads, At::kBlockSync)) {
    wait(rt, fiber, At::kBlockSync);
  }
  TSAN(__tsan_acquire(order);)
}

// Orders no memory, as on a GPU.
UNSEEN void cluster_arrive() {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  Cluster& cluster = *fiber.cluster;
  if (fiber.arrived) fail(kMoeArEmulatorMisuse, "cluster_arrive twice without a wait");
  fiber.arrived = true;
  join(rt, cluster, first_fiber(rt, *first_block(rt, fiber)), rt.cluster_fibers, At::kClusterWait);
}

UNSEEN void cluster_wait() {
  Fiber& fiber = self();
  Cluster& cluster = *fiber.cluster;
  if (!fiber.arrived) fail(kMoeArEmulatorMisuse, "cluster_wait without an arrive");
  if (cluster.phase == fiber.meetings) wait(*runtime, fiber, At::kClusterWait);
  fiber.arrived = false;
  ++fiber.meetings;
}

UNSEEN void* cluster_address(void* local, u32 cta) {
  const Fiber& fiber = self();
  const u32 blocks = runtime->config.cluster_blocks;
  if (cta >= blocks) fail(kMoeArEmulatorMisuse, "block %u of a cluster of %u", cta, blocks);
  require_own(local);
  return static_cast<u8*>(local) + (first_block(*runtime, fiber)[cta].shared - fiber.block->shared);
}

UNSEEN void require_own(const void* address) {
  if (&block_of(address) == self().block) return;
  fail(kMoeArEmulatorMisuse, "%p is in the shared memory of another block", address);
}

UNSEEN void require_running(const void* address) { running_block_of(address); }

UNSEEN void tx_init(TxBarrier* barrier) {
  const Fiber& fiber = self();
  require_own(barrier);
  if (barrier->magic == kTxMagic) fail(kMoeArEmulatorMisuse, "tx_barrier_init twice");
  *barrier = {kTxMagic, 0, 1, 0, &fiber, fiber.meetings + fiber.arrived, {}};
}

UNSEEN void tx_expect(TxBarrier* barrier, u32 bytes) {
  require_own(barrier);
  tx_count(*barrier, *self().block, 1, static_cast<i32>(bytes));
}

UNSEEN void tx_wait(TxBarrier* barrier, u32 parity) {
  Fiber& fiber = self();
  require_own(barrier);
  require_initialised(*barrier);
  fiber.tx_barrier = barrier;
  while (barrier->phase == parity) wait(*runtime, fiber, At::kTxWait);
  TSAN(__tsan_acquire(&barrier->order[parity]);)
}

UNSEEN void tx_complete(TxBarrier* barrier, const void* stored, u32 bytes) {
  Block& block = running_block_of(barrier);
  if (&block != &running_block_of(stored)) {
    fail(kMoeArEmulatorMisuse, "st_async_u32 to a block counts on the barrier of another");
  }
  tx_count(*barrier, block, 0, -static_cast<i32>(bytes));
}

// Orders no memory, as on a GPU.
UNSEEN u32 shfl_xor(u32 v, u32 mask) {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  Warp& warp = *fiber.warp;
  const u32 lane = fiber.thread_index % kWarp;
  u32* value = warp.value[warp.phase % 2];
  value[lane] = v;
  if (!join(rt, warp, &fiber - lane, kWarp, At::kShuffle)) wait(rt, fiber, At::kShuffle);
  return value[lane ^ (mask % kWarp)];
}

UNSEEN void warp_sync() {
  Runtime& rt = *runtime;
  Fiber& fiber = self();
  Warp& warp = *fiber.warp;
  [[maybe_unused]] void* order = &warp.order[warp.phase % 2];
  TSAN(__tsan_release(order);)
  if (!join(rt, warp, &fiber - fiber.thread_index % kWarp, kWarp, At::kWarpSync)) {
    wait(rt, fiber, At::kWarpSync);
  }
  TSAN(__tsan_acquire(order);)
}

UNSEEN void* block_shared([[maybe_unused]] std::size_t bytes, const void* type) {
  Block& block = *self().block;
  if (block.shared_type == nullptr) {
    block.shared_type = type;
    ASAN(__asan_unpoison_memory_region(block.shared, bytes);)
  }
  if (block.shared_type != type) {
    fail(kMoeArEmulatorMisuse, "block_shared of two types in one block");
  }
  return block.shared;
}

UNSEEN void misaligned(const void* p, std::size_t alignment) {
  fail(kMoeArEmulatorMisuse, "access to %p, which is no multiple of %zu", p, alignment);
}

}  // namespace moe_ar::emulator

int moe_ar_emulator_launch(void (*kernel)(const void*), const void* params,
                           const MoeArEmulatorConfig* config) {
  using namespace moe_ar::emulator;
  if (!runtime_owner) runtime_owner = std::make_unique<Runtime>();
  runtime = runtime_owner.get();
  Runtime& rt = *runtime;
  rt.status = kMoeArEmulatorOk;
  rt.error.clear();
  rt.config = *config;
  rt.kernel = kernel;
  rt.params = params;
  const u32 blocks = config->grid_blocks, threads = config->block_threads;
  const u32 cluster = config->cluster_blocks;
  if (threads == 0 || threads > 1024 || threads % kWarp != 0 || cluster == 0 || cluster > 16 ||
      blocks == 0 || blocks % cluster != 0) {
    rt.error = "cannot launch " + std::to_string(blocks) + " blocks of " + std::to_string(threads) +
               " threads in clusters of " + std::to_string(cluster);
    return rt.status = kMoeArEmulatorConfig;
  }
  // Rounding to nearest, subnormals kept, whatever other libraries of the process have set.
  std::fenv_t environment;
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  run(rt);
  std::fesetenv(&environment);
  if (config->order != nullptr) {
    TSAN(__tsan_release(&config->order->ended);)
    __atomic_store_n(&config->order->ended, config->number + 1, __ATOMIC_RELEASE);
  }
  return rt.status;
}

const char* moe_ar_emulator_error() {
  return moe_ar::emulator::runtime ? moe_ar::emulator::runtime->error.c_str() : "";
}
