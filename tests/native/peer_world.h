// Ranks of the peer protocol in one process, and a plain reading of the contract. With -DMP_EMULATED
// they run the kernels of csrc/device.cu in several lanes.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "cpu.h"
#include "element.h"
#include "host.h"
#include "order.h"
#if defined(MP_EMULATED)
// Only two kernels are run here.
#define MP_PEER(name, D, Acc, Round, Op)
#define MP_FOLD(name, In, Acc, Round, Out, Op)
#include "device.cu"
#endif

using namespace meshplan;

#if defined(MP_EMULATED)
constexpr bool kDevice = true;
#else
constexpr bool kDevice = false;
#endif
constexpr i32 kBlocks = 3;
constexpr u32 kTile = 512;
constexpr u32 kNearWrap = 0xfffffff0u;

// What a test does in the middle of a step on this thread: after a fold, or after a copy.
enum class At { fold, copy };
inline thread_local std::function<void(At)> interruption;

template <bool push>
struct Block : HostBlock {
  static constexpr bool kPush = push;
  using HostBlock::HostBlock;
  void copy(void* to, const void* from, i64 bytes, const Team& team) const {
    HostBlock::copy(to, from, bytes, team);
    if (interruption) interruption(At::copy);
  }
};

struct Case {
  Mode mode;
  bool half, rank_order, in_place, push;
  std::vector<i64> parts;  // elements; one for one_shot
  u32 piece = kTile;
  i64 numel() const {
    i64 sum = 0;
    for (i64 part : parts) sum += part;
    return sum;
  }
  i32 item() const { return half ? 2 : 4; }
  Order order() const { return rank_order ? Order::rank : Order::tree; }
};

// The contract, read once more: float32, or bfloat16 summed in float32 and rounded once.
inline float raised(const Case& call, const u8* at, i64 i) {
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

inline float summed(const Case& call, const std::vector<float>& x, std::size_t first, std::size_t count) {
  if (count == 1) return x[first];
  std::size_t left = count - 1;
  if (!call.rank_order) {
    left = 1;
    while (2 * left < count) left *= 2;
  }
  return summed(call, x, first, left) + summed(call, x, first + left, count - left);
}

inline u32 rounded(const Case& call, float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  if (!call.half) return std::isnan(x) ? 0x7fc00000u : bits;
  if (std::isnan(x)) return 0x7fc0u;
  const u32 tail = bits & 0xffffu;
  bits >>= 16;
  return tail > 0x8000u || (tail == 0x8000u && (bits & 1u)) ? bits + 1 : bits;
}

inline void random_element(std::mt19937& chance, const Case& call, u8* at, i64 i) {
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

// One axis in batches of 8 leaves, of which each is added as a counter of them carries.
inline void plan_axis(u8* plan, i32 world) {
  for (i32 first = 0; first < world; first += kBatch) {
    const u32 batch = u32(first / kBatch);
    const i32 left = world - first;
    const i32 nodes = left <= kBatch ? __builtin_popcount(batch) : __builtin_ctz(batch + 1);
    plan[first] = u8((left < kBatch ? left : kBatch) + 16 * nodes);
  }
}

struct World {
  explicit World(i32 world, bool push) : size(world), map{world, kBlocks, kTile, push},
                                         views(std::size_t(world)) {
    for (i32 r = 0; r < world; ++r) {
      u8* region = static_cast<u8*>(std::aligned_alloc(kLine, map.bytes()));
      std::memset(region, 0xee, map.bytes());
      std::memset(region + map.refusal(), 0, kLine);
      for (i32 b = 0; b < kBlocks; ++b) {
        std::memset(region + map.generation(b), 0, kLine);
        std::memcpy(region + map.generation(b), &kNearWrap, 4);
        for (i32 p = 0; p < world; ++p) {
          std::memcpy(region + map.flag(b, p), &kNearWrap, 4);
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
  Map map;
  std::vector<Peers> views;
};

#if defined(MP_EMULATED)

constexpr i32 kLanes = 3;

inline Outcome run(const World& world, i32 rank, i32 index, i32 count, const Case& call, const u8* in,
                   u8* out, i64 timeout_ns = 20'000'000'000) {
  DeviceCall words = {};
  words.timeout_ns = timeout_ns;
  for (std::size_t p = 0; p < call.parts.size(); ++p) {
    words.starts[p + 1] = words.starts[p] + call.parts[p] * call.item();
  }
  if (call.mode == Mode::one_shot) words.starts[0] = call.numel() * call.item();
  words.mode = i32(call.mode);
  words.item = call.item();
  words.signature.words[0] = u64(call.numel());
  words.signature.words[1] = u64(call.mode);
  words.piece = call.piece;
  words.chain = call.rank_order;
  plan_axis(words.plan, world.size);
  alignas(Failures) u8 room[sizeof(Failures) + kBlocks * sizeof(Failure)] = {};
  auto* failures = reinterpret_cast<Failures*>(room);
  const auto kernel = call.half ? peer_reduce<Bfloat, float, float, Sum> : peer_reduce<float, float, float, Sum>;
  gpu::Lanes(index, count, kLanes, [&] {
    kernel(world.views[std::size_t(rank)], words, in, out, failures, gpu::block(), gpu::blocks());
  }).run();
  return failures->any == 0 ? Outcome{} : failures->of[index].outcome;
}

#else

template <bool push>
Outcome run_block(const World& world, i32 rank, i32 index, i32 count, const Case& call, const u8* in,
                  u8* out, i64 timeout_ns) {
  std::vector<Instruction> room(std::size_t(2 * world.size));
  Schedule schedule{room.data(), 0, 0, 0, 0};
  list_steps(schedule, call.order(), &world.size, 1);
  const Reduction how{call.half ? 1 : 0, 0, 0, 0, false, Part::whole, 0};
  std::vector<i64> starts{0};
  for (i64 part : call.parts) starts.push_back(starts.back() + part * call.item());
  if (call.mode == Mode::one_shot) starts = {call.numel() * call.item()};
  Message message{in, out, starts.data(), call.mode, call.item(), {}, call.piece};
  message.signature.words[0] = u64(call.numel());
  message.signature.words[1] = u64(call.mode);
  auto fold = [&](const Results& into, const Leaves& leaves, i64 numel, Block<push>& lanes) {
    if (push) {
      // As a device folds.
      u8 plan[kMaxPeers];
      plan_axis(plan, world.size);
      const Elements elements{plan, world.size, call.rank_order, 0};
      call.half ? fold_elements<Bfloat, float, float, Sum>(elements, into, leaves, numel, lanes)
                : fold_elements<float, float, float, Sum>(elements, into, leaves, numel, lanes);
    } else {
      const void* from[kMaxPeers];
      for (i32 r = 0; r < world.size; ++r) from[r] = leaves.leaf(r);
      reduce(into.out, from, numel, schedule, how);
    }
    if (interruption) interruption(At::fold);
  };
  Block<push> block(index, count, timeout_ns);
  return Call<Block<push>, decltype(fold)>(world.views[std::size_t(rank)], message, block, fold).run();
}

inline Outcome run(const World& world, i32 rank, i32 index, i32 count, const Case& call, const u8* in,
            u8* out, i64 timeout_ns = 20'000'000'000) {
  return call.push ? run_block<true>(world, rank, index, count, call, in, out, timeout_ns)
                   : run_block<false>(world, rank, index, count, call, in, out, timeout_ns);
}

#endif

// At most `most` elements, and often none at all.
inline Case random_case(std::mt19937& chance, i32 world, bool push, u32 most = 6000) {
  Case call{Mode(chance() % 3), chance() % 2 == 0, chance() % 2 == 0, chance() % 2 == 0, push, {}};
  call.piece = u32(kLine) * (1 + chance() % (kTile / u32(kLine)));
  const i64 numel = chance() % 8 == 0 ? 0 : i64(chance() % most);
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
