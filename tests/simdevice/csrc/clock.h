// Simulated time.  Times are fixed when a task is submitted, so they do not depend on when closures run.
#pragma once

#include "state.h"

namespace sim {

Picoseconds to_picoseconds(double seconds);
double to_seconds(Picoseconds time);

// Costs; those of a clock that is off are not timed.
Cost copy_cost(Direction direction, size_t bytes, bool pageable);
Cost operator_cost(double flops, size_t bytes_touched);
Cost fixed_cost(double seconds);

Picoseconds time_of(const StreamQueue& stream);  // when everything submitted to it is over
Picoseconds time_of(const Event& event);

void place(StreamQueue& stream, StreamId id, const std::string& name, const Cost& cost);
void settle(StreamQueue& stream);  // counts the idle time of a wait that no task followed
void clock_host_waits(Picoseconds until);
void clock_pinned_allocation(size_t bytes);
void clock_reset();
Picoseconds clock_now();
Picoseconds stalled(const StreamQueue& stream);

}  // namespace sim
