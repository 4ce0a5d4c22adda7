// Launches an elastic job. survive/elastic_launcher.hpp decides; this file starts and ends processes.
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "comm/job_key.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "launched_job.hpp"
#include "option_flags.hpp"
#include "survive/elastic_launcher.hpp"
#include "trainer/checkpoint_folder.hpp"

namespace lockstep::cli {
namespace {

class ElasticProcesses : public comm::LaunchedProcesses {
 public:
  ElasticProcesses(const LaunchFlags& flags, LaunchMessages& messages)
      : flags_(flags), messages_(messages), words_(program_words(flags)) {
    processes_.emplace(options(), messages_);  // made before the store starts threads
    const std::string address = comm::loopback_address();
    const auto kept =
        comm::host_store(address, 0, {key_.key(), [this](const std::string& text) { messages_.say(text); }});
    store_ = kept.store;
    where_ = {address, kept.port, key_.file()};
    const auto patience = comm::rendezvous_timeout_in(std::getenv).value_or(std::chrono::seconds(60));
    launcher_.emplace(store_,
                      comm::ElasticLauncher::Job{.name = environment_of_member(0, 0).job,
                                                 .processes = flags.processes,
                                                 .restarts = flags.restarts(),
                                                 .limits = {.until_first_beat = patience},
                                                 .restarts_name = "--max-restarts of lockstep launch"},
                      *this,
                      [this](int member, int place, const comm::ProcessEnd& end) { announce(member, place, end); });
    launcher_->begin();
  }

  ChildProcesses::Ending wait() {
    const auto ending = processes_->wait();
    if (ending.failed) launcher_->say_why([](const std::string& folder) { return newest_checkpoint(folder).string(); });
    return ending;
  }

 private:
  ChildProcesses::Options options() {
    ChildProcesses::Options options{.name = "process",  // a successor has another number than the rank it replaces
                                    .label = flags_.label,
                                    .until_term_when_stopped = std::chrono::seconds(flags_.grace)};
    options.on_end = [this](int member, const ChildProcesses::Options::End& end) {
      return launcher_->note_end(member, {end.failed, end.stopped, end.how, end.lacked_memory}, end.killed);
    };
    options.look = [this] { return launcher_->look(); };
    return options;
  }

  comm::LaunchEnvironment environment_of_member(int member, int place) const {
    return environment_of(variables(flags_, where_, /*attempt=*/0, place, member));
  }

  void announce(int member, int place, const comm::ProcessEnd& end) {
    comm::announce_end(store_, environment_of_member(member, place), end);
  }

  void start(int member, int place) override {
    processes_->start(words_, variables(flags_, where_, /*attempt=*/0, place, member), member);
  }
  void kill(int member) override { processes_->end(member); }
  void say(const std::string& text) override { messages_.say(with_flags(text)); }

  const LaunchFlags& flags_;
  LaunchMessages& messages_;
  const std::vector<std::string> words_;
  comm::HandedKey key_;
  comm::StorePtr store_;
  JobStore where_ = {};
  std::optional<comm::ElasticLauncher> launcher_;
  std::optional<ChildProcesses> processes_;  // stands last, since its callbacks use the others
};

}  // namespace

ChildProcesses::Ending launch_elastic(const LaunchFlags& flags, LaunchMessages& messages) {
  return ElasticProcesses(flags, messages).wait();
}

}  // namespace lockstep::cli
