"""What README, CONTRIBUTING, docs/ and docstrings name exists: files, verbs, flags, names in code.
Campaigns say how they are run."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from fastlstm.cli.main import VERBS, commands

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
    *(
        page.relative_to(REPOSITORY).as_posix()
        for page in sorted((REPOSITORY / "docs").rglob("*.md"))
        if page.name != "files.md"
    ),
]
"""All but docs/files.md, which test_source_map.py compares with the files."""
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
FOLDERS = "|".join(("src", "tests", "docs", "benchmarks", "campaigns", "examples", r"\.ci"))
PATH = re.compile(rf"(?<![\w/.])(?:{FOLDERS})/[\w./*-]*[\w*]")
SOURCE = re.compile(r"(?<![\w/.])[\w/]+/\w+\.(?:py|h|cpp|md|cu)\b")
FLAG = re.compile(r"(?<![\w-])--(\[no-\])?([a-z][a-z0-9_-]+)")
COMMAND = re.compile(r"\bfastlstm ([a-z]+)\b([^\n|;,`'\"#]*)")
OF_OTHER_PROGRAMS = {
    "torchrun": "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id max-restarts standalone"
    " rdzv-conf numa-binding",
    "srun": "ntasks-per-node",
    "tensorflow_model_server": "rest-api-port model-name model-base-path",
    "wandb": "yes",
    "py-spy": "native pid",
    "curl": "data-binary",
    "lm_eval": "tasks model-args",
}


INLINE = re.compile(r"(?<!`)`([^`\n]+)`")
NAME = re.compile(r"(?<![\w/.-])[A-Za-z_][\w.]*")
WORD = re.compile(r"\w+")
COMPOUND = re.compile(r"\w_\w|[a-z][A-Z]")
TOLD = re.compile(r'\"\"\".*?\"\"\"|#[^"\n]*$', re.DOTALL | re.MULTILINE)
"""Docstrings and comments."""
OF_OTHERS = """
    AWS_ENDPOINT_URL AWS_PROFILE endpoint_override GOMP_SPINCOUNT sched_autogroup_enabled use_mkldnn
    fully_shard ConvLSTM PolynomialDecay load_weights model_base_path output_0
    ModelCheckpoint jit_compile reset_states TensorListReserve
    client_max_body_size max_fails proxy_request_buffering add_header proxy_pass
    custom_prefix_token_id auth_token OPENAI_API_KEY
    FASTLSTM_ALERT_RULE _RUN
    c_0 h_0 T_i W_ih compute_90 d_1 d_2 test_x test_x_y save_to_disk
"""
"""Names of systems, of other libraries, of nginx, names put together by code, and notation."""


def text_of(page):
    return (REPOSITORY / page).read_text(encoding="utf-8")


def flags_in(text):
    found = [(no, name.replace("_", "-")) for no, name in FLAG.findall(text)]
    return {name for _, name in found} | {f"no-{name}" for no, name in found if no}


@cache
def flags_of(verb):
    options = [option for command in commands(verb) for option in command.options]
    return flags_in(" ".join(option.usage for option in options)) | {"help", "help-all"}


@cache
def known_flags():
    """The flags of all verbs, of scripts of this repository, and of other programs."""
    known = {"version", "flag"}.union(*map(flags_of, VERBS))
    for folder in ("benchmarks", "campaigns", "tests"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            known.update(re.findall(r'"--([a-z][a-z0-9-]+)"', path.read_text(encoding="utf-8")))
    return known.union(*(flags.split() for flags in OF_OTHER_PROGRAMS.values()))


@pytest.mark.parametrize("page", PAGES)
def test_files_and_links_exist(page):
    text, base = text_of(page), (REPOSITORY / page).parent
    for link in re.findall(r"\]\(([^)#:]+)[)#]", text):
        assert (base / link).exists(), link
    for path in set(PATH.findall(text)):
        assert any(REPOSITORY.glob(path)) or any(REPOSITORY.glob(f"{path}.py")), path
    for path in {path for code in CODE.findall(text) for path in SOURCE.findall(code)}:
        folders = ("", "src", "src/fastlstm", "src/fastlstm/csrc")
        assert any((REPOSITORY / folder / path).exists() for folder in folders), path


@pytest.mark.parametrize("page", PAGES)
def test_verbs_and_their_flags_exist(page):
    for code in CODE.findall(text_of(page)):
        for verb, rest in COMMAND.findall(code.replace("\\\n", " ")):
            assert verb in VERBS, f"fastlstm {verb}"
            assert not flags_in(rest) - flags_of(verb), f"fastlstm {verb}{rest}"
        assert not flags_in(code) - known_flags(), code


@pytest.mark.parametrize("path", sorted((REPOSITORY / "campaigns").glob("*.py")), ids=str)
def test_a_campaign_says_what_it_shows_and_how_it_is_run(path):
    source = path.read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    assert said.partition("\n")[0].endswith(".")
    if "__main__" in source:
        assert re.search(rf"python campaigns/{path.name}\b", said), said


@cache
def words_of_code():
    """Returns the words of all sources that stand in code, not in docstrings or comments."""
    found = set[str]()
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in (REPOSITORY / folder).rglob("*.*"):
            if path.suffix in (".py", ".h", ".cpp", ".cu"):
                code = TOLD.sub("", path.read_text(encoding="utf-8"))
                found.update(WORD.findall(code), [path.stem])
    return found | {f"fastlstm_{word}" for word in found} | {f"fastlstm_{w}_total" for w in found}


def unknown(text):
    """Returns the names in backticks, such as `sync_every` and `LayerNorm`, that no code has."""
    names = {name for code in INLINE.findall(text) for name in NAME.findall(code)}
    words = {word for name in names for word in name.split(".") if COMPOUND.search(word)}
    return words - words_of_code() - set(OF_OTHERS.split())


@pytest.mark.parametrize("page", PAGES)
def test_names_of_a_page_exist(page):
    text = re.sub("```.*?```", "", text_of(page), flags=re.DOTALL)
    if page == "docs/start/coming-from.md":  # its first column has the words of other libraries
        text = re.sub(r"^\|[^|]*", "", text, flags=re.MULTILINE)
    assert unknown(text) == set()


def test_names_in_docstrings_exist():
    for path in (REPOSITORY / "src").rglob("*.py"):
        docstrings = re.findall(r'""".*?"""', path.read_text(encoding="utf-8"), re.DOTALL)
        assert unknown("\n".join(docstrings)) == set(), path
