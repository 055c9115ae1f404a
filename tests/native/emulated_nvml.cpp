// The part of NVIDIA's management library that meshplan asks, over a text file; under its own names, so
// that the real Python binding loads it.
//
// EMULATED_NVML names the file. Lines, with words between blanks:
//   init CODE                                nvmlInit fails
//   gpu UUID BUS MODEL MIG                   the next GPU; MODEL without blanks, MIG 0 or 1
//   lost                                     the next GPU, which the driver has lost
//   part UUID GPU                            a part of a GPU (MIG)
//   link GPU NUMBER CODE STATE TYPE BUS      CODE for the state, and negative for the other end
//   fabric GPU VERSION UUID CLIQUE STATE STATUS HEALTH
//   rack GPU SERIAL
//   sleep SECONDS                            before nvmlInit answers
// What is not written is not supported; a link beyond 17 is an invalid argument, as with old drivers.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kOk = 0, kInvalid = 2, kUnsupported = 3, kNotFound = 6, kLost = 15;

struct Link {
  int code = 0, state = 0, type = 0;
  std::string bus;
};
struct Fabric {
  int version = 0;
  std::string uuid;
  unsigned clique = 0, state = 0, status = 0, health = 0;
};
struct Gpu {
  std::string uuid, bus, model, serial;
  int mig = 0;
  bool lost = false;
  std::map<unsigned, Link> links;
  Fabric fabric;
  // Of a part: the whole.
  Gpu* whole = nullptr;
};

int init_code = kOk;
std::vector<Gpu*> gpus, parts;

void read(const char* path) {
  gpus.clear();
  parts.clear();
  init_code = kOk;
  std::ifstream file(path);
  std::string line, what;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    words >> what;
    unsigned which = 0;
    if (what == "init") {
      words >> init_code;
    } else if (what == "sleep") {
      unsigned seconds = 0;
      words >> seconds;
      sleep(seconds);
    } else if (what == "gpu" || what == "lost") {
      gpus.push_back(new Gpu);
      gpus.back()->lost = what == "lost";
      words >> gpus.back()->uuid >> gpus.back()->bus >> gpus.back()->model >> gpus.back()->mig;
    } else if (what == "part") {
      parts.push_back(new Gpu);
      words >> parts.back()->uuid >> which;
      parts.back()->whole = gpus.at(which);
    } else if (what == "link") {
      unsigned number = 0;
      Link link;
      words >> which >> number >> link.code >> link.state >> link.type >> link.bus;
      gpus.at(which)->links[number] = link;
    } else if (what == "fabric") {
      Fabric fabric;
      words >> which >> fabric.version >> fabric.uuid >> fabric.clique >> fabric.state >> fabric.status >>
          fabric.health;
      gpus.at(which)->fabric = fabric;
    } else if (what == "rack") {
      words >> which;
      words >> gpus.at(which)->serial;
    }
  }
}

int text(const std::string& from, char* to, unsigned length) {
  std::snprintf(to, length, "%s", from.c_str());
  return kOk;
}

struct Pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char name[32];
};

const Link* find(Gpu* gpu, unsigned number) {
  const auto found = gpu->links.find(number);
  return found == gpu->links.end() ? nullptr : &found->second;
}

void fill(const Fabric& fabric, unsigned char* uuid, unsigned* status, unsigned* clique, unsigned* state) {
  for (int i = 0; i < 16; ++i) uuid[i] = std::stoi(fabric.uuid.substr(2 * i, 2), nullptr, 16);
  *status = fabric.status;
  *clique = fabric.clique;
  *state = fabric.state;
}

struct FabricV1 {
  unsigned char uuid[16];
  unsigned status, clique, state;
};
struct FabricV2 {
  unsigned version;
  unsigned char uuid[16];
  unsigned status, clique, state, health;
};
struct Platform {
  unsigned version;
  char guid[16], serial[16], rest[5];
};

}  // namespace

extern "C" {

int nvmlInitWithFlags(unsigned) {
  read(std::getenv("EMULATED_NVML"));
  return init_code;
}
int nvmlShutdown() { return kOk; }
const char* nvmlErrorString(int) { return "emulated error"; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = gpus.size(), kOk; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu** gpu) {
  if (index >= gpus.size()) return kInvalid;
  return *gpu = gpus[index], gpus[index]->lost ? kLost : kOk;
}
int nvmlDeviceGetHandleByUUID(const char* uuid, Gpu** gpu) {
  for (auto* list : {&gpus, &parts})
    for (Gpu* one : *list)
      if (one->uuid == uuid) return *gpu = one, kOk;
  return kNotFound;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Gpu* part, Gpu** gpu) { return *gpu = part->whole, kOk; }
int nvmlDeviceGetUUID(Gpu* gpu, char* to, unsigned length) { return text(gpu->uuid, to, length); }
int nvmlDeviceGetName(Gpu* gpu, char* to, unsigned length) { return text(gpu->model, to, length); }
int nvmlDeviceGetPciInfo_v3(Gpu* gpu, Pci* pci) { return text(gpu->bus, pci->name, sizeof pci->name); }
int nvmlDeviceGetMigMode(Gpu* gpu, unsigned* now, unsigned* later) { return *now = *later = gpu->mig, kOk; }
int nvmlDeviceGetNvLinkState(Gpu* gpu, unsigned number, unsigned* state) {
  const Link* link = find(gpu, number);
  if (link == nullptr) return number < 18 ? kUnsupported : kInvalid;
  if (link->code > 0) return link->code;
  return *state = link->state, kOk;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(Gpu* gpu, unsigned number, unsigned* type) {
  const Link* link = find(gpu, number);
  if (link == nullptr || link->code < 0) return link ? -link->code : kInvalid;
  return *type = link->type, kOk;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu* gpu, unsigned number, Pci* pci) {
  const Link* link = find(gpu, number);
  return link ? text(link->bus, pci->name, sizeof pci->name) : kInvalid;
}
int nvmlDeviceGetGpuFabricInfoV(Gpu* gpu, FabricV2* info) {
  if (gpu->fabric.version < 2) return kUnsupported;
  if (info->version != 0x02000024) return kInvalid;
  info->health = gpu->fabric.health;
  return fill(gpu->fabric, info->uuid, &info->status, &info->clique, &info->state), kOk;
}
int nvmlDeviceGetGpuFabricInfo(Gpu* gpu, FabricV1* info) {
  if (gpu->fabric.version < 1) return kUnsupported;
  return fill(gpu->fabric, info->uuid, &info->status, &info->clique, &info->state), kOk;
}
int nvmlDeviceGetPlatformInfo(Gpu* gpu, Platform* info) {
  if (gpu->serial.empty()) return kUnsupported;
  return std::memcpy(info->serial, gpu->serial.data(), gpu->serial.size() < 16 ? gpu->serial.size() : 16), kOk;
}

}  // extern "C"
