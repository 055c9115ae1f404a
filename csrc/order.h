// The orders of additions of the contract: a struct each, and a line in `MP_ORDERS`.
//
// `list` writes an order as steps over a stack of partial results, the same for every element, for
// leaves on axes of any sizes, counted row-major. Sums of floats in order `exact` have no steps
// (exact.h); its integers, maxima and minima have the same bits in any.
// meshplan/orders.py is the definition and has the same codes. For GPUs the host makes batches of it.
#pragma once

#include "port.h"

namespace meshplan {

// load: push leaf a. load2: push leaf a with leaf b. with: the top with leaf a. top2: the two on top.
enum class Do : i32 { load, load2, with, top2 };

struct Instruction {
  Do what;
  i32 a, b;
};

struct Schedule {
  Instruction* steps;  // room for 2 * leaves
  i32 count;
  i32 depth, height;  // now, and at most
  i32 leaves;

  MP_FN void emit(Do what, i32 a, i32 b) {
    steps[count++] = {what, a, b};
    if (what == Do::load || what == Do::load2) {
      ++depth;
    } else if (what == Do::top2) {
      --depth;
    }
    height = depth > height ? depth : height;
  }
};

// How many leaves there are on axes of these sizes.
MP_FN i32 leaves_of(const i32* shape, i32 axes) {
  i32 leaves = 1;
  for (i32 i = 0; i < axes; ++i) leaves *= shape[i];
  return leaves;
}

#define MP_ORDERS(MP_ORDER)     \
  MP_ORDER(tree, 0, TreeOrder) \
  MP_ORDER(rank, 1, RankOrder) \
  MP_ORDER(exact, 2, TreeOrder)

#define MP_ENTRY(name, code, Found) name = code,
enum class Order : u32 { MP_ORDERS(MP_ENTRY) };
#undef MP_ENTRY

// One axis of n leaves splits after the largest power of two below n; several axes are reduced last
// axis first.
struct TreeOrder {
  MP_FN static void list(Schedule& into, const i32* shape, i32 axes) {
    part(into, shape, axes, 0, shape[0]);
  }

 private:
  // Leaves from `first` to `first + size * stride` of an axis of `size`, each of its parts whole inner
  // axes.
  MP_FN static void part(Schedule& into, const i32* shape, i32 axes, i32 first, i32 size) {
    // One part left of this axis: its tree is the tree of the next axis inward.
    while (axes > 1 && size == 1) {
      ++shape;
      --axes;
      size = *shape;
    }
    if (size == 1) {
      into.emit(Do::load, first, 0);
      return;
    }
    i32 stride = 1;
    for (i32 i = 1; i < axes; ++i) stride *= shape[i];
    // The largest power of two below `size`, as meshplan/orders.py has it.
    i32 split = 1;
    while (2 * split < size) split *= 2;
    if (stride == 1 && size == 2) {
      into.emit(Do::load2, first, first + 1);
      return;
    }
    part(into, shape, axes, first, split);
    // A single leaf on the right is added directly: it needs no room on the stack.
    if (stride == 1 && size - split == 1) {
      into.emit(Do::with, first + split, 0);
      return;
    }
    part(into, shape, axes, first + split * stride, size - split);
    into.emit(Do::top2, 0, 0);
  }
};

// The left fold over all leaves.
struct RankOrder {
  MP_FN static void list(Schedule& into, const i32* shape, i32 axes) {
    const i32 leaves = leaves_of(shape, axes);
    if (leaves == 1) {
      into.emit(Do::load, 0, 0);
      return;
    }
    into.emit(Do::load2, 0, 1);
    for (i32 i = 2; i < leaves; ++i) into.emit(Do::with, i, 0);
  }
};

#define MP_CASE(name, code, Found) \
  case Order::name:               \
    return Found::list(into, shape, axes), true;

// The steps for `axes` axes of `shape`, at least one; false if there is no such order.
MP_FN bool list_steps(Schedule& into, Order order, const i32* shape, i32 axes) {
  switch (order) { MP_ORDERS(MP_CASE) }
  return false;
}
#undef MP_CASE

}  // namespace meshplan
