// StoreServer: keeps a job's store, and answers clients that show that they know the job's key (store_messages.hpp).
//
//  1. One thread serves all. Nothing that a stranger sends or leaves out makes it wait.
//  2. A stranger gets a greeting, and no answer. It has a few seconds to show the key. At most 64 strangers can be
//     about it at the same time: another one takes the place of the one that has been there for longest.
//  3. The server reports strangers that it turns away: the first ones one by one, then the tenth, the hundredth and so
//     on.
//
// All calls are thread-safe. A question takes some 15 us over loopback.
#pragma once

#include "comm/job_key.hpp"
#include "sockets.hpp"

#include <chrono>
#include <functional>
#include <string>
#include <thread>

namespace lockstep::comm {

// A StoreGuard has the key that lets clients into a store, and a function that hears of strangers.
struct StoreGuard {
  JobKey key = JobKey::known_to_all();
  std::function<void(const std::string& text)> say = [](const std::string&) {};  // the server's thread calls it
  std::chrono::milliseconds patience{5'000};  // a stranger has so long to show the key
};

class StoreServer {
 public:
  // Takes the socket over. Throws Error if there are no more descriptors or threads.
  StoreServer(const Listener& listener, StoreGuard guard);
  ~StoreServer();
  StoreServer& operator=(StoreServer&&) = delete;

  // Gives the other end of a connection that this process itself may use. Call it once, and close the connection.
  int own_connection() const { return own_end_; }

 private:
  int own_end_ = -1;
  int stop_ = -1;  // an eventfd
  std::thread thread_;
};

}  // namespace lockstep::comm
