// The launcher of an elastic job that keeps its store: the only one, or that of the first machine. What it decides is
// comm/meeting/first_launcher.hpp's.
#include <lockstep/base/error.hpp>

#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "comm/meeting/first_launcher.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "launched_job.hpp"

namespace lockstep::cli {
namespace {

using namespace std::chrono_literals;

class ElasticLauncher : public comm::LaunchedMachine {
 public:
  ElasticLauncher(const LaunchFlags& flags, LaunchMessages& messages)
      : flags_(flags), messages_(messages), words_(program_words(flags)), patience_(patience_with_others()) {
    processes_.emplace(options(), messages_);  // before the store starts threads
    keep_store();
    launcher_.emplace(
        store_,
        comm::FirstLauncher::Job{.name = environment_of_member(0, 0).job,
                                 .processes = flags.all_processes(),
                                 .restarts = flags.restarts(),
                                 .machines = {flags.nodes.count, flags.nodes.most},
                                 .limits = {.until_first_beat = patience_},
                                 .restarts_name = "--max-restarts of lockstep launch",
                                 .how_to_start_one = flags.nodes.how_to_start_one},
        *this, [this](int member, int place, const comm::ProcessEnd& end) { return announce(member, place, end); });
    launcher_->begin();
  }

  ChildProcesses::Ending wait() {
    const auto ending = processes_->wait();
    if (ending.failed && launcher_->has_lost() && !launcher_->takes_part()) {
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
      return launcher_->note_end(member, {end.failed, end.stopped, end.how, end.lacked_memory}, end.killed);
    };
    options.look = [this](int ending) { return launcher_->look(ending); };
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

  comm::LaunchEnvironment environment_of_member(int member, int place) const {
    return environment_of(elastic_variables(flags_, where_, place, member));
  }

  void announce(int member, int place, const comm::ProcessEnd& end) {
    const std::string absence = comm::announce_end(store_, environment_of_member(member, place), end);
    if (end.failed)
      printed_.add("error: " + absence);  // ChildProcesses says how it ended; of one that succeeded, nothing
  }

  void start(int member, int place) override {
    auto variables = elastic_variables(flags_, where_, place, member);
    variables.push_back(printed_.variable());
    processes_->start(words_, variables, member);
  }
  void kill(int member) override { processes_->end(member); }
  void end_all(int code) override { processes_->end_all(code); }
  void say(const std::string& text) override { messages_.say(text); }

  const LaunchFlags& flags_;
  LaunchMessages& messages_;
  const std::vector<std::string> words_;
  const std::chrono::milliseconds patience_;  // with processes and machines that do not begin
  const PrintedOnce printed_;
  std::unique_ptr<comm::HandedKey> key_;          // of a job on one machine
  std::unique_ptr<comm::Rendezvous> rendezvous_;  // of one on several
  comm::StorePtr store_;
  JobStore where_;
  std::optional<comm::FirstLauncher> launcher_;
  std::optional<ChildProcesses> processes_;  // last, since what it calls uses the others
};

}  // namespace

ChildProcesses::Ending launch_elastic(const LaunchFlags& flags, LaunchMessages& messages) {
  if (flags.nodes.node != 0) return launch_as_agent(flags, messages);
  return ElasticLauncher(flags, messages).wait();
}

}  // namespace lockstep::cli
