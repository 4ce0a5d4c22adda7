#include "network.hpp"

#include <algorithm>

namespace lockstep::simulation {
namespace {

Network* of_simulation = nullptr;

std::pair<int, int> pair_of(const Process& one, const Process& other) {
  return std::minmax(one.number, other.number);
}

}  // namespace

Network& network() {
  return *of_simulation;
}

Network::Endpoint::Endpoint(Network& network, Process& process)
    : number(network.next_++), process(process), network(network) {
  network.endpoints_[number] = this;
  ++process.groups;
}

Network::Endpoint::~Endpoint() {
  network.endpoints_.erase(number);
  --process.groups;
}

Network::Network(Scheduler& scheduler) : scheduler(scheduler), latency_(20 * kMicrosecond << scheduler.draw(8)) {
  of_simulation = this;
}

Time Network::arrival(const Process& from, const Process& to) {
  Time time = scheduler.now() + 5 * kMicrosecond + static_cast<Time>(scheduler.draw(latency_));
  if (lateness > 0 && scheduler.one_in(50)) time += static_cast<Time>(scheduler.draw(lateness));
  time = std::max(time, cut_until(from, to));
  Time& last = last_arrival_[{from.number, to.number}];
  last = std::max(last, time);
  return last;
}

void Network::cut(const Process& one, const Process& other, Time until) {
  scheduler.note("cut: " + one.name + " from " + other.name);
  Time& time = cut_[pair_of(one, other)];
  time = std::max(time, until);
}

Time Network::cut_until(const Process& one, const Process& other) const {
  const auto found = cut_.find(pair_of(one, other));
  return found == cut_.end() ? 0 : found->second;
}

Network::Endpoint* Network::endpoint(int number) const {
  const auto found = endpoints_.find(number);
  return found == endpoints_.end() ? nullptr : found->second;
}

bool Network::is_reset(const Process& from, const Process& to) const {
  return reset_.contains({from.number, to.number});
}

// The system closes a dead process's connections. What it had sent still comes, and then the end. Or, if it had left
// something unread, the system resets the connection, and what is on the way is lost.
void Network::tell_of_death(const Process& dead) {
  for (const auto& other : scheduler.processes()) {
    if (other.get() == &dead) continue;
    if (dead.killed && scheduler.one_in(2)) reset_.insert({dead.number, other->number});
    scheduler.at(arrival(dead, *other), [this, &dead, &other = *other] {
      for (const auto& [number, endpoint] : endpoints_) {
        if (&endpoint->process == &other) endpoint->process_is_gone(dead);
      }
    });
  }
}

}  // namespace lockstep::simulation
