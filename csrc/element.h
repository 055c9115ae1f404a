// The fold on a GPU, of leaves in its own memory (fold.h) or that peers have staged there: each lane
// takes words of its own, in registers.
//
// Leaves are taken in batches of at most 8, in their order, and a word of each leaf of a batch is in
// flight before the first is used. A batch of n leaves of a tree is the tree over one axis of n
// leaves. Results of batches wait on a stack, and a plan says for each batch how many of them it is
// added to. The host makes the plan of the expression that defines the order:
// meshplan/kernel/_device_peers.py.
#pragma once

#include "device_call.h"
#include "exact.h"
#include "op.h"
#include "words.h"

namespace meshplan {

// A plan has, at the first leaf of each batch, the number of its leaves, and 16 times the number of
// results that it is added to, the newest first.
MP_FN i32 leaves_in(i32 plan) { return plan % 16; }
MP_FN i32 nodes_behind(i32 plan) { return plan / 16; }

// Element `index` behind an address; `whole`: the address is a multiple of the element's size. Devices
// fault on other loads, so that bytes are then read one by one.
template <class T>
MP_FN T element_at(const u8* from, i64 index, bool whole) {
  using Bits = typename Traits<T>::Bits;
  from += index * i64(sizeof(T));
  if (whole) return bit_cast<T>(read<Bits>(from));
  Bits bits = 0;
  for (i32 i = 0; i < i32(sizeof(T)); ++i) bits |= Bits(Bits(read<u8>(from + i)) << (8 * i));
  return bit_cast<T>(bits);
}

template <class T>
MP_FN void put(u8* to, i64 index, T value, bool whole) {
  const auto bits = bit_cast<typename Traits<T>::Bits>(value);
  to += index * i64(sizeof(T));
  if (whole) return write(to, bits);
  for (i32 i = 0; i < i32(sizeof(T)); ++i) write(to + i, u8(bits >> (8 * i)));
}

// The fold of one word of each leaf. In: of leaves. Acc: of partial results. Round: what each node is
// rounded to. Out: of the result. kRoom: results of batches that may wait.
//
// From has the leaves:
//   leaves, chain, divisor          as in FoldCall
//   plan(first)                     of the batch that starts there
//   read<In>(in, first, count, at)  the words at element `at` of `count` leaves
//   leaf<In>(r, at)                 one element
template <class In, class Acc, class Round, class Out, class Op>
struct WordFold {
  static constexpr i32 kSize = i32(sizeof(In));
  // Any order gives the bits of the contract: integers wrap, and one of two extremes is chosen.
  static constexpr bool kAnyOrder = !Traits<Acc>::is_float || kChooses<Op>;

  MP_INSIDE static Acc node(Acc a, Acc b) {
    return Convert<Acc>::from(Convert<Round>::from(Op::node(a, b)));
  }

  MP_INSIDE static Out finish(Acc total, u64 divisor) {
    if constexpr (kDivides<Acc>) {
      if (divisor != 0) total = total / Acc(divisor);
    }
    return finished<Out>(total);
  }

  template <i32 kRoom, class Word, class From, i32 kWidth>
  MP_INSIDE static void fold(Out (&found)[kWidth], const From& from, i64 at) {
    static_assert(kWidth * kSize == i32(sizeof(Word)), "a word of each leaf");
    if constexpr (kExact<Op>) {
      add_exactly<Word>(found, from, at);
    } else {
      Acc total[kWidth] = {};
      if (kAnyOrder || from.chain) {
        add_chain<Word>(total, from, at);
      } else if constexpr (!kAnyOrder) {
        add_tree<kRoom, Word>(total, from, at);
      }
      MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) found[i] = finish(total[i], from.divisor);
    }
  }

 private:
  template <class Word>
  MP_INSIDE static In element(const Word& word, i32 index) {
    typename Traits<In>::Bits bits;
    __builtin_memcpy(&bits, reinterpret_cast<const u8*>(&word) + index * kSize, sizeof(bits));
    return bit_cast<In>(bits);
  }

  template <class Word, class From, i32 kWidth>
  MP_INSIDE static void add_chain(Acc (&total)[kWidth], const From& from, i64 at) {
    MP_ROLLED for (i32 first = 0; first < from.leaves;) {
      const i32 count = leaves_in(uniform(from.plan(first)));
      Word in[kBatch] = {};
      from.template read<In>(in, first, count, at);
      MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
        if (j >= count) break;
        MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) {
          const Acc leaf = Convert<Acc>::from(element(in[j], i));
          total[i] = j == 0 && first == 0 ? leaf : node(total[i], leaf);
        }
      }
      first += count;
    }
  }

  template <i32 kRoom, class Word, class From, i32 kWidth>
  MP_INSIDE static void add_tree(Acc (&total)[kWidth], const From& from, i64 at) {
    // A stack whose top is always the first: no index is known at run time only. It and the words of a
    // batch are set on every way, or their registers would be kept from the start of the kernel on.
    Acc waiting[kRoom][kWidth] = {};
    MP_ROLLED for (i32 first = 0; first < from.leaves;) {
      const i32 plan = uniform(from.plan(first)), count = leaves_in(plan), nodes = nodes_behind(plan);
      if (first != 0 && nodes == 0) {
        MP_UNROLLED for (i32 w = kRoom - 1; w > 0; --w) {
          MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) waiting[w][i] = waiting[w - 1][i];
        }
        MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) waiting[0][i] = total[i];
      }
      Word in[kBatch] = {};
      from.template read<In>(in, first, count, at);
      MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) {
        const Acc batch = part<0, kBatch>(in, count, i);
        total[i] = nodes == 0 ? batch : node(total[i], batch);
        MP_ONE_BY_ONE();
      }
      MP_ROLLED for (i32 more = nodes; more > 1; --more) {
        MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) total[i] = node(waiting[0][i], total[i]);
        MP_UNROLLED for (i32 w = 0; w < kRoom - 1; ++w) {
          MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) waiting[w][i] = waiting[w + 1][i];
        }
      }
      first += count;
    }
  }

  // Of leaves kFirst to kFirst + kCount, of which there may be fewer: a tree of n leaves is one of a
  // power of two, without the leaves that are missing.
  template <i32 kFirst, i32 kCount, class Word>
  MP_INSIDE static Acc part(const Word (&in)[kBatch], i32 count, i32 index) {
    if constexpr (kCount == 1) {
      return Convert<Acc>::from(element(in[kFirst], index));
    } else {
      constexpr i32 kHalf = kCount / 2;
      const Acc left = part<kFirst, kHalf>(in, count, index);
      const Acc right = part<kFirst + kHalf, kHalf>(in, count, index);
      return kFirst + kHalf < count ? node(left, right) : left;
    }
  }

  template <class Word, class From, i32 kWidth>
  MP_INSIDE static void add_exactly(Out (&found)[kWidth], const From& from, i64 at) {
    QuickSum<In> quick[kWidth];
    MP_ROLLED for (i32 first = 0; first < from.leaves;) {
      const i32 count = leaves_in(uniform(from.plan(first)));
      Word in[kBatch] = {};
      from.template read<In>(in, first, count, at);
      MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
        if (j >= count) break;
        MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) quick[i].add(element(in[j], i));
      }
      first += count;
    }
    const typename QuickSum<In>::Limits limits = QuickSum<In>::limits(from.leaves);
    i32 uncertain = 0;
    MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) {
      uncertain |= i32(!quick[i].template certain<Acc>(limits)) << i;
      found[i] = finish(quick[i].template total<Acc>(), from.divisor);
    }
    // Rare: the leaves are read again. One place for all elements, since its code is long.
    MP_ROLLED for (i32 i = 0; uncertain >> i != 0; ++i) {
      if ((uncertain >> i & 1) == 0) continue;
      const auto leaf = [&](i32 r) { return from.template leaf<In>(r, at + i); };
      const Out certain = finish(sum_again<Acc, In>(leaf, from.leaves), from.divisor);
      MP_UNROLLED for (i32 k = 0; k < kWidth; ++k) {
        if (k == i) found[k] = certain;
      }
    }
  }
};

// Leaves that peers have staged in tiles, at multiples of 64 bytes; the rank's own piece is in a
// tensor, at any address.
struct StagedLeaves {
  const u8* tiles;
  const u8* own;
  const u8* plans;
  u64 stride, divisor;
  i32 rank, leaves, own_width;
  bool chain;

  MP_INSIDE i32 plan(i32 first) const { return plans[first]; }

  template <class In>
  MP_INSIDE In leaf(i32 index, i64 at) const {
    const u8* const from = index == rank ? own : tiles + stride * u64(index);
    return element_at<In>(from, at, own_width >= i32(sizeof(In)));
  }

  template <class In, class Word>
  MP_INSIDE void read(Word (&in)[kBatch], i32 first, i32 count, i64 at) const {
    const i64 offset = at * i64(sizeof(In));
    MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
      // There is a tile in place of the own piece too, which nothing is written to.
      const bool is_used = j < count && first + j != rank;
      const i32 leaf = kLoadsAll && j >= count ? first : first + j;
      if (kLoadsAll || is_used) in[j] = meshplan::read<Word>(tiles + stride * u64(leaf) + offset);
    }
    if (u32(rank - first) >= u32(count)) return;
    // The tiles are on their way before the own word is waited for.
    Word mine;
    if constexpr (sizeof(Word) == 16) {
      mine = read_vector<i32(sizeof(In))>(own + offset, own_width);
    } else {
      mine = bit_cast<Word>(element_at<In>(own, at, own_width >= i32(sizeof(In))));
    }
    MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
      if (first + j == rank) in[j] = mine;
    }
  }
};

struct Elements {
  const u8* plans;
  i32 world;
  bool chain;
  u64 divisor;  // 0: none
};

// The fold of a piece over peers, by all lanes of a block together.
template <class D, class Acc, class Round, class Op, class Block>
MP_INSIDE void fold_elements(const Elements& how, const Results& into, const Leaves& leaves, i64 numel,
                             Block& block) {
  using Fold = WordFold<D, Acc, Round, D, Op>;
  constexpr i32 kSize = i32(sizeof(D)), kWidth = 16 / kSize;
  const i32 own_width = width_of(u64(leaves.own)), out_width = width_of(u64(into.out));
  const StagedLeaves from{leaves.tiles(), leaves.own, how.plans, leaves.stride, how.divisor,
                          leaves.rank,    how.world,  own_width, how.chain};
  // Where the own piece or the result is not even at a multiple of an element, there are no words.
  const i64 words = own_width < kSize || out_width < kSize ? 0 : numel / kWidth;
  MP_ROLLED for (i64 w = block.lane(); w < words; w += block.lanes()) {
    D found[kWidth];
    Fold::template fold<kStagedWaiting, Vector>(found, from, w * kWidth);
    Vector word;
    __builtin_memcpy(&word, found, sizeof(word));
    write_vector<kSize>(into.out + 16 * w, out_width, word);
    for (i32 k = 0; k < into.copies; ++k) write(into.copy(k) + 16 * w, word);
  }
  // The rest behind the last word.
  MP_ROLLED for (i64 i = words * kWidth + block.lane(); i < numel; i += block.lanes()) {
    D found[1];
    Fold::template fold<kStagedWaiting, typename Traits<D>::Bits>(found, from, i);
    put(into.out, i, found[0], out_width >= kSize);
    // Tiles are aligned.
    for (i32 k = 0; k < into.copies; ++k) put(into.copy(k), i, found[0], true);
  }
}

}  // namespace meshplan
