"""What every peer does in the same way: its flags, reading Fashion-MNIST, and printing an epoch's figures as lockstep
keeps them in metrics.jsonl; and small data sets of its first images. Needs no framework."""

import argparse
import gzip
import json
import math
import pathlib
import random
import struct


def parser(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=pathlib.Path, required=True, help="folder with the four IDX files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256, help="over all processes together")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    return parser


def read_idx(folder, name):
    """(bytes, offset, shape) of the unsigned bytes in an IDX file, gzipped or plain."""
    plain = folder / name
    data = plain.read_bytes() if plain.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    zeros, type_code, dimensions = struct.unpack_from(">HBB", data)
    if zeros != 0 or type_code != 0x08:
        raise SystemExit(f"error: '{plain}' is not an IDX file of unsigned bytes")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    return bytearray(data), 4 + 4 * dimensions, shape


def write_first_samples(data_dir, folder, train_samples, test_samples):
    """The first samples of Fashion-MNIST in `data_dir`, as IDX files of their own in a new folder."""
    folder.mkdir()
    for prefix, count in (("train", train_samples), ("t10k", test_samples)):
        for name in (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"):
            data, offset, (_, *sample) = read_idx(data_dir, name)
            size = count * math.prod(sample)
            if offset + size > len(data):
                raise SystemExit(f"error: {data_dir} has fewer than {count} samples in {name}")
            header = struct.pack(f">HBB{1 + len(sample)}I", 0, 8, 1 + len(sample), count, *sample)
            (folder / name).write_bytes(header + data[offset:offset + size])


def write_random_samples(folder, train_samples, test_samples):
    """Images like Fashion-MNIST's in size, where there is none: steps take as long on any bytes."""
    folder.mkdir()
    rng = random.Random(0)
    for prefix, count in (("train", train_samples), ("t10k", test_samples)):
        labels = struct.pack(">HBBI", 0, 8, 1, count) + bytes(rng.choices(range(10), k=count))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
        images = struct.pack(">HBBIII", 0, 8, 3, count, 28, 28) + rng.randbytes(count * 28 * 28)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(images)


def print_metrics(epoch, train_loss, train_accuracy, test_accuracy, seconds, **more):
    """`seconds` is the epoch's training alone."""
    print(json.dumps({
        "epoch": epoch,
        "train_loss": train_loss,
        "train_accuracy": train_accuracy,
        "test_accuracy": test_accuracy,
        "seconds": seconds,
        **more,
    }), flush=True)
