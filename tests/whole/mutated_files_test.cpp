// Labels: thorough
// Files that were damaged at random: each is refused with an Error, or means what the whole one means. Seeds are fixed.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/base/error.hpp>
#include <lockstep/nn/weights.hpp>
#include <lockstep/plan/cluster.hpp>
#include <lockstep/plan/plan.hpp>
#include <lockstep/trainer/trainer.hpp>

#include <array>
#include <functional>
#include <random>
#include <string>
#include <string_view>

#include "io/idx.hpp"
#include "support/idx_files.hpp"
#include "support/scratch_folder.hpp"
#include "support/time_limits.hpp"
#include "trainer/run_state.hpp"

namespace mutated_files_test {

using lockstep::Error;
using lockstep::RunState;
using lockstep::ScratchFolder;

// Does to a file what disks, editors and hostile hands do, at one place.
class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  std::string operator()(std::string bytes) {
    const size_t at = below(bytes.size());
    const size_t length = 1 + below(std::min<size_t>(bytes.size() - at, below(4) == 0 ? 1000 : 8));
    switch (below(7)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        for (size_t i = 0; i < length; ++i) bytes[at + i] = static_cast<char>(below(256));
        break;
      case 2:
        bytes.erase(at, length);
        break;
      case 3:
        bytes.insert(at, bytes.substr(below(bytes.size()), length));
        break;
      case 4:
        bytes.resize(at);
        break;
      case 5:
        bytes.replace(at, length, values_[below(values_.size())]);
        break;
      default:
        replace_number(bytes, at);
    }
    return bytes;
  }

 private:
  size_t below(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }

  // The first number in text behind `at` becomes another.
  void replace_number(std::string& bytes, size_t at) {
    constexpr const char* digits = "0123456789";
    const size_t begin = bytes.find_first_of(digits, at);
    if (begin == bytes.npos) return;
    const size_t end = std::min(bytes.find_first_not_of(digits, begin), bytes.size());
    bytes.replace(begin, end - begin, values_[below(values_.size())]);
  }

  static constexpr std::array<std::string_view, 9> values_ = {
      "0", "-1", "18446744073709551616", "9223372036854775807", "1e308", "null", "{}", "[[[[", "\""};
  std::mt19937 random_;
};

// Calls `read` with each of `count` damaged forms. Whatever it throws but Error fails the test.
void expect_refused_or_read(const std::string& bytes, int count, const std::function<void(const std::string&)>& read) {
  int refused = 0;
  for (int seed = 0; seed < count; ++seed) {
    const std::string damaged = Mutator(static_cast<uint32_t>(seed))(bytes);
    try {
      read(damaged);
    } catch (const Error&) {
      ++refused;
    } catch (const std::exception& other) {
      ADD_FAILURE() << "seed " << seed << ": not an Error: " << other.what();
    }
  }
  EXPECT_GT(refused, count / 4);
}

// A small one, of which each bit can be flipped in a second.
RunState checkpoint() {
  RunState state{.epochs = 1, .steps = 7, .seconds = 0.25, .history = {}, .config = R"({"lr": 0.5})", .tensors = {}};
  state.history.push_back({.epoch = 1, .train_loss = 0.5});
  state.tensors.emplace_back("model.weight", torch::arange(16, torch::kDouble).view({4, 4}));
  state.tensors.emplace_back("optimizer.step.weight", torch::tensor(int64_t{7}));
  return state;
}

class MutatedCheckpoint : public testing::Test {
 protected:
  MutatedCheckpoint() { write_run_state(folder_ / "whole", whole_); }

  // Throws Error, or the file means what the whole one means.
  void read(const std::string& bytes) const {
    folder_.write("damaged", bytes);
    const RunState read = lockstep::read_run_state(folder_ / "damaged");
    EXPECT_EQ(manifest_of(read), manifest_of(whole_));
    ASSERT_EQ(read.tensors.size(), whole_.tensors.size());
    for (const auto& [name, tensor] : read.tensors) {  // in the file's order
      EXPECT_TRUE(tensor.equal(name == "model.weight" ? whole_.tensors[0].second : whole_.tensors[1].second)) << name;
    }
  }

  const ScratchFolder folder_;
  const RunState whole_ = checkpoint();
};

TEST_F(MutatedCheckpoint, IsRefusedOrWhole) {
  expect_refused_or_read(folder_.read("whole"), 4000, [&](const std::string& bytes) { read(bytes); });
}

TEST_F(MutatedCheckpoint, IsRefusedWhereverItIsCut) {
  const std::string bytes = folder_.read("whole");
  for (size_t length = 0; length < bytes.size(); length += lockstep::kSlowdown) {
    EXPECT_THROW(read(bytes.substr(0, length)), Error) << "of " << length << " bytes";
  }
  EXPECT_NO_THROW(read(bytes));
}

TEST_F(MutatedCheckpoint, IsRefusedWhicheverBitFlips) {
  const std::string bytes = folder_.read("whole");
  for (size_t bit = 0; bit < 8 * bytes.size(); bit += lockstep::kSlowdown) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    EXPECT_THROW(read(damaged), Error) << "bit " << bit % 8 << " of byte " << bit / 8;
  }
}

TEST(MutatedFiles, WeightsAreRefusedOrWhole) {
  const ScratchFolder folder;
  torch::nn::Linear net(8, 8), read(8, 8);
  lockstep::save_weights(folder / "whole", *net);
  expect_refused_or_read(folder.read("whole"), 4000, [&](const std::string& bytes) {
    folder.write("damaged", bytes);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : read->parameters()) parameter.zero_();
    }
    try {
      lockstep::load_weights(folder / "damaged", *read);
    } catch (const Error&) {
      for (const auto& parameter : read->parameters()) EXPECT_EQ(parameter.count_nonzero().item<int64_t>(), 0);
      throw;
    }
    EXPECT_TRUE(read->weight.equal(net->weight));
    EXPECT_TRUE(read->bias.equal(net->bias));
  });
}

TEST(MutatedFiles, ImagesAreRefusedOrOfTheSizeThatTheyTell) {
  const ScratchFolder folder;
  std::string values;
  for (int i = 0; i < 4 * 28 * 28; ++i) values += static_cast<char>(i * 7);
  const std::string plain = lockstep::idx_bytes({4, 28, 28}, values);
  const auto read = [&](const std::string& bytes) {
    folder.write("damaged", bytes);
    const torch::Tensor images = lockstep::io::read_idx(folder / "damaged", 3);
    ASSERT_EQ(images.dim(), 3);
    EXPECT_LE(images.numel(), 64 * 1024);
    images.sum();  // all of it is the tensor's memory
  };
  expect_refused_or_read(plain.substr(0, 60), 500, read);  // mostly the header
  expect_refused_or_read(lockstep::gzipped(plain), 2000, read);
}

TEST(MutatedFiles, TextsAreRefusedByNameOrRead) {
  lockstep::Plan plan{.model = "mlp", .options = "width 0.5", .layers = {"0: weight [4, 4]"}, .batch_size = 64};
  plan.split.mesh = {.data = 2, .pipeline = 2, .tensor = 1};
  plan.split.cuts = {3};
  expect_refused_or_read(to_json(plan), 3000, [](const std::string& text) { lockstep::plan_from_json(text); });

  lockstep::TrainOptions options;
  options.devices = {torch::kCPU, torch::kCPU};
  expect_refused_or_read(lockstep::to_json(options), 3000,
                         [](const std::string& text) { lockstep::train_options_from_json(text); });
}

}  // namespace mutated_files_test
