// The order of contract v1, as numbers: how many nodes are due after each leaf.
//
// Any fold is: put the leaves on a stack one after another, and after some of them replace the two
// uppermost values by their node, the lower one as its left argument. For one axis of n leaves,
// split after the largest power of two below n, the left parts are whole powers of two: after leaf i
// a node is due for each trailing zero bit of i + 1, and after the last leaf the rest. What one axis
// has left on the stack is a leaf of the next axis outward.
#pragma once
#include "port.h"

namespace mp {

// More than the values that are ever on the stack at once, for any number of leaves below 2**63:
// an axis of n holds at most floor(log2(n)) of them while the axes inside it are at work.
static constexpr i32 MAX_DEPTH = 64;

// How many nodes are due after `leaf` (from 0), of leaves row-major over `sizes`, outermost first;
// in order="rank" one after every leaf but the first.
MP_HD i32 nodes_after(i64 leaf, const i64* sizes, i32 axes, bool by_rank) {
  if (by_rank) return leaf != 0;
  i32 nodes = 0;
  for (i32 axis = axes - 1; axis >= 0; --axis) {
    const i64 done = leaf % sizes[axis] + 1;
    leaf /= sizes[axis];
    for (i64 rest = done; !(rest & 1); rest >>= 1) ++nodes;
    if (done < sizes[axis]) break;
    for (i64 rest = done & (done - 1); rest; rest &= rest - 1) ++nodes;
  }
  return nodes;
}

}  // namespace mp
