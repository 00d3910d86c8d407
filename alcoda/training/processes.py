"""The processes of one run: started by torchrun, they meet here, agree, and learn of each other's end.

What a run computes goes through ``parallel.py``. Here is what is said beside it: short messages on the CPU (gloo), so
that a lost peer is noticed the same way on every device.
"""

from __future__ import annotations

import atexit
import socket
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from alcoda import launch
from alcoda.errors import RunError, UsageError

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""How long others wait while rank 0 prepares data: a peer that ends meanwhile closes its connection, and is noticed at
once."""
_STREAM = 0x9A2C
"""Keeps the seeds of ranks apart from other draws that start from the same seed."""
_OF_PEERS = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "socket")


class Processes:
    """The processes of a run, as one of them sees them; alone, nothing is said and nobody waited for.

    Attributes:
        rank, world_size: number of this process, and of all.
        hosts: machines that they are on.
        backend: what carries gradients: ``gloo``, ``nccl``; ``none`` for one process.
        prompt, patient: the groups of short messages: that in which peers answer within ``timeout_s``, and that in
            which they may take long; None for one process.
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, backend: str = "none", prompt: Any = None, patient: Any = None
    ) -> None:
        self.rank, self.world_size, self.backend = rank, world_size, backend
        self.prompt, self.patient = prompt, patient
        self.hosts = len(set(self.gather(socket.gethostname())))

    @property
    def is_main(self) -> bool:
        """Whether this one writes the run folder."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any of them; all have to ask."""
        return self.sum([float(flag)])[0] > 0

    def sum(self, values: Iterable[float]) -> list[float]:
        """The sum over the processes of each of these numbers, in fp64, the same on all."""
        total = torch.tensor(list(values), dtype=torch.float64)
        if self.world_size > 1:
            dist.all_reduce(total, group=self.prompt)
        return total.tolist()

    def gather(self, value: T, is_patient: bool = False) -> list[T]:
        """What each of them has, by rank."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.patient if is_patient else self.prompt)
        return found

    @contextmanager
    def together(self, is_patient: bool = False) -> Generator[None]:
        """What one of them finds wrong inside ends all of them, with its message, said by the main one. (No collectives
        inside.)

        Raises:
            UsageError, RunError: of the lowest rank that has one.
        """
        error: UsageError | RunError | None = None
        try:
            yield
        except (UsageError, RunError) as found:
            error = found
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        said = self.gather(None if error is None else (isinstance(error, UsageError), str(error)), is_patient)
        first = next((rank for rank, one in enumerate(said) if one is not None), None)
        if first is None:
            return
        if error is None or first != self.rank:
            asked_wrongly, text = said[first] or (False, "")
            error = UsageError(text) if asked_wrongly else RunError(text)
        error.is_said = not self.is_main
        raise error

    def first(self, work: Callable[[], T]) -> T:
        """``work`` of rank 0, and then of the others, which find what it left (a cache). It may take long."""
        done: list[T] = []
        for turn in (self.is_main, not self.is_main):
            with self.together(is_patient=True):
                if turn:
                    done.append(work())
        return done[0]

    def part(self) -> None:
        """Wait for the others before leaving: who leaves first would look lost to who is still at it, and a process
        that ends while its peer's connections close may be aborted by them."""
        with suppress(RuntimeError):
            self.gather(None)

    @contextmanager
    def losing(self, last_good: Callable[[], str]) -> Generator[None]:
        """Turns what torch raises when a peer is gone into a message that says what to do.

        Raises:
            RunError: a peer ended, or did not answer in time.
        """
        try:
            yield
        except RuntimeError as error:
            if self.world_size == 1 or isinstance(error, RunError) or not _of_peers(error):
                raise
            what = str(error).strip().split("\n")[0]
            raise RunError(
                f"rank {self.rank} of {self.world_size} lost a peer: another process of the run has ended, or did not "
                f"answer within parallel.timeout_s ({what}). Nothing was saved of this step. {last_good()}. Look for "
                "what ended it in its own output, and go on with --resume"
            ) from error

    def seed(self, seed: int, train_step: int = 0) -> None:
        """Seed torch's generators, for noise: each rank draws its own."""
        if self.rank or train_step:
            key = [_STREAM, seed, train_step, self.rank]
            seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
        torch.manual_seed(seed)


ALONE = Processes()
"""A process that nobody shares the run with."""


def _of_peers(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _OF_PEERS)


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Generator[Processes]:
    """Meet the other processes of the run, and part from them at the end. A group that is there already is used.

    Args:
        device: what they compute on. Of several GPUs on a host each process takes that of its local rank.
        timeout_s: how long one waits for the others within a step.

    Raises:
        UsageError: more processes on a host than GPUs.
        RunError: the others did not come.
    """
    place = launch.place()
    if place.world_size == 1:
        yield Processes()
        return
    if device.type == "cuda":
        if place.local_rank >= torch.cuda.device_count():
            error = UsageError(
                f"torchrun started a process number {place.local_rank + 1} on a host with "
                f"{torch.cuda.device_count()} GPUs: lower --nproc-per-node, or set train.device to cpu"
            )
            error.is_said = False  # the main process has a GPU, and finds nothing wrong
            raise error
        torch.cuda.set_device(place.local_rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        if not dist.is_initialized():
            # Short messages are on the CPU, whatever the device.
            both = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
            dist.init_process_group(both, timeout=timedelta(seconds=timeout_s))
            # Once, and for as long as the process lives: torch's processes meet a second time at stale addresses.
            atexit.register(_leave)
        groups = [dist.new_group(backend="gloo", timeout=t) for t in (timedelta(seconds=timeout_s), _PATIENCE)]
        processes = Processes(dist.get_rank(), dist.get_world_size(), backend, *groups)
    except RuntimeError as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"rank {place.rank} did not meet the other {place.world_size - 1} processes within {timeout_s:g} s "
            f"({str(error).splitlines()[0]}): look at torchrun's --rdzv-endpoint, and that all of them were started"
        ) from error
    try:
        try:
            yield processes
        except (UsageError, RunError) as error:
            if error.is_said is not None:  # found together: nothing is under way
                processes.part()
            raise
        processes.part()
    except BaseException as error:
        if not isinstance(error, UsageError | RunError) or error.is_said is None:
            # NCCL waits, when it is taken down, for what is under way, and after a failure that may never come.
            atexit.unregister(_leave)
        raise


def _leave() -> None:
    with suppress(RuntimeError, AssertionError):
        dist.destroy_process_group()
