"""The sizes that every part of a model is built from and costed with."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of one model. Shape suffixes of tensors: B batch, T queries, S keys, D model, H heads, G kv heads, K head
    dim, F feed-forward, V vocabulary, R loops."""

    d_model: int
    n_heads: int
    d_head: int
    d_ff: int
    seq_len: int
    vocab_size: int
    bias: bool


class Place(NamedTuple):
    """Where a block stands.

    Attributes:
        layer: its number among the stored blocks: prelude first, then core, then coda.
        n_layers: how many blocks there are.
        own_keys: whether it projects its own keys; False where it reads frozen ones (the core with anchor keys).
    """

    layer: int
    n_layers: int
    own_keys: bool = True


class Kept(NamedTuple):
    """In how many bytes a training pass keeps numbers for its backward pass.

    Attributes:
        product: a number that a matrix product reads or gives: 2 under autocast to bf16, 4 without.
        stream: one of the residual stream, between the blocks.
        fp32_norms: norms work in fp32 (autocast on a GPU); otherwise in what they are given (our own norm on a CPU).
        fused_attention: the kernel keeps no scores, and makes them again in the backward pass.
        keys: keys that a layer holds for each token that it runs: more than one where a pass of some tokens reads those
            of the others (`alcoda.model.rewrite`).
        reach: over how many keys a query's scores are, as a share of the row.
        memories: memories that are held for each token that runs; 0: a pass without.
    """

    product: int
    stream: int = 4
    fp32_norms: bool = True
    fused_attention: bool = True
    keys: float = 1.0
    reach: float = 1.0
    memories: float = 0.0

    def normed(self, d: int, width: int | None = None) -> int:
        """Bytes of ``d`` numbers that a norm reads (of the stream, or in ``width`` bytes each), as it keeps them."""
        return d * (4 if self.fp32_norms else width or self.stream)

    def read(self, d: int, n_maps: int) -> int:
        """Bytes of ``d`` numbers out of a norm that ``n_maps`` linear maps read: autocast makes each a copy of its own,
        where it has to make one."""
        copies = n_maps if self.normed(1) != self.product else 1
        return copies * d * self.product

    def read_again(self, d: int) -> int:
        """What one linear map more adds to `read`."""
        return self.read(d, 2) - self.read(d, 1)


class Cost(NamedTuple):
    """What a part costs each time it is applied.

    Attributes:
        params: stored parameters (not multiplied by how often they are used).
        flops: forward FLOPs a token: 2 a multiply-add of a matrix product; attention scores over ``seq_len`` keys.
            Norms, activations, embedding look-ups and other elementwise work are not counted.
        kv: numbers kept in the key cache a token.
        latent: what ``kv`` shrinks to where the cache keeps latents and expands them when they are read (MLA).
        memory_flops: beside ``flops``, forward FLOPs of a token that has a memory: the first of a training step's
            passes has none, and reading or decoding has one for every token.
        sides: d_in + d_out, summed over the linear maps: what a rank-1 term on each of them has in parameters.
    """

    params: int = 0
    flops: int = 0
    kv: int = 0
    latent: int = 0
    sides: int = 0
    memory_flops: int = 0

    def of_memory(self) -> Cost:
        """The same, of what is done with a memory only."""
        return self._replace(flops=0, memory_flops=self.flops)

    def times(self, n: int) -> Cost:
        """``n`` parts of this cost."""
        return Cost(*(n * value for value in self))


def total(*costs: Cost) -> Cost:
    """The sum of parts."""
    return Cost(*(sum(cost[i] for cost in costs) for i in range(len(Cost._fields))))


def linear(d_in: int, d_out: int, bias: bool = False) -> Cost:
    """Cost of ``y = W x (+ b)`` a token."""
    return Cost(params=d_in * d_out + (d_out if bias else 0), flops=2 * d_in * d_out, sides=d_in + d_out)
