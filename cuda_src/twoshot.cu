// Two-shot: every rank sends its part of a token to the token's owner only; the owner sums the
// parts and sends the total to every peer. And its halves: reduce-scatter, whose totals stay with
// their owners, and all-gather, whose totals are there.
#include <moe_ar/epilogue.cuh>
#include <moe_ar/lamport.cuh>
#include <moe_ar/producer.cuh>
#include <moe_ar/rmsnorm.cuh>
#include <moe_ar/row.cuh>

namespace moe_ar {
namespace {

constexpr bool kSums = kProtocol != Protocol::kAllGather;         // parts go to owners
constexpr bool kGathers = kProtocol != Protocol::kReduceScatter;  // totals go to everybody
// In a half a rank hears from the owner, or as owner, only. So that it still hears from every peer
// in every launch, which is what two epochs rest on, a rank without tokens greets, or is greeted.
constexpr bool kGreets = !(kSums && kGathers);
// Whether a cluster's items take the owners in turn. With two ranks and nothing to gather, to sum
// takes no longer than to send, and clusters that always do one of both are the faster: 25.7
// against 26.6 us at 512 tokens of 7168, where a gather takes 123.9 against 119.0 at 2048.
constexpr bool kTurns = kWorldSize > 2 || kProducer != Producer::kDense;
// Without a gather, and with one peer, 72 registers do, and two blocks of 448 threads share an SM.
constexpr int kRowsThreads =
    kProducer == Producer::kDense && kWireVectors == 1 && kWorldSize == 2 ? 896 : kMaxBlockThreads;

// What a cluster works on at a time: row `row` of the owner's share.
struct Item {
  int owner;
  int row;
  int token;
  int columns;  // vectors of the row; 1 of a greeting, 0 if there is no such item
  bool greeting;
};

// Rank r owns a run of tokens; runs differ by one token at most.
class Deal {
 public:
  __device__ __forceinline__ Deal(const Params& p, const Placement& at)
      : base_(static_cast<int>(static_cast<u32>(p.token_num) / kWorldSize)),
        extra_(p.token_num - base_ * kWorldSize),
        columns_(p.row_vectors),
        cluster_(at.cluster),
        clusters_(at.clusters),
        turns_(kTurns && at.clusters % kWorldSize == 0) {}

  // Rows of the longest share, greetings too.
  __device__ __forceinline__ int rows() const {
    return base_ + (extra_ > 0 || (kGreets && base_ == 0));
  }

  // Items of this cluster, maybe one too many.
  __device__ __forceinline__ int steps() const {
    return (rows() * kWorldSize - cluster_ + clusters_ - 1) / clusters_;
  }

  // Items go to clusters in turn, and where kTurns owners do within a cluster, so that no cluster
  // has to sum more than the others.
  __device__ __forceinline__ Item item(int step) const {
    const u32 number = static_cast<u32>(cluster_ + step * clusters_);
    const u32 row = number / kWorldSize;
    const u32 turn = number - row * kWorldSize + (turns_ ? static_cast<u32>(step) : 0u);
    Item item;
    item.owner = static_cast<int>(turn % kWorldSize);
    item.row = static_cast<int>(row);
    item.greeting = kGreets && base_ == 0 && item.owner >= extra_ && item.row == 0;
    const int share = base_ + (item.owner < extra_);
    item.columns = item.row < share ? columns_ : item.greeting;
    const int before = item.owner < extra_ ? item.owner : extra_;
    // A greeting's slot is that of a token which there is not.
    item.token = item.greeting ? item.owner : item.owner * base_ + before + item.row;
    return item;
  }

 private:
  int base_;   // tokens of a share
  int extra_;  // the first shares have one more
  int columns_;
  int cluster_;
  int clusters_;
  bool turns_;
};

// One thread's vectors of the rows of its cluster, `kVectors` of each: how they travel and what
// becomes of their totals.
template <int kVectors>
class Worker {
 public:
  // Before pdl_wait.
  __device__ __forceinline__ Worker(const Params& p, const Placement& at)
      : p_(p),
        row_(p, ptx::settled(at.first_group * 32 + at.lane), ptx::settled(at.group_step * 32)) {}

  template <int kInFlight>
  __device__ __forceinline__ Part<kInFlight> part(const Item& item) const {
    return Part<kInFlight>(p_, kSums ? item.token : item.row, row_.column(0));
  }

  // First: makes what this rank has of an item and sends it to whom it concerns.
  template <class Source>
  __device__ __forceinline__ void send(const Session& session, const Item& item, const Source& part,
                                       Payload (&own)[kVectors]) const {
    const bool mine = item.owner == p_.rank;
    if (!kSums && !mine) return;
    each<kVectors>([&](int v) {
      if (!has(item, v)) return;
      own[v] = item.greeting ? Payload{} : produce(part, row_.bytes(v));
      if (!mine) {
        session.push_to(item.owner, item.row, row_.column(v), own[v]);
      } else if (!kSums) {
        session.push_total(item.token, row_.column(v), own[v]);
      }
    });
  }

  // Then: what the norm needs besides the total.
  __device__ __forceinline__ void load(const Item& item) {
    if (!kGathers || item.greeting) return;
    row_.begin(item.token, item.columns, row_offset(p_, item.token, row_.column(0)));
    row_.prepare(item.columns);
  }

  // Where what this rank waits for arrives: the parts of an own item, the total of a peer's.
  __device__ __forceinline__ u8* inbox(const Session& session, const Item& item, bool mine) const {
    return mine ? session.slots(item.row, row_.column(0))
                : session.total_place(item.token, row_.column(0));
  }

  // Then: the totals of an own item, sent to every peer, or those of a peer's item.
  __device__ __forceinline__ void receive(Session& session, const Item& item, bool mine, u8* from,
                                          const Payload (&own)[kVectors]) {
    if (!kGathers && !mine) return;
    each<kVectors>([&](int v) {
      if (!has(item, v)) return;
      Payload payload = own[v];
      if (!mine) {
        payload = session.total_of(item.token, from + row_.bytes(v), item.owner);
      } else if constexpr (kSums) {
        float total[kElements];
        session.reduce<kPolled<kVectors>>(item.token, from + row_.bytes(v), own[v], total);
        if constexpr (!kGathers) {
          if (!item.greeting) {
            store_vector(p_.allreduce_out, row_offset(p_, item.row, row_.column(v)),
                         pack<kDType>(total));
          }
          return;
        }
        payload = to_wire(total);
        session.push_total(item.token, row_.column(v), payload);
      }
      take(item, v, payload);
    });
  }

  // Last: the norm. Every thread of the cluster.
  __device__ __forceinline__ void finish(RowReduction& reduction, const Item& item) {
    if (!kGathers || !norms(p_) || item.greeting) return;
    each<kVectors>([&](int v) { row_.publish(reduction, v); });
    row_.finish(reduction, item.columns);
  }

 private:
  __device__ __forceinline__ bool has(const Item& item, int v) const {
    return row_.column(v) < item.columns;
  }

  __device__ __forceinline__ void take(const Item& item, int v, const Payload& payload) {
    if (item.greeting) return;
    float total[kElements];
    from_wire(payload, total);
    row_.take(v, total);
  }

  const Params& p_;
  RowEpilogue<kVectors, true> row_;
};

// Without a gather there is no norm, and no cluster needs to meet.
__device__ __forceinline__ RowReduction row_reduction(const Params& p, const Placement& at) {
  return RowReduction(ptx::block_shared<RowSums>(), kGathers ? 1u << p.cluster_log2 : 1u,
                      at.first_group);
}

__device__ __forceinline__ int slot_rows(const Deal& deal) { return kSums ? deal.rows() : 0; }

// A cluster has one item.
template <int kVectors>
__device__ __forceinline__ void run_row(const Params& p, const Placement& at) {
  const Deal deal(p, at);
  const Item item = deal.item(0);
  Worker<kVectors> worker(p, at);
  RowReduction reduction = row_reduction(p, at);
  const auto part = worker.template part<8>(item);
  Session session(p, slot_rows(deal));
  ptx::pdl_wait();
  if (p.flags & kTriggerEarly) ptx::pdl_trigger();
  session.begin();

  Payload own[kVectors] = {};
  worker.send(session, item, part, own);
  const bool mine = item.owner == p.rank;
  u8* from = ptx::settled(worker.inbox(session, item, mine));
  worker.load(item);
  session.advance();
  clear_scale_padding(p);
  reduction.begin();
  worker.receive(session, item, mine, from, own);
  if (p.flags & kTriggerHeard) ptx::pdl_trigger();
  worker.finish(reduction, item);
}

// A cluster has one item after the other. Those that it waits for it has sent a step before, and
// again a step before: the link is busy while it waits.
template <int kVectors>
__device__ __forceinline__ void run_rows(const Params& p, const Placement& at) {
  constexpr int kShots = kSums && kGathers ? 2 : 1;
  const Deal deal(p, at);
  Worker<kVectors> worker(p, at);
  RowReduction reduction = row_reduction(p, at);
  Session session(p, slot_rows(deal));
  ptx::pdl_wait();
  if (p.flags & kTriggerEarly) ptx::pdl_trigger();
  session.begin();

  Payload ahead[kVectors] = {};
  const int steps = deal.steps();
  for (int step = 0; step < steps + kShots; ++step) {
    Payload own[kVectors];
    each<kVectors>([&](int v) { own[v] = ahead[v]; });
    if (step < steps) {
      const Item next = deal.item(step);
      worker.send(session, next, worker.template part<4>(next), ahead);
    }
    if (step == 0) {
      session.advance();
      clear_scale_padding(p);
      reduction.begin();
      continue;
    }
    if (const Item item = deal.item(step - 1); step <= steps && item.owner == p.rank) {
      worker.load(item);
      worker.receive(session, item, true, worker.inbox(session, item, true), own);
      worker.finish(reduction, item);
    }
    if (!kGathers || step < kShots) continue;
    if (const Item item = deal.item(step - kShots); item.owner != p.rank) {
      worker.load(item);
      worker.receive(session, item, false, worker.inbox(session, item, false), own);
      worker.finish(reduction, item);
    }
  }
}

// As run_rows, but a thread holds any number of vectors of a row, parked in slots in between.
__device__ __forceinline__ void run_long_rows(const Params& p, const Placement& at) {
  const Deal deal(p, at);
  const int groups = static_cast<int>(row_groups(p));
  const int first = at.first_group * 32 + at.lane;
  RowReduction reduction = row_reduction(p, at);
  Session session(p, slot_rows(deal));
  ptx::pdl_wait();
  if (p.flags & kTriggerEarly) ptx::pdl_trigger();
  session.begin();

  const int steps = deal.steps();
  for (int step = 0; step <= steps; ++step) {
    if (step < steps) {
      const Item next = deal.item(step);
      const bool mine = next.owner == p.rank;
      for (int group = at.first_group; group < groups; group += at.group_step) {
        const int column = group * 32 + at.lane;
        if (column >= next.columns || !(kSums || mine)) continue;
        const int row = kSums ? next.token : next.row;
        const Payload own = next.greeting ? Payload{} : produce(Part<4>(p, row, column));
        if (!mine) session.push_to(next.owner, next.row, column, own);
        if (mine && !kSums) session.push_total(next.token, column, own);
        if (mine) session.keep(next.token, column, own);
      }
    }
    if (step == 0) {
      session.advance();
      clear_scale_padding(p);
      reduction.begin();
      continue;
    }
    const Item item = deal.item(step - 1);
    const bool mine = item.owner == p.rank;
    if (item.columns == 0 || !(kGathers || mine)) continue;
    const bool norm = kGathers && norms(p) && !item.greeting;
    for (int group = at.first_group; group < groups; group += at.group_step) {
      const int column = group * 32 + at.lane;
      Vec16 residual = {};
      if (column < item.columns) {
        Payload payload;
        float total[kElements];
        if (!mine) {
          payload =
              session.total_of(item.token, session.total_place(item.token, column), item.owner);
          from_wire(payload, total);
        } else {
          payload = session.kept(item.token, column);
          if constexpr (kSums) {
            session.reduce<kPolled<2>>(item.token, session.slots(item.row, column), payload, total);
            payload = to_wire(total);
            if (kGathers) session.push_total(item.token, column, payload);
          }
          if (kGathers) from_wire(payload, total);
        }
        if (!item.greeting) {
          if constexpr (kGathers) {
            const u64 offset = row_offset(p, item.token, column);
            residual = store_residual(p, offset, total, load_residual(p, offset));
          } else {
            store_vector(p.allreduce_out, row_offset(p, item.row, column), pack<kDType>(total));
          }
        }
        if (norm) {
          payload.v[0] = residual;
          session.keep(item.token, column, payload);
        } else if (mine) {
          session.restore_kept(item.token, column);
        }
      }
      if (norm) publish_one(p, reduction, first, column, residual);
    }
    if (!norm) continue;
    const RowTotals row = reduction.collect(groups);
    for (int group = at.first_group; group < groups; group += at.group_step) {
      const int column = group * 32 + at.lane;
      Vec16 residual = {};
      if (column < item.columns) residual = session.kept(item.token, column).v[0];
      ptx::warp_sync();
      store_one(p, item.token, column, residual, row);
      if (column < item.columns) session.restore_kept(item.token, column);
    }
  }
}

}  // namespace
}  // namespace moe_ar

// As those of oneshot.cu.
MOE_AR_DEFINE_ROW_KERNEL(_row, moe_ar::kMaxBlockThreads, moe_ar::run_row<1>)
MOE_AR_DEFINE_ROW_KERNEL(_row2, moe_ar::kMaxBlockThreads, moe_ar::run_row<2>)
MOE_AR_DEFINE_ROW_KERNEL(_rows, moe_ar::kRowsThreads, moe_ar::run_rows<1>)
MOE_AR_DEFINE_ROW_KERNEL(_rows2, moe_ar::kMaxBlockThreads, moe_ar::run_rows<2>)
MOE_AR_DEFINE_ROW_KERNEL(_long, moe_ar::kMaxBlockThreads, moe_ar::run_long_rows)
