// The contract's tree as a list of steps over a stack of partial results.
//
// order 0 is the tree: one axis of n leaves splits after the largest power of two below n; several
// axes are reduced last axis first. order 1 is the left fold. The list is the same for every element.
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

// Leaves first to first + size * stride of an axis of `size`, whose parts are whole inner axes.
MP_FN void tree(Schedule& into, const i32* shape, i32 axes, i32 first, i32 size) {
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
  i32 split = 1;
  while (2 * split < size) split *= 2;
  if (stride == 1 && size == 2) {
    into.emit(Do::load2, first, first + 1);
    return;
  }
  tree(into, shape, axes, first, split);
  if (stride == 1 && size - split == 1) {
    into.emit(Do::with, first + split, 0);
    return;
  }
  tree(into, shape, axes, first + split * stride, size - split);
  into.emit(Do::top2, 0, 0);
}

MP_FN void fold(Schedule& into, i32 leaves) {
  if (leaves == 1) {
    into.emit(Do::load, 0, 0);
    return;
  }
  into.emit(Do::load2, 0, 1);
  for (i32 i = 2; i < leaves; ++i) into.emit(Do::with, i, 0);
}

}  // namespace meshplan
