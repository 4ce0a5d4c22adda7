// Member: one rank's end of a simulated group: what it has sent and received, and which connections still stand.
//
// A collective call is a message from each member to each other one. A member's call is complete when the member has
// all of them. So members complete at different times, and after a death some may have completed what others have not.
#pragma once

#include "network.hpp"
#include "transfer.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::simulation {

using TransferPtr = c10::intrusive_ptr<Transfer>;

class Member : public Network::Endpoint {
 public:
  using Bytes = Network::Bytes;
  using Inputs = std::vector<Bytes>;  // bytes by rank

  Member(Process& process, int rank, int size);
  ~Member() override;

  void connect(const std::vector<int>& numbers);  // `numbers`: the members', by rank

  // `finish` gets what each rank gave to this one. With a root, the root alone gives.
  TransferPtr call(uint32_t tag, Inputs to, std::function<void(Inputs&)> finish, int root = -1);

  // Throws if the connection is closed.
  TransferPtr send(int destination, uint32_t tag, Bytes bytes);
  TransferPtr receive(int source, uint32_t tag, std::function<void(const Bytes&)> take);

  void close();  // all connections; the others hear of it
  bool is_idle() const { return calls_.empty(); }

  void process_is_gone(const Process& process) override;

  const int rank;
  const int size;

 private:
  enum class Kind { call, message };
  using Key = std::pair<Kind, uint32_t>;
  struct Call {
    uint32_t tag;
    TransferPtr work;
    Inputs inputs;
    std::vector<bool> has;
    std::function<void(Inputs&)> finish;
  };
  struct Receive {
    TransferPtr work;
    std::function<void(const Bytes&)> take;
  };

  void post(int destination, const Key& key, Bytes bytes);
  void deliver(int source, const Key& key, Bytes bytes);
  void lose(int peer);
  bool complete(Call& call);
  bool complete(int source, const Key& key);

  std::vector<int> numbers_;
  std::vector<bool> closed_;                                     // closed ranks
  std::map<std::pair<int, Key>, std::deque<Bytes>> inbox_;       // messages by source
  std::list<Call> calls_;                                        // open
  std::map<std::pair<int, Key>, std::deque<Receive>> receives_;  // open
};

}  // namespace lockstep::simulation
