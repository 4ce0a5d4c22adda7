// These bytes go over a connection to the job's store (store_server.hpp). Lengths have four bytes, the lowest first.
//
//  1. The server greets: the protocol's name, and a nonce. The client answers with a second nonce and its signature of
//     both; the server with its own signature of both. Each has to be the job key's. Until then the server takes 64
//     bytes, and says nothing more.
//  2. Then messages follow in turn: a question, its answer. A message is its length and then fields; a field is its
//     length and then bytes.
#pragma once

#include "comm/job_key.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace lockstep::comm {

inline const std::string kGreeting = "lockstep store 1";
inline constexpr size_t kGreetingBytes = 16 + JobKey::kBytes;
inline constexpr size_t kProofBytes = 2 * JobKey::kBytes;  // the client's nonce, and its signature

// Gives the text that a side of a new connection signs. The sides' texts differ, so nobody can send a side its own
// signature back.
inline std::vector<std::string> signed_by(const std::string& side, const std::string& servers_nonce,
                                          const std::string& clients_nonce) {
  return {kGreeting, side, servers_nonce, clients_nonce};
}

using Fields = std::vector<std::string>;

inline constexpr size_t kLengthBytes = 4;
inline constexpr size_t kLongestMessage = size_t{64} << 20;

inline void append_length(std::string& to, size_t length) {
  for (size_t byte = 0; byte < kLengthBytes; ++byte) to += static_cast<char>((length >> (8 * byte)) & 0xff);
}

// Give a text of at least four bytes.
inline size_t length_at_start(std::string_view text) {
  size_t length = 0;
  for (size_t byte = 0; byte < kLengthBytes; ++byte) {
    length |= static_cast<size_t>(static_cast<unsigned char>(text[byte])) << (8 * byte);
  }
  return length;
}

inline std::string message_of(const Fields& fields) {
  size_t length = 0;
  for (const auto& field : fields) length += kLengthBytes + field.size();
  std::string message;
  message.reserve(kLengthBytes + length);
  append_length(message, length);
  for (const auto& field : fields) {
    append_length(message, field.size());
    message += field;
  }
  return message;
}

// Takes a message without its length. Gives nothing if it is cut off somewhere.
inline Fields fields_of(std::string_view text) {
  Fields fields;
  while (!text.empty()) {
    if (text.size() < kLengthBytes || text.size() - kLengthBytes < length_at_start(text)) return {};
    fields.emplace_back(text.substr(kLengthBytes, length_at_start(text)));
    text.remove_prefix(kLengthBytes + fields.back().size());
  }
  return fields;
}

}  // namespace lockstep::comm
