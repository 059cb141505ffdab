// CUDA devices, streams and events for a CPU build of torch, without a GPU and without computing anything.
//
// torch asks a "device guard" for the current device and stream, and its autograd engine records events and waits for
// them through the guard. This guard keeps a vector clock per stream: clock[s] is how many operations of stream s have
// finished, in every possible execution, before the next operation of this stream starts. Recording an event copies the
// stream's clock, waiting for it takes the maximum. Python reads and advances the clocks by the functions at the end.

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <map>
#include <mutex>
#include <unordered_map>

namespace {

using Clock = std::map<int64_t, uint64_t>;

constexpr int kDevices = 8;
// A stream is numbered device * kStreams + number; number 0 is the device's default stream.
constexpr int64_t kStreams = 1 << 20;

std::mutex lock;
std::unordered_map<int64_t, Clock> streams;
std::unordered_map<int64_t, Clock> events;
int64_t made_streams = 0;
int64_t made_events = 0;

thread_local int device_now = 0;
thread_local std::array<int64_t, kDevices> stream_now{};
// What this host thread has waited for; whatever it launches afterwards comes later.
thread_local Clock host;

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, count] : from) {
    auto& mine = into[stream];
    mine = std::max(mine, count);
  }
}

int64_t key_of(const c10::Stream& stream) {
  return stream.device_index() * kStreams + stream.id();
}

c10::Stream stream_of(int device, int64_t number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device), number);
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : device_now;
}

}  // namespace

extern "C" {

int fake_cuda_device() { return device_now; }

void fake_cuda_set_device(int device) { device_now = device; }

int64_t fake_cuda_stream(int device) { return device * kStreams + stream_now[device]; }

void fake_cuda_set_stream(int64_t stream) { stream_now[stream / kStreams] = stream % kStreams; }

int64_t fake_cuda_new_stream(int device) {
  std::lock_guard<std::mutex> hold(lock);
  return device * kStreams + ++made_streams;
}

// One more operation is launched on this stream; returns its number there.
uint64_t fake_cuda_launch(int64_t stream) {
  std::lock_guard<std::mutex> hold(lock);
  auto& clock = streams[stream];
  merge(clock, host);
  return ++clock[stream];
}

// How many operations of `other` have finished before the next operation of `stream`.
uint64_t fake_cuda_finished(int64_t stream, int64_t other) {
  std::lock_guard<std::mutex> hold(lock);
  const auto& clock = streams[stream];
  auto found = clock.find(other);
  uint64_t count = found == clock.end() ? 0 : found->second;
  auto waited = host.find(other);
  return waited == host.end() ? count : std::max(count, waited->second);
}

int64_t fake_cuda_record(int64_t stream) {
  std::lock_guard<std::mutex> hold(lock);
  events[++made_events] = streams[stream];
  merge(events[made_events], host);
  return made_events;
}

void fake_cuda_wait(int64_t stream, int64_t event) {
  std::lock_guard<std::mutex> hold(lock);
  merge(streams[stream], events[event]);
}

void fake_cuda_host_wait(int64_t event) {
  std::lock_guard<std::mutex> hold(lock);
  merge(host, events[event]);
}

void fake_cuda_forget(int64_t event) {
  std::lock_guard<std::mutex> hold(lock);
  events.erase(event);
}

// A new rank begins: no stream has done anything, and the current device is 0, as in a new process.
void fake_cuda_reset() {
  std::lock_guard<std::mutex> hold(lock);
  streams.clear();
  events.clear();
  host.clear();
  device_now = 0;
  stream_now.fill(0);
}
}

namespace c10::impl {

struct FakeGuard final : DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;

  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, device_now); }
  void setDevice(Device device) const override { device_now = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = index_of(device); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const override {
    int index = index_of(device);
    return stream_of(index, stream_now[index]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getNewStream(Device device, int) const override {
    int index = index_of(device);
    return stream_of(index, fake_cuda_new_stream(index) % kStreams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    stream_now[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const EventFlag) const override {
    if (*event == nullptr) {
      *event = new int64_t(0);
    }
    auto* number = static_cast<int64_t*>(*event);
    fake_cuda_forget(*number);
    *number = fake_cuda_record(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) {
      fake_cuda_wait(key_of(stream), *static_cast<int64_t*>(event));
    }
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event != nullptr) {
      fake_cuda_forget(*static_cast<int64_t*>(event));
      delete static_cast<int64_t*>(event);
    }
  }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override { fake_cuda_host_wait(fake_cuda_record(key_of(stream))); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      fake_cuda_host_wait(*static_cast<int64_t*>(event));
    }
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    fake_cuda_host_wait(fake_cuda_record(device * kStreams));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

static DeviceGuardImplRegistrar registered(DeviceType::CUDA, new FakeGuard());

}  // namespace c10::impl

namespace at {

struct FakeCUDAHooks : CUDAHooksInterface {
  explicit FakeCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(device_now); }
  int getNumGPUs() const override { return kDevices; }
};

// torch looks for hooks of this name.
using CUDAHooks = FakeCUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
