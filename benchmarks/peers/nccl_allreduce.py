#!/usr/bin/env python3
"""Plain ncclAllReduce in one process, without lockstep or c10d: the peer of `lockstep-bench allreduce` on GPUs.

  benchmarks/peers/nccl_allreduce.py DEVICE,DEVICE[,...] [ROUNDS]

DEVICE is a GPU's number. The same number twice needs NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1. Prints for each size
the microseconds of a sum over the devices, best of so many rounds. Needs PyTorch, for memory, streams and its NCCL.
"""

import ctypes
import sys
import time

import torch

SIZES = (40, 4000, 65536, 516272, 4000000, 24000000)  # bytes, those of lockstep-bench
FLOAT, SUM = 7, 0  # ncclFloat32, ncclSum
nccl = ctypes.CDLL("libnccl.so.2")


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


def check(result):
    if result:
        nccl.ncclGetErrorString.restype = ctypes.c_char_p
        sys.exit(f"error: NCCL: {nccl.ncclGetErrorString(result).decode()}; NCCL_DEBUG=WARN says more")


def communicators(devices):
    unique_id = UniqueId()
    check(nccl.ncclGetUniqueId(ctypes.byref(unique_id)))
    made = [ctypes.c_void_p() for _ in devices]
    check(nccl.ncclGroupStart())
    for rank, device in enumerate(devices):
        torch.cuda.set_device(device)
        check(nccl.ncclCommInitRank(ctypes.byref(made[rank]), len(devices), unique_id, rank))
    check(nccl.ncclGroupEnd())
    return made


def main():
    devices = [int(device) for device in sys.argv[1].split(",")]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    streams = [torch.cuda.Stream(device) for device in devices]
    ranks = list(zip(communicators(devices), devices, streams))
    print(f"ncclAllReduce on {sys.argv[1]}, best of {rounds} rounds\n\n{'bytes':>10} {'us':>11}")
    for size in SIZES:
        buffers = [torch.zeros(size // 4, device=f"cuda:{device}") for device in devices]

        def add(count):
            for _ in range(count):
                check(nccl.ncclGroupStart())
                for (communicator, _, stream), buffer in zip(ranks, buffers):
                    pointer = ctypes.c_void_p(buffer.data_ptr())
                    check(nccl.ncclAllReduce(pointer, pointer, ctypes.c_size_t(buffer.numel()), FLOAT, SUM, communicator,
                                             ctypes.c_void_p(stream.cuda_stream)))
                check(nccl.ncclGroupEnd())
            for stream in streams:
                stream.synchronize()

        calls = min(max(50_000_000 // size, 5), 2000)
        torch.cuda.synchronize()  # the buffers are ready
        best = float("inf")
        for _ in range(rounds):
            add(max(calls // 10, 2))
            start = time.perf_counter()
            add(calls)
            best = min(best, (time.perf_counter() - start) / calls)
        print(f"{size:>10} {best * 1e6:>11.2f}", flush=True)


main()
