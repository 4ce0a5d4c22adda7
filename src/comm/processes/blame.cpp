#include "blame.hpp"

#include "comm/texts.hpp"

#include <algorithm>
#include <map>

namespace lockstep::comm {

using Kind = RankState::Kind;

namespace {

Error::Data differ(int rank, int other) {
  return {Error::difference, {std::min(rank, other), std::max(rank, other)}};
}

Failure contradiction_of_collective(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster) {
  for (int other = 0; other < static_cast<int>(states.size()); ++other) {
    if (!call.concerns(other)) continue;
    const RankState& state = states[other];
    const CollectiveCalls& calls = state.calls.of(call.among.name);
    if (state.kind == Kind::returned && calls.count <= call.number) {
      return {text_of_return(roster.name(other), roster.name(call.rank), call.where()), {Error::difference, {other}}};
    }
    const std::string theirs = calls.text_of(call.number);
    if (!theirs.empty() && theirs != call.text) {
      return {text_of_different_calls(call.place(), {roster.name(call.rank), call.text}, {roster.name(other), theirs}),
              differ(call.rank, other)};
    }
  }
  return {};
}

std::string text_of_missing_answer(const std::string& other, const std::string& rank, bool to_send,
                                   const std::string& where) {
  return other + " returned without the " + (to_send ? "recv" : "send") + " that " + rank + " waits for: " + where +
         ". Each send needs a recv";
}

Failure contradiction_of_message(const OpenCall& call, const RankState& peer, const Roster& roster) {
  const std::string name = roster.name(call.rank), other = roster.name(call.peer);
  if (peer.kind == Kind::returned) {
    const int64_t answers = (call.sends ? peer.calls.received : peer.calls.sent)[call.rank];
    if (answers >= call.messages) return {};
    return {text_of_missing_answer(other, name, call.sends, call.where()), {Error::difference, {call.peer}}};
  }
  if (peer.kind == Kind::waits && peer.call.message == call.message && peer.call.content != call.content) {
    return {"the two sides of " + call.message + " differ: " + name + " called " + call.text + ", " + other +
                " called " + peer.call.text,
            differ(call.rank, call.peer)};
  }
  return {};
}

std::string text_of_last_step(int64_t steps) {
  return steps > 0 ? "; the last complete step was step " + std::to_string(steps) : "";
}

// Tells whether `rank` waits for a call that `other`, which waits too, has not made yet.
bool lacks(const std::vector<RankState>& states, int rank, int other) {
  const OpenCall& call = states[rank].call;
  const Calls& theirs = states[other].calls;
  if (!call.is_message()) {
    return other != rank && call.concerns(other) && theirs.of(call.among.name).count <= call.number;
  }
  return other == call.peer && (call.sends ? theirs.received : theirs.sent)[rank] < call.messages;
}

}  // namespace

Failure contradiction(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster) {
  if (call.is_message()) return contradiction_of_message(call, states[call.peer], roster);
  return call.number < 0 ? Failure() : contradiction_of_collective(call, states, roster);
}

Failure early_return(int rank, const Calls& calls, const std::vector<RankState>& states, const Roster& roster) {
  const std::string name = roster.name(rank);
  for (int other = 0; other < static_cast<int>(states.size()); ++other) {
    if (other == rank || states[other].kind != Kind::returned) continue;
    const Error::Data at_fault{Error::difference, {other}};
    const Calls& theirs = states[other].calls;
    for (const auto& [group, mine] : calls.collective) {
      const auto found = theirs.collective.find(group);
      if (found == theirs.collective.end() || found->second.count >= mine.count) continue;  // it is no member, or fine
      const int64_t number = found->second.count;
      const std::string text = mine.text_of(number);
      const std::string call = (text.empty() ? "a call" : text) + text_of_number(number, group);
      return {text_of_return(roster.name(other), name, call), at_fault};
    }
    const auto lacks_answer = [&](bool to_send, int64_t calls_of_rank, int64_t answers) {
      return answers >= calls_of_rank
                 ? ""
                 : text_of_missing_answer(roster.name(other), name, to_send,
                                          std::string(to_send ? "send" : "recv") + " " + std::to_string(answers + 1) +
                                              (to_send ? " to it" : " from it"));
    };
    if (auto text = lacks_answer(true, calls.sent[other], theirs.received[rank]); !text.empty())
      return {text, at_fault};
    if (auto text = lacks_answer(false, calls.received[other], theirs.sent[rank]); !text.empty())
      return {text, at_fault};
  }
  return {};
}

std::string standstill(const std::vector<RankState>& states, const Roster& roster) {
  const int ranks = static_cast<int>(states.size());
  std::vector<int> waits_for(ranks, -1);  // a stuck rank that each rank waits for
  std::vector<bool> stuck;
  for (const auto& state : states) {
    const OpenCall& call = state.call;
    stuck.push_back(state.kind == Kind::waits && !call.polled && (call.is_message() || call.number >= 0));
  }
  for (bool changed = true; changed;) {  // a rank that waits for no stuck rank will go on
    changed = false;
    for (int rank = 0; rank < ranks; ++rank) {
      if (!stuck[rank]) continue;
      int other = 0;
      while (other < ranks && !(stuck[other] && lacks(states, rank, other))) ++other;
      waits_for[rank] = other;
      if (other < ranks) continue;
      stuck[rank] = false;
      changed = true;
    }
  }
  int rank = 0;
  while (rank < ranks && !stuck[rank]) ++rank;
  if (rank == ranks) return "";
  for (int step = 0; step < ranks; ++step) rank = waits_for[rank];  // by then it is on the circle
  std::string text;
  const int first = rank;
  do {
    text += (text.empty() ? "" : ", ") + roster.name(rank) + " waits in " + states[rank].call.where() + " for " +
            roster.name(waits_for[rank]);
    rank = waits_for[rank];
  } while (rank != first);
  return text_of_standstill(text);
}

std::string missing_ranks(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster) {
  std::string text;
  for (int other = 0; other < static_cast<int>(states.size()); ++other) {
    const RankState& state = states[other];
    if (call.is_message() ? other != call.peer : other == call.rank || !call.concerns(other)) continue;
    if (state.kind == Kind::waits && state.call.number == call.number && state.call.message == call.message &&
        state.call.among.name == call.among.name) {
      continue;
    }
    text += (text.empty() ? "" : " and ") + roster.name(other);
    switch (state.kind) {
      case Kind::waits:
        text += ", which waits in " + state.call.where();
        break;
      case Kind::returned:
        text += ", which has returned";
        break;
      case Kind::busy:
        text += ", which has not made this call";
    }
  }
  return text;
}

std::string text_of_lateness(const OpenCall& call, std::chrono::milliseconds timeout,
                             const std::vector<RankState>& states, const Roster& roster) {
  const std::string missing = missing_ranks(call, states, roster);
  return text_of_timeout(roster.name(call.rank), timeout, call.where(), missing.empty() ? "its data" : missing);
}

std::string text_of_silence(int process, const Roster& roster) {
  return "the process of " + roster.name_process(process) +
         " is gone: it ended without a word (killed, or it crashed), or it stands still";
}

std::string text_of_stop(const OpenCall& call, const std::vector<RankState>& states, const Roster& roster) {
  const std::string missing = missing_ranks(call, states, roster);
  return roster.name(call.rank) + " waited in " + call.where() + (missing.empty() ? "" : " for " + missing) +
         ": stopped by request";
}

std::string text_of_stop_at_the_end(int process, const Roster& roster) {
  return "the ranks of " + roster.name_process(process) + " had returned, others had not: stopped by request";
}

std::string whereabouts(const OpenCall& call, const Calls& calls, int64_t steps, const Roster& roster) {
  const CollectiveCalls& of_group = calls.of(call.among.name);
  const int64_t last = of_group.complete - 1;
  std::string text = roster.name(call.rank) + " was in " + call.where() + "; ";
  if (last < 0) {
    text += "no collective call" + call.among.text() + " was complete yet";
  } else {
    const std::string name = of_group.text_of(last);
    text += "the last complete one was collective call " + std::to_string(last) + call.among.text() +
            (name.empty() ? "" : ", " + name);
  }
  return text + text_of_last_step(steps);
}

std::string last_calls(const std::vector<std::optional<Calls>>& by_rank, int64_t steps) {
  std::map<std::string, std::string> ranks;  // ranks by their last call, since most ranks have the same one
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const auto& calls = by_rank[rank];
    std::string& list = ranks[!calls ? "not known" : calls->last.empty() ? "none" : calls->last];
    list += (list.empty() ? " " : ", ") + std::to_string(rank);
  }
  std::string text;
  for (const auto& [call, list] : ranks) {
    const bool several = list.find(',') != std::string::npos;
    text += std::string(text.empty() ? "Last calls: " : "; ") + (several ? "ranks" : "rank") + list + ": " + call;
  }
  return text + text_of_last_step(steps);
}

}  // namespace lockstep::comm
