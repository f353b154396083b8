#include <sstream>

#include "scheduler.h"

namespace sim {

namespace {

const char* hazard(bool earlier_writes, bool later_writes) {
  if (!earlier_writes) {
    return "WAR";
  }
  return later_writes ? "WAW" : "RAW";
}

void report(const Block& block, const Record& earlier, bool write, const std::string& name, const std::string& who,
            const char* remedy) {
  std::ostringstream key;
  key << block.pinned << earlier.write << write << '|' << earlier.name << '|' << earlier.stream << '|' << name << '|'
      << who;
  if (!state().reported.insert(key.str()).second) {
    return;  // once per pair, not once per block
  }
  std::ostringstream message;
  message << hazard(earlier.write, write) << (block.pinned ? " pinned" : " device") << " block #" << block.number
          << ": " << name << " on " << who << (write ? " writes" : " reads") << " memory that " << earlier.name
          << " on stream " << earlier.stream << (earlier.write ? " writes" : " reads") << ", with no " << remedy
          << " ordering them";
  state().races.push_back(message.str());
}

bool overlap(const Record& record, const Access& access) {
  return record.begin < access.end && access.begin < record.end;
}

}  // namespace

void log_access(StreamId id, TaskNumber task, const Access& access, const std::string& name) {
  const auto& known = state().streams[id].known;
  auto& log = access.block->log;
  for (size_t i = 0; i < log.size();) {
    const auto& earlier = log[i];
    bool ordered = known_task(known, earlier.stream) >= earlier.task;
    if (!ordered && overlap(earlier, access) && (earlier.write || access.write)) {
      report(*access.block, earlier, access.write, name, "stream " + std::to_string(id), "event/wait");
    }
    // Whoever is ordered after this access is ordered after the earlier one too: that one need not be kept, unless it
    // conflicts with more.
    bool covered = access.begin <= earlier.begin && earlier.end <= access.end;
    if (ordered && covered && (access.write || !earlier.write)) {
      log[i] = std::move(log.back());
      log.pop_back();
    } else {
      ++i;
    }
  }
  log.push_back({access.begin, access.end, id, task, access.write, name});
}

std::vector<const Record*> unseen_by_host(const Access& access) {
  std::vector<const Record*> unseen;
  for (const auto& record : access.block->log) {
    bool conflict = overlap(record, access) && (record.write || access.write);
    if (conflict && known_task(state().host_known, record.stream) < record.task) {
      unseen.push_back(&record);
    }
  }
  return unseen;
}

// The host runs in order with its own submissions, so its accesses are checked and need not be kept.
void log_host_access(const Access& access, const std::string& name) {
  for (const auto* record : unseen_by_host(access)) {
    report(*access.block, *record, access.write, name, "the host", "synchronization");
  }
}

void trace(const char* what, StreamId id, const std::string& name) {
  if (state().tracing) {
    state().trace.push_back(std::string(what) + " s" + std::to_string(id) + (name.empty() ? "" : " ") + name);
  }
}

}  // namespace sim
