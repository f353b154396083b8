// The interface of the tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "memory.h"
#include "scheduler.h"

namespace sim {

void register_device();

namespace {

namespace py = pybind11;

// ---------------------------------------------------------------- control

void configure(const std::string& name, unsigned seed, bool poison, bool strict_free) {
  static const std::map<std::string, Policy> policies{
      {"lazy", Policy::lazy},
      {"eager", Policy::eager},
      {"copy_first", Policy::copy_first},
      {"compute_first", Policy::compute_first},
      {"random", Policy::random},
      {"thread", Policy::thread},
  };
  auto found = policies.find(name);
  TORCH_CHECK_VALUE(found != policies.end(), "sim: no schedule named ", name);
  Lock lock;
  set_policy(found->second, seed);
  state().poison = poison;
  state().strict_free = strict_free;
}

void clear_counts() {
  Lock lock;
  static const char* const always[] = {
      "pinned_requests", "pinned_os_allocations", "pinned_os_bytes", "bytes_out",
      "bytes_in",        "copies_out",            "copies_in",
  };
  state().counts.clear();
  for (const auto* name : always) {
    state().counts[name] = 0;
  }
}

void reset() {
  Lock lock;
  auto& device = state();
  for (auto& [id, stream] : device.streams) {
    run_until(id, stream.submitted);
    join(device.host_known, stream.known);
  }
  flush_device_cache();
  flush_pinned_cache();
  for (auto& [address, block] : device.blocks) {
    block->log.clear();
  }
  device.stats.num_alloc_retries = 0;
  device.stats.num_ooms = 0;
  device_allocator().resetAccumulatedStats(0);
  device_allocator().resetPeakStats(0);
  device.clock = {};
  clock_reset();
  device.streams_made = 0;
  device.pinned_peak = device.pinned_now;
  device.error.clear();
  device.races.clear();
  device.reported.clear();
  device.trace.clear();
  device.tracing = false;
  clear_counts();
}

// ---------------------------------------------------------------- findings

void clear_races() {
  Lock lock;
  state().races.clear();
  state().reported.clear();
}

std::map<StreamId, size_t> pending() {
  Lock lock;
  std::map<StreamId, size_t> sizes;
  for (auto& [id, stream] : state().streams) {
    sizes[id] = stream.tasks.size();
  }
  return sizes;
}

std::pair<size_t, size_t> pinned_bytes() {
  Lock lock;
  return {state().pinned_now, state().pinned_peak};
}

std::vector<std::string> trace_lines(bool on) {
  Lock lock;
  state().tracing = on;
  return std::exchange(state().trace, {});
}

std::optional<Access> host_access(uintptr_t address, std::optional<size_t> bytes, bool write) {
  auto* block = find_block(reinterpret_cast<void*>(address));
  if (!block) {
    return std::nullopt;
  }
  if (!bytes) {
    return Access{block, 0, block->size, write};
  }
  size_t begin = reinterpret_cast<char*>(address) - block->data;
  return Access{block, begin, begin + *bytes, write};
}

// What the device does to these bytes of pinned memory, by default to their whole block, that the host has not waited
// for.
std::vector<std::string> host_unsynced(uintptr_t address, std::optional<size_t> bytes, bool write) {
  Lock lock;
  std::vector<std::string> lines;
  if (auto access = host_access(address, bytes, write)) {
    for (const auto* record : unseen_by_host(*access)) {
      lines.push_back((record->write ? "W " : "R ") + record->name + " on stream " + std::to_string(record->stream));
    }
  }
  return lines;
}

void check_host_access(uintptr_t address, size_t bytes, bool write, const std::string& name) {
  Lock lock;
  if (auto access = host_access(address, bytes, write)) {
    log_host_access(*access, name);
  }
}

// ---------------------------------------------------------------- clock

void configure_clock(const py::dict& settings) {
  SimulatedClock clock;
  auto number = [&](const char* name) { return settings[name].cast<double>(); };
  auto time = [&](const char* name) { return to_picoseconds(number(name)); };
  clock.out_bytes_per_s = number("out_bytes_per_s");
  clock.in_bytes_per_s = number("in_bytes_per_s");
  clock.pageable_factor = number("pageable_factor");
  clock.flops_per_s = number("flops_per_s");
  clock.memory_bytes_per_s = number("memory_bytes_per_s");
  clock.pinned_alloc_bytes_per_s = number("pinned_alloc_bytes_per_s");
  clock.latency = time("latency_s");
  clock.per_operator = time("operator_s");
  clock.per_submission = time("submit_s");
  clock.per_pinned_alloc = time("pinned_alloc_s");
  py::gil_scoped_release no_gil;
  Lock lock;
  clock.on = true;
  clock.epoch = state().clock.epoch;
  state().clock = clock;
  clock_reset();
}

void turn_clock_off() {
  Lock lock;
  state().clock.on = false;
}

void reset_clock() {
  Lock lock;
  clock_reset();
}

void spend(double seconds, const std::string& name) {
  Lock lock;
  if (state().clock.on) {
    submit(current_stream(), name, nullptr, {}, fixed_cost(seconds));
    advance();
  }
}

std::vector<std::tuple<StreamId, std::string, double, double>> clock_log(bool on) {
  Lock lock;
  state().clock.logging = on;
  std::vector<std::tuple<StreamId, std::string, double, double>> rows;
  for (const auto& interval : std::exchange(state().clock.log, {})) {
    rows.emplace_back(interval.stream, interval.name, to_seconds(interval.start), to_seconds(interval.end));
  }
  return rows;
}

// ---------------------------------------------------------------- wrappers that hold the lock

template <class Function>
auto reading(Function function) {
  return [function] {
    Lock lock;
    return function(state());
  };
}

template <class Function>
auto reading_stream(Function function) {
  return [function](StreamId id) {
    Lock lock;
    return to_seconds(function(state().streams[id]));
  };
}

auto setting(size_t State::*member) {
  return [member](size_t value) {
    Lock lock;
    state().*member = value;
  };
}

}  // namespace

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  register_device();
  clear_counts();
  py::call_guard<py::gil_scoped_release> no_gil;

  // Control
  m.def("configure", &configure, no_gil);
  m.def("reset", &reset, no_gil);
  m.def("set_limit", setting(&State::limit), no_gil);
  m.def("set_pinned_limit", setting(&State::pinned_limit), no_gil);

  // Findings
  m.def("races", reading([](State& device) { return device.races; }), no_gil);
  m.def("clear_races", &clear_races, no_gil);
  m.def("counts", reading([](State& device) { return device.counts; }), no_gil);
  m.def("clear_counts", &clear_counts, no_gil);
  m.def("pending", &pending, no_gil);
  m.def("pinned_bytes", &pinned_bytes, no_gil);
  m.def("pinned_held", reading([](State& device) { return device.pinned_held; }), no_gil);
  m.def("trace", &trace_lines, no_gil);
  m.def("host_unsynced", &host_unsynced, no_gil);
  m.def("check_host_access", &check_host_access, no_gil);

  // Clock
  m.def("clock_configure", &configure_clock);
  m.def("clock_off", &turn_clock_off, no_gil);
  m.def("clock_reset", &reset_clock, no_gil);
  m.def("clock_spend", &spend, no_gil);
  m.def("clock_log", &clock_log, no_gil);
  m.def("clock_is_on", reading([](State& device) { return device.clock.on; }), no_gil);
  m.def("clock_now", reading([](State&) { return to_seconds(clock_now()); }), no_gil);
  m.def("clock_host", reading([](State& device) { return to_seconds(device.clock.host); }), no_gil);
  m.def("clock_busy_out", reading([](State& device) { return to_seconds(device.clock.out.busy); }), no_gil);
  m.def("clock_busy_in", reading([](State& device) { return to_seconds(device.clock.in.busy); }), no_gil);
  m.def("clock_stream", reading_stream([](StreamQueue& stream) { return time_of(stream); }), no_gil);
  m.def("clock_stalled", reading_stream([](StreamQueue& stream) { return stalled(stream); }), no_gil);
}
