"""`--config FILE`: names, precedence, errors, and the way back from `--print-config`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config import ConfigErrors, config_from_dict, parse, parse_or_exit, to_dict, to_yaml

from .minimal import errors_of, minimal, parsed


def yaml(folder: Path, text: str, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--bf16 --swiglu --hidden-size 96 --position-embedding-type none --lr-warmup-fraction 0.1",
        "--group-query-attention --num-query-groups 4 --disable-bias-linear --split 1,1,0 --min-lr 1e-7",
        "--fp16 --initial-loss-scale 65536 --lr-decay-style WSD --lr-wsd-decay-iters 2",
        "--save out --save-interval 5 --load out",
    ],
)
def test_the_resolved_yaml_gives_the_same_configuration(tmp_path: Path, flags: str) -> None:
    config = parsed(flags, world_size=2)
    assert parse(["--config", yaml(tmp_path, to_yaml(config))], world_size=2) == config


def test_a_dict_gives_the_same_configuration() -> None:
    config = parsed("--bf16 --group-query-attention")
    assert config_from_dict(to_dict(config)) == config


def test_a_dict_with_wrong_names_and_values_is_refused() -> None:
    values = to_dict(parsed()) | {"num_layer": 3, "lr": "fast"}
    del values["hidden_size"]
    with pytest.raises(ConfigErrors) as found:
        config_from_dict(values)
    text = str(found.value)
    assert "num_layer: unknown setting; did you mean num_layers?" in text
    assert "--lr fast: not a number" in text
    assert "--hidden-size: is required" in text


def test_print_config_prints_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_or_exit([*minimal(), "--print-config"], 4, rank=0)
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert out == to_yaml(parsed(world_size=4))
    assert "seed: 1234\n" in out
    assert "null" not in out  # what is not set is left out
    assert "[]" not in out


def test_other_ranks_print_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_or_exit([*minimal(), "--print-config"], 4, rank=1)
    assert capsys.readouterr() == ("", "")


def test_names_may_have_dashes_and_megatrons_spelling(tmp_path: Path) -> None:
    text = "micro-batch-size: 4\ndisable_bias_linear: true\nbf16: true\nlr: 3e-4\n"
    text += "use_mcore_models: true\nfp16: false\n"
    config = parse([*minimal(without="--micro-batch-size --lr"), "--config", yaml(tmp_path, text)], 1)
    assert config.batch.micro_batch_size == 4
    assert config.optimizer.lr == 3e-4
    assert config.precision.params_dtype == "bfloat16"
    assert not config.model.add_bias_linear


def test_flags_override_files_and_later_files_earlier_ones(tmp_path: Path) -> None:
    first = yaml(tmp_path, "num_layers: 6\nhidden_size: 96\nseed: 1\n", "first.yaml")
    second = yaml(tmp_path, "hidden_size: 144\nseed: 2\n", "second.yaml")
    argv = [
        "--seed",
        "3",
        "--config",
        first,
        "--config",
        second,
        *minimal(without="--num-layers --hidden-size"),
    ]
    config = parse(argv, 1)
    assert (config.model.num_layers, config.model.hidden_size, config.run.seed) == (6, 144, 3)


@pytest.mark.parametrize(
    ("file", "without", "flags"),
    [
        ("data_path: [nowhere]\nsplit: 1,1,1\n", "", ""),
        ("train_data_path: [nowhere]\nvalid_data_path: [nowhere]\n", "", ""),
        ("data_args_path: nowhere\n", "", ""),
        ("train_samples: 64\n", "", ""),
        ("train_iters: 64\n", "--train-iters", "--train-samples 64"),
        ("lr_warmup_fraction: 0.1\n", "", "--lr-warmup-iters 2"),
        ("lr_warmup_fraction: 0.1\n", "", "--lr-warmup-iters 0"),
        ("bf16: true\n", "", "--fp16"),
        ("params_dtype: float64\n", "", "--bf16"),
        ("group_query_attention: true\nnum_query_groups: 4\n", "", "--no-group-query-attention"),
    ],
)
def test_a_flag_replaces_what_contradicts_it_in_a_file(
    tmp_path: Path, file: str, without: str, flags: str
) -> None:
    argv = minimal(flags, without)
    config = parse(["--config", yaml(tmp_path, file), *argv], 1)
    split = "1,1,1" if "split" in file else "969, 30, 1"
    assert config == parse([*argv, "--split", split], 1)


def test_a_recipe_may_hold_a_save_interval_for_whoever_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_or_exit(["--config", yaml(tmp_path, "save_interval: 5\n"), *minimal()], 1, rank=0)
    warning = "warning: nothing will be saved: give --save FOLDER to keep what is trained\n"
    assert capsys.readouterr().err == warning


def test_a_recipe_may_hold_an_eval_interval_for_whoever_evaluates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_or_exit(["--config", yaml(tmp_path, "eval_interval: 5\n"), *minimal("--eval-iters 0")], 1, rank=0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layer: 3\n", "run.yaml: num_layer: unknown setting; did you mean num_layers?"),
        ("model:\n  num_layers: 3\n", "run.yaml: model: unknown setting; settings are not nested"),
        ("seed: [1, 2\nlr: 3\n", "run.yaml: line 2, column"),
        ("seed: 1\nseed: 2\n", "run.yaml: line 2, column 1: 'seed' stands twice"),
        ("- seed\n", "must hold lines of `name: value`"),
        ("seed: true\n", "run.yaml: seed true: not a whole number"),
        ("seed: 1.5\n", "run.yaml: seed 1.5: not a whole number"),
        ("swiglu: maybe\n", "run.yaml: swiglu maybe: not true or false; give true or false"),
        ("num_layers: {a: 1}\n", "run.yaml: num_layers {'a': 1}: not a whole number; give"),
        ("data_path: {x: y}\n", "run.yaml: data_path {'x': 'y'}: not text; give text"),
        ("data_path: [{x: y}]\n", "run.yaml: data_path {'x': 'y'}: not text; give text"),
        ("data_path: true\n", "run.yaml: data_path true: not text; give text"),
        ("save: [a, b]\n", "run.yaml: save a b: not text; give text"),
        ("bf16: 3\n", "run.yaml: bf16 3: not true or false; give true or false"),
        ("disable-bias-linear: no way\n", "run.yaml: disable-bias-linear no way: not true or false"),
        ("lr: -1\n", "run.yaml: lr -1: must be > 0"),
        (
            "log_straggler: true\n",
            "--log-straggler: is not available in this version",
        ),
        ("context_parallel_size: 2\n", "--context-parallel-size 2: only 1 is supported"),
        ("bf16: true\nfp16: true\n", "run.yaml: fp16: contradicts --bf16"),
    ],
)
def test_a_wrong_file_is_a_message(tmp_path: Path, text: str, message: str) -> None:
    found = errors_of([*minimal(), "--config", yaml(tmp_path, text)])
    assert [message in error for error in found] == [True], found


def test_a_missing_file_is_one_message() -> None:
    assert errors_of(["--config", "nowhere.yaml"]) == [
        "--config nowhere.yaml: cannot be read: No such file or directory"
    ]


@pytest.mark.parametrize(("word", "on"), [("'true'", True), ("1", True), ("'off'", False), ("0", False)])
def test_switches_take_the_words_that_other_booleans_take(tmp_path: Path, word: str, on: bool) -> None:
    text = f"bf16: {word}\ndisable_bias_linear: {word}\n"
    config = parse([*minimal(), "--config", yaml(tmp_path, text)], 1)
    assert config.precision.params_dtype == ("bfloat16" if on else "float32")
    assert config.model.add_bias_linear is not on


def test_off_and_null_refuse_nothing(tmp_path: Path) -> None:
    text = "log_straggler: false\nrecompute_granularity: null\nlr_decay_iters: null\n"
    assert parse([*minimal(), "--config", yaml(tmp_path, text)], 1) == parsed()
