"""The MLP in PyTorch, trained as pytorch_lenet.py trains LeNet: the same task as `lockstep train --model mlp`, with the
same layers (src/models/mlp.cpp) and, for the same seed, the same initial weights and minibatches.
"""

import draws
import pytorch_lenet
import task
from torch import nn


def mlp(options):
    sizes = [28 * 28, *[512] * 6]
    layers = [nn.Flatten()]
    for into, out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(into, out), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(sizes[-1], 10))
    draws.draw_xavier(net, options.seed)
    return net


def main():
    pytorch_lenet.run(task.parser(__doc__), mlp)


if __name__ == "__main__":
    main()
