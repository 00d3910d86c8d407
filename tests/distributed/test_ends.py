"""How runs of several processes end: by a signal to one of them, a lost peer, or something that was asked wrongly."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from ranks import environment, logged, recipe, torchrun, write_lines
from typer.testing import CliRunner

from alcoda import api, cli, launch
from alcoda.data.prepare import prepare
from alcoda.errors import RunError, UsageError
from alcoda.files import disk
from alcoda.training import checkpoint
from alcoda.training.loop import Trainer
from alcoda.training.processes import Processes, joined
from alcoda.training.recipe import load_recipe
from alcoda.training.run import RunFolder

LONG = 100_000


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command; what is left of it at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def start(command: list[str], **more: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(command, env=environment(**more), stdout=pipe, stderr=pipe, text=True))
        return running[-1]

    yield start
    for process in running:
        if process.stdout is not None and not process.stdout.closed:
            process.kill()
            process.communicate()


def pair(started: Any, file: Path, run: Path, *more: str) -> list[subprocess.Popen[str]]:
    """The two processes that torchrun would start, without it: it ends what is left when one of them fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "alcoda", "train", str(file), "--out", str(run), *more]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [started(command, RANK=rank, LOCAL_RANK=rank, **place) for rank in "01"]


def write_recipe(folder: Path, **changes: Any) -> Path:
    data = recipe(write_lines(folder / "lines.txt"), "grt_noise", steps=LONG, checkpoint_every=20)
    data["eval"] = {"every": LONG, "tokens": 100}
    data["train"].update(changes.pop("train", {}))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**data, **changes}))
    return folder / "recipe.yaml"


def until(ready: Callable[[], bool], processes: list[subprocess.Popen[str]]) -> None:
    """Wait for something, while the processes live."""
    end = time.monotonic() + 120
    while not ready():
        assert all(process.poll() is None for process in processes), processes[0].communicate()[1]
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


@pytest.mark.parametrize("share", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_lost_peer_ends_the_other(tmp_path: Path, started: Any, share: str, killed: int) -> None:
    run = tmp_path / "run"
    processes = pair(started, write_recipe(tmp_path, parallel=share), run)
    until(lambda: bool(checkpoint.listed(run / "checkpoints")), processes)
    processes[killed].kill()
    saved = checkpoint.listed(run / "checkpoints")
    left = processes[1 - killed]
    _, said = left.communicate(timeout=60)
    assert left.returncode == 1
    assert said.count("error: ") == 1 and f"error: rank {1 - killed} of 2 lost a peer" in said, said
    assert "Traceback" not in said and "--resume" in said
    after = checkpoint.listed(run / "checkpoints")
    assert len(after) <= len(saved) + 1  # one that was whole before the peer was gone
    assert all(checkpoint.check(path)["train_step"] % 20 == 0 for path in after)
    if killed == 1:
        assert not list((run / "checkpoints").glob(".*"))
        assert json.loads((run / "run.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_peer_that_does_not_answer_is_lost_too(tmp_path: Path, started: Any) -> None:
    run = tmp_path / "run"
    processes = pair(started, write_recipe(tmp_path, parallel={"kind": "ddp", "timeout_s": 5}), run)
    until(lambda: bool(checkpoint.listed(run / "checkpoints")), processes)
    processes[1].send_signal(signal.SIGSTOP)
    _, said = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 1 and "error: rank 0 of 2 lost a peer" in said, said


@pytest.mark.slow
@pytest.mark.parametrize(("share", "to"), [("ddp", 1), ("fsdp", 0)])
def test_a_signal_to_one_stops_all_and_nothing_is_lost(tmp_path: Path, started: Any, share: str, to: int) -> None:
    steps, straight, run = 100, tmp_path / "straight", tmp_path / "run"
    file = write_recipe(tmp_path, parallel=share, train={"steps": steps, "checkpoint_every": 90})

    def finish(processes: list[subprocess.Popen[str]]) -> dict[str, Any]:
        said = [process.communicate(timeout=200) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        assert said[1] == ("", "") and len(said[0][0].splitlines()) == 1
        return json.loads(said[0][0])

    assert finish(pair(started, file, straight))["status"] == "finished"
    processes = pair(started, file, run)
    until(lambda: (run / "metrics.jsonl").exists() and len(logged(run)) >= 10, processes)
    processes[to].send_signal(signal.SIGTERM)
    done = finish(processes)
    assert done["status"] == "stopped" and 10 <= done["train_step"] < 90
    assert json.loads((run / "run.json").read_text())["status"] == "stopped"
    assert [checkpoint.step_of(path) for path in checkpoint.listed(run / "checkpoints")] == [done["train_step"]]
    assert finish(pair(started, file, run, "--resume"))["status"] == "finished"
    ours, theirs = (checkpoint.read_weights(r / f"checkpoints/step_{steps:08d}") for r in (run, straight))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    assert [line["loss"] for line in logged(run)] == [line["loss"] for line in logged(straight)]


def alone(*arguments: Any, **place: str) -> subprocess.CompletedProcess[str]:
    """One process with the environment that torchrun would give it."""
    command = [sys.executable, "-m", "alcoda", *map(str, arguments)]
    return subprocess.run(command, env=environment(**place), capture_output=True, text=True, timeout=60)


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the first of two, and what follows is refused before it looks for the other."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": {"batch_size": 9}}, "train.batch_size=9 rows do not go evenly over 2 processes"),
        (
            {"train": {"micro_batches": 8}},
            r"train.micro_batches=8 must divide the 4 rows .*\[1, 2, 4\]",
        ),
        ({"parallel": "fsdp", "train": {"compile": True}}, "train.compile with parallel 'fsdp'"),
    ],
)
def test_refused_before_they_meet(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        api.train(load_recipe(write_recipe(tmp_path, **changes)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("first_of_two")
def test_only_train_takes_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(cli.app, ["recipes"])
    assert isinstance(done.exception, UsageError)
    assert "alcoda recipes is for one process, and torchrun started 2" in str(done.exception)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launch.place() == launch.Place() and launch.is_main()


@pytest.mark.usefixtures("first_of_two")
def test_an_environment_that_torchrun_does_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("zero", "2", "-1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UsageError, match=f"RANK={rank}, WORLD_SIZE=2"):
            launch.place()
        assert launch.is_main()  # somebody has to say it
    monkeypatch.delenv("WORLD_SIZE")
    assert launch.place() == launch.Place() and launch.is_main()


class Played(Processes):
    """One of two processes that both have what ``found`` says, by rank; None: the first, and the other has nothing."""

    found: list[Any] | None = None

    def __init__(self, rank: int, found: list[Any] | None = None) -> None:
        super().__init__()
        self.rank, self.world_size, self.found = rank, 2, found

    def gather(self, value: Any, is_patient: bool = False) -> list[Any]:
        return self.found or [value, None][: self.world_size]


@pytest.mark.parametrize("kind", [UsageError, RunError])
@pytest.mark.parametrize("finder", [0, 1])
def test_what_one_finds_wrong_the_main_one_says(kind: type[Exception], finder: int) -> None:
    found: list[Any] = [None, None]
    found[finder] = (kind is UsageError, "the corpus is gone")
    for rank in (0, 1):
        with pytest.raises(kind, match="the corpus is gone") as caught, Played(rank, found).together():
            if rank == finder:
                raise kind("the corpus is gone")
        assert caught.value.is_said is (rank == 1)  # pyrefly: ignore


def test_the_others_are_told_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunError, match=r"the disk is full: .*step_00000001") as caught:
        checkpoint.save(tmp_path, 1, cast(Any, torch.nn.Linear(1, 1)), {}, {}, Played(0))
    assert caught.value.is_said is False  # it went through what all of them gather
    assert not list(tmp_path.iterdir())


def test_the_others_are_told_of_a_disk_that_is_full_while_the_first_logs(tmp_path: Path) -> None:
    class Full:
        def log(self, record: dict[str, Any]) -> None:
            with disk(tmp_path):
                raise OSError(28, "No space left on device")

    trainer = SimpleNamespace(processes=Played(0))
    with pytest.raises(RunError, match="the disk is full") as caught:
        Trainer._log(cast(Any, trainer), cast(Any, Full()), {"train_step": 1})
    assert caught.value.is_said is False


@pytest.mark.slow
def test_a_disk_that_is_full_while_the_first_logs_is_said_once(tmp_path: Path, started: Any) -> None:
    plugin = tmp_path / "full.py"
    plugin.write_text(
        "from alcoda.training.track import JsonLines\n\n"
        "def log(self, record):\n    raise OSError(28, 'No space left on device')\n\n"
        "JsonLines.log = log\n"
    )
    processes = pair(started, write_recipe(tmp_path), tmp_path / "run", "--plugin", str(plugin))
    said = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert said[0].count("error: ") == 1 and "error: the disk is full" in said[0] and said[1] == "", said
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("rank", [0, 1])
def test_noise_is_drawn_anew_only_where_some_is_drawn(
    tmp_path: Path, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"steps": 4, "checkpoint_every": 2, "keep_checkpoints": 2}
    made = load_recipe(write_recipe(tmp_path, train=train)).resolved()
    api.train(made, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    for train_step, n_told in ((2, 1), (4, 0)):
        trainer = Trainer(made, run, prepare(made.data), torch.device("cpu"), torch.float32)
        trainer.processes = Played(rank)
        capsys.readouterr()
        trainer.restore(run.checkpoints / f"step_{train_step:08d}")
        assert capsys.readouterr().err.count("the noise from here on is drawn anew") == n_told


@pytest.mark.parametrize(
    ("rank", "is_said", "error", "speaks"),
    [
        ("0", None, UsageError, True),
        ("1", None, UsageError, False),
        ("1", None, RunError, True),
        ("1", False, UsageError, True),
        ("1", True, RunError, False),
        ("0", False, RunError, True),
    ],
)
def test_who_speaks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: str,
    is_said: Any,
    error: Any,
    speaks: bool,
) -> None:
    def fail() -> None:
        raised = error("it is so")
        raised.is_said = is_said
        raise raised

    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == error.exit_code
    assert capsys.readouterr().err == ("error: it is so\n" if speaks else "")


def test_a_process_without_a_gpu_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(UsageError, match="process number 2 on a host with 1 GPUs") as caught,
        joined(torch.device("cuda"), timeout_s=1),
    ):
        pass
    assert caught.value.is_said is False


@pytest.mark.slow
@pytest.mark.parametrize("share", ["ddp", "fsdp"])
def test_a_loss_that_is_not_finite_is_said_once(tmp_path: Path, started: Any, share: str) -> None:
    train = {"optimizer": {"kind": "adamw", "lr": 1e30}, "clip": None}
    processes = pair(started, write_recipe(tmp_path, parallel=share, train=train), tmp_path / "run")
    said = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert "error: the " in said[0] and said[0].count("at train step") == 1 and said[1] == "", said


@pytest.mark.slow
def test_the_first_says_what_was_asked_wrongly(tmp_path: Path) -> None:
    file = write_recipe(tmp_path, train={"batch_size": 9})
    for rank, n_lines in (("0", 1), ("1", 0)):
        done = alone("train", file, "--out", tmp_path / "run", RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank)
        assert (done.returncode, done.stdout, done.stderr.count("error: ")) == (2, "", n_lines)
        assert len(done.stderr.splitlines()) == n_lines


@pytest.mark.slow
def test_what_only_the_first_can_see_ends_all_with_one_message(tmp_path: Path, started: Any) -> None:
    """A folder that is no run, and a corpus that is not there: found by rank 0, or by both; said once, exit code 2."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    file = write_recipe(tmp_path)
    for more, says in (
        (("--out", str(tmp_path / "full")), "is not empty and holds no run"),
        (("--set", f"data.corpus=text:{tmp_path}/none.txt"), "none.txt"),
    ):
        process = started(torchrun("-m", "alcoda", "train", file, "--out", tmp_path / "run", *more))
        _, said = process.communicate(timeout=90)
        assert process.returncode == 1  # torchrun's own
        assert said.count("error: ") == 1 and says in said and said.count("exitcode  : 2 ") + said.count("SIGTERM") >= 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_they_did_not_come(tmp_path: Path) -> None:
    """One of two that were started, where the other never is."""
    file = write_recipe(tmp_path, parallel={"kind": "ddp", "timeout_s": 2})
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = alone("train", file, "--out", tmp_path / "run", **place)
    assert done.returncode == 1 and "rank 0 did not meet the other 1 processes within 2 s" in done.stderr
