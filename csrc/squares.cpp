// The exact sum of squares of floats on a CPU: a number in fixed point, whose digits are integers. One
// thread; memory is read once.
//
// meshplan/kernel/_digest.py is the definition. Digit i counts 2^(32 i - 2148). The square of the
// smallest float64 is 2^-2148 and that of the largest below 2^2048, so that 136 digits hold 2^60 of
// any squares.
#include <vector>

#include "cpu.h"
#include "exact.h"

namespace meshplan {
namespace {

constexpr i32 kDigits = 136, kDigitBits = 32, kPoint = 2148;

using i128 = __int128;
using u128 = unsigned __int128;

// Adds value * 2^place to the digits: less than 2^95 after the shift, so three digits, the last one with
// the sign.
void deposit(i64* digits, i128 value, i32 place) {
  const i128 shifted = value * (i128(1) << (place % kDigitBits));
  i64* at = digits + place / kDigitBits;
  at[0] += i64(u32(shifted));
  at[1] += i64(u32(shifted >> kDigitBits));
  at[2] += i64(shifted >> (2 * kDigitBits));
}

// At most 2^16 summands of less than 2^48, or of less than 2^106, fit in these.
template <class T>
struct Sum {
  using Type = u64;
};
template <>
struct Sum<double> {
  using Type = u128;
};
constexpr i64 kRun = i64(1) << 16;

// Squares of one exponent are summed as integers.
template <class T>
class Table {
  static constexpr i32 kFraction = kPrecision<T> - 1;
  static constexpr i32 kExponents = i32(Traits<T>::infinity >> kFraction) + 1, kBias = kExponents / 2 - 1;
  using Integer = typename Sum<T>::Type;

 public:
  void add(const void* data, i64 start, i64 stop) {
    Integer* const sums = sums_.data();
    for (i64 i = start; i < stop; ++i) {
      const auto bits = bit_cast<typename Traits<T>::Bits>(load<T>(data, i));
      const u32 exponent = u32(bits >> kFraction) & u32(kExponents - 1);
      const u64 fraction = u64(bits) & ((u64(1) << kFraction) - 1);
      const u64 significand = fraction | u64(exponent != 0) << kFraction;
      sums[exponent] += Integer(significand) * significand;
    }
  }

  // Whether there was an infinity or a NaN, whose significands have their highest bit set.
  bool special() const { return sums_.back() != 0; }

  void empty(i64* row) {
    for (i32 e = 0; e < kExponents; ++e) {
      const Integer sum = sums_[std::size_t(e)];
      if (sum == 0) continue;
      sums_[std::size_t(e)] = 0;
      if (e == kExponents - 1) continue;
      // Subnormal numbers have the unit of exponent 1.
      const i32 place = 2 * ((e == 0 ? 1 : e) - kBias - kFraction) + kPoint;
      deposit(row, u64(sum), place);
      if constexpr (sizeof(sum) > 8) deposit(row, u64(sum >> 64), place + 64);
    }
  }

 private:
  std::vector<Integer> sums_ = std::vector<Integer>(kExponents);
};

// Float64 of nearly one size, kChunk of them: let 2^E <= |x| < 2^(E + 1) for the largest, and
// |x| >= 2^(E - kSpread) for all others that are not 0. A product p = fl(x x) < 2^(2 E + 2) has an error
// e that is a float64, |e| < 2^(2 E - 51). p is a multiple of 2^(2 E - 2 kSpread - 52), and e of
// 2^(2 E - 2 kSpread - 104). Each lane adds at most 128 numbers p to a sum h that begins with
// s = 1.5 * 2^(k + 52), k = 2 E + 9 - 51:
//
//     h' = fl(h + p),  a = h' - h,  b = p - a.
//
// h stays between 2^(k + 52) and 2^(k + 53), so that a is a multiple of 2^k and |b| <= 2^k, in any
// direction of rounding (as in Rump, Ogita and Oishi, "Accurate Floating-Point Summation", SIAM Journal
// on Scientific Computing 31, 2008, section 3). 512 numbers a are at most 2^(2 E + 2 + 9) = 2^53 2^k in
// sum, and as many b at most 2^(2 E + 18 - 51), which is 2^53 of their units: no sum of either rounds.
// It is the same for e, with k = 2 E + 9 - 104.
constexpr i32 kChunk = 512, kSpread = 17;

// As compilers have vectors for any processor.
struct Vectors256 {
  using Doubles = double __attribute__((vector_size(32)));
  using Words = u64 __attribute__((vector_size(32)));
  using Halves = u32 __attribute__((vector_size(32)));
};
struct Vectors512 {
  using Doubles = double __attribute__((vector_size(64)));
  using Words = u64 __attribute__((vector_size(64)));
  using Halves = u32 __attribute__((vector_size(64)));
};

// Whether it has added all of them: not if they differ too much in size, or are very large or small.
// Part of its callers, which are compiled for some processors each.
template <class Vectors>
inline __attribute__((always_inline)) bool add_vectors(const double* data, i64* row) {
  using Doubles = typename Vectors::Doubles;
  using Words = typename Vectors::Words;
  using Halves = typename Vectors::Halves;
  constexpr i32 kLanes = sizeof(Doubles) / sizeof(double);
  // Upper halves order numbers by exponent. The negative one of 0 is 0, and the largest of all others
  // is that of the smallest number.
  Halves most = {}, most_negative = {};
  for (i32 i = 0; i < kChunk; i += kLanes) {
    Words bits;
    __builtin_memcpy(&bits, data + i, sizeof(bits));
    bits &= ~u64(0) >> 1;
    const Halves size = Halves(bits), negative = Halves(-bits);
    most = size > most ? size : most;
    most_negative = negative > most_negative ? negative : most_negative;
  }
  // Volatile: else GCC keeps both in memory in the loop too.
  alignas(Halves) volatile u32 ends[2][2 * kLanes];
  *reinterpret_cast<volatile Halves*>(ends[0]) = most;
  *reinterpret_cast<volatile Halves*>(ends[1]) = most_negative;
  u32 largest = 0, inverted = 0;
  for (i32 half = 1; half < 2 * kLanes; half += 2) {
    const u32 high = ends[0][half], low = ends[1][half];
    largest = high > largest ? high : largest;
    inverted = low > inverted ? low : inverted;
  }
  const u32 smallest = ~inverted;
  const i32 field = i32(largest >> 20), exponent = field - 1023;
  if (i32(smallest >> 20) < field - kSpread || exponent < -400 || exponent > 400) return false;

  const auto power = [](i32 of) { return bit_cast<double>(u64(of + 1023) << 52); };
  const i32 unit = 2 * exponent + 9 - 51, error_unit = 2 * exponent + 9 - 104;
  const Doubles s = Doubles{} + 1.5 * power(unit + 52), t = Doubles{} + 1.5 * power(error_unit + 52);
  Doubles upper = s, lower = {}, error_upper = t, error_lower = {};
  for (i32 i = 0; i < kChunk; i += kLanes) {
    // The next chunk, which may be beyond the tensor's end: a prefetch of any address is allowed.
    __builtin_prefetch(reinterpret_cast<const char*>(data + i) + kChunk * i32(sizeof(double)));
    Doubles x, e;
    __builtin_memcpy(&x, data + i, sizeof(x));
    const Doubles p = x * x;
    for (i32 l = 0; l < kLanes; ++l) e[l] = __builtin_fma(x[l], x[l], -p[l]);
    const Doubles sum = upper + p, errors = error_upper + e;
    lower += p - (sum - upper);
    error_lower += e - (errors - error_upper);
    upper = sum;
    error_upper = errors;
  }
  const auto add = [&](const Doubles& sums, i32 of) {
    double total = 0;
    for (i32 l = 0; l < kLanes; ++l) total += sums[l];
    deposit(row, i64(total * power(-of)), of + kPoint);
  };
  add(upper - s, unit);
  add(lower, 2 * (exponent - kSpread) - 52);
  add(error_upper - t, error_unit);
  add(error_lower, 2 * (exponent - kSpread) - 104);
  return true;
}

using AddChunk = bool (*)(const double*, i64*);

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) bool add_chunk_256(const double* data, i64* row) {
  return add_vectors<Vectors256>(data, row);
}
__attribute__((target("avx512f"))) bool add_chunk_512(const double* data, i64* row) {
  return add_vectors<Vectors512>(data, row);
}
// Null where a product's error is not one instruction.
AddChunk chunk_adder() {
  if (__builtin_cpu_supports("avx512f")) return add_chunk_512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? add_chunk_256 : nullptr;
}

#else

AddChunk chunk_adder() { return nullptr; }

#endif

template <class T>
void add(const void* data, i64 numel, i64* row) {
  Table<T> table;
  const AddChunk add_chunk = sizeof(T) == 8 ? chunk_adder() : nullptr;
  for (i64 start = 0; start < numel; start += kRun) {
    const i64 stop = numel - start < kRun ? numel : start + kRun;
    i64 done = start;
    for (; add_chunk && stop - done >= kChunk; done += kChunk) {
      if (add_chunk(static_cast<const double*>(data) + done, row)) continue;
      table.add(data, done, done + kChunk);
    }
    table.add(data, done, stop);
    if (table.special()) {
      for (i64 i = start; i < stop; ++i) {
        const auto size = bit_cast<typename Traits<T>::Bits>(load<T>(data, i)) & kMagnitude<T>;
        row[kDigits] += size == Traits<T>::infinity;
        row[kDigits + 1] += size > Traits<T>::infinity;
      }
    }
    table.empty(row);
  }
  // Carries, so that a digit is below 2^32 again. None leaves the last digit.
  for (i32 d = 0; d + 1 < kDigits; ++d) {
    row[d + 1] += row[d] >> kDigitBits;
    row[d] &= (i64(1) << kDigitBits) - 1;
  }
}

}  // namespace
}  // namespace meshplan

// Adds the squares of `numel` floats, at any address, to a row: the digits, the number of infinities and
// that of NaNs. Digits are below 2^32 after it. Returns 1 for an unknown dtype.
extern "C" int mp_add_squares(const void* data, long long numel, int dtype, long long* row) {
  using namespace meshplan;
  const auto found = with_float(dtype, false, [&](auto number, auto) {
    add<decltype(number)>(data, numel, row);
    return 0;
  });
  return found == 0 ? 0 : 1;
}
