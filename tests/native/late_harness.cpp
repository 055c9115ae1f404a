// Ranks that come late, at random calls: what is not an error has to be right. With -DMP_EMULATED in
// the kernels for GPUs, where nothing interrupts a step.
//
//   late_harness late WORLD SEED SCHEDULES [TIMEOUT_US]
//                              each (rank, block) a thread, calls queued one behind the other; prints
//                              what is wrong
//   late_harness interrupted WORLD
//                              a peer gives up in the middle of a step: each fate
//   late_harness refused WORLD calls after a failure: what they change in the regions
//   late_harness overlapping   two calls of one rank at once: the fates of both
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "peer_world.h"

namespace {

constexpr std::size_t kCalls = 6;

void nap(i64 microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// A call, what ranks bring to it, and what it has to give.
struct Planned {
  Case call;
  i32 used;  // blocks
  std::vector<std::vector<u8>> in;
  std::vector<u8> expected;

  Planned(std::mt19937& chance, i32 world, bool push)
      : call(random_case(chance, world, push, 3000)), used(1 + i32(chance() % kBlocks)) {
    const i64 numel = call.numel();
    for (i32 r = 0; r < world; ++r) {
      in.emplace_back(std::size_t(numel * call.item()) + 1);
      for (i64 k = 0; k < numel; ++k) random_element(chance, call, in.back().data(), k);
    }
    expected.resize(std::size_t(numel * call.item()) + 1);
    std::vector<float> leaves(std::size_t(world), 0.f);
    for (i64 k = 0; k < numel; ++k) {
      for (std::size_t p = 0; p < leaves.size(); ++p) leaves[p] = raised(call, in[p].data(), k);
      const u32 bits = rounded(call, summed(call, leaves, 0, leaves.size()));
      std::memcpy(expected.data() + k * call.item(), &bits, std::size_t(call.item()));
    }
  }
};

// Looks at the bytes that a block of a call has written, and returns how many are not as they have
// to be: the result's if it is done, else poison.
long wrong_bytes(const Planned& plan, i32 rank, i32 index, const u8* out, bool done) {
  const Case& call = plan.call;
  std::vector<i64> starts{0};
  for (i64 part : call.parts) starts.push_back(starts.back() + part * call.item());
  i64 longest = call.mode == Mode::one_shot ? starts.back() : 0;
  for (std::size_t p = 0; call.mode != Mode::one_shot && p + 1 < starts.size(); ++p) {
    longest = std::max(longest, starts[p + 1] - starts[p]);
  }
  long wrong = 0;
  const i64 piece = call.piece;
  for (i64 step = index; step * piece < longest; step += plan.used) {
    for (std::size_t p = 0; p + 1 < starts.size(); ++p) {
      const bool whole = call.mode == Mode::one_shot, scatter = call.mode == Mode::scatter;
      if ((whole && p > 0) || (scatter && i32(p) != rank)) continue;
      const i64 begin = whole ? 0 : starts[p], end = whole ? starts.back() : starts[p + 1];
      for (i64 i = begin + step * piece; i < std::min(end, begin + (step + 1) * piece); ++i) {
        const u8 wanted = done ? plan.expected[std::size_t(i)] : 0xff;
        wrong += out[scatter ? i - begin : i] != wanted;
      }
    }
  }
  return wrong;
}

struct Found {
  long done = 0, refused = 0;  // blocks of calls
  long wrong = 0;              // of those that are done
  long unpoisoned = 0;         // of those that are not
  long unheard = 0;            // done though the call began after a failure

  void operator+=(const Found& other) {
    done += other.done;
    refused += other.refused;
    wrong += other.wrong;
    unpoisoned += other.unpoisoned;
    unheard += other.unheard;
  }
};

Found one_schedule(i32 world_size, const std::vector<Planned>& plans, u32 seed, i64 timeout_us) {
  const World world(world_size, plans[0].call.push);
  const auto ranks = std::size_t(world_size);
  // Its word of refusal lies in every region.
  std::atomic<bool> failed = false;
  std::vector<Found> found(ranks * kBlocks);
  std::vector<std::unique_ptr<std::barrier<>>> streams;
  std::vector<std::vector<std::vector<u8>>> in(ranks), out(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    streams.push_back(std::make_unique<std::barrier<>>(kBlocks));
    for (const Planned& plan : plans) {
      in[r].push_back(plan.in[r]);
      out[r].emplace_back(plan.in[r].size(), u8(0xcd));
    }
  }
  std::vector<std::thread> threads;
  for (i32 r = 0; r < world_size; ++r) {
    for (i32 b = 0; b < kBlocks; ++b) {
      threads.emplace_back([&, r, b] {
        Found& mine = found[std::size_t(r * kBlocks + b)];
        std::mt19937 late(seed * 977 + u32(r)), uneven(seed * 977 + u32(r * 31 + b + 1000));
        const auto while_folding = [&](At where) {
          if (where == At::fold && uneven() % 32 == 0) nap(i64(uneven() % u32(2 * timeout_us)));
        };
        bool gone = false;
        for (std::size_t i = 0; i < plans.size(); ++i) {
          // All blocks of a rank are late together, as on a stream, and some a little more.
          const i64 rest = late() % u32(3 * world_size) == 0 ? i64(late() % u32(3 * timeout_us)) : 0;
          if (rest > 0) nap(rest);
          if (uneven() % 64 == 0) nap(i64(uneven() % u32(2 * timeout_us)));
          const Planned& plan = plans[i];
          u8* source = in[std::size_t(r)][i].data();
          const bool in_place = plan.call.in_place && plan.call.mode != Mode::scatter;
          u8* target = in_place ? source : out[std::size_t(r)][i].data();
          if (b < plan.used) {
            const bool after = failed.load() || gone;
            interruption = while_folding;
            const Outcome outcome =
                run(world, r, b, plan.used, plan.call, source, target, timeout_us * 1000);
            interruption = nullptr;
            const bool done = outcome.fate == i32(Fate::done);
            if (!done) failed = gone = true;
            (done ? mine.done : mine.refused) += 1;
            const long wrong = wrong_bytes(plan, r, b, target, done);
            (done ? mine.wrong : mine.unpoisoned) += wrong != 0;
            mine.unheard += done && after;
          }
          streams[std::size_t(r)]->arrive_and_wait();  // as a stream does between kernels
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  Found all;
  for (const Found& one : found) all += one;
  return all;
}

int late(i32 world_size, u32 seed, u32 schedules, i64 timeout_us) {
  Found all;
  u32 first_bad = 0;
  std::vector<Planned> plans;
  for (u32 number = 0; number < schedules; ++number) {
    if (number % 16 == 0) {
      std::mt19937 chance(seed + number);
      plans.clear();
      for (std::size_t i = 0; i < kCalls; ++i) plans.emplace_back(chance, world_size, kDevice || number / 16 % 2 == 1);
    }
    const Found found = one_schedule(world_size, plans, seed + number, timeout_us);
    all += found;
    if (first_bad == 0 && found.wrong + found.unpoisoned + found.unheard > 0) first_bad = number + 1;
  }
  std::printf("world %d seed %u: %u schedules, %ld done, %ld refused; %ld wrong, %ld unpoisoned, "
              "%ld done after a failure, first in schedule %d\n",
              world_size, seed, schedules, all.done, all.refused, all.wrong, all.unpoisoned, all.unheard,
              i32(first_bad) - 1);
  return all.wrong + all.unpoisoned + all.unheard != 0;
}

// A peer of rank 0 gives up in the middle of rank 0's only step, after its n-th fold or copy.
void interrupt(i32 world_size, Mode mode, bool push, At where, i32 at) {
  const World world(world_size, push);
  Case call{mode, false, false, true, push, std::vector<i64>(std::size_t(world_size), 20)};
  std::vector<Outcome> outcomes(static_cast<std::size_t>(world_size));
  std::vector<std::vector<float>> tensors(std::size_t(world_size), std::vector<float>(std::size_t(call.numel()), 1.f));
  std::vector<std::thread> threads;
  i32 seen = 0;
  for (i32 r = 0; r < world_size; ++r) {
    threads.emplace_back([&, r] {
      u8* data = reinterpret_cast<u8*>(tensors[std::size_t(r)].data());
      if (r == 0) {
        interruption = [&](At what) {
          if (what != where || seen++ != at) return;
          for (i32 p = 0; p < world_size; ++p) {
            u32* refusal = reinterpret_cast<u32*>(world.views[0].region[p] + world.map.refusal());
            __atomic_store_n(refusal, refusal_word(world_size - 1, 0, 0, false), __ATOMIC_RELEASE);
          }
        };
      }
      outcomes[std::size_t(r)] = run(world, r, 0, 1, call, data, data);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const i64 bytes = mode == Mode::scatter ? 80 : call.numel() * 4;
  const u8* out = reinterpret_cast<const u8*>(tensors[0].data());
  const bool poisoned = std::all_of(out, out + bytes, [](u8 byte) { return byte == 0xff; });
  if (seen > at) {
    std::printf("mode %d push %d %s %d: fate %d rank %d, %s\n", i32(mode), push,
                where == At::fold ? "fold" : "copy", at, outcomes[0].fate, outcomes[0].rank,
                poisoned ? "poisoned" : "NOT POISONED");
  }
}

int interrupted(i32 world_size) {
  for (const bool push : {false, true}) {
    for (const Mode mode : {Mode::one_shot, Mode::two_shot, Mode::scatter}) {
      interrupt(world_size, mode, push, At::fold, 0);
      for (i32 at = 0; at < 4 * world_size; ++at) interrupt(world_size, mode, push, At::copy, at);
    }
  }
  return 0;
}

// Calls that begin after a failure: how many bytes of all regions they change.
int refused(i32 world_size) {
  for (const bool push : {false, true}) {
    if (kDevice && !push) continue;
    for (const Mode mode : {Mode::one_shot, Mode::two_shot, Mode::scatter}) {
      const World world(world_size, push);
      const Case call{mode, false, false, true, push, std::vector<i64>(std::size_t(world_size), 200)};
      // Rank 0 comes alone, and gives up.
      std::vector<float> alone(std::size_t(call.numel()), 1.f), none(alone);
      for (i32 b = 0; b < kBlocks; ++b) {
        run(world, 0, b, kBlocks, call, reinterpret_cast<u8*>(alone.data()),
            reinterpret_cast<u8*>(none.data()), 1'000'000);
      }
      std::vector<std::vector<u8>> before;
      for (i32 p = 0; p < world_size; ++p) {
        const u8* region = world.views[0].region[p];
        before.emplace_back(region, region + world.map.bytes());
      }
      i32 refused = 0;
      for (i32 r = 0; r < world_size; ++r) {
        std::vector<float> in(std::size_t(call.numel()), 1.f), out(in);
        for (i32 b = 0; b < kBlocks; ++b) {
          const Outcome found = run(world, r, b, kBlocks, call, reinterpret_cast<u8*>(in.data()),
                                    reinterpret_cast<u8*>(out.data()));
          refused += found.fate == i32(Fate::refused);
        }
      }
      long changed = 0;
      for (i32 p = 0; p < world_size; ++p) {
        const u8* region = world.views[0].region[p];
        for (std::size_t i = 0; i < before[std::size_t(p)].size(); ++i) {
          changed += region[i] != before[std::size_t(p)][i];
        }
      }
      std::printf("mode %d push %d: %d refused, %ld bytes changed\n", i32(mode), push, refused, changed);
    }
  }
  return 0;
}

int overlapping() {
  const World world(3, true);
  const Case call{Mode::one_shot, false, false, false, true, {20}};
  const std::vector<float> in(20, 1.f);
  std::vector<std::vector<float>> out(4, in);
  Outcome found[4];
  const auto one = [&](std::size_t number, i32 rank) {
    found[number] = run(world, rank, 0, 1, call, reinterpret_cast<const u8*>(in.data()),
                        reinterpret_cast<u8*>(out[number].data()));
  };
  std::thread first(one, 0, 0);
  // It has stored its flags, and its peers are not there.
  const auto* flag = reinterpret_cast<const u32*>(world.views[0].region[1] + world.map.flag(0, 0));
  while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) == kNearWrap) nap(100);
  one(1, 0);
  std::thread second(one, 2, 1), third(one, 3, 2);
  for (std::thread* thread : {&first, &second, &third}) thread->join();
  for (std::size_t i = 0; i < 4; ++i) {
    u32 bits;
    std::memcpy(&bits, out[i].data(), 4);
    std::printf("call %zu: fate %d rank %d phase %d, %s\n", i, found[i].fate, found[i].rank, found[i].phase,
                bits == ~0u ? "poisoned" : "NOT POISONED");
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::string what = count > 1 ? words[1] : "";
  const auto number = [&](int i, i64 otherwise) { return count > i ? std::atoll(words[i]) : otherwise; };
  const i32 world = i32(number(2, 2));
  if (what == "late") return late(world, u32(number(3, 1)), u32(number(4, 100)), number(5, 2000));
  if (what == "interrupted") return interrupted(world);
  if (what == "refused") return refused(world);
  if (what == "overlapping") return overlapping();
  return 2;
}
