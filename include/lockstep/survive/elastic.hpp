// elastic: lets your own run() outlive killed processes and take in others, under `lockstep launch --elastic`.
//
//   lockstep::run(devices, body, {.succession = lockstep::elastic});
//
// run() calls the body again in each new set of processes. Changes that the body has made stay. So
//  1. begin the body by bringing all ranks to the state of the most advanced one;
//  2. in a step, change the state last, after all that the step needs of the others;
//  3. between two steps call regroups(), and return from the body if it gives true.
// docs/guide/elastic-loop.md has a whole loop. train() and fit() are elastic by themselves.
#pragma once

#include <lockstep/ranks/rank.hpp>

#include <memory>

namespace lockstep {

// Give it as RunOptions::succession. It gives null without `lockstep launch --elastic`, and the run is as any other.
// There can be one such run per process. A process that comes when the job is done calls no body. run() then throws
// Error too if fewer processes are left than --min-processes, and for ranks on GPUs, where an update may be under way
// when a process is lost: take fit() for GPUs. A process that has not begun within the rendezvous timeout counts as
// dead.
std::shared_ptr<Succession> elastic(const Devices& devices, const RunOptions& options);

// Tells whether another process waits to join. Call this between two steps, on all ranks, on the run's own Rank. Make
// the first call as soon as all ranks have the same state: others can join only from then on. It gives false in a run
// that is not elastic. Cost: one small allgather. Throws Error on a group's Rank.
bool regroups(Rank& rank);

}  // namespace lockstep
