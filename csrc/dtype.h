// The dtypes of the contract: how an element is raised to its accumulator and rounded back.
//
// Half and bfloat16 are converted by integer arithmetic, so that every compiler and device gives the
// same bits: to nearest, ties to even, subnormals kept, overflow to infinity. On CUDA, half is converted
// by one instruction, which PTX defines in the same way, except for the payloads of NaNs.
#pragma once

#include "port.h"

namespace meshplan {

struct Half {
  u16 bits;
};
struct Bfloat {
  u16 bits;
};

MP_FN float raise(Bfloat x) { return bit_cast<float>(u32(x.bits) << 16); }

MP_FN Bfloat to_bfloat(float x) {
  u32 bits = bit_cast<u32>(x);
  // A NaN whose payload is in the lower half alone would be truncated to an infinity: set the quiet bit.
  u32 quiet = (bits >> 16) | 0x40u;
  // Half of the last kept unit, less 1, plus the last kept bit: to nearest, ties to even. A carry goes
  // into the exponent, which is right up to infinity.
  u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {u16((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded)};
}

MP_FN float raise(Half x) {
#if defined(__CUDA_ARCH__)
  float found;
  asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(x.bits));
  return found;
#else
  u32 sign = u32(x.bits & 0x8000u) << 16;
  u32 rest = x.bits & 0x7fffu;
  // Subnormals are whole multiples of 2^-24. Each is a normal float32, and the product is exact.
  float tiny = float(i32(rest)) * 5.9604644775390625e-08f;
  // The exponents' biases differ by 127 - 15 = 112.
  u32 normal = (rest << 13) + (112u << 23);
  u32 special = (rest << 13) | 0x7f800000u;
  u32 bits = rest < 0x400u ? bit_cast<u32>(tiny) : rest < 0x7c00u ? normal : special;
  return bit_cast<float>(sign | bits);
#endif
}

MP_FN Half to_half(float x) {
#if defined(__CUDA_ARCH__)
  u16 found;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(found) : "f"(x));
  return {found};
#else
  u32 bits = bit_cast<u32>(x);
  u32 sign = (bits >> 16) & 0x8000u;
  u32 rest = bits & 0x7fffffffu;
  u32 normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  // Below 2^-14 the unit is 2^-24, the last bit of a float32 at 0.5. So adding 0.5 rounds to it, ties to
  // even, and leaves the multiple in the lowest bits. Flushed subnormals change nothing: they round to 0.
  u32 tiny = bit_cast<u32>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
  u32 found = rest < (113u << 23) ? tiny : normal;
  // From 65520 on, halfway between the largest half and 2^16, the result is infinity.
  found = rest >= 0x477ff000u ? 0x7c00u : found;
  found = rest > 0x7f800000u ? 0x7e00u : found;
  return {u16(sign | found)};
#endif
}

// Bits: the integer of the same width. nan: the canonical quiet NaN.
template <class T>
struct Traits;

template <>
struct Traits<float> {
  using Bits = u32;
  using Signed = i32;
  static constexpr bool is_float = true;
  static constexpr Bits nan = 0x7fc00000u, infinity = 0x7f800000u;
};
template <>
struct Traits<double> {
  using Bits = u64;
  using Signed = i64;
  static constexpr bool is_float = true;
  static constexpr Bits nan = 0x7ff8000000000000ull, infinity = 0x7ff0000000000000ull;
};
template <>
struct Traits<Half> {
  using Bits = u16;
  using Signed = i16;
  static constexpr bool is_float = true;
  static constexpr Bits nan = 0x7e00u, infinity = 0x7c00u;
};
template <>
struct Traits<Bfloat> {
  using Bits = u16;
  using Signed = i16;
  static constexpr bool is_float = true;
  static constexpr Bits nan = 0x7fc0u, infinity = 0x7f80u;
};

template <class U>
struct IntegerTraits {
  using Bits = U;
  static constexpr bool is_float = false;
};
template <>
struct Traits<i8> : IntegerTraits<u8> {};
template <>
struct Traits<u8> : IntegerTraits<u8> {};
template <>
struct Traits<i16> : IntegerTraits<u16> {};
template <>
struct Traits<i32> : IntegerTraits<u32> {};
template <>
struct Traits<i64> : IntegerTraits<u64> {};

// convert<To>(x): raising and rounding, one rounding at most.
template <class To>
struct Convert {
  template <class From>
  MP_FN static To from(From x) {
    return To(x);
  }
  MP_FN static To from(Half x) { return To(raise(x)); }
  MP_FN static To from(Bfloat x) { return To(raise(x)); }
};
template <>
struct Convert<Half> {
  MP_FN static Half from(Half x) { return x; }
  MP_FN static Half from(float x) { return to_half(x); }
};
template <>
struct Convert<Bfloat> {
  MP_FN static Bfloat from(Bfloat x) { return x; }
  MP_FN static Bfloat from(float x) { return to_bfloat(x); }
};

template <class T>
MP_FN bool is_nan(T x) {
  using Bits = typename Traits<T>::Bits;
  return (bit_cast<Bits>(x) & Bits(Bits(~Bits(0)) >> 1)) > Traits<T>::infinity;
}

template <class T>
MP_FN T canonical(T x) {
  if constexpr (Traits<T>::is_float) {
    using Bits = typename Traits<T>::Bits;
    return bit_cast<T>(is_nan(x) ? Traits<T>::nan : bit_cast<Bits>(x));
  } else {
    return x;
  }
}

// A partial result as an element of the result: rounded, and every NaN the canonical one.
template <class Out, class Acc>
MP_FN Out finished(Acc x) {
  return canonical(Convert<Out>::from(x));
}
// In one look at the bits.
template <>
MP_FN Bfloat finished<Bfloat, float>(float x) {
  const u32 bits = bit_cast<u32>(x);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {u16((bits & 0x7fffffffu) > 0x7f800000u ? u32(Traits<Bfloat>::nan) : rounded)};
}

}  // namespace meshplan
