// What torch asks of every accelerator: streams, events, and a few hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "scheduler.h"

namespace sim {

namespace {

constexpr int64_t kPoolOfStreams = 32;  // as on CUDA: more streams than these share the queues, round robin

c10::Device the_device() {
  return {kSim, 0};
}

c10::Stream make_stream(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, the_device(), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kSim;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  // ---------------------------------------------------------------- devices: there is one
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  void synchronizeDevice(c10::DeviceIndex) const override {
    Lock lock;
    for (auto& [id, stream] : state().streams) {
      settle(stream);  // all of them before the host's time moves
    }
    for (auto& [id, stream] : state().streams) {
      host_waits_for_stream(id);
    }
  }

  // ---------------------------------------------------------------- streams
  c10::Stream getStream(c10::Device) const override { return make_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return make_stream(0); }

  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock;
    StreamId id = 1 + state().streams_made++ % kPoolOfStreams;
    state().streams[id];
    return make_stream(id);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    StreamId old = current_stream();
    current_stream() = stream.id();
    return make_stream(old);
  }

  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    return host_sees_stream(stream.id());
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock;
    host_waits_for_stream(stream.id());
    advance();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

  // ---------------------------------------------------------------- events
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Lock lock;
    if (!*event) {
      *event = new Event;
    }
    record_event(*static_cast<Event*>(*event), stream.id());
    advance();
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (!event) {
      return;
    }
    Lock lock;
    submit_wait(stream.id(), *static_cast<Event*>(event));
    advance();
  }

  bool queryEvent(void* event) const override {
    if (!event) {
      return true;
    }
    Lock lock;
    return host_sees_event(*static_cast<Event*>(event));
  }

  void synchronizeEvent(void* event) const override {
    if (!event) {
      return;
    }
    Lock lock;
    host_waits_for_event(*static_cast<Event*>(event));
    advance();
  }

  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    Lock lock;
    constexpr double kMillisecondsPerSecond = 1000;
    auto elapsed = time_of(*static_cast<Event*>(second)) - time_of(*static_cast<Event*>(first));
    return to_seconds(elapsed * kMillisecondsPerSecond);
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return the_device(); }

  // Random numbers come from the CPU's generators.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }

  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  bool isPinnedPtr(const void* address) const override {
    Lock lock;
    auto* block = find_block(address);
    return block && block->pinned;
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

}  // namespace

void register_device() {
  c10::SetAllocator(kSim, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  state().streams[0];
}

}  // namespace sim
