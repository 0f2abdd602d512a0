"""Times whole steps, watches memory, keeps losses, and prints one line `JSON {...}` on rank 0."""

import contextlib
import ctypes
import gc
import json
import math
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist


def resident(key="VmRSS"):
    """Resident memory now (VmRSS), or its highest (VmHWM), in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    return math.nan


class Heap(threading.Thread):
    """Samples what malloc has handed out and not got back: unlike RSS it does not depend on what malloc keeps."""

    PERIOD_S = 0.002

    class Info(ctypes.Structure):
        """glibc's `struct mallinfo2`."""

        _fields_ = [
            (name, ctypes.c_size_t)
            for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        ]

    def __init__(self):
        super().__init__(daemon=True)
        self._read = ctypes.CDLL(None).mallinfo2
        self._read.restype = self.Info
        self.base, self.most = self.live(), 0
        self.start()

    def live(self):
        info = self._read()
        return info.uordblks + info.hblkhd

    def run(self):
        while True:
            self.most = max(self.most, self.live())
            time.sleep(self.PERIOD_S)

    @property
    def peak_mb(self):
        return (self.most - self.base) / 2**20


class Meter:
    """Made after the imports and before the model, so that memory is counted from there."""

    def __init__(self, a, peer):
        gc.collect()
        self.a, self.peer, self.base = a, peer, resident()
        self.ms, self.cpu, self.main_cpu, self.losses = [], [], [], []
        self.early = self.faults = 0
        self.heap = Heap() if a.heap else None
        self.began = time.perf_counter()

    def steps(self) -> Iterator[int]:
        a = self.a
        self.ready = time.perf_counter() - self.began
        for step in range(a.steps):
            if step == a.warmup:
                self._settle()
            with self._traced(step == a.steps - 1):
                t, c, m = time.perf_counter(), time.process_time(), time.thread_time()
                yield step
                self.ms.append((time.perf_counter() - t) * 1e3)
                self.cpu.append((time.process_time() - c) * 1e3)
                self.main_cpu.append((time.thread_time() - m) * 1e3)

    def _settle(self):
        """Warm-up is over: the high-water mark and the page faults begin again."""
        self.early = resident("VmHWM")
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self.faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    @contextlib.contextmanager
    def _traced(self, wanted):
        if not (wanted and self.a.trace):
            yield
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            yield
        if self.a.rank == 0:
            profile.export_chrome_trace(self.a.trace)

    def loss(self, value):
        self.losses.append(value)

    def report(self, **more):
        """Collective over the ranks of the process group, where there is one."""
        a, n = self.a, self.a.warmup
        late = resident("VmHWM")
        memory = dict(peak=max(self.early, late), steady=late, imports=self.base)
        memory["heap"] = self.heap.peak_mb if self.heap else math.nan
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self.faults
        loss = torch.tensor([float(x) for x in self.losses], dtype=torch.float64)
        ranks = [memory]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [None] * a.world
            dist.all_gather_object(ranks, memory)
            dist.all_reduce(loss)
            loss /= a.world
        if a.rank:
            return
        step = statistics.median(self.ms[n:])
        tokens = a.micro * a.accum * a.seq * (a.virtual_world or a.world)
        row = dict(
            peer=a.label or self.peer, size=a.size, dtype=a.dtype, accum=a.accum, world_size=a.world, steps=a.steps,
            step_ms=round(step, 1), step_ms_min=round(min(self.ms[n:]), 1), tokens_per_s=round(1e3 * tokens / step, 1),
            cpu_ms=round(statistics.median(self.cpu[n:]), 1), main_cpu_ms=round(statistics.median(self.main_cpu[n:]), 1),
            init_s=round(self.ready, 2), minor_faults_per_step=round(faults / max(1, a.steps - n)),
            import_mb=[round(r["imports"]) for r in ranks], peak_rss_mb=[round(r["peak"]) for r in ranks],
            delta_mb=[round(r["peak"] - r["imports"]) for r in ranks],
            steady_delta_mb=[round(r["steady"] - r["imports"]) for r in ranks],
            final_loss=round(loss[-1].item(), 6), losses=[round(x, 6) for x in loss.tolist()],
        )  # fmt: skip
        if a.trace:
            row["traced_ms"] = round(self.ms[-1], 1)
        if self.heap:
            row["heap_mb"] = [round(r["heap"], 1) for r in ranks]
        print("JSON " + json.dumps(row | more), flush=True)


def leave():
    """Ends this rank with status 0. Gloo's threads abort a process now and then when the interpreter tears them down
    ("terminate called without an active exception"), with any peer, which would lose a run that was measured."""
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)
