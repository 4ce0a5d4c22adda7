// Guilt: which faults of a simulated job came, whom an error may name, and what they excuse.
#pragma once

#include "outcome.hpp"

#include <string>
#include <vector>

namespace lockstep::simulation {

// A process says this where lost_all() is true.
constexpr const char* kLostAll = "all who did are gone";

std::string name(int process);  // "process 2"

std::vector<Strike> happened(const Course& course);
bool has(const std::vector<Strike>& strikes, Fault fault);

// Tells whether a fault hit the process, or it was never started.
bool is_faulty(const Course& course, int process);

// The words by which an error may name the one at fault.
std::vector<std::string> names_of_the_guilty(const Strike& strike, const Course& course);

// Tells whether the process can have been in a run that is over for the others, too.
bool is_done(const Outcome& outcome);

bool store_is_gone(const Course& course);

// All who had the state are gone, and one that had not got it yet finds the checkpoints.
bool lost_all(const Course& course);

// Tells whether all who had an elastic job's state are gone.
bool is_nobody_left(const Course& course);

// Without a fault that ends it the run goes on, as long as any are left to.
bool must_end_well(const Course& course);

}  // namespace lockstep::simulation
