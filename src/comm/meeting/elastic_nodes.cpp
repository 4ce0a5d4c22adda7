#include "elastic_nodes.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "stored.hpp"

#include <algorithm>

namespace lockstep::comm {
namespace {

constexpr int kBeatsOfOneThatLives = 3;  // since another agent of the same node came
constexpr std::chrono::milliseconds kBetweenLooksForAbsent{90};

}  // namespace

ElasticNodes::ElasticNodes(const StorePtr& store, const std::string& job, const Arrival& arrival,
                           const SilenceRange& silence)
    : store_(c10::make_intrusive<c10d::PrefixStore>(job_prefix(job) + kAgents, store)),
      arrival_(arrival),
      silence_(silence),
      looks_(silence),
      nodes_(arrival.most_nodes) {
  store_->set(kFirst, to_text(arrival));
}

ElasticNodes::News ElasticNodes::look() {
  const auto time = Clock::now();
  // Then this process stood still (Ctrl-Z, a machine that was paused), and others maybe too.
  looks_.beat(time);
  const bool stood_still = time - std::exchange(looked_, time) > looks_.limit() / 2;
  const bool looks_for_absent = time - looked_for_absent_ >= kBetweenLooksForAbsent;
  if (looks_for_absent) looked_for_absent_ = time;
  News news;
  for (int node = 1; node < arrival_.most_nodes; ++node) {
    if (nodes_[node].is_there) read(node, news);
    if (nodes_[node].is_there) see(node, time, stood_still, news);
    if (nodes_[node].is_there || looks_for_absent) receive(node, time, news);
  }
  return news;
}

void ElasticNodes::read(int node, News& news) {
  Node& one = nodes_[node];
  while (const auto report = one.visit->next_report()) {
    if (report->leaves) {
      one.is_there = false;
      news.left.emplace_back(node, report->code);
    } else {
      news.ended.emplace_back(node, *report);
    }
  }
}

void ElasticNodes::see(int node, Clock::time_point time, bool stood_still, News& news) {
  Node& one = nodes_[node];
  const int64_t beats = one.visit->beats();
  const bool lives = std::exchange(one.beats, beats) != beats;
  if (lives) one.silence.note(time - one.seen, time);
  if (lives || stood_still) one.seen = time;
  if (time - one.seen <= limit_of(one)) return;
  one.visit->post(Order{.kind = Order::Kind::out});
  one.is_there = false;
  news.lost.push_back(node);
}

std::chrono::milliseconds ElasticNodes::limit_of(const Node& node) const {
  return std::max(looks_.limit(), node.silence.limit());
}

std::chrono::milliseconds ElasticNodes::silence_limit(int node) const {
  return nodes_[node].is_there ? limit_of(nodes_[node]) : std::chrono::milliseconds::zero();
}

bool ElasticNodes::may_be_silent(int node) const {
  const Node& one = nodes_[node];
  return one.is_there && looked_ - one.seen > limit_of(one) / 2;
}

// The newest visit comes first: an older one may be that of an agent that is gone.
void ElasticNodes::receive(int node, Clock::time_point time, News& news) {
  Node& one = nodes_[node];
  for (const auto visits = stored_count(*store_, visits_key(node)); one.visits < visits;) {
    one.open.push_back(++one.visits);
  }
  for (size_t i = one.open.size(); i-- > 0;) {
    Visit visit(store_, node, one.open[i]);
    const auto arrival = visit.arrival();
    if (!arrival) continue;                      // it is about to say it
    if (one.is_there && *arrival == arrival_) {  // until it is known whether the agent before lives
      if (!one.beats_of_first) one.beats_of_first = one.beats;
      if (one.beats < *one.beats_of_first + kBeatsOfOneThatLives) return;
    }
    one.open.erase(one.open.begin() + static_cast<std::ptrdiff_t>(i));
    one.beats_of_first.reset();
    answer(node, std::move(visit), *arrival, time, news);
  }
}

void ElasticNodes::answer(int node, Visit visit, const Arrival& arrival, Clock::time_point time, News& news) {
  Node& one = nodes_[node];
  if (arrival == arrival_ && !one.is_there) {
    visit.post(Order{.kind = Order::Kind::welcome});
    one.visit = std::move(visit);
    one.is_there = true;
    one.beats = 0;
    one.seen = time;
    one.silence = SilenceLimit(silence_);
    news.came.push_back(node);
    return;
  }
  const std::string why = arrival != arrival_ ? refusal(node, arrival, arrival_)
                                              : "two agents say that they are node " + std::to_string(node) +
                                                    ", and the first one lives; give each a number of its own";
  visit.post(Order{.kind = Order::Kind::over, .code = 1, .why = why});
  news.refused.push_back(why);
}

void ElasticNodes::order(int node, const Order& order) {
  Node& one = nodes_.at(static_cast<size_t>(node));
  if (one.is_there) one.visit->post(order);
}

void ElasticNodes::order_all(const Order& order) {
  for (int node = 1; node < arrival_.most_nodes; ++node) this->order(node, order);
}

std::vector<int> ElasticNodes::absent(int count) const {
  std::vector<int> absent;
  for (int node = 1; node < count; ++node) {
    if (!nodes_[node].is_there) absent.push_back(node);
  }
  return absent;
}

bool ElasticNodes::are_all_gone() const {
  return std::none_of(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.is_there; });
}

}  // namespace lockstep::comm
