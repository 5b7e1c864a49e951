// The CPU as the GPU: every CUDA thread is a fiber, and all fibers of a launch take turns in the OS
// thread that launched. A launch blocks until the kernel is done. Ranks are OS threads or
// processes.
//
// Nothing here knows a kernel, its parameters or a -D macro: emulator.cpp is compiled once and
// linked to every variant.
#pragma once

#include <cstddef>
#include <cstdint>

#define MOE_AR_EMULATOR_API extern "C" __attribute__((visibility("default")))

extern "C" {

// Launches of one rank that overlap, as by programmatic dependent launch. Whoever launches starts
// one once the one before it has triggered; its pdl_wait waits until that one has ended.
struct MoeArEmulatorOrder {
  std::uint64_t triggered;  // launches all of whose blocks have triggered or returned
  std::uint64_t ended;      // launches
};

struct MoeArEmulatorConfig {
  std::uint32_t grid_blocks;
  std::uint32_t block_threads;      // whole warps, at most 1024
  std::uint32_t cluster_blocks;     // divides grid_blocks, at most 16
  std::uint32_t resident_clusters;  // run interleaved; 1: one after another; 0: as many as fit
  std::uint64_t seed;               // 0: round robin, no preemption; else a random interleaving
  double watchdog_seconds;          // of spinning without any progress; 0: no limit
  MoeArEmulatorOrder* order;        // null: the launch begins when the one before it is done
  std::uint64_t number;             // in that order, from 0
};

enum MoeArEmulatorStatus {
  kMoeArEmulatorOk = 0,
  kMoeArEmulatorDeadlock = 1,  // no thread can run
  kMoeArEmulatorWatchdog = 2,  // threads only spin
  kMoeArEmulatorMisuse = 3,    // what would be undefined on a GPU
  kMoeArEmulatorConfig = 4,    // the launch itself is wrong
};
}

// Runs a kernel made by MOE_AR_DEFINE_KERNEL and returns a MoeArEmulatorStatus. After a status
// other than 0 some threads stopped half-way, and the next launch works as ever.
MOE_AR_EMULATOR_API int moe_ar_emulator_launch(void (*kernel)(const void* params),
                                               const void* params,
                                               const MoeArEmulatorConfig* config);

// Why the last launch of this OS thread failed; valid until its next launch.
MOE_AR_EMULATOR_API const char* moe_ar_emulator_error();

// To ThreadSanitizer every fiber is a thread of its own, and only what orders threads on a GPU does
// order them: barriers, atomics, the launch. So it must not look at the emulator's own variables,
// which fibers share because just one of them runs at a time.
#define MOE_AR_UNSEEN __attribute__((no_sanitize("thread")))

// The rest is for cpu/moe_ar/ptx.cuh alone.
namespace moe_ar::emulator {

// In shared memory, a field of structs of kernels.
struct alignas(8) TxBarrier {
  std::uint32_t magic;  // once it is initialised
  std::uint32_t phase;
  std::int32_t arrivals, bytes;  // that the phase lacks; bytes may be stored before the arrival
  const void* owner;             // the thread that initialised it
  std::uint32_t owner_meetings;  // of the cluster that end before others know of it
  char order[2];                 // by address, for each phase: what ThreadSanitizer is told of
};

}  // namespace moe_ar::emulator

// Each shared library keeps its own emulator, hence hidden.
#pragma GCC visibility push(hidden)
namespace moe_ar::emulator {

constexpr std::size_t kSharedBytes = 48 * 1024;  // static shared memory of a GPU's block

// What a CUDA thread knows of itself.
struct Thread {
  std::uint32_t thread_index, block_threads, block_index, grid_blocks;
};

struct State {
  Thread* thread;          // the one that runs
  std::uint64_t progress;  // changes with everything but loads and spins
  bool preemptive;
};
extern constinit thread_local State state;

MOE_AR_UNSEEN inline void note_progress() { ++state.progress; }

std::uint32_t preempt();  // lets another thread run, or not; returns 0 to 3 at random
void spin_pause();
void pdl_wait();
void pdl_trigger();
void block_sync();
void cluster_arrive();
void cluster_wait();
std::uint32_t shfl_xor(std::uint32_t v, std::uint32_t mask);
void warp_sync();
void* block_shared(std::size_t bytes, const void* type);

// What this block's shared memory has at `local`, in block `cta` of the cluster.
void* cluster_address(void* local, std::uint32_t cta);
void require_own(const void* address);      // it lies in this block's shared memory
void require_running(const void* address);  // in that of a block of the cluster, which runs

void tx_init(TxBarrier* barrier);
void tx_expect(TxBarrier* barrier, std::uint32_t bytes);
void tx_wait(TxBarrier* barrier, std::uint32_t parity);
void tx_complete(TxBarrier* barrier, const void* stored, std::uint32_t bytes);  // any block's

[[noreturn]] void misaligned(const void* p, std::size_t alignment);

}  // namespace moe_ar::emulator
#pragma GCC visibility pop
