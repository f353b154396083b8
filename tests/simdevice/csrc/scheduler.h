// Streams as queues of closures, the schedules that run them, and the log that finds unordered accesses.
#pragma once

#include "clock.h"
#include "state.h"

namespace sim {

// ---------------------------------------------------------------- submission
TaskNumber submit(StreamId id, std::string name, std::function<void()> run, const std::vector<Access>& accesses = {},
                  const Cost& cost = {});
void submit_wait(StreamId id, const Event& event);
void record_event(Event& event, StreamId id);

// ---------------------------------------------------------------- execution
void run_until(StreamId id, TaskNumber task);
void run_all();
void advance();  // what the schedule lets happen by itself
void set_policy(Policy policy, unsigned seed);

// ---------------------------------------------------------------- the host waits
void host_waits_for_stream(StreamId id);
void host_waits_for_event(const Event& event);
bool host_sees_event(Event& event);  // event.query()
bool host_sees_stream(StreamId id);
// Is this task over as far as the host can tell?  With the clock on, simulated time decides, else what has run.
bool is_over(StreamId id, TaskNumber task, Picoseconds time);

// ---------------------------------------------------------------- happens-before log (race_log.cpp)
void log_access(StreamId id, TaskNumber task, const Access& access, const std::string& name);
void log_host_access(const Access& access, const std::string& name);
// Accesses of the device to these bytes that the host has not waited for; reads only matter to a host that writes.
std::vector<const Record*> unseen_by_host(const Access& access);
void trace(const char* what, StreamId id, const std::string& name);

}  // namespace sim
