"""Every mistake in a domain's folder ends in one sentence that names file, key or line, and remedy."""

import json
import shutil
from pathlib import Path

import pytest

from reward.domain import load_domain
from reward.errors import DomainError
from reward.task import Task

TOML = """
name = "sums"
environment = "single_turn"
verifier = "math"

[components.success]
range = [0, 1]
"""


def row(name="a", prompt="1+1=", **more):
    return {"id": name, "prompt": prompt, "data": {"answer": "2"}, "solution": ["2"], **more}


TRAIN = [row(), row("b", "2+0=")]
EVAL = [row("c", "0+2=")]


def lines(rows):
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows)


@pytest.fixture
def folder(tmp_path: Path):
    def write(toml=TOML, train=TRAIN, eval_=EVAL, **files: str) -> Path:
        (tmp_path / "domain.toml").write_text(toml)
        (tmp_path / "train.jsonl").write_text(lines(train))
        (tmp_path / "eval.jsonl").write_text(lines(eval_))
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return tmp_path

    return write


def failure(folder: Path) -> str:
    with pytest.raises(DomainError) as caught:
        load_domain(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder)), "the file comes first"
    return message


def test_a_sound_folder_is_read_whole(folder):
    domain = load_domain(folder())
    assert domain.name == "sums"
    assert domain.train == (
        Task("a", "sums", "train", "1+1=", {"answer": "2"}, ("2",)),
        Task("b", "sums", "train", "2+0=", {"answer": "2"}, ("2",)),
    )
    assert [task.split for task in domain.eval] == ["eval"]
    assert domain.folder.is_absolute()


def test_the_digest_names_the_content(folder, tmp_path_factory):
    path = folder(verify="def verify(task, answer): return {}")
    first = load_domain(path).digest
    copy = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(path, copy)
    (copy / "__pycache__").mkdir()
    (copy / "__pycache__" / "verify.pyc").write_bytes(b"cache")
    (copy / ".hidden").write_text("an editor's")
    assert load_domain(copy).digest == first
    (copy / "verify.py").write_text("def verify(task, answer): return {'success': 1}")
    assert load_domain(copy).digest != first
    (path / "verify.py").rename(path / "other.py")
    assert load_domain(path).digest != first


def test_blank_lines_and_a_missing_final_newline_are_fine(folder):
    path = folder()
    (path / "eval.jsonl").write_text("\n" + json.dumps(EVAL[0]))
    assert len(load_domain(path).eval) == 1


def test_a_line_separator_inside_a_string_ends_no_line(folder):
    text = json.dumps(row("u", "a\u2028b"), ensure_ascii=False)
    assert load_domain(folder(train=[text])).train[0].prompt == "a\u2028b"


COMPONENT = "[components.success]\nrange = [0, 1]\n"
USER = TOML.replace('"math"', '"verify.py:grade"')


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        (TOML.replace("verifier", "verifer"), "domain.toml: unknown key `verifer`; did you mean `verifier`?"),
        (TOML + "wieght = 1\n", "unknown key `components.success.wieght`; did you mean `weight`?"),
        (TOML + "zzz = 1\n", "unknown key `components.success.zzz`; known are `range`, `weight`, `kind`, `when`"),
        (TOML + "weight = -1\n", "`components.success.weight` = -1 must be at least 0"),
        (TOML + "weight = nan\n", "`components.success.weight` = nan must be a finite number"),
        (
            TOML + 'kind = "reward"\n',
            "`components.success.kind` = 'reward' must be one of 'outcome', 'progress' or 'cost'",
        ),
        (TOML + 'when = "tests"\n', "components.success.when = 'tests' names no outcome component"),
        (TOML + 'kind = "cost"\n', 'no component has kind = "outcome"'),
        (TOML.replace("[0, 1]", "[1, 0]"), "components.success.range = [1.0, 0.0] is empty"),
        (TOML.replace("[0, 1]", "1"), "`components.success.range` = 1 must be a list"),
        (TOML.replace("[0, 1]", "[0, inf]"), "`components.success.range[1]` = inf must be a finite number"),
        (
            TOML.replace("range = [0, 1]", ""),
            "the key `components.success.range` is missing; add it: Lowest and highest",
        ),
        (TOML.replace('name = "sums"', ""), "the key `name` is missing; add it: Name in reports"),
        (TOML.replace('"sums"', '"My sums"'), "`name` = 'My sums' must match the pattern"),
        (
            TOML.replace('name = "sums"', 'name = "sums"\nmax_turns = "three"'),
            "`max_turns` = 'three' must be a whole number",
        ),
        (TOML.replace('name = "sums"', 'name = "sums"\nmax_turns = 0'), "`max_turns` = 0 must be at least 1"),
        (TOML.replace('verifier = "math"', ""), "`verifier` belongs to environment"),
        (
            TOML.replace('"math"', '"maths"'),
            "`verifier` = 'maths' is neither built in nor of the form FILE.py:NAME; did you",
        ),
        (TOML.replace('"single_turn"', '"termnal"'), "`verifier` belongs to environment"),
        (
            TOML.replace("components.success", "components.sucess"),
            "`components.sucess` is nothing that 'math' returns; did",
        ),
        (TOML.replace("[0, 1]", '[0, "tests"]'), "train.jsonl:1: `components.success.range` takes its upper end from"),
        ("name = \n", "domain.toml: is not valid TOML:"),
        (
            USER.replace("verify.py:grade", "gone.py:grade"),
            "`verifier` = 'gone.py:grade' names a file that cannot be read",
        ),
        (USER.replace(":grade", ":judge"), "`verifier` = 'verify.py:judge' names nothing in"),
        (USER.replace("verify.py", "../verify.py"), "lies outside the domain's folder"),
        (USER.replace("verify.py", "broken.py"), "broken.py:1: is not valid Python"),
    ],
)
def test_a_mistake_in_domain_toml_is_named(folder, toml, says):
    path = folder(toml, verify="def grade(task, answer): ...", broken="def grade(:")
    assert says in failure(path)


def test_an_unknown_environment_is_named(folder):
    toml = TOML.replace('"single_turn"', '"termnal"').replace('verifier = "math"', "")
    assert (
        "`environment` = 'termnal' is neither built in nor of the form FILE.py:NAME; did you mean `terminal`?"
        in failure(folder(toml))
    )


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ([row(), "{"], "train.jsonl:2: is not valid JSON"),
        ([row(), "[1]"], "train.jsonl:2: is no JSON object"),
        ([row(), row()], "train.jsonl:2: the id 'a' is taken by line 1"),
        ([{"id": "a"}], "train.jsonl:1: the key `prompt` is missing"),
        ([{"prompt": "a"}], "train.jsonl:1: the key `id` is missing"),
        ([row(7)], "train.jsonl:1: `id` = 7 must be a string"),
        ([row(promt="x")], "train.jsonl:1: unknown key `promt`; did you mean `prompt`?"),
        ([row(solution="2")], "train.jsonl:1: `solution` = '2' must be a list"),
        ([row(solution=[])], "train.jsonl:1: `solution` = [] is too short"),
        ([row(data={})], "train.jsonl:1: in `data`: the key `answer` is missing; add it: Expected answer"),
        ([row(data={"answer": 2})], "train.jsonl:1: in `data`: `answer` = 2 must be a string"),
        ([row(data={"answer": "2", "labels": {"kind": 1}})], "in `data`: `labels.kind` = 1 must be a string"),
        ([], "train.jsonl: holds no task"),
        ([row("c")], "eval.jsonl: the task 'c' is in train.jsonl too"),
        ([row("x", "0+2=")], "eval.jsonl: the task 'c' has the prompt and data of 'x' in train.jsonl"),
    ],
)
def test_a_mistake_in_a_task_file_is_named_with_its_line(folder, train, says):
    assert says in failure(folder(train=train))


@pytest.mark.parametrize("name", ["train", "eval"])
def test_a_split_that_is_missing_or_empty_is_named(folder, name):
    path = folder()
    (path / f"{name}.jsonl").write_text("\n \n")
    assert f"{name}.jsonl: holds no task; the {name} split needs at least one line" in failure(path)
    (path / f"{name}.jsonl").unlink()
    assert f"{name}.jsonl: no such file; domain.toml names it as `{name}`" in failure(path)


def test_bytes_that_are_no_text_are_named(folder):
    path = folder()
    (path / "eval.jsonl").write_bytes(b"\xff\xfe")
    assert "eval.jsonl: cannot be read as UTF-8 text" in failure(path)
    (path / "domain.toml").write_bytes(b"\xff\xfe")
    assert "domain.toml: cannot be read as UTF-8 text" in failure(path)


def test_a_folder_without_a_declaration_is_named(tmp_path):
    assert "domain.toml: no such file; a domain is a folder with a domain.toml" in failure(tmp_path)


TERMINAL = """
name = "shell"
environment = "terminal"
[components.success]
range = [0, 1]
"""


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"files": {}}, "the key `expect` is missing"),
        ({"expect": {}}, "`expect` = {} is too short"),
        ({"expect": {"/etc/passwd": "x"}}, "'/etc/passwd' must be a relative path inside"),
        ({"expect": {"a": "x"}, "files": {"../a": "x"}}, "'../a' must be a relative path inside"),
        ({"expect": {"a": "x"}, "files": {"a": 3}}, "`files.a` = 3 must be a string"),
    ],
)
def test_a_mistake_in_terminal_data_is_named(folder, data, says):
    assert says in failure(folder(TERMINAL, train=[row(data=data)], eval_=[row("b", data={"expect": {"a": "x"}})]))


CODE = """
name = "code"
environment = "code"
[components.tests_passed]
range = [0, "tests"]
"""


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"entry_point": "f"}, "the key `tests` is missing"),
        ({"entry_point": "f", "tests": []}, "`tests` = [] is too short"),
        ({"entry_point": "f()", "tests": [[[1], 1]]}, "`entry_point` = 'f()' must match"),
        ({"entry_point": "f", "tests": [[1, 1]]}, "`tests[0][0]` = 1 must be a list"),
        ({"entry_point": "f", "tests": [[[1]]]}, "the key `tests[0][1]` is missing"),
    ],
)
def test_a_mistake_in_code_data_is_named(folder, data, says):
    sound = {"entry_point": "f", "tests": [[[1], 1]]}
    assert says in failure(folder(CODE, train=[row(data=data)], eval_=[row("b", data=sound)]))
