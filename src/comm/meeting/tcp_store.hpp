// The store of a job as c10d's TCPStore over the system's sockets: to keep one, and to connect to one. All else of a
// job reaches its store through these, so tests of whole runs bring a store of their own in their place
// (tests/simulation).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace lockstep::comm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct KeptStore {
  StorePtr store;  // null: none
  int port = 0;    // where it listens
};

// A store that listens at a numeric address; port 0 takes a free one. Throws Error that names both.
KeptStore host_store(const std::string& address, int port);

// The same at every address of this machine. `address` is the one that this process itself uses.
KeptStore host_store_everywhere(const std::string& address, int port);

// A connection to the store there, which takes a store for gone that does not answer for 10 s. Throws c10::Error.
StorePtr connect_to_store(const std::string& address, int port);

// Whether a store accepts connections there, now. Never waits past the deadline.
bool store_answers(const std::string& address, int port, std::chrono::steady_clock::time_point deadline);

// "127.0.0.1:80", "[::1]:80"
std::string store_place(const std::string& address, int port);

}  // namespace lockstep::comm
