// A Graph for machines without a GPU: it keeps the work, and a replay is to call the work. What it cannot show is that
// a GPU records the work; what it shows is everything around that.
#pragma once

#include "devices/cuda_graph.hpp"

#include <functional>

namespace lockstep {

class FakeGraph : public Graph {
 public:
  explicit FakeGraph(int* replays = nullptr) : replays_(replays) {}

  void record(const std::function<void()>& work) override { work_ = work; }
  void replay() override {
    work_();
    if (replays_ != nullptr) ++*replays_;
  }

 private:
  std::function<void()> work_;
  int* const replays_;
};

}  // namespace lockstep
