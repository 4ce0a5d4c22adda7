// The table of TrainOptions: every option once, for all who go through them: config.json, the program's flags and its
// help, the comparison of processes with each other and of a run with the one that goes on.
//
// A new option is a line here and the place where it acts. A test counts them. Texts name options as errors do, by
// their keys in backquotes, which the program turns into flags.
#pragma once

#include <lockstep/trainer/train_options.hpp>

#include <cstdint>
#include <limits>

namespace lockstep {

// Where an option must be the same.
enum class Same {
  throughout,  // in all processes of a run, and when it goes on: it shapes the results
  in_a_run,    // in all processes: it shapes their steps, but the results by rounding alone, or from then on
  nowhere,
};

struct Option {
  const char* key;  // in config.json
  Same same;
  const char* group = nullptr;  // the heading in the help; null: it has no flag of its own
  const char* value = nullptr;  // what the help calls its value: "N"; null: yes or no
  const char* help = nullptr;
  const char* otherwise = nullptr;  // what the help calls its default; null: the default itself
  const char* flag = nullptr;       // null: the key
  // What the flag takes: numbers from and to, a text of at least so many letters. checked() knows the option's own.
  int64_t least = 0;
  int64_t most = std::numeric_limits<int64_t>::max();
  bool kept = true;   // in config.json
  bool plain = true;  // its flag's text is the option's; else the program makes the option of it
};

namespace option_groups {
inline constexpr const char* what = "What to train";
inline constexpr const char* where = "Where";
inline constexpr const char* update = "Batches and updates";
inline constexpr const char* exchange = "What devices send each other";
inline constexpr const char* how = "How";
inline constexpr const char* out = "What is kept and shown";
}  // namespace option_groups

// visit(option, value) for each, in the help's order. Options may be const.
template <class Options, class Visit>
void each_option(Options& options, Visit&& visit) {
  using namespace option_groups;
  using enum Same;
  const auto one = [&](const Option& option, auto& value) { visit(option, value); };

  one({.key = "model",
       .same = throughout,
       .group = what,
       .value = "NAME",
       .help = "the network\n"
               "lenet: the section's\n"
               "mlp: six hidden layers of 512 units\n"
               "alexnet: images resized to 224 x 224; the book trains it with `lr` 0.01\n"
               "resnet18: ResNet-18 for small images; the book trains it with `lr` 0.1. BatchNorm normalises over each "
               "device's own samples (but see `sync_batchnorm`); its running statistics are averaged after every "
               "epoch\n"},
      options.model);
  one({.key = "width",
       .same = throughout,
       .group = what,
       .value = "X",
       .help = "mlp, alexnet, resnet18: this many times the channels and units, in multiples of 8"},
      options.width);
  one({.key = "image_size",
       .same = throughout,
       .group = what,
       .value = "N",
       .help = "alexnet, resnet18: images are resized to N x N (default: 224 for alexnet; resnet18 takes them as they "
               "are)",
       .otherwise = "",
       .least = 1},
      options.image_size);
  one({.key = "groups",
       .same = throughout,
       .group = what,
       .value = "N",
       .help = "alexnet: 2 is the network of 2012, in two towers of channels",
       .least = 1},
      options.groups);
  one({.key = "dropout",
       .same = throughout,
       .group = what,
       .value = "P",
       .help = "alexnet: this share of the values of its two wide layers is dropped in training, the same ones on any "
               "number of devices"},
      options.dropout);
  one({.key = "data",
       .same = throughout,
       .group = what,
       .value = "NAME",
       .help = "fashion-mnist, or synthetic: a stand-in of the same size that needs no files"},
      options.data);
  one({.key = "data_dir",
       .same = nowhere,
       .group = what,
       .value = "DIR",
       .help = "folder of the four IDX files of Fashion-MNIST, gzipped or plain (default: where Debian's package "
               "dataset-fashion-mnist or lockstep fetch-data put them)",
       .least = 1},
      options.data_dir);
  one({.key = "resume",
       .same = nowhere,
       .group = what,
       .value = "PATH",
       .help = "go on with a stopped run as if it had never been stopped: its folder, or one of the checkpoints in "
               "there; last: the run that was trained last of all that are kept, or `run_dir`'s; auto: `run_dir`'s if "
               "it has a "
               "checkpoint, and else a new run. Its own settings hold; `epochs`, `devices`, `split`, "
               "`threads_per_rank`, `balance`, `zero_stage`, `memory_format`, `cuda_graph`, `on_nan`, `check_replicas` "
               "and `data_dir` may be others, and what is kept. It stays in its folder, if `run_dir` gives no other",
       .least = 1,
       .kept = false,
       .plain = false},
      options.resume);

  one({.key = "devices",
       .same = nowhere,
       .group = where,
       .value = "LIST",
       .help = "one rank per device (default: every GPU, or else one CPU rank per core)\n"
               "2: the first two GPUs, or two CPU ranks\n"
               "cpu: one CPU rank; cpu,cpu or 2xcpu: two\n"
               "cuda: every GPU; cuda:0,cuda:2: these two\n"
               "2xcuda:0: two ranks that share one GPU\n",
       .plain = false},
      options.devices);
  one({.key = "split",
       .same = in_a_run,
       .group = where,
       .value = "FILE",
       .help = "how the network is split over the devices: a plan of lockstep plan for this network; its devices and "
               "batch size hold where no flag says others\n"
               "auto: measures the network and the devices first, and takes the best split\n"
               "none: by data alone, whatever a configuration says",
       .flag = "plan",
       .least = 1,
       .plain = false},
      options.split);
  one({.key = "threads_per_rank",
       .same = nowhere,
       .group = where,
       .value = "N",
       .help = "threads that each rank computes with",
       .least = 1,
       .most = 1024},
      options.threads_per_rank);
  one({.key = "timeout",
       .same = nowhere,
       .group = where,
       .value = "SECONDS",
       .help = "how long a rank waits for another in a call before the run ends with an error that names both; not "
               "kept",
       .least = 1,
       .most = 1'000'000,
       .kept = false},
      options.timeout);

  one({.key = "batch_size",
       .same = throughout,
       .group = update,
       .value = "N",
       .help = "samples per step, over all devices together",
       .least = 1},
      options.batch_size);
  one({.key = "scale_batch",
       .same = throughout,
       .group = update,
       .value = "K",
       .help = "K times `batch_size`, for `scale_lr` and `warmup` to go by",
       .least = 1},
      options.scale_batch);
  one({.key = "accumulate",
       .same = throughout,
       .group = update,
       .value = "N",
       .help = "each device computes its part of a batch in N parts, one after the other, before the update: the same "
               "gradients (BatchNorm normalises over such a part), less memory; a pipeline has its microbatches "
               "instead",
       .least = 1},
      options.accumulate);
  one({.key = "balance",
       .same = in_a_run,
       .group = update,
       .value = "SHARES",
       .help = "equal: each device gets as many samples of a batch, give or take one\n"
               "auto: in proportion to its speed, which is measured all along; two runs then do not give the same "
               "bits\n"
               "2,1: the first device gets twice as many as the second\n"},
      options.balance);
  one({.key = "optimizer",
       .same = throughout,
       .group = update,
       .value = "NAME",
       .help = "sgd, adam, adamw; for large batches lars (You et al. 2017), lamb (You et al. 2020), which scale a "
               "layer's update by the layer's norm (not with a split by channels)"},
      options.optimizer);
  one({.key = "momentum",
       .same = throughout,
       .group = update,
       .value = "X",
       .help = "of sgd and lars, whose authors take 0.9"},
      options.momentum);
  one({.key = "weight_decay",
       .same = throughout,
       .group = update,
       .value = "X",
       .help = "lambda: of sgd, adam and lars added to the gradient, of adamw and lamb beside it"},
      options.weight_decay);
  one({.key = "clip",
       .same = throughout,
       .group = update,
       .value = "X",
       .help = "the largest norm of a step's gradients, over the whole network: larger ones are scaled down to it; 0: "
               "none"},
      options.clip);
  one({.key = "lr",
       .same = throughout,
       .group = update,
       .value = "X",
       .help = "learning rate for batches of `reference_batch` samples; the default is for sgd; lenet wants about "
               "0.001 with adam and adamw, 0.01 with lamb, 8 with lars"},
      options.lr);
  one({.key = "scale_lr",
       .same = throughout,
       .group = update,
       .value = "RULE",
       .help = "for k times the reference batch: none, sqrt: sqrt(k) times the learning rate, linear: k times (Goyal "
               "et al. 2017)"},
      options.scale_lr);
  one({.key = "reference_batch",
       .same = throughout,
       .group = update,
       .value = "N",
       .help = "the batch size that `lr` is for (default: `batch_size`)",
       .otherwise = "",
       .least = 1},
      options.reference_batch);
  one({.key = "warmup",
       .same = throughout,
       .group = update,
       .value = "EPOCHS",
       .help = "in the first epochs the learning rate grows at every step, from 1/k of the full one (Goyal et al. "
               "2017)"},
      options.warmup);
  one({.key = "schedule",
       .same = throughout,
       .group = update,
       .value = "NAME",
       .help = "constant\n"
               "step: times `step_factor` after each of `step_epochs`\n"
               "cosine: falls to 0 over the epochs after the warm-up\n"},
      options.schedule);
  one({.key = "step_epochs",
       .same = throughout,
       .group = update,
       .value = "LIST",
       .help = "of `schedule` step, as in 30,60,80"},
      options.step_epochs);
  one({.key = "step_factor", .same = throughout, .group = update, .value = "X", .help = "of `schedule` step"},
      options.step_factor);

  one({.key = "compress",
       .same = throughout,
       .group = exchange,
       .value = "NAME",
       .help = "none: gradients as they are\n"
               "bf16, fp16: rounded to 16 bits, half of the bytes; fp16 overflows at 65504\n"
               "powersgd: as products of thin matrices (Vogels et al. 2019), what is left out comes later (not with a "
               "split by layers or channels)\n"},
      options.compress);
  one({.key = "compress_rank",
       .same = throughout,
       .group = exchange,
       .value = "R",
       .help = "columns of `compress` powersgd's matrices: more send more",
       .otherwise = "4",
       .least = 1},
      options.compress_rank);
  one({.key = "sync_every",
       .same = throughout,
       .group = exchange,
       .value = "H",
       .help = "devices take H steps each by themselves, then average their parameters, also at the end of an epoch "
               "(local SGD; not with a split by layers or channels); 0: gradients at every step"},
      options.sync_every);
  one({.key = "outer_lr",
       .same = throughout,
       .group = exchange,
       .value = "X",
       .help = "of `sync_every`: what the devices moved on average is a gradient, for this learning rate. DiLoCo "
               "(Douillard et al. 2023) has 0.7"},
      options.outer_lr);
  one({.key = "outer_momentum",
       .same = throughout,
       .group = exchange,
       .value = "X",
       .help = "and for this Nesterov momentum; DiLoCo has 0.9"},
      options.outer_momentum);

  one({.key = "epochs",
       .same = in_a_run,
       .group = how,
       .value = "N",
       .help = "passes over the training set",
       .least = 1},
      options.epochs);
  one({.key = "seed",
       .same = throughout,
       .group = how,
       .value = "N",
       .help = "of the initial weights, the samples' order and dropout"},
      options.seed);
  one({.key = "on_nan",
       .same = in_a_run,
       .group = how,
       .value = "WHAT",
       .help = "when a step's loss or gradients are not finite\n"
               "stop: the run ends there with exit code 3; what is kept is of before\n"
               "skip: that step changes nothing, and a warning names it; an epoch of such steps alone ends the run\n"
               "go-on: nothing looks\n"},
      options.on_nan);
  one({.key = "check_replicas",
       .same = in_a_run,
       .group = how,
       .value = "N",
       .help = "compare the devices' weights every N steps, and end the run, with the device named, if they differ; 0: "
               "never",
       .otherwise = "at the end of each epoch"},
      options.check_replicas);
  one({.key = "precision",
       .same = throughout,
       .group = how,
       .value = "NAME",
       .help = "float32\n"
               "tf32: float32 whose products round their factors to TF32, on the tensor cores of NVIDIA GPUs\n"
               "bf16: automatic mixed precision, in which convolutions and matrix products compute in bfloat16, and "
               "weights, loss and update stay float32\n"},
      options.precision);
  one({.key = "memory_format",
       .same = in_a_run,
       .group = how,
       .value = "NAME",
       .help = "contiguous, or channels-last: images and convolutions' weights pixel by pixel, which many convolutions "
               "are faster on (lenet on the CPU has kernels of its own, which it does not change); rounding differs"},
      options.memory_format);
  one({.key = "sync_batchnorm",
       .same = throughout,
       .group = how,
       .help = "resnet18: BatchNorm normalises over the samples of all devices, as one device would, and not over each "
               "device's own"},
      options.sync_batchnorm);
  one({.key = "zero_stage",
       .same = in_a_run,
       .group = how,
       .value = "N",
       .help = "ZeRO, with sgd, adam and adamw: 1: each rank keeps and computes its slice of the optimizer; 2: and of "
               "the gradients; 0: every rank has all of them. The results are the same",
       .most = 2},
      options.zero_stage);
  one({.key = "cuda_graph",
       .same = in_a_run,
       .group = how,
       .help = "on GPUs: record the step of a full batch once as a CUDA graph and replay it, so that the CPU does not "
               "limit small networks"},
      options.cuda_graph);

  one({.key = "run_dir", .same = nowhere, .flag = "name"}, options.run_dir);
  one({.key = "keep_last",
       .same = nowhere,
       .group = out,
       .value = "N",
       .help = "keep this many of the newest checkpoints for `resume`, beside the one with the best test accuracy; 0: "
               "write none"},
      options.keep_last);
  one({.key = "checkpoint_every",
       .same = nowhere,
       .group = out,
       .value = "N",
       .help = "a checkpoint every N steps too (default: at the end of each epoch)",
       .otherwise = "",
       .least = 1},
      options.checkpoint_every);
  one({.key = "tensorboard",
       .same = nowhere,
       .group = out,
       .help = "an event file for TensorBoard in the run's folder, with loss, accuracy, learning rate, images per "
               "second and each rank's wait for data, per epoch"},
      options.tensorboard);
  one({.key = "trace",
       .same = nowhere,
       .group = out,
       .value = "FILE",
       .help =
           "a timeline of steps 3 to 22, for ui.perfetto.dev or chrome://tracing: forward, backward, each bucket of "
           "gradients and the update, on every rank (under a launcher each process writes its own ranks': "
           "trace.json, trace.1.json)",
       .kept = false},
      options.trace);
}

}  // namespace lockstep
