"""The section's LeNet on Fashion-MNIST in PyTorch, as a careful PyTorch user writes it: eager or compiled, in one
process or as DistributedDataParallel over several, on the CPU; on a GPU eager, compiled, or as CUDA graphs of whole
steps.

The same task as `lockstep train`: the same network and, for the same seed, the same initial weights and the same
minibatches, so that losses can be compared to rounding; optimizers and schedules have lockstep's flags. Prints what lockstep
writes into metrics.jsonl: one JSON object per epoch, whose `seconds` times the training alone. pytorch_resnet18.py,
pytorch_mlp.py and pytorch_gpt.py train other networks with it.
"""

import math
import os
import pathlib
import shutil
import sys
import sysconfig
import tempfile
import time

import draws
import task
import torch
from torch import nn


def load_images(options, device):
    """(x, y) to train with, and (x, y) to test with; so too a `load` of another program."""
    return load(options.data_dir, "train", device), load(options.data_dir, "t10k", device)


def make_optimizer(net, options):
    # A CUDA graph reads the learning rate at each replay, so there it is a tensor.
    lr = torch.tensor(options.lr, device=options.device) if options.graph else options.lr
    if options.optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), lr=lr, momentum=options.momentum, fused=True)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.optimizer]
    return kind(net.parameters(), lr=lr, weight_decay=0, fused=True, capturable=options.graph > 0)


def set_rate(optimizer, options, epochs_done):
    """As lockstep's learning_rate_at (src/optim/learning_rate.cpp)."""
    rate = options.lr
    if epochs_done < options.warmup:
        rate *= (1 + 999 * epochs_done / options.warmup) / 1000
    elif options.schedule == "cosine":
        rate *= (1 + math.cos(math.pi * (epochs_done - options.warmup) / (options.epochs - options.warmup))) / 2
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def load(folder, prefix, device):
    def read(name):
        data, offset, shape = task.read_idx(folder, name)
        return torch.frombuffer(data, dtype=torch.uint8, offset=offset).view(shape)

    images, labels = read(f"{prefix}-images-idx3-ubyte"), read(f"{prefix}-labels-idx1-ubyte")
    return images.to(device).unsqueeze(1).float().div_(255), labels.to(device).long()


def lenet(options):
    net = nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )
    with torch.no_grad():
        for parameter, drawn in zip(net.parameters(), draws.weights(options.seed)):
            parameter.copy_(drawn.t() if drawn.dim() == 2 else drawn)  # the section's linear weights are [in, out]
    return net


def memory_format(options):
    return torch.channels_last if options.memory_format == "channels-last" else torch.contiguous_format


def mean_loss(net, x, y, bf16=False):
    """(logits, loss), computed in bfloat16 where PyTorch's autocast does so."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
        logits = net(x)
        return logits, nn.functional.cross_entropy(logits, y.flatten())


def make_step(net, optimizer, x, y, sums, images_format=torch.contiguous_format, bf16=False):
    """The function that trains on the samples of an index, and adds their losses and right answers to `sums`."""
    def step(index):
        x_batch, y_batch = x[index].contiguous(memory_format=images_format), y[index]
        optimizer.zero_grad(set_to_none=True)
        logits, loss = mean_loss(net, x_batch, y_batch, bf16)
        loss.backward()
        optimizer.step()
        sums[0] += loss.detach().double() * len(index)
        if y.dim() == 1:  # classes; of a text lockstep does not count right answers either
            sums[1] += (logits.detach().argmax(1) == y_batch).sum()

    return step


def compile_now(net, x, y, sizes, bf16=False):
    """Has forward and backward compiled for each size of a minibatch, and returns the seconds it took. From then on a
    compilation is an error, so that none hides in an epoch."""
    start = time.perf_counter()
    for size in sizes:
        index = torch.arange(size, device=x.device)
        mean_loss(net, x[index], y[index], bf16)[1].backward()
        net.zero_grad(set_to_none=True)
    if torch._dynamo.utils.counters["stats"]["unique_graphs"] < len(sizes):
        sys.exit("error: torch.compile left the network as it was")
    torch.compiler.set_stance("fail_on_recompile")
    return time.perf_counter() - start


def as_graph(step, net, optimizer, size, steps):
    """The function that trains on an order of samples, `steps` steps of `size` samples as one CUDA graph that is
    replayed; what is left of the order as it is. It calls before(n) before a graph whose first step is the n-th."""
    index = torch.zeros(steps, size, dtype=torch.long, device="cuda")
    initial = [parameter.detach().clone() for parameter in net.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries choose algorithms and allocate, which a capture must not
        for _ in range(3):
            step(index[0])
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), initial):
            parameter.copy_(value)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()

    optimizer.zero_grad(set_to_none=True)  # backward then makes the gradients in the graph's own memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # records the steps without doing them
        for part in index:
            step(part)

    def train_on(order, before):
        whole = len(order) // index.numel() * index.numel()
        for number, part in enumerate(order[:whole].view(-1, steps, size)):
            before(number * steps)
            index.copy_(part)
            graph.replay()
        for number, part in enumerate(order[whole:].split(size)):
            before(whole // size + number)
            step(part)

    return train_on


@torch.inference_mode()
def accuracy(net, x, y):
    parts = zip(x.split(1000), y.split(1000))
    return sum((net(images).argmax(1) == labels.flatten()).sum().item() for images, labels in parts) / y.numel()


def train(process, options, store, make_net, load_data):
    """One process of options.processes, with the network make_net(options); the first one prints."""
    torch.set_flush_denormal(True)  # before any thread starts, as `lockstep train` does it
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    data_parallel = options.processes > 1
    if data_parallel:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=process,
                                             world_size=options.processes)
    (train_x, train_y), (test_x, test_y) = load_data(options, device)
    sizes = {min(options.batch_size, len(train_x)), len(train_x) % options.batch_size} - {0}
    if any(size % options.processes for size in sizes):  # the mean of the processes' means would be another one
        sys.exit(f"error: {options.processes} processes cannot share minibatches of {sorted(sizes)} samples equally")

    plain = net = make_net(options).to(device, memory_format=memory_format(options))
    if options.compile:
        # With dynamic shapes the last, smaller minibatch would replace the code for all others by more general code.
        net = torch.compile(net, dynamic=False, mode="reduce-overhead" if device.type == "cuda" else None)
    if data_parallel:  # around the compiled network: the other way round, torch.compile compiles nothing (2.15)
        # As lockstep does, no step sends the running statistics of BatchNorm.
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = make_optimizer(net, options)
    sums = torch.zeros(2, dtype=torch.double, device=device)
    told_once = {}
    bf16 = options.precision == "bf16"
    if options.compile:
        part_sizes = sorted((size // options.processes for size in sizes), reverse=True)
        told_once["compile_seconds"] = compile_now(net, train_x, train_y, part_sizes, bf16)
    step = make_step(net, optimizer, train_x, train_y, sums, memory_format(options), bf16)

    def train_on(order, before):
        for number, index in enumerate(order.split(options.batch_size)):
            before(number)
            step(index.chunk(options.processes)[process])

    if options.graph:
        train_on = as_graph(step, plain, optimizer, min(options.batch_size, len(train_x)), options.graph)

    steps = math.ceil(len(train_x) / options.batch_size)
    for epoch in range(1, options.epochs + 1):
        wait_for_all(device, data_parallel)
        start = time.perf_counter()
        sums.zero_()
        plain.train()
        train_on(draws.shuffled(len(train_x), options.seed, epoch).to(device),
                 lambda number: set_rate(optimizer, options, epoch - 1 + number / steps))
        if data_parallel:
            torch.distributed.all_reduce(sums)
        loss, correct = (sums / len(train_x)).tolist()  # waits for a GPU
        seconds = time.perf_counter() - start
        if process == 0:
            plain.eval()
            task.print_metrics(epoch, loss, correct, accuracy(plain, test_x, test_y), seconds, **told_once)
        told_once = {}
    if data_parallel:
        torch.distributed.destroy_process_group()


def wait_for_all(device, data_parallel):
    if data_parallel:
        torch.distributed.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def check_compiler():
    compiler = os.environ.get("CXX", "g++")
    header = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    if not shutil.which(compiler) or not header.exists():
        sys.exit(f"error: torch.compile on the CPU needs {compiler} and {header}; on Debian and Ubuntu: "
                 "apt-get install g++ python3-dev")


def run(parser, make_net, load_data=load_images):
    """What the program does, with the parser's flags and these. The functions are of a module. The network's logits are
    [m, classes], for m answers in y."""
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of each process")
    parser.add_argument("--processes", type=int, default=1, help="2 or more: DistributedDataParallel over Gloo")
    parser.add_argument("--compile", action="store_true", help="torch.compile, before the first epoch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--graph", type=int, nargs="?", const=1, default=0, metavar="STEPS",
                        help="CUDA graphs of so many whole steps (1); with --device cuda")
    parser.add_argument("--optimizer", choices=["sgd", "adam", "adamw"], default="sgd")
    parser.add_argument("--momentum", type=float, default=0, help="of sgd")
    parser.add_argument("--schedule", choices=["constant", "cosine"], default="constant")
    parser.add_argument("--warmup", type=float, default=0, help="epochs in which the learning rate grows")
    parser.add_argument("--precision", choices=["float32", "bf16"], default="float32", help="bf16: PyTorch's autocast")
    parser.add_argument("--memory-format", choices=["contiguous", "channels-last"], default="contiguous")
    options = parser.parse_args()

    on_gpu = options.device == "cuda"
    if on_gpu and options.processes > 1:
        parser.error("--processes is for the CPU")
    if options.graph and (not on_gpu or options.compile):
        parser.error("--graph needs --device cuda, and no --compile")
    if on_gpu and not torch.cuda.is_available():
        sys.exit("error: PyTorch finds no GPU here")
    if options.compile:
        check_compiler()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # as lockstep's --precision float32

    if options.processes == 1:
        train(0, options, None, make_net, load_data)
        return
    with tempfile.TemporaryDirectory() as folder:  # the processes meet in a file: no port to choose
        torch.multiprocessing.spawn(
            train, args=(options, pathlib.Path(folder, "store"), make_net, load_data), nprocs=options.processes)


def main():
    run(task.parser(__doc__), lenet)


if __name__ == "__main__":
    main()
