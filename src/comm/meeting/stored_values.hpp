// StoredValues are what a job's store holds, and its answers to questions. Keys and values are bytes. Use them from one
// thread at a time.
//
//   set KEY VALUE ...           ->
//   get KEY ...                 -> for each "=" and its value, or ""
//   check KEY ...               -> "yes" if all are there, or "no"
//   add KEY NUMBER              -> the sum, which is a decimal text
//   compare KEY BEFORE AFTER    -> what is there now: AFTER if it was BEFORE, or was not there and BEFORE is empty
//   append KEY VALUE            ->
//   delete KEY                  -> "yes" if it was there, or "no"
//   count                       -> the number of keys
#pragma once

#include "store_messages.hpp"

#include <string>
#include <unordered_map>

namespace lockstep::comm {

class StoredValues {
 public:
  // Gives "ok" and the answer, or "no" and why not.
  Fields answer(const Fields& question);

 private:
  Fields answer_of(const std::string& what, const Fields& question);
  std::string add(const std::string& key, const std::string& number);
  std::string compare(const std::string& key, const std::string& before, const std::string& after);

  std::unordered_map<std::string, std::string> values_;
};

}  // namespace lockstep::comm
