// The fold on a CPU. One thread; memory is read and written once.
//
// Elements are processed in tiles that stay in the first cache. The tile of an element, and its place
// in it, change no bit: each element goes through the same list of steps.
#include "cpu.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "exact.h"
#include "op.h"

namespace meshplan {
namespace {

// A loop reads leaves and writes the stack, or reads the stack and writes the result, which may be one
// of the leaves: so MP_APART.

// Elements. Long enough for each leaf to be read as a stream, short enough for a stack of tiles to
// stay in the first cache: for bfloat16 in trees of six, 4096 take 1.7 times as long.
constexpr i64 kTile = 1024;

struct Fold {
  void* out;
  const void* const* leaves;
  i64 numel;
  const Schedule& schedule;
  u64 divisor;  // 0: none
  bool canonical;
};

// `last`: the final result, with canonical NaNs; else a partial result, whose NaNs may be any.
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

// One division in the accumulator's dtype: a product with the reciprocal has other bits.
template <class Acc>
MP_INLINED void divide(Acc* totals, i64 count, u64 by) {
  if constexpr (kDivides<Acc>) {
    if (by == 0) return;
    const Acc divisor = Acc(by);
    MP_APART for (i64 i = 0; i < count; ++i) totals[i] /= divisor;
  }
}

// One walk over a tile does one step, or all of a subtree of four or eight leaves, so that its partial
// results stay in registers. The additions are the same. The first four are the values of `Do`.
enum class Walk : i32 { load, load2, with, top2, load4, load8 };

struct Pass {
  Walk walk;
  const Instruction* steps;
};

// Whether the next three steps are a subtree of four leaves: (a + b) + (c + d).
bool starts_load4(const Instruction* step, const Instruction* end) {
  return end - step >= 3 && step[0].what == Do::load2 && step[1].what == Do::load2 &&
         step[2].what == Do::top2;
}

std::vector<Pass> passes(const Schedule& schedule) {
  std::vector<Pass> found;
  const Instruction* step = schedule.steps;
  const Instruction* const end = step + schedule.count;
  while (step < end) {
    if (!starts_load4(step, end)) {
      found.push_back({Walk(step->what), step});
      step += 1;
    } else if (starts_load4(step + 3, end) && end - step >= 7 && step[6].what == Do::top2) {
      // Two such subtrees and their sum.
      found.push_back({Walk::load8, step});
      step += 7;
    } else {
      found.push_back({Walk::load4, step});
      step += 3;
    }
  }
  return found;
}

// In: dtype of leaves. Acc: of partial results. Round: that each node is rounded to (Acc: no rounding).
template <class In, class Acc, class Round, class Out, class Op>
MP_INLINED void sweep(const Fold& call) {
  auto node = [](Acc a, Acc b) {
    return Convert<Acc>::from(Convert<Round>::from(Op::node(a, b)));
  };
  const auto leaf = [](const void* from, i64 index) {
    return Convert<Acc>::from(load<In>(from, index));
  };
  const std::vector<Pass> all = passes(call.schedule);
  const i64 room = std::min(kTile, call.numel);
  // The stack of the schedule, with a tile for each entry in place of one number.
  std::vector<Acc> stack(std::size_t(call.schedule.height * room));
  for (i64 start = 0; start < call.numel; start += kTile) {
    const i64 count = call.numel - start < kTile ? call.numel - start : kTile;
    // Empty: the first load pushes.
    Acc* top = stack.data() - room;
    for (const Pass& pass : all) {
      const void* in[8];
      const auto take = [&](i32 step, i32 at) {
        in[at] = static_cast<const char*>(call.leaves[pass.steps[step].a]) + start * i64(sizeof(In));
        in[at + 1] =
            static_cast<const char*>(call.leaves[pass.steps[step].b]) + start * i64(sizeof(In));
      };
      // `load` and `with` have one leaf; their second pointer is not read.
      take(0, 0);
      switch (pass.walk) {
        case Walk::load:
          top += room;
          MP_APART for (i64 i = 0; i < count; ++i) top[i] = leaf(in[0], i);
          break;
        case Walk::load2:
          top += room;
          MP_APART for (i64 i = 0; i < count; ++i) top[i] = node(leaf(in[0], i), leaf(in[1], i));
          break;
        case Walk::with:
          MP_APART for (i64 i = 0; i < count; ++i) top[i] = node(top[i], leaf(in[0], i));
          break;
        case Walk::top2:
          top -= room;
          MP_APART for (i64 i = 0; i < count; ++i) top[i] = node(top[i], top[i + room]);
          break;
        case Walk::load4:
          top += room;
          take(1, 2);
          MP_APART for (i64 i = 0; i < count; ++i)
            top[i] = node(node(leaf(in[0], i), leaf(in[1], i)), node(leaf(in[2], i), leaf(in[3], i)));
          break;
        case Walk::load8:
          top += room;
          take(1, 2);
          take(3, 4);
          take(4, 6);
          MP_APART for (i64 i = 0; i < count; ++i)
            top[i] = node(
                node(node(leaf(in[0], i), leaf(in[1], i)), node(leaf(in[2], i), leaf(in[3], i))),
                node(node(leaf(in[4], i), leaf(in[5], i)), node(leaf(in[6], i), leaf(in[7], i))));
          break;
      }
    }
    divide(top, count, call.divisor);
    store<Out>(call.out, start, top, count, call.canonical);
  }
}

// The state of QuickSum for each element of a tile, an array for each of its members.
template <class D>
struct QuickTile {
  double sum[kTile];
  i32 low[kTile], high[kTile];

  MP_INLINED QuickSum<D> get(i64 i) const { return {sum[i], low[i], high[i]}; }
  MP_INLINED void set(i64 i, const QuickSum<D>& one) {
    sum[i] = one.sum;
    low[i] = one.low;
    high[i] = one.high;
  }
};
template <>
struct QuickTile<double> {
  double sum[kTile], error[kTile], rest[kTile];

  MP_INLINED QuickSum<double> get(i64 i) const { return {sum[i], error[i], rest[i]}; }
  MP_INLINED void set(i64 i, const QuickSum<double>& one) {
    sum[i] = one.sum;
    error[i] = one.error;
    rest[i] = one.rest;
  }
};

// kCount leaves of D in one walk over a tile; `leaves` start at its elements.
template <i32 kCount, class D, class Raised>
MP_INLINED void add_leaves(QuickTile<Raised>& tile, const void* const* leaves, i64 start, i64 count,
                           bool first) {
  const char* in[kCount];
  for (i32 k = 0; k < kCount; ++k) {
    in[k] = static_cast<const char*>(leaves[k]) + start * i64(sizeof(D));
  }
  const auto walk = [&](auto before) {
    MP_APART for (i64 i = 0; i < count; ++i) {
      QuickSum<Raised> one = before(i);
#pragma GCC unroll 8
      for (i32 k = 0; k < kCount; ++k) one.add(Convert<Raised>::from(load<D>(in[k], i)));
      tile.set(i, one);
    }
  };
  if (first) {
    walk([](i64) { return QuickSum<Raised>{}; });
  } else {
    walk([&](i64 i) { return tile.get(i); });
  }
}

// Elements from `start` on, raised or not.
template <class D, class Raised>
MP_INLINED void add_all(QuickTile<Raised>& tile, const void* const* leaves, i32 total, i64 start,
                        i64 count) {
  for (i32 done = 0; done < total;) {
    const i32 left = total - done;
    const void* const* from = leaves + done;
    if (left >= 8) {
      add_leaves<8, D>(tile, from, start, count, done == 0);
      done += 8;
    } else if (left >= 4) {
      add_leaves<4, D>(tile, from, start, count, done == 0);
      done += 4;
    } else {
      add_leaves<1, D>(tile, from, start, count, done == 0);
      done += 1;
    }
  }
}

// Elements that are added again together: enough for vectors that do not wait for each other, and few
// are certain already where only some elements of a tile are not.
constexpr i64 kStrip = 32;

// Order `exact`; see exact.h. The schedule is not looked at but for the number of leaves.
template <class D, class Acc>
MP_INLINED void sweep_exactly(const Fold& call, i32 leaves) {
  QuickTile<D> tile;
  QuickTile<double> again;
  Acc totals[kTile];
  u8 uncertain[kTile];
  const typename QuickSum<D>::Limits limits = QuickSum<D>::limits(leaves);
  for (i64 start = 0; start < call.numel; start += kTile) {
    const i64 count = std::min(kTile, call.numel - start);
    add_all<D>(tile, call.leaves, leaves, start, count);
    u8 any = 0;
    for (i64 i = 0; i < count; ++i) {
      const QuickSum<D> one = tile.get(i);
      totals[i] = one.template total<Acc>();
      uncertain[i] = u8(!one.template certain<Acc>(limits));
      any |= uncertain[i];
    }
    for (i64 first = 0; any != 0 && first < count; first += kStrip) {
      const i64 end = std::min(first + kStrip, count);
      if (std::find(uncertain + first, uncertain + end, 1) == uncertain + end) continue;
      if constexpr (sizeof(D) < 8) {
        add_all<D>(again, call.leaves, leaves, start + first, end - first);
        for (i64 i = first; i < end; ++i) {
          const QuickSum<double> one = again.get(i - first);
          totals[i] = uncertain[i] != 0 ? one.template total<Acc>() : totals[i];
          uncertain[i] &= u8(!one.template certain<Acc>({}));
        }
      }
      for (i64 i = first; i < end; ++i) {
        if (uncertain[i] == 0) continue;
        const auto leaf = [&](i32 r) { return Convert<Acc>::from(load<D>(call.leaves[r], start + i)); };
        totals[i] = sum_digits<Acc>(leaf, leaves);
      }
    }
    divide(totals, count, call.divisor);
    store<D>(call.out, start, totals, count, true);
  }
}

template <class In, class Acc, class Round, class Out, class Op>
void run(const Fold& call) {
  run_vectors([&]() MP_ALWAYS { sweep<In, Acc, Round, Out, Op>(call); });
}

// With a rounding at each node, partial results are of the leaves' dtype in every part. Else they
// stay in Acc between the parts of a reduction.
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
    // Exact, so there is neither accumulator nor rounding.
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
  const auto flag = [](i32 word) { return word == 0 || word == 1; };
  if (!flag(how.accumulate) || !flag(how.node) || u32(how.part) > u32(Part::finish)) return 1;
  const Fold call{out, leaves, numel, schedule, how.divisor, how.part != Part::combine};
  const Op op = Op(how.op);
  if (how.exact && op == Op::product && how.dtype <= 3) return 1;
  if (how.exact && op == Op::sum && how.dtype <= 3) {
    // Rounded once, of all leaves.
    if (how.node == 1 || how.part != Part::whole) return 1;
    return with_float(how.dtype, how.accumulate == 1, [&](auto leaf, auto sum) {
      using D = decltype(leaf);
      using Acc = decltype(sum);
      run_vectors([&]() MP_ALWAYS { sweep_exactly<D, Acc>(call, schedule.leaves); });
      return 0;
    }) != 0;
  }
  switch (how.dtype) {
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
  return with_float(how.dtype, how.accumulate == 1, [&](auto leaf, auto sum) {
    return run_op<decltype(leaf), decltype(sum)>(call, how, op);
  }) != 0;
}

}  // namespace meshplan
