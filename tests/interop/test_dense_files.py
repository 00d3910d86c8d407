"""llama2.c's checkpoints and vocabularies, and GGUF through transformers."""

from __future__ import annotations

import os
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import dense_folders as theirs
import pytest
import torch
from torch import Tensor

from alcoda.errors import RunError, UsageError
from alcoda.interop import gguf, sentencepiece
from alcoda.interop.onefile import open_file
from alcoda.model.lm import RecurrentLM

DATA = os.environ.get("ALCODA_DATA")
MODELS = Path(DATA or ".") / "data" / "models"
TINY = {
    "stories260K": ("stories260K/stories260K.bin", 512, 260_032),
    "babyllama": ("babyllama_tok105/model5000.bin", 105, None),
}


def model_of(path: Path) -> RecurrentLM:
    found = open_file(path)
    model = RecurrentLM(found.model)
    model.load_state_dict(dict(found.weights()))
    return model.eval()


def reference(w: dict[str, Tensor], ids_T: Tensor, n_kv_heads: int) -> Tensor:
    """llama2.c's forward pass, written out: rotary pairs (2i, 2i + 1) as complex numbers."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    n_tokens, d_head = len(ids_T), theirs.D // theirs.HEADS
    turns = torch.outer(torch.arange(n_tokens).double(), 10_000.0 ** (-torch.arange(0, d_head, 2).double() / d_head))
    turn = torch.polar(torch.ones_like(turns), turns)[:, None]

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turn).flatten(-2).float()

    x = w["tok_embeddings"][ids_T]
    for i in range(theirs.LAYERS):
        h = norm(x, w["rms_att"][i])
        q, k, v = ((h @ w[name][i].T).unflatten(-1, (-1, d_head)) for name in ("wq", "wk", "wv"))
        k, v = (y.repeat_interleave(theirs.HEADS // n_kv_heads, 1) for y in (rotated(k), v))
        scores = torch.einsum("thk,shk->hts", rotated(q), k) / d_head**0.5
        scores = scores.masked_fill(torch.ones(n_tokens, n_tokens).triu(1).bool(), float("-inf"))
        x = x + torch.einsum("hts,shk->thk", scores.softmax(-1), v).flatten(1) @ w["wo"][i].T
        h = norm(x, w["rms_ffn"][i])
        x = x + (torch.nn.functional.silu(h @ w["w1"][i].T) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["rms_final"]) @ w.get("output", w["tok_embeddings"]).T


@pytest.mark.parametrize(("shares_head", "n_kv_heads"), [(True, 2), (False, 4)])
def test_llama2c_is_what_its_own_equations_say(shares_head: bool, n_kv_heads: int, tmp_path: Path) -> None:
    w = theirs.llama2c(tmp_path / "model.bin", shares_head, n_kv_heads)
    ids_T = torch.randint(theirs.V, (21,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = model_of(tmp_path / "model.bin")(ids_T[None], 1)[0]
    torch.testing.assert_close(found, reference(w, ids_T, n_kv_heads), rtol=0, atol=1e-4)
    w["rms_ffn"] += 1e-2  # control
    assert (found - reference(w, ids_T, n_kv_heads)).abs().max() > 1e-3


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    theirs.llama2c(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RunError, match=r"model.bin has [\d,]+ bytes, and by its header [\d,]+: dim 32, hidden_dim 48"):
        open_file(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"no llama2.c checkpoint of version 0.*seven int32 \(dim"),
        (b"a text that is no model at all", r"no llama2.c checkpoint of version 0"),
        (struct.pack("<7i", 0x616B3432, 1, 64, 4, 4, 4, 4), r"version 1 or 2: version 0 is read"),
        (struct.pack("<7i", 30, 48, 2, 4, 4, 97, 64), r"no llama2.c checkpoint"),
    ],
)
def test_another_kind_of_file(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        open_file(tmp_path / "model.bin")
    (tmp_path / "model.txt").write_bytes(b"nothing of the kind")
    with pytest.raises(UsageError, match=r"neither a GGUF file nor a checkpoint of llama2.c"):
        open_file(tmp_path / "model.txt")


# -- vocabularies -----------------------------------------------------------------------------------------------------


def greedy(pieces: list[tuple[str, float]], text: str) -> list[int]:
    """llama2.c's encoder: single characters, then the pair with the best score is merged, over and over."""
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    tokens: list[int] = []
    for char in ("▁" + text).replace(" ", "▁"):
        tokens += [ids[char]] if char in ids else [3 + byte for byte in char.encode()]
    while True:
        best: tuple[float, int, int] | None = None
        for i in range(len(tokens) - 1):
            one = ids.get(pieces[tokens[i]][0] + pieces[tokens[i + 1]][0])
            if one is not None and (best is None or pieces[one][1] > best[0]):
                best = (pieces[one][1], i, one)
        if best is None:
            return tokens
        tokens[best[1] : best[1] + 2] = [best[2]]


TEXTS = ["the thing here and there.", "another nether ringing", "  two spaces", "é 漢 fé", "", "a"]


@pytest.mark.parametrize("kind", ["bin", "model"])
def test_a_vocabulary_encodes_as_llama2c_does(kind: str, tmp_path: Path) -> None:
    pieces, path = theirs.vocabulary(), tmp_path / f"tok.{kind}"
    (theirs.tokenizer_bin if kind == "bin" else theirs.tokenizer_model)(path, pieces)
    tokenizer = sentencepiece.read(path)
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert ids == (greedy(pieces, text) if text else []), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.eot_text == "<s>" and tokenizer.vocab_size == len(pieces)
    assert tokenizer.encode("<s>").tolist() != [tokenizer.eot]


def test_without_bytes_what_it_cannot_spell_is_unknown(tmp_path: Path) -> None:
    theirs.tokenizer_bin(tmp_path / "tok.bin", theirs.vocabulary(with_bytes=False))
    tokenizer = sentencepiece.read(tmp_path / "tok.bin")
    assert tokenizer.unk == 0 and 0 in tokenizer.encode("a 漢").tolist()


@pytest.mark.parametrize("content", [b"", b"\x07\0\0\0", b"\x07\0\0\0\0\0\0\0\xff\xff\xff\x7fx", b"\x0a\xff\xff"])
def test_no_vocabulary(content: bytes, tmp_path: Path) -> None:
    for name in ("tok.bin", "tok.model"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=rf"{name} is no vocabulary of llama2.c"):
            sentencepiece.read(tmp_path / name)


def test_the_vocabulary_beside_a_checkpoint(tmp_path: Path) -> None:
    theirs.llama2c(tmp_path / "model.bin")
    assert open_file(tmp_path / "model.bin").tokenizer is None
    pieces = theirs.vocabulary(with_bytes=False)
    theirs.tokenizer_bin(tmp_path / "tok32.bin", pieces)
    found = open_file(tmp_path / "model.bin").tokenizer
    assert found is not None and found.vocab_size == len(pieces)
    theirs.tokenizer_model(tmp_path / "other.model", pieces)
    with pytest.raises(UsageError, match=r"several vocabularies \(other.model, tok32.bin\)"):
        open_file(tmp_path / "model.bin")


@pytest.mark.skipif(not DATA or not MODELS.is_dir(), reason="ALCODA_DATA names no folder with data/models in it")
@pytest.mark.parametrize("name", TINY)
def test_the_models_of_llama2c_tell_stories(name: str) -> None:
    file, vocab_size, n_params = TINY[name]
    found = open_file(MODELS / file)
    tokenizer = found.tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == vocab_size == found.model.vocab_size
    model = model_of(MODELS / file)
    assert n_params in (None, sum(p.numel() for p in model.parameters()))
    ids = [tokenizer.eot, *tokenizer.encode("Once upon a time, there was a little girl").tolist()]
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), 1)[0, -1].argmax()))
    assert "girl named L" in tokenizer.decode(ids)


# -- GGUF -------------------------------------------------------------------------------------------------------------


def test_gguf_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(UsageError, match=r"and gguf is not installed: pip install 'alcoda\[gguf\]'"):
        open_file(tmp_path / "model.gguf")


@pytest.mark.skipif(any(find_spec(name) is None for name in gguf.NEEDS), reason="needs transformers, gguf, accelerate")
def test_gguf_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises((RunError, UsageError), match=r"model.gguf.*(damaged|does not read)"):
        open_file(tmp_path / "model.gguf")


@pytest.mark.skipif(any(find_spec(name) is None for name in gguf.NEEDS), reason="needs transformers, gguf, accelerate")
@pytest.mark.filterwarnings("ignore")
def test_gguf(tmp_path: Path) -> None:
    """A file with rows of queries and keys in GGUF's order for Llama (rotary pairs side by side)."""
    import gguf as writer_of
    import transformers

    said = theirs.config("llama")
    tensors = theirs.weights(said)
    path = tmp_path / "model.gguf"
    writer = writer_of.GGUFWriter(path, "llama")
    writer.add_context_length(theirs.SEQ)
    writer.add_embedding_length(theirs.D)
    writer.add_block_count(theirs.LAYERS)
    writer.add_feed_forward_length(theirs.FF)
    writer.add_head_count(theirs.HEADS)
    writer.add_head_count_kv(theirs.KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_vocab_size(theirs.V)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in top:
            to = top[stem]
        else:
            _, _, layer, rest = stem.split(".", 3)
            to = f"blk.{layer}.{names[rest]}"
            for part, heads in (("q_proj", theirs.HEADS), ("k_proj", theirs.KV_HEADS)):
                if rest.endswith(part):
                    halves = tensor.unflatten(0, (heads, 2, -1))
                    tensor = halves.transpose(1, 2).flatten(0, 2).contiguous()
        writer.add_tensor(f"{to}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids_BT = torch.randint(theirs.V, (2, 17), generator=torch.Generator().manual_seed(1))
    folder = theirs.write(tmp_path / "folder", "llama")
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)(ids_BT).logits
        torch.testing.assert_close(model_of(path)(ids_BT, 1), expected, rtol=0, atol=1e-4)
    assert open_file(path).tokenizer is None and "transformers" in sys.modules
