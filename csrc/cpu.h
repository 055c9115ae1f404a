// The fold, the digest, the sum of squares and scaled integers on a CPU, as the entry points use them.
#pragma once

#include "dtype.h"
#include "schedule.h"

#define MP_INLINED __attribute__((always_inline)) inline
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

// Adds the digest of `bytes` bytes, at any address, to two sums. They start with block `first`, and
// end with the tensor if they are not a whole number of blocks.
void add_digest(const void* data, i64 bytes, i64 first, u64* sums);

// Rows of a tensor, `apart` elements from each other. For each lane the keys of all rows, and of the
// numbers in any of them: elements, but the two halves of one of eight bytes.
struct Rows {
  const void* data;
  i64 count, apart, numbers;
  const u64 *row_keys, *keys;
};

// Adds the words of rows, which meshplan/run/_words.py defines, to two sums; for elements of 1, 2, 4
// or 8 bytes.
void add_words(const Rows& rows, i32 bytes, u64* sums);

// Adds the squares of floats, at any address, to a row: the digits of squares.h, the number of
// infinities and that of NaNs. Digits are below 2^32 after it. Returns 1 for an unknown dtype.
int add_squares(const void* data, i64 numel, i32 dtype, i64* row);

enum class Stage : i32 { codes = 0, scale = 1, finish = 2 };

// One stage of a sum of `ranks` summands as integers: codes from floats; words from floats and the
// largest codes; or floats and the ambiguous elements from the sums of words.
struct Integers {
  Stage stage;
  void* floats;
  u8* codes;
  i64* words;   // of all elements one word after the other
  u8* unclear;  // 1 for an ambiguous element
  i64 numel;
  i32 ranks;
  u64 divisor;  // 0: none
};

// Returns how many elements are ambiguous, or -1 for a number that does not exist. `wide`: sums are
// rounded to float64.
i64 transform_integers(const Integers& call, i32 dtype, bool wide);

}  // namespace meshplan
