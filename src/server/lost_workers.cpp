#include "lost_workers.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <nlohmann/json.hpp>

#include <map>
#include <string>

#include "ranks/gather.hpp"
#include "request.hpp"

namespace lockstep::server {

namespace {

std::string to_json_text(const std::vector<LostWorker>& lost) {
  nlohmann::json list = nlohmann::json::array();
  for (const auto& [worker, reason] : lost) list.push_back({worker, reason});
  // A reason may hold any bytes.
  return list.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<LostWorker> from_json_text(const std::string& text) {
  std::vector<LostWorker> lost;
  for (const auto& one : nlohmann::json::parse(text)) {
    lost.push_back({one.at(0).get<int>(), one.at(1).get<std::string>()});
  }
  return lost;
}

}  // namespace

std::vector<LostWorker> as_sent(const std::vector<LostWorker>& lost) {
  return from_json_text(to_json_text(lost));
}

// The text's size, then the text.
Works send_lost(Rank& rank, const std::vector<LostWorker>& lost, int to) {
  const std::string text = to_json_text(lost);
  std::vector<at::Tensor> size{at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(rank.device())};
  std::vector<at::Tensor> bytes{bytes_of_text(text).to(rank.device())};
  return {rank.backend().send(size, to, kLostTag), rank.backend().send(bytes, to, kLostTag)};
}

std::vector<LostWorker> receive_lost(Rank& rank, int from) {
  const at::TensorOptions here(rank.device());
  std::vector<at::Tensor> size{at::empty({1}, here.dtype(at::kLong))};
  rank.backend().recv(size, from, kLostTag)->wait();
  std::vector<at::Tensor> bytes{at::empty({size[0].item<int64_t>()}, here.dtype(at::kByte))};
  rank.backend().recv(bytes, from, kLostTag)->wait();
  return from_json_text(text_of_bytes(bytes[0]));
}

std::vector<LostWorker> merged(const std::vector<LostWorker>& first, const std::vector<LostWorker>& second) {
  std::map<int, std::string> reasons;
  for (const auto* const list : {&first, &second}) {
    for (const auto& [worker, reason] : *list) reasons.emplace(worker, reason);
  }
  std::vector<LostWorker> all;
  for (const auto& [worker, reason] : reasons) all.push_back({worker, reason});
  return all;
}

}  // namespace lockstep::server
