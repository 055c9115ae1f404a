// The fold on a CPU, and what all sources for CPUs are made of.
#pragma once

#include "dtype.h"
#include "order.h"

#define MP_ALWAYS __attribute__((always_inline))
#define MP_INLINED MP_ALWAYS inline
// No iteration reads what another one writes.
#define MP_APART _Pragma("GCC ivdep")

namespace meshplan {

template <class T>
MP_INLINED T load(const void* from, i64 index) {
  // memcpy, because a leaf may start at any byte; compilers turn it into one load.
  typename Traits<T>::Bits bits;
  __builtin_memcpy(&bits, static_cast<const char*>(from) + index * i64(sizeof(T)), sizeof(T));
  return bit_cast<T>(bits);
}

// Runs a body that is MP_ALWAYS: for wider vectors, if the processor has them. The choice changes no
// bit: elements are independent, and the target `avx2` excludes FMA, whose single rounding would differ.
#if defined(__x86_64__)
template <class Body>
__attribute__((target("avx2"))) void run_avx2(const Body& body) {
  body();
}
#endif
template <class Body>
void run_vectors(const Body& body) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return run_avx2(body);
#endif
  body();
}

// run(D(), Acc()) for a dtype of floats, or -1 for any other. `wide`: sums of float32 are float64.
template <class Run>
i64 with_float(i32 dtype, bool wide, const Run& run) {
  switch (dtype) {
    case 0:
      return wide ? run(float(), double()) : run(float(), float());
    case 1:
      return run(Bfloat(), float());
    case 2:
      return run(Half(), float());
    case 3:
      return run(double(), double());
  }
  return -1;
}

enum class Part : i32 { whole = 0, combine = 1, finish = 2 };

// What is done to each element; see entry.cpp for the numbers.
struct Reduction {
  i32 dtype, op, accumulate, node;
  bool exact;  // sums of floats in order `exact`
  Part part;
  u64 divisor;  // 0: none
};

// Combines the leaves of `schedule`, numel elements each, at any address. Returns 0, or 1 for a
// number that does not exist. `out` may be one of the leaves, or else overlaps none.
int reduce(void* out, const void* const* leaves, i64 numel, const Schedule& schedule,
           const Reduction& how);

}  // namespace meshplan
