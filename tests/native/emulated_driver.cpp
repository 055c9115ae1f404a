// The part of a GPU's driver that meshplan calls, over the memory and the threads of a CPU; under the
// names of CUDA's driver, or with -DMP_HIP under those of HIP.
//
// Launches are done when they return. EMULATED_* in the environment make it refuse what real drivers
// refuse.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device.cu"

#include <dlfcn.h>

using namespace meshplan;

namespace {

using Kernel = void (*)(const Peers, const DeviceCall, const unsigned char*, unsigned char*, Failures*);
struct Handle {
  char text[64];
};
struct Memory {
  std::size_t bytes;
  int descriptor;
};

std::mutex lock;
std::map<void*, Memory> memory;
// What was done, for tests to ask.
std::string history;

void note(const std::string& what) {
  const std::lock_guard guard(lock);
  history += what + "\n";
}

bool refuses(const char* what) { return std::getenv(what) != nullptr; }

void* map(int descriptor, std::size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
}

constexpr int kInvalid = 1, kNoMemory = 2, kNotFound = 500, kUnsupported = 801;

}  // namespace

extern "C" {

#if defined(MP_HIP)
#define MP_NAME(cuda, hip) hip
#else
#define MP_NAME(cuda, hip) cuda
#endif

const char* emulated_history() { return history.c_str(); }

int MP_NAME(cuInit, hipInit)(unsigned) { return 0; }
int MP_NAME(cuGetErrorString, hipDrvGetErrorString)(int code, const char** text) {
  *text = code == kNoMemory ? "out of memory" : code == kUnsupported ? "operation not supported"
          : code == kNotFound ? "named symbol not found" : "invalid argument";
  return 0;
}

#if defined(MP_HIP)
int hipGetDevice(int* device) { return *device = 0, 0; }
int hipSetDevice(int) { return 0; }
#else
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &memory, 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = &memory, 0; }
#endif

int MP_NAME(cuModuleLoadData, hipModuleLoadData)(void** module, const void* image) {
  if (std::memcmp(image, "emulated", 8) != 0) return 200;
  return *module = &memory, 0;
}
int MP_NAME(cuModuleGetFunction, hipModuleGetFunction)(void** function, void*, const char* name) {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&emulated_history), &self);
  void* library = dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW);
  *function = dlsym(library, name);
  return *function == nullptr ? kNotFound : 0;
}
int MP_NAME(cuLaunchKernel, hipModuleLaunchKernel)(void* function, unsigned blocks, unsigned, unsigned,
                                                  unsigned lanes, unsigned, unsigned, unsigned,
                                                  void* stream, void** words, void**) {
  if (blocks == 0 || lanes == 0 || lanes > 512) return kInvalid;
  const auto kernel = reinterpret_cast<Kernel>(function);
  const Peers peers = *static_cast<Peers*>(words[0]);
  const DeviceCall call = *static_cast<DeviceCall*>(words[1]);
  const auto in = *static_cast<const unsigned char**>(words[2]);
  const auto out = *static_cast<unsigned char**>(words[3]);
  const auto failures = *static_cast<Failures**>(words[4]);
  note("launch " + std::to_string(blocks) + " on " + std::to_string(u64(stream)));
  std::vector<std::thread> threads;
  for (unsigned b = 0; b < blocks; ++b) {
    threads.emplace_back([&, b] {
      gpu::Lanes(i32(b), i32(blocks), i32(lanes), [&] { kernel(peers, call, in, out, failures); }).run();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 0;
}

int MP_NAME(cuMemAlloc_v2, hipMalloc)(void** address, std::size_t bytes) {
  if (refuses("EMULATED_NO_MEMORY")) return kNoMemory;
  const int descriptor = memfd_create("emulated", MFD_CLOEXEC);
  if (ftruncate(descriptor, off_t(bytes)) != 0) return kNoMemory;
  *address = map(descriptor, bytes);
  // What memory of a device holds at first is nobody's promise.
  std::memset(*address, 0xee, bytes);
  const std::lock_guard guard(lock);
  memory[*address] = {bytes, descriptor};
  return 0;
}
#if defined(MP_HIP)
int hipExtMallocWithFlags(void** address, std::size_t bytes, unsigned flags) {
  return flags == 3 ? hipMalloc(address, bytes) : kInvalid;
}
#endif
int MP_NAME(cuMemFree_v2, hipFree)(void* address) {
  const std::lock_guard guard(lock);
  const auto found = memory.find(address);
  if (found == memory.end()) return kInvalid;
  munmap(address, found->second.bytes);
  close(found->second.descriptor);
  memory.erase(found);
  history += "free\n";
  return 0;
}
int MP_NAME(cuMemsetD8_v2, hipMemset)(void* address, int value, std::size_t bytes) {
  return std::memset(address, value, bytes), 0;
}
int MP_NAME(cuMemHostAlloc, hipHostMalloc)(void** address, std::size_t bytes, unsigned) {
  return *address = std::calloc(1, bytes), 0;
}
int MP_NAME(cuMemFreeHost, hipHostFree)(void* address) { return std::free(address), 0; }

int MP_NAME(cuIpcGetMemHandle, hipIpcGetMemHandle)(Handle* handle, void* address) {
  if (refuses("EMULATED_NO_IPC")) return kUnsupported;
  const std::lock_guard guard(lock);
  const auto found = memory.find(address);
  if (found == memory.end()) return kInvalid;
  std::memset(handle, 0, sizeof(*handle));
  std::snprintf(handle->text, sizeof(handle->text), "/proc/%d/fd/%d", getpid(), found->second.descriptor);
  return 0;
}
int MP_NAME(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle)(void** address, Handle handle, unsigned flags) {
  if (flags != 1 || refuses("EMULATED_NO_PEERS")) return flags != 1 ? kInvalid : kUnsupported;
  const int descriptor = open(handle.text, O_RDWR | O_CLOEXEC);
  struct stat status;
  if (descriptor < 0 || fstat(descriptor, &status) != 0) return kInvalid;
  *address = map(descriptor, std::size_t(status.st_size));
  const std::lock_guard guard(lock);
  memory[*address] = {std::size_t(status.st_size), descriptor};
  return 0;
}
int MP_NAME(cuIpcCloseMemHandle, hipIpcCloseMemHandle)(void* address) {
  return MP_NAME(cuMemFree_v2, hipFree)(address);
}

int MP_NAME(cuEventCreate, hipEventCreateWithFlags)(void** event, unsigned) { return *event = &memory, 0; }
int MP_NAME(cuEventDestroy_v2, hipEventDestroy)(void*) { return 0; }
int MP_NAME(cuEventRecord, hipEventRecord)(void*, void* stream) {
  return note("record " + std::to_string(u64(stream))), 0;
}
int MP_NAME(cuEventQuery, hipEventQuery)(void*) { return refuses("EMULATED_BUSY") ? 600 : 0; }
int MP_NAME(cuStreamWaitEvent, hipStreamWaitEvent)(void* stream, void*, unsigned) {
  return note("wait " + std::to_string(u64(stream))), 0;
}
int MP_NAME(cuStreamIsCapturing, hipStreamIsCapturing)(void* stream, int* status) {
  return *status = u64(stream) == 99, 0;
}
int MP_NAME(cuCtxSynchronize, hipDeviceSynchronize)() { return 0; }

}  // extern "C"
