// A program's global locale changes no digest, no file, and no text that ranks compare.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/data/data.hpp>
#include <lockstep/data_parallel/data_parallel.hpp>
#include <lockstep/data_parallel/optimizer.hpp>
#include <lockstep/nn/tensor_files.hpp>
#include <lockstep/nn/weights.hpp>

#include "base/number_text.hpp"
#include "base/seconds.hpp"
#include "data/data_digests.hpp"
#include "support/error_of.hpp"
#include "support/scratch_folder.hpp"
#include "support/test_devices.hpp"

#include <chrono>
#include <locale>
#include <memory>
#include <string>
#include <thread>

namespace locale_test {

using namespace lockstep;
namespace nn = torch::nn;

// While it lives, the global locale writes 1234.5 as "1 234,5", and reads "1 234,5" as one number.
class Grouping {
 public:
  Grouping() : before_(std::locale::global(std::locale(std::locale::classic(), new Numbers))) {}
  ~Grouping() { std::locale::global(before_); }
  Grouping(const Grouping&) = delete;
  Grouping& operator=(const Grouping&) = delete;

 private:
  struct Numbers : std::numpunct<char> {
    char do_thousands_sep() const override { return ' '; }
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
  };
  std::locale before_;
};

nn::Linear wide() {
  torch::manual_seed(1);
  return nn::Linear(4096, 10);
}

TEST(Locale, ChangesNoDigestAndNoFile) {
  const ScratchFolder folder;
  const Samples samples = Dataset{torch::ones({2000, 3}), torch::zeros({2000})};
  const nn::Linear net = wide();
  nn::Linear other(4096, 10);
  const std::string hash = weights_hash(*net);
  const DataDigests digests = digests_of(samples, samples);
  save_weights(folder / "classic", *net);
  {
    const Grouping locale;
    EXPECT_EQ(weights_hash(*net), hash);
    EXPECT_EQ(digests_of(samples, samples), digests);
    EXPECT_NO_THROW(load_weights(folder / "classic", *other));
    EXPECT_EQ(weights_hash(*other), hash);
    save_weights(folder / "grouped", *net);
  }
  EXPECT_EQ(folder.read("grouped"), folder.read("classic"));
}

TEST(Locale, ChangesNoText) {
  const ScratchFolder folder;
  save_weights(folder / "file", *wide());
  const Grouping locale;
  EXPECT_EQ(bytes_text(1234.5e6), "1.23 GB");
  EXPECT_EQ(comm::seconds(std::chrono::milliseconds(1234500)), "1234.5 s");
  EXPECT_THAT(error_of([&] { load_weights(folder / "file", *nn::Linear(4097, 10)); }), Fails(Error::file));
}

// The last rank's texts are made when the first has made its own.
TEST(Locale, OfSomeRanksDividesThemNot) {
  const ScratchFolder folder;
  std::unique_ptr<Grouping> locale;
  run(test_devices(2), [&](Rank& rank) {
    const nn::Linear module = rank.in_turn([] { return wide(); });
    if (rank.index() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      locale = std::make_unique<Grouping>();
    }
    DataParallel net(module, rank, {.sharded = Sharded::state});
    Optimizer adam(net, torch::optim::AdamOptions(1234.5));
    net.loss({torch::ones({1, 4096}), torch::zeros({1, 10}), 2}, nn::functional::mse_loss).backward();
    adam.step();                                  // ranks compare their options as text
    EXPECT_NO_THROW(adam.save(folder / "adam"));  // and tell each other the state's numbers so
  });
}

}  // namespace locale_test
