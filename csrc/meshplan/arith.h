// The arithmetic of contract v1 for one element: formats, the nodes of a fold, and its last step.
//
// A value in memory is an unsigned integer of its bits. An "algebra" K says how leaves are combined:
//   K::bits              what a leaf is in memory
//   K::acc               what is combined
//   K::load(bits) -> acc
//   K::node(acc, acc) -> acc, left argument first
// and a "result" R says what becomes of the last accumulator:
//   R::bits, R::finish(acc, divide, count) -> bits
#pragma once
#include "port.h"

namespace mp {

// ---- floating formats: to the accumulator and back, to nearest even, NaNs canonical ----

struct F32 {
  typedef u32 bits;
  typedef i32 key;
  static constexpr bits INF = 0x7f800000u, NAN_BITS = 0x7fc00000u;
  static MP_HD float widen(bits b) { return bit_cast<float>(b); }
  template <class A>
  static MP_HD bits narrow(A x) {
    float y = to_float(x);
    return y != y ? NAN_BITS : bit_cast<bits>(y);
  }
};

struct F64 {
  typedef u64 bits;
  typedef i64 key;
  static constexpr bits INF = 0x7ff0000000000000u, NAN_BITS = 0x7ff8000000000000u;
  static MP_HD double widen(bits b) { return bit_cast<double>(b); }
  static MP_HD bits narrow(double x) { return x != x ? NAN_BITS : bit_cast<bits>(x); }
};

struct BF16 {
  typedef u16 bits;
  typedef i16 key;
  static constexpr bits INF = 0x7f80u, NAN_BITS = 0x7fc0u;
  static MP_HD float widen(bits b) { return bit_cast<float>(static_cast<u32>(b) << 16); }
  static MP_HD bits narrow(float x) {
    u32 b = bit_cast<u32>(x);
    // Rounding up from the largest finite number carries into the exponent, and gives infinity.
    u32 rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return static_cast<bits>(x != x ? u32(NAN_BITS) : rounded);
  }
};

struct F16 {
  typedef u16 bits;
  typedef i16 key;
  static constexpr bits INF = 0x7c00u, NAN_BITS = 0x7e00u;
  static MP_HD float widen(bits b) {
    i32 magnitude = b & 0x7fff;
    u32 shifted = static_cast<u32>(magnitude) << 13;
    u32 normal = shifted + (112u << 23);  // the biases differ by 127 - 15
    u32 special = shifted | 0x7f800000u;
    // Below the smallest normal number the bits count multiples of 2**-24. The product is exact and
    // normal in float32: it holds where subnormal numbers are flushed, too.
    u32 subnormal = bit_cast<u32>(mul(static_cast<float>(magnitude), 0x1p-24f));
    u32 found = magnitude < 0x0400 ? subnormal : magnitude < 0x7c00 ? normal : special;
    return bit_cast<float>(found | (static_cast<u32>(b & 0x8000u) << 16));
  }
  static MP_HD bits narrow(float x) {
    u32 b = bit_cast<u32>(x);
    i32 magnitude = static_cast<i32>(b & 0x7fffffffu);
    i32 normal = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
    // In [0.5, 1) the unit in the last place is 2**-24, that of subnormal float16: one addition
    // rounds to it, to nearest even.
    float shifted = add(bit_cast<float>(magnitude), 0.5f);
    i32 subnormal = bit_cast<i32>(shifted) - 0x3f000000;
    // From 65520 on, half a unit above the largest finite number, the nearest is infinity.
    i32 found = magnitude < 0x38800000 ? subnormal : magnitude < 0x477ff000 ? normal : 0x7c00;
    u32 with_sign = static_cast<u32>(found) | ((b >> 16) & 0x8000u);
    return static_cast<bits>(x != x ? u32(NAN_BITS) : with_sign);
  }
};

// ---- sum and product ----

struct Add {
  template <class T>
  static MP_HD T of(T a, T b) {
    return add(a, b);
  }
};

struct Mul {
  template <class T>
  static MP_HD T of(T a, T b) {
    return mul(a, b);
  }
};

// No rounding at nodes but that of the accumulator itself.
struct Once {
  template <class A>
  static MP_HD A round(A x) {
    return x;
  }
};

// At every node to the format of the leaves.
template <class F>
struct EachNode {
  template <class A>
  static MP_HD A round(A x) {
    return static_cast<A>(F::widen(F::narrow(x)));
  }
};

// Floats of format F in the accumulator A (float or double).
template <class F, class A, class Op, class Rounding>
struct Floats {
  typedef typename F::bits bits;
  typedef A acc;
  static MP_HD acc load(bits b) { return static_cast<A>(F::widen(b)); }
  static MP_HD acc node(acc a, acc b) { return Rounding::round(Op::of(a, b)); }
};

// Wrapping integers: the bits of signed and unsigned ones are the same.
template <class U, class Op>
struct Wrapping;

template <class U>
struct Wrapping<U, Add> {
  typedef U bits;
  typedef U acc;
  static MP_HD acc load(bits b) { return b; }
  static MP_HD acc node(acc a, acc b) { return static_cast<U>(a + b); }
};

template <class U>
struct Wrapping<U, Mul> {
  typedef U bits;
  typedef U acc;
  static MP_HD acc load(bits b) { return b; }
  // 1u: a product of two u16 would be one of signed int, and overflow it.
  static MP_HD acc node(acc a, acc b) { return static_cast<U>(1u * a * b); }
};

// ---- max and min ----

struct Max {
  template <class T>
  static MP_HD T of(T a, T b) {
    return a < b ? b : a;
  }
  template <class T>
  static MP_HD T winner(T top) {
    return top;
  }
};

struct Min {
  template <class T>
  static MP_HD T of(T a, T b) {
    return b < a ? b : a;
  }
  template <class T>
  static MP_HD T winner(T top) {
    return static_cast<T>(-top - 1);
  }
};

// Integers of type I, which may be signed; U has the same size.
template <class I, class U, class Pick>
struct Extreme {
  typedef U bits;
  typedef I acc;
  static MP_HD acc load(bits b) { return static_cast<I>(b); }
  static MP_HD acc node(acc a, acc b) { return Pick::of(a, b); }
};

// Floats as signed integers in their total order, -0.0 below +0.0. A NaN becomes the integer that
// wins against all others, and which is the image of no number.
template <class F>
struct Keys {
  typedef typename F::key key;
  typedef typename F::bits bits;
  static constexpr key TOP = static_cast<key>(static_cast<bits>(~bits(0)) >> 1);
  // Sign and magnitude to two's complement, and back: the map is its own inverse.
  static MP_HD key turned(key k) { return k < 0 ? static_cast<key>(k ^ TOP) : k; }
};

template <class F, class Pick>
struct ExtremeFloats {
  typedef typename F::bits bits;
  typedef typename F::key acc;
  static MP_HD acc load(bits b) {
    acc raw = static_cast<acc>(b);
    bool nan = static_cast<acc>(raw & Keys<F>::TOP) > static_cast<acc>(F::INF);
    return nan ? Pick::winner(Keys<F>::TOP) : Keys<F>::turned(raw);
  }
  static MP_HD acc node(acc a, acc b) { return Pick::of(a, b); }
};

// ---- the last step ----

// To format F, after one division by `count` if `divide`.
template <class F, class A>
struct Rounded {
  typedef typename F::bits bits;
  typedef A acc;
  static MP_HD bits finish(acc x, bool divide, acc count) {
    return F::narrow(divide ? div(x, count) : x);
  }
};

template <class F>
struct Unkeyed {
  typedef typename F::bits bits;
  typedef typename F::key acc;
  static MP_HD bits finish(acc x, bool, acc) {
    acc raw = Keys<F>::turned(x);
    bool nan = static_cast<acc>(raw & Keys<F>::TOP) > static_cast<acc>(F::INF);
    return nan ? F::NAN_BITS : static_cast<bits>(raw);
  }
};

template <class I, class U>
struct Unchanged {
  typedef U bits;
  typedef I acc;
  static MP_HD bits finish(acc x, bool, acc) { return static_cast<U>(x); }
};

}  // namespace mp
