// kept_choice: keeps in the cache folder what a measurement has chosen on this machine, so that later processes choose
// the same and need not measure. Thread-safe. If several processes measure at the same time, all take what the first
// one keeps.
#pragma once

#include <functional>
#include <string>

namespace lockstep::io {

// Gives the word that is kept for the key, or else the one that `measure` gives, which is kept then. Name in the key
// all that the choice depends on. The folder is $XDG_CACHE_HOME/lockstep or ~/.cache/lockstep; delete its files
// "choice-*" to have all measured again. Where no file can be written, it gives `otherwise` and does
// not measure, since measurements of several processes may differ.
std::string kept_choice(const std::string& key, const std::string& otherwise,
                        const std::function<std::string()>& measure);

}  // namespace lockstep::io
