"""Loading of recipes: errors give file, line, rule and fix, and dump is the inverse of load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold import config
from fourfold.algorithm.advantages import ADVANTAGES
from fourfold.algorithm.corrections import DEFAULT_BOUNDS
from fourfold.algorithm.losses import LOSSES, GspoLoss, PpoLoss
from fourfold.config import Config, recipe
from fourfold.config.reward import JudgeConfig, RewardConfig
from fourfold.errors import ConfigError
from fourfold.table import Table

RECIPE = """\
name = "tiny"
steps = 3

[model]
source = "models/tiny"
max_context_tokens = 64

[data.train]
path = "train.jsonl"

[batch]
prompts_per_step = 2
group_size = 4

[sampling]
max_new_tokens = 16
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, text))
    return caught.value.message.replace(str(tmp_path), "DIR")


def test_the_date_of_chat_templates_is_a_date(tmp_path: Path) -> None:
    for value in ("2026-11-28", '"2026-11-28"'):  # TOML has dates
        assert config.load(write(tmp_path, f"{RECIPE}[data]\ndate = {value}\n")).data.date == "2026-11-28"
    wrong = refused(tmp_path, f'{RECIPE}[data]\ndate = "28 Nov"\n')
    assert "data.date = '28 Nov' is no date; write it as \"2026-11-28\"" in wrong.replace("data.date: ", "data.date = ")


def test_tools_of_an_environment_need_a_parser(tmp_path: Path) -> None:
    agents = '[agents]\nsource = "tasks"\n[environment]\nreplicas = 1\ntools = ["builtin:python"]\n'
    assert "rollout.tool_parser" in refused(tmp_path, RECIPE + agents)
    assert config.load(write(tmp_path, f'{RECIPE}{agents}[rollout]\ntool_parser = "hermes"\n')).environment.tools


def test_constrained_tool_calls_need_tools_and_a_grammar(tmp_path: Path) -> None:
    agents = '[agents]\nsource = "tasks"\n[environment]\nreplicas = 1\ntool_calls = "required"\n'
    assert "environment.tools is empty" in refused(tmp_path, f'{RECIPE}{agents}source = "a.py:A"\n')
    tools = f'{RECIPE}{agents}tools = ["builtin:python"]\n[rollout]\ntool_parser = '
    assert '"mistral"; use one of hermes' in refused(tmp_path, f'{tools}"mistral"\n')
    assert config.load(write(tmp_path, f'{tools}"hermes"\n')).environment.tool_calls == "required"


@pytest.mark.parametrize("key", ["rollout.public_listen", "gateway.public_listen", "view.public_listen"])
def test_a_port_beyond_loopback_needs_certificates_and_tokens(tmp_path: Path, key: str) -> None:
    table, name = key.split(".")
    port = f'{RECIPE}[{table}]\n{name} = "0.0.0.0:50060"\n'
    assert f'{key} = "0.0.0.0:50060" is beyond loopback, where a port needs TLS; run' in refused(tmp_path, port)
    secured = f'{port}[security]\ndirectory = "certs"\n'
    assert f'{key} = "0.0.0.0:50060" needs bearer tokens; set security.tokens_file' in refused(tmp_path, secured)
    assert config.load(write(tmp_path, f'{secured}tokens_file = "certs/tokens.txt"\n')).security.directory
    assert config.load(write(tmp_path, port.replace("0.0.0.0", "127.0.0.1")))
    assert f"{key} = '::1:1': put an IPv6 address" in refused(tmp_path, port.replace("0.0.0.0:50060", "::1:1"))


def test_the_http_port_beyond_loopback_needs_certificates(tmp_path: Path) -> None:
    port = f'{RECIPE}[gateway]\nhttp_listen = "gateway.example:8000"\n'
    assert "gateway.http_listen" in refused(tmp_path, port)
    assert config.load(write(tmp_path, f'{port}[security]\ndirectory = "certs"\n'))
    assert config.load(write(tmp_path, port.replace("gateway.example:8000", "")))


@pytest.mark.parametrize(
    ("tokens", "kl", "most"), [(299_300, 0.0, 299_300), (299_301, 0.0, 299_300), (299_300, 0.1, 232_789)]
)
def test_a_sample_that_no_message_of_a_step_can_carry_is_refused(
    tmp_path: Path, tokens: int, kl: float, most: int
) -> None:
    settings = config.load(write(tmp_path, RECIPE)).model_dump(mode="json")
    settings["model"]["max_context_tokens"] = settings["batch"]["tokens_per_micro_batch"] = tokens
    settings["algorithm"]["kl"]["coef"], settings["reference"]["tokens_per_batch"] = kl, tokens
    if tokens <= most:
        assert config.Config.model_validate(settings).model.max_context_tokens == tokens
        return
    with pytest.raises(ValueError, match=f"TrainStep carries at most 4194304 bytes of one sample; lower it to {most}"):
        config.Config.model_validate(settings)


@pytest.mark.parametrize(
    ("change", "to", "message"),
    [
        ("steps = 3", "step = 3", "DIR/recipe.toml:2  step: no such key. Did you mean `steps`?"),
        ("steps = 3", "", "DIR/recipe.toml:1  the recipe: `steps` is missing or 0; set it to at least 1"),
        ("group_size = 4", "groupsize = 4", ":13  batch.groupsize: no such key. Did you mean `group_size`?"),
        ("group_size = 4", "learning_rate = 1", ":13  batch.learning_rate: no such key. Did you mean `trainer.learn"),
        ("group_size = 4", "num_generations = 4", ":13  batch.num_generations: no such key. Did you mean `group_size"),
        ("group_size = 4", "lr = 1e-6", ":13  batch.lr: no such key. Did you mean `trainer.learning_rate`?"),
        ("group_size = 4", "kl_coef = 0.1", ":13  batch.kl_coef: no such key. Did you mean `algorithm.kl.coef`?"),
        ("steps = 3", "max_steps = 3", ":2  max_steps: no such key. Did you mean `steps`?"),
        ("group_size = 4", "n = 4", ":13  batch.n: no such key. Did you mean `group_size`?"),
        ("steps = 3", "save_steps = 3", ":2  save_steps: no such key. Did you mean `checkpoint.every_steps`?"),
        ("steps = 3", "run_name = 3", ":2  run_name: no such key. Did you mean `name`?"),
        ("steps = 3", "gradient_checkpointing = true", "Did you mean `trainer.gradient_checkpointing`?"),
        ("group_size = 4", "zzz = 1", ":13  batch.zzz: no such key. Known keys: epochs_per_step, group_size, mini_ba"),
        (
            "group_size = 4",
            "group_size = 0",
            ":13  batch: `group_size` is missing or 0; set it to at least 1, or set rows",
        ),
        ("group_size = 4", 'group_size = "4x"', ":13  batch.group_size = '4x': input should be a valid integer"),
        ("[batch]", "[algorithm]\npreset = []\n[batch]", "algorithm: preset = [] is unknown; choose one of"),
        ("[batch]", "[algorithm.correction]\nkind = []\n[batch]", "algorithm.correction.kind = []: input should be"),
        ("[batch]", "[bach]", ":11  bach: no such key. Did you mean `batch`?"),
        ('name = "tiny"', 'name = "a b"', ":1  name = 'a b': string should match pattern"),
        ("max_new_tokens = 16", "max_new_tokens = 64", "sampling.max_new_tokens = 64 leaves no room for a prompt"),
        ("max_new_tokens = 16", "max_new_tokens = 8\ntop_p = 0.9", ":17  sampling: `top_p` is refused for training"),
        ("max_new_tokens = 16", "max_new_tokens = 8\ntop_k = 5", "`top_k` is refused for training rollouts"),
        ("max_new_tokens = 16", "max_new_tokens = 8\ntemperature = 0.005", ":17  sampling.temperature: 0.005 is below"),
        ("max_new_tokens = 16", "max_new_tokens = 8\ntemperature = 0.0", ":17  sampling.temperature = 0.0: input sh"),
        (
            "max_new_tokens = 16",
            f"max_new_tokens = 8\nstop_token_ids = {list(range(65))}",
            "should have at most 64 items",
        ),
        ("max_new_tokens = 16", "max_new_tokens = 8\nstop_token_ids = [-1]", "should be greater than or equal to 0"),
        ('path = "train.jsonl"', "", ":8  data.train: path and reasoning_gym are empty, and rows need a source; set p"),
        ('path = "train.jsonl"', 'reasoning_gym = "x"', "reasoning_gym = 'x' generates any number of rows; set size,"),
        ('path = "train.jsonl"', 'path = "x"\noptions = {a = 1}', "options = {'a': 1} are for a reasoning-gym task,"),
        (
            "group_size = 4",
            "group_size = 4\ntokens_per_micro_batch = 32",
            "cannot hold one sample of model.max_context",
        ),
        ("[batch]", "[trainer]\nranks = 9\n[batch]", "= 8 samples cannot feed 9 trainer ranks in 1 mini-batches;"),
        (
            "[batch]",
            '[algorithm]\npreset = "ppo"\n[critic]\nranks = 9\n[batch]',
            "8 samples in 1 mini-batches cannot feed critic.ranks = 9; lower it, or raise batch.prompts_per_step",
        ),
        ("steps = 3", "steps = 3 4", "DIR/recipe.toml: not valid TOML: "),
        ("steps = 3", "steps = true", ":2  steps = True"),
        ("steps = 3", "steps = 2.5", ":2  steps = 2.5"),
        ("steps = 3", 'steps = "3"', ":2  steps = '3': input should be a valid integer"),
        ("steps = 3", "steps = 3\ntrainer = 1", ":3  trainer = 1: must be a table, [trainer]"),
        ("steps = 3", "steps = 3\nreward = [1]", ":3  [[reward]] number 1 = 1: must be a table, [[reward]]"),
        ("steps = 3", "steps = 3\nreward = 1", ":3  reward = 1: must be a list"),
        (
            'path = "train.jsonl"',
            'path = "train.jsonl"\nreasoning_gym = "products"',
            "data.train: path = 'train.jsonl' and reasoning_gym = 'products' are two sources; remove one",
        ),
        ("group_size = 4", "group_size = 1", "`grpo` compares the samples of a prompt; raise it to at least 2"),
        (
            "group_size = 4",
            'group_size = 1\n[algorithm]\npreset = "reinforce++"\nfilter.keep = "varied"',
            "algorithm.filter.keep = `varied` keeps groups whose scores differ; raise it to at least 2",
        ),
    ],
)
def test_a_mistake_is_named_with_line_rule_and_fix(tmp_path: Path, change: str, to: str, message: str) -> None:
    assert change in RECIPE
    assert message in refused(tmp_path, RECIPE.replace(change, to))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("[trainer]\nadam_betas = [0.9, 0.9, 0.9]", ":18  trainer.adam_betas = [0.9, 0.9, 0.9]: tu"),
        ("[weights]\ntimeout_seconds = 0", "weights.timeout_seconds = 0: input should be"),
        ("[weights]\ntimeout_seconds = nan", "weights.timeout_seconds = nan: input should be"),
        ('[trainer]\nzero_stage = 0\noffload = "optimizer"', ':19  trainer: offload = "optimizer" needs zero_stage 1,'),
        (
            '[trainer]\nzero_stage = 2\noffload = "optimizer+parameters"',
            ':19  trainer: offload = "optimizer+parameters" needs zero_stage 3, not 2; set zero_stage = 3, or',
        ),
        ("[trainer]\nzero_hpz_partition_size = 2\nranks = 3", "trainer: zero_hpz_partition_size = 2 and ranks = 3"),
        (
            "[trainer]\nzero_hpz_partition_size = 2\nranks = 2\nzero_stage = 2",
            "trainer: zero_hpz_partition_size = 2 and zero_stage = 2 exclude each other: it needs stage 3",
        ),
        (
            '[trainer]\nzero_hpz_partition_size = 2\nranks = 2\noffload = "optimizer+parameters"',
            "trainer: zero_hpz_partition_size = 2 and offload = optimizer+parameters exclude each other",
        ),
        (
            "[trainer]\nzero_hpz_partition_size = 2\nranks = 2\nlora = { rank = 4 }",
            "trainer: zero_hpz_partition_size = 2 and lora.rank = 4 exclude each other",
        ),
        ('[weights]\nbackend = "nccl"', 'weights.backend = "nccl" moves weights between GPUs, and trainer.device ='),
        ('[trainer]\ndevice = "cuda"\n[weights]\nbackend = "cuda_ipc"', 'weights.backend = "cuda_ipc" moves weights'),
        ('[weights]\npause = "stop"', "weights.pause = 'stop': input should be 'auto', 'keep'"),
        (
            '[trainer]\ndevice = "cuda"\noffload = "optimizer+parameters"\n[rollout]\ngpus_per_replica = 1\n'
            '[weights]\nbackend = "nccl"',
            'trainer.offload = "optimizer+parameters"; set weights.backend = "auto", or keep both on GPUs',
        ),
        ("[weights]\nverify_every = 0", "weights.verify_every = 0: input should be greater"),
        ('[rollout]\nquantization = "fp8"', 'rollout: quantization = "fp8" needs a GPU; set gpus_per_replica to at'),
        ("[rollout]\nsleep_mode = true", "rollout: sleep_mode = true needs a GPU; set gpus_per_re"),
        ('[trainer]\noffload = "disk"', ":18  trainer.offload = 'disk': input should be"),
        ("[trainer]\nmuon_momentum = 1", "trainer.muon_momentum = 1: input should be less"),
        ("[trainer]\nema_decay = 1", "trainer.ema_decay = 1: input should be less than 1"),
        ("[checkpoint]\nkeep_best = 2", "checkpoint.keep_best = 2 needs held-out scores, and there is no held-out"),
        ("[algorithm.kl]\ncoef = inf", "algorithm.kl.coef = inf: input should be"),
        ('[trainer]\ndevice = "gpu"', ":18  trainer.device = 'gpu': input should be"),
        (
            '[trainer]\nschedule = "Cosin"',
            "trainer.schedule = 'Cosin': input should be 'constant', 'linear' or 'cosine'; did you mean `cosine`?",
        ),
        ("[trainer]\nlearning_rate = nan", "trainer.learning_rate = nan: input should be"),
        ('[algorithm]\npreset = "grop"', ":18  algorithm: preset = 'grop' is unknown; did you mean `grpo`? Known are"),
        ('[algorithm.kl]\ncoef = 0.1\nestimator = "k1"', ":17  algorithm.kl: estimator k1 has no gradient"),
        ("[algorithm.kl]\ntarget = 0.1", "algorithm.kl: target = 0.1 needs coef > 0: an adaptive coefficient of 0"),
        ("[algorithm]\nentropy_coeff = 0.1", ":18  algorithm.entropy_coeff: no such key."),
        ("[algorithm.correction]\nlow = 3", "algorithm.correction: low = 3"),
        (
            '[algorithm]\nadvantage.kind = "remax"\nshaping.normalize = true',
            "score of the greedy completion that advantage.kind = `remax` compares it with; remove",
        ),
        (
            '[algorithm]\nadvantage.kind = "gdpo"\nshaping.truncated = 0.5',
            "change a sample's score, but advantage.kind = `gdpo` compares the terms of the score; remove them and",
        ),
        ("[algorithm.loss]\ndual_clip = 0.5", "algorithm.loss: dual_clip = 0.5 must be above 1"),
        ("[algorithm.loss]\nclip_hihg = 0.1", ":17  algorithm.loss: clip_hihg: no such key for kind = 'ppo'. Its"),
        ('[algorithm.loss]\nkind = "gsop"', "kind = 'gsop' is unknown; did you mean `gspo`? Known are bradley-terry"),
        ("[algorithm]\nloss = 3", "algorithm.loss: 3 names no kind; write a table"),
        ("[algorithm.loss]\nclip_low = 2", ":18  algorithm.loss.clip_low = 2: input should be less than or equal to 1"),
        ('[algorithm.loss]\nkind = "cispo"\nratio_min = 2\nratio_max = 1', "ratio_min = 2.0 must be below ratio_max ="),
        ("[algorithm.advantage]\ngamma = 0.9", "algorithm.advantage: gamma: no such key for kind = 'grpo'. Its keys:"),
        ('[algorithm.filter]\nkeep = "mean-inside"\nlow = 1', "algorithm.filter: low = 1.0 must be below high = 1.0"),
        ("[algorithm.kl]\ncoef = 0.1\ntarget = 0.1\nhorizon = 1", "algorithm.kl.horizon = 1 is too short for 8"),
        ("[reward]\ncommand = []", ":18  reward: command = [] is empty, so that nothing scores"),
        ("[trainer]\nzero_stage = 0", "trainer.zero_stage = 0 adds the gradients of micro-batches in model.dtype ="),
        (
            '[algorithm.kl]\ncoef = 0.1\nestimator = "k2"\nimportance_weighted = true',
            "importance_weighted = true weighs k3 in the loss, not estimator = `k2`",
        ),
        (
            '[algorithm]\npreset = "grpo-paper"\nkl = { estimator = "k2" }',
            "k3_max = 0 has no effect on estimator = `k2`; remove it, or, if the preset has it, set it to 10",
        ),
        ("[algorithm.shaping]\ncount_masked = true", "count_masked = true counts what mask_truncated leaves out; set"),
        ("[algorithm.shaping]\nclip_low = -2.0", "clip_low = -2.0 is the lower bound of clip = 0, which is no limit;"),
        ("[reward]\ntarget = []", "reward: target = [] is empty"),
        ('[reward]\nfunction = ""\ntargt = "h:1"', "reward.targt: no such key. Did you mean `target`?"),
        ('[reward]\nhttp = ""', "reward: http = '' is empty"),
        ('[reward]\nhttp = "htp://u:password@host/x"', ":18  reward.http: the address does not begin with http:// or"),
    ],
)
def test_a_mistake_in_a_table_is_named_with_its_rule(tmp_path: Path, tables: str, message: str) -> None:
    assert message in refused(tmp_path, f"{RECIPE}{tables}\n")


def test_the_title_of_a_scorer_has_no_keys() -> None:
    address = "https://user:password@host:8000/v1?key=secret"
    assert RewardConfig(http=address).title == "https://host:8000/v1"
    judge = JudgeConfig(url=address, model="judge-7b")
    assert RewardConfig(judge=judge).title == "judge-7b at https://host:8000/v1"


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    for path, message in {
        tmp_path / "none.toml": "cannot read the recipe (No such file or directory); give the path of a TOML file",
        tmp_path: "cannot read the recipe (Is a directory)",
    }.items():
        with pytest.raises(ConfigError) as caught:
            config.load(path)
        assert message in caught.value.message
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'name = "caf\xe9"\n')
    with pytest.raises(ConfigError, match="UTF-8"):
        config.load(latin)


text = st.text(st.characters(codec="utf-8"), max_size=12)
scalar = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | text
value = st.recursive(scalar, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=8)


@given(options=st.dictionaries(text, value, max_size=4), prompt=text, source=text, rate=st.floats(1e-12, 10))
def test_what_dump_writes_load_reads(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], prompt: str, source: str, rate: float
) -> None:
    settings = Config.model_validate(
        {
            "name": "n",
            "steps": 1,
            "model": {"source": source},
            "data": {
                "train": {"reasoning_gym": "products", "size": 3, "options": options},
                "holdout": {"groups": 2},
                "system_prompt": prompt,
            },
            "batch": {"prompts_per_step": 2, "group_size": 2},
            "sampling": {"max_new_tokens": 4, "stop_token_ids": [1, 2]},
            "trainer": {"learning_rate": rate},
        }
    )
    path = tmp_path_factory.getbasetemp() / "dumped.toml"
    path.write_text(config.dump(settings), encoding="utf-8")
    assert config.load(path) == settings


@pytest.mark.parametrize("name", config.PRESETS)
def test_a_preset_gives_every_key_its_value_and_the_recipe_may_change_one(tmp_path: Path, name: str) -> None:
    plain = config.load(write(tmp_path, f'{RECIPE}[algorithm]\npreset = "{name}"\n')).algorithm
    for key, value in config.PRESETS[name].items():
        found = getattr(plain, key)
        assert (found.model_dump(include=set(value)) if isinstance(value, dict) else found) == value
    text = f'{RECIPE}[algorithm]\npreset = "{name}"\n[algorithm.kl]\ncoef = 0.5\n'
    changed = config.load(write(tmp_path, text)).algorithm
    assert changed.kl.coef == 0.5
    assert changed.model_dump(exclude={"kl": {"coef"}}) == plain.model_dump(exclude={"kl": {"coef"}})


def test_a_kind_of_correction_brings_its_bounds(tmp_path: Path) -> None:
    text = RECIPE + '[algorithm]\npreset = "cispo"\n[algorithm.correction]\n'
    for keys, bounds in {
        'kind = "icepop"': (0.5, 5.0),
        'kind = "sequence-mask"': (0.999, 1.002),
        'kind = "icepop"\nhigh = 3.0': (0.5, 3.0),
        "high = 3.0": (0.0, 3.0),
    }.items():
        correction = config.load(write(tmp_path, text + keys + "\n")).algorithm.correction
        assert (correction.low, correction.high) == bounds, keys


@pytest.mark.parametrize("kind", DEFAULT_BOUNDS)
def test_a_correction_is_read_back_as_it_was_written(tmp_path: Path, kind: str) -> None:
    text = f'{RECIPE}[algorithm]\npreset = "cispo"\n[algorithm.correction]\nkind = "{kind}"\n'
    found = config.load(write(tmp_path, text))
    assert Config.model_validate(found.model_dump(mode="json")) == found
    assert config.load(write(tmp_path, config.dump(found))) == found


def test_a_bound_that_a_kind_of_correction_does_not_read_is_refused(tmp_path: Path) -> None:
    for kind, unread in {"off-policy-mask": "high", "sequence-k3-mask": "low"}.items():
        text = f'{RECIPE}[algorithm]\npreset = "cispo"\n[algorithm.correction]\nkind = "{kind}"\n{unread} = 0.5\n'
        with pytest.raises(ConfigError, match=f"{unread} = 0.5 has no effect: kind = `{kind}` reads .* alone"):
            config.load(write(tmp_path, text))


def test_a_table_of_another_kind_does_not_inherit_the_keys_of_the_preset(tmp_path: Path) -> None:
    text = RECIPE + '[algorithm]\npreset = "gspo"\n[algorithm.loss]\n'
    assert config.load(write(tmp_path, text + "clip_high = 0.1\n")).algorithm.loss == GspoLoss(
        clip_low=3e-4, clip_high=0.1
    )
    assert config.load(write(tmp_path, text + 'kind = "ppo"\n')).algorithm.loss == PpoLoss()


def test_each_name_of_another_trainer_leads_to_a_key() -> None:
    tables = [model for model in map(_table_of, Config.model_fields.values()) if model is not None]
    keys = set(Config.model_fields).union(*(table.model_fields for table in tables))
    dotted = {key for key in recipe._ALIASES.values() if "." in key}
    assert set(recipe._ALIASES.values()) - dotted <= keys
    assert not recipe._ALIASES.keys() & (keys - {"gradient_checkpointing"})
    kinds = {"algorithm.loss": LOSSES.find("ppo"), "algorithm.advantage": ADVANTAGES.find("gae")}
    for table, _, last in (key.rpartition(".") for key in dotted):
        kind = kinds.get(table)
        assert last in (kind.model_fields if kind else recipe._known_keys(tuple(table.split("."))))


def _table_of(field: Any) -> Any:
    candidates = (field.annotation, *getattr(field.annotation, "__args__", ()))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Table)), None)
