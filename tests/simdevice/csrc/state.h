// Everything the simulated device knows: its streams, its memory, its clock, and what it has found.
//
// Device memory is host memory.  A stream is a queue of closures over raw pointers, and a closure runs only when
// something forces it or when the schedule lets it.  One recursive mutex guards all of it.
#pragma once

#include <Python.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceType.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xff;  // every floating point type reads bytes of ones as NaN

using StreamId = int64_t;
using TaskNumber = uint64_t;    // the n-th task of a stream, from one
using Picoseconds = int64_t;    // integers, so that sums of durations are exact

// ---------------------------------------------------------------- happens-before

// Per stream, the last of its tasks that is known to be over.
using VectorClock = std::map<StreamId, TaskNumber>;

inline void join(VectorClock& into, const VectorClock& other) {
  for (const auto& [stream, task] : other) {
    auto& known = into[stream];
    known = std::max(known, task);
  }
}

inline TaskNumber known_task(const VectorClock& clock, StreamId stream) {
  auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}

// ---------------------------------------------------------------- memory

struct Range {
  size_t begin;
  size_t end;
};

// An access in the log of a block: who touched which bytes.
struct Record {
  size_t begin;
  size_t end;
  StreamId stream;
  TaskNumber task;
  bool write;
  std::string name;
};

// An access of a task that has not run yet.
struct Pending {
  size_t begin;
  size_t end;
  bool write;
  StreamId stream;
  TaskNumber task;
};

// How far a stream had come when memory that `record_stream` had marked was freed.
struct Use {
  TaskNumber task = 0;
  Picoseconds time = 0;
};

constexpr StreamId kPinnedPool = -1;

struct Block {
  char* data;
  size_t size;
  size_t requested;
  bool pinned;
  StreamId pool;                  // the stream that it was allocated on, or kPinnedPool
  uint64_t number;                // a new one for every allocation
  std::map<StreamId, Use> used_by;  // record_stream
  std::vector<Record> log;
  std::vector<Pending> pending;
  std::vector<Range> fresh;       // bytes nothing has touched since the allocation: poisoned before their first use
  Picoseconds busy_until = 0;
};

struct Access {
  Block* block;
  size_t begin;
  size_t end;
  bool write;
};

// ---------------------------------------------------------------- streams and events

enum class Direction { none, out, in };  // out: device to host

// What a task takes.  Tasks that are not timed leave no trace in simulated time.
struct Cost {
  bool timed = false;
  Picoseconds duration = 0;
  Direction link = Direction::none;
};

struct Task {
  std::function<void()> run;
  std::string name;
  std::vector<Access> accesses;
  std::vector<std::pair<char*, size_t>> poison;  // memory to overwrite just before running
  StreamId wait_stream = -1;                      // the task may start once this stream has ...
  TaskNumber wait_task = 0;                       // ... finished this task
};

// How often the host has asked whether something is over, without doing anything else in between.
struct Polls {
  int count = 0;
  uint64_t submissions = 0;
};

struct StreamQueue {
  std::deque<Task> tasks;
  TaskNumber submitted = 0;
  TaskNumber finished = 0;
  VectorClock known;
  Polls polls;

  Picoseconds time = 0;     // when its last task ends
  Picoseconds waited = 0;   // the latest event that it was told to wait for
  Picoseconds stalled = 0;  // how long it stood idle for events
};

struct Event {
  StreamId stream = -1;
  TaskNumber task = 0;
  VectorClock known;
  Picoseconds time = 0;
  uint64_t epoch = 0;        // times of an earlier epoch, before a reset of the clock, count as zero
  int queries = 0;           // since it was recorded
  Polls polls;
};

enum class Policy { lazy, eager, copy_first, compute_first, random, thread };

// ---------------------------------------------------------------- simulated time

struct Link {
  Picoseconds free_at = 0;
  Picoseconds busy = 0;
};

struct Interval {
  StreamId stream;
  std::string name;
  Picoseconds start;
  Picoseconds end;
};

struct SimulatedClock {
  bool on = false;
  // Rates of zero mean: free of charge.
  double out_bytes_per_s = 0;
  double in_bytes_per_s = 0;
  double pageable_factor = 1;
  double flops_per_s = 0;
  double memory_bytes_per_s = 0;
  double pinned_alloc_bytes_per_s = 0;
  Picoseconds latency = 0;
  Picoseconds per_operator = 0;
  Picoseconds per_submission = 0;
  Picoseconds per_pinned_alloc = 0;

  Picoseconds host = 0;
  uint64_t epoch = 1;
  Link out;
  Link in;
  bool logging = false;
  std::vector<Interval> log;
};

// ---------------------------------------------------------------- the device

struct State {
  std::recursive_mutex mutex;

  std::map<StreamId, StreamQueue> streams;
  int64_t streams_made = 0;
  uint64_t submissions = 0;
  Policy policy = Policy::lazy;
  uint64_t device_thread = 0;  // which background thread is the current one
  std::mt19937 random{0};
  std::string error;           // the first error of a closure, raised at the next wait of the host

  VectorClock host_known;
  std::vector<std::string> races;
  std::set<std::string> reported;

  std::map<uintptr_t, Block*> blocks;  // in use or cached, by address
  std::map<std::pair<StreamId, size_t>, std::vector<Block*>> cached;
  std::vector<Block*> deferred;  // freed, but a stream may still use them
  uint64_t blocks_made = 0;
  bool poison = true;
  bool strict_free = false;
  size_t limit = size_t(1) << 40;
  size_t pinned_limit = size_t(1) << 40;
  size_t pinned_now = 0;
  size_t pinned_peak = 0;
  size_t pinned_held = 0;  // in use or cached
  c10::CachingDeviceAllocator::DeviceStats stats;

  SimulatedClock clock;

  std::map<std::string, int64_t> counts;
  bool tracing = false;
  std::vector<std::string> trace;
};

State& state();

// Never waits for the mutex while holding the GIL: a kernel written in Python, run inside a closure, may need it.
class Lock {
 public:
  Lock() {
    auto& mutex = state().mutex;
    if (mutex.try_lock()) {
      return;
    }
    if (Py_IsInitialized() && PyGILState_Check()) {
      auto* saved = PyEval_SaveThread();
      mutex.lock();
      PyEval_RestoreThread(saved);
    } else {
      mutex.lock();
    }
  }
  ~Lock() { state().mutex.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

StreamId& current_stream();  // of this thread

}  // namespace sim
