#!/usr/bin/env python3
"""What the others do when one of several processes fails that share a GPU over NCCL.

  benchmarks/nccl_failures.py LOCKSTEP [CASE...]

LOCKSTEP is the program of a build with tests; CASE is part of a case's name, to run those alone. Prints a line per case: how long it took from
the signal until somebody named what was wrong, and until all had ended; and what was left (processes, the job's port,
memory of the GPU). Exit code 1 if one was wrong. NCCL must be 2.30 or newer. gpu_report calls this.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SOON = 2  # seconds until somebody names it
ENDED = 6  # seconds more until all have ended: lockstep launch ends a process that stands still 5 s later
LIMIT = 120  # seconds that anything may take
ENVIRONMENT = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
lockstep = str(Path(sys.argv[1]).resolve())
nccl_ranks = next((str(found) for folder in Path(lockstep).parents if (found := folder / "tests/nccl_ranks").exists()), "")
only = sys.argv[2:]


def training(folder, flags):
    grain = () if "--cuda-graph" in flags else ("--grain", "500")
    return [lockstep, "train", "--devices", "cuda:0", "--data", "synthetic", "--model", "mlp", "--width", "0.125",
            "--batch-size", "6000", "--runs-dir", str(folder), "--name", "run", *flags, *grain]


class Job:
    """A job of three processes of a command that share cuda:0, in a session of its own."""

    def __init__(self, folder, command, launch=(), changes_of_1=""):
        # Each process writes its number: lockstep's children are not all ranks.
        started = f'echo $$ > "{folder}/pid-$RANK-$$"; [ $RANK != 1 ] || {{ {changes_of_1 or ":"}; }}; exec "$0" "$@"'
        self.folder, self.text, self.text_changed = folder, "", threading.Condition()
        # A process's arguments hold the folder, by which alive() knows it.
        self.process = subprocess.Popen(
            [lockstep, "launch", "-n", "3", *launch, "sh", "-c", started, *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT, start_new_session=True)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        self.port = None

    def _read(self):
        while said := os.read(self.process.stdout.fileno(), 65536):
            with self.text_changed:
                self.text += said.decode(errors="replace")
                self.text_changed.notify_all()

    def wait_for(self, pattern):
        with self.text_changed:
            if not self.text_changed.wait_for(lambda: re.search(pattern, self.text), LIMIT):
                raise RuntimeError(f"it did not say {pattern}")

    def pid_of(self, rank):
        """The newest process of that rank."""
        for _ in range(LIMIT * 100):
            found = sorted(self.folder.glob(f"pid-{rank}-*"), key=lambda path: path.stat().st_mtime)
            if found and (text := found[-1].read_text().strip()):
                for word in words_of(text, "environ"):
                    if word.startswith("MASTER_PORT="):
                        self.port = word.removeprefix("MASTER_PORT=")
                return int(text)
            time.sleep(0.01)
        raise RuntimeError(f"rank {rank} did not start")

    def end(self):
        """Waits for the end. Gives the exit code."""
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not ended after {LIMIT} s") from None

    def kill(self):
        self.process.kill()
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join()

    def alive(self):
        """Gives the ranks' processes that there are. Others may have got their numbers, but have no such argument."""
        return [int(pid) for path in self.folder.glob("pid-*")
                if (pid := path.read_text().strip()) and str(self.folder) in words_of(pid, "cmdline")]

    def leftovers(self):
        """Gives what the job left behind, in words."""
        left = [f"process {pid}" for pid in self.alive()]
        with socket.socket() as probe:
            if self.port and probe.connect_ex(("127.0.0.1", int(self.port))) == 0:
                left.append(f"port {self.port}")
        return left


def words_of(pid, kind):
    """Gives the process's arguments ("cmdline") or environment ("environ"); none if it is gone."""
    try:
        return Path(f"/proc/{pid}/{kind}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def memory_used():
    """Gives the MiB in use on the GPU; None without nvidia-smi."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, timeout=30, check=True).stdout
        return int(said.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def weights(text):
    found = re.findall(r"^weights ([0-9a-f]{16})", text, re.MULTILINE)
    return found[-1] if found else None


class Cases:
    def __init__(self):
        self.failed = False
        self.memory = memory_used()

    def run(self, name, act, *flags, fails=None, says=None, within=SOON, codes=range(256), then=None, **job):
        """`act` gets the job and gives the time of the fault. Within so many seconds the job must say what `says` matches.
        In the end its exit code must be one of `codes`. `then` gets the job's folder and gives a text of its own. The job
        trains with these flags, or `fails` as nccl_ranks does."""
        if only and not any(part in name for part in only):
            return ""
        with tempfile.TemporaryDirectory() as folder:
            command = [nccl_ranks, "fails", "cuda:0", fails, folder] if fails else training(folder, flags)
            made = Job(Path(folder), command, **job)
            wrong = []
            named = seconds = float("nan")
            ended = None
            try:
                fault = act(made)
                if says:
                    made.wait_for(says)
                    named = time.monotonic() - fault
                    if named > within:
                        wrong.append(f"named after more than {within} s")
                ended = made.end()
                seconds = time.monotonic() - fault
                if says and seconds > named + ENDED:
                    wrong.append(f"not ended {ENDED} s later")
                if ended not in codes:
                    wrong.append(f"exit code {ended}")
                wrong += made.leftovers()
                now = memory_used()
                if None not in (self.memory, now) and now > self.memory + 64:
                    wrong.append(f"{now - self.memory} MiB of the GPU")
            except RuntimeError as error:
                wrong.append(str(error))
            finally:
                made.kill()
            said = re.findall(r"error: (.*)", made.text) or re.findall(r"lockstep launch: (.*)", made.text)
            print(f"| {name} | {named:.1f} | {seconds:.1f} | {ended} | {said[0][:160] if said else ''} | "
                  f"{'; '.join(wrong) or 'ok'} |", flush=True)
            if wrong:
                self.failed = True
                print(made.text[-3000:], flush=True)
            return then(folder) if then else made.text


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the job that runs is killed
    print("| case | named after s | ended after s | exit code | first words | result |\n|---|---:|---:|---:|---|---|")
    cases = Cases()
    long, gone = ("--epochs", "100000"), r"the process of rank 1 .* is gone"

    def signalled(rank, number, pattern=None, pause=0.0):
        def act(job):
            if pattern:
                job.wait_for(pattern)
            victim = job.pid_of(rank)
            time.sleep(pause)
            fault = time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(victim, number)
            return fault

        return act

    in_training = r"epoch +2/"
    for pause in (0.0, 0.3, 1.0, 2.0):
        cases.run(f"kill -9 {pause} s after its start", signalled(1, signal.SIGKILL, pause=pause), *long, codes=(137,),
                  says=r"process 1 of 3 did not come|" + gone + r"|rank 1 ended")
    for rank in range(3):
        cases.run(f"kill -9 of rank {rank} in training", signalled(rank, signal.SIGKILL, in_training), *long, codes=(137,),
                  says=f"the process of rank {rank} .* is gone")
    cases.run("kill -9 in replays", signalled(1, signal.SIGKILL, in_training), *long, "--cuda-graph", codes=(137,), says=gone)
    for pause in (0.0, 0.05, 0.2):
        cases.run(f"kill -9 {pause} s after the last epoch", signalled(1, signal.SIGKILL, r"epoch +2/2", pause),
                  "--epochs", "2", codes=(0, 137))
    cases.run("SIGSTOP for longer than --silence 2", signalled(1, signal.SIGSTOP, in_training), *long, "--silence", "2",
              within=2 + SOON, says=r"rank 1 .* is gone")
    cases.run("SIGSTOP, --timeout 4", signalled(1, signal.SIGSTOP, in_training), *long, "--silence", "60", "--timeout",
              "4", within=4 + SOON, says=r"waited 4 s")
    if cases.memory is None:
        print("| too little memory on rank 1 | | | | | not run: no nvidia-smi |")
    else:
        cases.run("too little memory on rank 1", lambda job: (job.pid_of(1), time.monotonic())[1], "--epochs", "2",
                  within=LIMIT, says=r"rank 1 .*out of memory",
                  changes_of_1="export PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.0001")

    def as_told(job):
        job.wait_for("fails now")
        fault = time.monotonic()
        job.pid_of(0)
        return fault

    if not nccl_ranks:
        print("| ranks that throw, return early, make other calls | | | | | not run: no tests/nccl_ranks |")
    else:
        for where in ("first", "group", "call", "values", "replay"):
            cases.run(f"throws ({where})", as_told, fails=f"{where}-throws", codes=(3,),
                      says=r"process 0: .*rank 1 .*: out of luck")
        for where in ("first", "group", "call"):
            cases.run(f"kill -9 ({where})", as_told, fails=f"{where}-killed", codes=(137,), says=r"process 0: .*" + gone)
        cases.run("returns early", as_told, fails="return-early", codes=(3,), says=r"process 0: rank 1 .* returned without")
        cases.run("calls with another size", as_told, fails="size-differs", codes=(3,), within=3 + SOON,
                  says=r"process 0: .*(Last calls: |calls differ)")

    # A job that is asked to stop keeps the run, which goes on to the same bits. So does an elastic job with a kill.
    def resumed(folder):
        command = [lockstep, "launch", "-n", "3", lockstep, "train", "--resume", f"{folder}/run"]
        return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT,
                              timeout=LIMIT, check=False).stdout

    epochs = ("--epochs", "12")
    peace = cases.run("elastic, in peace", lambda job: time.monotonic(), *epochs, codes=(0,), launch=("--elastic",))
    stopped = cases.run(
        "SIGTERM of the launcher, then resumed",
        lambda job: (job.wait_for(in_training), job.pid_of(0), time.monotonic(), os.kill(job.process.pid, signal.SIGTERM))[2],
        *epochs, codes=(143,), says="the run is kept in", then=resumed)
    killed = cases.run("elastic, kill -9", signalled(1, signal.SIGKILL, in_training), *epochs, codes=(0,),
                       launch=("--elastic",))
    if killed and "process 3 has joined" not in killed:
        cases.failed = True
        print("no successor joined")
    for name, text in (("resumed", stopped), ("killed", killed)):
        if text and peace and (not weights(peace) or weights(text) != weights(peace)):
            cases.failed = True
            print(f"the weights of the job that was {name} are {weights(text)}, not {weights(peace)}: {text[-1000:]}")
    sys.exit(cases.failed)


main()
