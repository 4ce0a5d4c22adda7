// Cluster: devices and the links between them, as a plan's predictions see them.
//
// Measured on this machine by measured_cluster() (layer_profile.hpp), or described in a JSON file (docs/plan.md), also
// for machines that are not there. Values without invariants but those that check_cluster() checks; no LibTorch.
// Thread-safe: no shared state.
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
  double start = 0;             // seconds that a collective takes beside its steps

  double seconds(double bytes) const { return latency + (bytes_per_second > 0 ? bytes / bytes_per_second : 0); }
};

// What devices of one kind of distance have between them. Collectives count as rings (docs/algorithms.md): each step
// has the latency, and sends the bytes at the rate, of `allreduce` or `allgather`; `start` comes once.
struct Links {
  Link send;  // from one device to another
  Link allreduce;
  Link allgather;
};

// Seconds that `ranks` devices need: the start, and 2 (ranks - 1) steps of bytes / ranks each; 0 for one device.
double allreduce_seconds(const Link& link, int ranks, double bytes);
// Until each of `ranks` devices, which holds 1 / ranks of them, has all `bytes`: ranks - 1 steps of bytes / ranks each.
double allgather_seconds(const Link& link, int ranks, double bytes);

struct Cluster {
  struct Device {
    double speed = 1;         // relative to the device that the model was profiled on: 2 computes in half the time
    double memory_bytes = 0;  // 0: no limit
  };

  std::vector<Device> devices;
  int devices_per_node = 1;  // device i is in node i / devices_per_node
  Links within;              // between devices of a node
  Links between;             // between devices of different nodes; the rate is each device's
  // How many times longer each of 1, 2, … devices of a node computes if so many of them do at once: what CPU ranks that
  // share cores and memory do to each other. More devices than entries take longer in proportion; empty: always 1.
  std::vector<double> contention;
  // The share of backward that the sums of gradients can hide behind: 1 where links work beside the devices, 0 where
  // the cores that compute also add.
  double overlap = 1;

  int node_of(int device) const { return device / devices_per_node; }
  double slowdown(double computing) const;  // see `contention`
};

// Throws Error that names the field: no device or more than 1024, a speed that is not above 0, a negative size or time,
// an overlap outside of 0 … 1, a contention below 1.
void check_cluster(const Cluster& cluster);

// The JSON description of docs/plan.md. from_json throws Error that names the key: one that is not known, a value of
// another type or out of its range; and as check_cluster. read_cluster also: a file that cannot be read.
std::string to_json(const Cluster& cluster);
Cluster cluster_from_json(std::string_view text);
Cluster read_cluster(const std::filesystem::path& file);

}  // namespace lockstep
