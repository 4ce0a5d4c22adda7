// Labels: concurrency
// train()'s timeline. In an executable of its own, because LibTorch's profiler leaves threads behind, with which fork()
// does not go well in other tests.
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <lockstep/trainer/trainer.hpp>
#include <nlohmann/json.hpp>

#include "support/error_of.hpp"
#include "support/small_images.hpp"
#include "support/test_devices.hpp"

#include <fstream>
#include <map>

namespace trace_test {

using lockstep::Error;
using lockstep::error_of;
using lockstep::Fails;
using lockstep::ScratchFolder;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Trace : public testing::Test {
 protected:
  Trace() { write_small_images(images_, 150, 40); }

  // Two epochs over 150 samples; warnings are noted.
  void train(int ranks, int64_t batch_size, const std::filesystem::path& trace) {
    lockstep::TrainOptions options;
    options.data = lockstep::FashionMnist{images_.path()};
    options.devices = lockstep::test_devices(ranks);
    options.batch.size = batch_size;
    options.epochs = 2;
    options.keep.trace = trace;
    lockstep::train(options, {.on_warning = [&](const std::string& text) { warnings_.push_back(text); }});
  }

  const ScratchFolder images_, traces_;
  std::vector<std::string> warnings_;
};

TEST_F(Trace, ShowsForwardBackwardBucketsAndUpdateOfEveryRank) {
  const auto file = traces_ / "trace.json";
  train(3, 32, file);
  EXPECT_THAT(warnings_, IsEmpty());
  // Two epochs of 5 steps, of which the first 2 are not traced. Per rank and name: how many.
  std::map<int, std::map<std::string, int>> begun;
  const auto timeline = nlohmann::json::parse(std::ifstream(file));
  for (const auto& event : timeline.at("traceEvents")) {
    const auto name = event.at("name").get<std::string>(), phase = event.at("ph").get<std::string>();
    if (phase == "X" || phase == "b") ++begun[event.at("pid").get<int>()][name];
  }
  for (int rank = 0; rank < 3; ++rank) {
    for (const char* const name :
         {"lockstep::forward", "lockstep::backward", "lockstep::bucket 0 allreduce", "lockstep::update"}) {
      EXPECT_EQ(begun[rank][name], 8) << rank << " " << name;
    }
    EXPECT_GE(begun[rank]["lockstep::conv_relu_pool"], 16) << rank;
  }
}

TEST_F(Trace, WarnsOfARunThatEndsBeforeItBegins) {
  train(2, 150, traces_ / "short.json");
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("short.json has no timeline")));
}

TEST_F(Trace, AFileThatCannotBeWrittenIsAnError) {
  EXPECT_THAT(error_of([&] { train(2, 32, traces_ / "no folder" / "trace.json"); }), Fails(Error::file));
}

}  // namespace trace_test
