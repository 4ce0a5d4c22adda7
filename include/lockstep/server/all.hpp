// server: keeps parameters on servers, to which workers push, and from which they pull.
//   parameter_server  ParameterServer: servers keep the parameters, workers compute gradients
//
// How it works: some ranks keep the parameters and update them. The others push gradients and pull parameters. Workers
// wait for each other at every step, never, or when one is too far ahead. src/server/shard_server.cpp is the server's
// loop, parameter_server_rank.cpp the worker's side (docs/decisions/0012).
#pragma once

#include <lockstep/server/parameter_server.hpp>
