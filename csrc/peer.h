// One reduction by ranks that reach each other's memory: the same body for every platform.
//
// Each rank has a region, which all ranks have mapped. Regions are divided by block, and blocks of
// one index communicate only with each other. So a call may use any number of blocks and needs no
// synchronisation between them. A block works in rounds. Round g (its generation, which is kept in the
// region and wraps) writes, passes one barrier, and reads. It
//   1. stages a piece of the message for every peer, in the half of parity g % 2;
//   2. sets a flag at every peer, and waits for the flag of every peer;
//   3. in two_shot: copies the results of the round before, which its peers have staged in this half;
//   4. combines the pieces that are staged for it, in the contract's order. In two_shot it stages the
//      result in the other half, for round g + 1.
// So n pieces take n barriers, and n + 1 in two_shot. What is written for round g + 2 uses the half of
// round g again, and is written after the barrier of round g + 1, which every peer enters only when it is
// done with round g: no barrier is needed at the end.
//
// After a failure the regions are invalid. A block that gives up in round g has set the refusal of its
// own region, and a block that finds that word set stages nothing and stores no flag. So none of its
// flags goes beyond g, no peer passes the barrier of round g + 1, and no half that a late peer still
// needs is used again. Hence what lies behind a flag is always that of its round.
//
// Where a rank may sleep while it waits (Block::kSleeps), the word behind a flag, in the flag's line,
// is not 0 while the reader of the flag does, and the rank that stores the flag wakes it.
//
// Where writes to a peer are cheaper than reads from it, pieces are staged in the region of the rank
// that reads them (Block::kPush), else in the region of the rank that writes them.
#pragma once

#include "port.h"

namespace meshplan {

constexpr i32 kMaxPeers = 72;
constexpr u64 kLine = 64;  // bytes; no two writers share one

enum class Mode : i32 { one_shot = 0, two_shot = 1, scatter = 2 };

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

struct Message {
  const u8* in;
  u8* out;            // of this rank's part in scatter, else of the whole; may be `in`
  const i64* starts;  // bytes: part p is [starts[p], starts[p + 1]); one_shot: the whole is [0, starts[0])
  Mode mode;
  i32 item;  // bytes of an element
  Signature signature;
  u32 piece;  // bytes that one rank combines in a round: a multiple of kLine, at most a tile
};

// late: `rank` did not arrive in time. refused: this rank or a peer gave up before, on `rank` at its
// `block` and `phase`. differs: `rank` has another signature. All but done leave poison in the result.
enum class Fate : i32 { done = 0, late = 1, refused = 2, differs = 3 };

struct Outcome {
  i32 fate, rank, block, phase;
  i32 ended;  // late or refused: the process of `rank` is known to have ended
  i32 unused;
  Signature theirs;
};

// Offsets in a region: first the words, then two halves of tiles for each block.
struct Map {
  i32 world, blocks;
  u64 tile;
  bool push;

  MP_FN u64 generation(i32 block) const { return kLine * u64(block); }
  MP_FN u64 refusal() const { return kLine * u64(blocks); }
  MP_FN u64 flag(i32 block, i32 from) const { return refusal() + kLine * (1 + row(0, block, from)); }
  MP_FN u64 signature(i32 parity, i32 block, i32 from) const {
    return flag(blocks, 0) + sizeof(Signature) * row(parity, block, from);
  }
  // Tile i: one for each peer, then the results; a rank that is read from has only its own.
  MP_FN u64 data(i32 parity, i32 block, i32 i) const {
    return signature(2, 0, 0) + tile * (u64(parity * blocks + block) * u64(tiles()) + u64(i));
  }
  MP_FN u64 result(i32 parity, i32 block, i32 from) const {
    return data(parity, block, push ? world + from : world);
  }
  MP_FN u64 bytes() const { return data(2, 0, 0); }

 private:
  MP_FN i32 tiles() const { return push ? 2 * world : world + 1; }
  MP_FN u64 row(i32 half, i32 block, i32 from) const {
    return u64((half * blocks + block) * world + from);
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

// The pieces that arrived, one for each rank: leaf r of the fold.
struct Leaves {
  const u8* own;
  const u8* const* region;
  u64 first;   // bytes from a region's start
  u64 stride;  // bytes from leaf to leaf, where all lie in one region
  i32 rank;
  bool push;

  MP_FN const u8* leaf(i32 from) const {
    if (from == rank) return own;
    return push ? region[rank] + first + stride * u64(from) : region[from] + first;
  }
};

// Where the result of a fold goes: into the tensor, and in two_shot, if pieces are pushed, also into a
// tile of every peer.
struct Results {
  u8* out;
  u8* const* region;
  u64 first;  // bytes from a region's start; a multiple of kLine
  i32 world, rank;
  i32 copies;  // world - 1 or 0

  // Copy k from 0 on; not all ranks write to one region at a time.
  MP_FN u8* copy(i32 k) const {
    const i32 to = rank + 1 + k;
    return region[to < world ? to : to - world] + first;
  }
};

// Lanes of a block that copy together: lane `lane` of `lanes` in team `index` of `count`. Lanes that
// are left over have an index of `count`.
struct Team {
  i32 index = 0, count = 1, lane = 0, lanes = 1;
};

template <class Block, class Fold>
class Call {
 public:
  MP_FN Call(const Peers& peers, const Message& message, Block& block, const Fold& fold)
      : peers_(peers),
        message_(message),
        block_(block),
        fold_(fold),
        map_{peers.world, peers.blocks, peers.tile, Block::kPush} {}

  MP_FN Outcome run() {
    u64* state = at<u64>(peers_.rank, map_.generation(block_.index()));
    Entry entry = {};
    // One exchange reads the generation and marks the block as running: of two calls that overlap on
    // this rank, the second sees the mark of the first, whatever their timing.
    if (block_.lane() == 0) {
      const u64 before = block_.exchange(state, u64(kRunning) << 32);
      entry = {u32(before), u32(before >> 32) == kRunning ? kOverlap : block_.load(refusal())};
    }
    // All lanes take the values of one lane: a peer may change the words at any time.
    entry = bit_cast<Entry>(block_.share(bit_cast<u64>(entry)));
    generation_ = entry.generation;
    const bool overlaps = entry.refusal == kOverlap;
    if (overlaps) {
      entry.refusal = refusal_word(peers_.rank, block_.index(), kOverlapping, false);
      refuse(entry.refusal);
    }
    if (!take_refusal(entry.refusal)) {
      // Empty messages too: every block passes a barrier once, so that signatures are compared.
      const i64 first = block_.index(), count = block_.count();
      const i64 end = steps() + (message_.mode == Mode::two_shot && first < steps() ? count : 0);
      for (i64 step = first; step == first || step < end; step += count) {
        ++generation_;
        if (!one_round(step, step == first)) break;
      }
    }
    if (outcome_.fate != i32(Fate::done)) poison();
    block_.sync();
    // Storing the generation clears the mark. If calls overlap, only the first one does so: the second
    // never owned the block.
    if (block_.lane() == 0 && !overlaps) block_.exchange(state, generation_);
    return outcome_;
  }

  // After a run, for Fate::differs: the words of the rank that differs, in this rank's region, which
  // no rank writes to after a failure; else null. The outcome has none: they would fill registers.
  MP_FN const Signature* theirs() const { return theirs_; }

 private:
  struct Piece {
    i64 start, bytes;
  };
  struct Entry {
    u32 generation, refusal;
  };
  static constexpr u32 kOverlap = ~0u;  // no refusal word

  // Poison: neither partial results nor the previous contents may be mistaken for a result. All ones
  // are a NaN in every float type, and -1 or the largest integer.
  MP_FN void poison() {
    block_.sync();
    for (i64 step = block_.index(); step < steps(); step += block_.count()) {
      for (i32 p = 0; p < peers_.world; ++p) {
        const bool scatter = message_.mode == Mode::scatter;
        if (scatter && p != peers_.rank) continue;
        const Piece part = piece(p, step);
        const i64 start = scatter ? part.start - message_.starts[p] : part.start;
        block_.fill(message_.out + start, 0xff, part.bytes);
        if (message_.mode == Mode::one_shot) break;
      }
    }
  }

  MP_FN i64 longest() const {
    if (message_.mode == Mode::one_shot) return message_.starts[0];
    i64 most = 0;
    for (i32 p = 0; p < peers_.world; ++p) {
      const i64 bytes = message_.starts[p + 1] - message_.starts[p];
      most = bytes > most ? bytes : most;
    }
    return most;
  }

  MP_FN i64 steps() const { return (longest() + i64(message_.piece) - 1) / i64(message_.piece); }

  // The part of the message that rank `to` combines in a step; empty behind the end of its part.
  MP_FN Piece piece(i32 to, i64 step) const {
    const bool whole = message_.mode == Mode::one_shot;
    const i64 begin = whole ? 0 : message_.starts[to];
    const i64 end = whole ? message_.starts[0] : message_.starts[to + 1];
    const i64 start = begin + step * i64(message_.piece);
    const i64 left = end - start;
    if (left <= 0) return {end, 0};
    return {start, left < i64(message_.piece) ? left : i64(message_.piece)};
  }

  // The pieces of `step`, if it exists, and the results of this block's step before.
  MP_FN bool one_round(i64 step, bool first) {
    const i32 world = peers_.world, rank = peers_.rank;
    const bool two_shot = message_.mode == Mode::two_shot, pieces = step < steps();
    const i64 before = step - block_.count();
    const bool results = two_shot && !first;
    if (pieces) stage(step);
    if (results && !Block::kPush) {
      // One copy, which every peer reads.
      const Piece own = piece(rank, before);
      block_.copy(peers_.region[rank] + result(rank), message_.out + own.start, own.bytes, {});
    }
    // The signature is written before the flag of the first round, whose release publishes it: it needs
    // no round trip of its own.
    if (first) sign();
    if (!pass_barrier(pieces || first ? 0 : 1)) return false;
    if (first && !compare()) return false;
    if (pieces) {
      const Piece own = piece(rank, step);
      // Pulled two-shot pieces: every peer has staged one tile for each reader, and this rank's is
      // `rank`. Otherwise leaves start at tile 0.
      const i32 slot = Block::kPush || message_.mode == Mode::one_shot ? 0 : rank;
      const Leaves leaves{message_.in + own.start, peers_.region, data(slot),
                          u64(peers_.tile),        rank,          Block::kPush};
      const i64 start =
          message_.mode == Mode::scatter ? own.start - message_.starts[rank] : own.start;
      const Results into{message_.out + start,
                         peers_.region,
                         map_.result(parity() ^ 1, block_.index(), rank),
                         world,
                         rank,
                         two_shot && Block::kPush ? world - 1 : 0};
      fold_(into, leaves, own.bytes / message_.item, block_);
    }
    if (results) {
      const Team team = block_.team(world - 1);
      for (i32 k = 1 + team.index; k < world; k += team.count) {
        const i32 from = (rank + k) % world;
        const Piece part = piece(from, before);
        const i32 holder = Block::kPush ? rank : from;
        block_.copy(message_.out + part.start, peers_.region[holder] + result(from), part.bytes, team);
      }
    }
    // Read the refusal again: a rank that gave up meanwhile may have overwritten pieces. It is also the
    // barrier between the fold and the readers of its result.
    return !refused();
  }

  MP_FN void stage(i64 step) {
    const i32 world = peers_.world, rank = peers_.rank;
    if (!Block::kPush && message_.mode == Mode::one_shot) {
      const Piece part = piece(rank, step);
      if (world > 1) {
        block_.copy(peers_.region[rank] + data(0), message_.in + part.start, part.bytes, {});
      }
      return;
    }
    // From the next rank on, so that not all ranks write to one region at a time. The order of
    // additions does not depend on it.
    const Team team = block_.team(world - 1);
    for (i32 k = 1 + team.index; k < world; k += team.count) {
      const i32 to = (rank + k) % world;
      const Piece part = piece(to, step);
      u8* where = Block::kPush ? peers_.region[to] + data(rank) : peers_.region[rank] + data(to);
      block_.copy(where, message_.in + part.start, part.bytes, team);
    }
  }

  MP_FN void sign() {
    for (i32 p = block_.lane(); p < peers_.world; p += block_.lanes()) {
      *at<Signature>(p, map_.signature(parity(), block_.index(), peers_.rank)) = message_.signature;
    }
  }

  // By all lanes, a rank each. Plain loads suffice, because the barrier has acquired what each peer wrote
  // before its flag.
  MP_FN bool compare() {
    i32 other = -1;
    for (i32 p = block_.lane(); p < peers_.world && other < 0; p += block_.lanes()) {
      const Signature& theirs = *signature_of(p);
      u64 differing = 0;
      for (i32 i = 0; i < 16; ++i) differing |= theirs.words[i] ^ message_.signature.words[i];
      if (differing != 0) other = p;
    }
    other = block_.any(other);
    if (other < 0) return true;
    outcome_ = {i32(Fate::differs), other, block_.index(), 0, 0, 0, {}};
    theirs_ = signature_of(other);
    block_.store(refusal(), refusal_word(other, block_.index(), kDiffering, false));
    return false;
  }

  MP_FN const Signature* signature_of(i32 from) const {
    return at<Signature>(peers_.rank, map_.signature(parity(), block_.index(), from));
  }

  MP_FN void raise_flags() {
    for (i32 p = block_.lane(); p < peers_.world; p += block_.lanes()) {
      if (p == peers_.rank) continue;
      block_.store(at<u32>(p, map_.flag(block_.index(), peers_.rank)), generation_);
    }
    if constexpr (Block::kSleeps) {
      block_.fence();
      for (i32 p = 0; p < peers_.world; ++p) {
        if (p == peers_.rank) continue;
        block_.wake(at<u32>(p, map_.flag(block_.index(), peers_.rank)));
      }
    }
  }

  // Barrier with all peers: what this block wrote before is visible to every peer that returns, and
  // the other way round. The stores of flags release at system scope, and `acquire` acquires.
  // phase, for the report: 0 if pieces are awaited, 1 if only results are.
  MP_FN bool pass_barrier(i32 phase) {
    const i32 index = block_.index(), rank = peers_.rank;
    block_.publish();
    raise_flags();
    i32 missing = -1;
    for (i32 p = block_.lane(); p < peers_.world && missing < 0; p += block_.lanes()) {
      if (p == rank) continue;
      u32* flag = at<u32>(rank, map_.flag(index, p));
      if (!block_.await(p, flag, generation_, refusal())) missing = p;
    }
    // Lanes may wait in vain for different peers; one of them is reported.
    missing = block_.any(missing);
    block_.acquire();
    if (missing < 0) return true;
    // A peer that gave up first names the rank that is really absent: this one may only have waited
    // for that peer.
    if (refused()) return false;
    const bool ended = block_.has_ended(missing);
    outcome_ = {i32(Fate::late), missing, index, phase, ended, 0, {}};
    refuse(refusal_word(missing, index, phase, ended));
    return false;
  }

  MP_FN void refuse(u32 word) {
    for (i32 p = block_.lane(); p < peers_.world; p += block_.lanes()) {
      block_.store(at<u32>(p, map_.refusal()), word);
    }
  }

  // Whether this rank or a peer has given up: equal on all lanes. Also a barrier within the block.
  MP_FN bool refused() {
    return take_refusal(u32(block_.share(block_.lane() == 0 ? u64(block_.load(refusal())) : 0)));
  }

  MP_FN bool take_refusal(u32 word) {
    if (word == 0) return false;
    outcome_ = {i32(Fate::refused),   i32((word - 1u) & 0xffu), i32(word >> 11),
                i32((word >> 8) & 3u), i32((word >> 10) & 1u),   0,
                {}};
    return true;
  }

  MP_FN u32* refusal() const { return at<u32>(peers_.rank, map_.refusal()); }
  MP_FN i32 parity() const { return i32(generation_ & 1u); }
  MP_FN u64 data(i32 tile) const { return map_.data(parity(), block_.index(), tile); }
  MP_FN u64 result(i32 from) const { return map_.result(parity(), block_.index(), from); }

  template <class T>
  MP_FN T* at(i32 rank, u64 offset) const {
    return reinterpret_cast<T*>(peers_.region[rank] + offset);
  }

  const Peers& peers_;
  const Message& message_;
  Block& block_;
  const Fold& fold_;
  const Map map_;
  u32 generation_ = 0;
  Outcome outcome_ = {};
  const Signature* theirs_ = nullptr;
};

}  // namespace meshplan
