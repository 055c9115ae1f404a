// The fold of leaves in the memory of one device, by the batches of element.h: no peers, no flags, one
// launch.
#pragma once

#include "element.h"

namespace meshplan {

constexpr i32 kTableLeaves = 256;
// Results of batches that wait, of all elements of a word: together they fill 32 registers. A single
// element has room for trees of 2^19 leaves.
template <class Acc>
constexpr i32 kWaiting = sizeof(Acc) == 8 ? 16 : 32;
constexpr i32 kDims = 5;

// plan: as in element.h. No batch lies in two tables.
struct LeafTable {
  const u8* leaf[kTableLeaves];
  u8 plan[kTableLeaves];
};

struct FoldCall {
  LeafTable table;
  const LeafTable* tables;  // in memory of the device, where one is not enough; else null
  u8* out;                  // contiguous; may be one of the leaves
  i64 numel;
  u64 divisor;                     // 0: none
  i64 size[kDims], stride[kDims];  // of every leaf, in elements
  i32 leaves, dims;                // dims 0: leaves are contiguous
  i32 chain;                       // 1: a left fold over all leaves, or any order
  i32 waiting;                     // results on the stack, at most

  MP_INSIDE const u8* address(i32 index) const {
    if (tables == nullptr) return table.leaf[index];
    return tables[index / kTableLeaves].leaf[index % kTableLeaves];
  }
  MP_INSIDE i32 plan(i32 index) const {
    if (tables == nullptr) return table.plan[index];
    return tables[index / kTableLeaves].plan[index % kTableLeaves];
  }

  template <class In>
  MP_INSIDE In leaf(i32 index, i64 at) const {
    return element_at<In>(address(index), at, true);
  }

  // Batches lie in one table, so that there is one branch for all of their addresses.
  template <class In, class Word>
  MP_INSIDE void read(Word (&in)[kBatch], i32 first, i32 count, i64 at) const {
    const u8* from[kBatch] = {};
    if (tables == nullptr) {
      MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
        if (kLoadsAll || j < count) from[j] = table.leaf[first + (j < count ? j : 0)];
      }
    } else {
      const LeafTable& some = tables[first / kTableLeaves];
      MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
        if (kLoadsAll || j < count) from[j] = some.leaf[first % kTableLeaves + (j < count ? j : 0)];
      }
    }
    MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
#if defined(__CUDA_ARCH__)
      __builtin_assume(__isGlobal(from[j]));
#endif
      if (kLoadsAll || j < count) in[j] = meshplan::read<Word>(from[j] + at * i64(sizeof(In)));
    }
  }

  // Where element `index` of the result is in each leaf. With strides there are less than 2^32.
  MP_INSIDE i64 place(i64 index) const {
    if (dims == 0) return index;
    i64 at = 0;
    u32 left = u32(index);
    MP_ROLLED for (i32 d = dims - 1; d >= 0; --d) {
      at += i64(left % u32(size[d])) * stride[d];
      left /= u32(size[d]);
    }
    return at;
  }
};
// The host has the same fields; the parameters of a kernel have 4096 bytes.
static_assert(sizeof(FoldCall) == 2432, "FoldCall of meshplan/kernel/_device_peers.py");

template <i32 kBytes>
MP_FN auto word_of() {
  if constexpr (kBytes == 16) return Vector{};
  else if constexpr (kBytes == 8) return u64();
  else if constexpr (kBytes == 4) return u32();
  else if constexpr (kBytes == 2) return u16();
  else return u8();
}
template <i32 kBytes>
using WordOf = decltype(word_of<kBytes>());

// Arithmetic as for WordFold. Out: of the result, or of partial results.
template <class In, class Acc, class Round, class Out, class Op>
class DeviceFold {
 public:
  static constexpr i32 kSize = i32(sizeof(In)), kOutSize = i32(sizeof(Out));

  __device__ explicit DeviceFold(const FoldCall& call) : call_(call) {}

  // Words are as wide as all addresses allow. Where they differ by multiples of a word from each other,
  // a few elements at the start are all that is not aligned.
  MP_INSIDE void run() const {
    const bool shifted = kSize == kOutSize && call_.dims == 0;
    u64 differing = shifted ? 0 : u64(call_.out);
    MP_ROLLED for (i32 r = 0; r < call_.leaves; ++r) {
      differing |= u64(call_.address(r)) ^ (shifted ? u64(call_.out) : 0);
    }
    if (call_.dims != 0) {
      // Words stay in one row of the last dimension.
      const i32 last = call_.dims - 1;
      differing |= u64(call_.size[last] * kSize) | u64(call_.stride[last] == 1 ? 0 : kSize);
      for (i32 d = 0; d < last; ++d) differing |= u64(call_.stride[d] * kSize);
    }
    const i32 width = width_of(differing);
    const i64 before = shifted ? i64((~u64(call_.out) + 1) & u64(width - 1)) / kSize : 0;
    const i64 head = before < call_.numel ? before : call_.numel;
    i64 done = 0;
    if (width == 16 && fits(16)) {
      done = words<16>(head);
    } else if (width >= 4 && fits(4)) {
      done = words<4>(head);
    }
    const i64 edges = call_.numel - done;
    MP_ROLLED for (i64 i = index(); i < edges; i += step()) fold<1, kSize>(i < head ? i : i + done);
  }

 private:
  using Fold = WordFold<In, Acc, Round, Out, Op>;

  MP_INSIDE bool fits(i32 bytes) const {
    return Fold::kAnyOrder || call_.waiting * (bytes / kSize) <= kWaiting<Acc>;
  }

  MP_INSIDE static i64 index() { return i64(gpu::block()) * gpu::lanes() + gpu::lane(); }
  MP_INSIDE static i64 step() { return i64(gpu::blocks()) * gpu::lanes(); }

  // Returns the number of elements.
  template <i32 kBytes>
  MP_INSIDE i64 words(i64 head) const {
    constexpr i32 kWidth = kBytes / kSize;
    if constexpr (kWidth <= 1) {
      return 0;  // elements
    } else {
      const i64 count = (call_.numel - head) / kWidth;
      MP_ROLLED for (i64 w = index(); w < count; w += step()) fold<kWidth, kBytes>(head + w * kWidth);
      return count * kWidth;
    }
  }

  // The elements from `index` on: kWidth of them, in a word of each leaf.
  template <i32 kWidth, i32 kBytes>
  MP_INSIDE void fold(i64 index) const {
    const i64 at = call_.place(index);
    Out found[kWidth];
    Fold::template fold<kWaiting<Acc> / kWidth, WordOf<kBytes>>(found, call_, at);
    // A result that is wider than its leaves fills several words, one that is narrower a part.
    constexpr i32 bytes = kWidth * kOutSize, each = bytes < kBytes ? bytes : kBytes;
    MP_UNROLLED for (i32 i = 0; i < bytes / each; ++i) {
      WordOf<each> word;
      __builtin_memcpy(&word, reinterpret_cast<const u8*>(found) + i * each, sizeof(word));
      write(call_.out + index * kOutSize + i * each, word);
    }
  }

  const FoldCall& call_;
};

}  // namespace meshplan

// The only parameter, where the launch has put it: AMD's compiler copies what has an index to the stack
// of each lane.
#if defined(__AMDGCN__)
#define MP_CALL(call) \
  ((void)call,        \
   *(const meshplan::FoldCall*)(__attribute__((address_space(4))) const void*)__builtin_amdgcn_kernarg_segment_ptr())
#else
#define MP_CALL(call) call
#endif

#if !defined(MP_FOLD)
#define MP_FOLD(name, In, Acc, Round, Out, Op)                    \
  MP_KERNEL name(MP_PARAMETER meshplan::FoldCall call) {          \
    using namespace meshplan;                                     \
    DeviceFold<In, Acc, Round, Out, Op>(MP_CALL(call)).run();     \
  }
#endif

// Partial results of leaves, and the result of partial results, where both are of another dtype than
// the leaves; else the kernels for whole reductions have the same bits.
#define MP_FOLD_PARTS(name, D, Acc)                                  \
  MP_FOLD(mp_##name##_sum_combine, D, Acc, Acc, Acc, Sum)            \
  MP_FOLD(mp_##name##_product_combine, D, Acc, Acc, Acc, Product)    \
  MP_FOLD(mp_##name##_sum_finish, Acc, Acc, Acc, D, Sum)             \
  MP_FOLD(mp_##name##_product_finish, Acc, Acc, Acc, D, Product)

// The table of a call of many leaves, into memory of the device: the leaves are parameters of this launch,
// so that a graph keeps them.
MP_KERNEL mp_fold_table(MP_PARAMETER meshplan::FoldCall call) {
  using namespace meshplan;
  const FoldCall& from = MP_CALL(call);
  LeafTable* const to = reinterpret_cast<LeafTable*>(from.out);
  for (i32 i = gpu::lane(); i < kTableLeaves; i += gpu::lanes()) {
    to->leaf[i] = from.table.leaf[i];
    to->plan[i] = from.table.plan[i];
  }
}
