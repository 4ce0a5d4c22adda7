"""The section's LeNet on Fashion-MNIST in eager PyTorch, on the CPU, as a careful PyTorch user writes it.

The same task as `lockstep train`: the same network and, for the same seed, the same initial weights and the same
minibatches, so that losses can be compared to rounding; plain SGD on the mean cross-entropy. Prints what lockstep
writes into metrics.jsonl: one JSON object per epoch, whose `seconds` times the training alone.
"""

import argparse
import gzip
import json
import pathlib
import struct
import time
import warnings

# This script does not use NumPy, which the benchmark's environment does not have.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch
from torch import nn


def read_idx(folder, name):
    """A uint8 tensor from an IDX file, gzipped or plain."""
    plain = folder / name
    data = plain.read_bytes() if plain.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    zeros, type_code, dimensions = struct.unpack_from(">HBB", data)
    if zeros != 0 or type_code != 0x08:
        raise SystemExit(f"error: '{plain}' is not an IDX file of unsigned bytes")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=4 + 4 * dimensions).view(shape)


def load(folder, prefix):
    images = read_idx(folder, f"{prefix}-images-idx3-ubyte")
    labels = read_idx(folder, f"{prefix}-labels-idx1-ubyte")
    return images.unsqueeze(1).float().div_(255), labels.long()


def lenet(seed):
    net = nn.Sequential(
        nn.Conv2d(1, 20, kernel_size=3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, kernel_size=5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )
    # Drawn like lockstep's: weights in order, the linear ones as the section's [in, out], one generator for all.
    generator = torch.Generator().manual_seed(seed)
    for layer in net:
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.01, generator=generator)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear):
            weight = torch.randn(layer.in_features, layer.out_features, generator=generator) * 0.01
            layer.weight.data.copy_(weight.t())
            nn.init.zeros_(layer.bias)
    return net


def shuffled(size, seed, epoch):
    """The permutation that lockstep::batches (src/data.cpp) draws for this seed and epoch."""
    def scramble(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    mixed = scramble((scramble((seed + golden) % 2**64) + epoch + golden) % 2**64)
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed))


def train_epoch(net, optimizer, x, y, order, batch_size):
    """Mean loss and accuracy over the epoch's samples, each as its minibatch saw it."""
    loss_sum = torch.zeros((), dtype=torch.double)
    correct = torch.zeros((), dtype=torch.long)
    for index in order.split(batch_size):
        x_batch, y_batch = x[index], y[index]
        optimizer.zero_grad(set_to_none=True)
        logits = net(x_batch)
        loss = nn.functional.cross_entropy(logits, y_batch)
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach() * len(index)
        correct += (logits.argmax(1) == y_batch).sum()
    return loss_sum.item() / len(x), correct.item() / len(x)


@torch.inference_mode()
def accuracy(net, x, y):
    parts = zip(x.split(1000), y.split(1000))
    return sum((net(images).argmax(1) == labels).sum().item() for images, labels in parts) / len(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=pathlib.Path, required=True, help="folder with the four IDX files")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    train_x, train_y = load(options.data_dir, "train")
    test_x, test_y = load(options.data_dir, "t10k")
    net = lenet(options.seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=options.lr)

    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        order = shuffled(len(train_x), options.seed, epoch)
        train_loss, train_accuracy = train_epoch(net, optimizer, train_x, train_y, order, options.batch_size)
        seconds = time.perf_counter() - start
        metrics = {
            "epoch": epoch,
            "train_loss": train_loss,
            "train_accuracy": train_accuracy,
            "test_accuracy": accuracy(net, test_x, test_y),
            "seconds": seconds,
        }
        print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main()
