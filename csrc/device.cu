// The kernels for GPUs: for each arithmetic one over peers, for any group, mode and grid, and one that
// folds leaves in memory of this device (fold.h).
//
// A launch over peers is one block of up to 512 lanes for each block index; all blocks of a launch must be able
// to run at once. The state between calls lies in the regions, so that a graph may capture a launch.
#include "device.h"
#include "device_call.h"
#include "element.h"
#include "fold.h"

namespace meshplan {

// Always parts of their kernel: where they were not, AMD's compiler copied the call to each lane's stack.
template <class D, class Acc, class Round, class Op>
struct PeerFold {
  const Elements& how;

  __device__ inline __attribute__((always_inline)) void operator()(
      const Results& into, const Leaves& leaves, i64 numel, DeviceBlock& block) const {
    fold_elements<D, Acc, Round, Op>(how, into, leaves, numel, block);
  }
};

template <class D, class Acc, class Round, class Op>
__device__ inline __attribute__((always_inline)) void peer_reduce(
    const Peers& peers, const DeviceCall& call, const u8* in, u8* out, Failures* failures, i32 index,
    i32 count) {
  const Message message{in,        out,           call.starts, Mode(call.mode),
                        call.item, call.signature, call.piece};
  const Elements how{call.plan, peers.world, call.chain != 0, call.divisor};
  const PeerFold<D, Acc, Round, Op> fold{how};
  DeviceBlock block(index, count, call.timeout_ns);
  Call<DeviceBlock, decltype(fold)> body(peers, message, block, fold);
  const Outcome found = body.run();
  if (found.fate == i32(Fate::done)) return;
  // Another block of this rank found the difference, and reports it with the words of the other rank.
  if (found.fate == i32(Fate::refused) && found.phase == kDiffering) return;
  // The first failure is kept: launches that are queued behind it find no other.
  if (block.lane() == 0 && block.load(&failures->any) == 0) {
    failures->of[index] = {found, call.signature};
    if (body.theirs() != nullptr) failures->of[index].outcome.theirs = *body.theirs();
    block.store(&failures->any, 1u + u32(index));
  }
}

}  // namespace meshplan

// Tests that need only one of both families define the other as empty.
#if !defined(MP_PEER)
#define MP_PEER(name, D, Acc, Round, Op)                                                           \
  MP_KERNEL name(MP_PARAMETER meshplan::Peers peers, MP_PARAMETER meshplan::DeviceCall call,       \
                 const unsigned char* in, unsigned char* out, meshplan::Failures* failures) {      \
    using namespace meshplan;                                                                      \
    peer_reduce<D, Acc, Round, Op>(peers, call, in, out, failures, gpu::block(), gpu::blocks());   \
  }
#endif
#define MP_ONE(name, D, Acc, Round, Op) \
  MP_PEER(name, D, Acc, Round, Op)      \
  MP_FOLD(name##_fold, D, Acc, Round, D, Op)

#define MP_SUMS(name, D, Acc)                               \
  MP_ONE(mp_##name##_sum, D, Acc, Acc, Sum)              \
  MP_ONE(mp_##name##_product, D, Acc, Acc, Product)
#define MP_LINEAR(name, D, Acc)                             \
  MP_SUMS(name, D, Acc)                                  \
  MP_ONE(mp_##name##_exact, D, Acc, Acc, ExactSum)
#define MP_ROUNDED(name, D, Acc)                            \
  MP_ONE(mp_##name##_sum_node, D, Acc, D, Sum)           \
  MP_ONE(mp_##name##_product_node, D, Acc, D, Product)
#define MP_EXTREMA(name, D)                                 \
  MP_ONE(mp_##name##_max, D, D, D, Extremum<true>)       \
  MP_ONE(mp_##name##_min, D, D, D, Extremum<false>)

MP_LINEAR(float32, float, float)
MP_LINEAR(float32_wide, float, double)
MP_ROUNDED(float32_wide, float, double)
MP_EXTREMA(float32, float)
MP_LINEAR(bfloat16, Bfloat, float)
MP_ROUNDED(bfloat16, Bfloat, float)
MP_EXTREMA(bfloat16, Bfloat)
MP_LINEAR(float16, Half, float)
MP_ROUNDED(float16, Half, float)
MP_EXTREMA(float16, Half)
MP_LINEAR(float64, double, double)
MP_EXTREMA(float64, double)
MP_SUMS(int8, i8, i8)
MP_EXTREMA(int8, i8)
MP_SUMS(int16, i16, i16)
MP_EXTREMA(int16, i16)
MP_SUMS(int32, i32, i32)
MP_EXTREMA(int32, i32)
MP_SUMS(int64, i64, i64)
MP_EXTREMA(int64, i64)
MP_SUMS(uint8, u8, u8)
MP_EXTREMA(uint8, u8)
MP_FOLD_PARTS(float32_wide, float, double)
MP_FOLD_PARTS(bfloat16, Bfloat, float)
MP_FOLD_PARTS(float16, Half, float)

// Before a mapping is trusted: leaves 16 bytes of `in` for each peer at two places of its region, or
// takes what lies at these places of the own region to `out`. Where they are: _mapping_check.py.
MP_KERNEL mp_probe(MP_PARAMETER meshplan::Peers peers, MP_PARAMETER meshplan::DeviceCall,
                   const unsigned char* in, unsigned char* out, meshplan::Failures*) {
  using namespace meshplan;
  const i64 end = i64(Map{peers.world, peers.blocks, peers.tile, true}.bytes());
  for (i32 i = gpu::lane(); i < 8 * peers.world; i += gpu::lanes()) {
    const i32 peer = i / 8, place = i / 4 % 2, word = i % 4;
    const i32 writer = in != nullptr ? peers.rank : peer, reader = in != nullptr ? peer : peers.rank;
    const i64 line = i64(kLine) * (place == 0 ? writer : -1 - writer) + (place == 0 ? 0 : end);
    u32* const at = reinterpret_cast<u32*>(peers.region[reader] + line) + word;
    if (in == nullptr) {
      reinterpret_cast<u32*>(out)[i] = gpu::load(at);
      gpu::store(at, 0);
    } else if (peer != peers.rank) {
      gpu::store(at, reinterpret_cast<const u32*>(in)[4 * peer + word]);
    }
  }
}
