// The launcher of one machine in an elastic job of several, unless it keeps the store: it does as that one says.
#include <chrono>
#include <string>
#include <vector>

#include "comm/meeting/agent_launcher.hpp"
#include "comm/meeting/rendezvous.hpp"
#include "launched_job.hpp"

namespace lockstep::cli {
namespace {

using namespace std::chrono_literals;

class Agent : public comm::LaunchedMachine {
 public:
  Agent(const LaunchFlags& flags, LaunchMessages& messages)
      : flags_(flags),
        messages_(messages),
        words_(program_words(flags)),
        rendezvous_(environment_of_node(flags), comm::WaitLimit{patience_with_others()}),
        where_{rendezvous_.store_address(), rendezvous_.store_port(), checked_key_file(flags.nodes)},
        processes_(options(), messages_),
        launcher_(rendezvous_.connect_to_all(),
                  {.name = environment_of(elastic_variables(flags, where_, 0, 0)).job,
                   .node = flags.nodes.node,
                   .arrival = {flags.processes, flags.nodes.most},
                   .store_place = where_.address + ":" + std::to_string(where_.port),
                   .patience = patience_with_others()},
                  *this) {}

  ChildProcesses::Ending wait() {
    const auto ending = processes_.wait();
    launcher_.leave(ending.code);
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
                  return launcher_.note_end(member, {end.failed, end.stopped, end.how, end.lacked_memory}, end.killed,
                                            end.code);
                },
            .look = [this](int ending) { return launcher_.look(ending); }};
  }

  void start(int member, int place) override {
    auto variables = elastic_variables(flags_, where_, place, member);
    variables.push_back(printed_.variable());
    processes_.start(words_, variables, member);
  }
  void kill(int member) override { processes_.end(member); }
  void end_all(int code) override { processes_.end_all(code); }
  void say(const std::string& text) override { messages_.say(text); }

  const LaunchFlags& flags_;
  LaunchMessages& messages_;
  const std::vector<std::string> words_;
  const PrintedOnce printed_;
  comm::Rendezvous rendezvous_;
  const JobStore where_;
  ChildProcesses processes_;  // calls the launcher in wait() alone
  comm::AgentLauncher launcher_;
};

}  // namespace

ChildProcesses::Ending launch_as_agent(const LaunchFlags& flags, LaunchMessages& messages) {
  return Agent(flags, messages).wait();
}

}  // namespace lockstep::cli
