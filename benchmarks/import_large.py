"""A checkpoint of Ouro's 1.4B shape is imported and decodes: peak memory over the bytes of its weights, and tokens/s.

    python benchmarks/import_large.py [--layers 24] [--tokens 16] [--folder DIR]

Random weights in bf16 (its tensors have the names and shapes of Ouro's), written shard by shard, a layer each, into a
temporary folder: 2.9 GB, and as much again for the run. Each of these is done in a process of its own, whose memory is
counted above what it holds once alcoda is there:

a. `alcoda import`: the folder becomes a run;
b. `alcoda.load` of the folder, and of the run, in bf16;
c. of the run: `generate` of --tokens tokens at the model's 4 loops, greedy; once more of a model that was loaded for
   nothing else (`decode_only=True`): weights that the engine lays out are then not there twice.

The last line is JSON. Exit code 1 where (a) or (b) takes more than `MOST` times the weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from train import CPU
from variants import resident_bytes

from alcoda.training.device import describe

MOST = 1.2
"""Times the bytes of the weights: memory that importing or loading them may take."""
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 49152}
"""Of Ouro-1.4B (recipes/papers/ouro_1.4b.yaml)."""
PROMPT = "The loop runs four times, and then"


def config(layers: int, shape: dict[str, int]) -> dict[str, Any]:
    """Its config.json."""
    return {
        "model_type": "ouro",
        "architectures": ["OuroForCausalLM"],
        "num_hidden_layers": layers,
        "num_key_value_heads": shape["num_attention_heads"],
        "head_dim": shape["hidden_size"] // shape["num_attention_heads"],
        "total_ut_steps": 4,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **shape,
    }


def shards(layers: int, shape: dict[str, int]) -> Iterator[dict[str, torch.Tensor]]:
    """Its tensors: the ends, then a layer each."""
    d, ff, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    generator = torch.Generator().manual_seed(0)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()

    def norm() -> torch.Tensor:
        return torch.ones(d, dtype=torch.bfloat16)

    yield {
        "model.embed_tokens.weight": linear(vocab, d),
        "lm_head.weight": linear(vocab, d),
        "model.norm.weight": norm(),
        "model.early_exit_gate.weight": linear(1, d),
        "model.early_exit_gate.bias": torch.zeros(1, dtype=torch.bfloat16),
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        yield {
            **{f"{at}.self_attn.{k}_proj.weight": linear(d, d) for k in "qkvo"},
            f"{at}.mlp.gate_proj.weight": linear(ff, d),
            f"{at}.mlp.up_proj.weight": linear(ff, d),
            f"{at}.mlp.down_proj.weight": linear(d, ff),
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.input_layernorm_2.weight": norm(),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.post_attention_layernorm_2.weight": norm(),
        }


def write(folder: Path, layers: int, shape: dict[str, int]) -> int:
    """The checkpoint, sharded, with a tokenizer of bytes; the bytes of its weights."""
    (folder / "config.json").write_text(json.dumps(config(layers, shape)))
    weight_map, n_bytes = {}, 0
    for i, tensors in enumerate(shards(layers, shape)):
        file = f"model-{i + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        n_bytes += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<|endoftext|>": 256}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    return n_bytes


def child(what: str, folder: str, out: str, tokens: int) -> dict[str, float]:
    """What one of the processes does, and what it took."""
    from alcoda import api

    before, began = resident_bytes(), time.perf_counter()
    if what == "import":
        api.import_model(folder, out)
        return {"seconds": time.perf_counter() - began, "peak_bytes": resident_bytes("VmHWM") - before}
    lm = api.load(folder, dtype="bfloat16", decode_only=what == "decode_alone")
    found = {"seconds": time.perf_counter() - began, "peak_bytes": resident_bytes("VmHWM") - before}
    if what.startswith("decode"):
        for n in (1, tokens):  # the first time lays weights out
            began = time.perf_counter()
            lm.generate(PROMPT, max_tokens=n, ignore_eot=True)
            found["decode_seconds"] = time.perf_counter() - began
        found |= {"tokens": tokens, "tokens_per_s": tokens / found["decode_seconds"]}
        found["peak_bytes_decoding"] = resident_bytes("VmHWM") - before
    return found


def measure(what: str, folder: Path, out: Path, tokens: int) -> dict[str, float]:
    """`child` in a process of its own."""
    arguments = ["--child", what, "--folder", str(folder), "--out", str(out), "--tokens", str(tokens)]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None, shape: dict[str, int] = SHAPE) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="where temporary folders go; the system's choice where not given")
    parser.add_argument("--child", choices=("import", "load", "decode", "decode_alone"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(child(given.child, str(given.folder), str(given.out), given.tokens)))
        return 0
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        theirs, run = Path(made, "theirs"), Path(made, "run")
        theirs.mkdir()
        n_bytes = write(theirs, given.layers, shape)
        print(f"{n_bytes / 1e9:.2f} GB of weights in {given.layers + 1} shards", flush=True)
        found: dict[str, dict[str, float]] = {}
        for name, what, folder in (
            ("import", "import", theirs),
            ("load_folder", "load", theirs),
            ("load_run", "decode", run),
            ("load_run_to_decode_alone", "decode_alone", run),
        ):
            found[name] = measure(what, folder, run, given.tokens)
            found[name]["peak_over_weights"] = found[name]["peak_bytes"] / n_bytes
            if "peak_bytes_decoding" in found[name]:
                found[name]["peak_over_weights_decoding"] = found[name]["peak_bytes_decoding"] / n_bytes
            print(f"{name}: {found[name]}", flush=True)
    holds = all(found[name]["peak_over_weights"] <= MOST for name in ("import", "load_folder", "load_run"))
    machine = {**describe(CPU, torch.bfloat16), "python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({"weights_bytes": n_bytes, "layers": given.layers, **found, "holds": holds, "machine": machine}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
