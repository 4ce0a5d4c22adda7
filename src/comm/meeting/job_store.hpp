// These functions keep the store of a job over the system's sockets, and connect to one. All other code of a job
// reaches the store through them, so tests of whole runs can put another store there (tools/simulated_jobs).
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "store_server.hpp"

#include <chrono>
#include <string>

namespace lockstep::comm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct KeptStore {
  StorePtr store;  // the server lives as long as this; null: no store
  int port = 0;    // the port where the store listens
};

// Makes a store that listens at a numeric address; port 0 takes a free one. Throws Error that names both.
KeptStore host_store(const std::string& address, int port, StoreGuard guard);

// Makes one that listens at every address of this machine.
KeptStore host_store_everywhere(int port, StoreGuard guard);

// Connects to the store there. A store that does not answer for 10 s counts as gone. Throws c10::Error.
StorePtr connect_to_store(const std::string& address, int port, const JobKey& key);

// Connects likewise to torchrun's store, which is c10d's TCPStore and lets everybody in.
StorePtr connect_to_tcp_store(const std::string& address, int port);

// Tells whether a store, or whatever else listens there, accepts connections now. Never waits past the deadline.
bool answers(const std::string& address, int port, std::chrono::steady_clock::time_point deadline);

}  // namespace lockstep::comm
