// Says: template-name .lockstep::DataParallel. without an argument list|DataParallel. requires template arguments
#include "probe.hpp"

struct Trainer {
  lockstep::DataParallel net;
};
