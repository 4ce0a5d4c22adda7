// Ranks: run() calls a function once per device, all at the same time, and each call's Rank talks to the others.
//
// A rank is one device with one replica of the model, and a thread. Without a launcher all ranks are threads of this
// process. A launcher (torchrun --no-python, lockstep launch, mpirun, srun) starts the program several times, and a
// rank is a thread of one of these processes. The program is the same. Use a Rank on its own thread only.
//
// Its backend has c10d's interface. Threads of one process use lockstep's own backend, processes on the CPU use Gloo.
// Distinct GPUs use NCCL if this build has it, shared ones on demand. Cost of run(): one thread per rank, and between
// processes connections of each rank to all others. Every wait has a timeout, and a rank that fails ends the others. A
// Rank is a handle: copies are the same rank, and whatever takes a Rank keeps a copy. Once its run() is over, its calls
// throw an Error that says so.
#pragma once

#include <ATen/core/Generator.h>
#include <lockstep/data/data.hpp>
#include <lockstep/devices/devices.hpp>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <concepts>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <type_traits>

namespace lockstep {

class Succession;
namespace comm {
class RankPlace;
}

// More than twelve functions: they give a rank's place, and the calls of a communicator.
class Rank {
 public:
  Rank(const Rank&) = default;  // a move is a copy too
  Rank& operator=(const Rank&) = default;

  int index() const { return index_; }            // gives 0 … world_size() - 1
  int world_size() const { return world_size_; }  // 1 is a normal world: every collective works
  c10::Device device() const { return device_; }
  std::string name() const;  // gives "rank 1 (cpu)", as errors name it: its number in the whole run, also in a group

  // process() is the number of the launcher's process in which this rank is a thread. index_in_process() is the rank's
  // number among the ranks of that process, or in a group among the group's ranks there. Without a launcher they are 0
  // and index(). Use them for work that each process does once.
  int process() const;
  int index_in_process() const;

  // Gives the backend, for everything that c10d can do, also asynchronously. Make the same collective calls in the same
  // order on all ranks. On the CPU, calls that differ are every rank's Error, which shows both. Between GPUs NCCL
  // compares nothing, so calls that differ are an Error at the end of the run, or at the timeout. A rank that returns
  // without a call that another rank has made is an Error at once. A collective call that nobody waits for is done
  // before a later one of the same group is waited for, or at the end of the run.
  // Between processes wait for each message: until then its memory stays, and a recvAnysource() that nobody waits for
  // is an Error. Tags of messages go from 0 to 32767 there, and those of recvAnysource() start at 16384.
  // These are Errors: gathers and scatters with a root, coalesced calls, monitoredBarrier(), setTimeout(), abort(),
  // shutdown(), sparse tensors, on the CPU reductions other than sum, avg, product, min and max, and any call after the
  // run.
  c10d::Backend& backend();

  // These are the most used collectives. On the CPU they return when done. They change tensors in place. Give tensors
  // on device(), of any strides. (Through backend() NCCL needs contiguous ones.) They throw Error when ranks disagree,
  // when a rank is missing at the timeout, or when another rank failed. The text names this rank, the operation and the
  // others' calls. Between GPUs they queue work, and only barrier() waits for the others. If the run fails, queued
  // calls leave no values in memory; the rank's next call throws.
  void allreduce(at::Tensor tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM);
  void broadcast(at::Tensor tensor, int root = 0);
  void barrier();

  // Give these tensors of one shape and type on all ranks; all else is as above. allgather returns [world_size, ...],
  // in which row r is rank r's tensor. reduce_scatter takes [world_size, ...], and returns row index() of the ranks'
  // sum. Gradients flow through no collective here; take those of functional.hpp where they are to flow.
  at::Tensor allgather(const at::Tensor& tensor);
  at::Tensor reduce_scatter(const at::Tensor& tensor, c10d::ReduceOp op = c10d::ReduceOp::SUM);

  // These give values and decisions over all ranks, the same on all of them. mean gives the mean of the values, each as
  // often as its weight says, such as a metric of the rank's samples. It adds in double, in the order of the ranks. any
  // tells whether one rank says so, for example to stop. broadcast gives the text of rank `root`. The host waits for
  // the other ranks, and for a GPU. mean throws Error on all ranks for a weight below 0 or not finite, or if all
  // weights are 0.
  double mean(double value, double weight = 1);
  bool any(bool value);
  std::string broadcast(const std::string& text, int root = 0);

  // Calls function() on one rank at a time, rank 0 first, and returns its result. All ranks of a process share
  // LibTorch's default generator, so let code that draws from it take turns: net = rank.in_turn([] {
  // torch::manual_seed(1); return MyNet(); }) makes the same weights in each run. Elsewhere in a rank
  // torch::manual_seed changes what the other ranks draw. generator() is the rank's own, and a Dropout (dropout.hpp)
  // drops the same on any number of ranks.
  template <class Function>
  auto in_turn(Function&& function) {
    for (int turn = 0; turn < index_; ++turn) barrier();
    if constexpr (std::is_void_v<std::invoke_result_t<Function&>>) {
      function();
      end_turn();
      for (int turn = index_; turn < world_size_; ++turn) barrier();
    } else {
      auto result = function();
      end_turn();
      for (int turn = index_; turn < world_size_; ++turn) barrier();
      return result;
    }
  }

  // seed() gives RunOptions::seed. generator() gives this rank's own generator on device(), made from that seed and the
  // rank's number in the whole run. All copies of this Rank share the generator, and so do the Ranks of its groups.
  uint64_t seed() const;
  at::Generator generator() const;

  // Makes groups. Call it on all ranks: ranks that give the same color (>= 0) become one group. Each gets a Rank,
  // numbered anew in their present order. Its collectives and messages are the group's own. Until run() ends, a group's
  // Rank can be used wherever a Rank can, also to be grouped again. A failure in a group is a failure of the whole run.
  // It works as MPI_Comm_split, and costs one small allgather, and between processes connections among the group.
  // Throws Error for a negative color.
  Rank group(int color);

  // Gives the same rank, whose calls go through what `wrap` makes of the backend, and so do those of groups made from
  // it. Use it to count or time calls. index() and world_size() are those of the wrapped backend, which may stand for
  // another group.
  using Wrap = std::function<c10::intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>)>;
  Rank wrapped(Wrap wrap) const;

  // Gives this rank for batches().
  operator Batches::Partner() const { return {index_, world_size_, device_}; }

 private:
  friend class comm::RankPlace;
  Rank(std::shared_ptr<comm::RankPlace> place, c10::intrusive_ptr<c10d::Backend> backend);

  void end_turn();  // accepts the seed that LibTorch's generator has now

  std::shared_ptr<comm::RankPlace> place_;  // the same for all copies of this Rank
  int index_;
  int world_size_;
  c10::Device device_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  Wrap wrap_;  // wraps the groups' backends too; may be empty
};

struct RunOptions {
  int threads_per_rank = 1;                    // intra-op threads of each rank's thread
  std::chrono::milliseconds timeout{300'000};  // the timeout of every wait for another rank
  // The time for which run() waits for all processes to come. LOCKSTEP_RENDEZVOUS_TIMEOUT in the environment, in
  // seconds, overrules it.
  std::chrono::milliseconds rendezvous_timeout{60'000};
  // A request to stop a run of several processes; threads of one process do not look at it. Before all processes have
  // come, a request ends the wait with a Stopped in all of them. Later, on CPU ranks, it ends a wait that is 1 s old
  // once no rank of the run does anything. It does not interrupt a rank that computes or writes, so that the ranks can
  // agree where to stop.
  std::stop_token stop = {};
  // A process without a sign of life for so long counts as dead. Give at least 1 s, or 0. 0 means four times the
  // longest gap between signs of life in the last 20 to 40 s, at least 1 s and at most 6 s. After a connection to the
  // process was closed, or while one is made, one or two seconds are enough.
  std::chrono::milliseconds silence{0};
  // A text such as the settings that shape the calls. Give all processes the same: run() refuses a difference and shows
  // both.
  std::string configuration = {};
  uint64_t seed = 0;  // the seed of Dropouts' masks and of Rank::generator(); give all processes the same
  // Makes the object that lets the run outlive processes: give lockstep::elastic (survive/elastic.hpp), and follow its
  // rules. run() calls it once. Empty, or if it gives null: the run ends when a process is lost.
  std::function<std::shared_ptr<Succession>(const Devices&, const RunOptions&)> succession = {};
  // Hears of what looks like a mistake but is no error, such as parameters that no rank used. The text names the rank.
  // Ranks' threads call it, and the one that called run(), one at a time. If it is empty, LibTorch's warning handler
  // writes the text to stderr.
  std::function<void(const std::string& text)> on_warning = {};
};

// A Process is this process's place among the processes that its launcher started.
struct Process {
  int index = 0;
  int count = 1;
};

// Gives this process's place as the launcher's environment says, or {0, 1} without a launcher. Use it outside of run()
// for what only one process may do: printing, writing a file. Throws Error for an environment that is incomplete or
// contradicts itself.
Process this_process();

// Calls body(rank) once per entry of `devices`, and waits for all of them. Each call has a thread of its own, with a
// separate intra-op thread count and devices[rank] as the current device. Runs may nest and repeat; nothing is left
// behind. If a body throws, the other ranks' waits end at once. run() rethrows the first failure as an Error that names
// the rank and the device, with the original exception nested. A rank that computes is not interrupted: it ends at the
// next collective. A rank on a GPU computes on a stream of its own: behind what the caller has queued there, and before
// what the caller queues afterwards. Throws Error for no devices, a GPU that is not there, CPU and GPU mixed,
// threads_per_rank < 1, timeout <= 0, or a silence below 1 s that is not 0.
//
// Under a launcher `devices` is the machine's list, and the processes of a machine divide it equally, in order. If the
// list has one entry, each process gets one rank: on the CPU, or on a GPU that no other process sees. Ranks are
// numbered by process. Make the same runs in the same order in all processes. Each run() waits until the ranks of all
// processes are done. If one fails, every process's run() throws that rank's Error. A run() inside of body is a world
// of its own: threads of this process. It also throws Error for a list that cannot be divided, a process that does not
// come in time, and one that runs another program or configuration. A process that dies is an Error too (but see
// RunOptions::succession).
//
// If a body calls std::exit, the process ends with that status, once its other ranks have ended, each at the next
// collective. If that takes two seconds, the process ends without the rest of std::exit's work.
void run(const Devices& devices, const std::function<void(Rank&)>& body, const RunOptions& options = {});

// Does the same on so many devices, as parse_devices() takes a number: the first GPUs, or CPU ranks if there is none.
template <std::integral Count>
void run(Count count, const std::function<void(Rank&)>& body, const RunOptions& options = {}) {
  run(parse_devices(std::to_string(count)), body, options);
}

}  // namespace lockstep
