#include "option_pairs.hpp"

#include <lockstep/base/error.hpp>

#include "batch_settings.hpp"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

namespace lockstep {
namespace {

using F = const Facts&;

bool is_split(F f) {
  return f.flat.split && !by_data_alone(*f.flat.split);
}

// A split network rounds its gradients too, but has no PowerSGD.
bool compresses_whole_layers(F f) {
  return f.flat.compress == Compression::powersgd || (f.flat.compress != Compression::none && !is_split(f));
}

bool has_no_cuda(F f) {
  return !f.options.devices.empty() && !f.options.devices[0].is_cuda();
}

// These are about what ranks send each other, and how the network lies on them.
constexpr Choice zero{"zero_stage", "`zero_stage`", [](F f) { return f.flat.zero_stage != 0; }};
constexpr Choice zero_2_or_3{"zero_stage", "`zero_stage` 2 or 3", [](F f) { return f.flat.zero_stage > 1; }};
constexpr Choice zero_3{"zero_stage", "`zero_stage` 3", [](F f) { return f.flat.zero_stage == 3; }};
constexpr Choice compress{"compress", "`compress`", [](F f) { return f.flat.compress != Compression::none; }};
constexpr Choice compress_whole{"compress", "`compress`", compresses_whole_layers};
constexpr Choice powersgd{"compress", "`compress` powersgd",
                          [](F f) { return f.flat.compress == Compression::powersgd; }};
constexpr Choice no_powersgd{"compress", "`compress` other than powersgd",
                             [](F f) { return f.flat.compress != Compression::powersgd; }};
constexpr Choice compress_rank{"compress_rank", "`compress_rank`", [](F f) { return f.flat.compress_rank != 0; }};
constexpr Choice sync_every{"sync_every", "`sync_every`", [](F f) { return f.flat.local.sync_every != 0; }};
constexpr Choice no_sync_every{"sync_every", "no `sync_every`", [](F f) { return f.flat.local.sync_every == 0; }};
constexpr Choice outer{"outer_lr", "`outer_lr` or `outer_momentum`",
                       [](F f) { return f.flat.local.outer_lr != 1 || f.flat.local.outer_momentum != 0; }};
constexpr Choice graph{"cuda_graph", "`cuda_graph`", [](F f) { return f.options.cuda_graph; }};
constexpr Choice split{"split", "a `split` other than by data", is_split};
constexpr Choice any_split{"split", "a `split`", [](F f) { return f.flat.split.has_value(); }};
constexpr Choice in_microbatches{"split", "a `split` in microbatches",
                                 [](F f) { return f.flat.split && f.flat.split->microbatches > 1; }};
constexpr Choice by_layers{"split", "a `split` by layers or in microbatches", [](F f) {
                             return f.flat.split && (f.flat.split->stages() > 1 || f.flat.split->microbatches > 1);
                           }};
constexpr Choice by_channels{"split", "a `split` by channels",
                             [](F f) { return f.flat.split && f.flat.split->mesh.tensor > 1; }};

// These are about how a rank computes its part of a batch.
constexpr Choice accumulate{"accumulate", "`accumulate`", [](F f) { return f.options.batch.accumulate > 1; }};
constexpr Choice grain{"grain", "`grain`", [](F f) { return f.flat.grain != 0; }};
constexpr Choice no_grain{"grain", "no `grain`", [](F f) { return f.flat.grain == 0; }};
constexpr Choice balance{"balance", "`balance`", [](F f) { return f.options.batch.balance != BalanceRule(); }};
constexpr Choice automatic{"balance", "`balance` auto", [](F f) { return balances(f.options.batch); }};
constexpr Choice arithmetic{"check_arithmetic", "`check_arithmetic`", [](F f) { return f.flat.check_arithmetic != 0; }};
constexpr Choice sync_batchnorm{"sync_batchnorm", "`sync_batchnorm`", [](F f) { return f.options.sync_batchnorm; }};
constexpr Choice skip{"on_nan", "`on_nan` skip", [](F f) { return f.options.on_nan == OnNan::skip; }};
constexpr Choice threads{"threads_per_rank", "`threads_per_rank` above 1",
                         [](F f) { return f.options.threads_per_rank > 1; }};
constexpr Choice whole_layers{"optimizer", "`optimizer` lars or lamb",
                              [](F f) { return needs_whole_layers(f.options.optimizer.kind); }};
constexpr Choice no_cuda{"devices", "`devices` without CUDA", has_no_cuda};
constexpr Choice tf32{"precision", "`precision` tf32", [](F f) { return f.options.precision == Precision::tf32; }};

// These are about the data, and what is kept.
constexpr Choice gpt{"model", "`model` gpt", [](F f) { return learns_text(f.options.model); }};
constexpr Choice of_images{"model", "a `model` of images", [](F f) { return !learns_text(f.options.model); }};
constexpr Choice text{"text", "`text`", [](F f) { return !f.flat.text.empty(); }};
constexpr Choice no_text{"text", "no `text`", [](F f) { return f.flat.text.empty(); }};
constexpr Choice synthetic{"data", "`data` synthetic", [](F f) { return f.flat.data == Images::synthetic; }};
constexpr Choice data_dir{"data_dir", "`data_dir`", [](F f) { return !f.flat.data_dir.empty(); }};
constexpr Choice channels_last{"memory_format", "`memory_format` channels-last",
                               [](F f) { return f.options.memory_format == MemoryFormat::channels_last; }};
constexpr Choice every{"checkpoint_every", "`checkpoint_every`", [](F f) { return f.flat.checkpoint_every != 0; }};
constexpr Choice none_kept{"keep_last", "`keep_last` 0", [](F f) { return f.flat.keep_last == 0; }};
constexpr Choice trace{"trace", "`trace`", [](F f) { return !f.options.keep.trace.empty(); }};

// These are about the job and the task. Some have no option.
constexpr Choice elastic{nullptr, "an elastic job", [](F f) { return f.is_elastic; }};
constexpr Choice ema{nullptr, "Task::ema_decay", [](F f) { return f.task != nullptr && f.task->ema_decay > 0; }};
constexpr Choice own_optimizer{nullptr, "Task::optimizer", [](F f) { return f.task != nullptr && f.task->optimizer; }};
constexpr Choice optimizer{"optimizer", "`optimizer`, `momentum` or `weight_decay`", [](F f) {
                             const OptimizerOptions& own = f.options.optimizer;
                             return own.kind != OptimizerKind::sgd || own.momentum != 0 || own.weight_decay != 0;
                           }};
constexpr Choice no_lr{"lr", "no `lr`", [](F f) { return !f.options.rate.lr; }};

constexpr const char* not_elastic =
    "leave it out, or start a job that is not elastic, with `resume` auto: when a process is lost, lockstep launch "
    "starts all of them again (`max_restarts`)";
constexpr const char* shares = "give the shares, as in `balance` 2,1";

// Flags and config.json may name two ways of a run, and have these pairs. No TrainOptions can: its types hold one
// choice.
constexpr Choice ways[] = {zero, compress_whole, sync_every, split};
constexpr OptionPair flat_pairs[] = {
    {compress_rank, no_powersgd, "only PowerSGD's matrices have columns",
     "take powersgd, or leave `compress_rank` out"},
    {outer, no_sync_every, "only local SGD has an outer optimizer", "give `sync_every` too, or leave them out"},
    {data_dir, synthetic, "synthetic data need no files"},
    {text, synthetic, "gpt learns a text, and the other networks images"},
    {text, data_dir, "gpt learns a text, and the other networks images"},
    {every, none_kept, "none of the checkpoints would be kept"},
    {arithmetic, no_grain, "it compares grains that two devices compute", "give a `grain`, such as 32"},
};

// Each of these lies between two choices that are made apart. A type could hold it only by multiplying the choices.
constexpr OptionPair pairs[] = {
    {zero, whole_layers, "they need the norms of whole layers, of which a rank has slices", "take sgd, adam or adamw"},
    {zero_2_or_3, sync_batchnorm, "both wait for other devices within backward",
     "take `zero_stage` 1, or leave it out"},
    {zero_3, arithmetic, "who computes grains of others again needs all parameters",
     "take `zero_stage` 2, or leave it out"},
    {sync_every, sync_batchnorm, "BatchNorm would exchange statistics at every step"},
    {sync_every, every, "the ranks' parameters differ between two averages (at the end of each epoch they are one)"},
    {grain, threads, "each grain is computed on one thread", "take more `devices` in their place"},
    {grain, sync_batchnorm, "a grain would be normalised together with others"},
    {grain, compress, "each device's gradients would be rounded on their way"},
    {grain, sync_every, "each device takes steps of its own, so that the bits depend on their number"},
    {zero_3, graph, "layers are gathered, and let go, while others compute", "take `zero_stage` 2, or leave it out"},
    {sync_every, graph, "most steps have no exchange, and a graph repeats one"},
    {graph, split, "the host leads microbatches and slices through the network"},
    {arithmetic, graph, "who computes grains of others again needs the host", "leave `cuda_graph` out"},
    {grain, by_channels, "products of slices are added up in another order", "take a split by data and layers"},
    {grain, in_microbatches, "grains are a pipeline's microbatches", "leave the microbatches out"},
    {arithmetic, split, "who computes grains of others again needs the whole network"},
    {accumulate, by_layers, "the microbatches are such parts already", "take a split with more of them"},
    {sync_batchnorm, accumulate, "BatchNorm would normalise over a part, and not over the batch"},
    {sync_batchnorm, split, "only ranks with the whole network can normalise over the batch"},
    {whole_layers, by_channels, "they need the norms of whole layers, of which a rank has slices",
     "take sgd, adam or adamw, or a split by data and layers"},
    {automatic, graph, "a graph records steps of one size", shares},
    {automatic, sync_batchnorm, "devices wait for each other while their speed is measured", shares},
    {automatic, zero_2_or_3, "devices wait for each other while their speed is measured", shares},
    {automatic, sync_every, "devices do not wait for each other at every step, which auto keeps short", shares},
    {automatic, split, "devices wait for each other while their speed is measured", shares},
    {skip, sync_every, "devices do not learn of each other's steps", "take stop"},
    {skip, powersgd, "PowerSGD keeps what it left out of a step for the next one", "take stop"},
    {text, of_images, "only gpt learns a text", "leave `text` out"},
    {gpt, no_text, "it learns the next byte of a text", "give one, any file"},
    {gpt, channels_last, "a text has no images", "leave `memory_format` out"},
    {graph, no_cuda, "only CUDA has graphs", "leave `cuda_graph` out"},
    {tf32, no_cuda, "only NVIDIA GPUs multiply so", "take float32 or bf16"},
    {elastic, no_grain, "the weights' bits would depend on the number of processes", "give a `grain`, such as 32"},
    {elastic, zero, "a slice of the optimizer is lost with its device", not_elastic},
    {elastic, any_split, "a part of the network is lost with its device", not_elastic},
    {elastic, graph, "a replay's update would take what a lost device has left", not_elastic},
    {elastic, balance, "the shares are of the devices that the run began with", not_elastic},
    {elastic, trace, "a trace is of ranks that stay", not_elastic},
    {own_optimizer, optimizer, "the task makes its optimizer", "leave them out, and set them in the function"},
    {own_optimizer, no_lr, "the options set its learning rate, by their schedule", "give `lr`"},
    {ema, sync_every, "each rank has weights of its own within a round, and the average is of those that all have"},
};

[[noreturn]] void refuse(const OptionPair& pair) {
  std::vector<std::string> keys;
  for (const char* key : {pair.one.key, pair.other.key}) {
    if (key != nullptr) keys.emplace_back(key);
  }
  throw Error(
      std::string(pair.one.text) + " and " + pair.other.text + " do not go together: " + pair.why + "; " + pair.instead,
      {.options = keys});
}

void refuse_any(std::span<const OptionPair> of, F facts) {
  for (const OptionPair& pair : of) {
    if (pair.one.is_made(facts) && pair.other.is_made(facts)) refuse(pair);
  }
}

}  // namespace

std::vector<OptionPair> forbidden_pairs() {
  std::vector<OptionPair> all(std::begin(flat_pairs), std::end(flat_pairs));
  all.insert(all.end(), std::begin(pairs), std::end(pairs));
  return all;
}

void check_flat(const FlatOptions& flat) {
  const TrainOptions defaults;
  const Facts facts{.options = defaults, .flat = flat};
  const Choice* first = nullptr;
  for (const Choice& way : ways) {
    if (!way.is_made(facts)) continue;
    if (first != nullptr) refuse({*first, way, "they are two ways to share the work"});
    first = &way;
  }
  refuse_any(flat_pairs, facts);
}

void check_pairs(const Facts& facts) {
  refuse_any(pairs, facts);
}

std::string remark_on_pairs(std::string_view key) {
  std::vector<std::pair<std::string, std::string>> remarks;  // remarks by the first side's text
  for (const OptionPair& pair : forbidden_pairs()) {
    const Choice& one = pair.one;
    if (one.key == nullptr || one.key != key) continue;
    auto remark = std::find_if(remarks.begin(), remarks.end(), [&](auto& known) { return known.first == one.text; });
    if (remark == remarks.end()) remark = remarks.insert(remark, {one.text, ""});
    std::string& text = remark->second;
    const std::string_view second = pair.other.text;
    const bool is_needed = second.starts_with("no ");
    text += text.empty() ? "" : ", ";
    text += is_needed ? "needs " : text.find("not with") == text.npos ? "not with " : "";
    text += is_needed ? second.substr(3) : second;
  }
  std::string all;
  for (const Choice& way : ways) {
    if (way.key != key) continue;
    all =
        "a run takes one of `compress`, `sync_every`, `zero_stage` and `split`; bf16 and fp16 go with a "
        "`split` too";
  }
  for (const auto& [first, text] : remarks) {
    all += all.empty() ? "" : "; ";
    all += first == "`" + std::string(key) + "`" ? text : first + " " + text;
  }
  return all;
}

}  // namespace lockstep
