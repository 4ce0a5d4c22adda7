// Succession: lets a run() outlive processes. Each set of processes that works together is a generation, with a world
// of its own, and run() calls its body once for each. Whoever starts the run brings it (RunOptions::succession); run()
// knows no more of it than this. Used on the thread that calls run().
#pragma once

namespace lockstep {

class Succession {
 public:
  virtual ~Succession() = default;

  // Waits until this process is in the newest generation. Gives false if the job is done without it.
  virtual bool enter() = 0;

  // The generation has broken off, since one of its processes is gone. Waits until all agree on another one.
  virtual void leave() = 0;

  // The bodies of the generation's ranks have returned. Gives whether another generation follows.
  virtual bool goes_on() = 0;
};

}  // namespace lockstep
