#include "explained_failure.hpp"

#include <c10/util/Exception.h>
#include <lockstep/base/error.hpp>

#include "base/exception_text.hpp"

#include <exception>
#include <string>

namespace lockstep {
namespace {

std::string why_batch_of_one() {
  return "a BatchNorm cannot train on one sample, and this rank's part of the batch has one, as it may be of the last "
         "batch of an epoch. Choose a batch size whose last batch has two samples or more for each rank, or leave that "
         "batch out: BatchOptions::drop_last, in a run `drop_last`. If the ranks have two samples or more together, "
         "convert_sync_batchnorm() normalises over all of them";
}

std::string why_graph_is_gone(const torch::nn::Module& module) {
  std::string kept;
  for (const auto& item : module.named_buffers()) {
    if (item.value().grad_fn()) kept += (kept.empty() ? "the buffer " : ", ") + item.key();
  }
  return "the loss leads to " + (kept.empty() ? "something" : kept) +
         " that was computed with gradients before this step, as in a constructor or by an earlier forward, and whose "
         "graph an earlier backward has used up. Compute it in each forward(), or keep its detach()";
}

// DataParallel has refused parameters and buffers of that mode when it was made.
std::string why_inference_tensors() {
  return "a tensor that is no parameter or buffer, such as the batch, was made in InferenceMode, so no backward can "
         "use it. Make it outside of that mode, under NoGradGuard if it needs no gradients; or take a clone() of it "
         "outside, and use that";
}

}  // namespace

void explain_failure(const torch::nn::Module& module, const Rank& rank, bool of_batch_of_one) {
  if (!std::current_exception()) return;
  try {
    throw;
  } catch (const c10::Error&) {  // an Error of lockstep explains itself
    const std::string text = exception_text(std::current_exception());
    const auto says = [&](const char* part) { return text.find(part) != std::string::npos; };
    std::string why;
    if (of_batch_of_one && says("Expected more than 1 value per channel")) why = why_batch_of_one();
    if (says("backward through the graph a second time")) why = why_graph_is_gone(module);
    if (says("nference tensor")) why = why_inference_tensors();
    if (why.empty()) return;
    std::throw_with_nested(Error(rank.name() + ": DataParallel: " + why + ". LibTorch said: " + text));
  } catch (const std::exception&) {
  }
}

}  // namespace lockstep
