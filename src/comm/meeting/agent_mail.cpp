#include "agent_mail.hpp"

#include <nlohmann/json.hpp>

#include "stored.hpp"

namespace lockstep::comm {

using nlohmann::json;

std::string visits_key(int node) {
  return "visits/" + std::to_string(node);
}

std::string refusal(int node, const Arrival& theirs, const Arrival& first) {
  const auto text = [](const Arrival& arrival) {
    return "-n " + std::to_string(arrival.processes) + " on at most " + std::to_string(arrival.most_nodes) +
           " machines";
  };
  return "node " + std::to_string(node) + " was started with " + text(theirs) + ", and node 0 with " + text(first) +
         "; start all alike. If node 0 is of another job, give each job a port of its own";
}

std::string to_text(const Order& order) {
  return json{static_cast<int>(order.kind), order.member, order.place, order.code, order.why}.dump();
}

std::string to_text(const Report& report) {
  const ProcessEnd& end = report.end;
  return json{report.leaves, report.member,     end.failed,    end.stopped,
              end.how,       end.lacked_memory, report.killed, report.code}
      .dump();
}

std::string to_text(const Arrival& arrival) {
  return json{arrival.processes, arrival.most_nodes}.dump();
}

void from_text(const std::string& text, Order& order) {
  const auto list = json::parse(text);
  const int kind = list.at(0);
  if (kind < 0 || kind > static_cast<int>(Order::Kind::over)) throw Error("no order");
  order = {static_cast<Order::Kind>(kind), list.at(1), list.at(2), list.at(3), list.at(4)};
}

void from_text(const std::string& text, Report& report) {
  const auto list = json::parse(text);
  report = {list.at(0), list.at(1), {list.at(2), list.at(3), list.at(4), list.at(5)}, list.at(6), list.at(7)};
}

void from_text(const std::string& text, Arrival& arrival) {
  const auto list = json::parse(text);
  arrival = {list.at(0), list.at(1)};
}

Visit::Visit(StorePtr store, int node, int number)
    : store_(std::move(store)), number_(number), prefix_(std::to_string(node) + "/" + std::to_string(number) + "/") {}

void Visit::arrive(const Arrival& arrival) {
  store_->set(key("arrival"), to_text(arrival));
}

std::optional<Arrival> Visit::arrival() {
  int none = 0;
  return next<Arrival>("arrival", none);
}

void Visit::beat() {
  add_to_count(*store_, key("beats"), 1);
}

int64_t Visit::beats() {
  return stored_count(*store_, key("beats"));
}

void Visit::post(const Order& order) {
  store_->set(key("orders/" + std::to_string(orders_++)), to_text(order));
}

void Visit::post(const Report& report) {
  store_->set(key("reports/" + std::to_string(reports_++)), to_text(report));
}

std::optional<Order> Visit::next_order() {
  return next<Order>("orders/" + std::to_string(orders_), orders_);
}

std::optional<Report> Visit::next_report() {
  return next<Report>("reports/" + std::to_string(reports_), reports_);
}

template <class Message>
std::optional<Message> Visit::next(const std::string& name, int& count) {
  if (!store_->check({key(name)})) return std::nullopt;
  ++count;
  return parse_stored(key(name), store_->get_to_str(key(name)), [](const std::string& text) {
    Message message;
    from_text(text, message);
    return message;
  });
}

}  // namespace lockstep::comm
