"""The command line's own business: speed of --help, parsing, pipes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import alcoda
from alcoda.errors import UsageError
from alcoda.options import parse_loops

RECIPES = Path(__file__).parents[2] / "recipes"
COMMANDS = (
    *("train", "eval", "generate", "probe", "calibrate", "frontier"),
    *("cost", "capacity", "bench", "laws", "report", "quickstart"),
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_imports_nothing_that_is_slow() -> None:
    done = python(
        "import sys; sys.argv = ['alcoda', '--help']\n"
        "from alcoda.cli import main\n"
        "slow = {'torch', 'numpy', 'pydantic', 'tokenizers'}\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, sorted(slow & set(sys.modules)))"
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_at_any_moment_is_one(name: str) -> None:
    """While the command line is imported, and before it has read what is asked: exit code 130 and no traceback."""
    early = (
        f"import signal, sys\n"
        f"class Finder:\n"
        f"    def find_spec(self, module, path, target=None):\n"
        f"        if module == 'alcoda.cli': signal.raise_signal(signal.{name})\n"
        f"sys.meta_path.insert(0, Finder())\n"
        f"from alcoda.__main__ import main\n"
        f"main()"
    )
    done = python(early)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    late = (
        f"import signal\n"
        f"import alcoda.cli\n"
        f"from alcoda.__main__ import main\n"
        f"alcoda.cli.app = lambda: signal.raise_signal(signal.{name})\n"
        f"main()"
    )
    done = python(late)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; nothing that was finished is lost\n"


def test_import_and_the_public_names() -> None:
    done = python("import sys, alcoda; print('torch' in sys.modules, alcoda.__version__, dir(alcoda))")
    assert done.stdout == f"False {alcoda.__version__} {dir(alcoda)}\n"
    for name in alcoda.__all__:
        assert getattr(alcoda, name).__name__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = alcoda.nothing


def test_loading_a_model_imports_no_compiler() -> None:
    """torch's own imports to work on the meta device: two seconds of the start of a server."""
    code = "import sys, alcoda; alcoda.load('mini'); print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_version_and_every_help() -> None:
    run = [sys.executable, "-m", "alcoda"]
    done = subprocess.run([*run, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == alcoda.__version__
    code = (
        "import sys\nfrom alcoda.cli import main\n"
        f"for command in {COMMANDS}:\n"
        "    sys.argv = ['alcoda', command, '--help']\n"
        "    try: main()\n"
        "    except SystemExit as end: print('ended', end.code, 'torch' in sys.modules)"
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", python(code).stdout)
    *helps, rest = plain.split("ended 0 False\n")
    assert len(helps) == len(COMMANDS) and rest == ""
    for command, text in zip(COMMANDS, helps, strict=True):
        assert f"Usage: alcoda {command} " in text


@pytest.mark.parametrize("arguments", [["cost"], ["cost", "--json"]])
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    files = sorted(RECIPES.glob("mini/*.yaml"))
    command = [sys.executable, "-m", "alcoda", *arguments, *map(str, files * 2)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # nobody reads, from the first line on
    err = process.stderr.read()
    process.stderr.close()
    assert err == b"" and process.wait() in (0, 1)


def test_head_gets_its_line() -> None:
    recipe = next(RECIPES.glob("mini/*.yaml"))
    command = f"{sys.executable} -m alcoda cost {recipe} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and done.stderr == "" and len(done.stdout.splitlines()) == 1


def test_threads(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['alcoda', '--threads', '1', 'cost', sys.argv[1], '--json']\n"
        "from alcoda.cli import main\n"
        "import torch\n"
        "try: main()\n"
        "finally: print(torch.get_num_threads())"
    )
    recipe = next(RECIPES.glob("mini/*.yaml"))
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, env=environment, check=False
    )
    first, threads = done.stdout.splitlines()
    assert json.loads(first)["params"] > 0 and threads == "1"


def test_parse_loops() -> None:
    assert parse_loops("") == parse_loops("  ") == [] and parse_loops("1, 2,16") == [1, 2, 16]
    for text in ("abc", "1,,2", "1.5", "1;2", "1,"):
        with pytest.raises(UsageError, match=re.escape(f"--loops {text}: write whole numbers with commas")):
            parse_loops(text)
