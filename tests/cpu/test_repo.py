"""The promises that the repository makes about itself: size budgets, one error vocabulary, tests where they belong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagepool.errors import CODES, Reason

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("memd", "inferd", "proto/pagepool", "kernels", "clients")
MAX_FUNCTION, MAX_FILE, MAX_PARAMETERS = 40, 300, 6
# Words that would tie the repository to one machine or one package index.
PLACES = re.compile("pypi" + r"\.org|files\.python" + r"hosted|/wo" + r"rk/|/home/\w|/ro" + r"ot/")


def sources() -> Iterator[Path]:
    for root in SOURCE_ROOTS:
        yield from (path for path in sorted((ROOT / root).rglob("*.py")) if "_pb2" not in path.name)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, the docstring left out: a long contract is no long function."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_function_is_longer_than_the_budget() -> None:
    long = [
        f"{name_of(path)}:{node.lineno} {node.name} has {code_lines(node)} lines"
        for path in sources()
        for node in functions(path)
        if code_lines(node) >= MAX_FUNCTION
    ]
    assert not long, "\n".join(long)


def test_no_file_is_longer_than_the_budget() -> None:
    counts = {name_of(path): path.read_text().count("\n") for path in sources()}
    long = {name: count for name, count in counts.items() if count >= MAX_FILE}
    assert not long


def test_no_constructor_takes_more_parameters_than_the_budget() -> None:
    wide = []
    for path in sources():
        for node in functions(path):
            arguments = node.args.posonlyargs + node.args.args[1:] + node.args.kwonlyargs
            if node.name == "__init__" and len(arguments) > MAX_PARAMETERS and node.args.kwarg is None:
                wide.append(f"{name_of(path)}:{node.lineno} takes {len(arguments)}")
    assert not wide, "\n".join(wide)


def test_protos_and_error_vocabulary_name_the_same_reasons() -> None:
    comments = "\n".join(path.read_text() for path in (ROOT / "proto").rglob("*.proto"))
    documented = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", comments)) | set(re.findall(r"/ ([A-Z]+)\b", comments))
    undocumented = [reason for reason in Reason if reason not in documented and reason is not Reason.INTERNAL_ERROR]
    assert not undocumented
    assert set(CODES) == set(Reason)


def test_every_reason_in_a_proto_comment_stands_beside_its_own_code() -> None:
    pattern = re.compile(r"//\s+([A-Z_]+) / ([A-Z_]+(?:, [A-Z_]+)*)")
    pairs = [
        (code, reason)
        for path in (ROOT / "proto").rglob("*.proto")
        for code, reasons in pattern.findall(path.read_text())
        for reason in reasons.split(", ")
    ]
    assert len(pairs) > 40
    assert [pair for pair in pairs if CODES[Reason(pair[1])].name != pair[0]] == []


def test_every_test_file_lies_in_a_folder_that_says_what_it_needs() -> None:
    stray = [
        name_of(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.relative_to(ROOT / "tests").parts[0] not in {"cpu", "gpu", "e2e"}
    ]
    assert not stray


def test_every_test_function_can_fail() -> None:
    def checks(node: ast.AST) -> bool:
        names = {"raises", "check", "warns", "fail"}
        return any(
            isinstance(part, ast.Assert)
            or (isinstance(part, ast.Attribute) and (part.attr in names or part.attr.startswith("assert")))
            or (
                isinstance(part, ast.Name)
                and (part.id in names or part.id.startswith(("assert", "check_", "expect", "run_state")))
            )
            for part in ast.walk(node)
        )

    toothless = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in functions(path)
        if node.name.startswith("test_") and not checks(node)
    ]
    assert not toothless, "\n".join(toothless)


def test_no_tracked_file_names_a_machine_or_a_package_index() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    guilty = [
        name
        for name in listing.stdout.split()
        if (ROOT / name).is_file() and PLACES.search((ROOT / name).read_text(errors="replace"))
    ]
    assert not guilty


@pytest.mark.parametrize("module", ["memd.__main__", "pagepool_client"])
def test_the_base_install_needs_neither_torch_nor_numpy(module: str) -> None:
    blocked = ("torch", "numpy", "numba", "transformers", "pycuda")
    script = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import {module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inferd_on_the_base_install_says_what_to_install() -> None:
    script = "import sys; sys.modules['tokenizers'] = None; from inferd.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "inferd: tokenizers is not installed; run `pip install 'pagepool[inferd]'`\n"


def test_docs_name_only_make_targets_and_commands_that_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    docs = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = {target for path in docs for target in re.findall(r"`?\bmake ([a-z][a-z0-9-]+)`", path.read_text())}
    assert named, "no document names a make target"
    assert named <= targets


def test_architecture_has_a_sentence_for_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = ("memd", "inferd", "proto/pagepool", "kernels/pagekernels", "clients/python/pagepool_client")
    modules = [path for package in packages for path in (ROOT / package).rglob("*.py") if "_pb2" not in path.name]
    missing = [name_of(path) for path in modules if path.stem != "__init__" and f"| `{path.stem}` | " not in text]
    assert not missing
