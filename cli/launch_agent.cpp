// The launcher of one machine in an elastic job of several, unless it keeps the store: it does as that one says.
#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>

#include <chrono>
#include <set>
#include <string>
#include <vector>

#include "comm/meeting/elastic_agent.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "launched_job.hpp"

namespace lockstep::cli {
namespace {

using namespace std::chrono_literals;
using comm::Order;
using Clock = std::chrono::steady_clock;

class Agent {
 public:
  Agent(const LaunchFlags& flags, LaunchMessages& messages)
      : flags_(flags),
        messages_(messages),
        words_(program_words(flags)),
        patience_(patience_with_others()),
        rendezvous_(environment_of_node(flags), comm::WaitLimit{patience_}),
        where_{rendezvous_.store_address(), rendezvous_.store_port(), checked_key_file(flags.nodes)},
        agent_(rendezvous_.connect_to_all(), environment_of(elastic_variables(flags, where_, 0, 0)).job,
               flags.nodes.node, {flags.processes, flags.nodes.most}),
        processes_(options(), messages_) {}

  ChildProcesses::Ending wait() {
    auto ending = processes_.wait();
    with_store([&] { agent_.leave(ending.code); });
    return ending;
  }

 private:
  ChildProcesses::Options options() {
    return {.name = "process",
            .label = flags_.label,
            .may_outlive = false,  // they would take SIGTERM for a request to end the whole job
            .between_looks = 10ms,
            .until_term_when_stopped = std::chrono::seconds(flags_.grace),
            .on_end =
                [this](int member, const ChildProcesses::Options::End& end) {
                  running_.erase(member);
                  bool go_on = false;
                  with_store([&] {
                    go_on = agent_.note_end(member, {end.failed, end.stopped, end.how}, end.killed, end.code);
                  });
                  return go_on;
                },
            .losses_count = false,
            .look = [this](int ending) { return look(ending); }};
  }

  // Gives whether to go on though no process runs.
  bool look(int ending) {
    with_store([&] {
      const auto orders = agent_.orders();  // also while processes end: it says that this machine lives
      if (!is_over_) obey(orders, ending != 0);
    });
    if (!welcome_ && !is_over_ && Clock::now() - came_ > patience_ + kUntilWelcome) {
      end(1, "node 0's launcher did not take this machine in");
    }
    return !is_over_ && ending == 0;
  }

  void obey(const std::vector<Order>& orders, bool ends) {
    for (const Order& order : orders) {
      if (order.kind == Order::Kind::welcome) welcome_ = true;
      if (order.kind == Order::Kind::start && !ends) start(order);
      if (order.kind == Order::Kind::kill) processes_.end(order.member);
      if (order.kind == Order::Kind::out) come_again();
      if (order.kind == Order::Kind::over) end(order.code, order.why);
    }
  }

  void start(const Order& order) {
    auto variables = elastic_variables(flags_, where_, order.place, order.member);
    variables.push_back(printed_.variable());
    try {
      processes_.start(words_, variables, order.member);
      running_.insert(order.member);
    } catch (const Error& error) {  // as of one that ended at once: node 0 decides what follows
      messages_.say(error.what());
      agent_.note_end(order.member, {.failed = true, .stopped = false, .how = error.what()}, /*killed=*/false, 1);
    }
  }

  void come_again() {
    messages_.say(
        "this machine stood still or was not reached, and the others have gone on without it; it joins again");
    for (const int member : running_) processes_.end(member);
    welcome_ = false;
    came_ = Clock::now();
    agent_.come();
  }

  void end(int code, const std::string& why) {
    if (!why.empty()) messages_.say(why);
    is_over_ = true;
    if (code != 0) processes_.end_all(code);
  }

  template <class Work>
  void with_store(const Work& work) {
    if (is_cut_off_) return;
    try {
      work();
    } catch (const c10::DistError&) {
      is_cut_off_ = true;
      if (!is_over_) {
        end(1, "node 0 is gone: its launcher keeps the job's store at " + where_.address + ":" +
                   std::to_string(where_.port) + ", which does not answer. The job ends");
      }
    }
  }

  static constexpr std::chrono::milliseconds kUntilWelcome{10'000};

  const LaunchFlags& flags_;
  LaunchMessages& messages_;
  const std::vector<std::string> words_;
  const std::chrono::milliseconds patience_;
  const PrintedOnce printed_;
  comm::Rendezvous rendezvous_;
  const JobStore where_;
  comm::ElasticAgent agent_;
  std::set<int> running_ = {};
  Clock::time_point came_ = Clock::now();
  bool welcome_ = false;
  bool is_over_ = false;
  bool is_cut_off_ = false;
  ChildProcesses processes_;  // last, since what it calls uses the others
};

}  // namespace

ChildProcesses::Ending launch_as_agent(const LaunchFlags& flags, LaunchMessages& messages) {
  return Agent(flags, messages).wait();
}

}  // namespace lockstep::cli
