// TrainOptions as JSON: options come back as they were, and what is wrong is refused by name.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/lab/power_sgd.hpp>
#include <lockstep/trainer/trainer.hpp>
#include <nlohmann/json.hpp>

#include "layout/split_json.hpp"
#include "support/error_of.hpp"
#include "trainer/flat_options.hpp"
#include "trainer/option_table.hpp"
#include "trainer/option_text.hpp"
#include "trainer/train_options.hpp"

#include <array>
#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace train_options_test {

using lockstep::error_of;
using lockstep::Refused;
using lockstep::TrainOptions;

lockstep::Devices cpus(int count) {
  return lockstep::Devices(count, torch::kCPU);
}

TEST(TrainOptionsJson, ComesBackAsItWas) {
  TrainOptions options;
  options.model.name = "alexnet";
  options.model.width = 0.1;
  options.model.image_size = 96;
  options.model.groups = 2;
  options.model.dropout = 0.25;
  options.data = lockstep::FashionMnist{"/some where/\"quoted\""};
  options.devices = cpus(3);
  options.threads_per_rank = 2;
  options.batch.size = 77;
  options.rate.lr = 0.1;
  options.epochs = 4;
  options.seed = 18446744073709551615u;
  options.on_nan = lockstep::OnNan::skip;
  options.check_replicas = 50;
  options.batch.grain = {7, 0.25};
  options.precision = lockstep::Precision::bf16;
  options.memory_format = lockstep::MemoryFormat::channels_last;
  options.sync_batchnorm = true;
  options.way = lockstep::SplitNetwork{{.mesh = {.data = 1, .pipeline = 3},
                                        .schedule = lockstep::PipelineSchedule::interleaved,
                                        .stages_per_rank = 2,
                                        .microbatches = 4,
                                        .recompute = true,
                                        .cuts = {1, 2, 3, 5, 8},
                                        .tensor_rule = lockstep::TensorRule::alternating}};
  options.keep.checkpoints = {.last = 5, .every = 100};
  options.keep.tensorboard = true;
  options.keep.run_dir = "runs/x";
  const auto back = lockstep::train_options_from_json(to_json(options));
  EXPECT_EQ(to_json(back), to_json(options));
  EXPECT_EQ(back.model.name, options.model.name);
  EXPECT_EQ(back.model.width, options.model.width);
  EXPECT_EQ(back.model.image_size, options.model.image_size);
  EXPECT_EQ(back.model.groups, options.model.groups);
  EXPECT_EQ(back.model.dropout, options.model.dropout);
  EXPECT_EQ(back.data, options.data);
  EXPECT_EQ(back.on_nan, options.on_nan);
  EXPECT_EQ(back.check_replicas, options.check_replicas);
  ASSERT_TRUE(back.batch.grain && back.keep.checkpoints);
  EXPECT_EQ(back.batch.grain->samples, options.batch.grain->samples);
  EXPECT_EQ(back.batch.grain->check_arithmetic, 0.25);
  EXPECT_EQ(back.keep.checkpoints->every, 100);
  EXPECT_EQ(back.seed, options.seed);
  EXPECT_EQ(back.rate.lr, options.rate.lr);
  EXPECT_EQ(back.precision, options.precision);
  EXPECT_EQ(back.memory_format, options.memory_format);
  EXPECT_EQ(back.sync_batchnorm, options.sync_batchnorm);
  EXPECT_EQ(back.devices, options.devices);
  EXPECT_EQ(std::get<lockstep::SplitNetwork>(back.way).split, std::get<lockstep::SplitNetwork>(options.way).split);
  EXPECT_EQ(lockstep::train_options_from_json("{}").way.index(), TrainOptions().way.index());
}

TEST(TrainOptionsJson, HasOneWayWithItsOwnKeys) {
  const lockstep::ModelSplit split{.mesh = {.pipeline = 2}};
  const std::string split_text = nlohmann::json::parse(to_json(split).dump()).dump();
  for (const auto& [way, text] : std::vector<std::pair<lockstep::Way, std::string>>{
           {lockstep::Averaged(), "{}"},
           {lockstep::Averaged{lockstep::Rounding::fp16}, R"({"compress":"fp16"})"},
           {lockstep::Sharded::nothing, "{}"},
           {lockstep::PowerSgd{2}, R"({"compress":"powersgd","compress_rank":2})"},
           {lockstep::Sharded::gradients, R"({"zero_stage":2})"},
           {lockstep::LocalSgdOptions{16, 0.5}, R"({"outer_lr":0.5,"sync_every":16})"},
           {lockstep::SplitNetwork{split, lockstep::Rounding::bf16},
            R"({"compress":"bf16","split":)" + split_text + "}"}}) {
    const std::string json = to_json(TrainOptions{.way = way});
    EXPECT_EQ(nlohmann::json::parse(json)["way"].dump(), text);
    const TrainOptions back = lockstep::train_options_from_json(json);
    EXPECT_EQ(to_json(back), json);
    if (text != "{}") EXPECT_EQ(back.way.index(), way.index());
  }
  const auto error = [](const std::string& json) { return error_of([&] { lockstep::train_options_from_json(json); }); };
  EXPECT_THAT(error(R"({"way": {"zero_stage": 2, "compress": "bf16"}})"), Refused("zero_stage", "compress"));
  EXPECT_THAT(error(R"({"way": {"zero": 2}})"), Refused("way.zero"));
  EXPECT_THAT(error(R"({"way": {"zero_stage": 2}, "sync_every": 2})"), Refused("sync_every"));
  EXPECT_THAT(error(R"({"way": 3})"), Refused("way"));
}

// Gives the configuration that lockstep 0.1 wrote, with the keys of all ways beside the others.
std::string config_of_0_1(const std::string& key, const nlohmann::json& value) {
  auto config = nlohmann::json::parse(R"({
    "model": "mlp", "width": 0.125, "image_size": 0, "groups": 1, "dropout": 0.5, "layers": 4, "heads": 4,
    "embedding": 128, "context": 128, "residual_dropout": 0.0, "text": "", "data": "fashion-mnist", "data_dir": "/d",
    "devices": "cpu,cpu", "threads_per_rank": 1, "batch_size": 32, "scale_batch": 1, "accumulate": 1,
    "balance": "equal", "drop_last": false, "grain": 0, "optimizer": "sgd", "momentum": 0.5, "weight_decay": 0.0,
    "clip": 0.0, "lr": 0.05, "scale_lr": "none", "reference_batch": 0, "warmup": 0.0, "schedule": "constant",
    "step_epochs": [], "step_factor": 0.1, "compress": "none", "compress_rank": 0, "sync_every": 0, "outer_lr": 1.0,
    "outer_momentum": 0.0, "epochs": 4, "seed": 1, "on_nan": "stop", "check_replicas": -1, "check_arithmetic": 0.0,
    "precision": "float32", "memory_format": "contiguous", "sync_batchnorm": false, "zero_stage": 0,
    "cuda_graph": false, "write_text": 200, "keep_twice": false, "run_dir": "runs/x", "keep_last": 2, "checkpoint_every": 0,
    "tensorboard": false})");
  config[key] = value;
  return config.dump();
}

TEST(TrainOptionsJson, Of0_1IsReadAndRefusedWhereItHasTwoWays) {
  const auto index = [](const std::string& key, const nlohmann::json& value) {
    const TrainOptions read = lockstep::train_options_from_json(config_of_0_1(key, value));
    EXPECT_EQ(read.rate.lr, 0.05);
    return read.way.index();
  };
  const auto of = [](const lockstep::Way& way) { return way.index(); };
  EXPECT_EQ(index("epochs", 4), of(lockstep::Averaged()));
  EXPECT_EQ(index("compress", "bf16"), of(lockstep::Averaged()));
  EXPECT_EQ(index("compress", "powersgd"), of(lockstep::PowerSgd()));
  EXPECT_EQ(index("zero_stage", 3), of(lockstep::Sharded::parameters));
  EXPECT_EQ(index("sync_every", 2), of(lockstep::LocalSgdOptions()));
  EXPECT_TRUE(lockstep::train_options_from_json(config_of_0_1("cuda_graph", true)).cuda_graph);
  EXPECT_EQ(index("split", nlohmann::json::parse(to_json(lockstep::ModelSplit{.mesh = {.pipeline = 2}}).dump())),
            of(lockstep::SplitNetwork()));
  EXPECT_THAT(error_of([] { lockstep::train_options_from_json(config_of_0_1("keep_twice", true)); }),
              Refused("keep_twice"));
  auto both = nlohmann::json::parse(config_of_0_1("zero_stage", 2));
  both["compress"] = "bf16";
  EXPECT_THAT(error_of([&] { lockstep::train_options_from_json(both.dump()); }), Refused("zero_stage", "compress"));
}

TEST(TrainOptionsJson, IsRefusedWhereItHasTwoChoices) {
  for (const auto& [json, one, other] : std::vector<std::array<std::string, 3>>{
           {R"({"data": "synthetic", "data_dir": "/d"})", "data_dir", "data"},
           {R"({"data": "synthetic", "text": "/t"})", "text", "data"},
           {R"({"data_dir": "/d", "text": "/t"})", "text", "data_dir"},
           {R"({"keep_last": 0, "checkpoint_every": 5})", "checkpoint_every", "keep_last"},
           {R"({"check_arithmetic": 0.5})", "check_arithmetic", "grain"}}) {
    EXPECT_THAT(error_of([&, &text = json] { lockstep::train_options_from_json(text); }), Refused(one, other)) << json;
  }
}

TEST(TrainOptionsDefaults, TakeTheMemoryFormatThatIsFastForTheModelUnlessOneIsGiven) {
  using enum lockstep::MemoryFormat;
  const auto of = [](const std::string& model, lockstep::MemoryFormat format, const lockstep::Devices& devices) {
    TrainOptions options;
    options.model.name = model;
    options.memory_format = format;
    options.devices = devices;
    lockstep::fill_defaults(options);
    return options.memory_format;
  };
  EXPECT_EQ(TrainOptions().memory_format, automatic);
  EXPECT_EQ(of("resnet18", automatic, cpus(2)), channels_last);
  EXPECT_EQ(of("resnet18", automatic, {c10::Device(torch::kCUDA, 0)}), contiguous);
  for (const char* model : {"lenet", "mlp", "alexnet"}) EXPECT_EQ(of(model, automatic, cpus(2)), contiguous) << model;
  EXPECT_EQ(of("resnet18", contiguous, cpus(2)), contiguous);
  EXPECT_EQ(of("lenet", channels_last, cpus(2)), channels_last);
  TrainOptions options;  // a run keeps the format that it had
  options.model.name = "resnet18";
  options.devices = cpus(1);
  EXPECT_EQ(checked(options).memory_format, channels_last);
}

// Turns into any field's type.
struct Anything {
  template <class Value>
  operator Value&() const&;
};

// How many fields a struct without constructors has.
template <class Struct, class... Fields>
constexpr int fields_of() {
  if constexpr (requires { Struct{Fields()..., Anything()}; }) {
    return fields_of<Struct, Fields..., Anything>();
  } else {
    return sizeof...(Fields);
  }
}

// A value that is no option's default, and that config.json can hold.
template <class Value>
void change(Value& value) {
  if constexpr (std::is_same_v<Value, bool>) {
    value = !value;
  } else if constexpr (std::is_arithmetic_v<Value>) {
    value += 1;
  } else if constexpr (std::is_enum_v<Value>) {
    value = static_cast<Value>(1);
  } else if constexpr (std::is_same_v<Value, std::string> || std::is_same_v<Value, std::filesystem::path>) {
    value = "another";
  } else if constexpr (std::is_same_v<Value, std::chrono::seconds>) {
    value = std::chrono::seconds(17);
  } else if constexpr (std::is_same_v<Value, std::vector<int>>) {
    value = {3, 7};
  } else if constexpr (std::is_same_v<Value, lockstep::Devices>) {
    value = cpus(3);
  } else if constexpr (std::is_same_v<Value, lockstep::BalanceRule>) {
    value = std::vector<double>{2, 1};
  } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
    value = 0.7;
  } else {
    value = lockstep::ModelSplit{.mesh = {.pipeline = 3}};
  }
}

// The fields of TrainOptions, with those of its groups in the groups' place.
template <class... Groups>
constexpr int options_in_groups() {
  return fields_of<TrainOptions>() + (... + (fields_of<Groups>() - 1));
}

TEST(OptionTable, HasEveryOptionOnce) {
  TrainOptions options;
  std::set<const void*> fields;
  std::set<std::string> keys, not_kept;
  lockstep::FlatOptions flat;
  lockstep::each_option(options, flat, [&](const lockstep::Option& option, auto& value) {
    EXPECT_TRUE(fields.insert(&value).second) << option.key;
    EXPECT_TRUE(keys.insert(option.key).second) << option.key;
    if (!option.more.kept) not_kept.insert(option.key);
  });
  // FlatOptions stands for TrainOptions::way and data, for keep.checkpoints and batch.grain.
  constexpr int options_there_are =
      options_in_groups<lockstep::ModelOptions, lockstep::BatchSettings, lockstep::OptimizerOptions,
                        lockstep::RateOptions, lockstep::LocalSgdOptions, lockstep::KeepOptions,
                        lockstep::FlatOptions>() -
      3;
  EXPECT_EQ(static_cast<int>(fields.size()), options_there_are);
  EXPECT_THAT(not_kept, testing::ElementsAre("resume", "silence", "timeout", "trace"));
}

// The options that are kept, as texts.
std::map<std::string, std::string> texts_of(const TrainOptions& options) {
  std::map<std::string, std::string> texts;
  lockstep::each_option(options, [&](const lockstep::Option& option, const auto& value) {
    if (option.more.kept) texts[option.key] = lockstep::option_text(value);
  });
  return texts;
}

TEST(OptionTable, EachOptionComesBackFromJsonAndFromItsTextAndDiffers) {
  const std::map<std::string, std::string> defaults = texts_of({});
  std::vector<std::string> keys;
  for (const auto& [key, text] : defaults) keys.push_back(key);
  for (const std::string& key : keys) {
    SCOPED_TRACE(key);
    TrainOptions changed;
    changed.model.name = "mlp";  // the other options of the network say nothing of one that is not lockstep's
    lockstep::FlatOptions flat;
    if (key == "compress_rank") flat.compress = lockstep::Compression::powersgd;
    if (key == "check_arithmetic") flat.grain = 7;
    if (key.starts_with("outer_")) flat.local.sync_every = 2;
    lockstep::each_option(changed, flat, [&](const lockstep::Option& option, auto& value) {
      if (option.key != key) return;
      change(value);
      if (key == "split") return;
      std::decay_t<decltype(value)> read{};
      lockstep::take_text(lockstep::option_text(value), read);
      EXPECT_EQ(read, value);
    });
    if (key == "model") changed.model.name = "resnet18";
    take_flat(flat, changed);
    const auto texts = texts_of(changed);
    EXPECT_NE(texts.at(key), defaults.at(key));
    EXPECT_EQ(texts_of(lockstep::train_options_from_json(to_json(changed))), texts);
  }
}

TEST(OptionTable, NamesTheDefaultRankOfPowerSgd) {
  const TrainOptions defaults;
  lockstep::each_option(defaults, [](const lockstep::Option& option, const auto&) {
    if (std::string(option.key) != "compress_rank") return;
    EXPECT_EQ(option.more.otherwise, std::to_string(lockstep::PowerSgdOptions().rank));
  });
}

TEST(TrainOptionsJson, NamesWhatIsWrongWithASplit) {
  TrainOptions options;
  options.way = lockstep::SplitNetwork{{.mesh = {.data = 2}}};
  const auto config = nlohmann::json::parse(to_json(options));
  const auto text = [&](auto change) {
    auto changed = config;
    change(changed["way"]["split"]);
    return error_of([&] { lockstep::train_options_from_json(changed.dump(), cpus(2)); });
  };
  EXPECT_THAT(text([](auto& split) { split = 3; }), Refused("way.split"));
  EXPECT_THAT(text([](auto& split) { split.erase("cuts"); }), Refused("way.split.cuts"));
  EXPECT_THAT(text([](auto& split) { split["colour"] = 1; }), Refused("way.split.colour"));
  EXPECT_THAT(text([](auto& split) { split["mesh"]["data"] = 0; }), Refused("way.split.mesh.data"));
  EXPECT_THAT(text([](auto& split) { split["microbatches"] = 1.5; }), Refused("way.split.microbatches"));
  EXPECT_THAT(text([](auto& split) { split["schedule"] = "fastest"; }), Refused("way.split.schedule"));
  EXPECT_THAT(text([](auto& split) { split["tensor_rule"] = "rows"; }), Refused("way.split.tensor_rule"));
}

TEST(TrainOptionsJson, NamesWhatIsWrong) {
  const auto text = [](const std::string& json) { return error_of([&] { lockstep::train_options_from_json(json); }); };
  EXPECT_THAT(text("{"), Refused());
  EXPECT_THAT(text("[1]"), Refused());
  EXPECT_THAT(text(R"({"lr": "fast"})"), Refused("lr"));
  EXPECT_THAT(text(R"({"learning_rate": 1})"), Refused("learning_rate"));
  EXPECT_THAT(text(R"({"devices": "tpu"})"), Refused("devices"));
  for (const char* key : {"data", "optimizer", "precision", "memory_format", "compress", "on_nan", "balance"})
    EXPECT_THAT(text(nlohmann::json{{key, "some"}}.dump()), Refused(key));
  for (const char* balance : {"", "1,", "1;2", ",1"}) {
    EXPECT_THAT(text(nlohmann::json{{"balance", balance}}.dump()), Refused("balance"));
  }
  EXPECT_EQ(lockstep::train_options_from_json("{}").batch.size, 256);
  EXPECT_FALSE(lockstep::train_options_from_json(R"({"keep_last": 0})").keep.checkpoints);
}

TEST(TrainOptionsJson, RefusesValuesThatWouldBeChanged) {
  for (const auto& [json, key] :
       std::vector<std::pair<std::string, std::string>>{{R"({"epochs": 2.7})", "epochs"},
                                                        {R"({"epochs": 1e99})", "epochs"},
                                                        {R"({"epochs": 2147483648})", "epochs"},
                                                        {R"({"epochs": true})", "epochs"},
                                                        {R"({"threads_per_rank": -99999999999})", "threads_per_rank"},
                                                        {R"({"batch_size": 32.9})", "batch_size"},
                                                        {R"({"batch_size": 9223372036854775808})", "batch_size"},
                                                        {R"({"seed": -1})", "seed"},
                                                        {R"({"seed": 18446744073709551616})", "seed"},
                                                        {R"({"lr": true})", "lr"},
                                                        {R"({"width": "2"})", "width"},
                                                        {R"({"image_size": 96.5})", "image_size"},
                                                        {R"({"cuda_graph": 1})", "cuda_graph"},
                                                        {R"({"cuda_graph": "yes"})", "cuda_graph"},
                                                        {R"({"precision": 16})", "precision"},
                                                        {R"({"data_dir": 5})", "data_dir"}}) {
    EXPECT_THAT(error_of([&, &text = json] { lockstep::train_options_from_json(text); }), Refused(key)) << json;
  }
  EXPECT_EQ(lockstep::train_options_from_json(R"({"lr": 1})").rate.lr, 1);
  EXPECT_EQ(lockstep::train_options_from_json(R"({"seed": 18446744073709551615})").seed, 18446744073709551615u);
}

TEST(TrainOptionsJson, DoesNotAskForDevicesThatAreReplaced) {
  for (const char* json : {R"({"devices": "cuda:77"})", R"({"devices": "cuda"})"}) {
    EXPECT_EQ(lockstep::train_options_from_json(json, cpus(2)).devices, cpus(2));
  }
  EXPECT_THAT(error_of([] { lockstep::train_options_from_json(R"({"devices": "cuda:77"})"); }), Refused("devices"));
}

}  // namespace train_options_test
