// Every (rank, block) of the peer protocol as a thread, against a plain reading of the contract.
//
//   peer_harness random WORLD SEED [CALLS]
//                                     random calls, flags that wrap; prints the wrong elements
//   peer_harness missing WORLD        the last rank leaves out a call: who is named, by whom
//   peer_harness differs WORLD        the last rank brings another size: the same
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu.h"
#include "element.h"
#include "host.h"

using namespace meshplan;

namespace {

constexpr i32 kBlocks = 3;
constexpr u32 kTile = 512;
constexpr u32 kNearWrap = 0xfffffff0u;

template <bool push>
struct Block : HostBlock {
  static constexpr bool kPush = push;
  using HostBlock::HostBlock;
};

struct Case {
  Mode mode;
  bool half, rank_order, in_place, push;
  std::vector<i64> parts;  // elements; one for one_shot
  i64 numel() const {
    i64 sum = 0;
    for (i64 part : parts) sum += part;
    return sum;
  }
  i32 item() const { return half ? 2 : 4; }
};

// The contract, read once more: float32, or bfloat16 summed in float32 and rounded once.
float raised(const Case& call, const u8* at, i64 i) {
  if (!call.half) {
    float x;
    std::memcpy(&x, at + 4 * i, 4);
    return x;
  }
  u16 bits;
  std::memcpy(&bits, at + 2 * i, 2);
  const u32 wide = u32(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

float summed(const Case& call, const std::vector<float>& x, std::size_t first, std::size_t count) {
  if (count == 1) return x[first];
  std::size_t left = count - 1;
  if (!call.rank_order) {
    left = 1;
    while (2 * left < count) left *= 2;
  }
  return summed(call, x, first, left) + summed(call, x, first + left, count - left);
}

u32 rounded(const Case& call, float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  if (!call.half) return std::isnan(x) ? 0x7fc00000u : bits;
  if (std::isnan(x)) return 0x7fc0u;
  const u32 tail = bits & 0xffffu;
  bits >>= 16;
  return tail > 0x8000u || (tail == 0x8000u && (bits & 1u)) ? bits + 1 : bits;
}

void random_element(std::mt19937& chance, const Case& call, u8* at, i64 i) {
  float x = std::ldexp(float(i32(chance() % 2001)) - 1000.f, i32(chance() % 24) - 12);
  const u32 kind = chance() % 64;
  if (kind < 4) x = -0.0f;
  if (kind == 5) x = 1e20f;
  if (kind == 6) x = -1e20f;
  u32 bits;
  std::memcpy(&bits, &x, 4);
  if (kind == 7) bits = 0xff812345u;  // a NaN with a payload
  if (!call.half) {
    std::memcpy(at + 4 * i, &bits, 4);
  } else {
    const u16 upper = u16(bits >> 16);
    std::memcpy(at + 2 * i, &upper, 2);
  }
}

struct World {
  explicit World(i32 world, bool push) : size(world), views(std::size_t(world)) {
    const Map map{world, kBlocks, kTile, push};
    for (i32 r = 0; r < world; ++r) {
      u8* region = static_cast<u8*>(std::aligned_alloc(kLine, map.bytes()));
      std::memset(region, 0xee, map.bytes());
      std::memset(region + map.refusal(), 0, kLine);
      for (i32 b = 0; b < kBlocks; ++b) {
        std::memcpy(region + map.generation(b), &kNearWrap, 4);
        for (i32 p = 0; p < world; ++p) {
          std::memcpy(region + map.flag(0, b, p), &kNearWrap, 4);
          std::memcpy(region + map.flag(1, b, p), &kNearWrap, 4);
        }
      }
      for (Peers& view : views) view.region[r] = region;
    }
    for (i32 r = 0; r < world; ++r) {
      views[std::size_t(r)].world = world;
      views[std::size_t(r)].rank = r;
      views[std::size_t(r)].blocks = kBlocks;
      views[std::size_t(r)].tile = kTile;
    }
  }
  ~World() {
    for (i32 r = 0; r < size; ++r) std::free(views[0].region[r]);
  }
  i32 size;
  std::vector<Peers> views;
};

template <bool push>
Outcome run_block(const World& world, i32 rank, i32 index, i32 count, const Case& call, const u8* in,
                  u8* out, i64 timeout_ns) {
  std::vector<Instruction> room(std::size_t(2 * world.size));
  Schedule schedule{room.data(), 0, 0, 0};
  if (call.rank_order) {
    fold(schedule, world.size);
  } else {
    tree(schedule, &world.size, 1, 0, world.size);
  }
  const Reduction how{call.half ? 1 : 0, 0, call.rank_order, 0, 0, Part::whole, 0};
  std::vector<i64> starts{0};
  for (i64 part : call.parts) starts.push_back(starts.back() + part * call.item());
  if (call.mode == Mode::one_shot) starts = {call.numel() * call.item()};
  Message message{in, out, starts.data(), call.mode, call.item(), {}};
  message.signature.words[0] = u64(call.numel());
  message.signature.words[1] = u64(call.mode);
  auto fold = [&](u8* to, const Leaves& leaves, i64 numel, Block<push>& lanes) {
    if (push) {
      // As a device folds.
      const Elements elements{schedule.steps, schedule.count, world.size, call.rank_order, true, 0};
      call.half ? fold_elements<Bfloat, float, float, Sum>(elements, to, leaves, numel, lanes)
                : fold_elements<float, float, float, Sum>(elements, to, leaves, numel, lanes);
      return;
    }
    const void* from[kMaxPeers];
    for (i32 r = 0; r < world.size; ++r) from[r] = leaves.leaf(r);
    reduce(to, from, numel, schedule, how);
  };
  Block<push> block(index, count, timeout_ns);
  return Call<Block<push>, decltype(fold)>(world.views[std::size_t(rank)], message, block, fold).run();
}

Outcome run(const World& world, i32 rank, i32 index, i32 count, const Case& call, const u8* in,
            u8* out, i64 timeout_ns = 20'000'000'000) {
  return call.push ? run_block<true>(world, rank, index, count, call, in, out, timeout_ns)
                   : run_block<false>(world, rank, index, count, call, in, out, timeout_ns);
}

Case random_case(std::mt19937& chance, i32 world, bool push) {
  Case call{Mode(chance() % 3), chance() % 2 == 0, chance() % 2 == 0, chance() % 2 == 0, push, {}};
  const i64 numel = chance() % 8 == 0 ? 0 : i64(chance() % 6000);
  if (call.mode == Mode::scatter) {
    for (i32 r = 0; r < world; ++r) call.parts.push_back(i64(chance() % u32(numel / world + 1)));
  } else {
    const i64 width = (numel + world - 1) / world;
    for (i32 r = 0; r < world; ++r) {
      const i64 left = numel - width * r;
      call.parts.push_back(left < 0 ? 0 : left < width ? left : width);
    }
  }
  return call;
}

int random_calls(i32 world_size, u32 seed, std::size_t all_calls) {
  long wrong = 0, failed = 0;
  for (bool push : {false, true}) {
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
  return fault(what, world);
}
