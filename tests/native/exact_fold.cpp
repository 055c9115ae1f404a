// The fold of the GPU kernels as a function: one lane of one block, leaves at any address.
#include "element.h"

namespace {

using namespace meshplan;

struct OneLane {
  i64 lane() const { return 0; }
  i64 lanes() const { return 1; }
};

template <class D, class Acc>
void fold(u8* out, const u8* const* leaves, i64 numel, i32 count, u64 divisor) {
  const Elements how{nullptr, 0, count, Order::exact, true, divisor};
  OneLane block;
  const Results into{out, nullptr, 0, 1, 0, 0};
  fold_elements<D, Acc, Acc, ExactSum>(how, into, {leaves[0], leaves, 0, 0, 0, false}, numel, block);
}

}  // namespace

// dtype: 0 float32, 1 bfloat16, 2 float16, 3 float64, 4 float32 summed in float64.
extern "C" void exact_fold(u8* out, const u8* const* leaves, i64 numel, i32 count, i32 dtype,
                           u64 divisor) {
  switch (dtype) {
    case 0: return fold<float, float>(out, leaves, numel, count, divisor);
    case 1: return fold<Bfloat, float>(out, leaves, numel, count, divisor);
    case 2: return fold<Half, float>(out, leaves, numel, count, divisor);
    case 3: return fold<double, double>(out, leaves, numel, count, divisor);
    case 4: return fold<float, double>(out, leaves, numel, count, divisor);
  }
}
