"""The GPT in PyTorch, as a careful PyTorch user writes it: the same task as `lockstep train --model gpt --optimizer adamw`
(src/models/gpt.cpp) and, for the same seed, the same initial weights and minibatches. DIR of
--data-dir holds the text, as text.txt.
"""

import draws
import pytorch_lenet
import task
import torch
from torch import nn
from torch.nn import functional as F

vocabulary = 256


class Block(nn.Module):
    def __init__(self, embedding, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(embedding)
        self.qkv = nn.Linear(embedding, 3 * embedding)
        self.projection = nn.Linear(embedding, embedding)
        self.norm2 = nn.LayerNorm(embedding)
        self.up = nn.Linear(embedding, 4 * embedding)
        self.down = nn.Linear(4 * embedding, embedding)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, options.embedding)
        self.positions = nn.Embedding(options.context, options.embedding)
        self.blocks = nn.Sequential(*(Block(options.embedding, options.heads) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.embedding)
        draws.draw_gpt(self, options.layers, options.seed)

    def forward(self, tokens):
        x = self.blocks(self.tokens(tokens) + self.positions.weight[:tokens.size(1)])
        return F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)


def load_text(options, device):
    """As lockstep's load_text (src/models/text.cpp): sequences of bytes; the last tenth of the text is held out."""
    text = torch.frombuffer(bytearray((options.data_dir / "text.txt").read_bytes()), dtype=torch.uint8).to(device).long()

    def sequences(part):
        size = (len(part) - 1) // options.context * options.context
        return part[:size].view(-1, options.context), part[1:size + 1].view(-1, options.context)

    trained = len(text) - len(text) // 10
    return sequences(text[:trained]), sequences(text[trained:])


def main():
    parser = task.parser(__doc__)
    for name, size in (("layers", 4), ("heads", 4), ("embedding", 128), ("context", 128)):  # gpt's default sizes
        parser.add_argument(f"--{name}", type=int, default=size)
    pytorch_lenet.run(parser, Gpt, load_text)


if __name__ == "__main__":
    main()
