"""The median time of something on the GPU, in milliseconds."""
import statistics, time
import torch


def median(step, repeat=30, calls=1, cuda=True):
    """`calls` of it are launched one behind another and timed together, so that the time to launch does not count; on a CPU the host's clock is read."""
    times = []
    for i in range(repeat + 5):
        if cuda:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        if cuda:
            b.record()
            torch.cuda.synchronize()
        if i >= 5:
            times.append((a.elapsed_time(b) if cuda else (time.perf_counter() - start) * 1e3) / calls)
    return statistics.median(times)
