// A block of the peer protocol on a CPU: one thread of one process.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "peer.h"

namespace meshplan {

class HostBlock {
 public:
  static constexpr bool kPush = false;
  static constexpr bool kSleeps = true;

  // processes: for each rank a descriptor that can be read from when its process has ended
  // (pidfd_open), kUnknown, or kEnded; or null, if nothing is known.
  static constexpr i32 kUnknown = -1, kEnded = -2;

  HostBlock(i32 index, i32 count, i64 timeout_ns, const i32* processes = nullptr)
      : index_(index), count_(count), timeout_(timeout_ns), processes_(processes) {}

  i32 index() const { return index_; }
  i32 count() const { return count_; }
  i32 lane() const { return 0; }
  i32 lanes() const { return 1; }
  void sync() const {}
  bool is_odd() const { return false; }
  void publish() const {}
  void acquire() const {}
  Team team(i32) const { return {}; }
  i32 any(i32 missing) const { return missing; }
  u64 share(u64 value) const { return value; }
  template <class T>
  T& keep(T& own) const {
    return own;
  }

  void copy(void* to, const void* from, i64 bytes, const Team&) const {
    if (bytes > 0 && to != from) std::memcpy(to, from, std::size_t(bytes));
  }
  void fill(void* to, u8 value, i64 bytes) const {
    if (bytes > 0) std::memset(to, value, std::size_t(bytes));
  }
  u64 exchange(u64* word, u64 value) const { return __atomic_exchange_n(word, value, __ATOMIC_RELAXED); }
  void store(u32* word, u32 value) const { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  u32 load(const u32* word) const { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

  bool has_ended(i32 rank) const {
    if (processes_ == nullptr || processes_[rank] == kUnknown) return false;
    if (processes_[rank] == kEnded) return true;
    pollfd process{processes_[rank], POLLIN, 0};
    return poll(&process, 1, 0) == 1 && (process.revents & POLLIN) != 0;
  }

  // Whether `flag` of rank `from` reached `wanted`, which counts modulo 2^32, before the timeout, the
  // end of the rank's process or a refusal. It spins, then yields, then sleeps: most peers arrive
  // within microseconds, and a core that waits longer belongs to a rank that computes.
  bool await(i32 from, u32* flag, u32 wanted, const u32* refusal) const {
    i64 deadline = 0;
    for (i64 tries = 0; i32(load(flag) - wanted) < 0; ++tries) {
      if (tries < kSpins) {
        pause();
        continue;
      }
      if (load(refusal) != 0) return false;
      if (tries < kSpins + kYields) {
        sched_yield();
        continue;
      }
      const i64 time = now();
      if (deadline == 0) deadline = time + timeout_;
      if (time >= deadline) return false;
      // No rank is woken by a refusal or the end of a process, so each looks for them now and then. The
      // flag is read again, because the peer may have set it just before it ended.
      if (!sleep(flag, wanted) && has_ended(from)) return i32(load(flag) - wanted) >= 0;
    }
    return true;
  }

  // Wakes the rank that sleeps for `flag`, which was stored before, if it does.
  void wake(u32* flag) const {
    if (__atomic_load_n(flag + 1, __ATOMIC_RELAXED) != 0) futex(flag, FUTEX_WAKE, 1, nullptr);
  }

  // Between the store of a flag and the load of its sleeper, and the other way round: one of both
  // ranks sees what the other one has stored. The thread sanitizer does not know fences, and needs
  // none of these: data is ordered by the flags.
  void fence() const {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Wtsan"
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#pragma GCC diagnostic pop
  }

 private:
  // Few: a rank that yields on a core that others use takes their time, again and again.
  static constexpr i64 kSpins = 256, kYields = 64;
  static constexpr i64 kNap = 2'000'000;  // nanoseconds

  // Sleeps until the flag is stored; false if it was not for some time. The word behind the flag,
  // in its line, is 1 while a rank sleeps.
  bool sleep(u32* flag, u32 wanted) const {
    __atomic_store_n(flag + 1, 1u, __ATOMIC_RELAXED);
    fence();
    const u32 seen = load(flag);
    bool woken = true;
    if (i32(seen - wanted) < 0) {
      const timespec nap{0, kNap};
      // Any other error than these is a system that does not let it sleep.
      woken = futex(flag, FUTEX_WAIT, seen, &nap) == 0 || errno == EAGAIN || errno == EINTR;
    }
    __atomic_store_n(flag + 1, 0u, __ATOMIC_RELAXED);
    return woken;
  }

  // Of memory that processes share. The system sleeps only while `word` is `value`.
  static i64 futex(u32* word, int what, u32 value, const timespec* timeout) {
    return syscall(SYS_futex, word, what, value, timeout, nullptr, 0);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  static i64 now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return i64(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
  }

  i32 index_, count_;
  i64 timeout_;
  const i32* processes_;
};

}  // namespace meshplan
