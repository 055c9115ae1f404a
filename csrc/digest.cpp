// The digest of a tensor's bytes, and the words of rows, on a CPU. One thread; memory is read once.
//
// The digest is two sums modulo 2^64 over blocks, in any order; meshplan/kernel/_digest.py is the
// definition, and says what collides. A block is 1024 bytes, the last one filled up with zeros, read as
// 128 pairs of little-endian 32-bit words.
#include <cstddef>
#include <cstring>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace meshplan {
namespace {

constexpr i32 kLanes = 2, kWords = 256, kBlockBytes = 4 * kWords;

// The finaliser of SplitMix64; it loses nothing.
constexpr u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// The generator of SplitMix64, from seed 0: its output number n.
constexpr u64 random(u64 n) { return mix((n + 1) * 0x9e3779b97f4a7c15ull); }

struct Keys {
  alignas(64) u32 of[kLanes][kWords];
};
constexpr Keys make_keys() {
  Keys keys{};
  for (i32 lane = 0; lane < kLanes; ++lane) {
    for (i32 word = 0; word < kWords; ++word) {
      keys.of[lane][word] = u32(random(u64(lane * kWords + word)) >> 32);
    }
  }
  return keys;
}

// What a block adds to the sum of a lane. Outputs below 2^32 are the keys'.
constexpr u64 term(u64 hash, i64 block, i32 lane) {
  return mix(hash ^ random((1ull << 32) + 2 * u64(block) + u64(lane)));
}

constexpr Keys kKeys = make_keys();

// A change of one word is multiplied by the keyed word beside it, which must not be 0 in both lanes.
constexpr bool lanes_differ() {
  for (i32 word = 0; word < kWords; ++word) {
    if (kKeys.of[0][word] == kKeys.of[1][word]) return false;
  }
  return true;
}
static_assert(lanes_differ(), "keys");

void add_block(const u8* data, i64 block, u64* sums) {
  for (i32 lane = 0; lane < kLanes; ++lane) {
    u64 hash = 0;
    for (i32 word = 0; word < kWords; word += 2) {
      u32 pair[2];
      std::memcpy(pair, data + 4 * word, sizeof(pair));
      hash += u64(pair[0] + kKeys.of[lane][word]) * u64(pair[1] + kKeys.of[lane][word + 1]);
    }
    sums[lane] += term(hash, block, lane);
  }
}

#if defined(__x86_64__)
#define MP_AVX2 __attribute__((target("avx2")))

struct Vector {
  __m256i of;
};

MP_AVX2 inline u64 total(const Vector& vector) {
  u64 part[4];
  std::memcpy(part, &vector.of, sizeof(part));
  return part[0] + part[1] + part[2] + part[3];
}

// kStreams blocks at a time, `apart` blocks from each other. A 256-bit vector holds four pairs; the
// shuffle moves the second word of each pair to the lower half, which is all that mul_epu32 reads.
template <i32 kStreams>
MP_AVX2 inline void add_streams(const u8* data, i64 block, i64 apart, u64* sums) {
  Vector hash[kLanes][kStreams];
  for (auto& lane : hash) {
    for (Vector& one : lane) one.of = _mm256_setzero_si256();
  }
  for (i32 word = 0; word < kWords; word += 8) {
    for (i32 lane = 0; lane < kLanes; ++lane) {
      const __m256i key = _mm256_load_si256(reinterpret_cast<const __m256i*>(&kKeys.of[lane][word]));
      _Pragma("GCC unroll 3") for (i32 s = 0; s < kStreams; ++s) {
        const u8* from = data + s * apart * kBlockBytes + 4 * word;
        const __m256i pairs =
            _mm256_add_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), key);
        const __m256i second = _mm256_shuffle_epi32(pairs, 0x31);
        hash[lane][s].of = _mm256_add_epi64(hash[lane][s].of, _mm256_mul_epu32(pairs, second));
      }
    }
  }
  for (i32 lane = 0; lane < kLanes; ++lane) {
    for (i32 s = 0; s < kStreams; ++s) sums[lane] += term(total(hash[lane][s]), block + s * apart, lane);
  }
}

// A processor fetches ahead inside a page of memory: several streams are read faster than one. On an
// AMD EPYC four took 1.2 times the time of a read, and three 1.1.
MP_AVX2 void add_blocks_avx2(const u8* data, i64 blocks, i64 first, u64* sums) {
  constexpr i64 kStreams = 3, kApart = 256;
  i64 done = 0;
  for (; done + kStreams * kApart <= blocks; done += kStreams * kApart) {
    for (i64 b = done; b < done + kApart; ++b) {
      add_streams<kStreams>(data + b * kBlockBytes, first + b, kApart, sums);
    }
  }
  for (; done < blocks; ++done) add_streams<1>(data + done * kBlockBytes, first + done, 0, sums);
}

#endif

void add_blocks(const u8* data, i64 blocks, i64 first, u64* sums) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return add_blocks_avx2(data, blocks, first, sums);
#endif
  for (i64 b = 0; b < blocks; ++b) add_block(data + b * kBlockBytes, first + b, sums);
}

// Rows of a tensor. For each lane the keys of all rows, and of the numbers in any of them: elements, but
// the two halves of one of eight bytes.
struct Rows {
  const void* data;
  i64 count, apart, numbers;
  const u64 *row_keys, *keys;
};

template <class T>
void add_rows(const Rows& rows, u64* sums) {
  constexpr bool kHalves = sizeof(T) == 8;
  for (i64 row = 0; row < rows.count; ++row) {
    for (i32 lane = 0; lane < kLanes; ++lane) {
      const u64* keys = rows.keys + lane * rows.numbers;
      u64 sum = 0;
      for (i64 i = 0; i < rows.numbers / (kHalves ? 2 : 1); ++i) {
        const T bits = load<T>(rows.data, row * rows.apart + i);
        sum += kHalves ? u64(u32(bits)) * keys[2 * i] + u64(i64(bits) >> 32) * keys[2 * i + 1]
                       : u64(bits) * keys[i];
      }
      sums[lane] += rows.row_keys[lane * rows.count + row] * sum;
    }
  }
}

}  // namespace
}  // namespace meshplan

using namespace meshplan;

extern "C" {

// Adds the words of `count` rows of a tensor, which meshplan/run/_words.py defines, to two sums. Rows
// are `apart` elements of `bytes` bytes from each other: 1, 2, 4 or 8.
void mp_add_words(const void* data, long long count, long long apart, long long numbers,
                  const unsigned long long* row_keys, const unsigned long long* keys, int bytes,
                  unsigned long long* sums) {
  const Rows rows{data, count, apart, numbers, row_keys, keys};
  if (bytes == 1) return add_rows<u8>(rows, sums);
  if (bytes == 2) return add_rows<i16>(rows, sums);
  if (bytes == 4) return add_rows<i32>(rows, sums);
  add_rows<i64>(rows, sums);
}

// Adds the digest of `bytes` bytes of a tensor, at any address, to two sums, which start at 0. Blocks
// count from 0 at the tensor's start, and `first` is that of the first byte. The bytes end with the
// tensor if they are not a whole number of blocks.
void mp_digest(const void* data, long long bytes, long long first, unsigned long long* sums) {
  const u8* from = static_cast<const u8*>(data);
  const i64 blocks = bytes / kBlockBytes, rest = bytes % kBlockBytes;
  add_blocks(from, blocks, first, sums);
  if (rest != 0) {
    alignas(64) u8 last[kBlockBytes] = {};
    std::memcpy(last, from + blocks * kBlockBytes, std::size_t(rest));
    add_blocks(last, 1, first + blocks, sums);
  }
}

}  // extern "C"
