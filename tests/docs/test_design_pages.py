"""The pages of the design space name every axis, choice and field; what they say of recipes and of the ledger holds."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import alcoda
from alcoda import plugins
from alcoda.cli import app
from alcoda.config import Choice, validate
from alcoda.depth.rules import ExitRule
from alcoda.depth.sample import Depth
from alcoda.model.blocks import BlockConfig
from alcoda.model.cache_policy import CachePolicy
from alcoda.model.config import ModelConfig
from alcoda.model.prefill import Prefill
from alcoda.training.objective import Objective
from alcoda.training.parallel import Parallel
from alcoda.training.passes import Passes
from alcoda.training.recipe import Recipe, load_recipe, parse_yaml

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs/design"
PAGES = sorted([*DESIGN.glob("*.md"), *DESIGN.glob("axes/*.md")])
DEFAULT = "·"
GRT_MINI = str(ROOT / "recipes/mini/grt.yaml")


def axes() -> dict[str, type[Choice]]:
    """Every axis, by the name of its entry."""
    found: dict[str, type[Choice]] = {
        "depth": Depth,
        "objective": Objective,
        "passes": Passes,
        "prefill": Prefill,
        "parallel": Parallel,
        "exit": ExitRule,
        "cache": CachePolicy,
    }
    for config in (ModelConfig, BlockConfig):
        for name, field in config.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Choice):
                found[name] = field.annotation
    return found


def own(axis: type[Choice]) -> dict[str, type[Choice]]:
    """The project's own choices on an axis: another test may have left one of a plugin."""
    return {kind: choice for kind, choice in axis.choices.items() if choice.__module__.split(".")[0] == "alcoda"}


def missing(page: str, axis: type[Choice]) -> list[str]:
    """What ``page`` does not name: kinds, and fields of the choices, in backticks (alone, or before a value)."""
    named = set(re.findall(r"`([a-z_0-9]+)(?:`|: )", page))
    wanted = {name for kind, choice in own(axis).items() for name in (kind, *choice.model_fields) if name != "kind"}
    return sorted(wanted - named)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def rows(text: str, first: str) -> list[dict[str, str]]:
    """The rows of every table whose first column is ``first``, by column, without backticks."""
    found: list[dict[str, str]] = []
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        head, _, *body = (
            [cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.split("\n")
        )
        if head[0] == first:
            found += [dict(zip(head, cells, strict=True)) for cells in body if len(cells) > 1]
    return found


# -- pages of axes ----------------------------------------------------------------------------------------------------


def test_every_axis_has_a_page_and_every_page_an_axis() -> None:
    assert len(axes()) >= 23
    assert {page.stem for page in DESIGN.glob("axes/*.md")} == set(axes())


@pytest.mark.parametrize("name", sorted(axes()))
def test_pages_name_every_choice_and_field(name: str) -> None:
    page = (DESIGN / f"axes/{name}.md").read_text()
    assert page.startswith(f"# {name}")
    assert missing(page, axes()[name]) == []


def test_a_forgotten_choice_is_seen() -> None:
    page = (DESIGN / "axes/inject.md").read_text()
    assert missing(page.replace("`diagonal`", "diagonal"), axes()["inject"]) == ["diagonal"]
    assert missing(page.replace("`bias`", "bias"), axes()["inject"]) == ["bias"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_is_part_of_a_recipe(page: Path) -> None:
    for text in blocks(page, "yaml"):
        recipe = validate(Recipe, parse_yaml(text, page.name), page.name)
        assert recipe.resolved().ledger().params > 0
        assert set(parse_yaml(text, page.name)) <= set(Recipe.model_fields)


def test_every_page_shows_yaml() -> None:
    shown = {page.stem for page in DESIGN.glob("axes/*.md") if blocks(page, "yaml")}
    assert shown == set(axes())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_files_that_are_named_exist() -> None:
    for page in DESIGN.glob("axes/*.md"):
        for name in re.findall(r"`?((?:alcoda|tests|recipes)/[\w/.]+\.(?:py|yaml))", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


# -- architectures ----------------------------------------------------------------------------------------------------


def kind_of(recipe: Recipe, axis: str) -> str:
    """What the recipe chose on an axis (the sandwich is a word, and no choice)."""
    places = (recipe.model, recipe.model.block, recipe, recipe.eval)
    place = next(part for part in places if axis in type(part).model_fields)
    value = getattr(place, axis)
    return value.kind if isinstance(value, Choice) else value


def architectures() -> list[dict[str, str]]:
    return rows((DESIGN / "architectures.md").read_text(), "design")


def test_rows_are_the_recipes() -> None:
    default, checked = Recipe(), 0
    for row in architectures():
        files = sorted((ROOT / "recipes").glob(f"{row['recipe']}.yaml"))
        assert files, f"{row['design']}: no recipe is called {row['recipe']}"
        for file in files:
            recipe = load_recipe(file)
            for axis in row.keys() - {"design", "papers.md", "recipe"}:
                said = kind_of(default, axis) if row[axis] == DEFAULT else row[axis]
                assert kind_of(recipe, axis) == said, f"{row['design']}, {file.stem}: {axis}"
                checked += 1
    assert checked >= 24 * 36


def test_every_axis_is_a_column() -> None:
    columns = {axis for row in architectures() for axis in row}
    no_part_of_a_design = {"parallel", "exit", "cache"}
    assert columns == {"design", "papers.md", "recipe", "sandwich", *axes()} - no_part_of_a_design


def test_every_recipe_of_a_paper_is_in_one_row_of_each_table() -> None:
    patterns = [row["recipe"] for row in architectures()]
    for file in [*(ROOT / "recipes/papers").glob("*.yaml"), *(ROOT / "recipes/oracles").glob("*.yaml")]:
        name = file.relative_to(ROOT / "recipes").with_suffix("")
        assert len([pattern for pattern in patterns if name.match(pattern)]) == 2, name


def test_overlays_are_there() -> None:
    text = (DESIGN / "architectures.md").read_text()
    named = set(re.findall(r"ablations/\w+", text))
    assert len(named) >= 8
    assert all((ROOT / f"recipes/{name}.yaml").exists() for name in named)


# -- the ledger -------------------------------------------------------------------------------------------------------


def test_ledger_numbers_are_the_ledgers() -> None:
    found = rows((DESIGN / "ledger.md").read_text(), "recipe")
    assert len(found) >= 3
    for row in found:
        ledger = load_recipe(ROOT / f"recipes/{row['recipe']}.yaml").ledger()
        numbers = (
            ledger.params,
            ledger.effective_params,
            ledger.kv_bytes_per_token,
            ledger.latent_kv_bytes_per_token,
        )
        assert [f"{number:,}" for number in numbers] == list(row.values())[1:], row["recipe"]


# -- the plugin -------------------------------------------------------------------------------------------------------


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What plugins register is forgotten."""
    before = [(axis.choices, dict(axis.choices)) for axis in Choice.__subclasses__()]
    monkeypatch.setattr(plugins, "_LOADED", {})
    yield
    for choices, old in before:
        choices.clear()
        choices.update(old)


def plugin(folder: Path, wrong: str = "", right: str = "") -> Path:
    """The page's plugin as a file, with ``right`` planted in place of ``wrong``."""
    (code,) = blocks(DESIGN / "plugins.md", "python")
    assert wrong in code
    (folder / "leaky.py").write_text(code.replace(wrong, right))
    return folder / "leaky.py"


def laws(path: Path, *more: str) -> tuple[int, str]:
    command = ["laws", GRT_MINI, "--plugin", str(path), "--set", "model.update.kind=leaky", *more]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    return done.exit_code, done.output


@pytest.mark.usefixtures("registries")
def test_plugin_keeps_every_law(tmp_path: Path) -> None:
    code, said = laws(plugin(tmp_path))
    assert code == 0, said
    assert "BROKEN" not in said
    loaded = alcoda.load_recipe(GRT_MINI, ["model.update.kind=leaky", "model.update.start=0.9"])
    assert loaded.model.update.model_dump() == {"kind": "leaky", "start": 0.9}


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("law", "wrong", "right", "says"),
    [
        ("params", "Cost(params=1)", "Cost()", "at update"),
        ("bf16", "y_BTD.to(h_BTD.dtype)", "y_BTD", "dtype"),
    ],
)
def test_plugin_with_a_fault_breaks_the_law_that_the_page_names(
    tmp_path: Path, law: str, wrong: str, right: str, says: str
) -> None:
    code, said = laws(plugin(tmp_path, wrong, right), "--law", law)
    assert code == 1 and f"BROKEN {law}" in said and says in said, said


@pytest.mark.usefixtures("registries")
def test_commands_of_the_plugin_page_are_commands(tmp_path: Path) -> None:
    page = (DESIGN / "plugins.md").read_text()
    lines = re.findall(r"^    alcoda (entries|cost) +(.*)$", page, re.M)
    assert len(lines) == 2
    path = str(plugin(tmp_path))
    for command, arguments in lines:
        done = CliRunner().invoke(app, [command, *arguments.replace("leaky.py", path).split()])
        assert done.exit_code == 0, done.output
        assert "leaky" in done.output or "update" in done.output
