"""docs/slurm.sh: what it does at each end of a run, with srun and scontrol played by small scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).parents[2] / "docs/slurm.sh"
SRUN = """#!/bin/bash
# Says what it was asked to run, does what a run would leave behind, and ends as it would.
printf '%s\\n' "$@" > "$FAKE/srun"
env | grep -E '^(MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS)=' > "$FAKE/environment"
[ -n "$CHECKPOINT" ] && mkdir -p "$RUN/checkpoints/$CHECKPOINT"
[ -n "$STATUS" ] && mkdir -p "$RUN" && printf '{"status": "%s"}' "$STATUS" > "$RUN/run.json"
exit "$CODE"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node7\\nnode8\\n'; else echo "$@" >> "$FAKE/scontrol"; fi
"""
REAL_SRUN = """#!/bin/bash
# One task, on this machine.
export SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0
shift
exec "$@"
"""


class Done(NamedTuple):
    code: int
    said: str
    srun: list[str]
    scontrol: str


class Cluster:
    """A folder with a fake srun and scontrol, and a run folder."""

    def __init__(self, path: Path, srun: str = SRUN) -> None:
        self.path, self.run = path / "fake", path / "run"
        self.path.mkdir()
        for name, text in (("srun", srun), ("scontrol", SCONTROL)):
            file = self.path / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            file.chmod(0o755)

    def submit(self, *arguments: str, code: int = 0, status: str = "", checkpoint: str = "") -> Done:
        """Run the script as Slurm would; the rest is what the fake srun leaves behind."""
        environment = {
            **os.environ,
            "PATH": f"{self.path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "FAKE": str(self.path),
            "RUN": str(self.run),
            "CODE": str(code),
            "STATUS": status,
            "CHECKPOINT": checkpoint,
            "SLURM_JOB_ID": "41234",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_CPUS_PER_TASK": "3",
        }
        for name in ("srun", "scontrol"):
            (self.path / name).unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=120
        )
        asked = [self.path / name for name in ("srun", "scontrol")]
        srun, scontrol = (file.read_text() if file.exists() else "" for file in asked)
        return Done(done.returncode, done.stdout + done.stderr, srun.splitlines(), scontrol.strip())

    def begin(self, status: str, *checkpoints: str) -> None:
        """A run that was begun before."""
        self.run.mkdir()
        (self.run / "recipe.yaml").write_text("")
        (self.run / "run.json").write_text(json.dumps({"status": status}))
        for name in checkpoints:
            (self.run / "checkpoints" / name).mkdir(parents=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_it_is_bash() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True).stderr == b""
    assert os.access(SCRIPT, os.X_OK)


def test_a_first_run_that_finishes(cluster: Cluster) -> None:
    done = cluster.submit("mini/grt", str(cluster.run), "--set", "train.steps=3", status="finished")
    assert (done.code, done.scontrol) == (0, "")
    train = ["-m", "alcoda", "train", "mini/grt", "--out", str(cluster.run), "--set", "train.steps=3"]
    assert done.srun[0] == "--kill-on-bad-exit=1" and done.srun[-len(train) :] == train
    assert set((cluster.path / "environment").read_text().split()) == {
        "MASTER_ADDR=node7",
        "MASTER_PORT=21234",
        "OMP_NUM_THREADS=3",
    }


def test_a_stopped_run_is_queued_again_and_resumed(cluster: Cluster) -> None:
    done = cluster.submit("mini/grt", str(cluster.run), status="stopped", checkpoint="step_00000010")
    assert (done.code, done.scontrol) == (0, "requeue 41234") and "--resume" not in done.srun
    (cluster.run / "recipe.yaml").write_text("")
    again = cluster.submit("mini/grt", str(cluster.run), status="finished", checkpoint="step_00000020")
    assert (again.code, again.scontrol) == (0, "") and again.srun[-1] == "--resume"


def test_a_finished_run_is_left_alone(cluster: Cluster) -> None:
    cluster.begin("finished", "step_00000010")
    done = cluster.submit("mini/grt", str(cluster.run))
    assert (done.code, done.srun, done.scontrol) == (0, [], "") and "finished already" in done.said


@pytest.mark.parametrize("status", ["running", "failed"])
def test_a_lost_peer_is_queued_again_after_progress(cluster: Cluster, status: str) -> None:
    """status running: rank 0 was lost itself, and could not say so."""
    cluster.begin("running", "step_00000010")
    done = cluster.submit("mini/grt", str(cluster.run), code=1, status=status, checkpoint="step_00000020")
    assert (done.code, done.scontrol) == (0, "requeue 41234")


@pytest.mark.parametrize(("code", "status", "exit_code"), [(1, "failed", 1), (137, "running", 137), (0, "stopped", 1)])
def test_what_makes_no_progress_ends(cluster: Cluster, code: int, status: str, exit_code: int) -> None:
    """A loss that is not finite, time and again; a kill; a time limit that no step fits into."""
    cluster.begin("running", "step_00000010")
    done = cluster.submit("mini/grt", str(cluster.run), code=code, status=status, checkpoint="step_00000010")
    assert (done.code, done.scontrol) == (exit_code, "") and "no new checkpoint" in done.said


def test_asked_wrongly_ends_at_once(cluster: Cluster) -> None:
    done = cluster.submit("mini/grt", str(cluster.run), code=2)
    assert (done.code, done.scontrol) == (2, "")
    assert cluster.submit("mini/grt").code == 2


@pytest.mark.slow
def test_with_alcoda_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun by a stop of our own making, and finished by a second job."""
    cluster = Cluster(tmp_path, REAL_SRUN.replace("exec", "timeout --signal=TERM 15"))
    settings = ("train.steps=200000", "data.max_bytes=200000", "data.tokenizer=byte", "train.batch_size=2")
    small = ("model.seq_len=16", "model.d_model=16", "train.checkpoint_every=100000", "eval.every=100000")
    sets = [part for one in (*settings, *small) for part in ("--set", one)]
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    stopped = cluster.submit("mini/dense", str(cluster.run), *sets)
    assert json.loads((cluster.run / "run.json").read_text())["status"] == "stopped", stopped.said
    # timeout says 124 where the command ended well after its signal: progress is what counts.
    assert (stopped.code, stopped.scontrol) == (0, "requeue 41234"), stopped.said
    step = json.loads((cluster.run / "run.json").read_text())["result"]["train_step"]
    again = cluster.submit("mini/dense", str(cluster.run), *sets)
    assert again.scontrol == "requeue 41234", again.said
    assert json.loads((cluster.run / "run.json").read_text())["result"]["train_step"] > step
