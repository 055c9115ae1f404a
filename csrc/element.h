// The fold of a device: each lane takes elements of its own, in registers.
//
// Sums of floats in groups of the common sizes are unrolled and take 16 bytes of each leaf at a time;
// all else follows the list of steps, element by element. Both give the bits of cpu.cpp, as the tests
// show on a CPU. Pieces of other ranks are in tiles, at multiples of 64 bytes; the rank's own piece
// and the result are in tensors, at any address.
#pragma once

#include "device_call.h"
#include "exact.h"
#include "op.h"
#include "words.h"

namespace meshplan {

struct Elements {
  const Instruction* steps;
  i32 count, world;
  Order order;
  bool one_axis;  // or a shape whose steps are those of one axis
  u64 divisor;    // 0: none
};

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

// Element `index` of 16 bytes that have been read.
template <class T>
MP_FN T element_of(const Vector& vector, i32 index) {
  typename Traits<T>::Bits bits;
  __builtin_memcpy(&bits, reinterpret_cast<const u8*>(&vector) + index * i32(sizeof(T)), sizeof(T));
  return bit_cast<T>(bits);
}

template <class T>
MP_FN void put_into(Vector& vector, i32 index, T value) {
  const auto bits = bit_cast<typename Traits<T>::Bits>(value);
  __builtin_memcpy(reinterpret_cast<u8*>(&vector) + index * i32(sizeof(T)), &bits, sizeof(T));
}

// D: of leaves and result. Acc: partial results. Round: what each node is rounded to.
template <class D, class Acc, class Round, class Op>
struct Element {
  MP_FN static Acc node(Acc a, Acc b) {
    return Convert<Acc>::from(Convert<Round>::from(Op::node(a, b)));
  }

  MP_FN static D finish(Acc total, u64 divisor) {
    if constexpr (kDivides<Acc>) {
      if (divisor != 0) total = total / Acc(divisor);
    }
    return finished<D>(total);
  }

  // In order `exact`, element `index`, whose quick sum is not certain: the leaves are read again, since
  // registers have no index.
  MP_FN static D sum_again(const Elements& how, const Leaves& leaves, i64 index, bool whole) {
    const auto leaf = [&](i32 r) { return element_at<D>(leaves.leaf(r), index, whole); };
    return finish(meshplan::sum_again<Acc, D>(leaf, how.world), how.divisor);
  }

  // One axis of kCount leaves.
  template <i32 kCount, class Leaf>
  MP_FN static Acc unrolled(Order order, const Leaf& leaf) {
    const auto raised = [&](i32 r) { return Convert<Acc>::from(leaf(r)); };
    const auto combined = [](Acc a, Acc b) { return node(a, b); };
    return reduce_unrolled<Acc, kCount>(order, raised, combined);
  }

  // Any shape: the list of steps, over a stack of at most kPending results.
  template <class Leaf>
  MP_FN static Acc listed(const Elements& how, const Leaf& leaf) {
    Acc pending[kPending];
    i32 top = -1;
    for (i32 s = 0; s < how.count; ++s) {
      const Instruction step = how.steps[s];
      if (step.what == Do::top2) {
        --top;
        pending[top] = node(pending[top], pending[top + 1]);
        continue;
      }
      const Acc a = Convert<Acc>::from(leaf(step.a));
      if (step.what == Do::with) {
        pending[top] = node(pending[top], a);
      } else if (step.what == Do::load2) {
        pending[++top] = node(a, Convert<Acc>::from(leaf(step.b)));
      } else {
        pending[++top] = a;
      }
    }
    return pending[0];
  }

  template <i32 kCount, class Block>
  MP_FN static void sized(const Elements& how, const Results& into, const Leaves& leaves, i64 numel,
                          Block& block) {
    constexpr i32 kSize = i32(sizeof(D)), kWidth = 16 / kSize;
    // Tiles are aligned; only the own piece and the result may be at any address. Where one of them is
    // not even at a multiple of an element, every element goes the slow way.
    const i32 own_width = width_of(u64(leaves.own)), out_width = width_of(u64(into.out));
    const i64 vectors = own_width < kSize || out_width < kSize ? 0 : numel / kWidth;
    for (i64 v = block.lane(); v < vectors; v += block.lanes()) {
      Vector in[kCount], found;
      const Vector own = read_vector<kSize>(leaves.own + 16 * v, own_width);
      for (i32 r = 0; r < kCount; ++r) {
        in[r] = r == leaves.rank ? own : read<Vector>(leaves.leaf(r) + 16 * v);
      }
      // All leaves of a vector are in flight before the first addition: one latency, not kCount.
      i32 uncertain = 0;
      for (i32 i = 0; i < kWidth; ++i) {
        const auto leaf = [&](i32 r) { return element_of<D>(in[r], i); };
        Acc total;
        if constexpr (kExact<Op>) {
          const QuickSum<D> quick = quick_sum<D>(leaf, kCount);
          total = quick.template total<Acc>();
          uncertain |= i32(!quick.template certain<Acc>(QuickSum<D>::limits(kCount))) << i;
        } else {
          total = unrolled<kCount>(how.order, leaf);
        }
        put_into(found, i, finish(total, how.divisor));
        MP_ONE_BY_ONE();
      }
      if constexpr (kExact<Op>) {
        for (i32 i = 0; uncertain >> i != 0; ++i) {
          if (uncertain >> i & 1) put_into(found, i, sum_again(how, leaves, v * kWidth + i, true));
        }
      }
      write_vector<kSize>(into.out + 16 * v, out_width, found);
      for (i32 k = 0; k < into.copies; ++k) write(into.copy(k) + 16 * v, found);
    }
    // The rest behind the last whole vector.
    one_by_one(how, into, leaves, vectors * kWidth, numel, block);
  }

  template <class Block>
  MP_FN static void one_by_one(const Elements& how, const Results& into, const Leaves& leaves, i64 first,
                               i64 numel, Block& block) {
    const bool whole = (u64(into.out) | u64(leaves.own)) % sizeof(D) == 0;
    for (i64 i = first + block.lane(); i < numel; i += block.lanes()) {
      const auto leaf = [&](i32 r) { return element_at<D>(leaves.leaf(r), i, whole); };
      D found;
      if constexpr (kExact<Op>) {
        const QuickSum<D> quick = quick_sum<D>(leaf, how.world);
        const bool certain = quick.template certain<Acc>(QuickSum<D>::limits(how.world));
        found = certain ? finish(quick.template total<Acc>(), how.divisor)
                        : sum_again(how, leaves, i, whole);
      } else {
        found = finish(listed(how, leaf), how.divisor);
      }
      put(into.out, i, found, whole);
      // Tiles are aligned.
      for (i32 k = 0; k < into.copies; ++k) put(into.copy(k), i, found, true);
    }
  }
};

// Training uses sums of floats, rounded once: only these are worth the code size.
template <class D, class Acc, class Round, class Op>
constexpr bool kUnrolled = false;
template <>
constexpr bool kUnrolled<float, float, float, Sum> = true;
template <>
constexpr bool kUnrolled<Bfloat, float, float, Sum> = true;
template <>
constexpr bool kUnrolled<Half, float, float, Sum> = true;
template <>
constexpr bool kUnrolled<float, float, float, ExactSum> = true;
template <>
constexpr bool kUnrolled<Bfloat, float, float, ExactSum> = true;
template <>
constexpr bool kUnrolled<Half, float, float, ExactSum> = true;

// All lanes of the block together.
template <class D, class Acc, class Round, class Op, class Block>
MP_FN void fold_elements(const Elements& how, const Results& into, const Leaves& leaves, i64 numel,
                         Block& block) {
  using E = Element<D, Acc, Round, Op>;
  if constexpr (kUnrolled<D, Acc, Round, Op>) {
    switch (how.one_axis ? how.world : 0) {
      case 2: return E::template sized<2>(how, into, leaves, numel, block);
      case 3: return E::template sized<3>(how, into, leaves, numel, block);
      case 4: return E::template sized<4>(how, into, leaves, numel, block);
      case 8: return E::template sized<8>(how, into, leaves, numel, block);
    }
    // Exact sums are longer: more sizes would take too long to compile.
    if constexpr (!kExact<Op>) {
      switch (how.one_axis ? how.world : 0) {
        case 5: return E::template sized<5>(how, into, leaves, numel, block);
        case 6: return E::template sized<6>(how, into, leaves, numel, block);
        case 7: return E::template sized<7>(how, into, leaves, numel, block);
      }
    }
  }
  E::one_by_one(how, into, leaves, 0, numel, block);
}

}  // namespace meshplan
