"""Attention of a launch's rows in one call, by a kernel in C that is compiled at its first use.

A launch attends row by row, each over a text of its own at a loop of its own. torch takes a call for each row, and in
bf16 such a call spends more on finding its way than on the keys: of 32 rows they are half of a launch (docs/LOG.md).
One call of ``attend_rows.c`` for all rows takes a tenth of it. Where there is no C compiler, or what it makes does not
do what torch does, rows are attended one by one as before.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda.data.cache import cache_root

SWITCH = "ALCODA_KERNELS"
"""Environment: ``off`` does without."""
SOURCE = Path(__file__).with_name("attend_rows.c")
NAMES = {torch.bfloat16: "attend_bf16", torch.float32: "attend_f32", torch.float64: "attend_f64"}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}
"""Within which it must do what torch does."""
# Sums may be taken in the order that is fastest; infinities and NaN are what they are (-ffast-math drops them).
FLAGS = ("-x", "c", "-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros")
FLAGS += ("-fassociative-math", "-freciprocal-math")
# OpenMP without its library: the calls find the one that torch has loaded, and so torch's threads.
TRIED = (("-march=native", "-fopenmp"), ("-march=native",), ())
COMPILE_S = 60.0
MANY = 1 << 20
"""Elements of keys from which a second thread gains more than it takes to wake."""

Call = Callable[..., None]


class RowPlaces:
    """Where the keys of rows are in a slab.

    Args:
        first: where each row's begin, in elements.
        lengths: keys of each.
    """

    def __init__(self, first: Sequence[int], lengths: Sequence[int]) -> None:
        self.first, self.lengths = first, lengths
        self._last: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def last(self, window: int | None, of_token: int) -> tuple[Tensor, int]:
        """``first`` and ``lengths`` of the last ``window`` keys of each row (None: all), [2, W], and the longest of
        them; ``of_token``: elements from a key to the next. Found once for all layers."""
        kept = -1 if window is None else window, of_token
        if kept not in self._last:
            first, lengths = self.first, self.lengths
            if window is not None:
                first = [at + max(n - window, 0) * of_token for at, n in zip(first, lengths, strict=True)]
                lengths = [min(n, window) for n in lengths]
            self._last[kept] = torch.from_numpy(np.array([first, lengths], np.int64)), max(lengths)
        return self._last[kept]


class SlabRows(Sequence[Tensor]):
    """Keys, or values, of rows whose texts are of different lengths: views ``[1, G, S, K]`` of a slab ``[slot, G,
    token, K]``, made as they are asked for."""

    def __init__(self, slab: Tensor, places: RowPlaces) -> None:
        self.slab, self.places = slab, places

    def __len__(self) -> int:
        return len(self.places.lengths)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> list[Tensor]: ...
    def __getitem__(self, i: int | slice) -> Tensor | list[Tensor]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        _, heads, _, width = self.slab.shape
        at = self.slab.storage_offset() + self.places.first[i]
        return self.slab.as_strided((1, heads, self.places.lengths[i], width), self.slab.stride(), at)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))


class RowAttention:
    """The kernel for one type of numbers.

    Args:
        call: the compiled function.
    """

    def __init__(self, call: Call, dtype: torch.dtype) -> None:
        self._call, self.dtype = call, dtype
        self._sums = torch.float64 if dtype == torch.float64 else torch.float32

    def __call__(self, q_WH1K: Tensor, k: SlabRows, v: SlabRows, window: int | None) -> Tensor:
        """``[W, H, 1, K]``: each row's attention over all its keys, or the last ``window``."""
        n_rows, n_heads, _, width = q_WH1K.shape
        if q_WH1K.stride()[1:] != (width, width, 1):
            q_WH1K = q_WH1K.contiguous()
        _, of_head, of_token, _ = k.slab.stride()
        at_2W, most = k.places.last(window, of_token)
        y_WH1K = torch.empty(n_rows, n_heads, 1, width, dtype=self.dtype)
        scratch = torch.empty(n_rows * n_heads * most, dtype=self._sums)
        self._call(
            q_WH1K.data_ptr(),
            k.slab.data_ptr(),
            v.slab.data_ptr(),
            y_WH1K.data_ptr(),
            scratch.data_ptr(),
            at_2W.data_ptr(),
            at_2W.data_ptr() + 8 * n_rows,
            n_rows,
            n_heads,
            k.slab.size(1),
            width,
            q_WH1K.stride(0),
            of_head,
            of_token,
            most,
            width**-0.5,
            torch.get_num_threads() if n_rows * n_heads * most * width >= MANY else 1,
        )
        return y_WH1K


@functools.cache
def row_attention(dtype: torch.dtype) -> RowAttention | None:
    """The kernel; None where there is none for this type, or on this machine."""
    if dtype not in NAMES or _is_off():
        return None
    for flags in TRIED:
        try:
            library = _library(flags)
        except subprocess.TimeoutExpired:  # it would be as slow with other flags
            return None
        call = None if library is None else getattr(library, NAMES[dtype], None)
        if call is not None:
            call.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 8 + [ctypes.c_double, ctypes.c_int]
            call.restype = None
            kernel = RowAttention(call, dtype)
            if _agrees(kernel):
                return kernel
    return None


def missing(dtype: torch.dtype) -> str:
    """Why there is no kernel."""
    if dtype not in NAMES:
        return f"no kernel for {dtype}"
    if _is_off():
        return f"{SWITCH} is off"
    return "no C compiler made a kernel that does as torch does"


def _is_off() -> bool:
    return os.environ.get(SWITCH, "").strip().lower() in ("off", "0", "no", "false")


def _agrees(kernel: RowAttention) -> bool:
    """Whether it does what torch does."""
    draws, lengths = torch.Generator().manual_seed(0), (1, 5, 7)
    q_WH1K, k_slab, v_slab = (
        torch.randn(*shape, generator=draws).to(kernel.dtype) for shape in ((3, 4, 1, 24), *[(2, 2, 8, 24)] * 2)
    )
    places = RowPlaces((0, 384, 24), lengths)  # of slots 0, 1 and 0, from tokens 0, 0 and 1 on
    k, v = SlabRows(k_slab, places), SlabRows(v_slab, places)
    rows = zip(q_WH1K.split(1), k, v, strict=True)
    expected = torch.cat([F.scaled_dot_product_attention(*row, enable_gqa=True) for row in rows])
    return torch.allclose(kernel(q_WH1K, k, v, None), expected, rtol=0, atol=TOLERANCE[kernel.dtype])


@functools.cache
def _library(flags: tuple[str, ...]) -> ctypes.CDLL | None:
    """The kernels, compiled so; from the cache where they were before. None where that cannot be."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None
    try:
        command = [*shlex.split(compiler), *FLAGS, *flags]
    except ValueError:  # quotes that do not end
        return None
    try:
        told = hashlib.sha256("\n".join([SOURCE.read_text(), *command, _processor()]).encode()).hexdigest()[:16]
        kept = cache_root() / "kernels" / f"attend_rows-{told}.so"
        if not _is_whole(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
            _compile(command, kept)
        return ctypes.CDLL(str(kept))
    except subprocess.TimeoutExpired:
        raise
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: a home that is not there
        pass
    try:  # a cache that cannot be written: compile for this process alone
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "attend_rows.so"
            _compile(command, made)
            return ctypes.CDLL(str(made))
    except subprocess.TimeoutExpired:
        raise
    except (OSError, subprocess.SubprocessError):
        return None


def _is_whole(library: Path) -> bool:
    """Whether it is what was compiled: to load a part of it would end the process."""
    try:
        return _checksum(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except OSError:
        return False


def _checksum(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _compile(command: list[str], to: Path) -> None:
    handle, name = tempfile.mkstemp(".part", to.name, to.parent)
    os.close(handle)
    part = Path(name)
    try:
        done = [*command, str(SOURCE), "-o", str(part), "-lm"]
        subprocess.run(done, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=COMPILE_S)
        made = part.read_bytes()
        if not made:
            raise OSError(f"{command[0]} wrote nothing")
        checksum = hashlib.sha256(made).hexdigest()
        os.replace(part, to)
        _checksum(to).write_text(checksum)
    finally:
        part.unlink(missing_ok=True)


def _processor() -> str:
    """What code for this processor depends on: a cache may be shared by several machines."""
    told = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return told + platform.processor()
    return told + "".join(dict.fromkeys(line for line in lines if line.startswith(("flags", "Features", "model name"))))
