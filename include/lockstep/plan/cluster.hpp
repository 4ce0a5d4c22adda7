// Cluster describes devices, and the links between them, for the predictions of a plan.
//
// measured_cluster() (layer_profile.hpp) measures this machine. A JSON file can describe others, also machines that do
// not exist (docs/plan.md). These are plain values without LibTorch, which check_cluster() checks. They share no state:
// thread-safe.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// A message of n bytes takes latency + n / bytes_per_second.
struct Link {
  double latency = 0;           // seconds
  double bytes_per_second = 0;  // 0: no limit
  double start = 0;             // the start of a collective in seconds, beyond its steps

  double seconds(double bytes) const { return latency + (bytes_per_second > 0 ? bytes / bytes_per_second : 0); }
};

// Holds the links between devices at one kind of distance. Collectives count as rings (docs/algorithms.md). Each step
// of a ring takes the time of a message over `allreduce` or `allgather`; `start` is added once.
struct Links {
  Link send;  // the link from one device to another
  Link allreduce;
  Link allgather;
};

// Returns the seconds of an allreduce of `bytes` among `ranks` devices: the start, and 2 (ranks - 1) steps of bytes /
// ranks each. One device takes 0.
double allreduce_seconds(const Link& link, int ranks, double bytes);
// Returns the seconds of an allgather among `ranks` devices, each of which holds 1 / ranks of the bytes: the start, and
// ranks - 1 steps of bytes / ranks each. One device takes 0.
double allgather_seconds(const Link& link, int ranks, double bytes);

struct Cluster {
  struct Device {
    double speed = 1;         // the speed relative to the device of the model's profile: 2 takes half the time
    double memory_bytes = 0;  // 0: no limit
  };

  std::vector<Device> devices;
  int devices_per_node = 1;  // device i is in node i / devices_per_node
  Links within;              // the links between devices of a node
  Links between;             // the links between devices of different nodes; the rate is each device's
  // Entry n - 1 says how many times longer a device computes if n devices of its node compute at once. CPU ranks slow
  // each other down like this, since they share cores and memory. With more devices than entries the time grows in
  // proportion. An empty list always gives 1.
  std::vector<double> contention;
  // The share of backward behind which the sums of gradients can hide. At 1 links work while devices compute. At 0 the
  // same cores compute and add.
  double overlap = 1;

  int node_of(int device) const { return device / devices_per_node; }
  double slowdown(double computing) const;  // see `contention`
};

// Throws Error that names the field: no device or more than 1024, a speed that is not above 0, a negative size or time,
// an overlap outside of 0 … 1, a contention below 1.
void check_cluster(const Cluster& cluster);

// These convert to and from the JSON description of docs/plan.md. cluster_from_json throws Error, which names the key,
// for an unknown key or a value of the wrong type or range, and as check_cluster does. read_cluster also throws for a
// file that cannot be read.
std::string to_json(const Cluster& cluster);
Cluster cluster_from_json(std::string_view text);
Cluster read_cluster(const std::filesystem::path& file);

}  // namespace lockstep
