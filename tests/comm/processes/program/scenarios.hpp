// Scenarios that the program of the process tests can run. Each throws if something is not as it should be.
#pragma once

#include <lockstep/devices/devices.hpp>

#include <string>

namespace scenarios {

struct Setup {
  lockstep::Devices devices;  // the machine's list
  std::string argument;
};

// Does main()'s work: runs the scenario that the words name.
int run_scenario(int argc, char** argv);

void collectives(const Setup& setup);  // all of them, with values that differ by rank
void training(const Setup& setup);     // writes the last rank's weights to the file `argument`
void fits(const Setup& setup);         // a network of its own by fit(), in the folder `argument`; tells its epochs
void own_loop(
    const Setup& setup);  // an elastic run(); the weights go to `argument`. "alone FILE": one that is not elastic
void random_nets(const Setup& setup);  // with a grain, on the mesh of `argument`, "2x1 FILE"; their bits go to the file
void runs(const Setup& setup);         // several runs, and one in another
void connects(const Setup& setup);     // all ranks, and a group
void lives(const Setup& setup);        // connects, computes and calls for half a second, or "for_ever"

// Ways to fail; rank 1 is to blame.
void throws(const Setup& setup);              // the others wait in an allreduce, or with `argument` "recv" in a receive
void dies(const Setup& setup);                // without a word: killed, or with `argument` "exit" by std::exit(7)
void dies_in_a_backward(const Setup& setup);  // before the third one of a DataParallel
// The process of `argument`, "NUMBER FOLDER" (-1: none), in the first evaluation of a fit() with a grain.
void dies_in_an_evaluation(const Setup& setup);
void dies_while_it_receives(const Setup& setup);  // all ranks of process 1
void runs_out_of_memory(const Setup& setup);      // a "tensor", a "vector", or more than a "limit" of its own
void reads_on(const Setup& setup);                // past the others' timeout
void returns_early(const Setup& setup);           // without the others' call, for which they wait, or with "poll" ask
void asks_in_vain(const Setup& setup);     // does not wait for an allreduce, or with "send" a message, and returns
void shares_memory(const Setup& setup);    // two ranks of a process give one tensor
void calls_otherwise(const Setup& setup);  // a broadcast, or an allreduce that is "max", "long" or "empty"
void calls_otherwise_in_a_group(const Setup& setup);  // the group of ranks 0 and 1; the others wait in the whole run
void parts_do_not_fit(const Setup& setup);
void grains_of_others(const Setup& setup);
// Another "size" than was sent, a "tag" that is too large, or "none" was sent.
void message_fails(const Setup& setup);
void serves(const Setup& setup);             // runs a parameter server; the rank that `argument` names is killed
void freezes(const Setup& setup);            // rank 0
void sleeps(const Setup& setup);             // rank 1, and lets the others wait for three seconds
void is_asked_to_stop(const Setup& setup);   // by SIGTERM, while the others wait for rank 1, which `argument`
void has_a_stranger(const Setup& setup);     // in its store, under the key `argument`
void has_a_batch_fewer(const Setup& setup);  // than the others' DataParallel, and then waits in a barrier
void waits_crosswise(const Setup& setup);    // both wait for a message of the other; "mixed": rank 0 in an allreduce
void is_configured_otherwise(const Setup& setup);  // the process with index 1

}  // namespace scenarios
