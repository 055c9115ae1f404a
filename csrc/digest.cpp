// The digest and the words of rows on a CPU. One thread; memory is read once.
#include "digest.h"

#include <cstddef>
#include <cstring>

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace meshplan {
namespace {

using namespace digest;

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
      _Pragma("GCC unroll 4") for (i32 s = 0; s < kStreams; ++s) {
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

// A processor fetches ahead inside a page of memory: several streams are read faster than one.
MP_AVX2 void add_blocks_avx2(const u8* data, i64 blocks, i64 first, u64* sums) {
  constexpr i64 kStreams = 4, kApart = 64;
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

void add_words(const Rows& rows, i32 bytes, u64* sums) {
  if (bytes == 1) return add_rows<u8>(rows, sums);
  if (bytes == 2) return add_rows<i16>(rows, sums);
  if (bytes == 4) return add_rows<i32>(rows, sums);
  add_rows<i64>(rows, sums);
}

void add_digest(const void* data, i64 bytes, i64 first, u64* sums) {
  const u8* from = static_cast<const u8*>(data);
  const i64 blocks = bytes / kBlockBytes, rest = bytes % kBlockBytes;
  add_blocks(from, blocks, first, sums);
  if (rest != 0) {
    alignas(64) u8 last[kBlockBytes] = {};
    std::memcpy(last, from + blocks * kBlockBytes, std::size_t(rest));
    add_blocks(last, 1, first + blocks, sums);
  }
}

}  // namespace meshplan
