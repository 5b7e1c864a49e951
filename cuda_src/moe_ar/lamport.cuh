// The exchange: push, poll and restore, after Lamport: the data itself says that it has arrived.
//
// Invariants (docs/protocol.md has the reasons; each has a test):
//  1. Sentinel. An empty slot word is 0x80000000 for every wire type. Payloads hold no -0.0 (see
//     to_wire), so no payload word equals it. Words are compared as integers, one by one.
//  2. Push, then poll locally. A rank writes into every peer's slots that are indexed by the writer
//     and reads only its own slab. Its own part comes from registers, or from its own slot, read
//     back by the thread that wrote it.
//  3. Two epochs. Who consumed a word restores the sentinel in the same launch. Words pushed into a
//     rank = words that it polls = words that it restores. A launch ends only after it has heard
//     from every peer: directly, or from an owner that has.
//  4. State lives on the device and advances once a launch. Every block has its own copy of the
//     epoch, which it advances when all its threads have used it: nobody waits, nothing counts.
//  5. Slots relaxed at system scope, control words relaxed at device scope; from launch to launch
//     they are ordered by pdl_wait, before which nothing of an earlier kernel is touched.
//  6. Idle lanes join every barrier and touch no memory.
//  7. Push of a token precedes its poll, tokens ascend, block i waits for block i of its peers
//     and for no other: one resident cluster a rank is enough to finish. In two-shot likewise the
//     parts of an item go before any wait for them, and its total before any wait for that.
//  8. The launch is the same on every rank.
//  9. Waits are bounded. Whoever gives up sets `broken`, tells the peers and pushes nothing more;
//     later launches see `broken`, push nothing, write NaN and fall through every barrier. So no
//     owner sends a total that lacks a part; totals are waited for a second longer, so that its
//     blame arrives before one blames it.
// 10. A slab outlives its writers (the host's part).
//
// Graph friendly: no host value changes between launches. Memory consistency: each 32-bit word
// proves itself, so no order between words is needed; a restore is ordered before the peer's next
// write to the same word, two launches on, by the launch in between.
#pragma once

#include <moe_ar/delay.cuh>
#include <moe_ar/params.cuh>
#include <moe_ar/vec.cuh>

namespace moe_ar {

constexpr u32 kEmptyWord = 0x80000000u;
constexpr u32 kNanWord = 0x7fffffffu;  // NaN as bfloat16 pair, float16 pair and float32
// Totals are waited for longer than parts, so that the blame of an owner that gives up comes first.
constexpr u64 kMoreForTotalsNs = 1'000'000'000;
constexpr u32 kPollsPerCheck = 64;  // a poll takes about 0.3 us: clock and abort words every 20 us

__device__ __forceinline__ bool holds_empty_word(const Vec16& v) {
  return v.w[0] == kEmptyWord || v.w[1] == kEmptyWord || v.w[2] == kEmptyWord ||
         v.w[3] == kEmptyWord;
}

__device__ __forceinline__ Vec16 filled(u32 word) { return {{word, word, word, word}}; }

// One thread's part in the exchange of one launch. In one-shot a row is a token; in two-shot it is
// a token as its owner counts it, and totals have slots by token behind those of parts.
class Session {
 public:
  // Before pdl_wait. A writer has slots for `rows` rows.
  __device__ __forceinline__ Session(const Params& p, int rows)
      : p_(p), row_bytes_(static_cast<u32>(p.row_vectors) * sizeof(Vec16)), rows_(rows) {
    epoch_place_ = ptx::settled(&p.control->epoch[ptx::block_index()]);
    broken_place_ = ptx::settled(&p.control->broken);
#pragma unroll
    for (int step = 0; step < kHeldSlabs; ++step) {
      slab_places_[step] = ptx::settled(&p.control->slab[peer_at(step)]);
    }
  }

  __device__ __forceinline__ explicit Session(const Params& p) : Session(p, p.token_num) {}

  // After pdl_wait.
  __device__ __forceinline__ void begin() {
    epoch_ = ptx::ld_relaxed_gpu_u32(epoch_place_);
    broken_ = ptx::ld_relaxed_gpu_u32(broken_place_);
    own_slab_ = slab_from(slab_places_[0]);
#pragma unroll
    for (int step = 1; step < kHeldSlabs; ++step) {
      peers_[step - 1] = slab_from(slab_places_[step]);
    }
  }

  // Sends the part of a row to every peer.
  __device__ __forceinline__ void push(int row, int column, const Payload& payload) const {
    send(slot(row, column) + p_.rank * writer_bytes(), payload);
  }

  // Sends the part of a row to the peer that owns it.
  __device__ __forceinline__ void push_to(int owner, int row, int column,
                                          const Payload& payload) const {
    u8* peer = peers_[0];
    if constexpr (kHoldPeers) {
      each<kWorldSize - 1>([&](int i) {
        if (peer_at(i + 1) == owner) peer = peers_[i];
      });
    } else {
      peer = slab(owner);
    }
    const u64 offset = slot(row, column) + p_.rank * writer_bytes();
    delay(p_, Point::kPush);
    if (broken_ == 0) store(peer + offset, payload);
  }

  // Sends the total of a token to every peer. Whoever gave up waiting for a part sends none.
  __device__ __forceinline__ void push_total(int token, int column, const Payload& payload) const {
    send(total_slot(token, column), payload);
  }

  // Where the total of a token arrives.
  __device__ __forceinline__ u8* total_place(int token, int column) const {
    return own_slab_ + total_slot(token, column);
  }

  // The total of a token, once its owner has sent it; restores what it consumed. NaN if the wait is
  // given up.
  __device__ __forceinline__ Payload total_of(int token, u8* from, int owner) {
    Payload total[1];
    total[0] = load(from);
    wait_for(from, owner, token, total, kMoreForTotalsNs);
    store(from, empty());
    return total[0];
  }

  // Parks a payload in the own slot, where only this thread reads it.
  __device__ __forceinline__ void keep(int token, int column, const Payload& payload) const {
    store(own_slot(token, column), payload);
  }

  __device__ __forceinline__ Payload kept(int token, int column) const {
    return load(own_slot(token, column));
  }

  __device__ __forceinline__ void restore_kept(int token, int column) const {
    store(own_slot(token, column), empty());
  }

  // Where the parts of a row arrive.
  __device__ __forceinline__ u8* slots(int row, int column) const {
    u8* first = own_slab_ + slot(row, column);
    return kWorldSize == 2 ? first + (1 - p_.rank) * writer_bytes() : first;
  }

  // Writers whose parts are polled together.
  template <int kMostInFlight>
  static constexpr int kTogether =
      kWorldSize == 2                             ? 1
      : kWorldSize < kMostInFlight / kWireVectors ? kWorldSize
                                                  : kMostInFlight / kWireVectors;

  // A first look for the parts of the writers from `first` on. What comes between it and
  // `reduce_seen` is done while the loads are in flight.
  template <int kCount>
  __device__ __forceinline__ void look(const u8* slots, const Payload& own, Payload (&part)[kCount],
                                       int first = 0) const {
    if constexpr (kWorldSize == 2) {
      part[0] = load(slots);
    } else {
      each<kCount>([&](int j) {
        const int writer = first + j;
        part[j] = own;
        if (writer != p_.rank && writer < kWorldSize) part[j] = load(slots + j * writer_bytes());
      });
    }
  }

  // Sums the parts of all ranks in rank order, `own` among them, polling until they are there, and
  // restores every word that it consumed. NaN if the wait is given up. `part` has what `look` saw,
  // if kLooked; else the loop looks, for with 8 ranks a look before it, too, spills.
  template <bool kLooked, int kCount>
  __device__ __forceinline__ void reduce_seen(int token, u8* slots, const Payload& own,
                                              Payload (&part)[kCount], float (&total)[kElements]) {
    if constexpr (kWorldSize == 2) {  // the order of two does not matter
      if (!kLooked) look(slots, own, part);
      wait_for(slots, 1 - p_.rank, token, part);
      store(slots, empty());
      from_wire(own, total);
      add(part[0], total);
    } else {
#pragma unroll
      for (float& x : total) x = 0.0f;
#pragma unroll 1
      for (int first = 0; first < kWorldSize; first += kCount) {
        if (!kLooked || first > 0) look(slots, own, part, first);
        wait_for(slots, first, token, part);
        each<kCount>([&](int j) {
          const int writer = first + j;
          if (writer >= kWorldSize) return;
          if (writer != p_.rank) store(slots + j * writer_bytes(), empty());
          add(part[j], total);
        });
        slots += kCount * writer_bytes();
      }
    }
  }

  template <int kMostInFlight>
  __device__ __forceinline__ void reduce(int token, u8* slots, const Payload& own,
                                         float (&total)[kElements]) {
    Payload part[kTogether<kMostInFlight>];
    reduce_seen<false>(token, slots, own, part, total);
  }

  // Every thread of the block calls this once, after it has used the epoch. The block advances its
  // own copy, and those of blocks that this grid does not have, each by one block.
  __device__ __forceinline__ void advance() const {
    delay(p_, Point::kAdvance);
    ptx::block_sync();
    ControlBlock* control = p_.control;
    const u32 step = ptx::grid_blocks();
    for (u32 b = ptx::block_index() + step * ptx::thread_index(); b < kMaxGridBlocks;
         b += step * ptx::block_threads()) {
      ptx::st_relaxed_gpu_u32(&control->epoch[b], epoch_ ^ 1);
    }
    if (ptx::block_index() == 0 && ptx::thread_index() == 0) {
      ptx::red_add_relaxed_gpu_u64(&control->launches, 1);
    }
  }

 private:
  // Beyond, registers are worth more.
  static constexpr bool kHoldPeers =
      kWorldSize <= (kProtocol == Protocol::kOneShot ? 8 : 4 / kWireVectors);
  static constexpr int kHeldSlabs = kHoldPeers ? kWorldSize : 1;

  __device__ __forceinline__ static u8* slab_from(u8** place) {
    return reinterpret_cast<u8*>(ptx::ld_u64(place));
  }

  __device__ __forceinline__ u8* slab(int rank) const { return slab_from(&p_.control->slab[rank]); }

  // Every rank starts with another peer, so that no link is crowded.
  __device__ __forceinline__ int peer_at(int step) const {
    const int peer = p_.rank + step;
    return peer < kWorldSize ? peer : peer - kWorldSize;
  }

  __device__ __forceinline__ void send(u64 offset, const Payload& payload) const {
    if (broken_ != 0) return;
    delay(p_, Point::kPush);
#pragma unroll
    for (int step = 1; step < kWorldSize; ++step) {
      u8* peer = kHoldPeers ? peers_[kHoldPeers ? step - 1 : 0] : slab(peer_at(step));
      store(peer + offset, payload);
    }
  }

  // Offset in a slab of the first writer's slot of a vector. Slots go by writer, row, plane of the
  // payload, column, so that a warp's accesses are contiguous.
  __device__ __forceinline__ u64 slot(int row, int column) const {
    const u64 epoch_begin = kSlabHeaderBytes + (epoch_ != 0 ? p_.epoch_bytes : 0);
    return ptx::mad_wide(static_cast<u32>(row), row_bytes_ * kWireVectors,
                         epoch_begin + static_cast<u32>(column) * sizeof(Vec16));
  }

  __device__ __forceinline__ u64 writer_bytes() const {
    return static_cast<u64>(static_cast<u32>(rows_)) * (row_bytes_ * kWireVectors);
  }

  __device__ __forceinline__ u64 total_slot(int token, int column) const {
    return slot(kWorldSize * rows_ + token, column);
  }

  // In one-shot no peer writes here; in two-shot the owner does, whose total has been taken before.
  __device__ __forceinline__ u8* own_slot(int token, int column) const {
    if constexpr (kProtocol != Protocol::kOneShot) return own_slab_ + total_slot(token, column);
    return own_slab_ + slot(token, column) + p_.rank * writer_bytes();
  }

  __device__ __forceinline__ static Payload filled_payload(u32 word) {
    Payload payload;
#pragma unroll
    for (Vec16& v : payload.v) v = filled(word);
    return payload;
  }

  __device__ __forceinline__ static Payload empty() { return filled_payload(kEmptyWord); }

  __device__ __forceinline__ static void add(const Payload& payload, float (&total)[kElements]) {
    float x[kElements];
    from_wire(payload, x);
#pragma unroll
    for (int i = 0; i < kElements; ++i) total[i] += x[i];
  }

  __device__ __forceinline__ Payload load(const u8* from) const {
    Payload payload;
#pragma unroll
    for (int plane = 0; plane < kWireVectors; ++plane) {
      payload.v[plane] = ptx::ld_relaxed_sys_v4(from + plane * row_bytes_);
    }
    return payload;
  }

  __device__ __forceinline__ void store(u8* to, const Payload& payload) const {
#pragma unroll
    for (int plane = 0; plane < kWireVectors; ++plane) {
      ptx::st_relaxed_sys_v4(to + plane * row_bytes_, payload.v[plane]);
    }
  }

  __device__ __forceinline__ u32* abort_word(u8* slab, int writer) const {
    return &reinterpret_cast<SlabHeader*>(slab)->abort[writer];
  }

  // Loads again until no part, of writers from `first` on, holds an empty word.
  template <int kCount>
  __device__ __forceinline__ void wait_for(const u8* slots, int first, int token,
                                           Payload (&part)[kCount], u64 more_ns = 0) {
    u64 since = 0;
    delay(p_, Point::kPoll);
    if (broken_ != 0) {  // what came late, after an earlier launch gave up, is not this launch's
      each<kCount>([&](int j) { part[j] = empty(); });
    }
    while (broken_ == 0) {
      for (u32 poll = 0; poll < kPollsPerCheck; ++poll) {
        bool missing = false;
        each<kCount>([&](int j) { missing = missing || is_empty(part[j]); });
        if (!missing) return delay(p_, Point::kRestore);
        ptx::spin_pause();
        each<kCount>([&](int j) {
          if (is_empty(part[j])) part[j] = load(slots + j * writer_bytes());
        });
      }
      int missing_rank = -1;
      each<kCount>([&](int j) {
        if (missing_rank < 0 && is_empty(part[j])) missing_rank = first + j;
      });
      if (missing_rank >= 0 && must_give_up(missing_rank, token, since, more_ns)) broken_ = 1;
    }
    each<kCount>([&](int j) {
      if (is_empty(part[j])) part[j] = filled_payload(kNanWord);
    });
  }

  __device__ __forceinline__ static bool is_empty(const Payload& payload) {
    bool empty = false;
#pragma unroll
    for (const Vec16& v : payload.v) empty = empty || holds_empty_word(v);
    return empty;
  }

  __device__ __forceinline__ bool must_give_up(int writer, int token, u64& since,
                                               u64 more_ns) const {
    if (ptx::ld_relaxed_gpu_u32(&p_.control->broken) != 0) return true;
    int blamed = -1;
#pragma unroll 1
    for (int r = 0; r < kWorldSize; ++r) {
      const u32 blame = ptx::ld_relaxed_sys_u32(abort_word(own_slab_, r));
      if (blame != 0) blamed = static_cast<int>(blame) - 1;
    }
    if (blamed < 0 && p_.timeout_ns != 0) {
      const u64 now = ptx::globaltimer_ns();
      if (since == 0) since = now;
      if (now - since >= p_.timeout_ns + more_ns) blamed = writer;
    }
    if (blamed < 0) return false;
    break_off(blamed, token);
    return true;
  }

  // The first thread to give up records why and tells the peers.
  __device__ __forceinline__ void break_off(int missing_rank, int token) const {
    ControlBlock* control = p_.control;
    const u32 blame = 1 + static_cast<u32>(missing_rank);
    if (ptx::atom_cas_relaxed_gpu_u32(&control->broken, 0, blame) != 0) return;
#pragma unroll 1
    for (int r = 0; r < kWorldSize; ++r) {
      if (r != p_.rank) ptx::st_relaxed_sys_u32(abort_word(slab(r), p_.rank), blame);
    }
    // Launch numbers and epochs advance together: an odd distance means "already advanced".
    u64 launch = ptx::ld_relaxed_gpu_u64(&control->launches);
    if ((launch & 1) != epoch_) --launch;
    TimeoutRecord* record = control->record;
    ptx::st_relaxed_sys_u32(&record->rank, static_cast<u32>(p_.rank));
    ptx::st_relaxed_sys_u32(&record->missing_rank, static_cast<u32>(missing_rank));
    ptx::st_relaxed_sys_u32(&record->token, static_cast<u32>(token));
    ptx::st_relaxed_sys_u64(&record->launch, launch);
    ptx::st_release_sys_u32(&record->valid, 1);
  }

  const Params& p_;
  u32 row_bytes_;
  int rows_;
  u8* own_slab_;
  u8* peers_[kHoldPeers && kWorldSize > 1 ? kWorldSize - 1 : 1];
  u32* epoch_place_;  // these until begin
  u32* broken_place_;
  u8** slab_places_[kHeldSlabs];
  u32 epoch_;
  u32 broken_;  // as loaded: nothing waits for it until the push does
};

}  // namespace moe_ar
