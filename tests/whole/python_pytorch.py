"""Trains two networks as a Python program does, and compares with what lockstep's ranks made of the same start.

python_pytorch_test.cpp writes the file: start/NAME, end/NAME for parameters and buffers, x/STEP and y/STEP for whole
batches, all in the safetensors format.
"""
import json
import struct
import sys

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError as error:
    print(error)
    sys.exit(77)

TOLERANCE = 1e-10
TYPES = {"F64": torch.float64, "I64": torch.int64}


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 8)
        self.places = nn.Embedding(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=32, dropout=0.0, activation="gelu", batch_first=False)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.size(1)))
        mask = torch.full((tokens.size(1), tokens.size(1)), float("-inf"), dtype=x.dtype).triu(1)
        y = self.blocks(x.transpose(0, 1), mask=mask).transpose(0, 1)
        return F.linear(y, self.words.weight)


def train_gpt(net, batches):
    matrices = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW([{"params": matrices, "lr": 0.01, "weight_decay": 0.1},
                               {"params": others, "lr": 0.02, "weight_decay": 0.0}], lr=0.01)
    for x, y in batches:
        adamw.zero_grad()
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.5) > 0.5  # or nothing would be clipped
        adamw.step()


def make_cnn():
    return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                         nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def train_cnn(net, batches):
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    for x, y in batches:
        sgd.zero_grad()
        F.cross_entropy(net(x), y).backward()
        sgd.step()


def tensors_of(file):
    data = open(file, "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    tensors = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in about["data_offsets"])
        tensors[name] = torch.frombuffer(bytearray(data[begin:end]), dtype=TYPES[about["dtype"]]).view(about["shape"])
    return tensors


def main(program, file):
    torch.set_default_dtype(torch.float64)
    tensors = tensors_of(file)

    def under(prefix):
        return {name[len(prefix):]: value for name, value in tensors.items() if name.startswith(prefix)}

    net, train = {"gpt": (Gpt(), train_gpt), "cnn": (make_cnn(), train_cnn)}[program]
    net.load_state_dict(under("start/"))
    steps = len(under("x/"))
    train(net, [(tensors[f"x/{step}"], tensors[f"y/{step}"]) for step in range(steps)])

    expected = under("end/")
    assert expected.keys() == net.state_dict().keys()
    worst = max((value - expected[name]).abs().max().item() for name, value in net.state_dict().items())
    moved = min((value - tensors["start/" + name]).abs().max().item() for name, value in net.named_parameters())
    print(f"PyTorch {torch.__version__}, {steps} steps of {program}: each parameter moved by {moved:.2g} or more, and "
          f"lockstep's ranks and PyTorch differ by up to {worst:.2g}")
    return 0 if worst <= TOLERANCE < 1e-4 < moved else 1


sys.exit(main(*sys.argv[1:]))
