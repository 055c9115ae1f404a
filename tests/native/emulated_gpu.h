// A GPU on a CPU: each block a thread, its lanes turn and turn about on that thread.
//
// So that the kernels' own source runs with many lanes where there is no GPU. A lane gives way where
// it waits: at a barrier, and when it naps. What a GPU may reorder is not shown here.
#pragma once

#include <sched.h>
#include <time.h>
#include <ucontext.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "port.h"

#define __device__
#define __shared__ static thread_local
#define MP_KERNEL extern "C" void
#define MP_PARAMETER const
// A harness may have read the headers for hosts first.
#undef MP_ACCESS
#define MP_ACCESS(address, bytes) ::meshplan::gpu::access(address, bytes)

namespace meshplan::gpu {

// Loads and stores of tensors and tiles, by bytes. One that is not aligned ends the process, as it
// ends a kernel on a GPU.
inline std::atomic<unsigned long long> accesses[17];
inline void access(const void* address, std::size_t bytes) {
  if (u64(address) % bytes != 0) {
    std::fprintf(stderr, "misaligned access of %zu bytes at %p\n", bytes, address);
    std::abort();
  }
  accesses[bytes].fetch_add(1, std::memory_order_relaxed);
}
extern "C" __attribute__((used)) inline unsigned long long emulated_accesses(int bytes) {
  return accesses[bytes].exchange(0);
}

class Lanes {
 public:
  Lanes(i32 block, i32 blocks, i32 lanes, std::function<void()> kernel)
      : block(block), blocks(blocks), lanes_(std::size_t(lanes)), kernel_(std::move(kernel)) {}

  // Runs the kernel in every lane, until all have returned.
  void run() {
    current() = this;
    for (Lane& lane : lanes_) {
      lane.stack = std::make_unique<char[]>(kStack);
      getcontext(&lane.context);
      lane.context.uc_stack.ss_sp = lane.stack.get();
      lane.context.uc_stack.ss_size = kStack;
      lane.context.uc_link = &scheduler_;
      makecontext(&lane.context, &Lanes::enter, 0);
    }
    bool upwards = false;
    u32 chance = u32(block);
    for (std::size_t left = lanes_.size(); left > 0;) {
      bool released = false;
      std::size_t waiting = 0;
      // Up and down: no lane is always first.
      upwards = !upwards;
      for (std::size_t i = 0; i < lanes_.size(); ++i) {
        turn_ = upwards ? i : lanes_.size() - 1 - i;
        Lane& lane = lanes_[turn_];
        if (lane.done) continue;
        if (lane.at_barrier) {
          ++waiting;
          continue;
        }
        // And some fall behind, as warps do.
        chance = 1664525u * chance + 1013904223u;
        if (chance >> 30 == 0) {
          released = true;
          continue;
        }
        swapcontext(&scheduler_, &lane.context);
        left -= lane.done;
        waiting += lane.at_barrier && !lane.done;
        released = true;
      }
      if (waiting == left) {
        for (Lane& lane : lanes_) lane.at_barrier = false;
      }
      if (released) sched_yield();
    }
    current() = nullptr;
  }

  i32 lane() const { return i32(turn_); }
  i32 lanes() const { return i32(lanes_.size()); }
  void give_way(bool at_barrier) {
    Lane& lane = lanes_[turn_];
    lane.at_barrier = at_barrier;
    swapcontext(&lane.context, &scheduler_);
  }
  static Lanes*& current() {
    static thread_local Lanes* lanes = nullptr;
    return lanes;
  }

  const i32 block, blocks;

 private:
  static constexpr std::size_t kStack = 64 << 10;
  struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done = false, at_barrier = false;
  };
  static void enter() {
    Lanes& lanes = *current();
    lanes.kernel_();
    lanes.lanes_[lanes.turn_].done = true;
  }

  std::vector<Lane> lanes_;
  std::function<void()> kernel_;
  std::size_t turn_ = 0;
  ucontext_t scheduler_;
};

constexpr i32 kWarp = 1;
inline i32 block() { return Lanes::current()->block; }
inline i32 blocks() { return Lanes::current()->blocks; }
inline i32 lane() { return Lanes::current()->lane(); }
inline i32 lanes() { return Lanes::current()->lanes(); }
inline void sync() { Lanes::current()->give_way(true); }
inline void publish() { sync(); }
inline void acquire() {}
inline void nap() { Lanes::current()->give_way(false); }
inline void store(u32* word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline u32 load(const u32* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline u64 exchange(u64* word, u64 value) { return __atomic_exchange_n(word, value, __ATOMIC_RELAXED); }
inline i64 now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return i64(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace meshplan::gpu
