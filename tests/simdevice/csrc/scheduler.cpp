#include "scheduler.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace sim {

State& state() {
  static State* instance = new State;  // never destroyed: tensors may outlive static destructors
  return *instance;
}

StreamId& current_stream() {
  static thread_local StreamId stream = 0;
  return stream;
}

namespace {

// A loop that polls must end, even if nothing else lets the stream advance.
constexpr int kPatience = 3;

// Does the host do nothing but ask?  Looking at an event now and then, between other things, is no loop.
bool is_loop(Polls& polls) {
  if (polls.submissions != state().submissions) {
    polls = {0, state().submissions};
  }
  return ++polls.count > kPatience;
}

// ---------------------------------------------------------------- running closures

void run_closure(Task& task, StreamId id) {
  // A clean dispatcher: no autograd, no autocast, no Python modes of the thread that happens to run the closure.
  c10::impl::ForceDispatchKeyGuard guard(
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  trace("run", id, task.name);
  std::string error;
  try {
    task.run();
  } catch (const c10::Error& exception) {
    error = exception.what_without_backtrace();
  } catch (const std::exception& exception) {
    error = exception.what();
  }
  if (!error.empty() && state().error.empty()) {
    state().error = "in " + task.name + " on stream " + std::to_string(id) + ": " + error;
  }
}

void run_first(StreamId id) {
  auto& stream = state().streams[id];
  Task task = std::move(stream.tasks.front());
  stream.tasks.pop_front();
  for (auto& [data, size] : task.poison) {
    std::memset(data, kPoison, size);
  }
  if (task.run) {
    run_closure(task, id);
  }
  ++stream.finished;
  for (auto& access : task.accesses) {
    auto& pending = access.block->pending;
    auto finished = [&](const Pending& p) { return p.stream == id && p.task <= stream.finished; };
    pending.erase(std::remove_if(pending.begin(), pending.end(), finished), pending.end());
  }
}

bool runnable(StreamId id) {
  const auto& stream = state().streams[id];
  if (stream.tasks.empty()) {
    return false;
  }
  const auto& task = stream.tasks.front();
  return task.wait_stream < 0 || state().streams[task.wait_stream].finished >= task.wait_task;
}

std::vector<StreamId> runnable_streams() {
  std::vector<StreamId> ids;
  for (auto& [id, stream] : state().streams) {
    if (runnable(id)) {
      ids.push_back(id);
    }
  }
  return ids;
}

// ---------------------------------------------------------------- schedules

void drain(const std::function<bool(StreamId)>& chosen) {
  for (bool progress = true; progress;) {
    progress = false;
    for (auto& [id, stream] : state().streams) {
      while (chosen(id) && runnable(id)) {
        run_first(id);
        progress = true;
      }
    }
  }
}

void run_a_few() {
  int count = std::uniform_int_distribution<int>(0, 3)(state().random);
  for (int i = 0; i < count; ++i) {
    auto ids = runnable_streams();
    if (ids.empty()) {
      return;
    }
    run_first(ids[state().random() % ids.size()]);
  }
}

// Real asynchrony: a thread in the background advances random streams after random delays.
void device_thread(uint64_t number) {
  std::mt19937 random{std::random_device{}()};
  for (;;) {
    {
      Lock lock;
      if (state().device_thread != number) {
        return;
      }
      auto ids = runnable_streams();
      if (!ids.empty()) {
        run_first(ids[random() % ids.size()]);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60));
  }
}

void raise_error() {
  if (!state().error.empty()) {
    std::string error = std::move(state().error);
    state().error.clear();
    TORCH_CHECK(false, "sim: asynchronous error ", error);
  }
}

void host_waits(StreamId id, TaskNumber task, const VectorClock& known, Picoseconds time) {
  run_until(id, task);
  join(state().host_known, known);
  clock_host_waits(time);
  raise_error();
}

// The bytes of an access that nothing has touched since their allocation: poisoned right before they are used.
void take_fresh(const Access& access, std::vector<std::pair<char*, size_t>>& poison) {
  std::vector<Range> rest;
  for (const auto& range : access.block->fresh) {
    size_t begin = std::max(range.begin, access.begin);
    size_t end = std::min(range.end, access.end);
    if (begin >= end) {
      rest.push_back(range);
      continue;
    }
    poison.emplace_back(access.block->data + begin, end - begin);
    if (range.begin < begin) {
      rest.push_back({range.begin, begin});
    }
    if (end < range.end) {
      rest.push_back({end, range.end});
    }
  }
  access.block->fresh = std::move(rest);
}

}  // namespace

// ---------------------------------------------------------------- submission

TaskNumber submit(StreamId id, std::string name, std::function<void()> run, const std::vector<Access>& accesses,
                  const Cost& cost) {
  auto& stream = state().streams[id];
  TaskNumber number = ++stream.submitted;
  ++state().submissions;
  join(stream.known, state().host_known);
  stream.known[id] = number;
  place(stream, id, name, cost);
  Task task;
  for (const auto& access : accesses) {
    log_access(id, number, access, name);
    access.block->pending.push_back({access.begin, access.end, access.write, id, number});
    access.block->busy_until = std::max(access.block->busy_until, stream.time);
    if (!access.block->fresh.empty()) {
      take_fresh(access, task.poison);
    }
  }
  trace("submit", id, name);
  task.run = std::move(run);
  task.name = std::move(name);
  task.accesses = accesses;
  stream.tasks.push_back(std::move(task));
  return number;
}

void submit_wait(StreamId id, const Event& event) {
  submit(id, "wait", nullptr);
  auto& stream = state().streams[id];
  auto& task = stream.tasks.back();
  task.wait_stream = event.stream;
  task.wait_task = event.task;
  join(stream.known, event.known);
  if (state().clock.on) {
    stream.waited = std::max(stream.waited, time_of(event));
  }
}

void record_event(Event& event, StreamId id) {
  auto& stream = state().streams[id];
  join(stream.known, state().host_known);
  event.stream = id;
  event.task = stream.submitted;
  event.known = stream.known;
  event.time = std::max(time_of(stream), state().clock.host);
  event.epoch = state().clock.epoch;
  event.queries = 0;
  trace("record", id, "");
}

// ---------------------------------------------------------------- execution

void run_until(StreamId id, TaskNumber task) {
  auto& stream = state().streams[id];
  while (stream.finished < task) {
    TORCH_INTERNAL_ASSERT(!stream.tasks.empty());
    const auto& first = stream.tasks.front();
    if (first.wait_stream >= 0) {
      run_until(first.wait_stream, first.wait_task);
    }
    run_first(id);
  }
}

void run_all() {
  for (auto& [id, stream] : state().streams) {
    run_until(id, stream.submitted);
  }
}

void advance() {
  switch (state().policy) {
    case Policy::lazy:
    case Policy::thread:
      return;
    case Policy::eager:
      return drain([](StreamId) { return true; });
    case Policy::copy_first:
      return drain([](StreamId id) { return id != 0; });
    case Policy::compute_first:
      return drain([](StreamId id) { return id == 0; });
    case Policy::random:
      return run_a_few();
  }
}

void set_policy(Policy policy, unsigned seed) {
  auto& device = state();
  device.policy = policy;
  device.random.seed(seed);
  uint64_t number = ++device.device_thread;  // ends an earlier thread
  if (policy == Policy::thread) {
    std::thread(device_thread, number).detach();
  }
}

// ---------------------------------------------------------------- the host waits

void host_waits_for_stream(StreamId id) {
  auto& stream = state().streams[id];
  settle(stream);
  host_waits(id, stream.submitted, stream.known, stream.time);
}

void host_waits_for_event(const Event& event) {
  host_waits(event.stream, event.task, event.known, time_of(event));
}

bool is_over(StreamId id, TaskNumber task, Picoseconds time) {
  if (!state().clock.on) {
    return state().streams[id].finished >= task;
  }
  if (time > state().clock.host) {
    return false;
  }
  run_until(id, task);
  return true;
}

bool host_sees_event(Event& event) {
  bool stuck = is_loop(event.polls);
  if (state().clock.on) {
    if (stuck) {
      clock_host_waits(time_of(event));
    }
  } else if (stuck || ++event.queries > kPatience) {
    run_until(event.stream, event.task);
  }
  advance();
  if (!is_over(event.stream, event.task, time_of(event))) {
    return false;
  }
  join(state().host_known, event.known);
  return true;
}

bool host_sees_stream(StreamId id) {
  auto& stream = state().streams[id];
  if (is_loop(stream.polls)) {
    clock_host_waits(time_of(stream));
    run_until(id, stream.submitted);
  }
  advance();
  if (!is_over(id, stream.submitted, time_of(stream))) {
    return false;
  }
  join(state().host_known, stream.known);
  return true;
}

}  // namespace sim
