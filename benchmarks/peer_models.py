"""What `benchmarks/peers.py` compares with: packages that alcoda does not need, in the shape of one of its models.

Each is imported when it is built, so that one that is not there is missed by nothing else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import NamedTuple

import torch
from torch import Tensor, nn
from train import CPU

from alcoda.model.config import ModelConfig
from alcoda.model.precision import hold_in
from alcoda.training.device import autocast


class Built(NamedTuple):
    """A model of another package.

    Attributes:
        called: the part that is called once for every new token of a batch, when its logits are known.
        decode: on prompts [B, T] and how many new tokens: prompts with what follows, or that alone.
    """

    model: nn.Module
    called: nn.Module
    decode: Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Peer:
    """Something to compare with.

    Attributes:
        package: to import; its distribution has the same name with dashes.
        what: how it is set up.
        cache: what it keeps of earlier tokens.
        build: it, for the given shape, type of weights and most tokens of a row.
        max_rows: that it decodes at once; None: any number. More are decoded one after the other.
    """

    package: str
    what: str
    cache: str
    build: Callable[[ModelConfig, torch.dtype, int], Built]
    max_rows: int | None = None

    @property
    def version(self) -> str:
        return version(self.package.replace("_", "-"))


def hf_llama(config: ModelConfig, dtype: torch.dtype, room: int) -> Built:
    transformers, shape = importlib.import_module("transformers"), config.shape
    llama = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=config.n_blocks_run,
        num_attention_heads=shape.n_heads,
        head_dim=shape.d_head,
        max_position_embeddings=room,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(llama).eval().to(dtype)

    def decode(ids_BT: Tensor, n_new: int) -> Tensor:
        mask_BT = torch.ones_like(ids_BT)
        return model.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=n_new, do_sample=False, use_cache=True)

    return Built(model, model, decode)


def open_mythos(config: ModelConfig, dtype: torch.dtype, room: int) -> Built:
    package, shape, n_loops = importlib.import_module("open_mythos"), config.shape, config.n_core * config.n_loops
    model = package.OpenMythos(
        package.MythosConfig(
            vocab_size=shape.vocab_size,
            dim=shape.d_model,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_heads,
            max_seq_len=room,
            max_loop_iters=n_loops,
            prelude_layers=0,
            coda_layers=0,
            attn_type="gqa",
            n_experts=1,
            n_shared_experts=0,
            n_experts_per_tok=1,
            expert_dim=shape.d_ff,
        )
    ).eval()
    if dtype != torch.float32:
        hold_in(model, dtype)  # model.to(bfloat16) makes its attention fail

    def decode(ids_BT: Tensor, n_new: int) -> Tensor:
        with autocast(CPU, dtype):
            return model.generate(ids_BT, max_new_tokens=n_new, n_loops=n_loops, temperature=1.0, top_k=1)

    return Built(model, model.head, decode)  # it calls its own forward, not itself


def x_transformers(config: ModelConfig, dtype: torch.dtype, room: int) -> Built:
    package, shape = importlib.import_module("x_transformers"), config.shape
    layers = package.Decoder(
        dim=shape.d_model,
        depth=config.n_core,
        heads=shape.n_heads,
        attn_dim_head=shape.d_head,
        attn_flash=True,
        rotary_pos_emb=True,
        use_rmsnorm=True,
        pre_and_post_norm=True,  # which its looped mode asks for
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=shape.d_ff / shape.d_model,
    )
    net = package.TransformerWrapper(
        num_tokens=shape.vocab_size,
        max_seq_len=room,
        use_abs_pos_emb=False,
        tie_embedding=True,
        attn_layers=layers,
        looped=True,
        max_looped_steps=config.n_loops,
    )
    model = package.AutoregressiveWrapper(net).eval().to(dtype)

    def decode(ids_BT: Tensor, n_new: int) -> Tensor:
        return model.generate(ids_BT, n_new, temperature=0.0, looped_steps=config.n_loops)

    return Built(model, net, decode)


PEERS: dict[str, Peer] = {
    "hf_llama": Peer(
        "transformers",
        "LlamaForCausalLM.generate: n_prelude + n_core x n_loops + n_coda layers, tied head, sdpa, greedy",
        "keys and values of every layer (DynamicCache)",
        hf_llama,
    ),
    "open_mythos": Peer(
        "open_mythos",
        "OpenMythos.generate: it loops one block, so one of n_core x n_loops loops; its mixture is one expert of our "
        "d_ff, attention gqa with as many key heads, greedy by top_k=1; its halting never ends a loop while it caches",
        "keys and values of every loop, joined anew for each token",
        open_mythos,
    ),
    "x_transformers": Peer(
        "x_transformers",
        "AutoregressiveWrapper.generate of TransformerWrapper(looped=True): n_core blocks with pre and post norm, "
        "looped_steps=n_loops, greedy; its other recurrence, recycling, decodes batches but without a cache",
        "of the prompt keys and values of every loop, of later tokens those of the last",
        x_transformers,
        max_rows=1,
    ),
}
