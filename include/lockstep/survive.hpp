// survive: lets jobs on one machine go on when a process is killed. It is a wing: component survive, target
// lockstep::survive.
//   survive/elastic  makes a run() of your own go on so
// How it works: src/survive/README.md.
#pragma once

#include <lockstep/survive/elastic.hpp>
