"""Peak memory of tensors on the CPU."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the largest sum of live allocations above the start, temporary tensors included.

    The profiler reports all allocations (+) and releases (-) of the CPU allocator in order.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
