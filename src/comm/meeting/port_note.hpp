// PortNote: where the process with rank 0 leaves the port that it took for the job's store, and the others look for it.
// It is a file of the temporary folder, for processes of one machine, or a TCPStore that all reach, such as torchrun's.
// Both may hold what an earlier job left, so whoever reads one must see whether a store answers at that port.
#pragma once

#include "job_store.hpp"
#include "launch_environment.hpp"

#include <optional>
#include <string>

namespace lockstep::comm {

class PortNote {
 public:
  // `job` must be a name that no other running job has on this machine, or in that store.
  PortNote(const std::string& job, const std::optional<StorePlace>& store);
  ~PortNote() { take_away(); }
  PortNote(const PortNote&) = delete;
  PortNote& operator=(const PortNote&) = delete;

  // These two throw c10::Error if the store cannot be used, and Error if an address cannot be found.
  void leave(int port);
  int read();  // 0: nothing is there, or another user's file. Throws ForeignValue

  bool is_left() const { return is_left_; }  // a file, by this process, which is to be taken away
  void take_away();                          // if it is left
  std::string place() const;                 // for texts

 private:
  c10d::Store& store();

  const std::string name_;  // of the file, or the key
  const std::optional<StorePlace> told_in_;
  StorePtr store_;  // null: not connected yet, or it is a file
  bool is_left_ = false;
};

}  // namespace lockstep::comm
