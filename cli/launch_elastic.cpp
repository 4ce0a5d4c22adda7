// The launcher of an elastic job that keeps its store: the only one, or that of the first machine. It starts its own
// processes, and gives orders to the other machines' launchers.
#include <lockstep/base/error.hpp>

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/meeting/elastic_launch.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "launched_job.hpp"
#include "text.hpp"

namespace lockstep::cli {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

class ElasticLauncher {
 public:
  ElasticLauncher(const LaunchFlags& flags, LaunchMessages& messages)
      : flags_(flags), messages_(messages), words_(program_words(flags)), patience_(patience_with_others()) {
    processes_.emplace(options(), messages_);  // before the store starts threads
    keep_store();
    made_ = Clock::now();
    elastic_.emplace(store_, job(), flags.all_processes(), flags.restarts(),
                     comm::ElasticLaunch::Limits{.until_first_beat = patience_},
                     comm::ElasticLaunch::Machines{flags.nodes.count, flags.nodes.most});
    if (!has_agents()) start_all();
  }

  ChildProcesses::Ending wait() {
    const auto ending = processes_->wait();
    if (ending.failed && elastic_->has_lost() && !elastic_->takes_part()) {
      messages_.say(
          "a killed process has ended this job, since its program takes no part in --elastic; lockstep train does");
    }
    return ending;
  }

 private:
  bool has_agents() const { return flags_.nodes.most > 1; }

  ChildProcesses::Options options() {
    ChildProcesses::Options options{.name = "process",  // a successor has another number than the rank it replaces
                                    .label = flags_.label,
                                    .until_term_when_stopped = std::chrono::seconds(flags_.grace)};
    if (has_agents()) options.between_looks = 10ms;
    options.on_end = [this](int member, const ChildProcesses::Options::End& end) {
      return note_end(member, {end.failed, end.stopped, end.how}, end.killed);
    };
    options.losses_count = false;
    options.look = [this](int ending) { return look(ending); };
    return options;
  }

  void keep_store() {
    if (has_agents()) {
      std::stop_source asked;
      const std::jthread looks([&](const std::stop_token& end) { wait_for_request(end, asked); });
      const comm::WaitLimit limit{patience_, asked.get_token()};
      rendezvous_ = std::make_unique<comm::Rendezvous>(environment_of_node(flags_), limit);
      check_address();
      store_ = rendezvous_->connect_to_all();
      where_ = {rendezvous_->store_address(), rendezvous_->store_port(), checked_key_file(flags_.nodes)};
      return;
    }
    key_ = std::make_unique<comm::HandedKey>();
    const std::string address = comm::loopback_address();
    const auto kept =
        comm::host_store(address, 0, {key_->key(), [this](const std::string& text) { messages_.say(text); }});
    store_ = kept.store;
    where_ = {address, kept.port, key_->file()};
  }

  // ChildProcesses takes signals once it waits. Until then they are blocked, and the rendezvous may take long.
  static void wait_for_request(const std::stop_token& end, std::stop_source& asked) {
    for (sigset_t signals; !end.stop_requested() && !asked.stop_requested(); std::this_thread::sleep_for(10ms)) {
      sigpending(&signals);
      for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM}) {
        if (sigismember(&signals, signal) == 1) asked.request_stop();
      }
    }
  }

  // With other machines from the start, they tell by which address they reach this one.
  void check_address() const {
    const std::string& address = rendezvous_->store_address();
    if (flags_.nodes.count > 1 || flags_.nodes.on_one_machine || !is_on_loopback(address)) return;
    throw Error(flags_.nodes.address_name + " " + flags_.nodes.address + " means this machine itself here (" + address +
                "), so no other machine could come: set it to an address of this machine that the others reach");
  }

  comm::LaunchEnvironment environment_of_member(int member) const {
    return environment_of(elastic_variables(flags_, where_, elastic_ ? elastic_->place_of(member) : 0, member));
  }
  std::string job() const { return environment_of_member(0).job; }

  void start_all() {
    begun_ = true;
    for (const auto& start : elastic_->begin()) begin(start);
  }

  void begin(const comm::ElasticLaunch::Start& start) {
    if (start.node != 0) return;
    auto variables = elastic_variables(flags_, where_, start.place, start.member);
    variables.push_back(printed_.variable());
    processes_->start(words_, variables, start.member);
  }

  // Gives whether the others go on.
  bool note_end(int member, const comm::ProcessEnd& end, bool killed) {
    const bool go_on = elastic_->note_end(member, end, killed);
    if (!go_on && end.failed && why_.empty()) {
      why_ = format("process %d of node %d is gone: ", member, elastic_->node_of(member)) + end.how;
    }
    if (go_on || elastic_->takes_part()) return go_on;
    const auto announced = comm::announce_end(store_, environment_of_member(member), end);
    if (end.failed)
      printed_.add("error: " + announced.absence);  // ChildProcesses says how it ended; of one that succeeded, nothing
    return announced.is_loss;
  }

  bool look(int ending) {
    if (has_agents()) {
      is_ending_ = ending != 0;
      if (is_ending_) end_agents(ending);
      hear();
      if (!begun_) return ending == 0 ? wait_for_agents() : !elastic_->agents_are_gone();
    }
    if (ending == 0 && (!has_agents() || Clock::now() - looked_ >= kBetweenLooks)) {
      looked_ = Clock::now();
      look_at_hearts();
      if (start_successors()) return true;
      if (elastic_->lacks_successors() && !std::exchange(said_that_none_are_left_, true)) {
        messages_.say(format("no successors are left, since at most %d start (--max-restarts of lockstep launch)",
                             flags_.restarts()));
      }
    }
    if (!has_agents()) return false;
    if (!elastic_->some_run()) end_agents(ending);
    return !elastic_->agents_are_gone();
  }

  // Their users learn why. Nobody asks why all has succeeded.
  void end_agents(int code) {
    if (why_.empty()) why_ = "it was ended there";
    elastic_->end(code, code == 0 ? "" : "node 0 has ended the job: " + why_);
  }

  // Gives whether to go on waiting.
  bool wait_for_agents() {
    const auto absent = elastic_->absent_nodes();
    if (absent.empty()) {
      start_all();
    } else if (Clock::now() - made_ > patience_) {
      std::string list;
      for (const int node : absent) list += (list.empty() ? "" : ", ") + std::to_string(node);
      messages_.say(
          format("no launcher has come from node%s %s within %g s. Start it there with --node, --nodes and "
                 "--master; if it only takes long, raise LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)",
                 absent.size() == 1 ? "" : "s", list.c_str(), patience_.count() * 1e-3));
      why_ = "not all machines have come";
      processes_->end_all(1);
    }
    return true;
  }

  // What happens on other machines.
  void hear() {
    const auto heard = elastic_->hear();
    for (const auto& why : heard.refused) messages_.say("turned away: " + why);
    for (const auto& report : heard.ended) {
      const bool go_on = note_end(report.member, report.end, report.killed);
      if (!report.end.failed) continue;
      messages_.say(format("process %d of node %d is gone: ", report.member, elastic_->node_of(report.member)) +
                    report.end.how + (go_on ? "; the others go on without it" : ""));
      if (!go_on) processes_->end_all(report.code);
    }
    for (const auto& loss : heard.lost) lose(loss);
    for (const int node : heard.came) {
      if (begun_) messages_.say(format("node %d has come", node));
    }
  }

  void lose(const comm::ElasticLaunch::Heard::LostNode& loss) {
    const bool asked = loss.code && *loss.code > 128;  // a signal to one launcher ends the job everywhere
    if (loss.code && (is_ending_ || (loss.members.empty() && !asked))) return;  // it has ended with its processes
    const std::string how =
        format("node %d is gone: its launcher ", loss.node) +
        (!loss.code ? std::string("gives no sign of life") : format("has ended with exit code %d", *loss.code));
    const bool go_on = loss.go_on && !asked;
    messages_.say(how + (!go_on || is_ending_ || !elastic_->some_run() ? ""
                         : begun_                                      ? "; the others go on without it"
                                                                       : "; the job begins once it has come again"));
    if (go_on || is_ending_) return;
    if (why_.empty()) why_ = how;
    processes_->end_all(asked ? *loss.code : 1);
  }

  void look_at_hearts() {
    const auto now = elastic_->look();
    for (const int member : now.joined) messages_.say(format("process %d has joined", member));
    for (const int member : now.dead) {
      messages_.say(format("process %d stands still, and is killed", member));
      kill(member);
    }
    for (const int member : now.late) {
      messages_.say(
          format("process %d has not begun to train within %g s, nor in twice the others' time, and is killed. If "
                 "starting only takes long, raise LOCKSTEP_RENDEZVOUS_TIMEOUT (seconds)",
                 member, patience_.count() * 1e-3));
      kill(member);
    }
  }

  void kill(int member) { elastic_->node_of(member) == 0 ? processes_->end(member) : elastic_->kill(member); }

  bool start_successors() {
    const auto starts = elastic_->successors();
    for (const auto& start : starts) {
      begin(start);
      messages_.say(format("process %d starts in the place of rank %d", start.member, start.place) +
                    (has_agents() ? format(", on node %d", start.node) : ""));
    }
    return !starts.empty();
  }

  static constexpr std::chrono::milliseconds kBetweenLooks{90};  // at hearts. At agents' words: 10 ms

  const LaunchFlags& flags_;
  LaunchMessages& messages_;
  const std::vector<std::string> words_;
  const std::chrono::milliseconds patience_;  // with processes and machines that do not begin
  const PrintedOnce printed_;
  Clock::time_point made_ = {};  // when the others' launchers could first come
  Clock::time_point looked_ = {};
  bool begun_ = false;
  bool is_ending_ = false;
  bool said_that_none_are_left_ = false;
  std::string why_ = {};                          // the job ends, for the other machines' users
  std::unique_ptr<comm::HandedKey> key_;          // of a job on one machine
  std::unique_ptr<comm::Rendezvous> rendezvous_;  // of one on several
  comm::StorePtr store_;
  JobStore where_;
  std::optional<comm::ElasticLaunch> elastic_;
  std::optional<ChildProcesses> processes_;  // last, since what it calls uses the others
};

}  // namespace

ChildProcesses::Ending launch_elastic(const LaunchFlags& flags, LaunchMessages& messages) {
  if (flags.nodes.node != 0) return launch_as_agent(flags, messages);
  return ElasticLauncher(flags, messages).wait();
}

}  // namespace lockstep::cli
