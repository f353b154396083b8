#include "clock.h"

#include <algorithm>
#include <cmath>

namespace sim {

namespace {

constexpr double kPicosecondsPerSecond = 1e12;

double seconds_for(double amount, double rate) {
  return rate > 0 ? amount / rate : 0;
}

// How long the stream has been idle for an event alone: not for want of work, and not for want of the link.
Picoseconds idle(const StreamQueue& stream, Picoseconds ready) {
  return std::max<Picoseconds>(0, stream.waited - ready);
}

}  // namespace

Picoseconds to_picoseconds(double seconds) {
  return std::llround(seconds * kPicosecondsPerSecond);
}

double to_seconds(Picoseconds time) {
  return static_cast<double>(time) / kPicosecondsPerSecond;
}

// ---------------------------------------------------------------- costs

Cost copy_cost(Direction direction, size_t bytes, bool pageable) {
  const auto& clock = state().clock;
  double rate = direction == Direction::out ? clock.out_bytes_per_s : clock.in_bytes_per_s;
  if (pageable) {
    rate *= clock.pageable_factor;
  }
  return {clock.on, clock.latency + to_picoseconds(seconds_for(bytes, rate)), direction};
}

Cost operator_cost(double flops, size_t bytes_touched) {
  const auto& clock = state().clock;
  double seconds = seconds_for(flops, clock.flops_per_s) + seconds_for(bytes_touched, clock.memory_bytes_per_s);
  return {clock.on, clock.per_operator + to_picoseconds(seconds)};
}

Cost fixed_cost(double seconds) {
  return {state().clock.on, to_picoseconds(seconds)};
}

// ---------------------------------------------------------------- time passes

Picoseconds time_of(const StreamQueue& stream) {
  return std::max(stream.time, stream.waited);
}

Picoseconds time_of(const Event& event) {
  return event.epoch == state().clock.epoch ? event.time : 0;
}

void place(StreamQueue& stream, StreamId id, const std::string& name, const Cost& cost) {
  auto& clock = state().clock;
  if (!clock.on || !cost.timed) {
    return;
  }
  clock.host += clock.per_submission;
  Picoseconds ready = std::max(stream.time, clock.host);
  Link* link = cost.link == Direction::none ? nullptr : cost.link == Direction::out ? &clock.out : &clock.in;
  if (link) {
    ready = std::max(ready, link->free_at);
  }
  Picoseconds start = std::max(ready, stream.waited);
  stream.stalled += idle(stream, ready);
  stream.time = start + cost.duration;
  if (link) {
    link->free_at = stream.time;
    link->busy += cost.duration;
  }
  if (clock.logging && cost.duration > 0) {
    clock.log.push_back({id, name, start, stream.time});
  }
}

void settle(StreamQueue& stream) {
  stream.stalled = stalled(stream);
  stream.time = time_of(stream);
}

Picoseconds stalled(const StreamQueue& stream) {
  return stream.stalled + idle(stream, std::max(stream.time, state().clock.host));
}

void clock_host_waits(Picoseconds until) {
  auto& clock = state().clock;
  if (clock.on) {
    clock.host = std::max(clock.host, until);
  }
}

void clock_pinned_allocation(size_t bytes) {
  auto& clock = state().clock;
  if (clock.on) {
    clock.host += clock.per_pinned_alloc + to_picoseconds(seconds_for(bytes, clock.pinned_alloc_bytes_per_s));
  }
}

Picoseconds clock_now() {
  Picoseconds latest = state().clock.host;
  for (const auto& [id, stream] : state().streams) {
    latest = std::max(latest, time_of(stream));
  }
  return latest;
}

void clock_reset() {
  auto& clock = state().clock;
  ++clock.epoch;
  clock.host = 0;
  clock.out = {};
  clock.in = {};
  clock.log.clear();
  for (auto& [id, stream] : state().streams) {
    stream.time = stream.waited = stream.stalled = 0;
  }
  for (auto& [address, block] : state().blocks) {
    block->busy_until = 0;
    for (auto& [id, use] : block->used_by) {
      use.time = 0;
    }
  }
}

}  // namespace sim
