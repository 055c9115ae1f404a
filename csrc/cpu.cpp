// The fold on a CPU. One thread; memory is read and written once.
//
// Elements are taken in tiles that stay in the first cache. Which tile an element falls in, and where
// in it, changes no bit: each element goes through the same list of steps.
#include "cpu.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "op.h"

namespace meshplan {
namespace {

#define MP_INLINED __attribute__((always_inline)) inline
// The tile, the leaves and the result never overlap.
#define MP_APART _Pragma("GCC ivdep")

// Elements. Long enough for each leaf to be read as a stream, short enough for a stack of tiles to
// stay near.
constexpr i64 kTile = 4096;

struct Fold {
  void* out;
  const void* const* leaves;
  i64 numel;
  const Schedule& schedule;
  u64 divisor;  // 0: none
  bool canonical;
};

template <class T>
MP_INLINED T load(const void* from, i64 index) {
  // Any alignment.
  typename Traits<T>::Bits bits;
  __builtin_memcpy(&bits, static_cast<const char*>(from) + index * i64(sizeof(T)), sizeof(T));
  return bit_cast<T>(bits);
}

template <class Out, class Acc>
MP_INLINED void store(void* to, i64 start, const Acc* __restrict__ from, i64 count, bool last) {
  using Bits = typename Traits<Out>::Bits;
  char* __restrict__ out = static_cast<char*>(to) + start * i64(sizeof(Out));
  if (last) {
    MP_APART for (i64 i = 0; i < count; ++i) {
      const Bits bits = bit_cast<Bits>(finished<Out>(from[i]));
      __builtin_memcpy(out + i * i64(sizeof(Out)), &bits, sizeof(Out));
    }
  } else {
    MP_APART for (i64 i = 0; i < count; ++i) {
      const Bits bits = bit_cast<Bits>(Convert<Out>::from(from[i]));
      __builtin_memcpy(out + i * i64(sizeof(Out)), &bits, sizeof(Out));
    }
  }
}

// In: leaves. Acc: partial results. Round: what each node is rounded to (Acc: not at all).
template <class In, class Acc, class Round, class Out, class Op>
MP_INLINED void sweep(const Fold& call) {
  auto node = [](Acc a, Acc b) {
    return Convert<Acc>::from(Convert<Round>::from(Op::node(a, b)));
  };
  const i64 room = std::min(kTile, call.numel);
  std::vector<Acc> stack(std::size_t(call.schedule.height * room));
  for (i64 start = 0; start < call.numel; start += kTile) {
    const i64 count = call.numel - start < kTile ? call.numel - start : kTile;
    Acc* top = stack.data() - room;
    for (i32 s = 0; s < call.schedule.count; ++s) {
      const Instruction step = call.schedule.steps[s];
      const void* a = call.leaves[step.a];
      const void* b = call.leaves[step.b];
      switch (step.what) {
        case Do::load:
          top += room;
          MP_APART for (i64 i = 0; i < count; ++i) top[i] = Convert<Acc>::from(load<In>(a, start + i));
          break;
        case Do::load2:
          top += room;
          MP_APART for (i64 i = 0; i < count; ++i)
            top[i] = node(Convert<Acc>::from(load<In>(a, start + i)),
                          Convert<Acc>::from(load<In>(b, start + i)));
          break;
        case Do::with:
          MP_APART for (i64 i = 0; i < count; ++i)
            top[i] = node(top[i], Convert<Acc>::from(load<In>(a, start + i)));
          break;
        case Do::top2:
          top -= room;
          MP_APART for (i64 i = 0; i < count; ++i) top[i] = node(top[i], top[i + room]);
          break;
      }
    }
    if constexpr (kDivides<Acc>) {
      if (call.divisor != 0) {
        const Acc divisor = Acc(call.divisor);
        MP_APART for (i64 i = 0; i < count; ++i) top[i] /= divisor;
      }
    }
    store<Out>(call.out, start, top, count, call.canonical);
  }
}

// The same code for wider vectors, where the processor has them. Which one runs changes no bit: AVX2
// has no fused multiply-add.
#if defined(__x86_64__)
template <class In, class Acc, class Round, class Out, class Op>
__attribute__((target("avx2"))) void sweep_avx2(const Fold& call) {
  sweep<In, Acc, Round, Out, Op>(call);
}
#endif

template <class In, class Acc, class Round, class Out, class Op>
void run(const Fold& call) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) {
    sweep_avx2<In, Acc, Round, Out, Op>(call);
    return;
  }
#endif
  sweep<In, Acc, Round, Out, Op>(call);
}

template <class D, class Acc, class Op>
void run_linear(const Fold& call, const Reduction& how) {
  if (how.node == 1) {
    run<D, Acc, D, D, Op>(call);
  } else if (how.part == Part::whole) {
    run<D, Acc, Acc, D, Op>(call);
  } else if (how.part == Part::combine) {
    run<D, Acc, Acc, Acc, Op>(call);
  } else {
    run<Acc, Acc, Acc, D, Op>(call);
  }
}

template <class D, class Acc>
int run_op(const Fold& call, const Reduction& how, Op op) {
  switch (op) {
    case Op::sum:
      run_linear<D, Acc, Sum>(call, how);
      return 0;
    case Op::product:
      run_linear<D, Acc, Product>(call, how);
      return 0;
    case Op::max:
      run<D, D, D, D, Extremum<true>>(call);
      return 0;
    case Op::min:
      run<D, D, D, D, Extremum<false>>(call);
      return 0;
  }
  return 1;
}

}  // namespace

int reduce(void* out, const void* const* leaves, i64 numel, const Schedule& schedule,
           const Reduction& how) {
  if (numel == 0) return 0;
  const Fold call{out, leaves, numel, schedule, how.divisor, how.part != Part::combine};
  const Op op = Op(how.op);
  switch (how.dtype) {
    case 0:
      return how.accumulate == 1 ? run_op<float, double>(call, how, op)
                                 : run_op<float, float>(call, how, op);
    case 1:
      return run_op<Bfloat, float>(call, how, op);
    case 2:
      return run_op<Half, float>(call, how, op);
    case 3:
      return run_op<double, double>(call, how, op);
    case 4:
      return run_op<i8, i8>(call, how, op);
    case 5:
      return run_op<i16, i16>(call, how, op);
    case 6:
      return run_op<i32, i32>(call, how, op);
    case 7:
      return run_op<i64, i64>(call, how, op);
    case 8:
      return run_op<u8, u8>(call, how, op);
  }
  return 1;
}

}  // namespace meshplan
