// The folds of the kernels over peers as functions of their names: of one block, whose lanes run one
// after the other.
#define MP_FOLD(name, In, Acc, Round, Out, Op)
#define MP_PEER(name, D, Acc, Round, Op)                 \
  extern "C" void name(const meshplan::FoldCase* call) { \
    using namespace meshplan;                            \
    fold<D, Acc, Round, Op>(*call);                      \
  }

#include "device_call.h"
#include "emulated_gpu.h"

namespace meshplan {

// tests/peer_folds.py has the same fields.
struct FoldCase {
  u8* out;
  const u8* own;
  u8* const* region;  // the tiles that are read, and for every other rank those of results
  const u8* plan;
  u64 stride, divisor;
  i64 numel;
  i32 rank, leaves, chain, unused;
};

template <class D, class Acc, class Round, class Op>
void fold(const FoldCase& call);

}  // namespace meshplan

#include "device.cu"

namespace meshplan {

struct OneLane {
  i32 index;
  i64 lane() const { return index; }
  i64 lanes() const { return 3; }
};

template <class D, class Acc, class Round, class Op>
void fold(const FoldCase& call) {
  const Elements how{call.plan, call.leaves, call.chain != 0, call.divisor};
  const Leaves leaves{call.own, call.region, 0, call.stride, call.rank, true};
  const Results into{call.out, call.region, 0, call.leaves, call.rank, call.leaves - 1};
  for (OneLane lane{0}; lane.index < lane.lanes(); ++lane.index) {
    fold_elements<D, Acc, Round, Op>(how, into, leaves, call.numel, lane);
  }
}

}  // namespace meshplan
