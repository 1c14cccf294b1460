"""The command line: what it prints, where, its exit code, and what it leaves on disk when something is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from recgen import package
from recgen.cli import main, paper
from recgen.errors import VerifyError
from tests.conftest import RunPython

Invoke = Callable[..., tuple[int, str, str]]

ERROR = "{path}:1:3: error: wrong is wrong\n    q wrong\n      ^\n  hint: right\n"


@pytest.fixture
def invoke(stand_in: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Run a command line in a folder that holds specs/one.rec and specs/two.rec: its exit code, what it printed, and its errors."""
    monkeypatch.chdir(tmp_path)
    Path("specs").mkdir()
    Path("specs/one.rec").write_text("one\n")
    Path("specs/two.rec").write_text("two\n")

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        code = stopped.value.code
        out, err = capsys.readouterr()
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    return run


def test_help_names_every_command(invoke: Invoke) -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for command in ("new", "generate", "check", "explain", "list", "bench"):
        assert re.search(rf"^\W*{command}\s", out, re.MULTILINE), command


def test_version_and_usage(invoke: Invoke) -> None:
    assert invoke("--version")[:2] == (0, "recgen 0.1.0\n")
    assert invoke("generat")[0] == 2
    assert invoke("explain", "one", "--stage", "tiles")[0] == 2


def test_generate_writes_every_spec_of_the_folder(invoke: Invoke) -> None:
    code, out, err = invoke("generate")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["generated/one", "specs/one.rec"], ["generated/two", "specs/two.rec"]]
    assert sorted(os.listdir("generated/one")) == ["NOTES.md", "__init__.py", "helper.py"]
    assert "unchanged" in invoke("generate")[1]


def test_generate_takes_names_paths_and_a_folder(invoke: Invoke, tmp_path: Path) -> None:
    Path("mine.rec").write_text("mine\n")
    assert invoke("generate", "two", "mine.rec", "--out", "a/b")[0] == 0
    assert sorted(os.listdir("a/b")) == ["mine", "two"]
    assert not Path("generated").exists()


def test_generate_says_where_there_are_no_chunked_kernels(invoke: Invoke) -> None:
    Path("odd.rec").write_text("obstacle\n")
    code, out, err = invoke("generate", "one", "odd.rec")
    assert code == 0 and "generated/odd" in out
    assert err == "recgen: note: odd has recurrent kernels and no chunked ones: it has none\n"


def test_a_wrong_spec_is_shown_as_it_is_and_leaves_nothing(invoke: Invoke) -> None:
    Path("bad.rec").write_text("wrong\n")
    for command in (["generate", "bad.rec"], ["explain", "bad.rec"], ["check", "bad.rec"]):
        code, out, err = invoke(*command)
        assert (code, out) == (1, "")
        assert err.startswith(ERROR.format(path="bad.rec"))
        assert sorted(os.listdir()) == ["bad.rec", "specs"]


def test_a_wrong_spec_leaves_its_package_and_the_other_specs_alone(invoke: Invoke) -> None:
    invoke("generate")
    before = package.on_disk(Path("generated/one"))
    Path("specs/one.rec").write_text("wrong\n")
    Path("specs/two.rec").write_text("changed\n")
    code, out, err = invoke("generate")
    assert code == 1
    assert err == ERROR.format(path="specs/one.rec")
    assert "generated/one" not in out
    assert package.on_disk(Path("generated/one")) == before
    assert package.on_disk(Path("generated/two"))["NOTES.md"] == "changed\n"


def test_a_fault_of_recgen_stays_a_traceback_and_leaves_nothing(invoke: Invoke) -> None:
    Path("bad.rec").write_text("faulty\n")
    with pytest.raises(VerifyError):
        main(["generate", "bad.rec"])
    assert sorted(os.listdir()) == ["bad.rec", "specs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "onne"], "no spec named 'onne'; did you mean one?"),
        (["generate", "none.rec"], "none.rec: cannot read the spec: No such file or directory"),
        (["generate", "one", "specs/one.rec"], "two specs are named one: specs/one.rec, specs/one.rec"),
        (["generate", "one", "--out", "specs/two.rec"], "specs/two.rec: File exists"),
        (["explain", "xyz"], "two. A file is given by its path: xyz.rec"),
        (["new", "a-b"], "'a-b' is no name for a spec: a name is an identifier: recgen new a_b"),
        (["new", "a.rec", "--dir", "b"], "a name is an identifier: recgen new a --dir b"),
        (["new", "../ops/name"], "and --dir chooses the folder: recgen new name --dir ../ops"),
        (["new", "c d/a.rec", "--dir", "b"], "and --dir chooses the folder: recgen new a --dir 'b/c d'"),
        (["new", "lambda"], "a name is an identifier: recgen new my_rule"),
        (["new", "sum"], "'sum' is no name for a spec: it is a name of Python"),
        (["new", "one"], "specs/one.rec exists; it is left as it is"),
    ],
)
def test_other_mistakes_get_one_line(invoke: Invoke, arguments: list[str], message: str) -> None:
    code, out, err = invoke(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("recgen: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_check_passes_on_what_generate_wrote_and_shows_what_differs(invoke: Invoke) -> None:
    invoke("generate")
    assert invoke("check")[:2] == (0, "2 packages in generated are what their specs produce\n")
    helper = Path("generated/one/helper.py")
    helper.write_text(helper.read_text().replace("2 * x", "3 * x"))
    Path("specs/two.rec").unlink()
    Path("generated/notes").mkdir()
    code, out, err = invoke("check")
    assert code == 1
    assert "--- a/generated/one/helper.py\n+++ b/generated/one/helper.py\n" in out
    assert "-    return 3 * x\n+    return 2 * x\n" in out
    assert "generated/two: stale, no spec of that name\n" in out
    assert "notes" not in out
    assert "run recgen generate" in err
    assert helper.read_text().endswith("3 * x\n")
    assert invoke("check", "one")[0] == 1
    assert invoke("generate")[0] == 0


def test_explain_prints_every_stage_or_one(invoke: Invoke) -> None:
    code, out, _ = invoke("explain", "one")
    assert code == 0
    assert re.findall(r"^(.+):.*\n=+$", out, re.MULTILINE) == ["normal form", "chunk form", "tile graph", "schedule"]
    assert invoke("explain", "one", "--stage", "tile")[1] == "of one\n"


def test_explain_says_why_there_is_no_chunk_form(invoke: Invoke) -> None:
    Path("odd.rec").write_text("obstacle\n")
    code, out, _ = invoke("explain", "odd.rec")
    assert code == 0
    assert out.endswith("references are made from the normal form.\n")
    assert "chunk form:" not in out
    assert invoke("explain", "odd.rec", "--stage", "tile")[:2] == (0, "odd has no chunk form: it has none\n")


def test_new_writes_a_spec_to_start_from(invoke: Invoke) -> None:
    code, out, _ = invoke("new", "my_rule")
    assert (code, out.splitlines()[0]) == (0, "specs/my_rule.rec")
    assert "My rule: say here" in Path("specs/my_rule.rec").read_text()
    assert invoke("new", "other", "--dir", "deep/er")[0] == 0
    assert Path("deep/er/other.rec").is_file()


def test_bench_hands_its_arguments_on(invoke: Invoke) -> None:
    code, out, _ = invoke("bench", "--help")
    assert code == 0
    assert "recgen bench" in out
    assert "--check" in out
    assert invoke("bench", "--nonsense")[0] == 2


def test_paper_is_the_citation_of_a_docstring() -> None:
    assert paper("One line.") == ""
    assert paper("One line.\n\nMore of it.\n\nAuthors: Title,\n    2025.\n") == "Authors: Title, 2025."
    assert paper("One line.\n\nAuthors: Title, 2025. C is q here.\n") == "Authors: Title, 2025."
    assert paper("One line.\n\nA note without a source.\n") == "A note without a source."


@pytest.mark.slow
def test_the_starting_spec_compiles_and_runs(run_python: RunPython, tmp_path: Path) -> None:
    run_python("-m", "recgen", "new", "mine", cwd=tmp_path)
    run_python("-m", "recgen", "generate", "mine.rec", cwd=tmp_path)
    code = (
        "import torch; from generated.mine import mine\n"
        "q, k, v = torch.randn(3, 1, 70, 2, 16); g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)\n"
        "print(*mine(q, torch.nn.functional.normalize(k, dim=-1), v, g, beta)[0].shape)"
    )
    assert run_python("-c", code, cwd=tmp_path).stdout.split() == ["1", "70", "2", "16"]


def test_the_zoo_is_listed(run_python: RunPython, tmp_path: Path) -> None:
    listed = run_python("-m", "recgen", "list", cwd=tmp_path).stdout.splitlines()
    row = next(line for line in listed if line.startswith("gated_deltanet"))
    assert "scalar + rank 1" in row
    assert "yes" in row
    assert re.search(r"20\d\d", row)


def test_generate_says_where_a_decay_may_grow(tmp_path: Path, run_python: RunPython) -> None:
    declared = "q: key\nk: key\nv: value\na: {}\n\nS = S * exp(a) + v @ k.T\no = S @ q\n"
    for kind, said in (
        ("scalar[log_decay]", ""),
        ("scalar", "recgen: note: mine keeps exp(a) of the state at each token, and nothing declares"),
    ):
        (tmp_path / "mine.rec").write_text(declared.format(kind))
        run = run_python("-m", "recgen", "generate", str(tmp_path / "mine.rec"), "--out", str(tmp_path / "out"))
        assert run.stderr.startswith(said) and bool(run.stderr) == bool(said)
        assert (tmp_path / "out" / "mine" / "mine.rec").read_text() == declared.format(kind)
