"""Settings from a file that --config names, in YAML and TOML."""

from dataclasses import dataclass, field

import pytest

from baton.services import settings
from baton.services.settings import Forward, SettingsError


@dataclass(frozen=True, slots=True)
class RacerConfig:
    name: str = field(default="", metadata={"metavar": "NAME", "positional": True})
    num_laps: int = field(default=3, metadata={"minimum": 1, "maximum": 10})
    pace: float = 1.5
    loud: bool = True
    rivals: tuple[str, ...] = ()
    lane: int | None = 4
    extras: str = field(default="", metadata={"metavar": "JSON"})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    num_laps: int = 7  # the racer's own
    power: int = 1
    fuel: str = "gas"
    secret: str = ""


VALUES = RacerConfig("no", 4, 2.0, False, ("a", "b"), None, '{"x": [1, true]}')
YAML = """
name: no
num-laps: 4
pace: 2.0
loud: false
rivals: [a, b]
lane: null
extras: {x: [1, true]}
"""
TOML = """
name = "no"
num_laps = 4
pace = 2.0
loud = false
rivals = ["a", "b"]
lane = "none"
extras = {x = [1, true]}
"""


@pytest.fixture
def load(tmp_path):
    def run(text, *argv, name="race.yaml", **environ):
        path = tmp_path / name
        path.write_text(text)
        (config,) = settings.load("racer", (RacerConfig,), ("--config", str(path), *argv), environ)
        return config

    return run


@pytest.mark.parametrize(("name", "text"), [("race.yaml", YAML), ("race.yml", YAML), ("race.toml", TOML)])
def test_every_type_is_read_from_a_file(load, name, text):
    assert load(text, name=name) == VALUES


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_changes_nothing(load, text):
    assert load(text) == RacerConfig()


def test_flags_go_before_variables_and_variables_before_the_file(load):
    text = "num-laps: 5\npace: 5\nlane: 5"
    config = load(text, "--num-laps", "6", BATON_RACER_NUM_LAPS="7", BATON_RACER_PACE="7")
    assert (config.num_laps, config.pace, config.lane) == (6, 7.0, 5)


def test_the_file_can_be_named_by_a_variable(tmp_path):
    path = tmp_path / "race.toml"
    path.write_text("num-laps = 9")
    (config,) = settings.load("racer", (RacerConfig,), (), {"BATON_RACER_CONFIG": str(path)})
    assert config.num_laps == 9


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("race.yaml", "pace: 1\nnum-lap: 3", r"race.yaml, line 2: unknown key 'num-lap'; did you mean num-laps\?"),
        ("race.toml", "num_lap = 3", r"race.toml: unknown key 'num_lap'; did you mean num-laps\?"),
        ("race.yaml", "config: other.yaml", r"line 1: unknown key 'config'"),
        ("race.yaml", "num-laps: many", r"line 1: num-laps: 'many' is not allowed; give an integer from 1 to 10"),
        ("race.toml", "num-laps = 11", r"race.toml: num-laps: '11' is not allowed; give an integer from 1 to 10"),
        ("race.yaml", "num-laps: [1, 2]", r"num-laps: a list is not allowed; give an integer"),
        ("race.yaml", "num-laps: {a: 1}", r"num-laps: a table is not allowed; give an integer"),
        ("race.yaml", "pace:", r"pace: nothing is not allowed; give a number"),
        ("race.yaml", "rivals: [a, [b]]", r"rivals: \['b'\] is not allowed in the list"),
        ("race.yaml", "rivals: ['a,b']", r"rivals: 'a,b' is not allowed in the list; give texts without commas"),
        ("race.yaml", "pace: 1\npace: 2", r"line 2: pace is given twice"),
        ("race.yaml", "num-laps: 1\nnum_laps: 2", r"line 2: num_laps is given twice"),
        ("race.yaml", "- pace", r"holds a sequence; give one setting a line"),
        ("race.yaml", "[a]: 1", r"line 1: a key is a sequence"),
        ("race.yaml", "pace: [1", r"line 1 is not valid YAML: "),
        ("race.yaml", "a: 1\n---\nb: 2", r"not valid YAML: .*another document"),
        ("race.toml", "pace = ?", r"race.toml is not valid TOML: .*line 1"),
        ("race.json", "{}", r"is neither YAML nor TOML; give a file .yaml, .yml, .toml"),
        ("race", "", r"--config: .* is neither YAML nor TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_what_is_allowed(load, name, text, message):
    with pytest.raises(SettingsError, match=message):
        load(text, name=name)


def test_files_that_cannot_be_read_are_named(tmp_path):
    for path, message in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "neither YAML nor TOML"),
    ):
        with pytest.raises(SettingsError, match=message):
            settings.load("racer", (RacerConfig,), ("--config", str(path)), {})
    (tmp_path / "bytes.yaml").write_bytes(b"pace: \xff")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2 << 20))
    for name, message in (("bytes.yaml", "is not UTF-8: byte 6 is 0xff"), ("large.yaml", "more than 1048576 bytes")):
        with pytest.raises(SettingsError, match=message):
            settings.load("racer", (RacerConfig,), ("--config", str(tmp_path / name)), {})


def forward(argv, environ=None):
    forwards = [Forward("engine", EngineConfig, frozenset({"secret"}))]
    loaded = settings.load_forwarding("racer", (RacerConfig,), forwards, argv, environ or {})
    return loaded.values[0], loaded.forwarded["engine"]


def test_flags_of_another_service_are_forwarded_and_own_ones_are_not(tmp_path):
    path = tmp_path / "race.yaml"
    path.write_text("fuel: oil\nnum-laps: 2")
    config, flags = forward(["--power", "3", "--config", str(path)])
    assert config.num_laps == 2
    assert flags == ("--power=3", "--fuel=oil")


def test_a_variable_of_the_other_service_overrides_the_file_and_is_left_to_the_service(tmp_path):
    path = tmp_path / "race.yaml"
    path.write_text("fuel: oil\npower: 2")
    assert forward(["--config", str(path)], {"BATON_ENGINE_FUEL": "coal"})[1] == ("--power=2",)
    assert forward(["--config", str(path), "--fuel", "air"], {"BATON_ENGINE_FUEL": "coal"})[1][1] == "--fuel=air"


def test_forwarded_values_are_checked_and_withheld_ones_unknown():
    with pytest.raises(SettingsError, match="--power: 'much' is not allowed; give an integer"):
        forward(["--power", "much"])
    with pytest.raises(SettingsError, match="unknown argument '--secret'"):
        forward(["--secret", "x"])


@pytest.mark.parametrize("argv", [["zoe", "--pace", "2"], ["--pace", "2", "zoe"], ["--name", "zoe", "--pace", "2"]])
def test_a_setting_may_be_an_operand_anywhere(argv):
    assert settings.load("racer", (RacerConfig,), argv, {})[0] == RacerConfig("zoe", pace=2.0)


def test_an_operand_is_given_once():
    with pytest.raises(SettingsError, match="unknown argument 'eve'"):
        settings.load("racer", (RacerConfig,), ["zoe", "eve"], {})
    with pytest.raises(SettingsError, match="'zoe' and --name 'eve' are both given; keep one"):
        settings.load("racer", (RacerConfig,), ["zoe", "--name", "eve"], {})
