// A block of the peer protocol on a GPU.
#pragma once

#if defined(MP_EMULATED)
#include "emulated_gpu.h"  // the tests' own: lanes in turns, on a CPU
#else
#include "gpu.h"
#endif
#include "peer.h"
#include "words.h"

namespace meshplan {

class DeviceBlock {
 public:
  static constexpr bool kPush = true;
  static constexpr bool kSleeps = false;

  // block, blocks: those of this rank.
  __device__ DeviceBlock(i32 block, i32 blocks, i64 timeout_ns)
      : index_(block), count_(blocks), timeout_(timeout_ns) {}

  __device__ i32 index() const { return index_; }
  __device__ i32 count() const { return count_; }
  __device__ i32 lane() const { return gpu::lane(); }
  __device__ i32 lanes() const { return gpu::lanes(); }
  __device__ void sync() const { gpu::sync(); }
  // Of two warps that follow each other, one.
  __device__ bool is_odd() const { return lane() / gpu::kWarp % 2 != 0; }
  // Before flags: a release by one lane then covers what all lanes have written.
  __device__ void publish() const { gpu::publish(); }
  __device__ void acquire() const { gpu::acquire(); }
  __device__ void store(u32* word, u32 value) const { gpu::store(word, value); }
  __device__ u32 load(const u32* word) const { return gpu::load(word); }
  __device__ u64 exchange(u64* word, u64 value) const { return gpu::exchange(word, value); }

  // One of the ranks that lanes missed, on all lanes; or -1.
  __device__ i32 any(i32 missing) const {
    __shared__ i32 found;
    sync();
    if (lane() == 0) found = -1;
    sync();
    // Any of the lanes may win: each of them is right. Volatile, so that no lane keeps the -1 in a
    // register.
    if (missing >= 0) *static_cast<volatile i32*>(&found) = missing;
    sync();
    return *static_cast<volatile i32*>(&found);
  }

  // The value of lane 0, on all lanes; a barrier within the block. Two uses need another barrier in
  // between, or lane 0 overwrites a value that a slower lane has not read yet.
  __device__ u64 share(u64 value) const {
    __shared__ u64 shared;
    if (lane() == 0) *static_cast<volatile u64*>(&shared) = value;
    gpu::sync();
    return *static_cast<volatile u64*>(&shared);
  }

  // One for all lanes, which no lane keeps in registers over a barrier.
  template <class T>
  __device__ T& keep(T&) const {
    __shared__ T kept;
    return kept;
  }

  // For `most` copies at once: short ones keep all lanes busy, and all peers receive. At least a warp in
  // each team of a block of 512.
  __device__ Team team(i32 most) const {
    i32 count = 1;
    while (count < most && count < kTeams && 2 * count <= lanes()) count *= 2;
    const i32 each = lanes() / count;
    return {lane() / each < count ? lane() / each : most, count, lane() % each, each};
  }

  // By the lanes of a team, in the widest words that both ends allow. If the addresses differ by a multiple of a
  // word's size, the low bits of their XOR are 0, and both are aligned after the same number of bytes.
  __device__ void copy(void* to, const void* from, i64 bytes, const Team& team) const {
    u8* const a = static_cast<u8*>(to);
    const u8* const b = static_cast<const u8*>(from);
    const i32 width = width_of(u64(a) ^ u64(b));
    const i64 before = i64((~u64(a) + 1) & u64(width - 1));
    const i64 head = before < bytes ? before : bytes;
    const i64 words = width == 1 ? 0 : (bytes - head) / width;
    switch (width) {
      case 16: move<Vector>(a + head, b + head, words, team); break;
      case 8: move<u64>(a + head, b + head, words, team); break;
      case 4: move<u32>(a + head, b + head, words, team); break;
      case 2: move<u16>(a + head, b + head, words, team); break;
    }
    // What is left at both ends; or all of it.
    const i64 edges = bytes - words * width;
    for (i64 i = team.lane; i < edges; i += team.lanes) {
      const i64 at = i < head ? i : i + words * width;
      write(a + at, read<u8>(b + at));
    }
  }

  __device__ void fill(void* to, u8 value, i64 bytes) const {
    for (i64 i = lane(); i < bytes; i += lanes()) static_cast<u8*>(to)[i] = value;
  }

  // Only hosts know.
  __device__ bool has_ended(i32) const { return false; }

  // Whether `flag` reached `wanted`, which counts modulo 2^32, before the timeout and before a rank
  // gave up. The clock and the refusal are read once in 64 tries: each load of the flag is on the path
  // of every step.
  __device__ bool await(i32, const u32* flag, u32 wanted, const u32* refusal) const {
    const i64 start = gpu::now();
    for (u32 tries = 0; i32(load(flag) - wanted) < 0; ++tries) {
      if (tries % 64 == 63 && (load(refusal) != 0 || gpu::now() - start >= timeout_)) return false;
      gpu::nap();
    }
    return true;
  }

 private:
  static constexpr i32 kTeams = 8;

  // Four words of each lane are on their way at once: a load takes as long as hundreds of instructions.
  template <class T>
  __device__ void move(u8* to, const u8* from, i64 count, const Team& team) const {
    constexpr i32 kBatch = 4;
    const i64 stride = i64(team.lanes) * i64(sizeof(T)), end = count * i64(sizeof(T));
    for (i64 at = team.lane * i64(sizeof(T)); at < end; at += kBatch * stride) {
      // Of a value that is not set on every way registers are kept from the start of the kernel on.
      T words[kBatch] = {};
      for (i32 j = 0; j < kBatch; ++j) {
        if (at + j * stride < end) words[j] = read<T>(from + at + j * stride);
      }
      for (i32 j = 0; j < kBatch; ++j) {
        if (at + j * stride < end) write(to + at + j * stride, words[j]);
      }
    }
  }

  i32 index_, count_;
  i64 timeout_;
};

}  // namespace meshplan
