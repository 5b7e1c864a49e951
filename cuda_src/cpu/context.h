// Stacks, and switching between them; sanitizers are told. For emulator.cpp alone.
#pragma once

#include <emulator.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>

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
#define MOE_AR_UCONTEXT 1
#include <ucontext.h>
#endif

#define UNSEEN MOE_AR_UNSEEN

namespace moe_ar::emulator {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::size_t kStackBytes = 256 * 1024;
#else
constexpr std::size_t kStackBytes = 64 * 1024;
#endif
// Stacks a power of two apart would share a few sets of the caches.
constexpr std::size_t kStackStride = kStackBytes + 9 * 64;

struct Unmap {
  std::size_t bytes = 0;
  void operator()(char* p) const {
    ASAN(__asan_unpoison_memory_region(p, bytes);)  // whoever gets the addresses next is no kernel
    munmap(p, bytes);
  }
};
using Mapping = std::unique_ptr<char, Unmap>;

// Zeros that cost nothing until they are touched; null where there is no room.
inline Mapping map_memory(std::size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? Mapping() : Mapping(static_cast<char*>(p), Unmap{bytes});
}

// Where something stopped. `stack` is unknown for the OS thread's own until a fiber has run.
struct Context {
#ifdef MOE_AR_UCONTEXT
  ucontext_t registers;
#else
  void* stack_pointer = nullptr;
#endif
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
  ASAN(void* fake_stack = nullptr;)
  TSAN(void* tsan = nullptr;)
};

#ifndef MOE_AR_UCONTEXT
// Keeps what a callee must keep on the stack, changes stacks and takes it from there. The flags of
// floating point are the same in all fibers.
extern "C" __attribute__((visibility("hidden"))) void moe_ar_emulator_swap(void** save, void* load);
asm(R"(
.text
.p2align 4
.globl moe_ar_emulator_swap
.hidden moe_ar_emulator_swap
.type moe_ar_emulator_swap, @function
moe_ar_emulator_swap:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  popq %rcx
  jmp *%rcx
.size moe_ar_emulator_swap, . - moe_ar_emulator_swap
)");
#endif

// Lets `context` start with `entry`, which never returns, on its own stack.
UNSEEN inline void start_context(Context& context, void (*entry)()) {
#ifdef MOE_AR_UCONTEXT
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = const_cast<void*>(context.stack);
  context.registers.uc_stack.ss_size = context.stack_bytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
#else
  // Six registers, the entry, and zero for its return address.
  const auto top = reinterpret_cast<std::uintptr_t>(context.stack) + context.stack_bytes;
  void** frame = reinterpret_cast<void**>(top & ~std::uintptr_t{15}) - 8;
  for (int i = 0; i < 8; ++i) frame[i] = nullptr;
  frame[6] = reinterpret_cast<void*>(entry);
  context.stack_pointer = frame;
#endif
}

// The first thing that `entry` calls.
inline void context_started([[maybe_unused]] Context& os_thread) {
#ifdef __SANITIZE_ADDRESS__
  const bool unknown = os_thread.stack == nullptr;  // then it is what was switched from
  __sanitizer_finish_switch_fiber(nullptr, unknown ? &os_thread.stack : nullptr,
                                  unknown ? &os_thread.stack_bytes : nullptr);
#endif
}

// `last`: nobody will come back to `from`.
UNSEEN inline void switch_context(Context& from, Context& to, [[maybe_unused]] bool last = false) {
  ASAN(__sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack, to.stack, to.stack_bytes);)
  TSAN(__tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);)
#ifdef MOE_AR_UCONTEXT
  swapcontext(&from.registers, &to.registers);
#else
  moe_ar_emulator_swap(&from.stack_pointer, to.stack_pointer);
#endif
  ASAN(__sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);)
}

}  // namespace moe_ar::emulator
