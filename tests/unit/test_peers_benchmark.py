"""`benchmarks/peers.py` with stand-ins for the other packages: it runs, and its last line says all that it promises.
No speed is judged."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alcoda.config import validate
from alcoda.engine import packed
from alcoda.engine.stats import Stats
from alcoda.engine.workload import Timing as WorkTiming
from alcoda.model.config import ModelConfig
from alcoda.model.cost import ledger

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers.py"
SIZES = ("d_model=32", "n_heads=2", "n_loops=3", "n_core=2", "vocab_size=64", "seq_len=16")
TOY = [word for size in SIZES for word in ("--set", f"model.{size}")]
TOY += ["--prompt-tokens", "4", "--new-tokens", "3", "--mean-depth", "2", "--rounds", "2", "--dtype", "float32"]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("peers")


class Chooser(nn.Module):
    """A model whose next token is always the one after the last, of ``n`` parameters."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return ids_BT[:, -1:] + 1


def chooser(
    n: int, passes: Callable[[int], int] = lambda n_new: n_new
) -> Callable[..., tuple[nn.Module, nn.Module, Callable[[Tensor, int], Tensor]]]:
    def build(
        config: ModelConfig, dtype: torch.dtype, room: int
    ) -> tuple[nn.Module, nn.Module, Callable[[Tensor, int], Tensor]]:
        model = Chooser(n).to(dtype)

        def decode(ids_BT: Tensor, n_new: int) -> Tensor:
            assert ids_BT.size(1) + n_new <= room
            for _ in range(passes(n_new)):
                ids_BT = torch.cat([ids_BT, model(ids_BT)], 1)
            return ids_BT

        return model, model, decode

    return build


def broken(config: ModelConfig, dtype: torch.dtype, room: int) -> Any:
    raise TypeError("it takes no such thing")


def said_by(peers: ModuleType, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    threads = torch.get_num_threads()
    peers.main([*TOY, *options])
    assert torch.get_num_threads() == threads
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_what_is_there_is_measured_and_what_is_not_is_named(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins = {
        "hf_llama": peers.Peer("torch", "many rows", "none", chooser(10**5)),
        "x_transformers": peers.Peer("torch", "one row", "none", chooser(10), max_rows=1),
        "absent": peers.Peer("no_such_package", "not installed", "none", chooser(10)),
        "broken": peers.Peer("torch", "cannot be built", "none", broken),
        "idle": peers.Peer("torch", "skips a token", "none", chooser(10, lambda n_new: n_new - 1)),
    }
    monkeypatch.setattr(peers, "PEERS", stand_ins)
    result = said_by(peers, capsys, "--peers", ",".join(stand_ins), "--batch", "1,4", "--acceptance", "0.5")

    said = result["peers"]
    assert said["absent"]["absent"] == "ModuleNotFoundError: No module named 'no_such_package'"
    assert said["broken"]["failed"] == "TypeError: it takes no such thing"
    assert "2 passes gave rows of 4 tokens for 3 new ones" in said["idle"]["failed"]
    assert said["hf_llama"]["params"] == 10**5 and said["hf_llama"]["weight_bytes"] == 4 * 10**5
    assert said["hf_llama"]["our_weights_over_its"] == result["ours"]["weight_bytes"] / 4e5
    assert {"version", "what", "cache", "max_rows"} <= set(said["x_transformers"])

    cells = result["cells"]
    assert [(cell["batch"], cell["peer"], cell["peer_rows_at_once"]) for cell in cells] == [
        (1, "hf_llama", 1),
        (1, "x_transformers", 1),
        (4, "hf_llama", 4),
        (4, "x_transformers", 1),
    ]
    for cell in cells:
        assert cell["rounds"] == 2
        contestants = {cell["peer"], "fixed", "refill", "refill_wavefront"}
        assert set(cell["tokens_per_s"]) == set(cell["decode_tokens_per_s"]) == contestants
        assert min(cell["tokens_per_s"].values()) > 0 and min(cell["decode_tokens_per_s"].values()) > 0
        assert set(cell["speedup"]) == {"fixed", "refill", "refill_wavefront"}
    assert 1 <= result["mean_depth"] <= 3
    ours = result["ours"]
    assert (ours["simulated"], ours["acceptance"], ours["draft_loops"]) == (True, [0.5], 2)
    # float32: the tied head is laid out once more, and weights of norms are there twice, side by side.
    assert ours["weight_bytes"] == 4 * (ours["params"] + 64 * 32 + 5 * 32)
    assert (result["shape"]["d_model"], result["shape"]["n_core"], result["shape"]["n_loops"]) == (32, 2, 3)
    assert result["machine"]["dtype"] == "float32" and result["versions"]["torch"] == torch.__version__
    assert result["targets"]["hf_llama"] == [
        {"batch": 1, "mode": "refill_wavefront", "ratio": 2.5},
        {"batch": 32, "mode": "refill", "ratio": 1.2},
    ]


def test_without_any_of_them_it_says_so(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        peers, "PEERS", {"hf_llama": peers.Peer("no_such_package", "not installed", "none", chooser(1))}
    )
    result = said_by(peers, capsys, "--peers", "hf_llama")
    assert (result["cells"], result["below_target"]) == ([], [])


def test_the_ratios(peers: ModuleType) -> None:
    """Tokens/s over tokens/s, round by round: 12 rows in 3 s over 2 in 1 s is 2 times, whatever the rows."""
    slow = [peers.Timing(1.0, 0.2, 2, 5), peers.Timing(2.0, 0.4, 2, 5), peers.Timing(4.0, 3.9, 2, 5)]
    fast = [peers.Timing(3.0, 0.6, 12, 5), peers.Timing(3.0, 0.6, 12, 5), peers.Timing(4.0, 0.6, 12, 5)]
    assert slow[0].tokens_per_s == 10 and slow[0].decode_tokens_per_s == 2 * 4 / 0.8
    found = peers.speedup(fast, slow)
    assert found["ratio"] == 4  # of 2, 4, 6
    assert found["low"] == 2 and found["high"] == 6
    assert peers.speedup(fast[:1], slow[:1]) == {"ratio": 2, "low": 2, "high": 2}


class Counted:
    """In place of a `Decoding`."""

    n_tokens = 16

    def __init__(self, name: str, order: list[Any]) -> None:
        self.name, self.order = name, order

    def go(self, share: float) -> None:
        self.order.append((self.name, share))

    def timing(self) -> Any:
        stats = Stats(tokens=16)
        stats.seconds["piece"] = 0.5
        return WorkTiming(2.0, stats, 1, [[]], 0)


def test_rounds_are_side_by_side_and_end_with_the_time(peers: ModuleType) -> None:
    order: list[Any] = []

    def run(n_new: int, between: Callable[[int], None]) -> Any:
        for i in range(1, n_new + 1):
            order.append(i)
            between(i)
        return peers.Timing(1.0, 0.5, 1, n_new)

    starts = {name: lambda n_new, name=name: Counted(name, order) for name in ("fixed", "refill")}
    cell = peers.compared("peer", run, starts, 16, rounds=3, until=float("inf"))
    warm, measured = order[: 3 * peers.WARM_UP_TOKENS], order[3 * peers.WARM_UP_TOKENS :]
    assert [one for one in warm if isinstance(one, int)] == [1, 2, 3] and warm[-2:][0][1] == 1
    names, expected = ["fixed", "refill"], []
    for i in range(1, 17):
        expected.append(i)
        if i % 2 == 0:
            expected += [(name, i / 16) for name in (names if i // 2 % 2 else names[::-1])]
    assert measured == expected * 3
    assert cell["rounds"] == 3 and cell["tokens_per_s"] == {"peer": 16.0, "fixed": 8.0, "refill": 8.0}
    assert peers.compared("peer", run, starts, 16, rounds=3, until=0.0)["rounds"] == 1


def test_while_ours_runs_the_peers_clock_stands(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(peers.time, "perf_counter", lambda: clock[0])
    model = Chooser(1)

    def decode(ids_BT: Tensor, n_new: int) -> Tensor:
        for _ in range(n_new):
            clock[0] += 1.0
            ids_BT = torch.cat([ids_BT, model(ids_BT)], 1)
        return ids_BT

    def between(n: int) -> None:
        clock[0] += 100.0

    run = peers.timed_by_call(model, decode)
    for _ in range(2):
        assert run(torch.ones(1, 2, dtype=torch.long), 5, between) == peers.Timing(5.0, 1.0, 1, 5)


def test_it_names_what_is_below_the_target_and_nothing_else(peers: ModuleType) -> None:
    def cell(peer: str, batch: int, **ratios: float) -> dict[str, Any]:
        found = {"fixed": 0.1, "refill": 0.1, "refill_wavefront": 0.1} | ratios
        return {"peer": peer, "batch": batch, "speedup": {mode: {"ratio": ratio} for mode, ratio in found.items()}}

    met = [cell("hf_llama", 1, refill_wavefront=2.5), cell("hf_llama", 32, refill=1.2), cell("hf_llama", 8)]
    assert peers.below(met, {"hf_llama": {"our_weights_over_its": 0.25}, "open_mythos": {"absent": "why"}}) == []
    missed = [cell("hf_llama", 1, refill_wavefront=2.4), cell("open_mythos", 32, refill=1.9)]
    assert peers.below(missed, {"hf_llama": {"our_weights_over_its": 0.3}}) == [
        "refill_wavefront over hf_llama, batch 1: 2.400",
        "refill over open_mythos, batch 32: 1.900",
        "weights over hf_llama: 0.300",
    ]


def toy(**fields: Any) -> ModelConfig:
    base = {"d_model": 32, "n_heads": 2, "vocab_size": 64, "seq_len": 16, "n_prelude": 0, "n_core": 1, "n_coda": 0}
    return validate(ModelConfig, base | {"n_loops": 4, "inject": "concat"} | fields)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_each_mode_of_ours_does_the_work_that_was_drawn(peers: ModuleType, acceptance: float) -> None:
    """Fixed runs all loops of every token; with exits each runs its own, the prompt's too; drafts are right as often as
    was asked for."""
    model, own = peers.held(toy(), torch.float32)
    work, found = peers.scripted(model.config, model, 2, 4, 5, 2.5, [acceptance], 1), {}
    for mode in peers.MODES:
        decoding = peers.ours(work, 2, 5, mode=mode)
        decoding.go()
        timing, found[mode] = peers.timing_of(decoding), decoding.timing()
        assert (timing.rows, timing.n_new) == (2, 5) and 0 < timing.prompt_s < timing.seconds
        assert found[mode].n_requests == 2 and found[mode].stats.tokens == 10

    depths_BT = work.trace.depths_BT
    drawn, prompt = Counter(depths_BT[:, 3:8].flatten().tolist()), Counter(depths_BT[:, :4].flatten().tolist())
    assert len(drawn) > 1
    for name, score in found.items():
        assert score.stats.loops == (Counter({4: 10}) if name == "fixed" else drawn), name
        assert score.stats.prompt_loops == (Counter({4: 8}) if name == "fixed" else prompt), name
    assert found["fixed"].stats.drafts == found["refill"].stats.drafts == 0
    drafting = found["refill_wavefront"].stats
    assert drafting.checked > 0 and drafting.accepted == acceptance * drafting.checked
    assert own["params"] == ledger(model.config, 1).params


@pytest.mark.skipif(not packed.is_there(), reason="this build of torch has no products of weights that are laid out")
def test_in_bf16_what_the_engine_holds_is_counted(peers: ModuleType) -> None:
    """Two bytes a parameter; the table of the tied head is held twice, and so are weights of the three norms."""
    model, own = peers.held(toy(), torch.bfloat16)
    table = model.embed.weight.numel()
    assert {p.dtype for p in packed.served(model, torch.float32).parameters()} == {torch.bfloat16}
    assert own["weight_bytes"] == 2 * (own["params"] + table + 3 * 32)
    work = peers.scripted(model.config, model, 1, 4, 3, 2.5, [0.8])
    decoding = peers.ours(work, 1, 3, mode="refill_wavefront")
    decoding.go()
    assert peers.timing_of(decoding).tokens_per_s > 0


@pytest.mark.parametrize("mean", [1.0, 4.9, 8.0])
def test_the_depths_have_the_mean_that_is_asked_for(peers: ModuleType, mean: float) -> None:
    config = toy(n_loops=8, seq_len=128)
    model, _ = peers.held(config, torch.float32)
    depths_BT = peers.scripted(config, model, 32, 64, 64, mean, 0.8).trace.depths_BT
    assert depths_BT.shape == (32, 128) and 1 <= depths_BT.min() <= depths_BT.max() <= 8
    assert depths_BT.double().mean() == pytest.approx(mean, abs=0.1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--peers", "hf_llama,vllm"], "unknown vllm. Allowed: hf_llama, open_mythos, x_transformers"),
        (["--batch", "1,0"], "--batch 1,0: whole numbers from 1"),
        (["--new-tokens", "1"], "--new-tokens at least 2"),
        (["--shape", "mini/dense"], "a core without prelude and coda"),
        (["--shape", "engine/d51"], "engine/d51"),
        (["--prompt-tokens", "1000"], "1064 tokens do not fit the context of 1024"),
        (["--mean-depth", "9"], "from 1 to n_loops=8"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--acceptance", "1.5"], "--acceptance 1.5: a share, from 0 to 1"),
        (["--set", "model.sharing=untied"], "the engine cannot serve this model"),
    ],
)
def test_it_refuses_what_it_cannot_do(
    peers: ModuleType, capsys: pytest.CaptureFixture[str], options: list[str], why: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        peers.main(options)
    assert refused.value.code == 2
    assert why in capsys.readouterr().err
