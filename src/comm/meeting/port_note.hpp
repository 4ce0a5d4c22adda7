// A PortNote is a file of the temporary folder. By it the process of rank 0 tells the others of this machine the port
// of the job's store. The file may be left from an earlier job, so check that a store answers at the port.
#pragma once

#include <string>

namespace lockstep::comm {

class PortNote {
 public:
  explicit PortNote(const std::string& job);  // takes a name that no other running job has on this machine
  ~PortNote() { take_away(); }
  PortNote& operator=(PortNote&&) = delete;

  void leave(int port);
  int read() const;  // gives 0 if nothing is there, or another user's file

  bool is_left() const { return is_left_; }  // this process left the note, and takes it away
  void take_away();                          // does nothing if this process left no note
  const std::string& place() const { return file_; }

 private:
  const std::string file_;
  bool is_left_ = false;
};

}  // namespace lockstep::comm
