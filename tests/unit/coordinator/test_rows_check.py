"""The check of the rows of a recipe, before `fourfold run` and in `fourfold plan`: what it shows and refuses."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.testclient import TestClient

from fourfold import config as configuration
from fourfold.errors import ConfigError, WrongState
from fourfold.model.tokenizer import Tokenizer
from fourfold.plan.preflight import Preflight, RenderedRow
from fourfold.plan.report import rendered_lines
from fourfold_coordinator.cli import evaluate_rows
from fourfold_coordinator.launch.run_names import LEDGER_FILE
from fourfold_coordinator.rewards.data_check import check_data
from fourfold_coordinator.rows.open_rows import STORES_KEY, open_rows
from fourfold_coordinator.rows.progress import EncodingProgress
from fourfold_coordinator.state.ledger import Ledger
from fourfold_coordinator.training.prepared_reference import file_key
from fourfold_coordinator.view.app import make_app
from fourfold_coordinator.view.reader import RunFolders
from tests.support.chat_templates import write_tokenizer
from tests.support.template_shapes import SHAPES
from tests.unit.model.test_folder import write_model

RECIPE: Final = """\
name = "own"
[model]
source = "model"
max_context_tokens = 80
[data]
passes = 1
cache = "tokens"
[data.train]
path = "rows.jsonl"
[batch]
rows_per_step = 4
tokens_per_micro_batch = 128
[algorithm]
preset = "sft"
"""
Check = Callable[..., Preflight]


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def many(row: Any) -> list[Any]:
    """Return a row among 40 good ones, so that dropping it is no error."""
    return [chat(f"q{i}", "a") for i in range(40)] + [row]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def check(rows: list[Any] | bytes, *assignments: str, family: str = "qwen25", end: str = "<|im_end|>") -> Preflight:
        write_tokenizer(tmp_path / "model", SHAPES.get(family, ""), {"eos_token": end})
        (tmp_path / "model" / "config.json").write_text('{"vocab_size": 320}')
        if family not in SHAPES:
            (tmp_path / "model" / "chat_template.jinja").unlink()
        data = rows if isinstance(rows, bytes) else "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / "rows.jsonl").write_bytes(data)
        found = Preflight(configuration.load(tmp_path / "recipe.toml", assignments))
        check_data(found)
        return found

    return check


def test_generated_rows_are_read_once(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    generated = "data.train={reasoning_gym='chain_sum', size=8, prompt_field='question', answer_field='answer'}"
    options = generated, "model.max_context_tokens=256", "batch.tokens_per_micro_batch=256"
    check([], *options)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # its import takes a second
    assert check([], *options).notes["data"][0].startswith("reasoning_gym 'chain_sum': 8 rows of the form completion")


def test_form_counts_steps_and_text_of_the_rows(check: Check) -> None:
    rows = [chat("q1", "a"), chat("q2", "b", "r", "cc"), chat("q3", ""), chat("q4", "d" * 60), *many(chat("q", "e"))]
    found = check(rows)
    counts, steps = found.notes["data"]
    assert counts.startswith("rows.jsonl: 45 rows of the form messages; kept 43, dropped ")
    assert "1 NO_LOSS_TOKENS" in counts and "1 TOO_LONG" in counts and "43 samples with " in counts
    assert "A pass has 11 steps. The first 11 have on average " in steps and found.config.steps == 11
    assert len(found.rendered) == 3
    for row in found.rendered:
        answer, in_loss = row.parts[-1]
        assert in_loss and answer.endswith("<|im_end|>") and not row.parts[0][1]
        assert row.title.startswith("Row ") and "tokens, " in row.title
        assert row.parts[0][0].startswith("<|im_start|>system\nBe of use.<|im_end|>")


LONGER: Final = ("model.max_context_tokens=200", "batch.tokens_per_micro_batch=400")


def pair(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": chat(question)["messages"], "chosen": answer, "rejected": "no"}


def test_the_reference_of_pairs_and_its_size_are_named(check: Check) -> None:
    found = check([pair(f"q{i}", "yes") for i in range(8)], "algorithm.preset=dpo", *LONGER)
    (reference,) = found.notes["reference"]
    tokens = int(re.findall(r"at most ([\d,]+) tokens", reference)[0].replace(",", ""))
    assert f"{tokens * 4 / 1e6:.2f} MB in data.cache" in reference and tokens > 100


def test_the_rows_of_a_run_are_shown_with_the_tokens_of_the_loss_colored(check: Check, tmp_path: Path) -> None:
    rows = [pair(f"<img src=x> {i}", "yes" * (1 + i % 12)) for i in range(24)]
    config = check(rows, "algorithm.preset=simpo", "data.holdout={field='', groups=3}", *LONGER).config
    run = tmp_path / "runs" / "rows"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(configuration.dump(config))
    with TestClient(make_app(RunFolders([run], cache=tmp_path / "view")), base_url="http://127.0.0.1:8440") as client:

        def page(query: str) -> str:
            return client.get(f"/run/rows/samples{query}").text

        assert "no row was read yet" in page("")
        ledger = Ledger(run / LEDGER_FILE)
        opened = open_rows(config, Tokenizer.load(tmp_path / "model"))
        ledger.put({STORES_KEY: json.dumps(opened.folders())})
        ledger.close()
        some, longest = page(""), page("?order=longest")
        assert some.count("<section") == longest.count("<section") == 20 and "24 rows" in some and "<img" not in some
        assert "of rows.jsonl, chosen" in some and '<span class="in-loss">yes' in some and "yes" * 12 in longest
        assert re.search('<span class="in-loss">(yes)+&lt;[|]im_end[|]&gt;', longest) and "<h3>Row 1 " not in longest
        (Path(opened.folders()[0]) / "ids.bin").write_bytes(b"")
        assert "ids.bin has not the" in page("")


def test_an_evaluation_needs_the_reference_that_the_run_computed(check: Check, tmp_path: Path) -> None:
    rows = [pair(f"q{i}", "yes") for i in range(24)]
    config = check(rows, "algorithm.preset=dpo", "data.holdout={field='', groups=3}", *LONGER).config
    opened = open_rows(config, Tokenizer.load(tmp_path / "model"))
    with pytest.raises(ConfigError, match="holdout: the run has no reference log-probabilities of this set"):
        evaluate_rows._references(config, tmp_path, opened)
    ledger = Ledger(tmp_path / LEDGER_FILE)
    ledger.put({file_key("holdout", served=False): str(tmp_path / "gone.bin")})
    ledger.close()
    batch = opened.held_out[0].steps(config).take(1)
    assert batch is not None
    with pytest.raises(WrongState, match=r"step 1 needs the reference log-probabilities of .*gone.bin"):
        evaluate_rows._references(config, tmp_path, opened)["holdout"](batch, 1)


def test_a_held_out_labelled_answer_needs_another_one(check: Check) -> None:
    rows = [chat(f"q{i}", "yes") | {"label": i % 2} for i in range(24)]
    held_out = "data.holdout={field='', groups=1}"
    with pytest.raises(ConfigError, match=r"the held-out set holdout has 1 row, .*; hold out at least 2"):
        check(rows, "algorithm.preset=kto", held_out, *LONGER)


def test_what_is_in_the_loss_is_green_or_marked() -> None:
    row = RenderedRow(title="Row 7 of x", parts=(("Ask:\n\x1b[2J", False), ("yes" + "-" * 900, True)))
    plain, green = (rendered_lines([row], colour=colour) for colour in (False, True))
    assert plain[-3:-1] == ["Row 7 of x:", "  Ask:"] and "{+ and +}" in plain[1]
    assert (
        plain[-1].startswith("  ?[2J{+yes--") and plain[-1].endswith("-+}") and "[... 303 characters ...]" in plain[-1]
    )
    assert green[-1].startswith("  ?[2J\x1b[32myes") and green[-1].endswith("-\x1b[0m")
    (line,) = rendered_lines([RenderedRow(title="t", parts=(("a", False), ("b", True)) * 20)], colour=False)[4:]
    assert line == "  " + "a{+b+}" * 5 + " [... 28 parts ...] a{+b+}"
    assert rendered_lines([], colour=True) == []


def test_a_plan_without_checks_loads_neither_grpc_nor_numpy(check: Check, tmp_path: Path) -> None:
    check([chat("q", "a")] * 4)
    code = (
        "import sys; from fourfold.cli.main import main; main(['plan', 'recipe.toml', '--skip-checks']);"
        "assert not {'grpc', 'numpy', 'jinja2', 'tokenizers'} & set(sys.modules), sys.modules.keys()"
    )
    config = '{"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, '
    (tmp_path / "model" / "config.json").write_text(config + '"intermediate_size": 16, "num_key_value_heads": 1}')
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("own: 1 pass of sft on model\n") and "1 pass over the rows. " in done.stdout


# What the rows have, keys of the command line, what the error says.
REFUSED: Final[dict[str, tuple[list[Any] | bytes, list[str], str]]] = {
    "column missing": (
        [{"message": "x", "n": 1, "m": "y"}] * 4,
        [],
        r"rows\.jsonl: the rows have the columns m, message, n; .*messages_field",
    ),
    "column missing later": (
        many({"message": 1}),
        [],
        r"row 40: no column 'messages'; did you mean `message`\?.*data\.messages_field",
    ),
    "no object": (many([1]), [], r"rows\.jsonl:41: not valid JSON: a list in place of an object"),
    "invalid UTF-8": (b'{"text": "\xff"}\n', [], r"rows\.jsonl:1: not valid JSON: .utf-8. codec"),
    "half a surrogate": (b'{"text": "\\ud800"}\n', [], r"rows\.jsonl:1: not valid JSON: .*surrogate"),
    "no messages": (many({"messages": []}), [], r"row 40: the messages are \[\]; .*data\.bad_rows"),
    "unknown role": (
        many({"messages": [{"role": "wizard", "content": "x"}]}),
        [],
        r"row 40: message 0 has the role 'wizard'.*data\.bad_rows",
    ),
    "content is no text": (
        many({"messages": [{"role": "user", "content": 3}]}),
        [],
        r"row 40: message 0 has the content 3",
    ),
    "last is not the assistant's": (many(chat("q", "a", "r")), [], r"row 40: the last message has the role 'user'"),
    "wrong rows, too many": (
        [chat("q", "a"), chat("q")] * 4,
        ['data.bad_rows="drop"'],
        r"4 of 8 rows \(50\.0%\) .* BAD_ROW: row 1: the last .*max_dropped",
    ),
    "no token in the loss": (
        [chat("q", "a"), chat("q", "")] * 4,
        [],
        r"4 of 8 rows .* NO_LOSS_TOKENS: row 1.*data\.loss_on",
    ),
    "too long": (
        [chat("q", "a"), chat("q", "a" * 99)] * 4,
        [],
        r"4 of 8 rows .* TOO_LONG: row 1: 1\d\d tokens, above .* = 80.*data\.too_long",
    ),
    "ids above the vocabulary": (
        [{"input_ids": [1, 999], "labels": [1, 999]}] * 4,
        [],
        r"row 0: input_ids holds 999, and the model has \d+ tokens",
    ),
    "fewer rows than a step": ([chat("q", "a")] * 3, [], r"batch\.rows_per_step = 4, and the data has 3 rows"),
    "weight": (many({**chat("q", "a"), "w": -1}), ["data.weight_field=w"], r"no column 'w'|weight \(w\) is -1"),
    "message weight": (
        many({"messages": [*chat("q")["messages"], {"role": "assistant", "content": "a", "weight": 0.5}]}),
        [],
        r"row 40: message 1 has weight = 0\.5",
    ),
    "no file": (b"", ['data.train.path="other.jsonl"'], r"path = 'other\.jsonl' does not exist"),
    "no row": (b"", [], r"rows\.jsonl: it has no row"),
    "no template file": (
        [chat("q", "a")] * 4,
        ['data.chat_template="x.jinja"'],
        r"data\.chat_template = 'x\.jinja': cannot be read",
    ),
    "conversations without chat": (
        [chat("q", "a")] * 4,
        ["data.chat=false"],
        r"rows are conversations \(form messages\).*data\.chat = false; remove data\.chat",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_are_refused_before_anything_is_started(check: Check, tmp_path: Path, name: str) -> None:
    rows, assignments, text = REFUSED[name]
    with pytest.raises(ConfigError, match=text):
        check(rows, *assignments)
    assert not list((tmp_path / "tokens").glob("fourfold-*")), "nothing half-made is left"


@pytest.mark.parametrize(
    ("family", "end", "text"),
    [
        ("none", "<|im_end|>", r"model has no chat template; set data\.chat_template to .*data\.chat = false"),
        ("qwen3", "<|im_end|>", r'row 0: message 1: .* differently.*set data\.turns = "each".*answer$'),
        ("qwen25", "<|eot|>", r"row 0: .* ends an answer with .*none of the model's end tokens \('<\|eot"),
    ],
)
def test_a_template_that_does_not_fit_names_the_key(check: Check, family: str, end: str, text: str) -> None:
    rows = [chat("q", "a", "r", "b")] * 4
    with pytest.raises(ConfigError, match=text) as caught:
        check(rows, family=family, end=end)
    assert "bad_rows" not in caught.value.message, "the rows are right"
    keys = {"none": 'chat_template="t.jinja"', "qwen3": 'turns="each"', "qwen25": 'turns="each"'}
    Path("t.jinja").write_text(SHAPES["qwen25"])
    more = ['data.end="token"'] if end == "<|eot|>" else []
    found = check(rows, f"data.{keys[family]}", *more, family=family, end=end)
    assert all(row.parts[-1][0].endswith(end) for row in found.rendered)


def test_progress_has_rate_and_share() -> None:
    def shown(total: int | None) -> list[str]:
        now, out = iter([0.0, 0.5, 10.0, 10.1, 40.0]), io.StringIO()
        progress = EncodingProgress("x.jsonl", total, out, clock=lambda: next(now))
        for rows in (100, 4000, 4100, 9000):
            progress.show(rows)
        return out.getvalue().splitlines()

    assert shown(10_000) == [
        "encoding x.jsonl: 4,000 rows, 400 rows/s, 40%, 15 s left",
        "encoding x.jsonl: 9,000 rows, 225 rows/s, 90%, 4 s left",
    ]
    assert shown(None)[0] == "encoding x.jsonl: 4,000 rows, 400 rows/s"


@pytest.mark.parametrize("preset", ["dpo", "reward-model", "process-reward"])
def test_tools_that_the_template_leaves_out_are_refused(check: Check, preset: str) -> None:
    tool = {"type": "function", "function": {"name": "rain", "description": "d", "parameters": {}}}
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "tools": [tool],
            **(
                {"completions": ["a"], "labels": [True]}
                if preset == "process-reward"
                else {"chosen": "a", "rejected": "b"}
            ),
        }
        for i in range(40)
    ]
    with pytest.raises(ConfigError, match="row 0: the chat template leaves out the tool 'rain'"):
        check(rows, f"algorithm.preset={preset}", "batch.tokens_per_micro_batch=200", family="chatml")
