// The digest of a tensor's bytes: two sums modulo 2^64 over blocks, in any order.
//
// meshplan/kernel/_digest.py is the definition, and says what collides. A block is 1024 bytes, the
// last one filled up with zeros, read as 128 pairs of little-endian 32-bit words.
#pragma once

#include "port.h"

namespace meshplan::digest {

constexpr i32 kLanes = 2, kWords = 256, kBlockBytes = 4 * kWords;

// The finaliser of SplitMix64; it loses nothing.
MP_FN constexpr u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// The generator of SplitMix64, from seed 0: its output number n.
MP_FN constexpr u64 random(u64 n) { return mix((n + 1) * 0x9e3779b97f4a7c15ull); }

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
MP_FN constexpr u64 term(u64 hash, i64 block, i32 lane) {
  return mix(hash ^ random((1ull << 32) + 2 * u64(block) + u64(lane)));
}

}  // namespace meshplan::digest
