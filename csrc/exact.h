// Sums of order `exact`: the infinitely precise sum of the leaves, rounded once to Acc, to nearest even.
//
// Most elements take one float64 sum of their leaves (`QuickSum`), which also shows whether the result
// is certain. The others are added again in three float64, and what is still uncertain as fixed-point
// integers (`sum_digits`), slowly and always right. No result depends on the order of the leaves.
#pragma once

#include "dtype.h"

namespace meshplan {

template <class T>
constexpr i32 kFraction = sizeof(T) == 8 ? 52 : 23;  // bits of float and double

// Of the value, as bits of the lower part: sign, exponent and fraction without the sign.
template <class T>
constexpr typename Traits<T>::Bits kMagnitude = typename Traits<T>::Bits(-1) >> 1;

MP_FN i32 bits_of(u32 x) { return x == 0 ? 0 : i32(bit_cast<u64>(double(x)) >> 52) - 1022; }

// leaf(i): leaf i, raised to Acc. At least one and less than 2^31 leaves.
//
// A finite number is a whole number of units of the smallest subnormal number. Its significand starts
// at the bit `exponent - 1` and lies in digits of 32 bits, of which it takes three at most. Each digit
// of the sum is the sum of the leaves' digits and a carry, of less than 64 bits. Digits are made from
// the lowest one up, and of those no more is kept than one rounding needs: the highest one that is not
// 0, the two below it, and whether any below these is not 0.
template <class Acc, class Leaf>
MP_FN Acc sum_digits(const Leaf& leaf, i32 count) {
  using Bits = typename Traits<Acc>::Bits;
  constexpr Bits sign = ~kMagnitude<Acc>, infinity = Traits<Acc>::infinity;
  constexpr i32 fraction = kFraction<Acc>;
  const auto start_of = [](Bits magnitude) {
    const i32 exponent = i32(magnitude >> fraction);
    return exponent > 1 ? exponent - 1 : 0;
  };
  i32 lowest = 1 << 30, highest = -1;
  bool finite = true, all_negative_zero = true;
  Acc special = 0;
  for (i32 i = 0; i < count; ++i) {
    const Acc x = leaf(i);
    const Bits bits = bit_cast<Bits>(x), magnitude = bits & kMagnitude<Acc>;
    all_negative_zero = all_negative_zero && bits == sign;
    if (magnitude >= infinity) {
      special += x;
      finite = false;
    } else if (magnitude != 0) {
      const i32 digit = start_of(magnitude) / 32;
      lowest = digit < lowest ? digit : lowest;
      highest = digit > highest ? digit : highest;
    }
  }
  if (!finite) return special;

  u32 top = 0, middle = 0, low = 0, below = 0;
  i32 top_digit = 0;
  bool negative = false;
  for (;;) {
    u32 last = 0, last_but_one = 0, earlier = 0;
    i64 carry = 0;
    // One digit more than leaves have, for the carries of 2^31 of them.
    for (i32 d = lowest; d <= highest + 3; ++d) {
      for (i32 i = 0; i < count; ++i) {
        const Bits bits = bit_cast<Bits>(leaf(i)), magnitude = bits & kMagnitude<Acc>;
        const i32 start = start_of(magnitude), place = d - start / 32, shift = start % 32;
        if (place < 0 || place > 2) continue;
        const u64 normal = magnitude >> fraction ? 1 : 0;
        const u64 significand = normal << fraction | (magnitude & ((Bits(1) << fraction) - 1));
        const u64 moved = place == 0   ? significand << shift
                          : place == 1 ? significand >> (32 - shift)
                          : shift == 0 ? 0
                                       : significand >> (64 - shift);
        const i64 digit = i64(moved & 0xffffffffu);
        carry += (bits >= sign) != negative ? -digit : digit;
      }
      const u32 digit = u32(carry);
      carry >>= 32;
      if (digit != 0) {
        top_digit = d;
        top = digit;
        middle = last;
        low = last_but_one;
        below = earlier;
      }
      earlier |= last_but_one;
      last_but_one = last;
      last = digit;
    }
    if (carry == 0) break;
    // The sum is below 0: once more, with every sign changed.
    negative = true;
    top = 0;
  }
  if (top == 0) return bit_cast<Acc>(all_negative_zero ? sign : Bits(0));

  // The sum as an integer of `length` bits, of which `lead` has the first 64.
  const i32 used = bits_of(top), unused = 32 - used;
  const i32 length = 32 * top_digit + used;
  u64 lead = (u64(top) << 32 | middle) << unused;
  if (unused != 0) lead |= low >> used;
  const bool sticky = (below | u32(u64(low) << unused)) != 0;
  const i32 kept = length < fraction + 1 ? length : fraction + 1;
  const u64 rest = lead << kept;
  u64 found = lead >> (64 - kept);
  const bool above_half = (rest << 1) != 0 || sticky;
  found += rest >> 63 & u64(above_half || (found & 1) != 0);
  // A significand of full length adds 1 to the exponent in front of it, and one that the rounding has
  // carried over adds another: from subnormal to normal, to the next exponent, or to infinity.
  found += u64(length - kept) << fraction;
  if (found > infinity) found = infinity;
  return bit_cast<Acc>(Bits(Bits(found) | (negative ? sign : 0)));
}

// The significant bits of a leaf.
template <class D>
constexpr i32 kPrecision = 53;
template <>
constexpr i32 kPrecision<float> = 24;
template <>
constexpr i32 kPrecision<Half> = 11;
template <>
constexpr i32 kPrecision<Bfloat> = 8;

// A sum in float64, for leaves of fewer bits. Let 2^E <= |x| < 2^(E + 1) for the largest leaf and
// 2^e <= |y| for the smallest one that is not 0, of p bits. All n leaves and all sums of them are
// multiples of 2^(e - p + 1), and sums are below n 2^(E + 1). If
//
//     E - e <= 53 - p - ceil(log2(n)),
//
// each sum is thus a multiple of some unit below 2^53 units, which is a float64: no addition rounds,
// in any order. (Exponent 0 of subnormal numbers is read as an E and an e that are too small by 1,
// which only makes e - p + 1 smaller than it is.) IEEE 754 gives zeros the sign of the contract: the
// sum starts at -0, which changes nothing that is added. Sums with an infinity or a NaN are right,
// whatever was rounded: no float64 sum of finite leaves overflows.
//
// Else additions may round. With N = 2^ceil(log2(n)) and the largest magnitude m, sums of k leaves are at
// most k m, rounded or not, and each of the n - 1 additions loses at most 2^-53 N m. So
//
//     |sum - exact sum| <= B, and |sum| 2^-53 <= B, for B = 2^-53 N^2 m.
//
// fl(sum + 2 B) is thus not below sum + B, nor fl(sum - 2 B) above sum - B: the exact sum lies between
// them. Rounding is monotonic, so if both become one number of Acc, the exact sum does. If that number is
// 0, 2 B is less than 2^-150; all sums are multiples of 2^-149, so the sum is 0 and has the right sign.
template <class D>
struct QuickSum {
  double sum = -0.0;
  i32 low = 0x7fffffff, high = 0;

  struct Limits {
    i32 spread;
    double factor;  // 2 B = factor m
  };

  MP_FN void add(D leaf) {
    const float x = Convert<float>::from(leaf);
    const u32 bits = bit_cast<u32>(x);
    sum += double(x);
    // Magnitudes of floats are ordered as integers. 0 becomes the largest one.
    const i32 at_least = i32((bits - 1) & 0x7fffffffu), at_most = i32(bits & 0x7fffffffu);
    low = at_least < low ? at_least : low;
    high = at_most > high ? at_most : high;
  }

  // What `certain` compares with.
  MP_FN static Limits limits(i32 count) {
    const i32 log = bits_of(u32(count - 1)), bits = 53 - kPrecision<D> - log;
    return {bits < 0 ? -1 : bits << 23, bit_cast<double>(u64(1023 - 52 + 2 * log) << 52)};
  }

  // `low` is a magnitude less 1, so that the difference, in units of a float's fraction, is less than
  // (E - e + 1) 2^23 and at most `spread` only if E - e is.
  template <class Acc>
  MP_FN bool certain(const Limits& limits) const {
    const double margin = double(bit_cast<float>(high)) * limits.factor;
    const bool one_number = Acc(sum - margin) == Acc(sum + margin);
    return (high - low <= limits.spread) | (high >= 0x7f800000) | one_number;
  }

  template <class Acc>
  MP_FN Acc total() const {
    return Acc(sum);
  }
};

// Three float64, for leaves of float64 and where one is not enough: after each leaf, if nothing overflows,
//
//     the exact sum = sum + error + d,  |d| <= the exact sum of all |d_i|,
//
// by Knuth's TwoSum (The Art of Computer Programming, volume 2, 4.2.2, theorem B): for s = fl(a + b) it
// finds the float64 e with s + e = a + b, subnormal numbers included. The errors of `sum` are added
// to `error`, and the errors d_i of these additions by magnitude to `rest`.
template <>
struct QuickSum<double> {
  double sum = -0.0, error = 0, rest = 0;

  struct Limits {};

  MP_FN static double two_sum(double a, double b, double& error) {
    const double s = a + b, added = s - a;
    error = (a - (s - added)) + (b - added);
    return s;
  }

  MP_FN void add(double leaf) {
    double lost, lost_again;
    sum = two_sum(sum, leaf, lost);
    error = two_sum(error, lost, lost_again);
    rest += lost_again < 0 ? -lost_again : lost_again;
  }

  MP_FN static Limits limits(i32) { return {}; }

  // More than x and a few roundings of it.
  MP_FN static double above(double x) { return x + x * 8.8817841970012523e-16; }

  // With r = fl(sum + error) and r + t = sum + error, the exact sum is r + t + d. Numbers between
  // r - bound and r + bound are rounded as these two are, because rounding is monotonic; so if both
  // become r and |t + d| <= bound, the exact sum does. `rest` is the sum of the |d_i| but for n
  // roundings of relative size 2^-53, hence |d| <= 2 rest, and the same for the additions here: a last
  // product with 1 + 2^-50 makes up for them. (It is not needed where it underflows: subnormal sums are
  // exact.) After an overflow anywhere r or t is infinite or NaN, and no comparison holds.
  //
  // For Acc of fewer bits, of finite leaves, r is rounded to odd before it is rounded to Acc (Boldo and
  // Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to Odd",
  // IEEE Transactions on Computers 57, 2008): where t is not 0, to the one of the two float64 around r + t
  // whose last bit is 1. Numbers of Acc, and those halfway between two of them, have a last bit of 0, so
  // that none lies between the odd number and r + t, nor the exact sum if |d| < |t|. Else, one number of
  // Acc for both ends is that of the exact sum and of the odd number: 2^-52 |r| is a unit of r, and more
  // than the ends are rounded by.
  template <class Acc>
  MP_FN bool certain(const Limits&) const {
    double t;
    const double r = two_sum(sum, error, t), lost = t < 0 ? -t : t;
    if constexpr (sizeof(Acc) == 8) {
      if (rest == 0) return r - r == 0;
      const double bound = above(lost + 2 * rest);
      return r + bound == r && r - bound == r;
    } else {
      const double unit = (r < 0 ? -r : r) * 2.2204460492503131e-16;
      const double bound = above(lost + 2 * rest + unit);
      const bool one_number = Acc(r + bound) == Acc(r - bound);
      return (rest == 0) | (lost > above(2 * rest)) | one_number;
    }
  }

  template <class Acc>
  MP_FN Acc total() const {
    // Without an error the sum is -0 only if all leaves are.
    if constexpr (sizeof(Acc) == 8) {
      return error == 0 ? sum : sum + error;
    } else {
      double t;
      const double r = two_sum(sum, error, t);
      const u64 bits = bit_cast<u64>(r), away = (t < 0) == (r < 0) ? 1 : ~u64(0);
      const u64 odd = bits + (t == 0 || bits % 2 == 1 ? 0 : away);
      return Acc(error == 0 ? sum : bit_cast<double>(odd));
    }
  }
};

// leaf(i): leaf i, of D.
template <class D, class Leaf>
MP_FN QuickSum<D> quick_sum(const Leaf& leaf, i32 count) {
  QuickSum<D> quick;
  for (i32 i = 0; i < count; ++i) quick.add(leaf(i));
  return quick;
}

// The sum of leaves of D whose quick sum is not certain.
template <class Acc, class D, class Leaf>
MP_FN Acc sum_again(const Leaf& leaf, i32 count) {
  if constexpr (sizeof(D) < 8) {
    const auto raised = [&](i32 i) { return Convert<double>::from(leaf(i)); };
    const QuickSum<double> sums = quick_sum<double>(raised, count);
    if (sums.template certain<Acc>({})) return sums.template total<Acc>();
  }
  return sum_digits<Acc>([&](i32 i) { return Convert<Acc>::from(leaf(i)); }, count);
}

}  // namespace meshplan
