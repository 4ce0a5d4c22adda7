#include "elastic_agent.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "stored.hpp"

namespace lockstep::comm {

ElasticAgent::ElasticAgent(const StorePtr& store, const std::string& job, int node, const Arrival& arrival)
    : store_(c10::make_intrusive<c10d::PrefixStore>(job_prefix(job) + kAgents, store)),
      generations_(store, job),
      node_(node),
      arrival_(arrival) {
  come();
}

void ElasticAgent::come() {
  visit_.emplace(store_, node_, static_cast<int>(add_to_count(*store_, visits_key(node_), 1)));
  visit_->arrive(arrival_);
  beaten_ = {};
}

std::vector<Order> ElasticAgent::orders() {
  const auto now = Clock::now();
  if (now - beaten_ >= kBeat) {
    visit_->beat();
    beaten_ = now;
  }
  std::vector<Order> orders;
  while (auto order = visit_->next_order()) {
    orders.push_back(std::move(*order));
    if (orders.back().kind == Order::Kind::out) break;  // nothing of this visit counts after it
  }
  return orders;
}

std::string ElasticAgent::refusal() {
  if (!store_->check({kFirst})) return "";
  Arrival first;
  parse_stored(kFirst, store_->get_to_str(kFirst), [&](const std::string& text) {
    from_text(text, first);
    return true;
  });
  return node_ < first.most_nodes ? "" : comm::refusal(node_, arrival_, first);
}

bool ElasticAgent::note_end(int member, const ProcessEnd& end, bool killed, int code) {
  const bool is_loss = end.failed && (killed || !generations_.newest().index_of(member));
  visit_->post(Report{.member = member, .end = end, .killed = killed, .code = code});
  return is_loss;
}

void ElasticAgent::leave(int code) {
  visit_->post(Report{.leaves = true, .code = code});
}

}  // namespace lockstep::comm
