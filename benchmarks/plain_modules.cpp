// Times a step of nets of LibTorch's own modules: an MLP, LeNet, a small VGG with BatchNorm, a ResNet-18 of width 0.5,
// an LSTM that tags words, and a GPT whose attention is made of Linears. Each is trained by LibTorch alone on two
// intra-op threads, and by DataParallel on two CPU ranks of one thread: as it is, with FastKernels, after fuse_layers()
// where it is a Sequential, and lockstep's own net of that kind. All take turns; the best counts. benchmarks/README.md
// has the command that builds it, and peers/plain_modules.py is the same under PyTorch's DDP.
#include <lockstep/lockstep.hpp>
#include <lockstep/models.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

namespace nn = torch::nn;
using Clock = std::chrono::steady_clock;
using torch::Tensor;

// ---- Plain nets ----------------------------------------------------------------------------------------------------

nn::Sequential plain_mlp() {
  nn::Sequential net{nn::Flatten()};
  for (int i = 0; i < 6; ++i) {
    net->push_back(nn::Linear(i == 0 ? 784 : 512, 512));
    net->push_back(nn::ReLU());
  }
  net->push_back(nn::Linear(512, 10));
  return net;
}

nn::Conv2d conv(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

nn::Sequential plain_lenet() {
  return nn::Sequential(nn::Conv2d(1, 20, 3), nn::ReLU(), nn::AvgPool2d(2), nn::Conv2d(20, 50, 5), nn::ReLU(),
                        nn::AvgPool2d(2), nn::Flatten(), nn::Linear(800, 128), nn::ReLU(), nn::Linear(128, 10));
}

nn::Sequential plain_vgg() {  // convolutions with biases, as in most people's
  nn::Sequential net;
  int64_t in = 1;
  for (const int64_t out : {32, 64, 128}) {
    for (const int64_t from : {in, out}) {
      net->push_back(nn::Conv2d(nn::Conv2dOptions(from, out, 3).padding(1)));
      net->push_back(nn::BatchNorm2d(out));
      net->push_back(nn::ReLU());
    }
    net->push_back(nn::MaxPool2d(2));
    in = out;
  }
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(128 * 3 * 3, 10));
  return net;
}

struct BlockImpl : nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride)
      : conv1(register_module("conv1", conv(in, out, 3, stride))),
        conv2(register_module("conv2", conv(out, out, 3, 1))),
        norm1(register_module("norm1", nn::BatchNorm2d(out))),
        norm2(register_module("norm2", nn::BatchNorm2d(out))) {
    if (stride == 1 && in == out) return;
    shortcut = register_module("shortcut", nn::Sequential(conv(in, out, 1, stride), nn::BatchNorm2d(out)));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = norm2(conv2(norm1(conv1(x)).relu_()));
    return (y + (shortcut ? shortcut->forward(x) : x)).relu_();
  }
  nn::Conv2d conv1, conv2;
  nn::BatchNorm2d norm1, norm2;
  nn::Sequential shortcut{nullptr};
};
TORCH_MODULE(Block);

nn::Sequential plain_resnet() {
  int64_t in = 32;
  nn::Sequential net(conv(1, in, 3, 1), nn::BatchNorm2d(in), nn::ReLU());
  for (const int64_t out : {32, 64, 128, 256}) {
    net->push_back(Block(in, out, out == 32 ? 1 : 2));
    net->push_back(Block(out, out, 1));
    in = out;
  }
  net->push_back(nn::AdaptiveAvgPool2d(1));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(in, 10));
  return net;
}

struct TaggerImpl : nn::Module {
  Tensor forward(const Tensor& words) { return tags(std::get<0>(lstm(embedding(words)))); }
  nn::Embedding embedding = register_module("embedding", nn::Embedding(1000, 128));
  nn::LSTM lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(128, 256).num_layers(2).batch_first(true)));
  nn::Linear tags = register_module("tags", nn::Linear(256, 20));
};
TORCH_MODULE(Tagger);

Tensor attention(const Tensor& qkv) {
  auto parts = qkv.chunk(3, /*dim=*/-1);
  for (auto& part : parts) part = part.unflatten(-1, {4, -1}).transpose(1, 2);
  const Tensor all = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
  return all.transpose(1, 2).flatten(2);
}

struct DecoderImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor y = x + projection(attention(qkv(norm1(x))));
    return y + down(torch::gelu(up(norm2(y))));
  }
  nn::LayerNorm norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({128})));
  nn::LayerNorm norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({128})));
  nn::Linear qkv = register_module("qkv", nn::Linear(128, 384)),
             projection = register_module("projection", nn::Linear(128, 128)),
             up = register_module("up", nn::Linear(128, 512)), down = register_module("down", nn::Linear(512, 128));
};
TORCH_MODULE(Decoder);

struct PlainGptImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    return torch::linear(norm(blocks->forward(tokens(x) + positions->weight)), tokens->weight);
  }
  nn::Embedding tokens = register_module("tokens", nn::Embedding(256, 128)),
                positions = register_module("positions", nn::Embedding(128, 128));
  nn::Sequential blocks = register_module("blocks", nn::Sequential(Decoder(), Decoder(), Decoder(), Decoder()));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({128})));
};
TORCH_MODULE(PlainGpt);

// ---- Steps ---------------------------------------------------------------------------------------------------------

struct Task {
  Tensor x, y;
  int steps;  // of a turn
};

Tensor cross_entropy(const Tensor& logits, const Tensor& y) {
  return nn::functional::cross_entropy(logits.flatten(0, -2), y.flatten());
}

// Milliseconds per step. backward() computes the gradients of a batch.
double time_of_steps(const std::vector<Tensor>& parameters, int steps, const auto& backward) {
  torch::optim::SGD sgd(parameters, /*lr=*/0.01);
  auto start = Clock::now();
  for (int i = -3; i < steps; ++i) {  // the first three warm up
    if (i == 0) start = Clock::now();
    sgd.zero_grad();
    backward();
    sgd.step();
  }
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / steps;
}

double alone(const auto& make, const Task& task) {
  auto net = make();
  return time_of_steps(net->parameters(), task.steps, [&] { cross_entropy(net->forward(task.x), task.y).backward(); });
}

double data_parallel(const auto& make, const Task& task, bool fast) {
  double time = 0;
  lockstep::run(lockstep::parse_devices("2xcpu"), [&](lockstep::Rank& rank) {
    const lockstep::FastKernels kernels(fast);
    lockstep::DataParallel net(make(), rank);
    const lockstep::Batch part{task.x.chunk(2)[rank.index()], task.y.chunk(2)[rank.index()], task.x.size(0)};
    const double its = time_of_steps(net->parameters(), task.steps, [&] { net.loss(part, cross_entropy).backward(); });
    if (rank.index() == 0) time = its;
  });
  return time;
}

struct Way {
  std::string name;
  std::function<double()> time;
};

void take_turns(const std::string& net, const std::vector<Way>& ways, int rounds) {
  std::map<std::string, double> best;
  for (int round = 0; round < rounds; ++round) {
    for (const Way& way : ways) {
      const double time = way.time();
      best[way.name] = best.contains(way.name) ? std::min(best[way.name], time) : time;
    }
  }
  for (const Way& way : ways) std::printf("%s, %s: %.2f ms\n", net.c_str(), way.name.c_str(), best[way.name]);
}

void compare(const std::string& name, const auto& make, const auto& own, const Task& task, int rounds) {
  std::vector<Way> ways = {{"LibTorch alone", [&] { return alone(make, task); }},
                           {"DataParallel", [&] { return data_parallel(make, task, false); }},
                           {"DataParallel, FastKernels", [&] { return data_parallel(make, task, true); }}};
  const auto fused = [&] {
    auto net = make();
    lockstep::fuse_layers(*net);
    return net;
  };
  if (std::is_same_v<decltype(make()), nn::Sequential>) {
    ways.push_back({"DataParallel, fuse_layers", [&] { return data_parallel(fused, task, false); }});
  }
  if constexpr (!std::is_null_pointer_v<std::decay_t<decltype(own)>>) {
    ways.push_back({"lockstep's own net", [&] { return data_parallel(own, task, false); }});
  }
  take_turns(name, ways, rounds);
}

int main(int argc, char** argv) {
  lockstep::keep_freed_memory();
  at::globalContext().setFlushDenormal(true);
  at::set_num_threads(2);
  const std::string chosen = argc > 1 ? argv[1] : "";
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 5;
  const auto is_wanted = [&](const char* name) { return chosen.empty() || chosen == name; };
  const auto images = [](int64_t n, int steps) {
    return Task{torch::rand({n, 1, 28, 28}), torch::randint(10, {n}, torch::kLong), steps};
  };
  const auto texts = [](int64_t n, int64_t length, int64_t words, int64_t classes, int steps) {
    return Task{torch::randint(words, {n, length}, torch::kLong), torch::randint(classes, {n, length}, torch::kLong),
                steps};
  };
  const auto channels_last = [](const auto& make) {
    return [make] {
      auto net = make();
      lockstep::set_memory_format(*net, torch::MemoryFormat::ChannelsLast);
      return net;
    };
  };
  if (is_wanted("mlp"))
    compare(
        "MLP", plain_mlp, [] { return lockstep::Mlp(lockstep::MlpOptions()); }, images(256, 40), rounds);
  if (is_wanted("lenet")) {
    compare(
        "LeNet", plain_lenet, [] { return lockstep::LeNet(); }, images(256, 20), rounds);
  }
  if (is_wanted("vgg")) compare("VGG, channels-last", channels_last(plain_vgg), nullptr, images(64, 5), rounds);
  if (is_wanted("resnet18")) compare("ResNet-18", plain_resnet, nullptr, images(64, 4), rounds);
  if (is_wanted("resnet18-last")) {
    const auto own = [] { return lockstep::ResNet18(lockstep::ResNet18Options{.width = 0.5}); };
    compare("ResNet-18, channels-last", channels_last(plain_resnet), channels_last(own), images(64, 4), rounds);
  }
  if (is_wanted("lstm"))
    compare(
        "LSTM", [] { return Tagger(); }, nullptr, texts(64, 50, 1000, 20, 10), rounds);
  if (is_wanted("gpt")) {
    compare(
        "GPT", [] { return PlainGpt(); }, [] { return lockstep::Gpt(lockstep::GptOptions()); },
        texts(16, 128, 256, 256, 10), rounds);
  }
}
