"""The median time of something on the GPU, in milliseconds."""
import statistics
import torch


def median(step, repeat=30):
    times = []
    for i in range(repeat + 5):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); step(); b.record()
        torch.cuda.synchronize()
        if i >= 5:
            times.append(a.elapsed_time(b))
    return statistics.median(times)
