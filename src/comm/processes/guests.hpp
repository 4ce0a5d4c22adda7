// Guests: decides who may talk at this member's doors (door.hpp), where connections are hushed until they are let in.
//
//  1. A member that has connected to another member's door leaves its own address for that member in the store.
//  2. That member lets the connection talk. The system sends again what the connection said too soon.
//  3. What strangers say is dropped before Gloo can read it. So no stranger gets a rank's place, however fast it is.
//
// It takes some 0.2 s, the time after which a system sends again. So use it only for groups that strangers have
// disturbed. Use it from one thread at a time.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <set>
#include <string>
#include <vector>

namespace lockstep::comm {

class Guests {
 public:
  // Makes member `rank` of `size`. Let the store's keys be of this group and of the present try.
  Guests(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Tells the other members where this member's doors are, before Gloo tells them.
  static void tell_of_doors(c10d::Store& store, int rank, const std::vector<int>& doors);

  // Call this again and again while the group connects. Throws what the store throws.
  void look();

  // Ends the connections that were not let in, and gives their addresses.
  std::vector<std::string> turn_strangers_away();

 private:
  std::set<std::string> lines_of(const std::string& what, int member);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  std::vector<std::set<std::string>> doors_;  // doors by member
  std::set<std::string> told_;                // addresses of this member's connections that others were told
  std::set<int> let_in_;
};

}  // namespace lockstep::comm
