// One-shot: every rank sends its part of every token to every peer and sums all parts itself.
#include <moe_ar/epilogue.cuh>
#include <moe_ar/lamport.cuh>
#include <moe_ar/producer.cuh>
#include <moe_ar/rmsnorm.cuh>
#include <moe_ar/row.cuh>

namespace moe_ar {
namespace {

// Whether a vector is published while the thread's next one is on its way: 9.66 in place of 9.82 us
// at 128 tokens. A single one is published after the loop, where the compiler happens to order the
// gather better: 4.1 and 6.3 us in place of 4.3 and 6.5 at 16 and 64 tokens.
template <int kVectors>
inline constexpr bool kPublishEarly = kVectors > 1;

// Makes a thread's vectors of a row, `step` columns apart, and sends them to every peer.
template <int kVectors, class Source>
__device__ __forceinline__ void send(const Params& p, const Session& session, const Source& part,
                                     int token, int column, int step, Payload (&own)[kVectors]) {
  each<kVectors>([&](int v) {
    if (column + v * step >= p.row_vectors) return;
    own[v] = produce(part, v * step * sizeof(Vec16));
    session.push(token, column + v * step, own[v]);
  });
}

template <int kVectors>
using Seen = Payload[Session::kTogether<kPolled<kVectors>>];

// Sums what arrives of a row, `own` among it, and publishes what its norm rests on. `seen` has
// what a first look at the thread's first vector saw, if kLooked.
template <bool kLooked, int kVectors, class Epilogue>
__device__ __forceinline__ void receive(const Params& p, Session& session, int token, u8* slots,
                                        const Payload (&own)[kVectors], Seen<kVectors>& seen,
                                        Epilogue& row, const RowReduction& reduction) {
  each<kVectors>([&](int v) {
    if (row.column(v) < p.row_vectors) {
      float total[kElements];
      u8* from = slots + row.bytes(v);
      if (kLooked && v > 0) session.look(from, own[v], seen);
      session.reduce_seen<kLooked>(token, from, own[v], seen, total);
      row.take(v, total);
    }
    if (kPublishEarly<kVectors>) row.publish(reduction, v);
  });
  if (!kPublishEarly<kVectors>) row.publish(reduction, 0);
}

// A cluster holds one row, a thread `kVectors` vectors of it in registers: nothing but what a
// decode step needs.
template <int kVectors>
__device__ __forceinline__ void run_row(const Params& p, const Placement& at) {
  const int column = ptx::settled(at.first_group * 32 + at.lane);
  const int step = ptx::settled(at.group_step * 32);  // columns to the thread's next vector
  RowReduction reduction(ptx::block_shared<RowSums>(), 1u << p.cluster_log2, at.first_group);
  const Part<8> part(p, at.cluster, column);
  const u64 offset = ptx::settled(row_offset(p, at.cluster, column));
  RowEpilogue<kVectors, false> row(p, column, step);
  Session session(p);
  ptx::pdl_wait();
  if (p.flags & kTriggerEarly) ptx::pdl_trigger();
  session.begin();

  Payload own[kVectors] = {};
  send(p, session, part, at.cluster, column, step, own);
  // Before anything else is loaded: else the first poll waits for that too.
  u8* slots = ptx::settled(session.slots(at.cluster, column));
  row.begin(at.cluster, p.row_vectors, offset);
  session.advance();
  reduction.begin();
  Seen<kVectors> seen;
  if (column < p.row_vectors) session.look(slots, own[0], seen);
  row.prepare(p.row_vectors);
  clear_scale_padding(p);
  receive<true>(p, session, at.cluster, slots, own, seen, row, reduction);
  if (p.flags & kTriggerHeard) ptx::pdl_trigger();
  if (row.norms()) row.finish(reduction, p.row_vectors);
}

// Whether a row's norm is made behind the next gather, so that nobody waits for its totals: 57.7 in
// place of 62.0 us at 1024 tokens, 108.6 in place of 116.7 at 2048. Not with one vector a thread,
// for that serves few rows in turn (12.3 in place of 11.5 at 155); nor without a gather (26.3 for
// 24.9 at 512), nor in place of what quantised outputs prepare early.
template <int kVectors>
inline constexpr bool kLateNorm = kVectors > 1 && kProducer != Producer::kDense && !kQuantises;

// A cluster holds one row after the other. It pushes a row ahead of the one that it receives, so
// that the link is busy while it waits.
template <int kVectors>
__device__ __forceinline__ void run_rows(const Params& p, const Placement& at) {
  const int column = ptx::settled(at.first_group * 32 + at.lane);
  const int step = ptx::settled(at.group_step * 32);
  RowReduction reduction(ptx::block_shared<RowSums>(), 1u << p.cluster_log2, at.first_group);
  Session session(p);
  ptx::pdl_wait();
  if (p.flags & kTriggerEarly) ptx::pdl_trigger();
  session.begin();

  constexpr bool kLate = kLateNorm<kVectors>;
  Payload ahead[kVectors] = {};
  RowEpilogue<kVectors, true, !kLate && kGammaEarly<kVectors>> row(p, column, step);
  // A step produces its row and receives the one before; its norm comes then or in the next step.
  for (int next = at.cluster, done = -1; kLate || done < p.token_num;
       done = next, next += at.clusters) {
    Payload own[kVectors];
    each<kVectors>([&](int v) { own[v] = ahead[v]; });
    if (next < p.token_num) {
      send(p, session, Part<4>(p, next, column), next, column, step, ahead);
    }
    if (done < 0) {
      session.advance();
      clear_scale_padding(p);
      reduction.begin();
      continue;
    }
    if (kLate) {
      if (done != at.cluster && row.norms()) row.finish(reduction, p.row_vectors);
      if (done >= p.token_num) break;
    }
    u8* slots = ptx::settled(session.slots(done, column));
    row.begin(done, p.row_vectors, row_offset(p, done, column));
    row.prepare(p.row_vectors);
    Seen<kVectors> seen;
    receive<false>(p, session, done, slots, own, seen, row, reduction);
    if (!kLate && row.norms()) row.finish(reduction, p.row_vectors);
  }
}

// As run_rows, but a thread holds several vectors of a row, parked in the own slots in between.
__device__ __forceinline__ void run_long_rows(const Params& p, const Placement& at) {
  const int groups = static_cast<int>(row_groups(p));
  const int first = at.first_group * 32 + at.lane;
  RowReduction reduction(ptx::block_shared<RowSums>(), 1u << p.cluster_log2, at.first_group);
  Session session(p);
  ptx::pdl_wait();
  if (p.flags & kTriggerEarly) ptx::pdl_trigger();
  session.begin();

  for (int token = at.cluster; token < p.token_num; token += at.clusters) {
    for (int group = at.first_group; group < groups; group += at.group_step) {
      const int column = group * 32 + at.lane;
      if (column >= p.row_vectors) continue;
      const Payload own = produce(Part<4>(p, token, column));
      session.push(token, column, own);
      session.keep(token, column, own);
    }
    if (token == at.cluster) {
      session.advance();
      clear_scale_padding(p);
      reduction.begin();
    }
    for (int group = at.first_group; group < groups; group += at.group_step) {
      const int column = group * 32 + at.lane;
      Vec16 residual = {};
      if (column < p.row_vectors) {
        Payload own = session.kept(token, column);
        float total[kElements];
        const u64 offset = row_offset(p, token, column);
        residual = load_residual(p, offset);
        session.reduce<kPolled<2>>(token, session.slots(token, column), own, total);
        residual = store_residual(p, offset, total, residual);
        if (norms(p)) {
          own.v[0] = residual;
          session.keep(token, column, own);
        } else {
          session.restore_kept(token, column);
        }
      }
      if (norms(p)) publish_one(p, reduction, first, column, residual);
    }
    if (!norms(p)) continue;
    const RowTotals row = reduction.collect(groups);
    for (int group = at.first_group; group < groups; group += at.group_step) {
      const int column = group * 32 + at.lane;
      Vec16 residual = {};
      if (column < p.row_vectors) residual = session.kept(token, column).v[0];
      ptx::warp_sync();
      store_one(p, token, column, residual, row);
      if (column < p.row_vectors) session.restore_kept(token, column);
    }
  }
}

}  // namespace
}  // namespace moe_ar

// For as many clusters as rows; for fewer; each with one or two vectors a thread; and for any
// number of vectors.
MOE_AR_DEFINE_ROW_KERNEL(_row, moe_ar::kMaxBlockThreads, moe_ar::run_row<1>)
MOE_AR_DEFINE_ROW_KERNEL(_row2, moe_ar::kMaxBlockThreads, moe_ar::run_row<2>)
MOE_AR_DEFINE_ROW_KERNEL(_rows, moe_ar::kMaxBlockThreads, moe_ar::run_rows<1>)
MOE_AR_DEFINE_ROW_KERNEL(_rows2, moe_ar::kMaxBlockThreads, moe_ar::run_rows<2>)
MOE_AR_DEFINE_ROW_KERNEL(_long, moe_ar::kMaxBlockThreads, moe_ar::run_long_rows)
