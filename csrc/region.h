// A rank's region: the words and tiles through which ranks reduce. peer.h says who writes what when.
#pragma once

#include "port.h"

namespace meshplan {

constexpr i32 kMaxPeers = 72;
constexpr u64 kLine = 64;  // bytes; no two writers share one

// Identity of a call: a packed record of meshplan/record.py, whose first word has its version, and
// zeros. Ranks whose words differ must not reduce together.
struct Signature {
  u64 words[16];
};

// One rank's view of all regions.
struct Peers {
  u8* region[kMaxPeers];
  i32 world, rank, blocks;
  u32 tile;  // bytes of a piece at most, a multiple of kLine
};

// Rounds that a block may stage ahead of the one it waits for. With pulled pieces, of CPUs, no link
// would be busier, and another tile would leave the cache.
MP_FN constexpr i32 most_ahead(bool push) { return push ? 1 : 0; }
// Rounds whose signatures, pieces and results may be in use at the same time.
MP_FN constexpr i32 slots_of(bool push) { return 2 + 2 * most_ahead(push); }

// Offsets in a region: first the words, then the tiles of all slots, each for all blocks.
struct Map {
  i32 world, blocks;
  u64 tile;
  bool push;

  MP_FN u64 generation(i32 block) const { return kLine * u64(block); }
  MP_FN u64 refusal() const { return kLine * u64(blocks); }
  MP_FN u64 flag(i32 block, i32 from) const { return refusal() + kLine * (1 + row(0, block, from)); }
  MP_FN u64 signature(i32 slot, i32 block, i32 from) const {
    return flag(blocks, 0) + sizeof(Signature) * row(slot, block, from);
  }
  // Tile i: one for each peer, then the results; a rank that is read from has only its own.
  MP_FN u64 data(i32 slot, i32 block, i32 i) const {
    return signature(slots_of(push), 0, 0) + tile * (u64(slot * blocks + block) * u64(tiles()) + u64(i));
  }
  MP_FN u64 result(i32 slot, i32 block, i32 from) const {
    return data(slot, block, push ? world + from : world);
  }
  MP_FN u64 bytes() const { return data(slots_of(push), 0, 0); }

 private:
  MP_FN i32 tiles() const { return push ? 2 * world : world + 1; }
  MP_FN u64 row(i32 slot, i32 block, i32 from) const {
    return u64((slot * blocks + block) * world + from);
  }
};

static_assert(sizeof(Signature) == 2 * kLine, "a signature fills two lines");

// The word of a rank that gives up: the rank it waited for, and where; 0: it did not give up. Bits 0-7
// are the rank plus 1, so that no word is 0; 8-9 the phase; 10 whether the process ended; the rest the
// block. It is stored in every region. If signatures differ, it is stored in the own region alone, for
// the blocks of this rank: every other rank finds the difference itself. If two calls overlap on a
// rank, the word goes to every region, because the order of that rank's calls is lost.
constexpr i32 kDiffering = 2, kOverlapping = 3;  // in place of a phase
MP_FN u32 refusal_word(i32 rank, i32 block, i32 phase, bool ended) {
  return 1u + u32(rank) + (u32(phase) << 8) + (u32(ended) << 10) + (u32(block) << 11);
}

// The upper half of the generation's word while a call uses the block; an idle block has 0 there.
constexpr u32 kRunning = 0x52554e21u;

}  // namespace meshplan
