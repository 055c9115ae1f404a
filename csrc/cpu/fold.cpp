// The CPU library: from the words of the contract to loops, and the walk over tiles.
#include "../meshplan/abi.h"

#include <stdlib.h>

#include "tiles.h"

namespace mp {
namespace {

// ---- which loops ----

template <class Set, class K, Fusing FUSING>
const Loops* loops_of() {
  if constexpr (FUSING == TREES) {
    static constexpr Loops all = {
        {nullptr, &Set::template start<K, 1>, &Set::template start<K, 2>,
         &Set::template start<K, 3>, &Set::template start<K, 4>, &Set::template start<K, 5>,
         &Set::template start<K, 6>, &Set::template start<K, 7>, &Set::template start<K, 8>},
        {nullptr, &Set::template more<K, 1>, nullptr, nullptr, &Set::template more<K, 4>, nullptr,
         nullptr, nullptr, &Set::template more<K, 8>},
        &Set::template join<K>,
        sizeof(typename K::acc)};
    return &all;
  } else if constexpr (FUSING == RUNS) {
    static constexpr Loops runs = {{nullptr, &Set::template start<K, 1>},
                                   {nullptr, &Set::template more<K, 1>, nullptr, nullptr,
                                    &Set::template more<K, 4>},
                                   &Set::template join<K>,
                                   sizeof(typename K::acc)};
    return &runs;
  } else {
    static constexpr Loops singles = {{nullptr, &Set::template start<K, 1>},
                                      {nullptr, &Set::template more<K, 1>},
                                      &Set::template join<K>,
                                      sizeof(typename K::acc)};
    return &singles;
  }
}

// What one call needs, found once before the first tile.
struct Job {
  const Loops* loops;
  FinishLoop finish;
  i32 out_size;
  bool any_order;  // the operation is exact, and the contract's order is not needed for its bits
};

template <class Set, class K, class R>
Job exact_job() {
  return {loops_of<Set, K, RUNS>(), &Set::template finish<R>, sizeof(typename R::bits), true};
}

template <class Set, class I, class U>
Job integer_job(int op) {
  typedef Unchanged<U, U> Same;
  if (op == MP_SUM) return exact_job<Set, Wrapping<U, Add>, Same>();
  if (op == MP_PRODUCT) return exact_job<Set, Wrapping<U, Mul>, Same>();
  typedef Unchanged<I, U> Signed;
  if (op == MP_MAX) return exact_job<Set, Extreme<I, U, Max>, Signed>();
  return exact_job<Set, Extreme<I, U, Min>, Signed>();
}

// Leaves (or partials) of format In; the accumulator A; the result, and nodes, of format Out.
template <class Set, class In, class A, class Out, class Rounding>
Job sum_job(int op, bool divide) {
  typedef Rounded<Out, A> R;
  return {op == MP_PRODUCT ? loops_of<Set, Floats<In, A, Mul, Rounding>, SINGLES>()
                           : loops_of<Set, Floats<In, A, Add, Rounding>, TREES>(),
          divide ? &Set::template divide<R> : &Set::template finish<R>, sizeof(typename R::bits),
          false};
}

// Leaves of format F; partials are of format Wide, whose accumulator is A.
template <class Set, class F, class Wide, class A>
Job float_job(int op, int rounding, int part, bool divide) {
  if (op == MP_MAX) return exact_job<Set, ExtremeFloats<F, Max>, Unkeyed<F>>();
  if (op == MP_MIN) return exact_job<Set, ExtremeFloats<F, Min>, Unkeyed<F>>();
  if (rounding == MP_NODE && sizeof(typename F::bits) < sizeof(A)) {
    return sum_job<Set, F, A, F, EachNode<F>>(op, divide);
  }
  if (part == MP_COMBINE) return sum_job<Set, F, A, Wide, Once>(op, divide);
  if (part == MP_FINISH) return sum_job<Set, Wide, A, F, Once>(op, divide);
  return sum_job<Set, F, A, F, Once>(op, divide);
}

template <class Set>
Job find_job(int dtype, int op, int accumulate, int rounding, int part, bool divide) {
  switch (dtype) {
    case MP_FLOAT32:
      if (accumulate == MP_ACC_FLOAT64) {
        return float_job<Set, F32, F64, double>(op, rounding, part, divide);
      }
      return float_job<Set, F32, F32, float>(op, rounding, part, divide);
    case MP_FLOAT64:
      return float_job<Set, F64, F64, double>(op, rounding, part, divide);
    case MP_FLOAT16:
      return float_job<Set, F16, F32, float>(op, rounding, part, divide);
    case MP_BFLOAT16:
      return float_job<Set, BF16, F32, float>(op, rounding, part, divide);
    case MP_INT8:
      return integer_job<Set, i8, u8>(op);
    case MP_INT16:
      return integer_job<Set, i16, u16>(op);
    case MP_INT32:
      return integer_job<Set, i32, u32>(op);
    case MP_INT64:
      return integer_job<Set, i64, u64>(op);
    default:
      return integer_job<Set, u8, u8>(op);
  }
}

Job job_for_this_cpu(int dtype, int op, int accumulate, int rounding, int part, bool divide) {
#if defined(MP_HAS_AVX2)
  if (__builtin_cpu_supports("avx2")) {
    return find_job<Avx2>(dtype, op, accumulate, rounding, part, divide);
  }
#endif
  return find_job<Baseline>(dtype, op, accumulate, rounding, part, divide);
}

// ---- which steps ----

// One loop over leaves and the nodes that are due after it.
struct Step {
  i64 first;
  i32 count;
  i32 joins;
  bool starts;  // a new value on the stack, else onto the uppermost
};

struct Order {
  const i64* sizes;
  i32 axes;
  bool by_rank;
  i64 leaves;
  i32 after(i64 leaf) const { return nodes_after(leaf, sizes, axes, by_rank); }
};

// Whether the `count` leaves from `first` on are a tree of one axis: the same nodes are due after
// each, and at least those after the last.
bool is_tree(const Order& order, i64 first, i64 count) {
  if (first + count > order.leaves) return false;
  const Order own = {&count, 1, false, count};
  for (i64 j = 0; j < count - 1; ++j) {
    if (order.after(first + j) != own.after(j)) return false;
  }
  return order.after(first + count - 1) >= own.after(count - 1);
}

// Whether each of the leaves is combined with all that is on the stack's uppermost place before it.
bool is_run(const Order& order, i64 first, i64 count) {
  if (first + count > order.leaves) return false;
  for (i64 j = 0; j < count - 1; ++j) {
    if (order.after(first + j) != 1) return false;
  }
  return order.after(first + count - 1) >= 1;
}

// The longest loop that may come next. One leaf alone is always a tree.
Step next_step(const Order& order, const Loops& loops, i64 first) {
  for (i32 count = MOST_FUSED; count > 0; --count) {
    if (first > 0 && loops.more[count] && is_run(order, first, count)) {
      return {first, count, order.after(first + count - 1) - 1, false};
    }
    if (loops.start[count] && is_tree(order, first, count)) {
      const i64 size = count;
      return {first, count, order.after(first + count - 1) - nodes_after(count - 1, &size, 1, false),
              true};
    }
  }
  __builtin_unreachable();
}

// Enough for 64 leaves and more in most shapes, without a call of malloc.
static constexpr i64 FEW_STEPS = 64;

// ---- the walk ----

// The uppermost accumulators of all values on the stack share one tile's worth of first-level
// cache. A tile is a multiple of 64 elements; no bit depends on it.
static constexpr i64 SCRATCH_BYTES = 32768, MOST_IN_TILE = 2048, GRAIN = 64;

i64 elements_in_tile(i64 depth, i64 acc_size) {
  const i64 fit = SCRATCH_BYTES / (depth * acc_size) / GRAIN * GRAIN;
  return fit < MOST_IN_TILE ? fit : MOST_IN_TILE;
}
static_assert(SCRATCH_BYTES / (MAX_DEPTH * sizeof(double)) >= GRAIN, "the deepest stack has room");

void walk(const Job& job, const Step* steps, i64 count, i32 depth, u8* out,
          const void* const* leaves, i64 numel, i64 divisor) {
  alignas(64) u8 scratch[SCRATCH_BYTES];
  const i64 tile = elements_in_tile(depth, job.loops->acc_size);
  const i64 slot = tile * job.loops->acc_size;
  for (i64 base = 0; base < numel; base += tile) {
    const i64 n = numel - base < tile ? numel - base : tile;
    u8* next = scratch;
    for (const Step* step = steps; step != steps + count; ++step) {
      if (step->starts) {
        job.loops->start[step->count](next, leaves + step->first, base, n);
        next += slot;
      } else {
        job.loops->more[step->count](next - slot, leaves + step->first, base, n);
      }
      for (i32 due = step->joins; due; --due) {
        next -= slot;
        job.loops->join(next - slot, next, n);
      }
    }
    job.finish(out + base * job.out_size, scratch, n, divisor);
  }
}

// More pointers than any address space holds.
static constexpr i64 MOST_LEAVES = i64(1) << 48;

int checked(const i64* sizes, int axes, i64 numel, int dtype, int op, int order,
            int accumulate, int rounding, int part, i64 divisor, i64* leaves) {
  if (dtype < MP_FLOAT32 || dtype > MP_UINT8) return MP_BAD_DTYPE;
  if (op < MP_SUM || op > MP_PRODUCT) return MP_BAD_OP;
  if (op == MP_AVG && dtype >= MP_INT8) return MP_BAD_OP;
  if ((order != MP_TREE && order != MP_RANK) || (rounding != MP_ONCE && rounding != MP_NODE) ||
      (accumulate != MP_WIDE && accumulate != MP_ACC_FLOAT64)) {
    return MP_BAD_CONTRACT;
  }
  const bool exact = op == MP_MAX || op == MP_MIN || dtype >= MP_INT8;
  if (part < MP_WHOLE || part > MP_FINISH) return MP_BAD_PART;
  if (part != MP_WHOLE && order == MP_RANK && !exact) return MP_BAD_PART;
  if (axes < 0) return MP_BAD_SHAPE;
  *leaves = 1;
  for (int axis = 0; axis < axes; ++axis) {
    if (sizes[axis] < 1 || sizes[axis] > MOST_LEAVES / *leaves) return MP_BAD_SHAPE;
    *leaves *= sizes[axis];
  }
  if (numel < 0) return MP_BAD_NUMEL;
  const bool divides = op == MP_AVG && part != MP_COMBINE;
  return divides == (divisor > 0) && divisor >= 0 ? MP_OK : MP_BAD_DIVISOR;
}

}  // namespace
}  // namespace mp

extern "C" int mp_fold(void* out, const void* const* leaves, const long long* sizes, int axes,
                       long long numel, int dtype, int op, int order, int accumulate, int rounding,
                       int part, long long divisor) {
  using namespace mp;
  i64 count = 0;
  const int error = checked(sizes, axes, numel, dtype, op, order, accumulate, rounding, part,
                            divisor, &count);
  if (error != MP_OK || numel == 0) return error;
  const Job job = job_for_this_cpu(dtype, op, accumulate, rounding, part, divisor > 0);
  const Order as_asked = {sizes, axes, order == MP_RANK || job.any_order, count};

  Step few[FEW_STEPS];
  Step* steps = few;
  if (count > FEW_STEPS) {
    steps = static_cast<Step*>(malloc(static_cast<size_t>(count) * sizeof(Step)));
    if (!steps) return MP_NO_MEMORY;
  }
  i64 used = 0;
  i32 height = 0, depth = 0;
  for (i64 first = 0; first < count; first += steps[used++].count) {
    steps[used] = next_step(as_asked, *job.loops, first);
    height += steps[used].starts;
    depth = height > depth ? height : depth;
    height -= steps[used].joins;
  }
  walk(job, steps, used, depth, static_cast<u8*>(out), leaves, numel, divisor);
  if (steps != few) free(steps);
  return MP_OK;
}

extern "C" int mp_abi_version(void) { return MP_ABI_VERSION; }

#ifndef MP_FLAGS
#define MP_FLAGS "unknown flags"
#endif
#if defined(__clang__)
#define MP_COMPILER "clang++ " __clang_version__
#else
#define MP_COMPILER "g++ " __VERSION__
#endif

extern "C" const char* mp_build_info(void) { return MP_COMPILER "; " MP_FLAGS; }
