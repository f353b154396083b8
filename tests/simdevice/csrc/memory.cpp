#include "memory.h"

#include <c10/util/llvmMathExtras.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "scheduler.h"

namespace sim {

namespace {

constexpr size_t kAlignment = 512;

size_t device_size(size_t bytes) {
  return std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

// As torch's own allocator of pinned memory: the next power of two.
size_t pinned_size(size_t bytes) {
  return std::max<size_t>(kAlignment, c10::llvm::PowerOf2Ceil(bytes));
}

void cache(Block* block) {
  block->used_by.clear();
  state().cached[{block->pool, block->size}].push_back(block);
}

// ---------------------------------------------------------------- frees that must wait

bool try_release_pinned(Block* block, bool force) {
  if (force) {
    clock_host_waits(block->busy_until);
  }
  if (state().clock.on && block->busy_until > state().clock.host) {
    return false;
  }
  if (force || state().clock.on) {
    while (!block->pending.empty()) {
      run_until(block->pending.front().stream, block->pending.front().task);
    }
  }
  if (!block->pending.empty()) {
    return false;
  }
  block->log.clear();
  return true;
}

bool try_release_device(Block* block, bool force) {
  for (const auto& [stream, use] : block->used_by) {
    if (force) {
      clock_host_waits(use.time);
      run_until(stream, use.task);
    }
    if (!is_over(stream, use.task, use.time)) {
      return false;
    }
  }
  auto known = [&](const Record& record) {
    auto use = block->used_by.find(record.stream);
    return use != block->used_by.end() && record.task <= use->second.task;
  };
  block->log.erase(std::remove_if(block->log.begin(), block->log.end(), known), block->log.end());
  state().stats.active_bytes[0].decrease(block->size);
  return true;
}

void poll_deferred(bool force) {
  auto& deferred = state().deferred;
  for (size_t i = 0; i < deferred.size();) {
    auto* block = deferred[i];
    if (block->pinned ? try_release_pinned(block, force) : try_release_device(block, force)) {
      deferred[i] = deferred.back();
      deferred.pop_back();
      cache(block);
    } else {
      ++i;
    }
  }
}

// ---------------------------------------------------------------- blocks

void flush_cache(bool pinned) {
  run_all();  // closures hold raw pointers
  poll_deferred(true);
  for (auto& [key, blocks] : state().cached) {
    if ((key.first == kPinnedPool) != pinned) {
      continue;
    }
    for (auto* block : blocks) {
      state().blocks.erase(reinterpret_cast<uintptr_t>(block->data));
      if (pinned) {
        state().pinned_held -= block->size;
      } else {
        state().stats.reserved_bytes[0].decrease(block->size);
      }
      std::free(block->data);
      delete block;
    }
    blocks.clear();
  }
}

Block* take_cached(StreamId pool, size_t size) {
  auto& blocks = state().cached[{pool, size}];
  if (blocks.empty()) {
    return nullptr;
  }
  auto* block = blocks.back();
  blocks.pop_back();
  return block;
}

Block* new_block(StreamId pool, size_t size) {
  auto* block = new Block{};
  block->data = static_cast<char*>(std::aligned_alloc(kAlignment, size));
  block->size = size;
  block->pinned = pool == kPinnedPool;
  block->pool = pool;
  state().blocks[reinterpret_cast<uintptr_t>(block->data)] = block;
  return block;
}

void name_block(Block* block, size_t bytes) {
  block->requested = bytes;
  block->number = ++state().blocks_made;
}

Block* get_device_block(size_t bytes, StreamId pool) {
  auto& device = state();
  size_t size = device_size(bytes);
  poll_deferred(false);
  auto& reserved = device.stats.reserved_bytes[0];
  auto fits = [&] { return reserved.current + static_cast<int64_t>(size) <= static_cast<int64_t>(device.limit); };
  Block* block = take_cached(pool, size);
  if (!block && !fits()) {
    // As a caching allocator does: wait for the recorded events, then give the cache back, then give up.
    ++device.stats.num_alloc_retries;
    poll_deferred(true);
    block = take_cached(pool, size);
    if (!block) {
      flush_cache(false);
    }
    if (!block && !fits()) {
      ++device.stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory: tried to allocate ", bytes, " bytes; ",
                       reserved.current, " reserved of ", device.limit);
    }
  }
  if (!block) {
    block = new_block(pool, size);
    reserved.increase(size);
  }
  name_block(block, bytes);
  return block;
}

Block* get_pinned_block(size_t bytes) {
  auto& device = state();
  size_t size = pinned_size(bytes);
  ++device.counts["pinned_requests"];
  poll_deferred(false);
  Block* block = take_cached(kPinnedPool, size);
  if (!block) {
    if (device.pinned_held + size > device.pinned_limit) {
      flush_cache(true);
    }
    TORCH_CHECK(device.pinned_held + size <= device.pinned_limit, "sim out of pinned memory: tried to allocate ",
                bytes, " bytes; ", device.pinned_held, " held of ", device.pinned_limit);
    ++device.counts["pinned_os_allocations"];
    device.counts["pinned_os_bytes"] += static_cast<int64_t>(size);
    clock_pinned_allocation(size);
    block = new_block(kPinnedPool, size);
    device.pinned_held += size;
  }
  name_block(block, bytes);
  return block;
}

// ---------------------------------------------------------------- the device's allocator

void free_nothing(void*) {}

// Memory of a stream's pool is free from this point of that stream on.  The allocation itself touches nothing, so it
// conflicts with no earlier access, but whatever other streams do with the memory has to be ordered after it.
void log_allocation(Block* block) {
  TaskNumber now = state().streams[block->pool].submitted;
  if (now == 0) {
    return;
  }
  auto older = [&](const Record& record) { return record.stream == block->pool; };  // ordered before, so implied
  block->log.erase(std::remove_if(block->log.begin(), block->log.end(), older), block->log.end());
  block->log.push_back({0, block->requested, block->pool, now, true, "the allocation"});
}

void free_device(void* context) {
  Lock lock;
  auto& device = state();
  auto* block = static_cast<Block*>(context);
  device.stats.allocation[0].decrease(1);
  device.stats.allocated_bytes[0].decrease(block->size);
  device.stats.requested_bytes[0].decrease(block->requested);
  block->used_by.erase(block->pool);
  if (block->used_by.empty()) {
    device.stats.active_bytes[0].decrease(block->size);
    if (device.strict_free) {
      submit(block->pool, "free", nullptr, {{block, 0, block->size, true}});
    }
    cache(block);
  } else {
    for (auto& [id, use] : block->used_by) {
      auto& stream = device.streams[id];
      use = {stream.submitted, std::max(time_of(stream), device.clock.host)};
    }
    device.deferred.push_back(block);
  }
  advance();
}

struct DeviceAllocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    Lock lock;
    c10::Device here(kSim, 0);
    if (bytes == 0) {
      return {nullptr, nullptr, &free_nothing, here};
    }
    StreamId id = current_stream();
    auto* block = get_device_block(bytes, id);
    auto& stats = state().stats;
    stats.allocation[0].increase(1);
    stats.allocated_bytes[0].increase(block->size);
    stats.active_bytes[0].increase(block->size);
    stats.requested_bytes[0].increase(bytes);
    block->fresh.clear();
    if (state().poison) {
      block->fresh.push_back({0, block->size});
    }
    log_allocation(block);
    return {block->data, block, &free_device, here};
  }

  at::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    Lock lock;
    host_waits_for_stream(current_stream());
    std::memcpy(target, source, bytes);
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    Lock lock;
    flush_cache(false);
  }

  void recordStream(const at::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    if (data.get() && data.get_deleter() == &free_device) {
      static_cast<Block*>(data.get_context())->used_by[stream.id()] = {};
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock;
    return state().stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    Lock lock;
    for (auto* stat : all_stats()) {
      (*stat)[0].reset_accumulated();
    }
  }

  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock;
    for (auto* stat : all_stats()) {
      (*stat)[0].reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Lock lock;
    return {state().limit - state().stats.reserved_bytes[0].current, state().limit};
  }

 private:
  static std::vector<c10::CachingAllocator::StatArray*> all_stats() {
    auto& stats = state().stats;
    return {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
            &stats.requested_bytes};
  }
};

// ---------------------------------------------------------------- the allocator of pinned memory

void free_pinned(void* context) {
  Lock lock;
  auto* block = static_cast<Block*>(context);
  state().pinned_now -= block->size;
  state().deferred.push_back(block);  // until the copies that use it are over
  poll_deferred(false);
}

struct PinnedAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    Lock lock;
    if (bytes == 0) {
      return {nullptr, c10::Device(c10::kCPU)};
    }
    auto* block = get_pinned_block(bytes);
    state().pinned_now += block->size;
    state().pinned_peak = std::max(state().pinned_peak, state().pinned_now);
    if (state().poison) {
      std::memset(block->data, kPoison, block->size);
    }
    return {block->data, block, &free_pinned, c10::Device(c10::kCPU)};
  }

  at::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool record_event(void*, void*, c10::Stream) override { return true; }  // every task keeps its blocks busy anyway

  void empty_cache() override {
    Lock lock;
    flush_cache(true);
  }

  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}

  void reset_peak_stats() override {
    Lock lock;
    state().pinned_peak = state().pinned_now;
  }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;
at::HostAllocatorRegistry<kSim> registry(&the_pinned_allocator);

}  // namespace

c10::DeviceAllocator& device_allocator() {
  return the_device_allocator;
}

at::HostAllocator& pinned_allocator() {
  return the_pinned_allocator;
}

Block* find_block(const void* address) {
  auto& blocks = state().blocks;
  auto next = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (next == blocks.begin()) {
    return nullptr;
  }
  auto* block = std::prev(next)->second;
  return static_cast<const char*>(address) < block->data + block->size ? block : nullptr;
}

bool is_pending(const Access& access) {
  const auto& pending = access.block->pending;
  return std::any_of(pending.begin(), pending.end(),
                     [&](const Pending& p) { return p.begin < access.end && access.begin < p.end; });
}

void flush_device_cache() {
  flush_cache(false);
}

void flush_pinned_cache() {
  flush_cache(true);
}

void resize_storage(const c10::Storage& storage, size_t size) {
  auto data = device_allocator().allocate(size);
  size_t kept = std::min(size, storage.nbytes());
  if (kept > 0) {
    Lock lock;
    auto* target = static_cast<char*>(data.get());
    auto* source = static_cast<char*>(storage.mutable_data());
    auto* source_block = find_block(source);
    size_t offset = source - source_block->data;
    std::vector<Access> accesses{
        {find_block(target), 0, kept, true},
        {source_block, offset, offset + kept, false},
    };
    auto closure = [=] { std::memcpy(target, source, kept); };
    submit(current_stream(), "storage.resize_", closure, accesses, operator_cost(0, 2 * kept));
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
}

}  // namespace sim
