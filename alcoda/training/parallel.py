"""Parallel: how the processes of one run share its work. Each computes a part of the rows of every batch.

The model is wrapped as one module, `Whole`, whose forward pass is whatever is done with the model: the loss of some
rows, or the scores of a text. A loss reads the model in parts (depths from one pass, the head's weight beside it), and
what watches over parameters does so from the beginning of a module's forward pass to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from alcoda.config import Bool, Choice, PositiveFloat
from alcoda.errors import UsageError
from alcoda.model.lm import RecurrentLM
from alcoda.training import shard
from alcoda.training.processes import Processes

T = TypeVar("T")


class Parallel(Choice, axis="parallel"):
    """What each process holds of the model. With one process there is nothing to share, and the choice says nothing."""

    timeout_s: Annotated[PositiveFloat, Field(le=1e6)] = 600.0
    """How long a process waits for the others, within a step or a save, before it takes them for lost."""
    splits: ClassVar[bool] = False
    """Whether each process holds a part only of weights, gradients and optimizer state."""

    @property
    def lets_go(self) -> bool:
        """Whether a block of prelude or coda is let go after the forward pass, where it had to be gathered."""
        return False

    def share(self, model: RecurrentLM, processes: Processes, n_micro: int, run_once: Sequence[str]) -> Shared:
        """The model as these processes run it. Before the optimizer is built: it may hold other parameters after.

        Args:
            n_micro: micro-batches in a step.
            run_once: stacks that a micro-batch runs once.
        """
        raise NotImplementedError

    def communication(
        self, model: RecurrentLM, world_size: int, n_micro: int, run_once: Sequence[str], whole: Iterable[Tensor]
    ) -> dict[str, float]:
        """Bytes that one of several processes sends in a train step, by kind of collective.

        Counted, not measured: of N processes in a ring each sends (N - 1) / N of the full tensor in an all-gather or a
        reduce-scatter, and twice that in an all-reduce. Messages of a few numbers (losses, signals, norms) are left
        out.

        Args:
            model: wherever it lies, on the meta device too; other arguments as `share`.
            whole: what an optimizer gathers to step it (`OptimizerConfig.gathered`).
        """
        raise NotImplementedError

    def check_compile(self, world_size: int) -> None:
        """Refuse ``train.compile`` where it cannot be had."""


class Ddp(Parallel):
    """Each process holds the whole model and the whole optimizer; gradients are averaged at the end of a step (torch's
    DistributedDataParallel).
    """

    kind: Literal["ddp"] = "ddp"

    def share(self, model: RecurrentLM, processes: Processes, n_micro: int, run_once: Sequence[str]) -> Shared:
        return Replicated(model) if processes.world_size > 1 else Shared(model)

    def communication(
        self, model: RecurrentLM, world_size: int, n_micro: int, run_once: Sequence[str], whole: Iterable[Tensor]
    ) -> dict[str, float]:
        return {"all_reduce": 2 * _sent(_learnt(model), world_size, 1)}


class Fsdp(Parallel):
    """Each process holds a part of every tensor of the model, its gradient and the optimizer's state (torch's FSDP2),
    and gathers a tensor to use it. A block of prelude or coda is gathered by itself; the core, with all that acts in
    the loop, the embedding and the head, once; with them what runs several times: a coda that is read at several
    depths, all blocks of a model with a memory.
    """

    kind: Literal["fsdp"] = "fsdp"
    splits: ClassVar[bool] = True
    reshard_after_forward: Bool = True
    """Of the blocks of prelude and coda: whether they are let go after the forward pass, and gathered again for the
    backward pass. The core is not: it would be gathered once a loop."""

    def share(self, model: RecurrentLM, processes: Processes, n_micro: int, run_once: Sequence[str]) -> Shared:
        if processes.world_size == 1:
            return Shared(model)
        return Sharded(model, processes.world_size, self.reshard_after_forward, run_once)

    @property
    def lets_go(self) -> bool:
        return self.reshard_after_forward

    def communication(
        self, model: RecurrentLM, world_size: int, n_micro: int, run_once: Sequence[str], whole: Iterable[Tensor]
    ) -> dict[str, float]:
        def sent(parameters: Iterable[Tensor]) -> float:
            # Rows are filled up to a multiple of N.
            return _sent(parameters, world_size, world_size)

        of_blocks = {p for block in blocks(model, run_once) for p in block.parameters()}
        root = [p for p in model.parameters() if p not in of_blocks]
        gathered = n_micro * (sent(root) + (2 if self.lets_go else 1) * sent(of_blocks))
        return {"all_gather": gathered + sent(whole), "reduce_scatter": sent(_learnt(model))}

    def check_compile(self, world_size: int) -> None:
        if world_size > 1:
            raise UsageError(
                "train.compile with parallel 'fsdp': compiled stacks do not gather their weights. Set train.compile to "
                "false, or parallel to ddp"
            )


class Whole(nn.Module):
    """A model as a module whose forward pass is any function of it."""

    def __init__(self, model: RecurrentLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., T], *args: Any) -> T:
        """``work(model, *args)``."""
        return work(self.model, *args)


class Reached(Whole):
    """A `Whole` whose loss reaches every parameter: one that no token of these rows used is told so, in place of a
    search for those that the graph does not hold."""

    def forward(self, work: Callable[..., Any], *args: Any) -> Any:
        loss = work(self.model, *args)
        return _Reach.apply(loss, *(p for p in self.model.parameters() if p.requires_grad))


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.n = len(parameters)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *grads, *[None] * ctx.n


class Shared:
    """A model as the processes of a run hold it: here, one process."""

    def __init__(self, model: RecurrentLM) -> None:
        self.model = model

    def loss(self, work: Callable[..., Tensor], *args: Any) -> Tensor:
        """``work(model, *args)``, to be differentiated."""
        return work(self.model, *args)

    @torch.no_grad()
    def measure(self, work: Callable[..., T], *args: Any) -> T:
        """``work(model, *args)`` without gradients. Every process has to ask, and to run the model as often."""
        return work(self.model, *args)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Around loss and backward pass of a micro-batch: gradients are exchanged after the last one only."""
        return nullcontext()

    def complete(self) -> None:
        """Give what no token of the batch used a gradient of zero, as several processes do."""
        for p in self.model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


class Replicated(Shared):
    """The whole model in each process."""

    def __init__(self, model: RecurrentLM) -> None:
        super().__init__(model)
        # Buffers are functions of the recipe alone (angles of positions): the same everywhere.
        self.ddp = DistributedDataParallel(Reached(model), forward_sync_buffers=False, gradient_as_bucket_view=True)

    def loss(self, work: Callable[..., Tensor], *args: Any) -> Tensor:
        return self.ddp(work, *args)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.ddp.no_sync()


class Sharded(Shared):
    """A part of every tensor in each process.

    Two kinds of groups are gathered: a block of prelude and of coda each, and the root with all else. Nothing inside
    the loop is a collective: processes may differ in loops, in tokens of a route, and in which loops' own stacks run.
    """

    def __init__(
        self, model: RecurrentLM, world_size: int, reshard_after_forward: bool, run_once: Sequence[str]
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard  # as `alcoda.training.shard` says

        super().__init__(model)
        mesh = init_device_mesh(model.embed.weight.device.type, (world_size,))
        for block in blocks(model, run_once):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
        self.whole = fully_shard(Whole(model), mesh=mesh, reshard_after_forward=False)
        # What one process did not use, another may have: both reduce all of the root.
        self.whole.set_reduce_scatter_unused_params(True, recurse=False)

    def loss(self, work: Callable[..., Tensor], *args: Any) -> Tensor:
        return self._whole(work, *args)

    @torch.no_grad()
    def measure(self, work: Callable[..., T], *args: Any) -> T:
        found = self._whole(work, *args)
        self.whole.reshard()
        return found

    @property
    def _whole(self) -> Any:
        return self.whole

    @contextmanager
    def micro_batch(self, is_last: bool) -> Generator[None]:
        self.whole.set_requires_gradient_sync(is_last)
        yield

    def complete(self) -> None:
        """The root's were reduced with those of the others, and every block of prelude and coda runs."""


def blocks(model: RecurrentLM, run_once: Sequence[str]) -> list[nn.Module]:
    """The blocks that are gathered by themselves: of the stacks that a micro-batch runs once.

    A stack that runs several times (a coda read at several depths, passes of a memory) would be gathered as often, and
    by some processes more often than by others: it stays with the core.
    """
    stacks = [model.get_submodule(name) for name in run_once]
    return [block for stack in stacks for block in stack.get_submodule("layers").children()]


def _learnt(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def _sent(parameters: Iterable[Tensor], world_size: int, multiple: int) -> float:
    """(N - 1) / N of the bytes of these, rows filled up to a multiple of so many."""
    n_bytes = 0
    for p in parameters:
        rows = -(-p.size(0) // multiple) * multiple
        n_bytes += rows * (p.numel() // max(p.size(0), 1)) * p.element_size()
    return n_bytes * (world_size - 1) / world_size


def full(tensor: Tensor) -> Tensor:
    """A tensor whole, where it is sharded; every process has to ask."""
    return tensor.full_tensor() if shard.is_part(tensor) else tensor


def check_rows(world_size: int, batch_size: int, micro_batches: int) -> None:
    """UsageError where the rows of a batch do not go evenly over the processes and their micro-batches."""
    if batch_size % world_size:
        near = max(batch_size // world_size, 1) * world_size
        raise UsageError(
            f"train.batch_size={batch_size} rows do not go evenly over {world_size} processes: it counts the rows of "
            f"all of them together. Set it to a multiple of {world_size}, for example {near}, or start another number"
        )
    rows = batch_size // world_size
    if rows % micro_batches:
        fits = [n for n in range(1, rows + 1) if rows % n == 0]
        raise UsageError(
            f"train.micro_batches={micro_batches} must divide the {rows} rows that each of {world_size} processes has "
            f"of train.batch_size={batch_size}: one of {fits}"
        )
