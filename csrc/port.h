// What differs between the compilers: g++ and clang on the host, nvcc, NVRTC, clang for HIP.
#pragma once

#if defined(__FAST_MATH__) || defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "meshplan: fast math changes the bits of the contract; build without it"
#endif

#if defined(__HIP__) && !defined(__device__)
// Without the headers of ROCm; the builtins of clang suffice.
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif

#if defined(__HIP__)
// Always: what AMD's compiler does not take in, it calls with its arguments on each lane's stack.
#define MP_FN __host__ __device__ inline __attribute__((always_inline))
#elif defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MP_FN __host__ __device__ inline
#else
#define MP_FN inline
#endif

#if defined(__CUDACC_RTC__)
#define __builtin_memcpy memcpy
#endif

// What only GPUs run: calls cost registers, and what is called knows less about its pointers.
#if defined(__CUDACC__) || defined(__HIP__) || defined(__CUDACC_RTC__)
#define MP_INSIDE __device__ inline __attribute__((always_inline))
#define MP_UNROLLED _Pragma("unroll")
#define MP_ROLLED _Pragma("unroll 1")
#else
#define MP_INSIDE inline
#define MP_UNROLLED
#define MP_ROLLED
#endif

// Nothing is moved across it. Clang would start all elements of a fold at once, and spill them.
#if defined(__AMDGCN__)
#define MP_ONE_BY_ONE() __builtin_amdgcn_sched_barrier(0)
#else
#define MP_ONE_BY_ONE()
#endif

namespace meshplan {

// No <stdint.h>: NVRTC has none.
using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "integer widths");
static_assert(sizeof(float) == 4 && sizeof(double) == 8, "float widths");

// AMD's compiler waits for each load that is behind a branch, so that loads without a use are made too.
#if defined(__AMDGCN__)
constexpr bool kLoadsAll = true;
#else
constexpr bool kLoadsAll = false;
#endif

// A value that is equal on all lanes: where it was loaded, AMD's compiler does not know.
MP_FN i32 uniform(i32 value) {
#if defined(__AMDGCN__)
  return __builtin_amdgcn_readfirstlane(value);
#else
  return value;
#endif
}

template <class To, class From>
MP_FN To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between widths");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace meshplan
