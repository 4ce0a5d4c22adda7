#include <lockstep/base/error.hpp>
#include <lockstep/plan/cluster.hpp>

#include <algorithm>
#include <cmath>

#include "io/json_fields.hpp"

namespace lockstep {
namespace {

using nlohmann::ordered_json;

constexpr size_t most_devices = 1024;

void check(bool fine, const std::string& field, double value, const std::string& rule) {
  if (!fine) throw Error("cluster: " + field + " is " + ordered_json(value).dump() + "; it must be " + rule);
}

void check(const Links& links, const std::string& name) {
  const auto check_link = [&](const Link& link, const std::string& kind) {
    check(link.latency >= 0, name + "." + kind + "latency", link.latency, "at least 0, in seconds");
    check(link.bytes_per_second >= 0, name + "." + kind + "bytes_per_second", link.bytes_per_second,
          "at least 0 (0: no limit)");
    check(link.start >= 0, name + "." + kind + "start", link.start, "at least 0, in seconds");
  };
  check_link(links.send, "");
  check_link(links.allreduce, "allreduce.");
  check_link(links.allgather, "allgather.");
}

Link link_from(JsonFields fields) {
  const Link link{fields.required<double>("latency"), fields.required<double>("bytes_per_second"),
                  fields.optional<double>("start", 0)};
  fields.no_more();
  return link;
}

// Reads one link for everything, and other links for collectives if they differ.
Links links_from(JsonFields fields) {
  Links links;
  links.send = {fields.required<double>("latency"), fields.required<double>("bytes_per_second")};
  links.allreduce = fields.has("allreduce") ? link_from(fields.object("allreduce")) : links.send;
  links.allgather = fields.has("allgather") ? link_from(fields.object("allgather")) : links.send;
  fields.no_more();
  return links;
}

ordered_json to_json(const Link& link) {
  ordered_json json = {{"latency", link.latency}, {"bytes_per_second", link.bytes_per_second}};
  if (link.start > 0) json["start"] = link.start;
  return json;
}

ordered_json to_json(const Links& links) {
  ordered_json json = to_json(links.send);
  json["allreduce"] = to_json(links.allreduce);
  json["allgather"] = to_json(links.allgather);
  return json;
}

}  // namespace

double allreduce_seconds(const Link& link, int ranks, double bytes) {
  return ranks == 1 ? 0 : link.start + 2 * (ranks - 1) * link.seconds(bytes / ranks);
}

double allgather_seconds(const Link& link, int ranks, double bytes) {
  return ranks == 1 ? 0 : link.start + (ranks - 1) * link.seconds(bytes / ranks);
}

double Cluster::slowdown(double computing) const {
  if (contention.empty() || computing <= 1) return 1;
  const auto last = static_cast<double>(contention.size());
  if (computing >= last) return contention.back() * computing / last;
  const auto below = static_cast<size_t>(computing);
  const double share = computing - static_cast<double>(below);
  return contention[below - 1] * (1 - share) + contention[below] * share;
}

void check_cluster(const Cluster& cluster) {
  if (cluster.devices.empty() || cluster.devices.size() > most_devices) {
    throw Error("cluster: there are " + std::to_string(cluster.devices.size()) + " devices; there must be from 1 to " +
                std::to_string(most_devices));
  }
  for (const auto& device : cluster.devices) {
    check(device.speed > 0 && std::isfinite(device.speed), "a device's speed", device.speed, "above 0");
    check(device.memory_bytes >= 0, "a device's memory_bytes", device.memory_bytes, "at least 0 (0: no limit)");
  }
  check(cluster.devices_per_node >= 1, "devices_per_node", cluster.devices_per_node, "at least 1");
  check(cluster.within, "within");
  check(cluster.between, "between");
  for (const double factor : cluster.contention) check(factor >= 1, "a contention", factor, "at least 1");
  check(cluster.overlap >= 0 && cluster.overlap <= 1, "overlap", cluster.overlap, "from 0 to 1");
}

std::string to_json(const Cluster& cluster) {
  ordered_json devices = ordered_json::array();
  for (const auto& device : cluster.devices) {
    if (!devices.empty() && devices.back()["speed"] == device.speed &&
        devices.back()["memory_bytes"] == device.memory_bytes) {
      devices.back()["count"] = devices.back()["count"].get<int>() + 1;
    } else {
      devices.push_back({{"count", 1}, {"speed", device.speed}, {"memory_bytes", device.memory_bytes}});
    }
  }
  const ordered_json json = {{"devices", devices},
                             {"devices_per_node", cluster.devices_per_node},
                             {"within", to_json(cluster.within)},
                             {"between", to_json(cluster.between)},
                             {"contention", cluster.contention},
                             {"overlap", cluster.overlap}};
  return json.dump(2) + "\n";
}

Cluster cluster_from_json(std::string_view text) {
  auto fields = JsonFields::parse(text, "cluster");
  Cluster cluster;
  for (auto& group : fields.objects("devices")) {
    const int count = group.required<int>("count");
    if (count < 1 || count > static_cast<int>(most_devices)) {
      group.refuse("count", "from 1 to " + std::to_string(most_devices));
    }
    const Cluster::Device device{group.optional<double>("speed", 1), group.optional<double>("memory_bytes", 0)};
    group.no_more();
    cluster.devices.insert(cluster.devices.end(), static_cast<size_t>(count), device);
  }
  cluster.devices_per_node =
      fields.optional<int>("devices_per_node", std::max(1, static_cast<int>(cluster.devices.size())));
  cluster.within = links_from(fields.object("within"));
  // Several nodes need links between them.
  const bool one_node = cluster.devices.size() <= static_cast<size_t>(std::max(cluster.devices_per_node, 1));
  cluster.between = one_node && !fields.has("between") ? cluster.within : links_from(fields.object("between"));
  if (fields.has("contention")) cluster.contention = fields.list<double>("contention");
  cluster.overlap = fields.optional<double>("overlap", 1);
  fields.no_more();
  check_cluster(cluster);
  return cluster;
}

Cluster read_cluster(const std::filesystem::path& file) {
  return read_json(file, cluster_from_json);
}

}  // namespace lockstep
