// What a kernel for GPUs is given, by value: a graph that captures a launch keeps all of it.
#pragma once

#include "peer.h"

namespace meshplan {

// Leaves that are folded together, and of which a word each is in flight.
constexpr i32 kBatch = 8;
// Results of batches that wait, at most: of a tree over 72 leaves no more do, whatever its axes.
constexpr i32 kStagedWaiting = 3;

// All but the tensors. chain, plan: as in FoldCall, for the ranks' pieces as leaves.
struct DeviceCall {
  i64 timeout_ns;
  i64 starts[kMaxPeers + 1];  // as Message has it
  u64 divisor;
  Signature signature;
  i32 mode, item;
  u32 piece;
  i32 chain;
  u8 plan[kMaxPeers];
};

// The host has the same fields.
static_assert(sizeof(DeviceCall) == 816, "DeviceCall of meshplan/kernel/_library.py");

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

static_assert(sizeof(Failures) - sizeof(Failure) == 64 && sizeof(Failure) == 280,
              "Failures of meshplan/kernel/_library.py");

// The limit of CUDA and of HIP for the parameters of a kernel.
static_assert(sizeof(Peers) + sizeof(DeviceCall) + 3 * sizeof(void*) <= 4096, "parameters");

}  // namespace meshplan
