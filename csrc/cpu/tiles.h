// Loops over a tile: the elements of a stretch that fits in the first-level cache.
//
// Every leaf is read once, up to MOST_FUSED leaves in one loop; what is on the stack between loops
// stays in cache. Each loop exists once per instruction set, chosen at run time. Bits are the same:
// the lanes of a vector do what one element does.
#pragma once
#include "../meshplan/fold.h"

namespace mp {

// Bytes at offset `base` elements into a leaf, of any alignment.
template <class K, int N>
struct Reader {
  const u8* at[N];
  i64 i;
  MP_HD typename K::bits operator()(int leaf) const {
    typename K::bits b;
    __builtin_memcpy(&b, at[leaf] + i * static_cast<i64>(sizeof(b)), sizeof(b));
    return b;
  }
};

template <class K, int N>
MP_HD Reader<K, N> reader(const void* const* leaves, i64 base) {
  Reader<K, N> read;
  for (int j = 0; j < N; ++j) {
    read.at[j] =
        static_cast<const u8*>(leaves[j]) + base * static_cast<i64>(sizeof(typename K::bits));
  }
  read.i = 0;
  return read;
}

template <class K, int N>
MP_HD void start_tile(void* to, const void* const* leaves, i64 base, i64 n) {
  typename K::acc* __restrict acc = static_cast<typename K::acc*>(to);
  Reader<K, N> read = reader<K, N>(leaves, base);
  for (i64 i = 0; i < n; ++i) {
    read.i = i;
    acc[i] = Tree<K, N>::of(read);
  }
}

template <class K, int N>
MP_HD void more_tile(void* to, const void* const* leaves, i64 base, i64 n) {
  typename K::acc* __restrict acc = static_cast<typename K::acc*>(to);
  Reader<K, N> read = reader<K, N>(leaves, base);
  for (i64 i = 0; i < n; ++i) {
    read.i = i;
    acc[i] = Onto<K, N>::of(acc[i], read);
  }
}

template <class K>
MP_HD void join_tile(void* to, const void* from, i64 n) {
  typename K::acc* __restrict left = static_cast<typename K::acc*>(to);
  const typename K::acc* __restrict right = static_cast<const typename K::acc*>(from);
  for (i64 i = 0; i < n; ++i) left[i] = K::node(left[i], right[i]);
}

template <class R, bool DIVIDE>
MP_HD void finish_tile(u8* __restrict out, const void* from, i64 n, typename R::acc count) {
  const typename R::acc* __restrict acc = static_cast<const typename R::acc*>(from);
  for (i64 i = 0; i < n; ++i) {
    const typename R::bits b = R::finish(acc[i], DIVIDE, count);
    __builtin_memcpy(out + i * static_cast<i64>(sizeof(b)), &b, sizeof(b));
  }
}

static constexpr int MOST_FUSED = 8;

typedef void (*LeavesLoop)(void* to, const void* const* leaves, i64 base, i64 n);
typedef void (*JoinLoop)(void* to, const void* from, i64 n);
typedef void (*FinishLoop)(u8* out, const void* from, i64 n, i64 divisor);

// The loops of one algebra on one instruction set; a count without a loop is null.
struct Loops {
  LeavesLoop start[MOST_FUSED + 1];  // a tree of that many leaves, onto the stack
  LeavesLoop more[MOST_FUSED + 1];   // that many leaves onto the uppermost value, one by one
  JoinLoop join;
  i32 acc_size;
};

// How many leaves share a loop. Sums of floats are what is reduced all day; the other algebras get
// the loops that any fold can be made of, which keeps the library small.
enum Fusing { SINGLES, RUNS, TREES };


#define MP_INSTRUCTION_SET(SET, TARGET)                                                           \
  struct SET {                                                                                    \
    template <class K, int N>                                                                     \
    TARGET static void start(void* to, const void* const* leaves, i64 base, i64 n) {              \
      start_tile<K, N>(to, leaves, base, n);                                                      \
    }                                                                                             \
    template <class K, int N>                                                                     \
    TARGET static void more(void* to, const void* const* leaves, i64 base, i64 n) {               \
      more_tile<K, N>(to, leaves, base, n);                                                       \
    }                                                                                             \
    template <class K>                                                                            \
    TARGET static void join(void* to, const void* from, i64 n) {                                  \
      join_tile<K>(to, from, n);                                                                  \
    }                                                                                             \
    template <class R>                                                                            \
    TARGET static void finish(u8* out, const void* from, i64 n, i64) {                            \
      finish_tile<R, false>(out, from, n, typename R::acc());                                     \
    }                                                                                             \
    template <class R>                                                                            \
    TARGET static void divide(u8* out, const void* from, i64 n, i64 divisor) {                    \
      finish_tile<R, true>(out, from, n, count_as(divisor, typename R::acc()));                   \
    }                                                                                             \
  };

MP_INSTRUCTION_SET(Baseline, )
#if defined(__x86_64__) && !defined(MP_BASELINE_ONLY)
#define MP_HAS_AVX2 1
MP_INSTRUCTION_SET(Avx2, __attribute__((target("avx2"))))
#endif

}  // namespace mp
