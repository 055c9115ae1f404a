// One reduction by ranks that reach each other's memory: the same body for every platform.
//
// Each rank has a region, which all ranks have mapped. Regions are divided by block, and blocks of
// one index communicate only with each other. So a call may use any number of blocks and needs no
// synchronisation between them. A block works in rounds, which count its generation g up; g is kept in
// the region and wraps. Of each round it
//   1. stages a piece of the message for every peer, in slot g % slots_of(push);
//   2. sets a flag at every peer: it announces the round;
//   3. waits for the flag of every peer;
//   4. combines the pieces that are staged for it, in the contract's order. In two_shot it stages the
//      result too, in the slot of a later round;
//   5. in two_shot: copies the results that its peers have staged in this slot.
// It is `ahead` rounds ahead with steps 1 and 2: 0 on CPUs, and where a call has one piece; else 1. So
// the links are busy while it waits. Results of round g are announced with the next round that is
// announced behind it, g + 1 + ahead, and use its slot. n pieces take n rounds, and n + 1 + ahead in
// two_shot.
//
// What belongs to round g is written after the wait of round g - 1 - ahead, which every peer has
// announced when it was done with round g - 2 - 2 * ahead. So 2 + 2 * ahead slots are enough, and no
// barrier is needed at the end.
//
// After a failure the regions are invalid. A block that gives up in round g has set the refusal of its
// own region, and a block that finds that word set stages nothing and stores no flag. So none of its
// flags goes beyond g + ahead, no peer passes the wait of a later round, and no slot that a late peer
// still needs is used again. Hence what lies behind a flag is always that of its round.
//
// Where a rank may sleep while it waits (Block::kSleeps), the word behind a flag, in the flag's line,
// is not 0 while the reader of the flag does, and the rank that stores the flag wakes it.
//
// Where writes to a peer are cheaper than reads from it, pieces are staged in the region of the rank
// that reads them (Block::kPush), else in the region of the rank that writes them.
#pragma once

#include "region.h"

namespace meshplan {

enum class Mode : i32 { one_shot = 0, two_shot = 1, scatter = 2 };

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

// The pieces that arrived, one for each rank: leaf r of the fold.
struct Leaves {
  const u8* own;
  const u8* const* region;
  u64 first;   // bytes from a region's start
  u64 stride;  // bytes from leaf to leaf, where all lie in one region
  i32 rank;
  bool push;

  // Of leaf 0, if pieces are pushed.
  MP_FN const u8* tiles() const { return region[rank] + first; }
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
        now_(block.keep(own_now_)) {}

  MP_FN Outcome run() {
    Entry entry = {};
    // One exchange reads the generation and marks the block as running: of two calls that overlap on
    // this rank, the second sees the mark of the first, whatever their timing.
    if (block_.lane() == 0) {
      const u64 before = block_.exchange(state(), u64(kRunning) << 32);
      entry = {u32(before), u32(before >> 32) == kRunning ? kOverlap : block_.load(refusal())};
    }
    // All lanes take the values of one lane: a peer may change the words at any time.
    entry = bit_cast<Entry>(block_.share(bit_cast<u64>(entry)));
    const bool overlaps = entry.refusal == kOverlap;
    if (overlaps) {
      entry.refusal = refusal_word(peers_.rank, block_.index(), kOverlapping, false);
      refuse(entry.refusal);
    }
    if (block_.lane() == 0) now_ = plan(entry.generation, overlaps);
    block_.sync();
    if (!take_refusal(entry.refusal)) {
      for (i32 round = -now_.ahead; round < now_.rounds; ++round) {
        if (round + now_.ahead < now_.rounds) announce(round + now_.ahead);
        if (round >= 0 && !finish(round)) break;
      }
    }
    if (now_.outcome.fate != i32(Fate::done)) {
      poison();
      now_.rounds = 0;
    }
    block_.sync();
    // Storing the generation clears the mark. If calls overlap, only the first one does so: the second
    // never owned the block.
    if (block_.lane() == 0 && !now_.overlaps) block_.exchange(state(), now_.before + u32(now_.rounds));
    return now_.outcome;
  }

  // After a run, for Fate::differs: the words of the rank that differs, in this rank's region, which
  // no rank writes to after a failure; else null. The outcome has none: they would fill registers.
  MP_FN const Signature* theirs() const { return now_.theirs; }

 private:
  struct Piece {
    i64 start, bytes;
  };
  struct Entry {
    u32 generation, refusal;
  };
  static constexpr u32 kOverlap = ~0u;  // no refusal word

  // What a block does in this call, and what becomes of it.
  struct State {
    u32 before;   // the generation of the last call's last round
    i32 pieces;   // rounds that have one
    i32 rounds;   // all
    i32 ahead;    // rounds that are announced before the one that is waited for
    u32 quarter;  // bytes of the first piece, if it is shorter than the others; else 0
    bool overlaps;
    Outcome outcome;
    const Signature* theirs;
  };

  // All ranks have equal pieces, and equal plans.
  MP_FN State plan(u32 before, bool overlaps) const {
    const i64 mine = steps() - block_.index();
    State found = {};
    found.before = before;
    found.overlaps = overlaps;
    if (mine > 0) found.pieces = i32((mine + block_.count() - 1) / block_.count());
    if (found.pieces > 1) found.ahead = most_ahead(Block::kPush);
    // Every other block is a quarter of a round late: its waits and first loads fall into the time in
    // which the other blocks store.
    if (found.ahead > 0 && block_.index() % 2 != 0) {
      found.quarter = message_.piece / 4 / u32(kLine) * u32(kLine);
      found.pieces += found.quarter > 0;
    }
    found.rounds = found.pieces;
    if (message_.mode == Mode::two_shot && found.pieces > 0) found.rounds += 1 + found.ahead;
    // Empty messages too: every block passes a barrier once, so that signatures are compared.
    if (found.rounds == 0) found.rounds = 1;
    return found;
  }

  // Poison: neither partial results nor the previous contents may be mistaken for a result. All ones
  // are a NaN in every float type, and -1 or the largest integer.
  MP_FN void poison() {
    block_.sync();
    for (i64 step = block_.index(); step < steps(); step += block_.count()) {
      for (i32 p = 0; p < peers_.world; ++p) {
        const bool scatter = message_.mode == Mode::scatter;
        if (scatter && p != peers_.rank) continue;
        const Piece part = part_of(p, step, 0, message_.piece);
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

  // Of the part of the message that rank `to` combines in a step the bytes from `first` to `last`; empty
  // behind the end of its part.
  MP_FN Piece part_of(i32 to, i64 step, u32 first, u32 last) const {
    const bool whole = message_.mode == Mode::one_shot;
    const i64 begin = whole ? 0 : message_.starts[to];
    const i64 end = whole ? message_.starts[0] : message_.starts[to + 1];
    const i64 start = begin + step * i64(message_.piece) + i64(first);
    const i64 left = end - start;
    if (left <= 0) return {end, 0};
    return {start, left < i64(last - first) ? left : i64(last - first)};
  }

  // What rank `to` combines in a round of this block, from 0 on: a step each; or the first step in two
  // rounds, of which the first has a quarter.
  MP_FN Piece piece(i32 to, i32 round) const {
    const i64 step = block_.index() + i64(round - (now_.quarter > 0 && round > 0)) * block_.count();
    return part_of(to, step, round == 1 ? now_.quarter : 0,
                   round == 0 && now_.quarter > 0 ? now_.quarter : message_.piece);
  }

  // Writes all that peers read in `round`, but for results that are pushed, which `finish` writes.
  MP_FN void announce(i32 round) {
    if (round < now_.pieces) stage(round);
    if (!Block::kPush && message_.mode == Mode::two_shot && round > 0) {
      // One copy, which every peer reads.
      const Piece own = piece(peers_.rank, round - 1);
      block_.copy(peers_.region[peers_.rank] + result(round, peers_.rank), message_.out + own.start,
                  own.bytes, {});
    }
    // The signature is written before the flag of the first round, whose release publishes it: it needs
    // no round trip of its own.
    if (round == 0) sign();
    block_.publish();
    raise_flags(generation(round));
  }

  // Waits for what peers have written for `round`, and reads it.
  MP_FN bool finish(i32 round) {
    const bool first = round == 0;
    if (!await_all(generation(round), round < now_.pieces || first ? 0 : 1)) return false;
    if (first && !compare()) return false;
    // Half of the lanes copies results first, and folds then: copies alone would leave the links idle.
    for (i32 turn = 0; turn < 2; ++turn) {
      if ((turn == 0) == block_.is_odd()) {
        if (message_.mode == Mode::two_shot && round > now_.ahead) copy_results(round);
      } else if (round < now_.pieces) {
        combine(round);
      }
    }
    // Read the refusal again: a rank that gave up meanwhile may have overwritten pieces. It is also the
    // barrier between the fold and the readers of its result.
    return !refused();
  }

  MP_FN void combine(i32 round) {
    const i32 rank = peers_.rank;
    const Piece own = piece(rank, round);
    // Pulled two-shot pieces: every peer has staged one tile for each reader, and this rank's is `rank`.
    // Otherwise leaves start at tile 0.
    const i32 tile = Block::kPush || message_.mode == Mode::one_shot ? 0 : rank;
    const Leaves leaves{message_.in + own.start, peers_.region, data(round, tile),
                        u64(peers_.tile),        rank,          Block::kPush};
    const i64 start = message_.mode == Mode::scatter ? own.start - message_.starts[rank] : own.start;
    const Results into{message_.out + start,
                       peers_.region,
                       result(round + 1 + now_.ahead, rank),
                       peers_.world,
                       rank,
                       Block::kPush && message_.mode == Mode::two_shot ? peers_.world - 1 : 0};
    fold_(into, leaves, own.bytes / message_.item, block_);
  }

  // That lie in the slot of `round`.
  MP_FN void copy_results(i32 round) {
    const i32 world = peers_.world, rank = peers_.rank;
    const Team team = block_.team(world - 1);
    for (i32 k = 1 + team.index; k < world; k += team.count) {
      const i32 from = (rank + k) % world;
      const Piece part = piece(from, round - 1 - now_.ahead);
      const i32 holder = Block::kPush ? rank : from;
      block_.copy(message_.out + part.start, peers_.region[holder] + result(round, from), part.bytes,
                  team);
    }
  }

  MP_FN void stage(i32 round) {
    const i32 world = peers_.world, rank = peers_.rank;
    if (!Block::kPush && message_.mode == Mode::one_shot) {
      const Piece part = piece(rank, round);
      if (world > 1) {
        block_.copy(peers_.region[rank] + data(round, 0), message_.in + part.start, part.bytes, {});
      }
      return;
    }
    // From the next rank on, so that not all ranks write to one region at a time. The order of
    // additions does not depend on it.
    const Team team = block_.team(world - 1);
    for (i32 k = 1 + team.index; k < world; k += team.count) {
      const i32 to = (rank + k) % world;
      const Piece part = piece(to, round);
      u8* where = Block::kPush ? peers_.region[to] + data(round, rank)
                               : peers_.region[rank] + data(round, to);
      block_.copy(where, message_.in + part.start, part.bytes, team);
    }
  }

  MP_FN void sign() {
    for (i32 p = block_.lane(); p < peers_.world; p += block_.lanes()) {
      *at<Signature>(p, map().signature(slot(0), block_.index(), peers_.rank)) = message_.signature;
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
    now_.outcome = {i32(Fate::differs), other, block_.index(), 0, 0, 0, {}};
    now_.theirs = signature_of(other);
    block_.store(refusal(), refusal_word(other, block_.index(), kDiffering, false));
    return false;
  }

  MP_FN const Signature* signature_of(i32 from) const {
    return at<Signature>(peers_.rank, map().signature(slot(0), block_.index(), from));
  }

  MP_FN void raise_flags(u32 generation) {
    for (i32 p = block_.lane(); p < peers_.world; p += block_.lanes()) {
      if (p == peers_.rank) continue;
      block_.store(at<u32>(p, map().flag(block_.index(), peers_.rank)), generation);
    }
    if constexpr (Block::kSleeps) {
      block_.fence();
      for (i32 p = 0; p < peers_.world; ++p) {
        if (p == peers_.rank) continue;
        block_.wake(at<u32>(p, map().flag(block_.index(), peers_.rank)));
      }
    }
  }

  // Until all peers have announced this round. What they wrote before is then visible: the stores of
  // flags release at system scope, and `acquire` acquires.
  // phase, for the report: 0 if pieces are awaited, 1 if only results are.
  MP_FN bool await_all(u32 generation, i32 phase) {
    const i32 index = block_.index(), rank = peers_.rank;
    i32 missing = -1;
    for (i32 p = block_.lane(); p < peers_.world && missing < 0; p += block_.lanes()) {
      if (p == rank) continue;
      u32* flag = at<u32>(rank, map().flag(index, p));
      if (!block_.await(p, flag, generation, refusal())) missing = p;
    }
    // Lanes may wait in vain for different peers; one of them is reported.
    missing = block_.any(missing);
    block_.acquire();
    if (missing < 0) return true;
    // A peer that gave up first names the rank that is really absent: this one may only have waited
    // for that peer.
    if (refused()) return false;
    const bool ended = block_.has_ended(missing);
    now_.outcome = {i32(Fate::late), missing, index, phase, ended, 0, {}};
    refuse(refusal_word(missing, index, phase, ended));
    return false;
  }

  MP_FN void refuse(u32 word) {
    for (i32 p = block_.lane(); p < peers_.world; p += block_.lanes()) {
      block_.store(at<u32>(p, map().refusal()), word);
    }
  }

  // Whether this rank or a peer has given up: equal on all lanes. Also a barrier within the block.
  MP_FN bool refused() {
    return take_refusal(u32(block_.share(block_.lane() == 0 ? u64(block_.load(refusal())) : 0)));
  }

  MP_FN bool take_refusal(u32 word) {
    if (word == 0) return false;
    now_.outcome = {i32(Fate::refused),   i32((word - 1u) & 0xffu), i32(word >> 11),
                i32((word >> 8) & 3u), i32((word >> 10) & 1u),   0,
                {}};
    return true;
  }

  MP_FN Map map() const { return {peers_.world, peers_.blocks, peers_.tile, Block::kPush}; }
  MP_FN u64* state() const { return at<u64>(peers_.rank, map().generation(block_.index())); }
  MP_FN u32* refusal() const { return at<u32>(peers_.rank, map().refusal()); }
  MP_FN u32 generation(i32 round) const { return now_.before + 1u + u32(round); }
  MP_FN i32 slot(i32 round) const { return i32(generation(round) % u32(slots_of(Block::kPush))); }
  MP_FN u64 data(i32 round, i32 tile) const { return map().data(slot(round), block_.index(), tile); }
  MP_FN u64 result(i32 round, i32 from) const { return map().result(slot(round), block_.index(), from); }

  template <class T>
  MP_FN T* at(i32 rank, u64 offset) const {
    return reinterpret_cast<T*>(peers_.region[rank] + offset);
  }

  const Peers& peers_;
  const Message& message_;
  Block& block_;
  const Fold& fold_;
  State own_now_;
  // Of all lanes together on a GPU, where registers are few.
  State& now_;
};

}  // namespace meshplan
