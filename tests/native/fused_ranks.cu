// All ranks of a group in one launch on one GPU: block b belongs to rank b / blocks.
//
//   fused_ranks check       random calls against the library for CPUs, bit for bit
//   fused_ranks time        the kernels beside a plain copy of as many bytes, one JSON line each
//
// A cooperative launch, so that all ranks run at once also where a tool serialises launches. What is
// timed has the GPU's own memory in place of links: barriers and instructions, no bandwidth of links.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu.h"
#include "order.h"

// Of the kernels below only: all others would take minutes to compile.
#define MP_PEER(name, D, Acc, Round, Op)
#define MP_FOLD(name, In, Acc, Round, Out, Op)
#include "device.cu"

using namespace meshplan;

#define MUST(call)                                                                             \
  do {                                                                                         \
    const cudaError_t code = (call);                                                           \
    if (code != cudaSuccess) {                                                                 \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code));                       \
      std::exit(2);                                                                            \
    }                                                                                          \
  } while (0)

namespace {

constexpr i32 kMost = 8;
constexpr i64 kSecond = 1'000'000'000;
constexpr i32 kStaged = 192 << 10;  // as meshplan/kernel/_device_peers.py

struct Ranks {
  Peers peers[kMost];
  const u8* in[kMost];
  u8* out[kMost];
  Failures* failures[kMost];
};

template <class D>
__global__ __launch_bounds__(512, 1) void fused(const Ranks* ranks, const DeviceCall* call, i32 blocks) {
  const i32 rank = gpu::block() / blocks;
  peer_reduce<D, float, float, Sum>(ranks->peers[rank], *call, ranks->in[rank], ranks->out[rank],
                                    ranks->failures[rank], gpu::block() % blocks, blocks);
}

// Zeroed; it ends with this object.
class DeviceMemory {
 public:
  ~DeviceMemory() {
    for (void* one : held_) MUST(cudaFree(one));
  }

  template <class T>
  T* add(std::size_t bytes) {
    void* address = nullptr;
    MUST(cudaMalloc(&address, bytes));
    held_.push_back(address);
    MUST(cudaMemset(address, 0, bytes));
    return static_cast<T*>(address);
  }

 private:
  std::vector<void*> held_;
};

class World {
 public:
  World(i32 world, i32 blocks, u32 tile, i64 most) : world_(world), blocks_(blocks), tile_(tile) {
    const Map map{world, blocks, tile, true};
    const u32 near_wrap = 0xfffffffau;
    for (i32 r = 0; r < world; ++r) {
      u8* region = memory_.add<u8>(map.bytes());
      for (i32 b = 0; b < blocks; ++b) {
        MUST(cudaMemcpy(region + map.generation(b), &near_wrap, 4, cudaMemcpyDefault));
        for (i32 p = 0; p < world; ++p) {
          MUST(cudaMemcpy(region + map.flag(b, p), &near_wrap, 4, cudaMemcpyDefault));
        }
      }
      for (i32 of = 0; of < world; ++of) ranks_.peers[of].region[r] = region;
      in_.push_back(memory_.add<u8>(std::size_t(most)));
      out_.push_back(memory_.add<u8>(std::size_t(most)));
      ranks_.failures[r] = memory_.add<Failures>(sizeof(Failures) + std::size_t(blocks) * sizeof(Failure));
    }
    for (i32 r = 0; r < world; ++r) {
      ranks_.peers[r].world = world;
      ranks_.peers[r].rank = r;
      ranks_.peers[r].blocks = blocks;
      ranks_.peers[r].tile = tile;
    }
    where_ = memory_.add<Ranks>(sizeof(Ranks));
    call_ = memory_.add<DeviceCall>(sizeof(DeviceCall));
  }

  // starts: as Message has them; offset: bytes by which every tensor is off 16.
  template <class D>
  void set(Mode mode, const std::vector<i64>& starts, bool rank_order, i64 offset) {
    DeviceCall call = {};
    call.timeout_ns = 10 * kSecond;
    std::copy(starts.begin(), starts.end(), call.starts);
    call.signature.words[0] = u64(starts.back());
    call.mode = i32(mode);
    call.item = i32(sizeof(D));
    call.piece = piece_of(starts);
    // Of at most 8 ranks, so that one batch has all leaves.
    call.chain = rank_order;
    call.plan[0] = u8(world_);
    MUST(cudaMemcpy(call_, &call, sizeof(call), cudaMemcpyDefault));
    for (i32 r = 0; r < world_; ++r) {
      ranks_.in[r] = in_[std::size_t(r)] + offset;
      ranks_.out[r] = out_[std::size_t(r)] + offset;
    }
    MUST(cudaMemcpy(where_, &ranks_, sizeof(ranks_), cudaMemcpyDefault));
  }

  template <class D>
  void launch() {
    void* arguments[] = {&where_, &call_, &blocks_};
    MUST(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(fused<D>), dim3(unsigned(world_ * blocks_)),
                                     dim3(512), arguments, 0, nullptr));
  }

  bool failed() const {
    for (i32 r = 0; r < world_; ++r) {
      u32 any = 0;
      MUST(cudaMemcpy(&any, ranks_.failures[r], 4, cudaMemcpyDefault));
      if (any != 0) return true;
    }
    return false;
  }

  u8* in(i32 rank) const { return const_cast<u8*>(ranks_.in[rank]); }
  u8* out(i32 rank) const { return ranks_.out[rank]; }

 private:
  // As _device_peers.py shares a message out.
  u32 piece_of(const std::vector<i64>& starts) const {
    i64 longest = starts[0];
    for (std::size_t p = 0; p + 1 < starts.size(); ++p) longest = std::max(longest, starts[p + 1] - starts[p]);
    const i64 rounds = (longest + i64(blocks_) * tile_ - 1) / (i64(blocks_) * tile_);
    const i64 even = (longest + rounds * blocks_ - 1) / std::max<i64>(rounds * blocks_, 1);
    return u32(std::min<i64>(std::max<i64>((even + 63) / 64 * 64, 1024), tile_));
  }

  i32 world_, blocks_;
  u32 tile_;
  DeviceMemory memory_;
  Ranks ranks_ = {};
  std::vector<u8*> in_, out_;
  Ranks* where_;
  DeviceCall* call_;
};

template <class D>
long wrong_elements(i32 world, std::mt19937& chance) {
  constexpr i64 kNumels[] = {0, 1, 3, 7, 8, 15, 16, 17, 4095, 4097, 100'003};
  constexpr i32 dtype = sizeof(D) == 4 ? 0 : 1;
  World ranks(world, 4, 1024, 100'003 * 4 + 64);
  long wrong = 0;
  for (const i64 numel : kNumels) {
    for (i32 variant = 0; variant < 12; ++variant) {
      const Mode mode = Mode(variant % 3);
      const bool rank_order = variant / 3 % 2 == 1;
      const i64 item = sizeof(D), offset = variant / 6 * item;
      std::vector<i64> starts{numel * item};
      if (mode != Mode::one_shot) {
        starts.clear();
        for (i32 p = 0; p <= world; ++p) starts.push_back(numel * p / world * item);
      }
      ranks.set<D>(mode, starts, rank_order, offset);
      std::vector<std::vector<u8>> leaves;
      for (i32 r = 0; r < world; ++r) {
        leaves.emplace_back(std::size_t(numel * item));
        for (u8& byte : leaves.back()) byte = u8(chance());
        MUST(cudaMemcpy(ranks.in(r), leaves.back().data(), leaves.back().size(), cudaMemcpyDefault));
      }
      ranks.launch<D>();
      MUST(cudaDeviceSynchronize());
      std::vector<Instruction> room(std::size_t(2 * world));
      Schedule schedule{room.data(), 0, 0, 0, 0};
      list_steps(schedule, rank_order ? Order::rank : Order::tree, &world, 1);
      std::vector<const void*> from;
      for (const auto& leaf : leaves) from.push_back(leaf.data());
      std::vector<u8> expected(std::size_t(numel * item));
      const Reduction how{dtype, 0, 0, 0, false, Part::whole, 0};
      reduce(expected.data(), from.data(), numel, schedule, how);
      for (i32 r = 0; r < world; ++r) {
        const bool part = mode == Mode::scatter;
        const i64 begin = part ? starts[std::size_t(r)] : 0;
        const i64 bytes = (part ? starts[std::size_t(r) + 1] : numel * item) - begin;
        std::vector<u8> found(std::size_t(bytes) + 1);
        MUST(cudaMemcpy(found.data(), ranks.out(r), std::size_t(bytes), cudaMemcpyDefault));
        for (i64 i = 0; i < bytes; ++i) wrong += found[std::size_t(i)] != expected[std::size_t(begin + i)];
      }
    }
  }
  return wrong + (ranks.failed() ? 1'000'000 : 0);
}

template <class Launch>
double seconds(const Launch& launch) {
  cudaEvent_t start, stop;
  MUST(cudaEventCreate(&start));
  MUST(cudaEventCreate(&stop));
  std::vector<float> samples;
  for (int i = 0; i < 24; ++i) {
    MUST(cudaEventRecord(start));
    launch();
    MUST(cudaEventRecord(stop));
    MUST(cudaEventSynchronize(stop));
    float ms = 0;
    MUST(cudaEventElapsedTime(&ms, start, stop));
    if (i >= 4) samples.push_back(ms);
  }
  std::sort(samples.begin(), samples.end());
  return double(samples[samples.size() / 2]) / 1000;
}

// What a rank's kernel reads and writes, in messages: pushed and read back pieces, leaves, results.
double messages(Mode mode, double world) {
  if (mode == Mode::one_shot) return 2 * (world - 1) + world + 1;
  const double away = (world - 1) / world;
  return 2 * away + 1 + 1 / world + 2 * away + 2 * away;
}

template <class D>
void time_all(i32 world, i64 bytes) {
  int processors = 0;
  MUST(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  const i32 blocks = std::min(32, processors / world);
  World ranks(world, blocks, u32(std::max(kStaged / world, 4096)) / 64 * 64, bytes + 64);
  DeviceMemory memory;
  u8* from = memory.add<u8>(std::size_t(bytes));
  u8* to = memory.add<u8>(std::size_t(bytes));
  const double copy =
      seconds([&] { MUST(cudaMemcpyAsync(to, from, std::size_t(bytes), cudaMemcpyDeviceToDevice)); });
  const double bandwidth = 2 * double(bytes) / copy;
  for (const Mode mode : {Mode::one_shot, Mode::two_shot}) {
    std::vector<i64> starts{bytes};
    if (mode == Mode::two_shot) {
      starts.clear();
      for (i32 p = 0; p <= world; ++p) starts.push_back(bytes / world * p);
    }
    ranks.set<D>(mode, starts, false, 0);
    const double took = seconds([&] { ranks.launch<D>(); });
    const double moved = messages(mode, world) * double(world) * double(bytes);
    std::printf("{\"ranks\": %d, \"blocks\": %d, \"item\": %d, \"bytes\": %lld, \"mode\": \"%s\", "
                "\"us\": %.1f, \"copy us\": %.1f, \"GB/s\": %.0f, \"copy GB/s\": %.0f}\n",
                world, blocks, int(sizeof(D)), bytes, mode == Mode::one_shot ? "one_shot" : "two_shot",
                took * 1e6, copy * 1e6, moved / took / 1e9, bandwidth / 1e9);
  }
  if (ranks.failed()) std::exit(3);
}

}  // namespace

int main(int count, char** words) {
  const std::string verb = count > 1 ? words[1] : "";
  if (verb == "check") {
    std::mt19937 chance(7);
    long wrong = 0;
    for (const i32 world : {2, 3, 5, 8}) {
      const long found = wrong_elements<float>(world, chance) + wrong_elements<Bfloat>(world, chance);
      std::printf("%d ranks: %ld bytes wrong\n", world, found);
      wrong += found;
    }
    return wrong == 0 ? 0 : 1;
  }
  if (verb == "time") {
    for (const i32 world : {1, 2, 4, 8}) {
      for (i64 bytes = 1 << 10; bytes <= 1 << 28; bytes *= 4) {
        time_all<float>(world, bytes);
        time_all<Bfloat>(world, bytes);
      }
    }
    return 0;
  }
  std::fprintf(stderr, "fused_ranks check | time\n");
  return 2;
}
