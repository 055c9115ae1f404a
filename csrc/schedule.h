// An order of additions as a list of steps over a stack of partial results, the same for every element.
// order.h writes it.
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

}  // namespace meshplan
