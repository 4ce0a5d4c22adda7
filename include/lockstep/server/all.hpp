// server: parameters kept by servers, pushed to and pulled from by workers.
//   parameter_server  ParameterServer: servers keep the parameters, workers compute gradients
#pragma once

#include <lockstep/server/parameter_server.hpp>
