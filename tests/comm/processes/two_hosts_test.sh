#!/usr/bin/env bash
# Two hosts made of network namespaces, with two processes each: two_hosts_test.sh PROGRAM. Exit code 77: this machine
# does not allow it.
# shellcheck source=tests/comm/processes/namespaces.sh
source "$(dirname "$0")/namespaces.sh"
address_of_a=10.213.77.1
errors=$(mktemp)
key=$(mktemp)
made+=("$errors" "$key")

add_two_hosts
for side in a b; do
  address=10.213.77.$([[ $side == a ]] && echo 1 || echo 2)
  ip -n "$name-$side" addr add "$address/24" dev eth0 && ip -n "$name-$side" link set eth0 up &&
    ip -n "$name-$side" link set lo up || skip "the namespaces cannot be given addresses"
done

# What ip netns exec puts in the place of /etc/hosts. As on Debian, host a's own name is loopback on host a itself.
mkdir -p "/etc/netns/$name-a" "/etc/netns/$name-b" || skip "the namespaces cannot be given names"
echo "127.0.1.1 first-host" >"/etc/netns/$name-a/hosts"
echo "$address_of_a first-host" >"/etc/netns/$name-b/hosts"

# job MASTER WORDS...: ranks 0 and 1 on host a, ranks 2 and 3 on host b, variables as torchrun sets them.
job() {
  local master=$1 rank pids=() result=0
  shift
  for rank in 0 1 2 3; do
    ip netns exec "$name-$( ((rank < 2)) && echo a || echo b)" env \
      RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 MASTER_ADDR=$master MASTER_PORT=29400 \
      "$program" "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || result=$?
  done
  return $result
}

set -e
echo "one rank per process"
job $address_of_a collectives cpu
echo "the same with a key"
head -c 32 /dev/urandom >"$key"
LOCKSTEP_JOB_KEY_FILE=$key job $address_of_a collectives cpu
echo "two threads in each of two processes on each of two hosts"
job $address_of_a collectives 4xcpu
echo "the first host by its name, which means loopback there"
job first-host collectives cpu
echo "a rank that throws on one host is named on the other"
if job $address_of_a throws cpu 2>"$errors"; then exit 1; fi
cat "$errors"
(($(grep -c "rank 1 (cpu): out of luck" "$errors") == 4))
