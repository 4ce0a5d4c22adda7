// Graph: what streams were given while they were recorded, to be given again by each replay.
//
// As with CUDA, recorded work does not run. A stream that waits for a recorded point is recorded from there on, and the
// first stream must wait for it before the end. Work from outside cannot be waited for. Where the host would have to
// wait, the recording is refused. A replay runs on the stream that is current then, and on branches of the graph's own.
#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "launch.hpp"
#include "stream.hpp"

namespace simulated {

class Graph : public std::enable_shared_from_this<Graph> {
 public:
  // Records `stream`. The same thread must call end(), and no other stream of its own device may be waited for until
  // then. Throws if the stream is a device's default one, or is recorded already.
  static std::shared_ptr<Graph> begin(Stream& stream);
  void end();  // throws what is wrong with the recording

  void replay(Stream& stream);

  explicit Graph(Stream& origin) : origin_(origin) {}
  ~Graph();

  // Record what a recorded stream is given. Hold order().
  void add(Stream& stream, const Launch& launch);
  std::shared_ptr<Point> mark(Stream& stream);

  // `stream` or `point` is recorded. Hold order().
  static void follow(Stream& stream, const std::shared_ptr<Point>& point);

  // Throws if the host may not wait: for a recorded stream, on a recorded device, or on a thread that records. The
  // recording is refused then. Hold order().
  static void check_wait(const Stream& stream);
  static void check_wait(int device);
  static void check_wait(const Point& point);  // do not hold order()

 private:
  // One replay: which streams take the places of the recorded ones, and which points.
  struct Replay {
    std::map<const Stream*, Stream*> streams;
    std::map<const Point*, std::shared_ptr<Point>> points;
  };
  using Node = std::function<void(Replay&)>;

  void join_in(Stream& stream);
  void stop();
  [[noreturn]] void refuse(const std::string& what);
  static void check_thread(const std::string& what);

  Stream& origin_;
  bool recording_ = false;
  std::string wrong_;            // why the recording is no good; empty: it is
  std::map<Stream*, Clock> at_;  // the part of the recording that comes before, by recorded stream
  std::vector<Node> nodes_;
  std::map<const Stream*, Stream*> branches_;  // branches of the recorded streams but the first
  std::set<Stream*> ran_on_;
};

}  // namespace simulated
