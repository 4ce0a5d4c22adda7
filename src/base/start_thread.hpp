// Starts threads. An Error names the limit which keeps them from being started.
#pragma once

#include <lockstep/base/error.hpp>

#include <system_error>
#include <thread>
#include <utility>

namespace lockstep {

inline constexpr const char* kNoMoreThreads =
    "the system starts no more threads: ulimit -u, ulimit -v or a container may limit them. Raise that limit, or start "
    "fewer ranks and programs";

// Calls `start`, which starts threads, and returns its result. Throws Error if the system gives no more threads.
template <typename Start>
auto naming_thread_limit(const Start& start) {
  try {
    return start();
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::resource_unavailable_try_again) throw;
    throw Error(kNoMoreThreads, {Error::machine});
  }
}

// Makes a std::thread or a std::jthread as its constructor does, but throws that Error.
template <typename Thread = std::thread, typename Work>
Thread start_thread(Work&& work) {
  return naming_thread_limit([&] { return Thread(std::forward<Work>(work)); });
}

}  // namespace lockstep
