// Every (rank, block) of the peer protocol as a thread, against a plain reading of the contract. With
// -DMP_EMULATED, each block is one of the kernels for GPUs, with several lanes.
//
//   peer_harness random WORLD SEED [CALLS]
//                                     random calls, flags that wrap; prints the wrong elements
//   peer_harness rounds WORLD         how many rounds each block takes, by the generations it leaves
//   peer_harness missing WORLD        the last rank leaves out a call: who is named, by whom
//   peer_harness differs WORLD        the last rank brings another size: the same
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "peer_world.h"

namespace {

int random_calls(i32 world_size, u32 seed, std::size_t all_calls) {
  long wrong = 0, failed = 0;
  for (bool push : {false, true}) {
    if (kDevice && !push) continue;
    const World world(world_size, push);
    std::mt19937 chance(seed + push);
    const auto ranks = std::size_t(world_size);
    std::vector<Case> calls;
    std::vector<std::vector<std::vector<u8>>> in(all_calls), out(all_calls);
    std::vector<int> used;  // blocks, which may change from call to call
    for (std::size_t i = 0; i < all_calls; ++i) {
      calls.push_back(random_case(chance, world_size, push));
      used.push_back(1 + int(chance() % kBlocks));
      const Case& call = calls[i];
      in[i].resize(ranks);
      out[i].resize(ranks);
      for (std::size_t r = 0; r < ranks; ++r) {
        in[i][r].resize(std::size_t(call.numel() * call.item()) + 1);
        for (i64 k = 0; k < call.numel(); ++k) random_element(chance, call, in[i][r].data(), k);
        out[i][r].assign(in[i][r].size(), 0xcd);
      }
    }
    std::vector<std::unique_ptr<std::barrier<>>> streams;
    std::vector<std::thread> threads;
    std::vector<long> bad(ranks * kBlocks);
    const auto before = in;
    for (i32 r = 0; r < world_size; ++r) streams.push_back(std::make_unique<std::barrier<>>(kBlocks));
    for (i32 r = 0; r < world_size; ++r) {
      for (i32 b = 0; b < kBlocks; ++b) {
        threads.emplace_back([&, r, b] {
          std::mt19937 skew(seed * 977 + u32(r * 31 + b));
          for (std::size_t i = 0; i < all_calls; ++i) {
            for (u32 naps = skew() % 3 ? 0 : skew() % 20; naps > 0; --naps) std::this_thread::yield();
            const Case& call = calls[i];
            u8* source = in[i][std::size_t(r)].data();
            u8* target = call.in_place && call.mode != Mode::scatter ? source : out[i][std::size_t(r)].data();
            if (b < used[i]) {
              bad[std::size_t(r * kBlocks + b)] +=
                  run(world, r, b, used[i], call, source, target).fate != 0;
            }
            streams[std::size_t(r)]->arrive_and_wait();  // as a stream does between kernels
          }
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
    for (long count : bad) failed += count;
    for (std::size_t i = 0; i < all_calls; ++i) {
      const Case& call = calls[i];
      i64 first = 0;
      for (std::size_t r = 0; r < ranks; ++r) {
        const bool part = call.mode == Mode::scatter;
        const auto& found = call.in_place && !part ? in[i][r] : out[i][r];
        const i64 count = part ? call.parts[r] : call.numel();
        for (i64 k = 0; k < count; ++k) {
          std::vector<float> leaves;
          for (std::size_t p = 0; p < ranks; ++p) leaves.push_back(raised(call, before[i][p].data(), first + k));
          const u32 wanted = rounded(call, summed(call, leaves, 0, ranks));
          u32 bits = 0;
          std::memcpy(&bits, found.data() + k * call.item(), std::size_t(call.item()));
          wrong += bits != wanted;
        }
        if (part) first += count;
      }
    }
  }
  std::printf("world %d: %zu calls pulled and pushed, %ld failed, %ld elements wrong\n", world_size,
              all_calls, failed, wrong);
  return wrong + failed != 0;
}

// A call of `pieces` for each block: the rounds of each block of rank 0.
std::string rounds_of(i32 world_size, Mode mode, bool push, i32 pieces) {
  const World world(world_size, push);
  Case call{mode, false, false, false, push, {}};
  call.parts.assign(mode == Mode::one_shot ? 1 : std::size_t(world_size), i64(kTile) / 4 * kBlocks * pieces);
  std::vector<std::thread> threads;
  for (i32 r = 0; r < world_size; ++r) {
    for (i32 b = 0; b < kBlocks; ++b) {
      threads.emplace_back([&, r, b] {
        std::vector<u8> in(std::size_t(call.numel()) * 4), out(in.size());
        run(world, r, b, kBlocks, call, in.data(), out.data());
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::string found;
  for (i32 b = 0; b < kBlocks; ++b) {
    u32 generation;
    std::memcpy(&generation, world.views[0].region[0] + world.map.generation(b), 4);
    found += " " + std::to_string(generation - kNearWrap);
  }
  return found;
}

int rounds(i32 world_size) {
  const auto print = [&](const char* name, Mode mode, i32 pieces) {
    std::printf("%s pulled:%s rounds, pushed:%s\n", name, rounds_of(world_size, mode, false, pieces).c_str(),
                rounds_of(world_size, mode, true, pieces).c_str());
  };
  print("one_shot", Mode::one_shot, 4);
  print("two_shot", Mode::two_shot, 4);
  print("scatter", Mode::scatter, 4);
  print("two_shot of one piece", Mode::two_shot, 1);
  return 0;
}

int fault(const std::string& kind, i32 world_size) {
  const World world(world_size, false);
  const i32 odd = world_size - 1;
  std::vector<std::string> lines(std::size_t(world_size) * kBlocks);
  std::vector<std::thread> threads;
  for (i32 r = 0; r < world_size; ++r) {
    for (i32 b = 0; b < kBlocks; ++b) {
      threads.emplace_back([&, r, b] {
        Case call{Mode::two_shot, false, false, false, false, {}};
        const i64 each = kind == "differs" && r == odd ? 40 : 400;
        call.parts.assign(std::size_t(world_size), each);
        std::vector<u8> in(std::size_t(call.numel()) * 4), out(in.size());
        if (kind == "missing" && r == odd) return;
        const Outcome found = run(world, r, b, kBlocks, call, in.data(), out.data(), 300'000'000);
        char text[80];
        std::snprintf(text, sizeof text, "rank %d block %d: fate %d rank %d", r, b, found.fate, found.rank);
        lines[std::size_t(r * kBlocks + b)] = text;
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& line : lines) {
    if (!line.empty()) std::puts(line.c_str());
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  const std::string what = words[1];
  const i32 world = std::atoi(words[2]);
  if (what == "random") {
    const u32 seed = count > 3 ? u32(std::atoi(words[3])) : 1;
    return random_calls(world, seed, count > 4 ? std::size_t(std::atoi(words[4])) : 60);
  }
  if (what == "rounds") return rounds(world);
  return fault(what, world);
}
