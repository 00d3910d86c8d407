"""Where a model runs, and in which precision."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig


def pick_device(name: str = "auto") -> torch.device:
    """``auto``: the GPU if there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}. Allowed: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda, but torch sees no GPU here: set device to auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies bf16 matrices: a GPU since Ampere, or a CPU with AMX or AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto``: bfloat16 where the hardware has it, else float32."""
    if name == "auto":
        name = "bfloat16" if has_fast_bf16(device) else "float32"
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}. Allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


SMALL_WIDTH = 256
"""Up to this width a product of a few rows takes less time in fp32 than in bf16 on a CPU, where to begin one takes
longer than the product (docs/LOG.md)."""


def is_small(config: ModelConfig) -> bool:
    """Whether decoding a model on a CPU is faster in fp32."""
    return config.d_model <= SMALL_WIDTH


def decode_dtype(name: str, picked: torch.dtype, device: torch.device, config: ModelConfig) -> torch.dtype:
    """What decoding is computed in: as asked, and where it is ``auto``, fp32 for small models on a CPU."""
    return torch.float32 if name == "auto" and device.type == "cpu" and is_small(config) else picked


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Autocast to bf16, or nothing for float32."""
    return torch.autocast(device.type, dtype=dtype) if dtype == torch.bfloat16 else nullcontext()


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed instead of giving it back to the system after every step.

    Activations of one step are as large as those of the next; without this each of them is mapped, zeroed page by page,
    and unmapped again, which costs about a fifth of a training step on a CPU (docs/LOG.md). Elsewhere it does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # not glibc
        return
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3
    mallopt(m_mmap_threshold, 32 << 20)  # the largest that glibc takes
    mallopt(m_trim_threshold, (1 << 31) - 1)
    mallopt(m_top_pad, 64 << 20)


def give_back_freed_memory() -> None:
    """Give what was freed, and was kept by `keep_freed_memory`, back to the system: where memory is short and what is
    freed has other sizes than what is wanted next."""
    with suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Of torch's generators, those of this process: ``rng`` of the CPU, ``cuda_rng`` a list of that of its GPU."""
    return {
        "rng": torch.get_rng_state(),
        "cuda_rng": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """What `rng_state` gave."""
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_rng"][0], device)


def forget_peak_memory(device: torch.device) -> None:
    """`peak_memory_bytes` counts from now on, where the system can do that (a GPU, Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process held at one time: of the GPU, what tensors took; of a CPU, all of it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory_bytes(device: torch.device) -> int | None:
    """What may still be taken on a device: of a CPU, what the system says is available, within the limit of the
    process's control group; None where it says nothing (only Linux does)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    try:
        return min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no limit ("max"), or no such group
        return free


def describe(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The machine, for the record of a run."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "device": device.type,
        "name": name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "dtype": str(dtype).removeprefix("torch."),
        "platform": platform.platform(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
