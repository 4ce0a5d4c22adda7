#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <pthread.h>
#include <lockstep/base/error.hpp>
#include <lockstep/ranks/rank.hpp>

#include "base/rank_thread.hpp"
#include "base/scramble.hpp"
#include "base/start_thread.hpp"
#include "comm/failure.hpp"
#include "comm/processes/job.hpp"
#include "comm/texts.hpp"
#include "comm/world.hpp"
#include "devices/check_devices.hpp"
#include "devices/cpu_cores.hpp"
#include "devices/device_streams.hpp"
#include "devices/processor_kind.hpp"
#include "open_ranks.hpp"
#include "rank_exit.hpp"
#include "rank_place.hpp"
#include "shared_generator.hpp"
#include "succession.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

// FirstFailure keeps the failure of the rank that failed first; the others' failures follow from it.
class FirstFailure {
 public:
  void record(std::exception_ptr exception, comm::Failure failure) {
    const std::lock_guard lock(mutex_);
    if (exception_) return;
    exception_ = std::move(exception);
    failure_ = std::move(failure);
  }

  comm::Failure first() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  // `elsewhere` is the failure of the rank that failed first, if that rank may be in another process.
  void rethrow(const comm::Failure& elsewhere) const {
    const comm::Failure& failure = elsewhere.empty() ? failure_ : elsewhere;
    if (!exception_) {
      if (!failure.empty()) failure.raise();
      return;
    }
    try {
      std::rethrow_exception(exception_);
    } catch (...) {
      if (failure.is(Error::stopped)) std::throw_with_nested(Stopped(failure.text));
      std::throw_with_nested(Error(failure.text, failure.data));
    }
  }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr exception_;
  comm::Failure failure_;
};

comm::Failure failure_of(const std::exception_ptr& exception, int rank, const Devices& devices) {
  comm::Failure failure = comm::failure_of(exception);
  const std::string name = comm::name_of(rank, devices);
  if (!failure.text.starts_with(name)) failure.text = name + ": " + failure.text;
  const auto cause = failure.data.cause;
  const bool is_its_own = cause == Error::refused || cause == Error::file || cause == Error::machine ||
                          cause == Error::user_code || cause == Error::not_finite;
  if (is_its_own && failure.data.ranks.empty()) failure.data.ranks = {rank};
  return failure;
}

void check(const Devices& devices, const RunOptions& options) {
  check_devices(devices);
  if (options.threads_per_rank < 1) {
    throw Error(
        "run: threads_per_rank is " + std::to_string(options.threads_per_rank) + "; a rank needs at least 1 thread",
        {.options = {"threads_per_rank"}});
  }
  if (options.timeout <= std::chrono::milliseconds::zero()) {
    throw Error("run: the timeout is " + std::to_string(options.timeout.count()) + " ms; it must be positive",
                {.options = {"timeout"}});
  }
  if (options.rendezvous_timeout <= std::chrono::milliseconds::zero()) {
    throw Error("run: the rendezvous timeout is " + std::to_string(options.rendezvous_timeout.count()) +
                " ms; it must be positive");
  }
  if (options.silence != std::chrono::milliseconds::zero() && options.silence < comm::kSilence.least) {
    throw Error("run: the silence is " + std::to_string(options.silence.count()) +
                    " ms; processes need at least 1000 ms to be heard, or 0 for as long as busy machines take",
                {.options = {"silence"}});
  }
}

comm::JobOptions job_options(const RunOptions& options) {
  return {.timeout = options.timeout,
          .rendezvous_timeout = options.rendezvous_timeout,
          .silence = comm::silence_range(options.silence),
          .stop = options.stop,
          .configuration = "seed " + std::to_string(options.seed) +
                           (options.configuration.empty() ? "" : ", " + options.configuration)};
}

// If one process of an elastic job is left, the list's other devices belong to its successors.
Devices of_this_process(const Devices& devices) {
  const auto& job = comm::Job::of_this_process();
  if (!job.seat()) return devices;
  const auto launch = job.launch();
  return comm::share_out(devices, launch->local_rank, launch->local_world_size);
}

std::unique_ptr<comm::World> make_world(const Devices& listed, const RunOptions& options) {
  Devices devices = listed;
  if (!is_rank_thread()) {  // a run inside of a rank's body is a world of its own
    if (auto world = comm::make_processes_world(listed, job_options(options))) return world;
    devices = of_this_process(listed);
  }
  // Ranks that share a GPU exchange through NCCL only if the user has set NCCL_MULTI_RANK_GPU_ENABLE.
  if (devices.size() > 1 && devices[0].is_cuda() && (!share_a_gpu(devices) || comm::why_no_gpu_is_shared().empty())) {
    if (auto world = comm::make_nccl_world(devices, options.timeout)) return world;
  }
  return comm::make_in_process_world(devices, options.timeout);
}

}  // namespace

Process this_process() {
  const auto launch = comm::Job::of_this_process().launch();
  return launch ? Process{launch->rank, launch->world_size} : Process{};
}

namespace {

// Gives "rank 1 (cpu) computes on DEFAULT 1a2b3c4d, and rank 0 (cpu) on AVX512 …", or "" for one kind of processor.
std::string mixed_processors(const comm::World& world) {
  std::vector<std::string> kinds = world.processor_kinds();
  if (kinds.empty()) {
    for (const auto& device : world.devices()) kinds.push_back(device.is_cpu() ? "" : processor_kind(device));
  }
  size_t first = 0;
  while (first < kinds.size() && kinds[first].empty()) ++first;
  for (size_t rank = first + 1; rank < kinds.size(); ++rank) {
    if (kinds[rank].empty() || kinds[rank] == kinds[first]) continue;
    const auto name = [&](size_t index) { return comm::name_of(static_cast<int>(index), world.devices()); };
    return name(rank) + " computes on " + kinds[rank] + ", and " + name(first) + " on " + kinds[first];
  }
  return "";
}

void warn_of_machine(comm::RunningWorld& running, comm::World& world, const RunOptions& options) {
  if (world.ranks_here().size() > 1 && options.threads_per_rank > 1 && openmp_binds_threads()) {
    running.warn(
        "OpenMP binds its threads (OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY), and has the first thread of each "
        "rank on the same core, where they wait for each other. Unset these variables, or start a process for each "
        "rank");
  }
  if (world.shares_gpus() && world.process() == 0) {
    running.warn(
        "ranks share a GPU over NCCL (NCCL_MULTI_RANK_GPU_ENABLE), and may wait for each other for milliseconds there. "
        "That is for tests, and no measure of speed");
  }
  if (!running.mixed_processors.empty() && world.process() == 0) {
    running.warn(running.mixed_processors +
                 ". These round otherwise, so results depend on which rank computes what, and the ranks' networks may "
                 "drift apart. Take processors of one kind: `lockstep devices` shows a machine's");
  }
}

// RanksHere has the ranks of a world that are threads of this process, from start to end.
class RanksHere {
 public:
  RanksHere(comm::World& world, std::shared_ptr<comm::RunningWorld> running, const std::function<void(Rank&)>& body,
            const RunOptions& options)
      : world_(world),
        running_(std::move(running)),
        body_(body),
        options_(options),
        devices_(world.devices()),
        open_(devices_, options.timeout) {}

  // Calls the body on each of them, and waits for all.
  void run() {
    const int threads_before = at::get_num_threads();
    give_streams();
    start();
    open_.wait([this] { return why(); }, [this](const std::string& text) { warn(text); });
    for (auto& thread : threads_) thread.join();
    join_streams();
    at::set_num_threads(threads_before);  // the ranks' last call of it counts for threads that have not computed yet
    failure_.rethrow(world_.finish());
  }

 private:
  // Each rank on a GPU has its own stream: ranks that share a GPU compute at the same time only on different streams,
  // and the default stream cannot be recorded. Over NCCL, ranks on one stream would wait for ever: a call waits there
  // for another rank's, which is queued behind it.
  void give_streams() {
    const auto here = world_.ranks_here();
    const Devices devices(devices_.begin() + here.begin, devices_.begin() + here.end);
    if (devices[0].is_cpu()) return;
    for (auto device = devices.begin(); device != devices.end(); ++device) {
      const auto ranks_before = static_cast<int>(std::count(devices.begin(), device, *device));
      const c10::Stream stream = stream_of_rank(*device, ranks_before);
      if (world_.shares_gpus() && std::find(streams_.begin(), streams_.end(), stream) != streams_.end()) {
        throw Error("run: more ranks share " + device->str() +
                        " over NCCL than it has streams; take fewer ranks, or unset "
                        "NCCL_MULTI_RANK_GPU_ENABLE",
                    {.options = {"devices"}});
      }
      streams_.push_back(stream);
      queue_after(current_stream(*device), stream);
    }
  }

  // The caller's streams wait for the ranks'. A GPU that has failed refuses that, and the run's failure says why.
  void join_streams() noexcept {
    try {
      for (const auto& stream : streams_) queue_after(stream, current_stream(stream.device()));
    } catch (const std::exception&) {
      return;
    }
  }

  void start() {
    const auto last = static_cast<int>(world_.ranks_here().end);
    for (auto index = static_cast<int>(world_.ranks_here().begin); index < last; ++index) {
      try {
        threads_.push_back(start_thread([this, index, &code = open_.add(index)] { run_rank(index, code); }));
      } catch (...) {  // there are no more threads to be had: this ends the ranks that already run
        fail(index);
        return open_.end(index);
      }
    }
  }

  void run_rank(int index, UserCode& code) {
    const std::string name = comm::name_of(index, devices_);
    early_exit_.enter([&, index] { world_.abort(index, {name + " called std::exit", {Error::user_code, {index}}}); });
    try {
      pthread_setname_np(pthread_self(), ("rank " + std::to_string(index)).c_str());
      set_rank_thread(code);
      const at::ThreadLocalStateGuard modes_here(modes_);
      const c10::OptionalDeviceGuard device(devices_[index].is_cpu() ? std::nullopt : std::optional(devices_[index]));
      c10::OptionalStreamGuard stream;
      if (!streams_.empty()) stream.reset_stream(streams_[index - world_.ranks_here().begin]);
      at::set_num_threads(options_.threads_per_rank);
      // Autograd has one thread per GPU. If ranks share a GPU, a rank that waits for another in backward would keep the
      // other from running its own there. So each rank runs backward on its own thread.
      if (share_a_gpu(devices_)) c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
      const uint64_t seed = options_.seed;
      Rank rank =
          comm::RankPlace::rank(running_, index, world_.everybody(),
                                {seed, generator_on(devices_[index], mix({seed, static_cast<uint64_t>(index)}))});
      body_(rank);
      world_.leave(index);
    } catch (...) {
      fail(index);
    }
    early_exit_.leave();
    open_.end(index);
  }

  void fail(int index) {
    auto said = failure_of(std::current_exception(), index, devices_);
    if (const auto standing = open_.standing(); !standing.empty()) {
      said.text += ". Meanwhile " + standing;
      if (options_.stop.stop_requested() && said.is(Error::late)) said.data.cause = Error::stopped;
    }
    failure_.record(std::current_exception(), said);
    world_.abort(index, said);
  }

  // Gives why the run ends, or an empty failure if it goes on.
  comm::Failure why() const {
    if (const comm::Failure there = world_.failure(); !there.empty()) return there;
    if (const comm::Failure here = failure_.first(); !here.empty()) return here;
    return options_.stop.stop_requested() ? comm::Failure("stopped by request", {Error::stopped}) : comm::Failure();
  }

  void warn(const std::string& text) {
    try {
      running_->warn(text);
    } catch (...) {  // on_warning threw: this counts as if a rank had thrown
      fail(static_cast<int>(world_.ranks_here().begin));
    }
  }

  comm::World& world_;
  const std::shared_ptr<comm::RunningWorld> running_;
  const std::function<void(Rank&)>& body_;
  const RunOptions& options_;
  const Devices& devices_;
  FirstFailure failure_;
  OpenRanks open_;
  RankExit early_exit_{/*nested=*/is_rank_thread()};
  const at::ThreadLocalState modes_;  // the caller's NoGradGuard, autocast, … hold in its ranks too
  std::vector<c10::Stream> streams_;  // streams of the ranks here; empty on the CPU
  std::vector<std::thread> threads_;
};

void run_once(const Devices& devices_here, const std::function<void(Rank&)>& body, const RunOptions& options,
              Succession* succession) {
  const auto world = make_world(devices_here, options);
  world->shared_seed = shared_seed();
  const auto running =
      std::make_shared<comm::RunningWorld>(*world, options.timeout, mixed_processors(*world), options.on_warning);
  running->succession = succession;
  warn_of_machine(*running, *world, options);
  const auto end = [](comm::RunningWorld* run) { run->end(); };
  const std::unique_ptr<comm::RunningWorld, decltype(end)> ended(running.get(), end);
  RanksHere(*world, running, body, options).run();
}

void run_generations(const Devices& devices, const std::function<void(Rank&)>& body, RunOptions options,
                     Succession& succession) {
  // A process that joins waits until the others come to the end of a step.
  options.rendezvous_timeout = std::max(options.rendezvous_timeout, options.timeout);
  while (succession.enter()) {
    try {
      run_once(devices, body, options, &succession);
      if (!succession.goes_on()) return;
    } catch (const Error& error) {
      if (error.cause() != Error::death) throw;
      succession.leave();
    }
  }
}

}  // namespace

void run(const Devices& devices, const std::function<void(Rank&)>& body, const RunOptions& options) {
  check(devices, options);
  const FreeOfOpenMp free_of_openmp;  // the ranks' threads take this thread's cores over
  const bool may_go_on = options.succession && !is_rank_thread();
  const auto succession = may_go_on ? options.succession(devices, options) : nullptr;
  succession ? run_generations(devices, body, options, *succession) : run_once(devices, body, options, nullptr);
}

}  // namespace lockstep
