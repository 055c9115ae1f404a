// One source for g++, clang++, nvcc, NVRTC and clang HIP: types, function marks, bit casts, and the
// handful of roundings that the contract is made of. Nothing is included here, NVRTC has no headers.
#pragma once

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "meshplan: the contract fixes every bit; compile without -ffast-math and its parts"
#endif
#if defined(__CUDA_FTZ) && __CUDA_FTZ
#error "meshplan: the contract keeps subnormal numbers; compile without -ftz=true"
#endif
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "meshplan: float expressions must have the precision of float (on 32-bit x86: -mfpmath=sse)"
#endif
#if defined(__clang__)
// clang contracts by default for HIP. g++ has no such pragma; the build passes -ffp-contract=off.
#pragma clang fp contract(off)
#endif

// A function of the body: inlined into the loop or kernel around it, which alone decides for which
// instruction set it is compiled.
#if defined(__HIP__)
#define MP_HD __attribute__((host)) __attribute__((device)) inline __attribute__((always_inline))
#elif defined(__CUDACC__)
#define MP_HD __host__ __device__ __forceinline__
#else
#define MP_HD inline __attribute__((always_inline))
#endif

namespace mp {

typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8, "widths of the integers");
static_assert(sizeof(float) == 4 && sizeof(double) == 8, "widths of the floats");

// The value `x` of any type seen as `To`, which has the same size.
template <class To, class From>
MP_HD To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  __builtin_memcpy(&to, &x, sizeof(to));
  return to;
}

// Each is one IEEE operation, rounded to nearest even. In device code of CUDA the names say so,
// which also holds against -fmad and -prec-div=false.
#if defined(__CUDA_ARCH__)
MP_HD float add(float a, float b) { return __fadd_rn(a, b); }
MP_HD double add(double a, double b) { return __dadd_rn(a, b); }
MP_HD float mul(float a, float b) { return __fmul_rn(a, b); }
MP_HD double mul(double a, double b) { return __dmul_rn(a, b); }
MP_HD float div(float a, float b) { return __fdiv_rn(a, b); }
MP_HD double div(double a, double b) { return __ddiv_rn(a, b); }
MP_HD float to_float(double x) { return __double2float_rn(x); }
MP_HD float count_as(i64 count, float) { return __ll2float_rn(count); }
MP_HD double count_as(i64 count, double) { return __ll2double_rn(count); }
#else
MP_HD float add(float a, float b) { return a + b; }
MP_HD double add(double a, double b) { return a + b; }
MP_HD float mul(float a, float b) { return a * b; }
MP_HD double mul(double a, double b) { return a * b; }
MP_HD float div(float a, float b) { return a / b; }
MP_HD double div(double a, double b) { return a / b; }
MP_HD float to_float(double x) { return static_cast<float>(x); }
MP_HD float count_as(i64 count, float) { return static_cast<float>(count); }
MP_HD double count_as(i64 count, double) { return static_cast<double>(count); }
#endif
MP_HD float to_float(float x) { return x; }

}  // namespace mp
