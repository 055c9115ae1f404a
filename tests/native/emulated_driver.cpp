// The part of a GPU's driver that meshplan calls, over the memory and the threads of a CPU; under the
// names of CUDA's driver, or with -DMP_HIP under those of HIP.
//
// As on a GPU, launches return before they run: see emulated_streams.h. EMULATED_* in the environment
// make it refuse what real drivers refuse; -DMP_NO_EXTERNAL leaves out what older ones lack.
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
#include "emulated_streams.h"

#include <dlfcn.h>

using namespace meshplan;
using emulated::Event, emulated::Graph, emulated::Machine, emulated::kInvalid, emulated::kUnsupportedInCapture;

namespace {

using Kernel = void (*)(const Peers, const DeviceCall, const unsigned char*, unsigned char*, Failures*);
using FoldKernel = void (*)(const FoldCall);
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

void* map(int descriptor, std::size_t bytes, int how = MAP_SHARED) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, how, descriptor, 0);
}

// Leaked, so that a handle stays one.
std::set<void*> events;
bool is_event(void* event) {
  const std::lock_guard guard(lock);
  return events.count(event) != 0;
}

// Kernels whose only parameter is a FoldCall.
std::set<void*> folds;
bool is_fold(const std::string& name) {
  const std::string end = name.substr(name.rfind('_') + 1);
  return end == "fold" || end == "combine" || end == "finish" || end == "table";
}

// As a thread has set it: 0 global, 2 relaxed.
thread_local int capture_mode = 0;

void run_blocks(unsigned blocks, unsigned lanes, const std::function<void()>& kernel) {
  std::vector<std::thread> threads;
  for (unsigned b = 0; b < blocks; ++b) {
    threads.emplace_back([&, b] { gpu::Lanes(i32(b), i32(blocks), i32(lanes), kernel).run(); });
  }
  for (std::thread& thread : threads) thread.join();
}

constexpr int kNoMemory = 2, kNotFound = 500, kUnsupported = 801;

}  // namespace

extern "C" {

#if defined(MP_HIP)
#define MP_NAME(cuda, hip) hip
#else
#define MP_NAME(cuda, hip) cuda
#endif

const char* emulated_history() {
  static std::string copy;
  const std::lock_guard guard(lock);
  return (copy = history).c_str();
}

// What a stream is given after this runs so much later: its rank is late.
void emulated_delay(void* stream, long long microseconds) {
  Machine::get().launch(u64(stream), [microseconds] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  });
}

int MP_NAME(cuInit, hipInit)(unsigned) { return 0; }
int MP_NAME(cuGetErrorString, hipDrvGetErrorString)(int code, const char** text) {
  *text = code >= emulated::kUnsupportedInCapture && code <= emulated::kCapturedEvent
              ? "operation not permitted when stream is capturing"
          : code == kNoMemory ? "out of memory" : code == kUnsupported ? "operation not supported"
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
  if (capture_mode != 2 && Machine::get().capturing()) return kUnsupportedInCapture;
  if (std::memcmp(image, "emulated", 8) != 0) return 200;
  return *module = &memory, 0;
}
int MP_NAME(cuModuleGetFunction, hipModuleGetFunction)(void** function, void*, const char* name) {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&emulated_history), &self);
  void* library = dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW);
  *function = dlsym(library, name);
  const std::lock_guard guard(lock);
  if (is_fold(name)) folds.insert(*function);
  return *function == nullptr ? kNotFound : 0;
}
int MP_NAME(cuLaunchKernel, hipModuleLaunchKernel)(void* function, unsigned blocks, unsigned, unsigned,
                                                  unsigned lanes, unsigned, unsigned, unsigned,
                                                  void* stream, void** words, void**) {
  if (blocks == 0 || lanes == 0 || lanes > 512) return kInvalid;
  note("launch " + std::to_string(blocks) + " on " + std::to_string(u64(stream)));
  if (folds.count(function) != 0) {
    const auto kernel = reinterpret_cast<FoldKernel>(function);
    const FoldCall call = *static_cast<FoldCall*>(words[0]);
    return Machine::get().launch(u64(stream),
                                 [=] { run_blocks(blocks, lanes, [&] { kernel(call); }); });
  }
  const auto kernel = reinterpret_cast<Kernel>(function);
  const Peers peers = *static_cast<Peers*>(words[0]);
  const DeviceCall call = *static_cast<DeviceCall*>(words[1]);
  const auto in = *static_cast<const unsigned char**>(words[2]);
  const auto out = *static_cast<unsigned char**>(words[3]);
  const auto failures = *static_cast<Failures**>(words[4]);
  return Machine::get().launch(u64(stream), [=] {
    run_blocks(blocks, lanes, [&] { kernel(peers, call, in, out, failures); });
  });
}

int MP_NAME(cuMemAlloc_v2, hipMalloc)(void** address, std::size_t bytes) {
  if (refuses("EMULATED_NO_MEMORY")) return kNoMemory;
  if (Machine::get().capturing()) return kUnsupportedInCapture;
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
  // What a kernel may still use is not taken away under it.
  if (const int code = Machine::get().synchronize()) return code;
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
  return Machine::get().launch(0, [=] { std::memset(address, value, bytes); });
}
int MP_NAME(cuMemHostAlloc, hipHostMalloc)(void** address, std::size_t bytes, unsigned flags) {
  if (flags != 3) return kInvalid;
  *address = std::malloc(bytes);
  return std::memset(*address, 0xee, bytes), 0;
}
int MP_NAME(cuMemFreeHost, hipHostFree)(void* address) {
  if (const int code = Machine::get().synchronize()) return code;
  return std::free(address), 0;
}

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
  // A mapping that keeps what is written through it: the other process never sees it.
  const int how = refuses("EMULATED_LOST_WRITES") ? MAP_PRIVATE : MAP_SHARED;
  *address = map(descriptor, std::size_t(status.st_size), how);
  const std::lock_guard guard(lock);
  memory[*address] = {std::size_t(status.st_size), descriptor};
  return 0;
}
int MP_NAME(cuIpcCloseMemHandle, hipIpcCloseMemHandle)(void* address) {
  return MP_NAME(cuMemFree_v2, hipFree)(address);
}

int MP_NAME(cuEventCreate, hipEventCreateWithFlags)(void** event, unsigned flags) {
  if (flags != 2) return kInvalid;
  *event = new Event;
  const std::lock_guard guard(lock);
  events.insert(*event);
  return 0;
}
int MP_NAME(cuEventDestroy_v2, hipEventDestroy)(void* event) {
  const std::lock_guard guard(lock);
  return events.erase(event) == 1 ? 0 : kInvalid;
}
int MP_NAME(cuEventRecord, hipEventRecord)(void* event, void* stream) {
  if (!is_event(event)) return kInvalid;
  note("record " + std::to_string(u64(stream)));
  return Machine::get().record(static_cast<Event*>(event), u64(stream), false);
}
#if !defined(MP_NO_EXTERNAL)
int MP_NAME(cuEventRecordWithFlags, hipEventRecordWithFlags)(void* event, void* stream, unsigned flags) {
  if (!is_event(event) || flags > 1) return kInvalid;
  note((flags == 1 ? "record external " : "record ") + std::to_string(u64(stream)));
  return Machine::get().record(static_cast<Event*>(event), u64(stream), flags == 1);
}
#endif
int MP_NAME(cuEventQuery, hipEventQuery)(void* event) {
  return is_event(event) ? Machine::get().query(static_cast<Event*>(event)) : kInvalid;
}
int MP_NAME(cuStreamWaitEvent, hipStreamWaitEvent)(void* stream, void* event, unsigned flags) {
  if (!is_event(event) || flags > 1) return kInvalid;
  note((flags == 1 ? "wait external " : "wait ") + std::to_string(u64(stream)));
  return Machine::get().wait(u64(stream), static_cast<Event*>(event), flags == 1);
}
int MP_NAME(cuStreamGetCaptureInfo_v2, hipStreamGetCaptureInfo_v2)(void* stream, int* status,
                                                                  unsigned long long* id, void**, void**,
                                                                  std::size_t*) {
  return *status = Machine::get().status(u64(stream), id), 0;
}
int MP_NAME(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)(int* mode) {
  return std::swap(*mode, capture_mode), 0;
}
int MP_NAME(cuCtxSynchronize, hipDeviceSynchronize)() { return Machine::get().synchronize(); }

// What torch calls, and not meshplan.
int MP_NAME(cuStreamSynchronize, hipStreamSynchronize)(void* stream) {
  return Machine::get().synchronize(u64(stream));
}
int MP_NAME(cuStreamBeginCapture_v2, hipStreamBeginCapture)(void* stream, int) {
  return Machine::get().begin(u64(stream));
}
int MP_NAME(cuStreamEndCapture, hipStreamEndCapture)(void* stream, void** graph) {
  Graph* found = nullptr;
  const int code = Machine::get().end(u64(stream), &found);
  return *graph = found, code;
}
int MP_NAME(cuGraphLaunch, hipGraphLaunch)(void* graph, void* stream) {
  return Machine::get().replay(static_cast<Graph*>(graph), u64(stream));
}

}  // extern "C"
