#include "member.hpp"

#include <algorithm>
#include <stdexcept>

namespace lockstep::simulation {
namespace {

const std::string kClosed = "Connection closed by peer";

}  // namespace

Member::Member(Process& process, int rank, int size)
    : Endpoint(simulation::network(), process), rank(rank), size(size), closed_(size, false) {}

Member::~Member() {
  close();
}

void Member::connect(const std::vector<int>& numbers) {
  numbers_ = numbers;
}

TransferPtr Member::call(uint32_t tag, Inputs to, std::function<void(Inputs&)> finish, int root) {
  const Key key{Kind::call, tag};
  const auto work = c10::make_intrusive<Transfer>();
  Call call{tag, work, Inputs(size), std::vector<bool>(size, false), std::move(finish)};
  call.inputs[rank] = to[rank];
  call.has[rank] = true;
  for (int other = 0; other < size; ++other) {
    if (root >= 0 && other != root) call.has[other] = true;
    if (other != rank && (root < 0 || root == rank)) post(other, key, std::move(to[other]));
  }
  calls_.push_back(std::move(call));
  if (complete(calls_.back())) calls_.pop_back();
  network.scheduler.point();
  return work;
}

// Takes what has come for the call. Gives whether it is over.
bool Member::complete(Call& call) {
  for (int other = 0; other < size; ++other) {
    if (call.has[other]) continue;
    auto& waiting = inbox_[{other, {Kind::call, call.tag}}];
    if (waiting.empty()) {
      if (!closed_[other]) return false;
      call.work->fail(kClosed);
      network.scheduler.wake_all(this);
      return true;
    }
    call.inputs[other] = std::move(waiting.front());
    call.has[other] = true;
    inbox_.erase({other, {Kind::call, call.tag}});
  }
  call.finish(call.inputs);
  call.work->complete();
  network.scheduler.wake_all(this);
  return true;
}

TransferPtr Member::send(int destination, uint32_t tag, Bytes bytes) {
  if (closed_[destination]) throw std::runtime_error(kClosed);
  post(destination, {Kind::message, tag}, std::move(bytes));
  const auto work = c10::make_intrusive<Transfer>(-1, true);
  work->complete();
  network.scheduler.point();
  return work;
}

TransferPtr Member::receive(int source, uint32_t tag, std::function<void(const Bytes&)> take) {
  const Key key{Kind::message, tag};
  const auto work = c10::make_intrusive<Transfer>(source, true);
  receives_[{source, key}].push_back({work, std::move(take)});
  if (!complete(source, key) && closed_[source]) throw std::runtime_error(kClosed);
  network.scheduler.point();
  return work;
}

bool Member::complete(int source, const Key& key) {
  auto& waiting = inbox_[{source, key}];
  auto& receives = receives_[{source, key}];
  bool any = false;
  while (!waiting.empty() && !receives.empty()) {
    receives.front().take(waiting.front());
    receives.front().work->complete();
    waiting.pop_front();
    receives.pop_front();
    any = true;
  }
  return any;
}

void Member::post(int destination, const Key& key, Bytes bytes) {
  if (closed_[destination]) return;
  Endpoint* const there = network.endpoint(numbers_[destination]);
  if (there == nullptr) return;
  Process &from = process, &to = there->process;
  network.scheduler.at(network.arrival(from, to), [&network = network, &from, &to, source = rank, key,
                                                   number = numbers_[destination], bytes = std::move(bytes)] {
    if (from.killed && network.is_reset(from, to)) return;
    if (auto* const member = dynamic_cast<Member*>(network.endpoint(number))) member->deliver(source, key, bytes);
  });
}

void Member::deliver(int source, const Key& key, Bytes bytes) {
  if (closed_[source]) return;
  inbox_[{source, key}].push_back(std::move(bytes));
  if (key.first == Kind::message) {
    complete(source, key);
    return;
  }
  const auto found =
      std::find_if(calls_.begin(), calls_.end(), [&](const Call& call) { return call.tag == key.second; });
  if (found != calls_.end() && complete(*found)) calls_.erase(found);
}

void Member::lose(int peer) {
  if (closed_[peer]) return;
  closed_[peer] = true;
  for (auto call = calls_.begin(); call != calls_.end();) call = complete(*call) ? calls_.erase(call) : std::next(call);
  for (auto& [from, receives] : receives_) {
    if (from.first != peer) continue;
    for (auto& receive : receives) receive.work->fail(kClosed);
    receives.clear();
  }
}

void Member::process_is_gone(const Process& gone) {
  for (int other = 0; other < static_cast<int>(numbers_.size()); ++other) {
    const Endpoint* const there = network.endpoint(numbers_[other]);
    if (other != rank && there != nullptr && &there->process == &gone) lose(other);
  }
}

void Member::close() {
  for (int other = 0; other < static_cast<int>(numbers_.size()); ++other) {
    if (other == rank || closed_[other]) continue;
    if (Endpoint* const there = network.endpoint(numbers_[other])) {
      network.scheduler.at(network.arrival(process, there->process),
                           [&network = network, number = numbers_[other], me = rank] {
                             if (auto* const member = dynamic_cast<Member*>(network.endpoint(number))) member->lose(me);
                           });
    }
    lose(other);
  }
}

}  // namespace lockstep::simulation
