"""Who takes part, and where it is found. A contender that cannot be found keeps its place, with the reason."""

import dataclasses
import fnmatch
import json
import os
import pathlib
import subprocess
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
checkout = here.parent.parent
settings = {"batch_size": 256, "lr": 0.2, "seed": 0}
process_limit_seconds = 3600

# (key, name in the report, kind, arguments)
on_cpu = [
    ("lockstep-1", "lockstep, 1 rank", "lockstep", ["--devices", "cpu"]),
    ("lockstep-2", "lockstep, 2 ranks", "lockstep", ["--devices", "2xcpu"]),
    ("lockstep-grain", "lockstep, 2 ranks, grains of 32", "lockstep", ["--devices", "2xcpu", "--grain", 32]),
    ("lockstep-processes", "lockstep, 2 ranks in 2 processes", "lockstep-launch", ["--devices", "cpu"]),
    ("pytorch-1", "PyTorch, 1 thread", "pytorch", ["--threads", 1]),
    ("pytorch-2", "PyTorch, 2 threads", "pytorch", ["--threads", 2]),
    ("ddp", "PyTorch DDP over Gloo, 2 processes", "pytorch", ["--processes", 2]),
    ("compile", "PyTorch, torch.compile, 2 threads", "pytorch", ["--compile", "--threads", 2]),
    ("compile-ddp", "PyTorch DDP over Gloo, torch.compile, 2 processes", "pytorch", ["--compile", "--processes", 2]),
    ("mxnet-1", "MXNet, cpu(0), 1 thread", "mxnet", ["--contexts", 1]),
    ("mxnet-contexts", "MXNet, cpu(0) and cpu(1), 1 thread each", "mxnet", ["--contexts", 2]),
    ("mxnet-2", "MXNet, cpu(0), 2 threads", "mxnet", ["--contexts", 1]),
    ("limit-1", "the limit: SGEMM's rate, 1 thread", "sgemm", ["--threads", 1]),
    ("limit-2", "the limit: SGEMM's rate, 2 threads", "sgemm", ["--threads", 2]),
]
on_gpu = [
    ("lockstep-gpu", "lockstep, 1 rank on cuda:0", "lockstep", ["--devices", "cuda:0"]),
    ("lockstep-2-gpu", "lockstep, 2 ranks on cuda:0", "lockstep", ["--devices", "2xcuda:0"]),
    ("lockstep-graph", "lockstep, CUDA graph, 1 rank on cuda:0", "lockstep", ["--devices", "cuda:0", "--cuda-graph"]),
    ("lockstep-2-graph", "lockstep, CUDA graph, 2 ranks on cuda:0", "lockstep",
     ["--devices", "2xcuda:0", "--cuda-graph"]),
    ("pytorch-gpu", "PyTorch, eager on cuda:0", "pytorch", ["--device", "cuda"]),
    ("pytorch-graph", "PyTorch, CUDA graph on cuda:0", "pytorch", ["--device", "cuda", "--graph"]),
    ("pytorch-compile", "PyTorch, torch.compile on cuda:0", "pytorch", ["--device", "cuda", "--compile"]),
]
environments = {key: {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
                for key, threads in (("mxnet-1", "1"), ("mxnet-contexts", "1"), ("mxnet-2", "2"))}


class Unavailable(Exception):
    """Why a contender has no figures; its row in the report says so."""


@dataclasses.dataclass
class Contender:
    key: str
    name: str
    kind: str
    command: list  # without the number of epochs
    env: dict
    unavailable: str | None = None
    rounds: list = dataclasses.field(default_factory=list)  # the epochs of each round's process
    one_step: float | None = None  # the seconds of a process that does one step

    def train(self, epochs):
        """The metrics of each epoch of a new process."""
        with tempfile.TemporaryDirectory() as folder:
            command = [*self.command, "--epochs", str(epochs)]
            keeps_run = self.kind.startswith("lockstep")
            if keeps_run:  # it keeps its metrics in the run's folder; the others print them
                command += ["--name", "bench", "--runs-dir", folder]
            text = output_of(command, self.env)
            if keeps_run:
                text = pathlib.Path(folder, "bench", "metrics.jsonl").read_text()
        metrics = [json.loads(line) for line in text.splitlines()]
        if len(metrics) != epochs:
            raise Unavailable(f"it reported {len(metrics)} epochs of {epochs}")
        return metrics


def say(text):
    print(text, file=sys.stderr, flush=True)


def output_of(command, env=None):
    command = [str(word) for word in command]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=process_limit_seconds)
    except OSError as error:
        raise Unavailable(f"cannot start {command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} took longer than {process_limit_seconds} s") from error
    if done.returncode != 0:
        name, reason = pathlib.Path(command[0]).name, reason_in(done.stderr)
        raise Unavailable(f"{name} ended with code {done.returncode}: {reason}")
    return done.stdout


def reason_in(errors):
    """The line that says what was wrong: lockstep writes a hint behind it, and Python's traceback ends with it."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["it said nothing"]
    says_why = [line for line in lines if line.lower().startswith(("error:", "lockstep: "))
                and not line.startswith("lockstep: warning: ")]
    return says_why[0] if says_why else lines[-1]


def choose(table, only, skip):
    """The table's entries that a pattern of `only` matches, if there is any, and none of `skip`; and the names of the
    rest. Raises ValueError for a pattern that matches nothing."""
    for pattern in [*only, *skip]:
        if not fnmatch.filter([entry[0] for entry in table], pattern):
            raise ValueError(f"no contender '{pattern}'; there are {', '.join(entry[0] for entry in table)}")

    def wanted(key):
        return (not only or any(fnmatch.fnmatch(key, pattern) for pattern in only)) and not any(
            fnmatch.fnmatch(key, pattern) for pattern in skip)

    return [entry for entry in table if wanted(entry[0])], [name for key, name, *_ in table if not wanted(key)]


# Where the programs are


def find_pytorch(python):
    """(Python, environment, versions) of a PyTorch that can be imported: the user's own, or PyPI's wheel of the version
    that lockstep pins, fetched once into the user's cache."""
    env = dict(os.environ)
    pythons = [python]
    if python is None:
        # The folder that GPU machines build with is a whole PyTorch: torch and all of its dependencies. (The smaller
        # one of machines without a GPU cannot be imported: Python's part of torch links the CUDA libraries.)
        for name in ("Torch_DIR", "Torch_ROOT", "CMAKE_PREFIX_PATH"):
            env.pop(name, None)
        say("PyTorch: looking in the cache; the first time it is fetched (3 GB to download, 5.3 GB on disk) …")
        libtorch = pathlib.Path(output_of([checkout / "cmake/fetch-libtorch.sh", "cuda"], env).strip())
        env["PYTHONPATH"] = str(libtorch.parent)
        pythons = ["/usr/bin/python3", "python3"]  # in the order in which fetch-libtorch.sh chooses whose pip to use

    probe = ("import json, platform, torch; gpu = torch.cuda.is_available(); print(json.dumps({'pytorch': "
             "torch.__version__, 'python': platform.python_version(), 'pytorch_file': torch.__file__, "
             "'gpu': torch.cuda.get_device_name() if gpu else None}))")
    for candidate in pythons:
        try:
            return candidate, env, json.loads(output_of([candidate, "-c", probe], env))
        except Unavailable as reason:
            failure = reason
    raise failure


def find_mxnet():
    """(Python, environment) that MXNet can be imported with: PyPI's wheels, fetched once into the user's cache."""
    requirements = here / "mxnet.txt"
    version = next(line for line in requirements.read_text().splitlines() if line.startswith("mxnet==")).split("==")[1]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "lockstep")
    failure = None  # of the first Python, which is the usual one
    for python in ("/usr/bin/python3", "python3", "python3.11", "python3.10"):
        try:
            tag = output_of([python, "-c", "import sys; print('py%d.%d' % sys.version_info[:2])"]).strip()
            folder = cache / f"mxnet-{version}-{tag}"
            if not folder.exists():
                install(python, requirements, folder)
            env = dict(os.environ, PYTHONPATH=str(folder))
            output_of([python, "-c", "import mxnet"], env)
            return python, env
        except (Unavailable, OSError) as reason:
            failure = failure or Unavailable(f"MXNet {version}, which needs Python 3.8 to 3.11: {reason}")
    raise failure


def install(python, requirements, folder):
    """Into a folder beside the final one, which is then renamed: so the final folder is complete or absent."""
    say(f"MXNet: fetching it into {folder} (70 MB to download, 0.3 GB on disk, once) …")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=folder.name + ".", dir=folder.parent) as part:
        output_of([python, "-m", "pip", "install", "--disable-pip-version-check", "--no-cache-dir",
                   "--root-user-action", "ignore", "--only-binary", ":all:", "--target", pathlib.Path(part, "new"),
                   "-r", requirements])
        try:
            pathlib.Path(part, "new").rename(folder)
        except OSError:  # another run was faster
            if not folder.exists():
                raise


def write_draws(python, env, folder, samples, epochs):
    output_of([python, here / "draws.py", "--out", folder, "--samples", samples, "--epochs", epochs,
               "--seed", settings["seed"]], env)


def make(table, options, data_dir, samples, epochs, work, settings=settings):
    """The contenders of the table and the versions of what they are; `work` is a folder that outlives them."""
    flags = ["--data-dir", data_dir]
    for name, value in settings.items():
        flags += ["--" + name.replace("_", "-"), value]

    kinds = {kind for _, _, kind, _ in table}
    starts, missing, versions = {}, {}, {}  # by kind: the command's first words and environment; why there is none
    program = options.lockstep.resolve()
    train = [program, "train", "--progress", "none"]
    starts["lockstep"] = train, dict(os.environ)
    starts["lockstep-launch"] = [program, "launch", "-n", 2, *train], dict(os.environ)
    if not os.access(program, os.X_OK):
        missing["lockstep"] = missing["lockstep-launch"] = f"no program at {program}; ./dev build makes it"
    for kind in ("pytorch", "sgemm", "mxnet"):
        starts[kind] = ["python3", here / script_of(kind)], {}
    if kinds - {"lockstep", "lockstep-launch"}:
        try:
            python, env, versions = find_pytorch(options.python)
            starts["pytorch"] = [python, here / script_of("pytorch")], env
            starts["sgemm"] = [python, here / script_of("sgemm")], env
        except Unavailable as reason:
            missing |= {"pytorch": str(reason), "sgemm": str(reason),
                        "mxnet": f"PyTorch, which draws its weights and order, is missing: {reason}"}
    if "mxnet" in kinds and "mxnet" not in missing:
        try:
            write_draws(python, env, work, samples, epochs)
            mxnet_python, mxnet_env = find_mxnet()
            starts["mxnet"] = [mxnet_python, here / script_of("mxnet"), "--draws", work], mxnet_env
        except Unavailable as reason:
            missing["mxnet"] = str(reason)

    made = []
    for key, name, kind, arguments in table:
        words, env = starts[kind]
        # A folder for each contender's compiled code: PyTorch's cache does not tell numbers of threads apart.
        own = {"TORCHINDUCTOR_CACHE_DIR": str(pathlib.Path(work, key)), "PYTHONDONTWRITEBYTECODE": "1"}
        env = env | environments.get(key, {}) | own
        made.append(Contender(key, name, kind, [*words, *arguments, *flags], env, missing.get(kind)))
    return made, versions


def script_of(kind):
    return "sgemm.py" if kind == "sgemm" else f"{kind}_lenet.py"
