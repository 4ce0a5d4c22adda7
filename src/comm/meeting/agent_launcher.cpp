#include "agent_launcher.hpp"

#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>

#include <utility>

namespace lockstep::comm {
namespace {

constexpr std::chrono::milliseconds kUntilWelcome{10'000};  // once node 0 has no patience left

}  // namespace

AgentLauncher::AgentLauncher(const StorePtr& store, Job job, LaunchedMachine& machine)
    : job_(std::move(job)), machine_(machine) {
  with_store([&] { agent_.emplace(store, job_.name, job_.node, job_.arrival); });
}

bool AgentLauncher::look(int ending) {
  const auto now = Clock::now();  // before it asks: it may stand still afterwards, while the answer lies there
  const size_t started_before = started_;
  with_store([&] {
    const auto orders = agent_->orders();
    if (!is_over_) obey(orders, ending != 0);
    if (welcome_ || is_over_) return;
    if (const auto why = agent_->refusal(); !why.empty()) end(1, why);
  });
  if (!welcome_ && !is_over_ && now - came_ > job_.patience + kUntilWelcome) {
    end(1, "node 0's launcher did not take this machine in");
  }
  return started_ > started_before || (!is_over_ && ending == 0);  // the job may be over as soon as one has started
}

void AgentLauncher::obey(const std::vector<Order>& orders, bool ends) {
  for (const Order& order : orders) {
    if (order.kind == Order::Kind::welcome) welcome_ = true;
    if (order.kind == Order::Kind::start && !ends) start(order);
    if (order.kind == Order::Kind::kill) machine_.kill(order.member);
    if (order.kind == Order::Kind::out) come_again();
    if (order.kind == Order::Kind::over) end(order.code, order.why);
  }
}

void AgentLauncher::start(const Order& order) {
  try {
    machine_.start(order.member, order.place);
    running_.insert(order.member);
    ++started_;
  } catch (const Error& error) {  // as of one that ended at once: node 0 decides what follows
    machine_.say(error.what());
    agent_->note_end(order.member, {.failed = true, .stopped = false, .how = error.what()}, /*killed=*/false, 1);
  }
}

void AgentLauncher::come_again() {
  machine_.say("this machine stood still or was not reached, and the others have gone on without it; it joins again");
  for (const int member : running_) machine_.kill(member);
  welcome_ = false;
  came_ = Clock::now();
  agent_->come();
}

bool AgentLauncher::note_end(int member, const ProcessEnd& end, bool killed, int code) {
  running_.erase(member);
  bool go_on = false;
  with_store([&] { go_on = agent_->note_end(member, end, killed, code); });
  return go_on;
}

void AgentLauncher::leave(int code) {
  with_store([&] { agent_->leave(code); });
}

void AgentLauncher::end(int code, const std::string& why) {
  if (!why.empty()) machine_.say(why);
  is_over_ = true;
  if (code != 0) machine_.end_all(code);
}

template <class Work>
void AgentLauncher::with_store(const Work& work) {
  if (is_cut_off_) return;
  try {
    work();
  } catch (const c10::DistError&) {
    is_cut_off_ = true;
    if (!is_over_) {
      end(1, "node 0 is gone: its launcher keeps the job's store at " + job_.store_place +
                 ", which does not answer. The job ends");
    }
  }
}

}  // namespace lockstep::comm
