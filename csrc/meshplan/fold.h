// The fold of contract v1 for one element, over any algebra K of arith.h.
//
// `read(j)` gives the bits of leaf j at this element: from one array per leaf, from the slots of a
// peer's staging region, from wherever. Neither tile nor thread nor position enters the arithmetic.
#pragma once
#include "arith.h"
#include "order.h"

namespace mp {

constexpr int largest_power_below(int n) {
  int power = 1;
  while (2 * power < n) power *= 2;
  return power;
}

// Leaves FIRST to FIRST + N - 1 of one axis, split after the largest power of two below N. The tree
// is laid out while compiling: no stack, and a compiler may vectorise over elements.
template <class K, int N, int FIRST = 0>
struct Tree {
  static constexpr int LEFT = largest_power_below(N);
  template <class Read>
  static MP_HD typename K::acc of(const Read& read) {
    const typename K::acc left = Tree<K, LEFT, FIRST>::of(read);
    return K::node(left, Tree<K, N - LEFT, FIRST + LEFT>::of(read));
  }
};

template <class K, int FIRST>
struct Tree<K, 1, FIRST> {
  template <class Read>
  static MP_HD typename K::acc of(const Read& read) {
    return K::load(read(FIRST));
  }
};

// `value`, then leaves 0 to N - 1 onto it one after another.
template <class K, int N>
struct Onto {
  template <class Read>
  static MP_HD typename K::acc of(typename K::acc value, const Read& read) {
    return K::node(Onto<K, N - 1>::of(value, read), K::load(read(N - 1)));
  }
};

template <class K>
struct Onto<K, 0> {
  template <class Read>
  static MP_HD typename K::acc of(typename K::acc value, const Read&) {
    return value;
  }
};

// Any number of leaves over any axes; DEPTH - 1 is at least the base-2 logarithm of their number.
template <class K, int DEPTH, class Read>
MP_HD typename K::acc fold_element(const Read& read, const i64* sizes, i32 axes, bool by_rank) {
  i64 leaves = 1;
  for (i32 axis = 0; axis < axes; ++axis) leaves *= sizes[axis];
  typename K::acc stack[DEPTH];
  i32 top = 0;
  stack[0] = K::load(read(0));
  for (i64 leaf = 1; leaf < leaves; ++leaf) {
    typename K::acc value = K::load(read(leaf));
    for (i32 due = nodes_after(leaf, sizes, axes, by_rank); due; --due) {
      value = K::node(stack[top--], value);
    }
    stack[++top] = value;
  }
  return stack[0];
}

}  // namespace mp
