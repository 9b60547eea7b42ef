import ast
import contextlib
import importlib
import inspect
import io
import re
import runpy
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import maxrl_fast
from maxrl_fast import ops
from maxrl_fast.config.read import parse
from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.training.objectives.registry import OBJECTIVES

ROOT = Path(__file__).parent.parent
OTHER_PAGES = "README.md CONTRIBUTING.md CHANGELOG.md bench/README.md "
OTHER_PAGES += "examples/README.md examples/papers/README.md tests/RELIABILITY.md"
PAGES = [*(ROOT / name for name in OTHER_PAGES.split()), *sorted((ROOT / "docs").rglob("*.md"))]
OBJECTIVE_PAGES = ROOT / "docs" / "objectives"
WRITER = runpy.run_path(str(ROOT / "docs" / "pages.py"))
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
EXAMPLE = re.compile(
    r"^```python\n((?:(?!^```).)*)^```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
# Commands with a name in capitals, "...", or an objective or task that a guide adds are not parsed.
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{2,}\b|--objective minpo\b|--task sort\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", FENCE.sub("", text), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        numbered = (slug if i == 0 else f"{slug}-{i}" for i in range(1000))
        found.add(next(name for name in numbered if name not in found))
    return found


def links(text: str) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return [x for x in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:", x)]


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path.read_text()):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert target.is_relative_to(ROOT.resolve()), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize(
    "path", [path for path in PAGES if not path.name.startswith("adding_")], ids=name_of
)
def test_files_that_pages_name_exist(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r"`((?:maxrl_fast|csrc|tests|bench|examples|docs)/[\w/.-]*)`", text)
    # the map of the code
    for folder, row in re.findall(r"^\| `(maxrl_fast/\w+/)` \|(.*)", text, re.MULTILINE):
        named += [folder + file for file in re.findall(r"`([^X\W]\w*\.py)`", row)]
    for file in named:
        assert (ROOT / file).exists(), file


def code_of_documents() -> Iterator[tuple[str, str]]:
    """Yield what is Python in pages and docstrings, in fences or indented."""
    texts = [(path, path.read_text()) for path in PAGES if path.name != "adding_an_op.md"]
    for path in (ROOT / "maxrl_fast").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                texts.append((path, f"{ast.get_docstring(node)}\n"))
    for path, text in texts:
        indented = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", FENCE.sub("", text), re.M)
        for code in [*re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M), *indented]:
            with contextlib.suppress(SyntaxError):
                yield name_of(path), ast.unparse(ast.parse(textwrap.dedent(code)))


def check_names(code: str) -> None:
    """Fail if the code imports or calls what this package lacks, or with other arguments."""
    names = {"maxrl_fast": maxrl_fast, "ops": ops}

    def named(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        owner = named(node.value) if isinstance(node, ast.Attribute) else None
        return None if owner is None else getattr(owner, node.attr)

    for node in ast.walk(ast.parse(code)):  # imports come before what is in statements
        if isinstance(node, ast.Import) and "integrations" in ast.unparse(node):
            names.clear()
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("maxrl_fast"):
            path = ROOT / f"{str(node.module).replace('.', '/')}.py"
            imported = {alias.name for alias in node.names}
            if "integrations" in path.parts:  # it needs the library of its name
                assert imported <= {getattr(x, "name", 0) for x in ast.parse(path.read_text()).body}
            else:
                module = importlib.import_module(str(node.module))
                names |= {name: getattr(module, name) for name in imported}
        elif isinstance(node, ast.Call) and (function := named(node.func)) is not None:
            keywords = {x.arg: None for x in node.keywords if x.arg}
            signature = inspect.signature(function)
            positional = [x for x in node.args if getattr(x, "value", 0) is not ...]
            signature.bind_partial(*positional, **keywords)
            if function is maxrl_fast.run:
                page = (ROOT / "docs" / "options.md").read_text()
                flags = re.findall(r"^\| `--([\w-]+)`", page, re.M)
                options = [flag.replace("-", "_") for flag in flags]
                assert keywords.keys() <= {*signature.parameters, *options}


def test_the_code_of_pages_and_docstrings_fits_the_package() -> None:
    blocks = [*code_of_documents()]
    assert sum("maxrl_fast" in code or "ops." in code for _, code in blocks) > 25
    for where, code in blocks:
        try:
            check_names(code)
        except Exception as error:
            raise AssertionError(f"{where}: {error!r}, in:\n{code}") from error
    for wrong in ("maxrl_fast.train(k=4)", "ops.maxpo(x)", "maxrl_fast.run(kk=4)"):
        with pytest.raises((TypeError, AttributeError, AssertionError)):
            check_names(wrong)


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    found = links(index.read_text())
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in found}
    assert {path.resolve() for path in (ROOT / "docs").glob("*.md")} - {index.resolve()} <= linked
    assert (OBJECTIVE_PAGES / "README.md").resolve() in linked


def test_the_tests_that_reliability_cites_exist() -> None:
    text = (ROOT / "tests" / "RELIABILITY.md").read_text()
    defined = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in defined, name


def test_every_objective_has_a_page() -> None:
    index = (OBJECTIVE_PAGES / "README.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| \[\w+\]\((\w+\.md)\) \|", index, re.MULTILINE))
    assert set(table) == set(OBJECTIVES)
    for name, file in table.items():
        text = (OBJECTIVE_PAGES / file).read_text()
        assert name in re.split(r"[#, \n]+", text.split("\n", 1)[0]), file  # its title
        assert re.search(rf"^    python -m maxrl_fast\.train --objective {name}\b", text, re.M)
    titles = " ".join(path.read_text().split("\n", 1)[0] for path in OBJECTIVE_PAGES.glob("*.md"))
    # also estimators that are not objectives
    assert set(ESTIMATORS) <= set(re.split(r"[#, ]+", titles))


@pytest.mark.parametrize(
    "path", [path for path in PAGES if EXAMPLE.search(path.read_text())], ids=name_of
)
def test_examples_print_the_output_shown(path: Path) -> None:
    try:
        for code, said in EXAMPLE.findall(path.read_text()):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, {})
            assert printed.getvalue() == said
    finally:
        torch.set_printoptions(profile="default")


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command) for every command that starts the trainer, with continued lines
    joined.
    """
    for path in PAGES:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if re.match(r"(    )?(python|torchrun\b.*) -m maxrl_fast\.train\b", line):
                yield name_of(path), line.strip()


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    num_checked = 0
    for where, line in commands():
        words = shlex.split(line, comments=True)
        if PLACEHOLDER.search(" ".join(words)) or {"--resume", "--help"} & set(words):
            continue
        try:
            parse(words[words.index("maxrl_fast.train") + 1 :])
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{where}: {line}: {error}") from error
        num_checked += 1
    assert num_checked > len(OBJECTIVES)


def test_the_options_page_is_current() -> None:
    is_current = (ROOT / "docs" / "options.md").read_text() == WRITER["options_page"]()
    assert is_current, "docs/options.md is out of date: python docs/pages.py"
