// survive: jobs on one machine that go on when a process is killed. Storey 2.
//   elastic  a run() of your own that does so
//
// How it works. Each set of processes that trains together is a generation (src/survive/generations.hpp). The launcher
// decides who is lost and who comes (elastic_launch.hpp), and each process follows (elastic_job.hpp).
#pragma once

#include <lockstep/survive/elastic.hpp>
