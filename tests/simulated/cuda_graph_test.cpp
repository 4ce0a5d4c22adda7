// Labels: simulated
// CUDA graphs on simulated GPUs: cuda_graph.cpp over a stand-in for LibTorch's CUDAGraph. What a recording holds, what
// it refuses, and which mistakes of a replay are reported.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include "devices/cuda_graph.hpp"
#include "support/error_of.hpp"
#include "support/simulated_device.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cuda_graph_test {

namespace simulated = lockstep::simulated;
using lockstep::any_error_of;
using simulated::marked;
using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using torch::Tensor;

const c10::Device device("cuda:0");

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA);
}

c10::Stream new_stream() {
  return guard().getStreamFromGlobalPool(device);
}

class CudaGraph : public testing::Test {
 protected:
  ~CudaGraph() override { guard().synchronizeDevice(device.index()); }

  void record(const std::function<void()>& work) { graph_->record(work); }
  std::string refused(const std::function<void()>& work) {
    return any_error_of([&] { graph_->record(work); });
  }

  const c10::Stream stream_ = new_stream(), side_ = new_stream();
  const c10::StreamGuard current_{stream_};
  Tensor sum_ = torch::zeros({1000}, device);
  std::unique_ptr<lockstep::Graph> graph_ = lockstep::make_cuda_graph();
};

TEST_F(CudaGraph, HoldsWorkOfTheStreamsThatFollowIt) {
  Tensor doubled = torch::zeros({1000}, device);
  record([&] {
    sum_.add_(1);
    marked(stream_).block(side_);
    {
      const c10::StreamGuard beside(side_);
      EXPECT_TRUE(lockstep::is_recording());
      doubled.copy_(sum_ * 2);
    }
    marked(side_).block(stream_);
    sum_.add_(doubled);
  });
  {
    const c10::StreamGuard beside(side_);
    EXPECT_FALSE(lockstep::is_recording());
  }
  EXPECT_EQ(sum_[0].item<float>(), 0);
  const int64_t launches = simulated::launches();
  graph_->replay();  // 1, 2, 3
  graph_->replay();  // 4, 8, 12
  EXPECT_EQ(simulated::launches() - launches, 2);
  EXPECT_EQ(sum_[0].item<float>(), 12);
  const c10::StreamGuard elsewhere(new_stream());
  graph_->replay();
  EXPECT_EQ(sum_[0].item<float>(), 39);
}

TEST_F(CudaGraph, DrawsTheNumbersThatItsStepsWouldDraw) {
  const auto three = [&](const std::function<void()>& draw) {
    torch::manual_seed(3);
    std::vector<Tensor> drawn;
    for (int i = 0; i < 3; ++i) {
      draw();
      drawn.push_back(sum_.clone());
    }
    return torch::stack(drawn).cpu();
  };
  const Tensor expected = three([&] { sum_.uniform_(); });
  record([&] { sum_.uniform_(); });
  EXPECT_TRUE(three([&] { graph_->replay(); }).equal(expected));
}

// ---- What a recording refuses.

TEST_F(CudaGraph, RefusesTheHostsWaits) {
  const std::vector<std::pair<const char*, std::function<void()>>> waits = {
      {"for a value", [&] { sum_.sum().item<float>(); }},
      {"for its stream", [&] { guard().synchronizeStream(stream_); }},
      {"for another stream", [&] { guard().synchronizeStream(side_); }},
      {"for its device", [&] { guard().synchronizeDevice(device.index()); }},
      {"for its device, elsewhere",
       [&] { std::thread([] { EXPECT_ANY_THROW(guard().synchronizeDevice(device.index())); }).join(); }},
      {"asks for an event", [&] { marked(stream_).query(); }},
      {"for an event", [&] { marked(stream_).synchronize(); }},
      {"for an event from before", [event = std::make_shared<c10::Event>(marked(stream_))] { event->query(); }}};
  for (const auto& [name, wait] : waits) {
    SCOPED_TRACE(name);
    graph_ = lockstep::make_cuda_graph();
    EXPECT_THAT(refused(wait), HasSubstr("the host "));
    EXPECT_FALSE(lockstep::is_recording());
    EXPECT_EQ((sum_ + 1).sum().item<float>(), 1000);
  }
}

TEST_F(CudaGraph, RefusesCopiesOfMemoryThatIsNotPinned) {
  const Tensor plain = torch::ones({1000}), pinned = torch::ones({1000}).pin_memory();
  EXPECT_THAT(refused([&] { sum_.copy_(plain, /*non_blocking=*/true); }), HasSubstr("pinned"));
  graph_ = lockstep::make_cuda_graph();
  record([&] { sum_.copy_(pinned, /*non_blocking=*/true); });
  pinned.fill_(5);
  graph_->replay();
  EXPECT_EQ(sum_[0].item<float>(), 5);
}

TEST_F(CudaGraph, RefusesEventsFromOutside) {
  const auto outside = marked(side_);
  std::string at_once;
  EXPECT_THAT(refused([&] { at_once = any_error_of([&] { outside.block(stream_); }); }), HasSubstr("previous error"));
  EXPECT_THAT(at_once, HasSubstr("an event from outside"));
}

TEST_F(CudaGraph, RefusesEventsOfARecordingThatIsOver) {
  std::optional<c10::Event> inside;
  record([&] { inside = marked(stream_); });
  EXPECT_THAT(any_error_of([&] { inside->block(side_); }), HasSubstr("a capture that is over"));
}

TEST_F(CudaGraph, RefusesAStreamThatIsNotWaitedFor) {
  EXPECT_THAT(refused([&] {
                marked(stream_).block(side_);
                const c10::StreamGuard beside(side_);
                sum_.add_(1);
              }),
              AllOf(HasSubstr("unjoined"), HasSubstr("does not wait for")));
}

TEST_F(CudaGraph, RefusesTheDefaultStream) {
  const c10::StreamGuard of_everybody(guard().getDefaultStream(device));
  EXPECT_THAT(refused([] {}), HasSubstr("non-default"));
}

// ---- Memory.

TEST_F(CudaGraph, KeepsTheMemoryThatItWasGiven) {
  Tensor inside;
  const void* place = nullptr;
  record([&] {
    inside = sum_ + 1;
    place = inside.const_data_ptr();
    sum_.add_(inside);
  });
  inside = Tensor();
  EXPECT_NE(torch::zeros({1000}, device).const_data_ptr(), place);
  graph_->replay();
  graph_->replay();
  EXPECT_EQ(sum_[0].item<float>(), 3);
  graph_.reset();
  guard().synchronizeStream(stream_);
  EXPECT_EQ(torch::zeros({1000}, device).const_data_ptr(), place);
}

TEST_F(CudaGraph, GivesItsMemoryToItselfAgain) {
  std::vector<const void*> places;
  record([&] {
    for (int i = 0; i < 2; ++i) {
      const Tensor inside = sum_ + 1;
      places.push_back(inside.const_data_ptr());
      sum_.copy_(inside);
    }
  });
  EXPECT_EQ(places[0], places[1]);
  graph_->replay();
  EXPECT_EQ(sum_[0].item<float>(), 2);
}

// ---- Mistakes that are reported.

TEST_F(CudaGraph, AMissingWaitWithinItIsReported) {
  Tensor other = torch::zeros({1000}, device);
  record([&] {
    marked(stream_).block(side_);
    {
      const c10::StreamGuard beside(side_);
      other.fill_(1);
    }
    sum_.add_(other);  // too early
    marked(side_).block(stream_);
  });
  EXPECT_THAT(simulated::take_reports(), IsEmpty());
  graph_->replay();
  EXPECT_THAT(simulated::take_reports(), Contains(HasSubstr("race: aten::add")));
}

TEST_F(CudaGraph, AMissingWaitForAReplayIsReported) {
  record([&] { sum_.add_(1); });
  graph_->replay();
  {
    const c10::StreamGuard beside(side_);
    graph_->replay();
  }
  EXPECT_THAT(simulated::take_reports(), Contains(HasSubstr("race: aten::add")));
}

TEST_F(CudaGraph, AMissingRecordStreamWithinItIsReported) {
  for (const bool waits : {true, false}) {
    graph_ = lockstep::make_cuda_graph();
    Tensor total = torch::zeros({1000}, device);
    record([&] {
      Tensor inside = sum_ + 1;
      marked(stream_).block(side_);
      {
        const c10::StreamGuard beside(side_);
        total.add_(inside);
      }
      if (waits) marked(side_).block(stream_);
      inside = Tensor();
      marked(side_).block(stream_);
    });
    graph_->replay();
    const auto reports = simulated::take_reports();
    if (waits) {
      EXPECT_THAT(reports, IsEmpty());
    } else {
      EXPECT_THAT(reports, Contains(HasSubstr("race: a tensor's end")));
    }
  }
}

TEST_F(CudaGraph, AReplayThatUsesFreedMemoryIsReported) {
  Tensor outside = torch::ones({1000}, device);
  record([&] { sum_.add_(outside); });
  outside = Tensor();
  graph_->replay();
  EXPECT_THAT(simulated::take_reports(), Contains(HasSubstr("uses memory that was freed")));
}

// The device's generator moves on with each replay, and LibTorch does not guard it.
TEST_F(CudaGraph, RanksThatShareAGpuReplayOneAtATime) {
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([] {
      const c10::StreamGuard own(new_stream());
      Tensor noise = torch::zeros({10}, device);
      const auto work = [&] {
        for (int i = 0; i < 50; ++i) noise.uniform_();
      };
      const auto graph = lockstep::make_cuda_graph();
      static std::mutex one_records;
      {
        const std::lock_guard lock(one_records);
        graph->record(work);
      }
      for (int i = 0; i < 50; ++i) graph->replay();
      guard().synchronizeStream(own.current_stream());
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_THAT(simulated::take_reports(), Not(Contains(HasSubstr("default generator"))));
}

}  // namespace cuda_graph_test
