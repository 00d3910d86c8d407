"""Plugins: a file or a module brings choices, or fails in words and leaves nothing behind."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import alcoda
from alcoda import plugins
from alcoda.config import Choice, validate
from alcoda.data.corpora import FORMS
from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.recurrence.inject import Inject
from alcoda.model.recurrence.update import Update
from alcoda.training.entries import describe_entries
from alcoda.training.recipe import load_recipe

TWICE = """
from __future__ import annotations
from typing import Literal
from alcoda.config import PositiveFloat
from alcoda.model.recurrence.inject import Inject

class Twice(Inject):
    '''Says it twice.'''

    kind: Literal["twice"] = "twice"
    factor: PositiveFloat = 2.0
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No plugin outlives its test, and none of the machine's own is seen."""
    kept = [(axis.choices, dict(axis.choices)) for axis in Choice.__subclasses__()] + [(FORMS, dict(FORMS))]
    modules = set(sys.modules)
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.setattr(plugins, "_entry_points_are_loaded", False)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    for choices, before in kept:
        choices.clear()
        choices.update(before)


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    (tmp_path / "twice.py").write_text(TWICE)
    return tmp_path / "twice.py"


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "bad.py").write_text(text)
    return tmp_path / "bad.py"


def test_a_file_brings_a_choice(twice: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown inject 'twice'.*\(a plugin's choice needs --plugin FILE\)"):
        validate(ModelConfig, {"inject": "twice"})
    found = alcoda.load_plugin(twice)
    assert found == ("twice.py", hashlib.sha256(TWICE.encode()).hexdigest(), ("inject: twice",))
    config = validate(ModelConfig, {"inject": {"kind": "twice", "factor": 3}})
    assert config.inject.model_dump() == {"kind": "twice", "factor": 3.0}
    assert plugins.used() == [found._asdict()]
    entries = {entry.name: entry for entry in describe_entries("model.inject")}
    assert entries["model.inject: twice"].meaning == "Says it twice."
    assert entries["model.inject: twice.factor"].default == "2.0"


def test_the_same_file_twice_is_harmless(twice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plugins.load(twice)
    choice = Inject.choices["twice"]
    monkeypatch.chdir(twice.parent)
    for path in ("twice.py", Path("../") / twice.parent.name / "twice.py"):
        assert plugins.load(path) == first and Inject.choices["twice"] is choice
    assert len(plugins.used()) == 1


def test_a_file_that_changed_is_run_again(twice: Path) -> None:
    plugins.load(twice)
    twice.write_text(TWICE.replace("2.0", "7.0"))
    plugins.load(twice)
    assert validate(ModelConfig, {"inject": "twice"}).inject.model_dump()["factor"] == 7.0
    assert len(plugins.used()) == 1


def test_a_module_by_its_name(twice: Path) -> None:
    assert plugins.load("twice").registered == ("inject: twice",)
    assert plugins.load("twice").name == "twice" and "twice" in sys.modules


def test_a_package_with_its_choices_in_several_files(tmp_path: Path) -> None:
    (tmp_path / "axes").mkdir()
    (tmp_path / "axes/__init__.py").write_text("from . import one\n")
    (tmp_path / "axes/one.py").write_text(TWICE)
    assert plugins.load("axes").registered == ("inject: twice",)


def test_a_module_that_was_imported_before(twice: Path, capsys: pytest.CaptureFixture[str]) -> None:
    __import__("twice")
    assert plugins.load("twice").registered == ("inject: twice",)
    assert capsys.readouterr().err == ""


def test_a_form_of_corpus_counts_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "from alcoda.data.corpora import Corpus, form\n@form('three')\nclass Three(Corpus): pass\n"
    assert plugins.load(write(tmp_path, text)).registered == ("corpus: three",)
    assert capsys.readouterr().err == ""


def test_one_that_registers_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "from alcoda.model.recurrence.inject import Inject\n")
    assert plugins.load(file).registered == ()
    assert f"the plugin {file} registers no choice" in capsys.readouterr().err


ERRORS = {
    "syntax": ("x = 1\ndef f(:\n", r"failed in line 2: SyntaxError: "),
    "raises": ("x = 1\n\n1 / 0\n", r"failed in line 3: ZeroDivisionError: division by zero"),
    "below": ("def f():\n    raise KeyError('a')\n\nf()\n", r"failed in line 2: KeyError: 'a'"),
    "import": ("import no_such_module\n", r"failed in line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    "exit": ("import sys\nsys.exit(3)\n", r"failed in line 2: SystemExit: 3"),
    "encoding": ("x = '\x00'\n", r"failed.*null byte"),
    "taken": (
        TWICE.replace("twice", "add"),
        r"failed in line 7: TypeError: inject: 'add' is taken by alcoda\.model\.recurrence\.inject\.Add; name yours",
    ),
    "field": (
        TWICE.replace("PositiveFloat =", "Positive ="),
        r"failed: PydanticUndefinedAnnotation: name 'Positive' is not defined",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_file_line_and_message(case: str, tmp_path: Path) -> None:
    text, says = ERRORS[case]
    before = dict(Inject.choices)
    with pytest.raises(UsageError, match=says) as caught:
        plugins.load(write(tmp_path, text))
    assert f"the plugin {tmp_path}/bad.py" in str(caught.value)
    assert caught.value.__cause__ is not None, "--debug shows where"
    assert Inject.choices == before and plugins.used() == []


def test_what_failed_halfway_leaves_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, TWICE + "\nraise ValueError('late')\n")
    with pytest.raises(UsageError, match="late"):
        plugins.load(file)
    assert "twice" not in Inject.choices and not [name for name in sys.modules if name.startswith("alcoda_plugin_bad")]
    file.write_text(TWICE)
    assert plugins.load(file).registered == ("inject: twice",)


@pytest.mark.parametrize("name", ["gone.py", "sub/gone", "./gone.py"])
def test_no_such_file(name: str) -> None:
    with pytest.raises(UsageError, match=rf"--plugin {name.removeprefix('./')}: cannot read it: No such file"):
        plugins.load(name)


@pytest.mark.parametrize("name", ["no_such_module", "no.such.module", "a..b", "not a name"])
def test_no_such_module(name: str) -> None:
    with pytest.raises(UsageError, match=rf"--plugin {name}: there is no module of that name"):
        plugins.load(name)


def points(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    dist: Any = SimpleNamespace(name="their-axes", version="1.2")
    made = [EntryPoint(f"p{i}", module, plugins.GROUP)._for(dist) for i, module in enumerate(modules)]  # pyrefly: ignore
    monkeypatch.setattr(plugins, "entry_points", lambda group: made if group == "alcoda.plugins" else [])


def test_entry_points_are_loaded_before_the_first_recipe(
    twice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points(monkeypatch, "twice")
    (tmp_path / "r.yaml").write_text("model: {inject: twice}\n")
    assert load_recipe(tmp_path / "r.yaml").model.inject.kind == "twice"
    assert plugins.used()[0]["name"] == "twice"
    monkeypatch.setattr(plugins, "entry_points", lambda group: pytest.fail("only once"))
    load_recipe(tmp_path / "r.yaml")


def test_a_broken_entry_point_names_its_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "1 / 0\n")
    points(monkeypatch, "bad")
    (tmp_path / "r.yaml").write_text("model: {}\n")
    for _ in range(2):  # not only the first time
        with pytest.raises(
            UsageError, match=r"the plugin bad of their-axes 1\.2 .*'p0'.* failed in line 1: ZeroDivision"
        ):
            load_recipe(tmp_path / "r.yaml")
    points(monkeypatch, "not_there")
    with pytest.raises(UsageError, match=r"the plugin not_there of their-axes 1\.2 .*No module named 'not_there'"):
        describe_entries()


def test_what_changed_since(twice: Path) -> None:
    plugins.load(twice)
    recorded = plugins.used()
    assert plugins.changed(recorded) == []
    assert plugins.changed([{**recorded[0], "sha256": "0"}, {"name": "other.py", "sha256": "1"}]) == [
        "twice.py",
        "other.py",
    ]


def test_the_registry_is_clean() -> None:
    assert "twice" not in Inject.choices and set(Update.choices) >= {"gate", "overwrite"}
