// The nodes of the tree: what two partial results become.
#pragma once

#include "dtype.h"

namespace meshplan {

// What an average is divided in.
template <class T>
constexpr bool kDivides = false;
template <>
constexpr bool kDivides<float> = true;
template <>
constexpr bool kDivides<double> = true;

enum class Op : i32 { sum = 0, product = 1, max = 2, min = 3 };

struct Sum {
  template <class T>
  MP_FN static T node(T a, T b) {
    if constexpr (Traits<T>::is_float) {
      return a + b;
    } else {
      // Unsigned: signed overflow is undefined, and integers wrap.
      using Bits = typename Traits<T>::Bits;
      return T(Bits(Bits(a) + Bits(b)));
    }
  }
};

struct Product {
  template <class T>
  MP_FN static T node(T a, T b) {
    if constexpr (Traits<T>::is_float) {
      return a * b;
    } else {
      // 16-bit factors would be raised to int, whose product may overflow.
      using Bits = typename Traits<T>::Bits;
      return T(Bits(u64(Bits(a)) * u64(Bits(b))));
    }
  }
};

// Floats in order `exact`: no sum of two is rounded, see exact.h.
struct ExactSum {};
template <class Op>
constexpr bool kExact = false;
template <>
constexpr bool kExact<ExactSum> = true;

// One of both values, whatever the order.
template <class Op>
constexpr bool kChooses = false;

// Floats are ordered by their bits, -0.0 below +0.0; a NaN on either side wins.
template <bool kMax>
struct Extremum {
  template <class T>
  MP_FN static T node(T a, T b) {
    if constexpr (Traits<T>::is_float) {
      using Bits = typename Traits<T>::Bits;
      bool second = kMax ? key(a) < key(b) : key(b) < key(a);
      Bits chosen = second ? bit_cast<Bits>(b) : bit_cast<Bits>(a);
      return bit_cast<T>(is_nan(a) || is_nan(b) ? Traits<T>::nan : chosen);
    } else {
      return (kMax ? a < b : b < a) ? b : a;
    }
  }

 private:
  template <class T>
  MP_FN static typename Traits<T>::Signed key(T x) {
    using Bits = typename Traits<T>::Bits;
    using Signed = typename Traits<T>::Signed;
    Signed bits = bit_cast<Signed>(x);
    Signed flip = Signed(Bits(~Bits(0)) >> 1);
    return bits < 0 ? Signed(bits ^ flip) : bits;
  }
};
template <bool kMax>
constexpr bool kChooses<Extremum<kMax>> = true;

}  // namespace meshplan
