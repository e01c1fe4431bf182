import re
from dataclasses import dataclass, field

import pytest

from baton.rpc.errors import InvalidRequest
from baton.services import settings
from baton.services.settings import SettingsError
from baton.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class RacerConfig:
    listen: str = field(default="127.0.0.1:1", metadata={"help": "Address."})
    num_laps: int = field(default=3, metadata={"help": "Laps.", "minimum": 1, "maximum": 10})
    pace: float = field(default=1.5, metadata={"help": "100 % is 1.", "minimum": 0})
    loud: bool = field(default=True, metadata={"help": "Noise."})
    rivals: tuple[str, ...] = field(default=(), metadata={"help": "Others."})
    lane: int | None = field(default=None, metadata={"help": "Lane.", "minimum": 1})
    surface: str = field(default="grass", metadata={"help": "Ground.", "choices": ("grass", "sand")})

    def validate(self) -> None:
        if self.surface == "sand" and self.num_laps > 5:
            raise InvalidRequest(f"num_laps={self.num_laps} on sand: 5 at most", field="num_laps")


def load(*argv: str, **environ: str) -> RacerConfig:
    (config,) = settings.load("racer", (RacerConfig,), argv, environ, "Races.")
    return config


def test_without_settings_the_defaults_apply():
    assert load() == RacerConfig()


def test_every_type_is_read_from_flags():
    config = load(
        "--listen", "h:2", "--num-laps=4", "--pace", "2", "--no-loud", "--rivals", "a:1, b:2", "--lane", "7",
        "--surface", "sand",
    )  # fmt: skip
    assert config == RacerConfig("h:2", 4, 2.0, False, ("a:1", "b:2"), 7, "sand")


def test_every_type_is_read_from_variables():
    config = load(
        BATON_RACER_LISTEN="h:2",
        BATON_RACER_NUM_LAPS="4",
        BATON_RACER_PACE="2",
        BATON_RACER_LOUD="off",
        BATON_RACER_RIVALS="a:1,b:2",
        BATON_RACER_LANE="none",
        BATON_RACER_SURFACE="sand",
    )
    assert config == RacerConfig("h:2", 4, 2.0, False, ("a:1", "b:2"), None, "sand")


def test_a_flag_goes_before_a_variable_and_a_variable_before_the_default():
    assert load("--num-laps", "9", BATON_RACER_NUM_LAPS="8").num_laps == 9
    assert load(BATON_RACER_NUM_LAPS="8").num_laps == 8


@pytest.mark.parametrize(
    ("words", "expected"), [(("--loud",), True), (("--loud", "false"), False), (("--no-loud",), False)]
)
def test_a_bool_flag_works_alone_negated_or_with_a_value(words, expected):
    assert load(*words).loud is expected


@pytest.mark.parametrize(
    ("words", "key", "allowed"),
    [
        (("--num-laps", "many"), "--num-laps: 'many'", "an integer from 1 to 10"),
        (("--num-laps", "11"), "--num-laps: '11'", "an integer from 1 to 10"),
        (("--pace", "-1"), "--pace: '-1'", "a number, at least 0"),
        (("--pace", "nan"), "--pace: 'nan'", "a number, at least 0"),
        (("--loud", "maybe"), "--loud: 'maybe'", "true or false"),
        (("--lane", "0"), "--lane: '0'", "an integer, at least 1, or none"),
        (("--surface", "ice"), "--surface: 'ice'", "one of grass, sand"),
    ],
)
def test_a_wrong_value_names_the_key_the_value_and_the_allowed_values(words, key, allowed):
    with pytest.raises(SettingsError) as raised:
        load(*words)
    assert key in str(raised.value)
    assert allowed in str(raised.value)


def test_a_wrong_variable_is_named_as_a_variable():
    with pytest.raises(SettingsError, match="BATON_RACER_NUM_LAPS: 'x'"):
        load(BATON_RACER_NUM_LAPS="x")


def test_unknown_flags_and_variables_are_refused_with_the_nearest_name():
    with pytest.raises(SettingsError, match=r"'--num-lap'; did you mean --num-laps\?"):
        load("--num-lap", "3")
    with pytest.raises(SettingsError, match=r"BATON_RACER_LOUDD='1'; did you mean BATON_RACER_LOUD\?"):
        load(BATON_RACER_LOUDD="1")


def test_variables_that_kubernetes_sets_for_a_service_of_the_same_name_are_not_ours():
    load(
        BATON_RACER_SERVICE_HOST="10.0.0.1",
        BATON_RACER_SERVICE_PORT="1",
        BATON_RACER_SERVICE_PORT_GRPC="1",
        BATON_RACER_PORT="tcp://10.0.0.1:1",
        BATON_RACER_PORT_1_TCP="tcp://10.0.0.1:1",
        BATON_RACER_PORT_1_TCP_ADDR="10.0.0.1",
        BATON_OTHER_THING="1",
    )


def test_a_config_that_contradicts_itself_is_refused_by_its_flags():
    with pytest.raises(SettingsError, match=r"^--num-laps=6 on sand"):
        load("--surface", "sand", "--num-laps", "6")


def test_help_shows_every_flag_default_and_variable(capsys):
    with pytest.raises(SystemExit) as raised:
        load("--help")
    text = capsys.readouterr().out
    assert raised.value.code == 0
    assert "--num-laps N" in text
    assert "default: 3" in text
    assert "BATON_RACER_NUM_LAPS" in text
    assert "100 % is 1." in text
    assert "{grass,sand}" in text


def test_several_configs_share_one_command_line():
    @dataclass(frozen=True)
    class Extra:
        colour: str = "red"

    racer, extra = settings.load("racer", (RacerConfig, Extra), ["--colour", "blue", "--lane", "2"], {})
    assert (racer.lane, extra.colour) == (2, "blue")


def test_dtypes_of_kv_have_vllms_names_and_others_are_refused_with_what_serves_them():
    (config,) = settings.load("worker", (WorkerConfig,), ("--kv-cache-dtype", "fp8", "--executor", "cuda"), {}, "")
    assert config.kv_cache_dtype == "fp8_e4m3"
    for words, message in (
        (("--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype: 'fp8_e5m2' is not supported: give fp8_e4m3, which has"),
        (("--kv-cache-dtype", "bfloat16"), "KV has the dtype of --dtype; give auto"),
        (("--kv-cache-dtype", "fp9"), "'fp9' is not allowed; give one of auto, fp8_e4m3, or fp8"),
    ):
        with pytest.raises(SettingsError, match=re.escape(message)):
            settings.load("worker", (WorkerConfig,), words, {}, "")
