#include "simulated_job.hpp"

#include <ATen/ops/zeros.h>
#include <lockstep/base/error.hpp>
#include <nlohmann/json.hpp>

#include "c_library.hpp"
#include "comm/failure.hpp"
#include "comm/meeting/meeting.hpp"
#include "guilt.hpp"
#include "io/folder_lock.hpp"
#include "job_of_process.hpp"
#include "ranks/succession.hpp"
#include "survive/elastic_job.hpp"
#include "trainer/checkpoint_folder.hpp"
#include "trainer/resume.hpp"
#include "trainer/run_folder.hpp"
#include "trainer/take_over.hpp"
#include "trainer/train_options.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

namespace lockstep::simulation {
namespace {

using namespace std::chrono_literals;

constexpr Time kLimit = 120 * kSecond;
constexpr int kKept = 2;            // checkpoints
constexpr auto kFixedSilence = 3s;  // limit in every second run; in others it follows the processes' gaps

// Plays the library's ElasticRun.
class SimulatedSuccession : public Succession {
 public:
  SimulatedSuccession(ElasticJob& job, Progress& progress, std::function<void()> keep_from_now_on)
      : job_(job), progress_(progress), keep_from_now_on_(std::move(keep_from_now_on)) {}

  bool enter() override {
    if (!job_.enter()) return false;
    keep_from_now_on_();
    return true;
  }
  void leave() override {
    progress_.is_last = false;
    job_.leave();
  }
  bool goes_on() override { return !progress_.is_last; }

 private:
  ElasticJob& job_;
  Progress& progress_;
  const std::function<void()> keep_from_now_on_;
};

}  // namespace

// ---- The job.

SimulatedJob::SimulatedJob(const Plan& plan, const Reference* reference, const std::filesystem::path& folder,
                           bool with_log)
    : plan_(plan),
      reference_(reference),
      run_dir_(plan.is_elastic() ? folder / "run" : folder),
      scheduler_(plan.seed, with_log, kLimit),
      network_(scheduler_),
      disk_(scheduler_.draw(2) == 0) {
  course_.plan = plan;
  course_.times.resize(plan.strikes.size(), kNever);
  course_.host = plan.launcher ? "the launcher"
                 : plan.ranks_per_process == 1
                     ? "the process of rank 0 (cpu)"
                     : "the process of ranks 0 to " + std::to_string(plan.ranks_per_process - 1);
}

Report SimulatedJob::run() {
  plant_disk_faults();
  scheduler_.on_death = [this](Process& process) { hear_of_end(process); };
  if (plan_.launcher) launcher_ = &scheduler_.add_process("launcher");
  for (int process = 0; !plan_.is_elastic() && process < plan_.processes; ++process) add_process(process, process);
  if (launcher_ != nullptr) scheduler_.start(*launcher_, [this] { plan_.is_elastic() ? launch_elastic() : launch(); });
  for (int process = 0; !plan_.is_elastic() && process < plan_.processes; ++process) start(process);
  course_.left = scheduler_.run();
  for (const auto& process : scheduler_.processes()) c_library::unlock_files(*process);  // whoever still stands
  if (plan_.checkpoints) read_checkpoint();
  if (plan_.is_elastic()) read_generations();
  return report();
}

std::chrono::milliseconds SimulatedJob::silence() const {
  return plan_.seed % 2 == 0 ? kFixedSilence : 0s;
}

std::map<std::string, std::string> SimulatedJob::environment_of(int process, int place) const {
  const std::string rank = std::to_string(place), count = std::to_string(plan_.processes);
  std::map<std::string, std::string> all{{"RANK", rank},
                                         {"WORLD_SIZE", count},
                                         {"LOCAL_RANK", rank},
                                         {"LOCAL_WORLD_SIZE", count},
                                         {"MASTER_ADDR", "127.0.0.1"},
                                         {"MASTER_PORT", std::to_string(kPort)},
                                         {"TORCHELASTIC_USE_AGENT_STORE", plan_.launcher ? "True" : "False"}};
  if (!plan_.is_elastic()) return all;
  all["LOCKSTEP_ELASTIC_MEMBER"] = std::to_string(process);
  all["LOCKSTEP_ELASTIC_MIN"] = "1";
  return all;
}

comm::LaunchEnvironment SimulatedJob::launch_of(int process, int place) const {
  const auto environment = environment_of(process, place);
  return *comm::read_launch_environment([&](const char* name) -> const char* {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  });
}

Outcome& SimulatedJob::outcome_of(int process) {
  while (static_cast<int>(course_.outcomes.size()) <= process) {
    course_.outcomes.emplace_back().ranks.resize(plan_.ranks_per_process);
  }
  return course_.outcomes[process];
}

void SimulatedJob::add_process(int process, int place) {
  Process& added = scheduler_.add_process("process " + std::to_string(process));
  added.environment = environment_of(process, place);
  processes_.resize(std::max(processes_.size(), static_cast<size_t>(process) + 1));
  outcome_of(process);
  processes_[process] = &added;
  for (size_t i = 0; i < plan_.strikes.size(); ++i) {
    if (plan_.strikes[i].victim == process) plant(i, added);
  }
}

void SimulatedJob::start(int process) {
  scheduler_.start(*processes_[process], [this, process] { be_process(process); });
}

// ---- The faults.

void SimulatedJob::note(size_t strike) {
  course_.times[strike] = std::min(course_.times[strike], scheduler_.now());
}

std::function<void()> SimulatedJob::happens(size_t strike, std::function<void()> fault) {
  return [this, strike, fault = std::move(fault)] {
    note(strike);
    fault();
  };
}

void SimulatedJob::plant(size_t i, Process& victim) {
  const Strike& strike = plan_.strikes[i];
  const auto point = static_cast<int64_t>(strike.part * static_cast<double>(reference_ ? reference_->points : 1'000));
  const auto at_point = [&](std::function<void()> fault) {
    scheduler_.at_point(victim, point, happens(i, std::move(fault)));
  };
  switch (strike.fault) {
    case Fault::kill:
      return at_point([this, &victim] { scheduler_.kill(victim); });
    case Fault::kill_host:  // a launcher has few points, so it dies at a process's
      return at_point([this] { scheduler_.kill(launcher_ != nullptr ? *launcher_ : *processes_[0]); });
    case Fault::stop:
      return at_point([this, &victim, &strike] { scheduler_.stop(victim, strike.length); });
    case Fault::cut:
      return at_point([this, &victim, &strike] {
        if (strike.other < count() && processes_[strike.other] != nullptr)
          network_.cut(victim, *processes_[strike.other], scheduler_.now() + strike.length);
      });
    case Fault::slow:
      victim.slowness = strike.length;
      return note(i);
    case Fault::late:
      network_.lateness = strike.length;
      return note(i);
    default:  // a rank's, or the disk's
      return;
  }
}

void SimulatedJob::plant_disk_faults() {
  for (size_t i = 0; i < plan_.strikes.size(); ++i) {
    const Strike& strike = plan_.strikes[i];
    const auto goes_out = [this] {
      for (const auto& process : scheduler_.processes()) scheduler_.kill(*process);
    };
    if (strike.fault == Fault::full_disk) disk_.fills = {strike.call, happens(i)};
    if (strike.fault == Fault::power) disk_.power = {strike.call, happens(i, goes_out)};
    if (strike.fault == Fault::lost_fsync) {
      disk_.loses = {strike.call, happens(i)};
      disk_.power = {strike.call + strike.calls, happens(i, goes_out)};
    }
  }
}

// ---- What the processes do.

void SimulatedJob::be_process(int process) {
  Outcome& outcome = course_.outcomes[process];
  RunOptions options;
  options.timeout = 20s;
  options.rendezvous_timeout = 20s;
  options.silence = silence();
  try {
    plan_.is_elastic() ? run_generations(process, options) : run_ranks(process, options);
  } catch (const Error& error) {
    outcome.text = error.what();
  }
  outcome.end = scheduler_.now();
  outcome.over = true;
  scheduler_.note("run() has ended" + (outcome.text.empty() ? "" : ": " + outcome.text));
  jobs().erase(processes_[process]);
}

void SimulatedJob::run_ranks(int process, const RunOptions& options) {
  const Devices devices(plan_.ranks(), c10::Device(c10::kCPU));
  const auto write = [&](const RunState& state) {
    keep(process, state, [&] { CheckpointFolder(run_dir_ / kCheckpointFolder, kKept, disk_).write(state); });
  };
  const auto body = [&](Rank& rank) {
    const Listener listener{[&](int step) { return goes_on(process, rank, step); },
                            plan_.checkpoints ? write : std::function<void(const RunState&)>()};
    Steps& steps = course_.outcomes[process].ranks[rank.index_in_process()];
    train(rank, data_, steps, listener);
    for (size_t i = 0; i < plan_.strikes.size(); ++i) {
      if (plan_.strikes[i].fault != Fault::unanswered || !is_victim(plan_.strikes[i], process, rank)) continue;
      note(i);
      std::vector<at::Tensor> numbers{at::zeros({3})};
      rank.backend().allreduce(numbers, c10d::AllreduceOptions());
    }
  };
  lockstep::run(devices, body, options);
}

// Does what train() does, with its folder and the ways to take that over.
void SimulatedJob::run_generations(int process, RunOptions options) {
  ElasticJob job({}, silence(), plan_.checkpoints ? (run_dir_ / kCheckpointFolder).string() : "");
  Progress progress;
  TrainOptions settings{.devices = {c10::Device(c10::kCPU)}};
  if (plan_.checkpoints) settings.keep.run_dir = run_dir_;
  settings.keep.checkpoints = {.last = kKept};
  if (plan_.resumes) settings.keep.resume = "auto";
  const auto warn = [this](const std::string& text) { scheduler_.note("warns: " + text); };
  settings = with_resume_found(settings, warn);
  const bool is_resumed = !settings.keep.resume.empty();
  if (is_resumed) progress.state = lockstep::read_checkpoint(checkpoint_of(settings.keep.resume, warn));
  if (is_resumed) course_.saved = std::max(course_.saved, static_cast<int>(progress.state->steps));
  bool met = false, writes = this_process().index == 0;
  std::optional<RunFolder> folder;
  folder.emplace(writes ? settings.keep.run_dir : "", is_resumed, disk_);
  folder->create(settings, {}, warn);
  const auto write = [&](const RunState& state) {
    keep(process, state, [&] { folder->keep(state); });
    progress.kept = static_cast<int>(state.steps);
  };
  const auto body = [&](Rank& rank) {
    met = true;
    const Listener listener{[&](int step) { return goes_on(process, rank, step); },
                            plan_.checkpoints ? write : std::function<void(const RunState&)>()};
    train_elastic(rank, data_, job, progress, course_.outcomes[process].ranks[0], listener);
  };
  const auto keep_from_now_on = [&] {
    if (this_process().index == 0 && !std::exchange(writes, true))
      take_over(folder, settings, {}, {.met = met, .goes_on = is_resumed, .warn = warn, .files = disk_});
  };
  options.succession = [&](const Devices&, const RunOptions&) {
    return std::make_shared<SimulatedSuccession>(job, progress, keep_from_now_on);
  };
  lockstep::run({c10::Device(c10::kCPU)}, body, options);
}

bool SimulatedJob::is_victim(const Strike& strike, int process, const Rank& rank) const {
  return strike.victim == process && rank.index_in_process() == 0;
}

bool SimulatedJob::goes_on(int process, Rank& rank, int step) {
  bool goes_on = true;
  for (size_t i = 0; i < plan_.strikes.size(); ++i) {
    const Strike& strike = plan_.strikes[i];
    if (strike.step != step || !strike.is_by_rank() || !is_victim(strike, process, rank)) continue;
    if (strike.fault == Fault::unanswered) continue;
    note(i);
    if (strike.fault == Fault::throws) throw std::runtime_error("thrown by the test");
    if (strike.fault == Fault::differs) rank.barrier();
    if (strike.fault == Fault::leaves) goes_on = false;
  }
  return goes_on;
}

void SimulatedJob::keep(int process, const RunState& state, const std::function<void()>& write) {
  if (reference_ == nullptr) optimizers_[state.steps - 1] = digest_of(state).optimizer;
  const bool had_lost = disk_.has_lost();
  writing_.insert(process);
  try {
    write();
  } catch (...) {
    writing_.erase(process);
    throw;
  }
  writing_.clear();  // the write has removed what killed processes left
  if (had_lost == disk_.has_lost()) course_.saved = static_cast<int>(state.steps);
}

// ---- What is left of it.

void SimulatedJob::look_at_folder() {
  const auto unknown = [&](const std::filesystem::path& folder, auto&& is_known) {
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
      if (!is_known(entry.path())) course_.files_left.push_back(entry.path().filename().string());
    }
  };
  size_t half = writing_.size();  // a killed process leaves one file
  unknown(run_dir_, [](const auto& path) {
    const auto name = path.filename();
    return name == kConfigFile || name == kCheckpointFolder || name == io::kLockFile;
  });
  unknown(run_dir_ / kCheckpointFolder,
          [&](const auto& path) { return path.extension() == ".safetensors" || (half > 0 && half-- > 0); });
}

// Reads it as the next run would.
void SimulatedJob::read_checkpoint() {
  const bool out = std::any_of(plan_.strikes.begin(), plan_.strikes.end(), [](const Strike& strike) {
    return strike.fault == Fault::power || strike.fault == Fault::lost_fsync;
  });
  if (!out) look_at_folder();
  if (out && !scheduler_.processes()[0]->lives()) disk_.crash();
  try {
    const auto file = checkpoint_to_go_on(run_dir_ / kCheckpointFolder, {});
    if (file.empty()) return;
    const RunState state = read_run_state(file);
    course_.found = static_cast<int>(state.steps);
    course_.found_state = digest_of(state);
  } catch (const Error& error) {
    course_.unreadable = error.what();
  }
}

// Notes what the store has kept of the generations.
void SimulatedJob::read_generations() {
  const auto& host = network_.hosts[kPort];
  if (!host) return;
  const std::string begun = comm::job_prefix(launch_of(0).job) + comm::kGenerations;
  for (const auto& text : host->generations) {
    const auto object = nlohmann::json::parse(text);
    const std::string key = begun + "/begun/" + std::to_string(object.at("number").get<int>());
    course_.generations.push_back({object.at("members"), host->values.contains(key)});
    const std::string own = comm::job_prefix(launch_of(0).job) + comm::keys_of_generation(object.at("number")) + "/";
    course_.generations.back().keys = static_cast<int>(std::count_if(
        host->values.begin(), host->values.end(), [&](const auto& value) { return value.first.starts_with(own); }));
    for (const int member : course_.generations.back().members) outcome_of(member);  // also of one that never started
  }
}

Report SimulatedJob::report() {
  Report report;
  report.wrongs = wrongs_of(course_, reference_);
  for (const auto& wrong : network_.wrongs) report.wrongs.push_back(wrong);
  for (const int process : killed_by_launcher_) {
    report.wrongs.push_back("process " + std::to_string(process) + " did not end by itself, so the launcher killed it");
  }
  if (!processes_.empty()) {
    const auto& weights = course_.outcomes[0].ranks[0].weights;
    for (size_t step = 0; step < weights.size(); ++step) report.found.weights[step] = weights[step];
    report.found.optimizers = optimizers_;
    report.found.points = processes_[0]->points;
    report.found.time = course_.outcomes[0].end;
  }
  report.trace = scheduler_.trace();
  report.points = scheduler_.points();
  report.time = scheduler_.now();
  report.longest_end = longest_end(course_);
  for (const auto& outcome : course_.outcomes) report.ended_early |= !outcome.text.empty();
  return report;
}

bool SimulatedJob::can_be_gone_on_with() const {
  const bool is_kept = plan_.is_elastic() && plan_.checkpoints && !plan_.resumes && course_.unreadable.empty();
  return is_kept && std::none_of(course_.outcomes.begin(), course_.outcomes.end(), [](const Outcome& outcome) {
           return outcome.over && outcome.text.empty() && is_done(outcome);
         });
}

Report simulate(const Plan& plan, const Reference* reference, const std::filesystem::path& folder, bool with_log) {
  // Jobs are never destroyed: threads of killed processes still wait in them.
  auto& job = *new SimulatedJob(plan, reference, folder, with_log);
  Report report = job.run();
  if (!job.can_be_gone_on_with()) return report;
  Plan rest{.seed = plan.seed, .program = Program::elastic, .checkpoints = true, .resumes = true};
  const Report then = (new SimulatedJob(rest, reference, folder, with_log))->run();
  for (const auto& wrong : then.wrongs) report.wrongs.push_back("when the run goes on: " + wrong);
  return report;
}

}  // namespace lockstep::simulation
