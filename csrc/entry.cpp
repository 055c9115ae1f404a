// The C interface of the library for CPUs: reductions. digest.cpp, integers.cpp and squares.cpp define
// their own functions.
#include <cstddef>
#include <vector>

#include "cpu.h"
#include "host.h"
#include "order.h"

namespace meshplan {
namespace {

// Empty if there is no such order, or if the axes are not of so many leaves.
Schedule schedule_of(std::vector<Instruction>& room, Order order, const i32* shape, i32 axes,
                     i32 leaves) {
  room.resize(std::size_t(2 * leaves));
  Schedule schedule{room.data(), 0, 0, 0, leaves};
  if (leaves_of(shape, axes) == leaves) list_steps(schedule, order, shape, axes);
  return schedule;
}

}  // namespace
}  // namespace meshplan

using namespace meshplan;

extern "C" {

// Counts up when a signature, a struct or a meaning changes.
int mp_abi_version() { return 14; }

// Combines n leaves of numel elements each; returns 0, or 1 for an argument that does not exist.
//   dtype: of the result; 0 float32, 1 bfloat16, 2 float16, 3 float64, 4 int8, 5 int16, 6 int32,
//     7 int64, 8 uint8. The leaves have it too, but for part 2, which takes what part 1 gives.
//   op: 0 sum, 1 product, 2 max, 3 min.      order: as in order.h.
//   accumulate: 1 sums float32 in float64.   node: 1 rounds to dtype at every node.
//   shape: sizes of `axes` axes, outermost first; their product is n.
//   divisor: 0, or what floating sums are divided by.
//   part: 0 whole reduction; 1 partial results, which are not rounded, for part 2.
int mp_fold(void* out, const void* const* leaves, int n, long long numel, int dtype, int op,
            unsigned order, int accumulate, int node, const int* shape, int axes,
            unsigned long long divisor, int part) {
  std::vector<Instruction> room;
  const Schedule schedule = schedule_of(room, Order(order), shape, axes, n);
  if (schedule.count == 0) return 1;
  const Reduction how{dtype, op, accumulate, node, Order(order) == Order::exact, Part(part), divisor};
  return reduce(out, leaves, numel, schedule, how);
}

// All but the tensors of a reduction over peers; made once and used for many calls.
struct mp_peer_call {
  long long timeout_ns, starts[kMaxPeers + 1];
  unsigned long long divisor;
  Signature signature;
  int mode, item, dtype, op;
  Order order;
  int accumulate, node, axes, shape[8];
  unsigned piece, unused;
};

// Bytes of one rank's region. push: 1 on GPUs, where pieces lie with the rank that reads them.
unsigned long long mp_peer_bytes(int world, int blocks, unsigned tile, int push) {
  return Map{world, blocks, tile, push != 0}.bytes();
}

// Reduces `in` with the peers into `out`; returns the fate, which `outcome` explains, or -1 for an
// argument that does not exist. Waits at most timeout_ns for each peer, and not for one whose process
// has ended; processes: as HostBlock says. A mode of 3 is a scatter of equal parts that combines nothing:
// `out` gets the leaves of this rank's part, in the order of ranks.
int mp_peer_reduce(const Peers* peers, const mp_peer_call* call, const void* in, void* out,
                   Outcome* outcome, const int* processes) {
  std::vector<Instruction> room;
  const Schedule schedule = schedule_of(room, call->order, call->shape, call->axes, peers->world);
  if (schedule.count == 0) return -1;
  const Reduction how{call->dtype, call->op,    call->accumulate,
                      call->node,  call->order == Order::exact,
                      Part::whole, call->divisor};
  const bool copies = call->mode == 3;
  int bad = 0;
  auto fold = [&](const Results& into, const Leaves& leaves, i64 numel, HostBlock& block) {
    const void* from[kMaxPeers];
    for (i32 r = 0; r < peers->world; ++r) {
      from[r] = leaves.leaf(r);
      if (copies) block.copy(into.out + r * call->starts[1], from[r], numel * call->item, {});
    }
    if (!copies) bad |= reduce(into.out, from, numel, schedule, how);
  };
  const Message message{static_cast<const u8*>(in), static_cast<u8*>(out), call->starts,
                        copies ? Mode::scatter : Mode(call->mode), call->item, call->signature,
                        call->piece};
  HostBlock block(0, 1, call->timeout_ns, processes);
  Call<HostBlock, decltype(fold)> body(*peers, message, block, fold);
  *outcome = body.run();
  if (copies && outcome->fate != 0) block.fill(out, 0xff, peers->world * call->starts[1]);
  if (body.theirs() != nullptr) outcome->theirs = *body.theirs();
  return bad ? -1 : outcome->fate;
}

}  // extern "C"
