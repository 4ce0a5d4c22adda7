// Labels: processes
// The same networks, trained by lockstep's ranks in C++ and by Python's PyTorch on whole batches, from the same start.
// In float64 they must end alike. Skips itself where python3 has no torch.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/convert_sync_batchnorm.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/data_parallel/sync_batch_norm.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>

#include "cli/program.hpp"
#include "comm/processes/running_job.hpp"
#include "support/scratch_folder.hpp"

#include <cstdlib>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace python_pytorch_test {

using namespace lockstep;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

// ---- The networks, with the names that they have in python_pytorch.py.

struct Gpt : nn::Module {
  Gpt() {
    words = register_module("words", nn::Embedding(13, 8));
    places = register_module("places", nn::Embedding(6, 8));
    const auto layer = nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(32).dropout(0).activation(torch::kGELU);
    blocks = register_module("blocks", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 2)));
    to(torch::kDouble);
  }

  Tensor forward(const Tensor& tokens) {
    const Tensor x = words(tokens) + places(torch::arange(tokens.size(1)));
    const Tensor mask =
        torch::full({tokens.size(1), tokens.size(1)}, -std::numeric_limits<double>::infinity(), torch::kDouble).triu(1);
    return F::linear(blocks(x.transpose(0, 1), mask).transpose(0, 1), words->weight);
  }

  nn::Embedding words{nullptr}, places{nullptr};
  nn::TransformerEncoder blocks{nullptr};
};

std::shared_ptr<nn::SequentialImpl> make_cnn() {
  auto net = std::make_shared<nn::SequentialImpl>(nn::Conv2d(nn::Conv2dOptions(1, 4, 3).bias(false)),
                                                  nn::BatchNorm2d(4), nn::ReLU(), nn::Flatten(), nn::Linear(64, 6),
                                                  nn::BatchNorm1d(6), nn::Tanh(), nn::Linear(6, 3));
  net->to(torch::kDouble);
  return net;
}

// ---- What both have in common.

void add(Dataset::Tensors& tensors, const std::string& prefix, const nn::Module& net) {
  for (const auto& item : net.named_parameters()) tensors[prefix + item.key()] = item.value().detach().clone();
  for (const auto& item : net.named_buffers()) tensors[prefix + item.key()] = item.value().clone();
}

class PythonPytorch : public testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(5); }

  // `train` trains the net on the rank's parts of the batches, and then calls its last argument.
  template <class Make>
  void expect_same(const std::string& program, int ranks, const Make& make, const Dataset& data,
                   const BatchOptions& options,
                   const std::function<void(decltype(make()), Rank&, const std::function<void()>& trained)>& train) {
    Dataset::Tensors tensors;
    int64_t step = 0;
    for (auto& batch : batches(data, options)) {
      tensors["x/" + std::to_string(step)] = batch.x.clone();
      tensors["y/" + std::to_string(step++)] = batch.y.clone();
    }
    const auto start = make();
    add(tensors, "start/", *start);
    save_weights(folder_ / "start", *start);
    run(Devices(ranks, c10::kCPU), [&](Rank& rank) {
      const auto net = rank.in_turn(make);
      load_weights(folder_ / "start", *net);
      train(net, rank, [&] {
        if (rank.index() == 0) add(tensors, "end/", *net);
      });
    });
    save_tensors(folder_ / "tensors", tensors);
    const auto compared = python({std::getenv("LOCKSTEP_PYTHON_SCRIPT"), program, (folder_ / "tensors").string()});
    if (compared.code == 77) GTEST_SKIP() << "python3 has no torch: " << compared.out;
    EXPECT_EQ(compared.code, 0) << compared.out << compared.err;
    std::cout << compared.out;
  }

 private:
  static Finished python(const std::vector<std::string>& arguments) {
    auto surroundings = surroundings_with();
    if (const char* const modules = std::getenv("PYTHONPATH")) {
      surroundings.environment.push_back(std::string("PYTHONPATH=") + modules);
    }
    surroundings.program = "/usr/bin/python3";
    return run_program(arguments, surroundings);
  }

  const ScratchFolder folder_;
};

// Tied weights, groups of parameters, clipping; with ZeRO, so that each rank updates a slice.
TEST_F(PythonPytorch, AGptUnderZeRO) {
  const Tensor tokens = torch::randint(13, {120, 7});
  const Dataset data = {tokens.narrow(1, 0, 6), tokens.narrow(1, 1, 6)};
  const BatchOptions options = {.size = 50};
  for (const int stage : {1, 2, 3}) {
    const auto train = [&](const std::shared_ptr<Gpt>& module, Rank& rank, const std::function<void()>& trained) {
      DataParallel net(module, rank, {.sharded = static_cast<Sharded>(stage)});
      using torch::optim::AdamWOptions;
      Optimizer adamw(net, AdamWOptions(0.01), [](const nn::Module& of) {
        std::vector<Tensor> matrices, others;
        for (const auto& parameter : of.parameters()) (parameter.dim() > 1 ? matrices : others).push_back(parameter);
        Optimizer::Groups groups{torch::optim::OptimizerParamGroup(matrices),
                                 torch::optim::OptimizerParamGroup(others)};
        groups[0].set_options(std::make_unique<AdamWOptions>(AdamWOptions(0.01).weight_decay(0.1)));
        groups[1].set_options(std::make_unique<AdamWOptions>(AdamWOptions(0.02).weight_decay(0)));
        return groups;
      });
      for (auto& batch : batches(data, options, rank)) {
        adamw.zero_grad();
        net.loss(batch, [](const Tensor& y_hat,
                           const Tensor& y) { return F::cross_entropy(y_hat.flatten(0, 1), y.flatten()); })
            .backward();
        adamw.step({.clip = 0.5});
      }
      const auto whole = net.whole();
      trained();
    };
    expect_same(
        "gpt", 3, [] { return std::make_shared<Gpt>(); }, data, options, train);
  }
}

// BatchNorm over the whole batch; a last batch with fewer samples than there are ranks.
TEST_F(PythonPytorch, ACnnWithSyncBatchNorm) {
  const Dataset data = {torch::randn({38, 1, 6, 6}, torch::kDouble), torch::randint(3, {38})};
  const BatchOptions options = {.size = 9};
  const auto train = [&](const std::shared_ptr<nn::SequentialImpl>& module, Rank& rank,
                         const std::function<void()>& trained) {
    convert_sync_batchnorm(*module, rank);
    DataParallel net(module, rank);
    torch::optim::SGD sgd(net->parameters(),
                          torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01).nesterov(true));
    for (auto& batch : batches(data, options, rank)) {
      sgd.zero_grad();
      net.loss(batch, F::cross_entropy).backward();
      sgd.step();
    }
    trained();
  };
  expect_same("cnn", 3, make_cnn, data, options, train);
}

}  // namespace python_pytorch_test
