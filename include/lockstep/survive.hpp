// survive lets jobs on one machine go on when a process is killed. It is a wing: component survive, target
// lockstep::survive.
//   survive/elastic  makes a run() of your own such a job
// src/survive/README.md says how it works.
#pragma once

#include <lockstep/survive/elastic.hpp>
