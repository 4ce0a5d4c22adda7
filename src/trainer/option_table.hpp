// This is the table of TrainOptions. It has every option once, for all code that goes through options: config.json, the
// program's flags and help, and the comparisons. Processes are compared with each other, and a run with the one that
// goes on.
//
// A new option needs a line here, and the place where it acts. A test counts the options. Texts name options by their
// keys in backquotes, as errors do. The program turns these into flags.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include "flat_options.hpp"
#include "train_options.hpp"

#include <cstdint>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>

namespace lockstep {

// Says where an option must be the same.
enum class Same {
  throughout,  // the same in all processes of a run, and when it goes on: the option shapes the results
  in_a_run,    // the same in all processes: the option shapes steps, but results only by rounding or from then on
  nowhere,
};

struct Option {
  const char* key;  // the key in config.json
  Same same;
  const char* group;  // the heading in the help; null: the option has no flag of its own
  const char* value;  // the value's name in the help: "N"; null: yes or no
  const char* help;
  // Few options need these:
  struct More {
    const char* otherwise = nullptr;  // the default's name in the help; null: the default itself
    const char* flag = nullptr;       // null: the key
    // The flag accepts numbers from `least` to `most`, or a text of at least so many letters. checked() checks the
    // rest.
    int64_t least = 0;
    int64_t most = std::numeric_limits<int64_t>::max();
    bool kept = true;   // the option is kept in config.json
    bool plain = true;  // its flag's text is the option's; false: the program makes the option from the text
  };
  More more = {};
  bool is_of_way = false;  // the way of a run has it
};

namespace option_groups {
inline constexpr const char* what = "What to train";
inline constexpr const char* where = "Where";
inline constexpr const char* update = "Batches and updates";
inline constexpr const char* exchange = "What devices send each other";
inline constexpr const char* how = "How";
inline constexpr const char* out = "What is kept and shown";
}  // namespace option_groups

// The network and the data of a fit() are none of lockstep's, so of the options that say what to train only `model`
// says something: the network's name.
inline bool says_something(const Option& option, const TrainOptions& options) {
  return option.group == nullptr || option.group != std::string_view(option_groups::what) ||
         option.key == std::string_view("model") || is_of_lockstep(options);
}

// Calls visit(option, value) for each option, in the help's order. `flat` has the values of those whose types hold one
// choice (FlatOptions); both may be const.
template <class Options, class Flat, class Visit>
void each_option(Options& options, Flat& flat, Visit&& visit) {  // NOLINT(readability-function-size): it is a table
  using namespace option_groups;
  using enum Same;
  const auto one = [&](Option option, auto& value, const Option::More& more = {}) {
    option.more = more;
    visit(std::as_const(option), value);
  };
  const auto of_way = [&](Option option, auto& value, const Option::More& more = {}) {
    option.is_of_way = true;
    one(option, value, more);
  };

  one({"model", throughout, what, "NAME",
       "the network: lenet, mlp, alexnet, resnet18 or gpt\n"
       "lenet: the network of the book's section\n"
       "mlp: six hidden layers of 512 units\n"
       "alexnet: images resized to 224 x 224; the book trains it with `lr` 0.01\n"
       "resnet18: ResNet-18 for small images; the book trains it with `lr` 0.1. BatchNorm normalises over each "
       "device's own samples (but see `sync_batchnorm`); its running statistics are averaged after every epoch\n"
       "gpt: a language model, which learns the next byte of `text`; it wants `optimizer` adamw with `lr` about 0.003 "
       "and `schedule` cosine\n"},
      options.model.name);
  one({"width", throughout, what, "X", "mlp, alexnet, resnet18: X times as many channels and units, in multiples of 8"},
      options.model.width);
  one({"image_size", throughout, what, "N",
       "alexnet, resnet18: images are resized to N x N (default: 224 for alexnet; resnet18 takes them as they are)"},
      options.model.image_size, {.otherwise = "", .least = 1});
  one({"groups", throughout, what, "N", "alexnet: 2 makes two towers of channels, as in the network of 2012"},
      options.model.groups, {.least = 1});
  one({"dropout", throughout, what, "P",
       "alexnet: the share of values that its two wide layers drop in training; they drop the same on any number of "
       "devices"},
      options.model.dropout);
  one({"layers", throughout, what, "N", "gpt: transformer blocks"}, options.model.layers, {.least = 1});
  one({"heads", throughout, what, "N", "gpt: heads of each attention"}, options.model.heads, {.least = 1});
  one({"embedding", throughout, what, "N", "gpt: features of a byte, a multiple of `heads`"}, options.model.embedding,
      {.least = 1});
  one({"context", throughout, what, "N", "gpt: bytes of a sample, which the attention sees"}, options.model.context,
      {.least = 1});
  one({"residual_dropout", throughout, what, "P",
       "gpt: the share of values that are dropped of what each layer adds (Vaswani et al. 2017); they are the same on "
       "any number of devices"},
      options.model.residual_dropout);
  one({"text", nowhere, what, "FILE",
       "gpt: the text, any file: bytes are the tokens, and the last tenth of the file is held out for the test loss"},
      flat.text, {.least = 1});
  one({"data", throughout, what, "NAME",
       "fashion-mnist, or synthetic: a stand-in of the same size that needs no files"},
      flat.data);
  one({"data_dir", nowhere, what, "DIR",
       "folder of the four IDX files of Fashion-MNIST, gzipped or plain (default: where Debian's package "
       "dataset-fashion-mnist or lockstep fetch-data put them)"},
      flat.data_dir, {.least = 1});
  one({"resume", nowhere, what, "PATH",
       "go on with a stopped run as if it had never been stopped: its folder, or one of the checkpoints in there; "
       "last: the run that was trained last, or the run of `run_dir`; auto: the run of `run_dir` if it has a "
       "checkpoint, or else a new run\n"
       "The run keeps its settings. Only `epochs`, `devices`, `split`, `threads_per_rank`, `balance`, `zero_stage`, "
       "`memory_format`, `cuda_graph`, `on_nan`, `check_replicas`, `check_arithmetic`, `data_dir`, `text` and what is "
       "kept may change. It stays in its folder unless `run_dir` gives another"},
      options.keep.resume, {.least = 1, .kept = false, .plain = false});

  one({"devices", nowhere, where, "LIST",
       "one rank per device (default: every GPU, or else the fastest ranks on all CPU cores)\n"
       "2: the first two GPUs, or two CPU ranks\n"
       "cpu: one CPU rank; cpu,cpu or 2xcpu: two\n"
       "cuda: every GPU; cuda:0,cuda:2: these two\n"
       "2xcuda:0: two ranks that share one GPU\n"},
      options.devices, {.plain = false});
  of_way({"split", in_a_run, where, "FILE",
          "how the network is split over the devices: a file of lockstep plan for this network; its devices and batch "
          "size count unless a flag gives others\n"
          "auto: measures the network and the devices first, and takes the best split\n"
          "none: by data alone, whatever a configuration says"},
         flat.split, {.flag = "plan", .least = 1, .plain = false});
  one({"threads_per_rank", nowhere, where, "N", "threads that each rank computes with"}, options.threads_per_rank,
      {.least = 1, .most = 1024});
  one({"timeout", nowhere, where, "SECONDS",
       "how long a rank waits for another in a call before the run ends with an error that names both"},
      options.timeout, {.least = 1, .most = 1'000'000, .kept = false});
  one({"silence", nowhere, where, "SECONDS",
       "how long a process of a launcher may give no sign of life before it counts as dead. By default 1 s, and up to "
       "6 s while signs of life come late, as on a busy machine; not kept"},
      options.silence, {.otherwise = "", .least = 1, .most = 1'000'000, .kept = false});

  one({"batch_size", throughout, update, "N", "samples per step, over all devices together"}, options.batch.size,
      {.least = 1});
  one({"scale_batch", throughout, update, "K",
       "train with batches of K times `batch_size`; `scale_lr` and `warmup` then start from `batch_size`"},
      options.batch.scale, {.least = 1});
  one({"accumulate", throughout, update, "N",
       "each rank divides its part of a batch into N parts, and computes one after the other before the update. This "
       "takes less "
       "memory and gives the same gradients, but BatchNorm normalises over one of them"},
      options.batch.accumulate, {.least = 1});
  one({"balance", in_a_run, update, "SHARES",
       "how a batch is divided among the devices\n"
       "equal: each device gets as many samples, give or take one\n"
       "auto: in proportion to the devices' measured speed; without `grain` two runs then do not give the same bits\n"
       "2,1: the first device gets twice as many as the second\n"},
      options.batch.balance);
  one({"drop_last", in_a_run, update, nullptr,
       "leave out the last batch of an epoch where it is smaller, as where a BatchNorm refuses its one sample"},
      options.batch.drop_last);
  one({"grain", throughout, update, "N",
       "the same bits on any number of devices: samples are computed N at a time, by themselves\n"
       "They are consecutive samples of a batch, of which a multiple of N is best. Gradients are added in one order, "
       "BatchNorm normalises over N samples, and a pipeline's microbatches have N\n"},
      flat.grain, {.otherwise = "none", .least = 1});
  one({"optimizer", throughout, update, "NAME",
       "the optimizer: sgd, adam, adamw; or for large batches lars (You et al. 2017) and lamb (You et al. 2020), which "
       "scale a layer's update by the layer's norm"},
      options.optimizer.kind);
  one({"momentum", throughout, update, "X", "momentum of sgd and lars; lars's authors use 0.9"},
      options.optimizer.momentum);
  one({"weight_decay", throughout, update, "X",
       "the factor lambda: sgd, adam and lars add lambda * w to the gradient, adamw and lamb to the update"},
      options.optimizer.weight_decay);
  one({"clip", throughout, update, "X",
       "scale a step's gradients down to norm X, over the whole network, if their norm is larger; 0: never"},
      options.optimizer.clip);
  one({"lr", throughout, update, "X",
       "learning rate for batches of `reference_batch` samples (default: 0.2 for sgd, 0.001 for adam, adamw and lamb, "
       "1 for lars); lenet wants about 0.01 with lamb, 8 with lars"},
      options.rate.lr, {.otherwise = ""});
  one({"scale_lr", throughout, update, "RULE",
       "how the learning rate grows with batches of k times `reference_batch`: none; sqrt: sqrt(k) times; linear: k "
       "times (Goyal et al. 2017)"},
      options.rate.scaling);
  one({"reference_batch", throughout, update, "N", "the batch size that `lr` is for (default: `batch_size`)"},
      options.rate.reference_batch, {.otherwise = "", .least = 1});
  one({"warmup", throughout, update, "EPOCHS",
       "number of first epochs in which the learning rate grows, from 1/k of the full one, or from 1/1000 of it if k "
       "is 1; k: see `scale_lr` (Goyal et al. 2017)"},
      options.rate.warmup_epochs);
  one({"schedule", throughout, update, "NAME",
       "how the learning rate changes over the epochs\n"
       "constant: not at all\n"
       "step: times `step_factor` after each of `step_epochs`\n"
       "cosine: falls to 0 over the epochs after the warm-up\n"},
      options.rate.schedule);
  one({"step_epochs", throughout, update, "LIST",
       "for `schedule` step: after which epochs the learning rate changes, as in 30,60,80"},
      options.rate.step_epochs);
  one({"step_factor", throughout, update, "X", "for `schedule` step: the factor after each of `step_epochs`"},
      options.rate.step_factor);

  of_way(
      {"compress", throughout, exchange, "NAME",
       "how gradients are sent\n"
       "none: as they are\n"
       "bf16, fp16: rounded to 16 bits, half of the bytes; fp16 overflows at 65504\n"
       "powersgd: as products of thin matrices (Vogels et al. 2019); what is left out is added to the next step's\n"},
      flat.compress);
  of_way({"compress_rank", throughout, exchange, "R",
          "for `compress` powersgd: columns of its matrices; more are more exact, and send more"},
         flat.compress_rank, {.otherwise = "4", .least = 1});
  of_way({"sync_every", throughout, exchange, "H",
          "each rank takes H steps by itself, then all average their parameters, also at the end of an epoch (local "
          "SGD); 0: average gradients at every step"},
         flat.local.sync_every);
  of_way({"outer_lr", throughout, exchange, "X",
          "for `sync_every`: learning rate of the outer optimizer, which takes the ranks' mean movement for a "
          "gradient; DiLoCo (Douillard et al. 2023) uses 0.7"},
         flat.local.outer_lr);
  of_way({"outer_momentum", throughout, exchange, "X",
          "for `sync_every`: Nesterov momentum of the outer optimizer; DiLoCo uses 0.9"},
         flat.local.outer_momentum);

  one({"epochs", in_a_run, how, "N", "passes over the training set"}, options.epochs, {.least = 1});
  one({"seed", throughout, how, "N", "the seed of the first weights, the samples' order and dropout"}, options.seed);
  one({"on_nan", in_a_run, how, "WHAT",
       "what happens if a step's loss or gradients are not finite\n"
       "stop: the run ends with exit code 3; what was kept before stays\n"
       "skip: the step changes nothing, and a warning names it; an epoch with only such steps ends the run\n"
       "go-on: nothing is checked\n"},
      options.on_nan);
  one({"check_replicas", in_a_run, how, "N",
       "compare the ranks' weights and optimizer states, with `grain` running statistics too, every N steps and at the "
       "end of each epoch, and end the run, with the rank named, if they differ; in an elastic job that rank gets the "
       "others' state; what one rank alone has, as with `zero_stage` and splits, must not change between two updates: "
       "take 1, so that every step is covered; 0: never"},
      options.check_replicas, {.otherwise = "at the end of each epoch"});
  one({"check_arithmetic", in_a_run, how, "F",
       "another rank computes this fraction of the grains again, such as 0.01, and the run ends if the bits differ, "
       "with the rank named that computes wrongly; costs about this fraction of the time; 0: none"},
      flat.check_arithmetic);
  one({"precision", throughout, how, "NAME",
       "in which type is computed\n"
       "float32: float32 throughout, also in convolutions on NVIDIA GPUs, for which LibTorch by default takes TF32\n"
       "tf32: float32 whose products and convolutions round their factors to TF32, on the tensor cores of NVIDIA GPUs\n"
       "bf16: automatic mixed precision, in which convolutions and matrix products compute in bfloat16, and weights, "
       "loss and update stay float32\n"},
      options.precision);
  one({"memory_format", in_a_run, how, "NAME",
       "how images and convolutions' weights lie in memory; the results are the same but for rounding\n"
       "auto: channels-last for resnet18 on CPUs, where it is faster; else contiguous\n"
       "contiguous: channel by channel\n"
       "channels-last: pixel by pixel; lenet's own kernels on the CPU do not change\n"},
      options.memory_format);
  one({"sync_batchnorm", throughout, how, nullptr,
       "resnet18: BatchNorm normalises over the samples of all devices, as one device would, and not over each "
       "device's own"},
      options.sync_batchnorm);
  of_way({"zero_stage", in_a_run, how, "N",
          "ZeRO, for sgd, adam and adamw. 0: every rank has the whole optimizer; 1: each rank keeps and computes its "
          "slice of it; 2: and of the gradients; 3: and of the parameters, whose layers it gathers just before they "
          "compute. The results are the same"},
         flat.zero_stage, {.most = 3});
  one({"cuda_graph", in_a_run, how, nullptr,
       "on GPUs: record the step of a full batch once as a CUDA graph and replay it, so that the CPU does not limit "
       "small networks"},
      options.cuda_graph);

  one({"run_dir", nowhere, nullptr, nullptr, nullptr}, options.keep.run_dir, {.flag = "name"});
  one({"keep_last", nowhere, out, "N",
       "keep this many of the newest checkpoints for `resume`, beside the one with the best test accuracy; 0: write "
       "none"},
      flat.keep_last);
  one({"checkpoint_every", nowhere, out, "N",
       "also write a checkpoint every N steps (default: only at the end of each epoch)"},
      flat.checkpoint_every, {.otherwise = "", .least = 1});
  one({"tensorboard", nowhere, out, nullptr,
       "write an event file for TensorBoard in the run's folder, with loss, accuracy, learning rate, images per second "
       "and each rank's wait for data, per epoch"},
      options.keep.tensorboard);
  one({"trace", nowhere, out, "FILE",
       "write a timeline of steps 3 to 22 to this file, for ui.perfetto.dev or chrome://tracing: forward, backward, "
       "each bucket of gradients and the update, on every rank (under a launcher each process writes its own ranks': "
       "trace.json, trace.1.json)"},
      options.keep.trace, {.least = 1, .kept = false});
}

// Does the same with the options' own flat values. If `options` is not const, it takes what the visits leave of the
// values: see take_flat().
template <class Options, class Visit>
void each_option(Options& options, Visit&& visit) {
  constexpr bool is_const = std::is_const_v<Options>;
  std::conditional_t<is_const, const FlatOptions, FlatOptions> values = flat(options);
  each_option(options, values, visit);
  if constexpr (!is_const) take_flat(values, options);
}

}  // namespace lockstep
