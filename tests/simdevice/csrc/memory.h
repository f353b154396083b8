// Blocks of simulated memory and the two allocators: one for the device, one for pinned host memory.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include "state.h"

namespace sim {

c10::DeviceAllocator& device_allocator();
at::HostAllocator& pinned_allocator();

Block* find_block(const void* address);
bool is_pending(const Access& access);  // does a queued task touch these bytes?
void flush_device_cache();
void flush_pinned_cache();
void resize_storage(const c10::Storage& storage, size_t size);

}  // namespace sim
