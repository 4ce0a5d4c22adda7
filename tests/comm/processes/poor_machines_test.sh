#!/usr/bin/env bash
# Machines made of namespaces that lack something: poor_machines_test.sh PROGRAM LOCKSTEP. IPv6 alone, IPv4 alone, no network,
# no name, no room in /tmp and /dev/shm. Exit code 77: this machine does not allow it.
# shellcheck source=tests/comm/processes/namespaces.sh
source "$(dirname "$0")/namespaces.sh"
out=$(mktemp)
folder=$(mktemp -d)  # where these machines have file systems of their own
made+=("$out" "$folder")
unshare --net --mount --uts true 2>/dev/null || skip "this machine does not allow namespaces"

# on_machine SET_UP WORDS...: a command, on a machine of its own that SET_UP has made poor. Its output goes to $out.
on_machine() {
  local set_up=$1
  shift
  timeout 60 unshare --net --mount --uts bash -c "set -e; $set_up; exec \"\$@\"" bash "$@" >"$out" 2>&1
}

# Two processes without a launcher that find each other at $1, or as mpirun starts them if that is empty.
# shellcheck disable=SC2016  # these are for another shell
by_hand='for rank in 0 1; do
  if [[ -n $0 ]]; then
    export RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 MASTER_ADDR=$0 MASTER_PORT=29400
  else
    export OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=$rank
    export OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=poor-$$
  fi
  LOCKSTEP_RENDEZVOUS_TIMEOUT=5 "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || result=$?; done
exit ${result:-0}'

set -e
printf '127.0.0.1 localhost\n::1 localhost\n' >"$folder/hosts"
mkdir "$folder/room"
up="mount --bind '$folder/hosts' /etc/hosts; ip link set lo up"
for without in 127.0.0.1/8 ::1/128; do
  echo "without $without: under the launcher, an elastic job, by hand, and as mpirun starts processes"
  one_kind="$up; ip addr del $without dev lo"
  on_machine "$one_kind" "$lockstep" launch -n 2 "$program" collectives || { cat "$out"; exit 1; }
  (($(grep -c "^process .: ok" "$out") == 2))
  on_machine "$one_kind; mount -t tmpfs poor '$folder/room'; cd '$folder/room'" "$lockstep" launch -n 2 --elastic "$program" fits cpu run ||
    { cat "$out"; exit 1; }
  on_machine "$one_kind" bash -c "$by_hand" localhost "$program" collectives || { cat "$out"; exit 1; }
  on_machine "$one_kind" bash -c "$by_hand" "" "$program" collectives || { cat "$out"; exit 1; }
  (($(grep -c "^process .: ok" "$out") == 2))
done

echo "no network at all: an error at once that says what to do"
begin=$SECONDS
if on_machine true "$lockstep" launch -n 2 "$program" collectives; then exit 1; fi
grep "lockstep: error: this machine does not reach itself, neither at 127.0.0.1 nor at ::1" "$out"
grep -q "ip link set lo up" "$out"
if on_machine true bash -c "$by_hand" 127.0.0.1 "$program" collectives; then exit 1; fi
grep "no network interface of this machine reaches 127.0.0.1" "$out"
((SECONDS - begin < 30))

echo "a machine whose name nobody knows"
on_machine "$up; hostname nobody-knows-this" "$lockstep" launch -n 2 "$program" collectives || { cat "$out"; exit 1; }

echo "no room in the temporary folder and /dev/shm: the launcher does without, and mpirun's way names the file"
full="$up; export TMPDIR='$folder/room'; for at in '$folder/room' /dev/shm; do
  mount -t tmpfs -o size=4k poor \$at; head -c 8192 /dev/zero >\$at/full 2>/dev/null || true
done"
on_machine "$full" "$lockstep" launch -n 2 "$program" collectives || { cat "$out"; exit 1; }
if on_machine "$full" bash -c "$by_hand" "" "$program" collectives; then exit 1; fi
grep "cannot write '$folder/room/lockstep-.*': .*No space left on device" "$out"

echo "two machines with IPv6 alone between them"
add_two_hosts
for side in a b; do
  ip -n "$name-$side" link set lo up && ip -n "$name-$side" addr del 127.0.0.1/8 dev lo
  ip -n "$name-$side" addr add "fd00:10::$side/64" dev eth0 nodad && ip -n "$name-$side" link set eth0 up
done
pids=()
for rank in 0 1; do
  ip netns exec "$name-$( ((rank == 0)) && echo a || echo b)" env RANK=$rank WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
    MASTER_ADDR=fd00:10::a MASTER_PORT=29400 "$program" collectives cpu &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
