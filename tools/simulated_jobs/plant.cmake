# cmake -DSOURCES=src -DCOPIES=DIR -DOTHERS=io/…;… -P plant.cmake: copies of the sources in which bugs can be switched on. Fails if
# a text is not found exactly once, so that the list follows the sources.
file(COPY ${SOURCES}/comm/processes ${SOURCES}/comm/meeting DESTINATION ${COPIES}/comm)
foreach(name IN LISTS OTHERS)
  get_filename_component(room ${name} DIRECTORY)
  file(COPY ${SOURCES}/${name}.cpp DESTINATION ${COPIES}/${room})
endforeach()
set(bugs "")
set(count 0)

# Replaces TEXT in FILE by PUT, in which BUG stands for: this bug is on. A fifth argument names the kind of the runs
# that can find it.
function(plant what file text put)
  math(EXPR count "${count} + 1")
  set(count ${count} PARENT_SCOPE)
  set(bugs "${bugs}{\"${what}\", \"${ARGV4}\"},\n" PARENT_SCOPE)
  file(READ ${COPIES}/${file} source)
  string(FIND "${source}" "${text}" first)
  string(FIND "${source}" "${text}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "${file} does not have exactly once: ${text}")
  endif()
  string(REPLACE "BUG" "lockstep::simulation::planted(${count})" put "${put}")
  string(REPLACE "${text}" "${put}" source "${source}")
  file(WRITE ${COPIES}/${file} "${source}")
endfunction()

plant("a failure does not interrupt the waits" comm/processes/waits.cpp
  [[      if (open.interrupt) open.interrupt();]] [[      if (!BUG && open.interrupt) open.interrupt();]])
plant("a connected group wakes nobody" comm/meeting/attempt.hpp
  [[      exception_ = std::move(exception);
    }
    changed_.notify_all();]]
  [[      exception_ = std::move(exception);
    }
    if (!BUG) changed_.notify_all();]])
plant("a failure does not wake who waits for a connection" comm/meeting/attempt.hpp
  [[      woken_ = true;
    }
    changed_.notify_all();]]
  [[      woken_ = true;
    }
    if (!BUG) changed_.notify_all();]])
plant("a failure does not close the connections" comm/processes/watched_world.cpp
  [[monitor_->start([this] { close(); },]] [[monitor_->start([this] { if (!BUG) close(); },]])
plant("the last failure counts, not the first" comm/processes/board.cpp
  [[return failure_in(agreed("failure", to_stored(failure)));]]
  [[if (BUG && !store_is_lost_) store_->set("failure", to_stored(failure));
  return failure_in(agreed("failure", to_stored(failure)));]])
plant("a run is over when all processes but one are done" comm/processes/board.cpp
  [[stored_count(*store_, place) >=]] [[stored_count(*store_, place) + (BUG ? 1 : 0) >=]])
plant("where a survivor was is not agreed on" comm/processes/board.cpp
  [[return agreed("where", text);]] [[return BUG ? text : agreed("where", text);]])
plant("a process beats once only" comm/processes/watchdog.cpp
  [[  board_.put_heartbeat(next_heartbeat());]] [[  if (!BUG) board_.put_heartbeat(next_heartbeat());]])
plant("hearts are watched from the machine's start on" comm/processes/watchdog.cpp
  [[  std::fill(seen_.begin(), seen_.end(), Clock::now());]]
  [[  if (!BUG) std::fill(seen_.begin(), seen_.end(), Clock::now());]])
plant("no process is ever taken for dead" comm/processes/watchdog.cpp
  [[if (process == process_ ||]] [[if (BUG || process == process_ ||]])
plant("failures of other processes are not looked for" comm/processes/watchdog.cpp
  [[!failure.empty()) return waits_.fail(failure);]] [[!BUG && !failure.empty()) return waits_.fail(failure);]])
plant("what a rank waits in is not told" comm/processes/watchdog.cpp
  [[    board_.put_state(rank, text);]] [[    if (!BUG) board_.put_state(rank, text);]])
plant("a closed connection is blamed on nobody" comm/processes/monitor.cpp
  [[+ kSearch; failure().empty()]] [[+ kSearch; !BUG && failure().empty()]])
plant("calls that nobody answered are not looked for" comm/processes/monitor.cpp
  [[if (failure().empty()) check_calls();]] [[if (!BUG && failure().empty()) check_calls();]])
plant("a process does not wait until all are done" comm/processes/monitor.cpp
  [[while (failure().empty() && !board_.all_come(place))]]
  [[while (!BUG && failure().empty() && !board_.all_come(place))]])
plant("the watchdog's thread is left to itself" comm/processes/watchdog.cpp
  [[if (thread_.joinable()) thread_.join();]]
  [[if (!thread_.joinable()) return;
  if (BUG) return thread_.detach();
  thread_.join();]])
plant("a rank that returned is not noted" comm/processes/waits.cpp
  [[returned_.insert(rank);]] [[if (!BUG) returned_.insert(rank);]])
plant("the keeper of the store does not wait for farewells" comm/meeting/meeting.cpp
  [[while (rendezvous.hosts_store() &&]] [[while (!BUG && rendezvous.hosts_store() &&]])
plant("who ended before the meeting is not announced" comm/meeting/meeting.cpp
  [[  call_off(*store_of_run(store, launch, run + 1),]] [[  if (!BUG) call_off(*store_of_run(store, launch, run + 1),]])
plant("who was killed in the run is not announced" comm/meeting/meeting.cpp
  [[if (run > 0 && process.failed)]] [[if (!BUG && run > 0 && process.failed)]])

plant("a sum is not made an average" comm/processes/gloo_reduction.cpp
  [[if (op == ReduceOp::AVG) buffer]] [[if (!BUG && op == ReduceOp::AVG) buffer]])
plant("calls have no texts in their tags" comm/processes/process_backend.cpp
  [[static_cast<uint32_t>(number) << 16 | static_cast<uint32_t>(fingerprint_of(text));]]
  [[static_cast<uint32_t>(number) << 16 | static_cast<uint32_t>(BUG ? 0 : fingerprint_of(text));]])
plant("a file's bytes are not flushed before it gets its name" io/atomic_file.cpp
  [[if (files_.fsync(fd_) != 0)]] [[if (!BUG && files_.fsync(fd_) != 0)]])
plant("a file's name is not flushed" io/atomic_file.cpp
  [[if (files_.sync_folder(place_.parent_path()) != 0)]] [[if (!BUG && files_.sync_folder(place_.parent_path()) != 0)]])

plant("a damaged checkpoint is taken for a whole one" io/safetensors.cpp
  [[digest_of(metadata, tensors); digest != entry.mapped())]]
  [[digest_of(metadata, tensors); !BUG && digest != entry.mapped())]] "lost fsync")
plant("the newest generation is set, and not compared" survive/generations.cpp
  [[    if (store_->compareSet(kNewest, generation_text(before), text) == text) return after;]]
  [[    if (BUG) {
      store_->set(kNewest, text);
      return after;
    }
    if (store_->compareSet(kNewest, generation_text(before), text) == text) return after;]] "elastic")
plant("the state comes from the first, and not from the most advanced" trainer/elastic.cpp
  [[while (positions[source].item<int64_t>() != farthest)]]
  [[while (!BUG && positions[source].item<int64_t>() != farthest)]] "elastic")
plant("one joins a generation that has not begun" survive/generations.cpp
  [[|| !has_begun(generation.number)) return false;]] [[|| (!BUG && !has_begun(generation.number))) return false;]]
  "elastic")
plant("only the first generation is called off" survive/elastic_launch.cpp
  [[for (; called_off_ < now.number; ++called_off_) {]]
  [[for (; called_off_ < (BUG ? std::min(now.number, 1) : now.number); ++called_off_) {]] "elastic")
plant("a member beats no longer once it has left a generation" survive/elastic_job.cpp
  [[      generations.beat(launch_.member, {beats, own.limit(), silence_.most});]]
  [[      if (!BUG || generation_ == 0)
        generations.beat(launch_.member, {beats, own.limit(), silence_.most});]] "elastic")
plant("a successor's successor gets its number for its place" survive/elastic_launch.cpp
  [[vacant_.push_back(members_[member].place);]] [[vacant_.push_back(BUG ? member : members_[member].place);]] "two faults")
plant("who takes over a run does not wait for its folder's lock" trainer/take_over.cpp
  [[if (has_run && is_known) wait_for_lock(run, how.patience);]]
  [[if (!BUG && has_run && is_known) wait_for_lock(run, how.patience);]] "the keeper stops")
plant("who takes over a run writes nothing" trainer/run_folder.cpp
  [[  if (folder_.empty()) return;
  CheckpointFolder]]
  [[  if (folder_.empty() || (BUG && goes_on_)) return;
  CheckpointFolder]] "elastic")
plant("who takes over a run begins it anew" trainer/take_over.cpp
  [[  if (has_run && !is_known) clear_what_was_begun(run, how);]]
  [[  if (BUG && has_run && how.met) clear_run(run);
  if (has_run && !is_known) clear_what_was_begun(run, how);]] "elastic")
plant("what was begun before all had met is in the way" trainer/take_over.cpp
  [[  wait_for_lock(run, how.patience);
  clear_run(run);]]
  [[  wait_for_lock(run, how.patience);
  if (!BUG) clear_run(run);]] "elastic")
plant("what killed writers left stays" trainer/checkpoint_folder.cpp
  [[: io::temporaries_in(folder_)) files_.unlink(file);]] [[: io::temporaries_in(folder_)) BUG ? 0 : files_.unlink(file);]]
  "elastic")
file(WRITE ${COPIES}/planted_bugs.inc "${bugs}")
