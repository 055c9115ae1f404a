// What a kernel for GPUs is given, by value: a graph that captures a launch keeps all of it.
#pragma once

#include "order.h"
#include "peer.h"

namespace meshplan {

// Partial results that wait, at most: a tree over 72 leaves in axes of 2 or more needs 8.
constexpr i32 kPending = 12;

// All but the tensors.
struct DeviceCall {
  i64 timeout_ns;
  i64 starts[kMaxPeers + 1];  // as Message has it
  u64 divisor;
  Signature signature;
  i32 mode, item;
  Order order;
  i32 one_axis, steps;
  u32 piece;
  Instruction step[2 * kMaxPeers];
};

// In memory of the host that the device writes to. A block that fails leaves its outcome and what it
// was called for under its index, and then sets `any` to 1 and its index.
struct Failure {
  Outcome outcome;
  Signature mine;
};
struct Failures {
  u32 any, unused[15];
  Failure of[1];  // as many as there are blocks
};

// The limit of CUDA and of HIP for the parameters of a kernel.
static_assert(sizeof(Peers) + sizeof(DeviceCall) + 3 * sizeof(void*) <= 4096, "parameters");

}  // namespace meshplan
