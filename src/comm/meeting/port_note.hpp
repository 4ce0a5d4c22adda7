// PortNote: where the process with rank 0 leaves the port that it took for the job's store, and the others of its
// machine look for it: a file of the temporary folder. It may be what an earlier job left, so whoever reads it must see
// whether a store answers at that port.
#pragma once

#include <string>

namespace lockstep::comm {

class PortNote {
 public:
  explicit PortNote(const std::string& job);  // a name that no other running job has on this machine
  ~PortNote() { take_away(); }
  PortNote(const PortNote&) = delete;
  PortNote& operator=(const PortNote&) = delete;

  void leave(int port);
  int read() const;  // 0: nothing is there, or another user's file

  bool is_left() const { return is_left_; }  // by this process, which is to take it away
  void take_away();                          // if it is left
  const std::string& place() const { return file_; }

 private:
  const std::string file_;
  bool is_left_ = false;
};

}  // namespace lockstep::comm
