// A block of the peer protocol on a GPU: nvcc, NVRTC, and clang for HIP.
#pragma once

#include "peer.h"

namespace meshplan {

class DeviceBlock {
 public:
  static constexpr bool kPush = true;

  __device__ explicit DeviceBlock(i64 timeout_ns) : timeout_(timeout_ns) {}

#if defined(__HIP__)
  __device__ i32 index() const { return i32(__builtin_amdgcn_workgroup_id_x()); }
  __device__ i32 count() const {
    return i32(__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x());
  }
  __device__ i32 lane() const { return i32(__builtin_amdgcn_workitem_id_x()); }
  __device__ i32 lanes() const { return i32(__builtin_amdgcn_workgroup_size_x()); }
  // Every wave acquires, not only the one that polled: caches are per compute unit.
  __device__ void sync() const {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
  }
  __device__ void store(u32* word, u32 value) const {
    __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
  }
  __device__ u32 load(const u32* word) const {
    return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
  }
#else
  __device__ i32 index() const { return i32(blockIdx.x); }
  __device__ i32 count() const { return i32(gridDim.x); }
  __device__ i32 lane() const { return i32(threadIdx.x); }
  __device__ i32 lanes() const { return i32(blockDim.x); }
  __device__ void sync() const { __syncthreads(); }
  __device__ void store(u32* word, u32 value) const {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
  }
  __device__ u32 load(const u32* word) const {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
  }
#endif

  // One of the ranks that lanes missed, on all lanes; or -1.
  __device__ i32 any(i32 missing) const {
    __shared__ i32 found;
    sync();
    if (lane() == 0) found = -1;
    sync();
    // Whichever lane writes last.
    if (missing >= 0) *static_cast<volatile i32*>(&found) = missing;
    sync();
    return *static_cast<volatile i32*>(&found);
  }

  // By all lanes; 16 bytes at a time where both ends allow it.
  __device__ void copy(void* to, const void* from, i64 bytes) const {
    struct alignas(16) Vector {
      u64 words[2];
    };
    const u64 ends = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from);
    const i64 vectors = ends % 16 == 0 ? bytes / 16 : 0;
    for (i64 i = lane(); i < vectors; i += lanes()) {
      static_cast<Vector*>(to)[i] = static_cast<const Vector*>(from)[i];
    }
    for (i64 i = 16 * vectors + lane(); i < bytes; i += lanes()) {
      static_cast<u8*>(to)[i] = static_cast<const u8*>(from)[i];
    }
  }

  __device__ bool has_ended(i32) const { return false; }

  // Whether `flag` reached `wanted`, which counts modulo 2^32, before the time was over and before
  // somebody refused.
  __device__ bool await(i32, const u32* flag, u32 wanted, const u32* refusal) const {
    const i64 start = now();
    for (i32 tries = 0; i32(load(flag) - wanted) < 0; ++tries) {
      if (tries % 64 == 63 && (load(refusal) != 0 || now() - start >= timeout_)) return false;
      nap();
    }
    return true;
  }

 private:
#if defined(__HIP__)
  // The clock of constant rate runs at 100 MHz on CDNA.
  __device__ static i64 now() { return i64(__builtin_readsteadycounter()) * 10; }
  __device__ static void nap() { __builtin_amdgcn_s_sleep(1); }
#else
  __device__ static i64 now() {
    u64 time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return i64(time);
  }
  __device__ static void nap() { __nanosleep(20); }
#endif

  i64 timeout_;
};

}  // namespace meshplan
