// What a lane of a GPU is told and can do: nvcc, NVRTC, and clang for HIP.
#pragma once

#include "port.h"

#if defined(__HIP__)
#define MP_KERNEL extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(1, 512))) void
#define MP_PARAMETER const
#else
// One block on a processor is enough; without the 1 fewer registers are used, and spilled.
#define MP_KERNEL extern "C" __global__ __launch_bounds__(512, 1) void
// Read where the launch has put it, not copied by every lane.
#define MP_PARAMETER const __grid_constant__
#endif

namespace meshplan::gpu {

#if defined(__HIP__)

constexpr i32 kWarp = 64;
__device__ inline i32 block() { return i32(__builtin_amdgcn_workgroup_id_x()); }
__device__ inline i32 blocks() {
  return i32(__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x());
}
__device__ inline i32 lane() { return i32(__builtin_amdgcn_workitem_id_x()); }
__device__ inline i32 lanes() { return i32(__builtin_amdgcn_workgroup_size_x()); }

// Orders what the block itself reads and writes.
__device__ inline void sync() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup");
}
// A barrier of the block; what its waves have written has then left their compute unit. Fences of the
// scope of a block do not wait for that, and a release by one wave waits for its own stores only.
__device__ inline void publish() {
#if defined(__GFX9__)
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#else
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
#endif
  sync();
}
// After flags were read, by every wave, not only the one that polled: caches are per compute unit.
__device__ inline void acquire() { __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""); }
// The release writes back the caches of the device, whichever wave has filled them.
__device__ inline void store(u32* word, u32 value) {
  __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
// Orders nothing: `acquire` does, once for all tries.
__device__ inline u32 load(const u32* word) {
  return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
// Among the launches of this device.
__device__ inline u64 exchange(u64* word, u64 value) {
  return __hip_atomic_exchange(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Nanoseconds: the clock of constant rate runs at 100 MHz on CDNA.
__device__ inline i64 now() { return i64(__builtin_readsteadycounter()) * 10; }
__device__ inline void nap() { __builtin_amdgcn_s_sleep(1); }

#else

constexpr i32 kWarp = 32;
__device__ inline i32 block() { return i32(blockIdx.x); }
__device__ inline i32 blocks() { return i32(gridDim.x); }
__device__ inline i32 lane() { return i32(threadIdx.x); }
__device__ inline i32 lanes() { return i32(blockDim.x); }

__device__ inline void sync() { __syncthreads(); }
__device__ inline void publish() { __syncthreads(); }
// `load` does.
__device__ inline void acquire() {}
__device__ inline void store(u32* word, u32 value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ inline u32 load(const u32* word) {
  u32 value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
// Among the launches of this device.
__device__ inline u64 exchange(u64* word, u64 value) {
  u64 before;
  asm volatile("atom.relaxed.gpu.exch.b64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
  return before;
}

__device__ inline i64 now() {
  u64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return i64(time);
}
__device__ inline void nap() { __nanosleep(20); }

#endif

}  // namespace meshplan::gpu
