// TrainOptions as JSON: they come back as they were, and what is wrong is refused by name.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/lab/power_sgd.hpp>
#include <lockstep/trainer/trainer.hpp>
#include <nlohmann/json.hpp>

#include "support/error_of.hpp"
#include "trainer/option_table.hpp"
#include "trainer/option_text.hpp"
#include "trainer/train_options.hpp"

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
using lockstep::TrainOptions;
using testing::AllOf;
using testing::HasSubstr;

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
  options.data.source = lockstep::DataSource::synthetic;
  options.data.folder = "/some where/\"quoted\"";
  options.devices = cpus(3);
  options.threads_per_rank = 2;
  options.batch.size = 77;
  options.rate.lr = 0.1;
  options.epochs = 4;
  options.seed = 18446744073709551615u;
  options.on_nan = lockstep::OnNan::skip;
  options.check_replicas = 50;
  options.check_arithmetic = 0.25;
  options.precision = lockstep::Precision::bf16;
  options.memory_format = lockstep::MemoryFormat::channels_last;
  options.sync_batchnorm = true;
  options.cuda_graph = true;
  options.split = {.mesh = {.data = 1, .pipeline = 3},
                   .schedule = lockstep::PipelineSchedule::interleaved,
                   .stages_per_rank = 2,
                   .microbatches = 4,
                   .recompute = true,
                   .cuts = {1, 2, 3, 5, 8},
                   .tensor_rule = lockstep::TensorRule::alternating};
  options.keep.last = 5;
  options.keep.every = 100;
  options.keep.tensorboard = true;
  options.keep.run_dir = "runs/x";
  const auto back = lockstep::train_options_from_json(to_json(options));
  EXPECT_EQ(to_json(back), to_json(options));
  EXPECT_EQ(back.model.name, options.model.name);
  EXPECT_EQ(back.model.width, options.model.width);
  EXPECT_EQ(back.model.image_size, options.model.image_size);
  EXPECT_EQ(back.model.groups, options.model.groups);
  EXPECT_EQ(back.model.dropout, options.model.dropout);
  EXPECT_EQ(back.on_nan, options.on_nan);
  EXPECT_EQ(back.check_replicas, options.check_replicas);
  EXPECT_EQ(back.check_arithmetic, options.check_arithmetic);
  EXPECT_EQ(back.seed, options.seed);
  EXPECT_EQ(back.rate.lr, options.rate.lr);
  EXPECT_EQ(back.precision, options.precision);
  EXPECT_EQ(back.memory_format, options.memory_format);
  EXPECT_EQ(back.sync_batchnorm, options.sync_batchnorm);
  EXPECT_EQ(back.cuda_graph, options.cuda_graph);
  EXPECT_EQ(back.devices, options.devices);
  EXPECT_EQ(back.split, options.split);
  EXPECT_EQ(lockstep::train_options_from_json("{}").split, std::nullopt);
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
  TrainOptions options;  // what a run keeps says what it was
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
  lockstep::each_option(options, [&](const lockstep::Option& option, auto& value) {
    EXPECT_TRUE(fields.insert(&value).second) << option.key;
    EXPECT_TRUE(keys.insert(option.key).second) << option.key;
    if (!option.more.kept) not_kept.insert(option.key);
  });
  constexpr int options_there_are =
      options_in_groups<lockstep::ModelOptions, lockstep::DataOptions, lockstep::BatchSettings,
                        lockstep::OptimizerOptions, lockstep::RateOptions, lockstep::ExchangeOptions,
                        lockstep::KeepOptions>();
  EXPECT_EQ(static_cast<int>(fields.size()), options_there_are);
  EXPECT_THAT(not_kept, testing::ElementsAre("resume", "silence", "timeout", "trace"));
}

TEST(OptionTable, EachOptionComesBackFromJsonAndFromItsTextAndDiffers) {
  const TrainOptions defaults;
  TrainOptions changed;
  lockstep::each_option(changed, [](const lockstep::Option&, auto& value) { change(value); });
  changed.model.name = "mlp";  // the other options of the network say nothing of one that is not lockstep's
  const TrainOptions back = lockstep::train_options_from_json(to_json(changed));
  const auto then = nlohmann::json::parse(to_json(defaults)), now = nlohmann::json::parse(to_json(changed));
  EXPECT_EQ(to_json(back), to_json(changed));
  std::map<std::string, std::string> texts_back, texts;
  lockstep::each_option(back, [&](const lockstep::Option& option, const auto& value) {
    texts_back[option.key] = lockstep::option_text(value);
  });
  lockstep::each_option(changed, [&](const lockstep::Option& option, const auto& value) {
    SCOPED_TRACE(option.key);
    texts[option.key] = lockstep::option_text(value);
    std::decay_t<decltype(value)> read{};
    if (std::string(option.key) == "split") return;
    lockstep::take_text(texts[option.key], read);
    EXPECT_EQ(read, value);
  });
  lockstep::each_option(defaults, [&](const lockstep::Option& option, const auto& value) {
    SCOPED_TRACE(option.key);
    EXPECT_NE(texts[option.key], lockstep::option_text(value));
    EXPECT_EQ(now.contains(option.key), option.more.kept);
    if (!option.more.kept) return;
    EXPECT_EQ(texts_back[option.key], texts[option.key]);
    EXPECT_NE(now.value(option.key, nlohmann::json()), then.value(option.key, nlohmann::json()));
  });
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
  options.split = lockstep::ModelSplit{.mesh = {.data = 2}};
  const auto config = nlohmann::json::parse(to_json(options));
  const auto text = [&](auto change) {
    auto changed = config;
    change(changed["split"]);
    return error_of([&] { lockstep::train_options_from_json(changed.dump(), cpus(2)); });
  };
  EXPECT_THAT(text([](auto& split) { split = 3; }), HasSubstr("\"split\""));
  EXPECT_THAT(text([](auto& split) { split.erase("cuts"); }), HasSubstr("the key \"split.cuts\" is missing"));
  EXPECT_THAT(text([](auto& split) { split["colour"] = 1; }), HasSubstr("unknown key \"split.colour\""));
  EXPECT_THAT(text([](auto& split) { split["mesh"]["data"] = 0; }),
              AllOf(HasSubstr("\"split.mesh.data\""), HasSubstr("at least 1")));
  EXPECT_THAT(text([](auto& split) { split["microbatches"] = 1.5; }), HasSubstr("\"split.microbatches\""));
  EXPECT_THAT(text([](auto& split) { split["schedule"] = "fastest"; }),
              AllOf(HasSubstr("\"split.schedule\""), HasSubstr("1f1b")));
  EXPECT_THAT(text([](auto& split) { split["tensor_rule"] = "rows"; }),
              AllOf(HasSubstr("\"split.tensor_rule\""), HasSubstr("\"rows\""), HasSubstr("channels or alternating")));
}

TEST(TrainOptionsJson, NamesWhatIsWrong) {
  const auto text = [](const std::string& json) { return error_of([&] { lockstep::train_options_from_json(json); }); };
  EXPECT_THAT(text("{"), HasSubstr("not JSON"));
  EXPECT_THAT(text("[1]"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(text(R"({"lr": "fast"})"), AllOf(HasSubstr("\"lr\""), HasSubstr("\"fast\"")));
  EXPECT_THAT(text(R"({"learning_rate": 1})"), HasSubstr("unknown key \"learning_rate\""));
  EXPECT_THAT(text(R"({"devices": "tpu"})"), HasSubstr("tpu"));
  for (const auto& [key, names] :
       std::map<std::string, std::string>{{"data", "fashion-mnist or synthetic"},
                                          {"optimizer", "sgd, adam, adamw, lars or lamb"},
                                          {"precision", "float32, tf32 or bf16"},
                                          {"memory_format", "auto, contiguous or channels-last"},
                                          {"compress", "none, bf16, fp16 or powersgd"},
                                          {"on_nan", "stop, skip or go-on"},
                                          {"balance", "equal, auto, or a share for each device, as in 2,1"}}) {
    EXPECT_THAT(text("{\"" + key + "\": \"some\"}"),
                AllOf(HasSubstr("\"" + key + "\""), HasSubstr("\"some\"; it must be " + names)));
  }
  for (const char* balance : {"", "1,", "1;2", ",1"}) {
    EXPECT_THAT(text(nlohmann::json{{"balance", balance}}.dump()),
                HasSubstr("the balance is \"" + std::string(balance) + "\""));
  }
  EXPECT_EQ(lockstep::train_options_from_json("{}").batch.size, 256);
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
    EXPECT_THAT(error_of([&, &text = json] { lockstep::train_options_from_json(text); }),
                AllOf(HasSubstr("\"" + key + "\""), HasSubstr("it must be")))
        << json;
  }
  EXPECT_EQ(lockstep::train_options_from_json(R"({"lr": 1})").rate.lr, 1);
  EXPECT_EQ(lockstep::train_options_from_json(R"({"seed": 18446744073709551615})").seed, 18446744073709551615u);
}

TEST(TrainOptionsJson, DoesNotAskForDevicesThatAreReplaced) {
  for (const char* json : {R"({"devices": "cuda:77"})", R"({"devices": "cuda"})"}) {
    EXPECT_EQ(lockstep::train_options_from_json(json, cpus(2)).devices, cpus(2));
  }
  EXPECT_THAT(error_of([] { lockstep::train_options_from_json(R"({"devices": "cuda:77"})"); }), HasSubstr("cuda:77"));
}

}  // namespace train_options_test
