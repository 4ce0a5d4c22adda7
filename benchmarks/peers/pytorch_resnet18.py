"""ResNet-18 for small images in PyTorch, trained as pytorch_lenet.py trains LeNet: the same task as
`lockstep train --model resnet18 --width X --image-size N`, with the same layers (src/models/resnet.cpp) and, for the
same seed, the same initial weights and minibatches.
"""

import math

import draws
import pytorch_lenet
import task
from torch import nn


def scaled(channels, width):
    return max(1, math.floor(channels * width / 8 + 0.5)) * 8


class Block(nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu_()))
        return (y + self.shortcut(x)).relu_()


def resnet18(options):
    into = scaled(64, options.width)
    layers = [nn.Upsample(size=options.image_size, mode="bilinear")] if options.image_size else []
    layers += [nn.Conv2d(1, into, 3, padding=1, bias=False), nn.BatchNorm2d(into), nn.ReLU()]
    for channels in (64, 128, 256, 512):
        out = scaled(channels, options.width)
        layers += [Block(into, out, 1 if channels == 64 else 2), Block(out, out, 1)]
        into = out
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 10))
    draws.draw_xavier(net, options.seed)
    return net


def main():
    parser = task.parser(__doc__)
    parser.add_argument("--width", type=float, default=1, help="times as many channels, in multiples of 8")
    parser.add_argument("--image-size", type=int, default=0, help="images are resized to it; 0: as they are")
    pytorch_lenet.run(parser, resnet18)


if __name__ == "__main__":
    main()
