// The fold of leaves in the memory of one device: no peers, no flags, one launch.
//
// Leaves are taken in batches, in their order: of a tree 8, 4, 2 or 1 leaves that are a subtree of it,
// of a left fold up to 8. Each is a fixed expression, so that all is in registers. Results of batches
// wait on a stack, and a plan says for each batch how many of them it is added to. The host makes the
// plan of the expression that defines the order: meshplan/kernel/_device_fold.py.
#pragma once

#include "element.h"

#if defined(__CUDACC__) || defined(__HIP__) || defined(__CUDACC_RTC__)
#define MP_UNROLLED _Pragma("unroll")
#define MP_ROLLED _Pragma("unroll 1")
#else
#define MP_UNROLLED
#define MP_ROLLED
#endif
// Calls cost registers, and what is called knows less about its pointers.
#if defined(MP_EMULATED)
#define MP_INSIDE inline
#else
#define MP_INSIDE __device__ inline __attribute__((always_inline))
#endif
// In place, its code would be in each loop; nvcc knows where parameters are.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MP_OUTLINED __device__ __noinline__
#else
#define MP_OUTLINED MP_INSIDE
#endif

namespace meshplan {

constexpr i32 kBatch = 8;
constexpr i32 kTableLeaves = 256;
// Results of batches that wait, of all elements of a word: together they fill 32 registers. A single
// element has room for trees of 2^19 leaves.
template <class Acc>
constexpr i32 kWaiting = sizeof(Acc) == 8 ? 16 : 32;
constexpr i32 kDims = 5;
// Elements at once, at most. More would not fit in registers, or take too long to compile.
template <class In, class Acc, class Round, class Op>
constexpr i32 kWordElements = kUnrolled<In, Acc, Round, Op> ? 8 : 4;

// plan: at the first leaf of a batch the number of its leaves, and 16 times the number of results on
// the stack that it is added to, the newest first. No batch lies in two tables.
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
  i32 chain;                       // 1: a left fold over all leaves
  i32 waiting;                     // results on the stack, at most

  MP_INSIDE const u8* leaf(i32 index) const {
    if (tables == nullptr) return table.leaf[index];
    return tables[index / kTableLeaves].leaf[index % kTableLeaves];
  }
  MP_INSIDE i32 plan(i32 index) const {
    if (tables == nullptr) return table.plan[index];
    return tables[index / kTableLeaves].plan[index % kTableLeaves];
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
static_assert(sizeof(FoldCall) == 2432, "FoldCall of meshplan/kernel/_device_fold.py");

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

// In: of leaves. Acc, Round, Op: as for Element. Out: of the result, or of partial results.
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
      differing |= u64(call_.leaf(r)) ^ (shifted ? u64(call_.out) : 0);
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
    if (width >= kWidest && fits(kWidest)) {
      done = words<kWidest>(head);
    } else if (kWidest == 16 && width >= 4 && fits(4)) {
      done = words<4>(head);
    }
    const i64 edges = call_.numel - done;
    MP_ROLLED for (i64 i = index(); i < edges; i += step()) fold<1, kSize>(i < head ? i : i + done);
  }

 private:
  using Nodes = Element<Out, Acc, Round, Op>;
  static constexpr i32 kMost = kWordElements<In, Acc, Round, Op> * kSize;
  static constexpr i32 kWidest = kMost < 16 ? kMost : 16;

  MP_INSIDE bool fits(i32 bytes) const { return call_.waiting * (bytes / kSize) <= kWaiting<Acc>; }

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

  // A word of each of `count` leaves: all are in flight before the first is used. Batches lie in one
  // table, so that there is one branch for all of their addresses.
  template <i32 kCount, class Word>
  MP_INSIDE void read_batch(Word (&in)[kCount], i32 first, i32 count, i64 at) const {
    const u8* from[kCount];
    if (call_.tables == nullptr) {
      MP_UNROLLED for (i32 j = 0; j < kCount; ++j) from[j] = call_.table.leaf[first + j];
    } else {
      const LeafTable& table = call_.tables[first / kTableLeaves];
      MP_UNROLLED for (i32 j = 0; j < kCount; ++j) from[j] = table.leaf[first % kTableLeaves + j];
    }
    MP_UNROLLED for (i32 j = 0; j < kCount; ++j) {
#if defined(__CUDA_ARCH__)
      __builtin_assume(__isGlobal(from[j]));
#endif
      if (j < count) in[j] = read<Word>(from[j] + at * kSize);
    }
  }

  template <class Word>
  MP_INSIDE static In piece(const Word& word, i32 index) {
    typename Traits<In>::Bits bits;
    __builtin_memcpy(&bits, reinterpret_cast<const u8*>(&word) + index * kSize, sizeof(bits));
    return bit_cast<In>(bits);
  }

  // The elements from `index` on: kWidth of them, in a word of each leaf.
  template <i32 kWidth, i32 kBytes>
  MP_INSIDE void fold(i64 index) const {
    const i64 at = call_.place(index);
    Out found[kWidth];
    if constexpr (kExact<Op>) {
      add_exactly<kWidth, kBytes>(found, at);
    } else {
      Acc total[kWidth] = {};
      if (call_.chain) {
        add_chain<kWidth, kBytes>(total, at);
      } else {
        add_tree<kWidth, kBytes>(total, at);
      }
      MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) found[i] = Nodes::finish(total[i], call_.divisor);
    }
    // A result that is wider than its leaves fills several words, one that is narrower a part.
    constexpr i32 bytes = kWidth * kOutSize, each = bytes < kBytes ? bytes : kBytes;
    MP_UNROLLED for (i32 i = 0; i < bytes / each; ++i) {
      WordOf<each> word;
      __builtin_memcpy(&word, reinterpret_cast<const u8*>(found) + i * each, sizeof(word));
      write(call_.out + index * kOutSize + i * each, word);
    }
  }

  template <i32 kWidth, i32 kBytes>
  MP_INSIDE void add_chain(Acc (&total)[kWidth], i64 at) const {
    MP_ROLLED for (i32 first = 0; first < call_.leaves; first += kBatch) {
      const i32 count = call_.leaves - first;
      WordOf<kBytes> in[kBatch];
      read_batch(in, first, count, at);
      MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
        if (j >= count) break;
        MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) {
          const Acc leaf = Convert<Acc>::from(piece(in[j], i));
          total[i] = j == 0 && first == 0 ? leaf : Nodes::node(total[i], leaf);
        }
      }
    }
  }

  template <i32 kWidth, i32 kBytes>
  MP_INSIDE void add_tree(Acc (&total)[kWidth], i64 at) const {
    // A stack whose top is always the first: no index is known at run time only.
    constexpr i32 room = kWaiting<Acc> / kWidth;
    Acc waiting[room][kWidth];
    MP_ROLLED for (i32 first = 0; first < call_.leaves;) {
      const i32 plan = call_.plan(first), count = plan % 16;
      Acc batch[kWidth];
      switch (count) {
        case 8: add_batch<8, kWidth, kBytes>(batch, first, at); break;
        case 4: add_batch<4, kWidth, kBytes>(batch, first, at); break;
        case 2: add_batch<2, kWidth, kBytes>(batch, first, at); break;
        default: add_batch<1, kWidth, kBytes>(batch, first, at);
      }
      if (first != 0 && plan < 16) {
        MP_UNROLLED for (i32 w = room - 1; w > 0; --w) {
          MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) waiting[w][i] = waiting[w - 1][i];
        }
        MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) waiting[0][i] = total[i];
      }
      MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) {
        total[i] = plan < 16 ? batch[i] : Nodes::node(total[i], batch[i]);
      }
      MP_ROLLED for (i32 more = plan / 16; more > 1; --more) {
        MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) total[i] = Nodes::node(waiting[0][i], total[i]);
        MP_UNROLLED for (i32 w = 0; w < room - 1; ++w) {
          MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) waiting[w][i] = waiting[w + 1][i];
        }
      }
      first += count;
    }
  }

  template <i32 kCount, i32 kWidth, i32 kBytes>
  MP_INSIDE void add_batch(Acc (&batch)[kWidth], i32 first, i64 at) const {
    WordOf<kBytes> in[kCount];
    read_batch(in, first, kCount, at);
    MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) {
      const auto leaf = [&](i32 j) { return piece(in[j], i); };
      batch[i] = Nodes::template unrolled<kCount>(Order::tree, leaf);
      MP_ONE_BY_ONE();
    }
  }

  template <i32 kWidth, i32 kBytes>
  MP_INSIDE void add_exactly(Out (&found)[kWidth], i64 at) const {
    QuickSum<In> quick[kWidth];
    MP_ROLLED for (i32 first = 0; first < call_.leaves; first += kBatch) {
      const i32 count = call_.leaves - first;
      WordOf<kBytes> in[kBatch];
      read_batch(in, first, count, at);
      MP_UNROLLED for (i32 j = 0; j < kBatch; ++j) {
        if (j >= count) break;
        MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) quick[i].add(piece(in[j], i));
      }
    }
    const typename QuickSum<In>::Limits limits = QuickSum<In>::limits(call_.leaves);
    i32 uncertain = 0;
    MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) {
      uncertain |= i32(!quick[i].template certain<Acc>(limits)) << i;
      found[i] = Nodes::finish(quick[i].template total<Acc>(), call_.divisor);
    }
    // Rare: the leaves are read again.
    MP_UNROLLED for (i32 i = 0; i < kWidth; ++i) {
      if (uncertain >> i & 1) found[i] = Nodes::finish(sum_again(call_, at + i), call_.divisor);
    }
  }

  MP_OUTLINED static Acc sum_again(const FoldCall& call, i64 at) {
    const auto leaf = [&](i32 r) { return element_at<In>(call.leaf(r), at, true); };
    return meshplan::sum_again<Acc, In>(leaf, call.leaves);
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
