"""The rules of the repository: what may be committed, and that what a reader copies works."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import shlex
import sqlite3
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, TypeGuard

import pytest

import fourfold
import fourfold_reward
from fourfold import config
from fourfold.cli import main as cli_main
from fourfold.errors import FourfoldError

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_BYTES = 1_000_000
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_README_LINES = 150

PROJECTS = [
    ROOT / "pyproject.toml",
    *sorted(ROOT.glob("services/*/pyproject.toml")),
    ROOT / "tools/pyproject.toml",
    ROOT / "benchmarks/pyproject.toml",
]
RECIPES = sorted(ROOT.glob("recipes/**/*.toml"))
READMES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md"))]
READMES += sorted(
    [*ROOT.glob("services/*/README.md"), *ROOT.glob("fourfold/*/README.md"), *ROOT.glob("examples/*/README.md")]
)
READMES += sorted(path for path in ROOT.glob("docs/**/*.md") if path.name != "cli.md")  # which has usages, generated

# Names that run code out of bytes. Words in comments and texts are not names.
UNSAFE_NAMES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "recv_pyobj", "send_pyobj"}
UNSAFE_NAMES |= {"send_object_list", "recv_object_list"}
UNSAFE_SETTING = re.compile("VLLM_ALLOW_INSECURE_" + r"SERIALIZATION\W+(1|true)", re.IGNORECASE)
NAMED_FILE = re.compile(r"[\w./-]*\w\.py\b")
PLACEHOLDER = re.compile(r"[A-Z]|\bfile\.py")  # such as FILE.py
# In any program: statements that make a part of a schema.
CREATES = re.compile(r"\bCREATE\s+((TEMP|TEMPORARY|UNIQUE|VIRTUAL)\s+)*(TABLE|INDEX|VIEW|TRIGGER)\s", re.IGNORECASE)
# Written in parts, so that this file does not hold what it looks for.
MACHINE_WORDS = re.compile(
    "|".join(
        [
            r"(?<![\w.])/(?:" + "work|farm|root|home/[a-z]+)/",
            "/opt/" + "wheels",
            "python" + r"hosted\.org",
            "pypi" + r"\.org",
            r"registry\." + "npmjs",
            r"download\." + "pytorch",
        ]
    )
)


@functools.cache
def _committed() -> tuple[Path, ...]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return tuple(ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def _sources(*, generated: bool = False) -> Iterator[Path]:
    for path in _committed():
        if path.suffix == ".py" and (generated or not re.search(r"_pb2(_grpc)?$", path.stem)):
            yield path


def _where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_no_file_is_larger_than_a_megabyte() -> None:
    assert [str(p) for p in _committed() if p.stat().st_size > MAX_FILE_BYTES] == []


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in _committed():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [_where(path, i) for i, text in enumerate(lines, 1) if MACHINE_WORDS.search(text)]
    assert found == []


def test_machine_words_are_found_where_they_are() -> None:
    for text in ("cd /" + "work/main", "--find-links /opt/" + "wheels", "https://py" + "pi.org/simple", "/" + "root/x"):
        assert MACHINE_WORDS.search(text)
    for text in ("a/work/b", "framework/x", "pip install x", "/proc/1/fd", "/home of"):
        assert not MACHINE_WORDS.search(text)


class Source(NamedTuple):
    """What the rules read of the syntax tree of a Python file."""

    unsafe: list[int]
    """The lines that name a pickle, read one, or load tensors in a way that would."""
    functions: list[tuple[int, str, int]]
    """Line, name and number of lines of each function."""
    documented: bool
    """The module has a docstring, or is empty."""


@functools.cache
def _parse(path: Path) -> Source:
    """Parse a file once for all rules; keep what they need, and not its large tree."""
    with tokenize.open(path) as file:
        text = file.read()
    tree = ast.parse(text)
    unsafe = [number for number, line in enumerate(text.splitlines(), 1) if UNSAFE_SETTING.search(line)]
    functions = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions.append((node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
            case _ if _is_unsafe(node):
                unsafe.append(node.lineno)
    return Source(unsafe, functions, not text.strip() or bool(ast.get_docstring(tree)))


def _is_unsafe(node: ast.AST) -> TypeGuard[ast.stmt | ast.expr | ast.keyword]:
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            modules = [alias.name for alias in names] + [getattr(node, "module", None) or ""]
            return bool(UNSAFE_NAMES & {part for module in modules for part in module.split(".")})
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in UNSAFE_NAMES
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
            return not any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in keywords)
    return False


def test_nothing_runs_code_out_of_bytes() -> None:
    assert [_where(path, line) for path in _sources() for line in _parse(path).unsafe] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from multiprocessing.reduction import pickle",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "socket.recv_pyobj()",
        "os.environ['VLLM_ALLOW_INSECURE_" + "SERIALIZATION'] = '1'",
    ],
)
def test_unsafe_code_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    assert _parse(tmp_path / "bad.py").unsafe


def _named_files(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each Python file that a comment or docstring names, after its line."""
    with tokenize.open(path) as file:
        comments = [
            (t.start[0], t.string) for t in tokenize.generate_tokens(file.readline) if t.type == tokenize.COMMENT
        ]
    values = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)]
    docs = [(value.lineno, str(value.value)) for value in values if isinstance(value, ast.Constant)]
    for line, text in comments + docs:
        yield from ((line, name) for name in NAMED_FILE.findall(text) if not PLACEHOLDER.search(name))


def _distribution(path: Path) -> Path:
    parts = path.relative_to(ROOT).parts
    return ROOT.joinpath(*parts[: 2 if parts[0] == "services" else 1])


def test_every_file_that_a_comment_names_exists() -> None:
    """A name with a folder may be anywhere; a bare one is in the same distribution, or in `fourfold`."""
    files = [path for path in _committed() if path.suffix == ".py"]
    named = {"/".join(path.parts[-count:]) for path in files for count in range(2, len(path.parts))}
    bare = {(_distribution(path), path.name) for path in files}
    found = []
    for path in _sources():
        if path.is_relative_to(ROOT / "tests") or ".py" not in path.read_text():
            continue
        homes = (_distribution(path), ROOT / "fourfold")
        for line, name in _named_files(path):
            if name not in named and not any((home, name) in bare for home in homes):
                found.append(f"{_where(path, line)}: {name}")
    assert found == []


def test_a_file_that_does_not_exist_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""See b/c.py, FILE.py."""\nX = "d.py"  # of e.py\n')
    assert sorted(_named_files(tmp_path / "a.py")) == [(1, "b/c.py"), (2, "e.py")]


def _crashing_indexes(source: str) -> list[str]:
    """Return the partial indexes on tables WITHOUT ROWID that the schemas in a program make."""
    nodes = list(ast.walk(ast.parse(source)))
    formats = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in formats]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values))
    found = []
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for text in (text for text in texts if isinstance(text, str) and CREATES.search(text)):
            db.executescript(text)
        for (table,) in db.execute("SELECT name FROM pragma_table_list WHERE wr").fetchall():
            found += [name for _, name, _, _, partial in db.execute(f"PRAGMA index_list({table})") if partial]
    return found


def test_no_schema_has_an_index_with_which_sqlite_crashes() -> None:
    """SQLite 3.44.0 to 3.46.0, as in Ubuntu 24.04, crashes on an UPDATE of a column in the WHERE of such an index."""
    shipped = [path for path in _sources() if path.relative_to(ROOT).parts[0] != "tests"]
    schemas = {path: text for path in shipped if CREATES.search(text := path.read_text())}
    assert {"ledger.py", "store.py", "trajectory_index.py"} <= {path.name for path in schemas}
    assert {path.name: bad for path, text in schemas.items() if (bad := _crashing_indexes(text))} == {}


@pytest.mark.parametrize(("table", "index", "found"), [("t WITHOUT ROWID", "WHERE a = 1", ["i"]), ("t", "", [])])
def test_an_index_with_which_sqlite_crashes_is_found(table: str, index: str, found: list[str]) -> None:
    name, *rest = table.split(" ", 1)
    one = f"CREATE TABLE {name} (a INTEGER PRIMARY KEY) {''.join(rest)};"
    two = f"create unique index if not exists i ON {name} (a) {index}"
    assert _crashing_indexes(f"X = '{one}'\ndef f(db): db.execute('{two}')") == found
    assert _crashing_indexes(f"V = 2\nX = f'{one} {two}; PRAGMA user_version = {{V}};'") == found


def test_files_and_functions_keep_their_budgets() -> None:
    found = []
    for path in _sources():
        text = path.read_text(encoding="utf-8")
        if (count := len(text.splitlines())) > MAX_FILE_LINES:
            found.append(f"{_where(path, 1)}: {count} lines")
        found += [
            f"{_where(path, line)}: {name} has {count} lines"
            for line, name, count in _parse(path).functions
            if count > MAX_FUNCTION_LINES
        ]
    assert found == []


def test_sources_are_ascii_and_nothing_is_postponed() -> None:
    postponed = re.compile("raise Not" + "Implemented|TO" + "DO|FIX" + "ME")
    found = []
    for path in _sources():
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [_where(path, i) for i, text in enumerate(lines, 1) if not text.isascii() or postponed.search(text)]
    assert found == []


def test_every_module_says_what_it_is_for() -> None:
    assert [str(path.relative_to(ROOT)) for path in _sources() if not _parse(path).documented] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: str(p.relative_to(ROOT)))
def test_recipe_parses_and_its_resolved_form_means_the_same(path: Path, tmp_path: Path) -> None:
    recipe = config.load(path)
    (tmp_path / "resolved.toml").write_text(config.dump(recipe))
    assert config.load(tmp_path / "resolved.toml") == recipe


def test_there_are_recipes() -> None:
    assert ROOT / "recipes/quickstart.toml" in RECIPES


def test_every_preset_has_a_recipe_that_says_what_is_special() -> None:
    recipes = {path.stem: path for path in (ROOT / "recipes/presets").iterdir()}
    assert sorted(recipes) == sorted(config.PRESETS)
    for preset, path in recipes.items():
        recipe, lines = config.load(path), path.read_text().splitlines()
        assert recipe.algorithm.preset == preset
        assert recipe.name == preset.replace("++", "-pp"), "a run's name, and its folder"
        assert lines[1] == f"# Run it: fourfold run recipes/presets/{preset}.toml"
        assert lines[0].startswith("# ") and len(lines) <= 45, "short, and its first line says what is special"
        clips = recipe.algorithm.loss.compares_with_old and recipe.batch.updates_per_step == 1
        assert ("no clip takes effect" in path.read_text()) == clips, preset


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md"])
def test_a_page_for_the_choice_of_a_preset_names_all(page: str) -> None:
    names = re.findall(r'[`"]([a-z][a-z+*-]+)[`"]', (ROOT / page).read_text())
    assert [preset for preset in config.PRESETS if not any(fnmatch(preset, name) for name in names)] == []


def test_distributions_move_together() -> None:
    loaded = [tomllib.loads(path.read_text())["project"] for path in PROJECTS]
    versions = {project["version"] for project in loaded}
    assert len(loaded) == 8
    chart = (ROOT / "deploy/helm/fourfold/Chart.yaml").read_text()
    versions |= set(re.findall(r"^(?:version|appVersion): (.+)$", chart, re.MULTILINE))
    versions |= {fourfold.__version__, fourfold_reward.__version__}
    assert len(versions) == 1, "docs/releasing.md lists the files"
    for project in loaded[1:]:
        ours = [d for d in project["dependencies"] if re.match(r"fourfold\b", d)]
        assert ours and all(d.endswith(f"=={next(iter(versions))}") for d in ours), project["name"]


def test_constraints_are_names_and_versions_alone() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    bad = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)]
    names = [line.split("==")[0] for line in lines]
    assert bad == []
    assert len(names) == len(set(names)) and names == sorted(names, key=lambda n: n + "=")


def _commands(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and words of every command in the fenced blocks of a Markdown file."""
    inside = False
    for number, line in enumerate(path.read_text(encoding="utf-8").replace("\\\n", "").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif inside and re.match(r"\s*(\$ )?(make|fourfold|pip install|\S+/fourfold)\b", line):
            words = shlex.split(line.strip().removeprefix("$ ").partition(" > ")[0], comments=True)
            if words[-1:] != ["..."]:
                yield number, [w for w in words if w != "&"]


def test_make_help_lists_every_command() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    words = ["make", "-C", str(ROOT), "--no-print-directory", "help"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)
    assert [line.split()[1] for line in listed.stdout.splitlines()] == targets


def _check_command(words: list[str]) -> None:
    """Raise when a command would be refused for the way it is written."""
    match words:
        case ["make", *targets]:
            known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(targets) <= set(known), f"make {targets}; known: {known}"
        case ["pip", "install", *requirements]:
            for requirement in requirements:
                _check_requirement(requirement)
        case [_, ("-h" | "--help" | "--version")]:
            pass
        case [_, name, *rest]:
            _, options = cli_main.parse(name, rest)
            found = getattr(options, "recipe", None)
            for recipe in found if isinstance(found, list) else [found]:
                if recipe and str(recipe).startswith("recipes/"):
                    assert (ROOT / recipe).exists(), f"{recipe} is not there"


def _check_requirement(requirement: str) -> None:
    name, _, extras = requirement.rstrip("]").partition("[")
    for path in PROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        if project["name"] == name:
            missing = set(filter(None, extras.split(","))) - set(project.get("optional-dependencies", ()))
            assert not missing, f"{name} has no extra {missing}"
            return
    assert not name.startswith("fourfold"), f"no distribution is named {name}"


@pytest.mark.parametrize("path", READMES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_that_a_reader_may_copy_parses(path: Path) -> None:
    for number, words in _commands(path):
        try:
            _check_command(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{_where(path, number)}: {shlex.join(words)}: {error!r}")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("make quickstrat", AssertionError),
        ("fourfold plan --no-such x.toml", SystemExit),
        ("fourfold plan recipes/no-such.toml", AssertionError),
        ("fourfold serve rolout recipes/quickstart.toml", SystemExit),
        ("fourfold rum", FourfoldError),
        ("pip install fourfold-rollout[tpu]", AssertionError),
        ("pip install fourfold-rewards", AssertionError),
    ],
)
def test_a_wrong_command_is_found(text: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        _check_command(shlex.split(text))


def test_readme_fits_on_one_reading() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_a_page_names_every_result() -> None:
    """A result that no page names is superseded: delete it."""
    pages = "".join(path.read_text() for path in _committed() if path.suffix == ".md")
    results = {path.stem for path in _committed() if path.parent == ROOT / "benchmarks/results"}
    assert [name for name in results if name not in pages] == []
