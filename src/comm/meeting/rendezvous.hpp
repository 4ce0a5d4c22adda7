// By a Rendezvous the processes of a job find each other, through a store.
//
// torchrun and `lockstep launch` keep the store themselves, and every process is a client. Otherwise the process of
// rank 0 keeps it at MASTER_ADDR and MASTER_PORT. On one machine it may take a free port of loopback, which a note
// tells the others (PortNote). The store listens on loopback unless MASTER_ADDR names another address. It answers
// only clients that know the job's key, but torchrun's store answers everybody. Every wait has a deadline. All calls
// of a Rendezvous are thread-safe.
#pragma once

#include "job_store.hpp"
#include "launch_environment.hpp"
#include "wait_limit.hpp"

#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::comm {

// Gives the prefix of all of a job's keys in its store.
std::string job_prefix(const std::string& job);

// Gives the address where processes of one machine meet: 127.0.0.1, or ::1 if the machine has IPv6 alone. Throws Error
// if it has neither.
std::string loopback_address();

// Says why a process is wrong at its MASTER_PORT: words that follow its name. `size` is the size of the job that is
// there.
std::string another_job_text(const std::string& size);

// A PortNote is a file of the temporary folder. By it the process of rank 0 tells the others of this machine the port
// of the job's store. The file may be left from an earlier job, so check that a store answers at the port.
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

class Rendezvous {
 public:
  // Throws Error if at the deadline nothing answers where the store should be. Throws Error if the job's key is
  // unusable, or if the store there is of a job of another size.
  Rendezvous(LaunchEnvironment launch, const WaitLimit& limit);

  const LaunchEnvironment& launch() const { return launch_; }

  // Gives a connection for the caller alone, since a client of torchrun's store serves one thread at a time. It does
  // not see keys of other jobs and attempts. A connection that an earlier caller has let go is used again: for every
  // new one c10d asks the name service, which may take seconds.
  StorePtr connect(const std::string& prefix);

  // Call this when a run has failed. The store may still owe an answer, which would be taken for the answer to the next
  // question. So nobody uses these connections again.
  void drop_connections();

  // Removes the note by which the others find this process's store, once all have found it. Call this when all have
  // met, so that a process that is killed later leaves no file.
  void take_note_away();

  // Gives this machine's numeric address that peers reach, perhaps loopback.
  const std::string& local_address() const { return local_address_; }

  const std::optional<JobKey>& key() const { return key_; }  // gives nothing if the job has none

  bool hosts_store() const { return server_ != nullptr; }

 private:
  StorePtr idle_client();
  StorePtr new_client() const;
  void host();
  void find_host(std::chrono::steady_clock::time_point deadline, const WaitLimit& limit);
  void learn_local_address(std::chrono::steady_clock::time_point deadline, const WaitLimit& limit);
  void check_size(std::chrono::steady_clock::time_point deadline, const WaitLimit& limit);
  std::string size_text() const;
  std::string given_address() const;
  bool on_several_machines() const { return launch_.local_world_size < launch_.world_size; }

  const LaunchEnvironment launch_;
  const std::optional<JobKey> key_;
  std::string address_;  // the numeric address
  int port_ = 0;
  std::string local_address_;
  StorePtr server_;  // null: another process keeps the store

  std::mutex mutex_;              // guards what follows
  std::optional<PortNote> note_;  // nothing: the port is known
  std::vector<StorePtr> clients_;
};

}  // namespace lockstep::comm
