// Words of 1 to 16 bytes, each at a multiple of its size: all that a GPU loads or stores at once.
#pragma once

#include "port.h"

// An emulated GPU counts accesses, and stops at an address that is not a multiple of the size.
#if !defined(MP_ACCESS)
#define MP_ACCESS(address, bytes)
#endif

namespace meshplan {

struct alignas(16) Vector {
  u64 words[2];
};

template <class T>
MP_FN T read(const u8* from) {
  MP_ACCESS(from, sizeof(T));
  return *reinterpret_cast<const T*>(from);
}

template <class T>
MP_FN void write(u8* to, T word) {
  MP_ACCESS(to, sizeof(T));
  *reinterpret_cast<T*>(to) = word;
}

// The widest word, in bytes, that divides these address bits: their lowest set bit, at most 16.
MP_FN i32 width_of(u64 bits) {
  bits |= 16;
  return i32(bits & (~bits + 1));
}

// 16 bytes in words of T.
template <class T>
MP_FN Vector read_in(const u8* from) {
  Vector found{};
  constexpr i32 each = i32(sizeof(T)), half = 8 / each;
  for (i32 i = 0; i < 2 * half; ++i) {
    found.words[i / half] |= u64(read<T>(from + i * each)) << (8 * each * (i % half));
  }
  return found;
}

template <class T>
MP_FN void write_in(u8* to, const Vector& vector) {
  constexpr i32 each = i32(sizeof(T)), half = 8 / each;
  for (i32 i = 0; i < 2 * half; ++i) {
    write(to + i * each, T(vector.words[i / half] >> (8 * each * (i % half))));
  }
}

// 16 bytes at a multiple of `width`, which is at least kLeast. All lanes have the same width.
template <i32 kLeast>
MP_FN Vector read_vector(const u8* from, i32 width) {
  if (width == 16) return read<Vector>(from);
  if (width == 8) return read_in<u64>(from);
  if constexpr (kLeast <= 2) {
    if (width == 2) return read_in<u16>(from);
  }
  if constexpr (kLeast == 1) {
    if (width == 1) return read_in<u8>(from);
  }
  return read_in<u32>(from);
}

template <i32 kLeast>
MP_FN void write_vector(u8* to, i32 width, const Vector& vector) {
  if (width == 16) return write(to, vector);
  if (width == 8) return write_in<u64>(to, vector);
  if constexpr (kLeast <= 2) {
    if (width == 2) return write_in<u16>(to, vector);
  }
  if constexpr (kLeast == 1) {
    if (width == 1) return write_in<u8>(to, vector);
  }
  write_in<u32>(to, vector);
}

}  // namespace meshplan
