"""The nets of benchmarks/plain_modules.cpp in PyTorch, under DistributedDataParallel over Gloo in two processes of one
thread: `plain_modules.py NET` prints the milliseconds of a step.
"""

import os
import pathlib
import sys
import tempfile
import time
import types

import pytorch_gpt
import pytorch_lenet
import pytorch_mlp
import pytorch_resnet18
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.lstm = nn.LSTM(128, 256, 2, batch_first=True)
        self.tags = nn.Linear(256, 20)

    def forward(self, words):
        return self.tags(self.lstm(self.embedding(words))[0]).flatten(0, 1)


def vgg():
    layers, into = [], 1
    for out in (32, 64, 128):
        for source in (into, out):
            layers += [nn.Conv2d(source, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        into = out
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 3 * 3, 10))


def images(n):
    return torch.rand(n, 1, 28, 28), torch.randint(10, (n,))


def texts(n, length, words, classes):
    return torch.randint(words, (n, length)), torch.randint(classes, (n, length))


options = types.SimpleNamespace(seed=0, width=0.5, image_size=0, layers=4, heads=4, embedding=128, context=128)
nets = {  # net, batch, steps
    "mlp": (lambda: pytorch_mlp.mlp(options), lambda: images(256), 40),
    "lenet": (lambda: pytorch_lenet.lenet(options), lambda: images(256), 20),
    "vgg": (lambda: vgg().to(memory_format=torch.channels_last), lambda: images(64), 5),
    "resnet18": (lambda: pytorch_resnet18.resnet18(options), lambda: images(64), 4),
    "resnet18-last": (lambda: pytorch_resnet18.resnet18(options).to(memory_format=torch.channels_last),
                      lambda: images(64), 4),
    "lstm": (Tagger, lambda: texts(64, 50, 1000, 20), 10),
    "gpt": (lambda: pytorch_gpt.Gpt(options), lambda: texts(16, 128, 256, 256), 10),
}


def train(process, name, store, rounds):
    torch.set_flush_denormal(True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=process, world_size=2)
    make_net, make_batch, steps = nets[name]
    net = nn.parallel.DistributedDataParallel(make_net(), gradient_as_bucket_view=True, broadcast_buffers=False)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
    x, y = (tensor.chunk(2)[process] for tensor in make_batch())
    times = []
    for _ in range(rounds):
        for step in range(-3, steps):  # the first three warm up
            if step == 0:
                start = time.perf_counter()
            sgd.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(net(x), y.flatten()).backward()
            sgd.step()
        times.append(1e3 * (time.perf_counter() - start) / steps)
    if process == 0:
        print(f"{name}, PyTorch DDP: {min(times):.2f} ms")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (sys.argv[1], pathlib.Path(folder, "store"),
                                            int(sys.argv[2]) if len(sys.argv) > 2 else 5), nprocs=2)
