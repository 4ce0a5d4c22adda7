"""What lockstep draws at random, drawn by PyTorch from Python: the initial weights and the order of the samples. As a
program it writes them to files, for a framework that has other generators:

    draws.py --out FOLDER --samples 60000 --epochs 2 --seed 0

FOLDER/weights.f32 holds the eight weights one after the other, in the section's order and layout (weight_shapes);
FOLDER/order-E.i64 the order of the samples in epoch E, which counts from 1.
"""

import argparse
import array
import math
import pathlib
import warnings

# No script here uses PyTorch with NumPy, which the benchmark's environment does not have.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch

weight_shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]


def weights(seed):
    """As lockstep::lenet_params (src/models/lenet.cpp): the biases are zero, the rest comes in order from one generator."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.zeros(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.01
            for shape in weight_shapes]


def draw_xavier(net, seed):
    """As lockstep's draw_weights (src/models/model_parts.cpp): Xavier's uniform weights, biases of zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() > 1:
                bound = math.sqrt(6 / ((parameter.size(0) + parameter.size(1)) * parameter[0][0].numel()))
                parameter.uniform_(-bound, bound, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


def draw_gpt(net, layers, seed):
    """As lockstep's draw_gpt_weights (src/models/gpt.cpp): N(0, 0.02^2), less where a block ends, biases of zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.dim() > 1:
                ends_block = name.endswith(("projection.weight", "down.weight"))
                parameter.normal_(0, 0.02 / math.sqrt(2 * layers) if ends_block else 0.02, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


def shuffled(size, seed, epoch):
    """The permutation that lockstep::batches (src/data/batches.cpp) draws for this seed and epoch."""
    def scramble(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    mixed = scramble((scramble((seed + golden) % 2**64) + epoch + golden) % 2**64)
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed))


def write(file, type_code, tensors):
    with file.open("wb") as out:
        for tensor in tensors:
            array.array(type_code, tensor.flatten().tolist()).tofile(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FOLDER")
    parser.add_argument("--samples", type=int, required=True, help="of the training set")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    write(options.out / "weights.f32", "f", weights(options.seed))
    for epoch in range(1, options.epochs + 1):
        write(options.out / f"order-{epoch}.i64", "q", [shuffled(options.samples, options.seed, epoch)])


if __name__ == "__main__":
    main()
