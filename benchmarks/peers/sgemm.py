"""The limit of a LeNet epoch on the CPU: its floating-point operations at the rate of a large matrix product (SGEMM).

Prints a JSON object per "epoch", whose `seconds` are what an epoch's operations would take. Only the arithmetic of the
convolutions and of the linear layers counts; no memory traffic, no activation, no pooling.
"""

import json
import time

import draws
import task
import torch


def epoch_flops(samples):
    conv1, conv2 = 20 * 9 * 26 * 26, 50 * 20 * 25 * 9 * 9  # multiply-adds of one sample
    linear = 800 * 128 + 128 * 10
    forward = conv1 + conv2 + linear
    backward = 2 * forward - conv1  # gradients by the weights and by the inputs, except by the images
    return 2 * (forward + backward) * samples


def flops_per_second(size, seconds):
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    calls, best, start = 0, float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds or calls < 3:
        before = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - before)
        calls += 1
    return 2 * size**3 / best


def main():
    parser = task.parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    samples = task.read_idx(options.data_dir, "train-labels-idx1-ubyte")[2][0]
    for epoch in range(1, options.epochs + 1):
        rate = flops_per_second(size=2048, seconds=1)
        print(json.dumps({"epoch": epoch, "seconds": epoch_flops(samples) / rate, "gflops_per_second": rate / 1e9}))


if __name__ == "__main__":
    main()
