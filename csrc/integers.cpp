// Summands as integers of one unit per element, on a CPU. One thread; memory is read and written once.
//
// meshplan/kernel/_scaled_integers.py is the definition, and says what codes, fields and words are.
#include "cpu.h"
#include "exact.h"

namespace meshplan {
namespace {

using i128 = __int128;
using u128 = unsigned __int128;

// Of an accumulator: exponent fields that share a code, as a power of two.
template <class Acc>
constexpr i32 kGrain = sizeof(Acc) == 8 ? 3 : 0;

// Bits of a sum of `ranks` summands: `width` of each summand without its sign, of which `low` are in
// the last word, and below them `count` for the number of summands that were rounded down.
struct Widths {
  i32 width, low, count;
};

template <class Acc>
Widths widths_of(i32 ranks) {
  const i32 room = bits_of(u32(ranks - 1)), count = ranks <= 1024 ? room + 1 : 0;
  const i32 low = 62 - room - count;
  return {sizeof(Acc) == 8 ? low + 62 - room : low, low, count};
}

template <class Acc>
MP_INLINED i32 field_of(typename Traits<Acc>::Bits bits) {
  const i32 field = i32((bits & kMagnitude<Acc>) >> kFraction<Acc>);
  return field > 0 ? field : 1;
}

// The largest field of a code.
template <class Acc>
MP_INLINED i32 top_of(i32 code) {
  return ((code > 2 ? code - 2 : 0) << kGrain<Acc>) + (1 << kGrain<Acc>);
}

// Summands of a larger one are in no integer.
template <class Acc>
constexpr i32 kLargest = 253 << kGrain<Acc>;

template <class D, class Acc>
MP_INLINED void find_codes(const void* in, u8* __restrict__ codes, i64 numel) {
  using Bits = typename Traits<Acc>::Bits;
  MP_APART for (i64 i = 0; i < numel; ++i) {
    const Bits bits = bit_cast<Bits>(Convert<Acc>::from(load<D>(in, i)));
    const i32 found = 2 + ((field_of<Acc>(bits) - 1) >> kGrain<Acc>), code = found < 255 ? found : 255;
    codes[i] = u8((bits & kMagnitude<Acc>) != 0 ? code : bits == 0);
  }
}

// Elements between whose loops numbers of 1 and of 8 bytes are converted: a loop over both would hold
// as many vectors of 8 bytes as of 1 has elements, in more registers than there are.
constexpr i64 kTile = 512;

// Sum of float32: one word. Shifts of unsigned numbers by a number for each lane are what vectors have.
template <class D>
MP_INLINED void scale(const void* in, const u8* codes, i64 numel, float, Widths how,
                      i64* __restrict__ words) {
  const bool counts = how.count > 0;
  i32 tops[kTile];
  for (i64 start = 0; start < numel; start += kTile) {
    const i64 count = numel - start < kTile ? numel - start : kTile;
    MP_APART for (i64 i = 0; i < count; ++i) tops[i] = top_of<float>(codes[start + i]);
    MP_APART for (i64 i = 0; i < count; ++i) {
      const u32 bits = bit_cast<u32>(Convert<float>::from(load<D>(in, start + i)));
      const i32 field = field_of<float>(bits);
      i32 right = tops[i] - field;
      right = right < 0 ? 0 : right > 63 ? 63 : right;
      const u32 hidden = (bits & 0x7f800000u) != 0 ? 1u << 23 : 0;
      const u32 units = field > kLargest<float> ? 0 : (bits & 0x7fffffu) | hidden;
      const u64 whole = u64(units) << (how.width - 24), kept = whole >> right;
      const u64 lossy = u64(kept << right != whole), negative = bits >> 31;
      // Rounded down: a negative number to the next larger size. -x is ~x + 1.
      const u64 floor = (kept ^ (0 - negative)) + (negative & ~lossy);
      words[start + i] = i64(counts ? floor << how.count | lossy : floor);
    }
  }
}

// Two words.
template <class D>
MP_INLINED void scale(const void* in, const u8* codes, i64 numel, double, Widths how,
                      i64* __restrict__ words) {
  for (i64 i = 0; i < numel; ++i) {
    const u64 bits = bit_cast<u64>(Convert<double>::from(load<D>(in, i)));
    const i32 field = field_of<double>(bits);
    i32 right = top_of<double>(codes[i]) - field;
    right = right < 0 ? 0 : right > 127 ? 127 : right;
    const u64 hidden = u64(bits << 1 >> 53 != 0) << 52;
    const u64 units = field > kLargest<double> ? 0 : (bits & ((u64(1) << 52) - 1)) | hidden;
    const u128 whole = u128(units) << (how.width - 53), kept = whole >> right;
    const u64 lossy = u64(kept << right != whole);
    const i128 floor = bits >> 63 ? -i128(kept) - i128(lossy) : i128(kept);
    words[i] = i64(floor >> how.low);
    const u64 low = u64(floor) & ((u64(1) << how.low) - 1);
    words[numel + i] = i64(how.count > 0 ? low << how.count | lossy : low);
  }
}

// Rounded to odd: if `x` is not a float64, the one of its neighbours whose last bit is 1. With 29 bits
// more than a float32 has, a rounding of it to float32 is the rounding of x (Boldo and Melquiond,
// "Emulation of a FMA and correctly rounded sums", IEEE Transactions on Computers 57, 2008).
MP_INLINED double round_to_odd(i64 x) {
  // 2^84 + 2^63 + the upper half, and 2^52 + the lower one. `upper` is exact.
  const double upper = bit_cast<double>(u64(x) >> 32 ^ 0x4530000080000000ull) - 0x1.000008p84;
  const double lower = bit_cast<double>((u64(x) & 0xffffffffull) | 0x4330000000000000ull) - 0x1p52;
  const double sum = upper + lower, error = lower - (sum - upper);
  const u64 bits = bit_cast<u64>(sum);
  // Away from 0 or towards it by one, if there is an error and the last bit is 0.
  const u64 away = (error > 0) == (sum > 0) ? 1 : ~u64(0);
  return bit_cast<double>(bits + ((u64(error != 0) & ~bits & 1) != 0 ? away : 0));
}

// units * 2^(place + 1 - bias - fraction), rounded once. Place: at least -63.
MP_INLINED double round_units(i128 units, i32 place) {
  const u128 size = units < 0 ? -u128(units) : u128(units);
  if (size == 0) return 0;
  const u64 upper = u64(size >> 64);
  const i32 length = upper != 0 ? 128 - __builtin_clzll(upper) : 64 - __builtin_clzll(u64(size));
  // Bits to drop; below 0, to add. None is below the unit of subnormal numbers.
  const i32 drop = length - 53 > -place ? length - 53 : -place;
  u64 found = drop > 0 ? u64(size >> drop) : u64(size << -drop);
  if (drop > 0) {
    const u128 rest = size - (u128(found) << drop), half = u128(1) << (drop - 1);
    found += u64(rest > half || (rest == half && (found & 1) != 0));
  }
  // A significand of full length adds 1 to the exponent in front of it.
  found += u64(drop + place) << 52;
  return bit_cast<double>(found | (units < 0 ? u64(1) << 63 : 0));
}

// Whether an element is ambiguous; writes its result, or 0.
template <class Out, class Acc>
MP_INLINED bool put(void* out, i64 i, Acc low, bool same, i32 code, Acc divisor) {
  // No && and ||: vectors have no branches.
  const bool unclear = i32(code == 255) | (i32(!same) & i32(code > 1));
  const Acc zero = code == 0 ? Acc(-0.0) : Acc(0.0);
  const Acc value = (i32(code > 1) & i32(!unclear)) != 0 ? low : zero;
  const auto bits = bit_cast<typename Traits<Out>::Bits>(finished<Out>(value / divisor));
  __builtin_memcpy(static_cast<char*>(out) + i * i64(sizeof(Out)), &bits, sizeof(bits));
  return unclear;
}

template <class Out>
MP_INLINED i64 finish(const i64* words, const u8* codes, i64 numel, i32 ranks, float divisor,
                      void* __restrict__ out, u8* __restrict__ unclear) {
  const Widths how = widths_of<float>(ranks);
  const u64 mask = (u64(1) << how.count) - 1, uncounted = how.count > 0 ? 0 : u64(ranks);
  i64 all = 0;
  double powers[kTile];
  float low[kTile];
  i32 same[kTile];
  for (i64 start = 0; start < numel; start += kTile) {
    const i64 count = numel - start < kTile ? numel - start : kTile;
    MP_APART for (i64 i = 0; i < count; ++i) {
      const i32 exponent = top_of<float>(codes[start + i]) - 126 - how.width - how.count;
      powers[i] = bit_cast<double>(u64(exponent + 1023) << 52);
    }
    u64 rounded = uncounted;
    for (i64 i = 0; i < count; ++i) rounded |= u64(words[start + i]) & mask;
    if (rounded == 0) {
      MP_APART for (i64 i = 0; i < count; ++i) {
        low[i] = float(round_to_odd(words[start + i]) * powers[i]);
        same[i] = 1;
      }
    } else {
      MP_APART for (i64 i = 0; i < count; ++i) {
        const u64 word = u64(words[start + i]), lossy = word & mask, least = word - lossy;
        const u64 most = least + (lossy << how.count) + uncounted;
        low[i] = float(round_to_odd(i64(least)) * powers[i]);
        const float high = float(round_to_odd(i64(most)) * powers[i]);
        same[i] = bit_cast<u32>(low[i]) == bit_cast<u32>(high);
      }
    }
    i32 found = 0;
    MP_APART for (i64 i = 0; i < count; ++i) {
      const bool one = put<Out>(out, start + i, low[i], same[i] != 0, codes[start + i], divisor);
      unclear[start + i] = one;
      found += one;
    }
    all += found;
  }
  return all;
}

template <class Out>
MP_INLINED i64 finish(const i64* words, const u8* codes, i64 numel, i32 ranks, double divisor,
                      void* __restrict__ out, u8* __restrict__ unclear) {
  const Widths how = widths_of<double>(ranks);
  const u64 mask = (u64(1) << how.count) - 1, uncounted = how.count > 0 ? 0 : u64(ranks);
  i64 all = 0;
  for (i64 i = 0; i < numel; ++i) {
    const i64 last = words[numel + i];
    const i128 least = i128(words[i]) * (i128(1) << how.low) + (last >> how.count);
    const u64 lossy = (u64(last) & mask) + uncounted;
    const i32 place = top_of<double>(codes[i]) - 1 - how.width + 53;
    const double low = round_units(least, place);
    const double high = lossy == 0 ? low : round_units(least + lossy, place);
    const bool same = bit_cast<u64>(low) == bit_cast<u64>(high);
    const bool found = put<Out>(out, i, low, same, codes[i], divisor);
    unclear[i] = found;
    all += found;
  }
  return all;
}

enum class Stage : i32 { codes = 0, scale = 1, finish = 2 };

}  // namespace
}  // namespace meshplan

// One stage of a sum of `ranks` summands as integers: codes from floats; words, one of all elements
// after the other, from floats and the largest codes; or floats and `unclear`, 1 for an ambiguous
// element, from the sums of words. Returns how many are ambiguous, or -1 for a number that does not
// exist. `wide`: sums are rounded to float64. `divisor`: 0 for none.
extern "C" long long mp_integers(int stage, void* floats, unsigned char* codes, long long* words,
                                 unsigned char* unclear, long long numel, int dtype, int wide,
                                 int ranks, unsigned long long divisor) {
  using namespace meshplan;
  return with_float(dtype, wide != 0, [&](auto number, auto sum) {
    using D = decltype(number);
    using Acc = decltype(sum);
    i64 found = -1;
    run_vectors([&]() MP_ALWAYS {
      switch (Stage(stage)) {
        case Stage::codes:
          find_codes<D, Acc>(floats, codes, numel);
          found = 0;
          break;
        case Stage::scale:
          scale<D>(floats, codes, numel, Acc(), widths_of<Acc>(ranks), words);
          found = 0;
          break;
        case Stage::finish:
          const Acc by = divisor == 0 ? Acc(1) : Acc(divisor);
          found = finish<D>(words, codes, numel, ranks, by, floats, unclear);
      }
    });
    return found;
  });
}
