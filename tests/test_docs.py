"""The documents say what is there: modules, files, links, code blocks, messages, commands."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import COMMANDS
from paceline.engine_args import NO_EFFECT, EngineArgs
from paceline.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LLM_KEYWORDS = {"policy", "disable_log_stats", "speculative_config"}


def blocks(path: Path, language: str = r"\w*") -> list[tuple[str, str]]:
    """Language and content of a document's fenced blocks."""
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```({language})\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


# ---- code blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=names(DOCUMENTS))
def test_python_blocks_compile_and_name_real_arguments(path: Path) -> None:
    engine = {f.name for f in fields(EngineArgs)} | set(NO_EFFECT) | LLM_KEYWORDS
    known = {"LLM": engine, "SamplingParams": {f.name for f in fields(SamplingParams)}}
    for _, code in blocks(path, "python"):
        tree = ast.parse(code, filename=path.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "paceline":
                assert {alias.name for alias in node.names} <= set(paceline.__all__)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                given = {keyword.arg for keyword in node.keywords}
                assert given <= known.get(node.func.id, given)


def test_readme_blocks_are_what_ci_runs() -> None:
    shell = [content for _, content in blocks(ENGLISH, "sh")]
    assert len(shell) == 2
    main_job, tests = (content.splitlines() for content in shell)
    assert main_job[:2] == tests[:2] == ["python3.11 -m venv .venv", ". .venv/bin/activate"]
    assert main_job[2] == "pip install -c constraints.txt -e ."
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in ci if line in tests[2:]] == tests[2:]
    assert 'python3.11 -m venv "$venv"' in ci


def test_readme_pins_the_torch_that_is_tested() -> None:
    pinned = (ROOT / "constraints.txt").read_text().strip()
    for path in (ENGLISH, CHINESE, ROOT / "docs" / "troubleshooting.md"):
        assert re.findall(r"torch==[\d.]+\d", path.read_text(encoding="utf-8")) == [pinned]


# ---- the two languages ---------------------------------------------------------------------------


def structure(path: Path) -> dict[str, list[str]]:
    """What must be alike in a document and its translation."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    return {
        "heading levels": re.findall(r"^(#+) ", text, re.MULTILINE),
        "list items and table rows": re.findall(r"^([-|]) ?", text, re.MULTILINE),
        "code": sorted(set(re.findall(r"`([^`\n]+)`", text))),
        "links": sorted(re.findall(r"\]\(([^)#]+)\)", text.replace("README.zh-CN", "README"))),
        "numbers": re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"`[^`\n]+`|\]\([^)]+\)", "", text)),
    }


@pytest.mark.parametrize("part", ["heading levels", "list items and table rows", "code", "links"])
def test_the_translation_has_the_same(part: str) -> None:
    assert structure(CHINESE)[part] == structure(ENGLISH)[part]


def test_the_translation_has_the_same_numbers() -> None:
    assert sorted(structure(CHINESE)["numbers"]) == sorted(structure(ENGLISH)["numbers"])


def test_the_translation_has_the_same_code_blocks() -> None:
    english, chinese = blocks(ENGLISH), blocks(CHINESE)
    assert [language for language, _ in chinese] == [language for language, _ in english]
    for (language, ours), (_, theirs) in zip(english, chinese, strict=True):
        if language == "text":  # the file tree: names as they are, descriptions translated
            assert [line.split()[0] for line in theirs.splitlines()] == [
                line.split()[0] for line in ours.splitlines()
            ]
        else:
            assert theirs == ours


# ---- names of files and modules ------------------------------------------------------------------


def tree_entries() -> Iterator[str]:
    """Paths in README's file tree; indented ones lie below the folder before them."""
    (_, tree), *_ = blocks(ENGLISH, "text")
    folder = ""
    for line in tree.splitlines():
        named = line.strip().split("  ")[0].split(", ")
        if line.startswith(" "):
            yield from (folder + name for name in named)
        else:
            folder = named[0]
            yield folder


def test_the_file_tree_is_complete_and_true() -> None:
    entries = set(tree_entries())
    for entry in entries:
        assert (ROOT / entry).exists(), entry
    package = SOURCE / "paceline"
    expected = {f"src/paceline/{path.name}" for path in package.glob("[a-z]*.py")}
    expected |= {f"src/paceline/{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert {entry for entry in entries if entry.startswith("src/paceline/")} - {
        "src/paceline/"
    } == expected


def test_the_file_tree_names_what_users_look_for() -> None:
    (_, tree), *_ = blocks(ENGLISH, "text")
    said = {line.split()[0]: line for line in tree.splitlines()}
    commands = set(re.findall(r"\w+", said["cli/"])) | set(re.findall(r"\w+", said["server/"]))
    assert set(COMMANDS) <= commands
    for folder, pattern in (("examples/", "*.*"), ("docs/", "*.md")):
        stems = {path.stem for path in (ROOT / folder).glob(pattern)}
        assert stems <= set(re.findall(r"\w+", said[folder])), folder
    # Files alone: an editable install leaves the folder src/paceline.egg-info.
    folders = {path.parent.name + "/" for path in ROOT.glob("[a-z]*/*.*") if path.is_file()}
    assert folders <= set(said)


def test_the_architecture_page_names_every_module_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(paceline/[\w/]+\.py)` \|", text, re.MULTILINE)
    modules = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.glob("paceline/**/*.py")
        if path.name != "__init__.py"
    }
    assert set(listed) == modules
    assert len(listed) == len(modules)
    assert set(re.findall(r"paceline/[\w/]+\.py", text)) <= modules
    for name in re.findall(r"`((?:core|spec|engine|worker)/\w+)`", text):
        assert f"paceline/{name}.py" in modules


def test_the_architecture_page_draws_the_import_contract() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    layers = contracts["importlinter:contract:layers"]["layers"].strip().splitlines()
    drawings = [text for _, text in blocks(ROOT / "docs" / "architecture.md", "text")]
    assert [line.split("   ")[0] for line in drawings[1].splitlines()] == layers


@pytest.mark.parametrize("path", DOCUMENTS, ids=names(DOCUMENTS))
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [slug(heading) for heading in headings], target
    for name in re.findall(r"`((?:src|tests|scripts|benchmarks|examples|docs)/[\w/.-]+)`", text):
        assert (ROOT / name).exists(), name


def slug(heading: str) -> str:
    """The anchor that code hosts give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# ---- messages ------------------------------------------------------------------------------------


def messages() -> Iterator[str]:
    """Every string in the package, with … for formatted values and without backticks."""
    for path in SOURCE.glob("paceline/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                ]
                yield "".join(parts).replace("`", "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("`", "")


def test_troubleshooting_quotes_real_messages() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    assert len(quoted) > 20
    known = list(messages())
    for quote in quoted:
        pattern = re.compile(".*?".join(re.escape(part) for part in quote.split("…")), re.DOTALL)
        assert any(pattern.search(message) for message in known), quote
