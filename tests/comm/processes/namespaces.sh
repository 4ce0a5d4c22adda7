# What tests on machines of namespaces begin with. They source it, with their arguments PROGRAM [LOCKSTEP]. Exit code 77: this
# machine does not allow them.
# shellcheck shell=bash disable=SC2034  # they use program and lockstep
set -uo pipefail
program=$1
lockstep=${2-}
name=lockstep-$$
made=("/etc/netns/$name-a" "/etc/netns/$name-b")  # files and folders, also those that they add

skip() {
  echo "skipped: $1"
  exit 77
}

clean_up() {
  # Only what this script made.
  ip netns del "$name-a" 2>/dev/null
  ip netns del "$name-b" 2>/dev/null
  rm -rf "${made[@]}"
}
trap clean_up EXIT

command -v ip >/dev/null || skip "there is no ip (Debian: iproute2)"
(($(id -u) == 0)) || skip "making namespaces needs root"

# Two hosts, $name-a and $name-b, with eth0 of each at the other's. They have no addresses.
add_two_hosts() {
  ip netns add "$name-a" 2>/dev/null && ip netns add "$name-b" || skip "this machine does not allow network namespaces"
  ip -n "$name-a" link add eth0 type veth peer name eth0 netns "$name-b" || skip "no veth devices here"
}
