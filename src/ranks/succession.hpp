// A Succession lets a run() outlive processes. Each set of processes that works together is a generation, with a world
// of its own, and run() calls its body once for each. Whoever starts the run brings it (RunOptions::succession); run()
// knows only these functions. Use it from the thread that calls run().
#pragma once

namespace lockstep {

class Succession {
 public:
  virtual ~Succession() = default;

  // Waits until this process is in the newest generation. Gives false if the job is done without it.
  virtual bool enter() = 0;

  // Waits until all agree on another generation. Call it when a process is gone, which breaks the generation off.
  virtual void leave() = 0;

  // Gives whether another generation follows. Call it when the bodies of the generation's ranks have returned.
  virtual bool goes_on() = 0;
};

}  // namespace lockstep
