// JobOptions: the fields of RunOptions (rank.hpp) that the processes of a job need, under the same names.
#pragma once

#include <chrono>
#include <stop_token>
#include <string>

#include "silence_limit.hpp"

namespace lockstep::comm {

struct JobOptions {
  std::chrono::milliseconds timeout, rendezvous_timeout;
  SilenceRange silence;
  std::stop_token stop;
  std::string configuration;  // a text that must be equal in all processes
};

}  // namespace lockstep::comm
