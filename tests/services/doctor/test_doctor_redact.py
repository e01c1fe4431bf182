"""The doctor's output has no secrets, wherever they are set."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.services import cli
from baton.services.doctor.redact import LEFT_OUT, is_secret, redacted_value, without_secrets

SECRET = "Zq7-hunter2-xyzzy"


@pytest.mark.parametrize(
    "text",
    [
        f"redis://:{SECRET}@redis:6379/0",
        f"redis://user:{SECRET}@redis:6379/0",
        f"redis://user:a@{SECRET}@redis:6379/0",
        f"https://{SECRET}@collector:4317",
        f"http://h/?api_key={SECRET}&x=1",
        f"http://h/p?x=1;token={SECRET}",
        f"http://h/p#{SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"authorization=Basic {SECRET}",
        f"password={SECRET}",
        f"'password': '{SECRET}'",
        f'{{"api_key": "{SECRET}"}}',
        f"--api-key {SECRET} --model m",
        f"requirepass {SECRET}",
        "key is bt-" + SECRET.replace("-", "") + "0123456789 here",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
        f"tokens eyJhbGciOiJIUzI1NiJ9.{SECRET}.sig",
    ],
)
def test_a_secret_is_left_out_of_a_text(text):
    cleaned = without_secrets(text)
    assert SECRET not in cleaned
    assert SECRET.replace("-", "") not in cleaned
    assert LEFT_OUT in cleaned


@pytest.mark.parametrize(
    "text",
    ["redis://redis:6379/0", "tokenizers 0.23.1", "give api_keys (`baton keys create` makes one)", "num_tokens 12",
     "127.0.0.1:8000", "/models/key-west/config.json", "http://collector:4317"],
)  # fmt: skip
def test_other_values_are_kept(text):
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    "name",
    ["BATON_GATEWAY_API_KEYS", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS", "apiKey", "DB_PASS",
     "BATON_WORKER_TLS_KEY", "HTTPS_PROXY", "REDIS_URL"],
)  # fmt: skip
def test_names_that_may_hold_secrets(name):
    assert is_secret(name)
    assert SECRET not in redacted_value(name, SECRET)


@pytest.mark.parametrize("name", ["BATON_WORKER_MODEL", "NCCL_DEBUG", "BATON_ROUTER_LISTEN", "MONKEY_BUSINESS"])
def test_names_that_hold_none(name):
    assert not is_secret(name)
    assert redacted_value(name, "value") == "value"


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P"], exclude_characters="/?#@'\""), min_size=6))
def test_no_password_of_a_url_gets_through(password):
    assert f":{password}@" not in without_secrets(f"cannot reach redis://user:{password}@host:6379/0, gave up")


def test_a_message_about_a_file_of_keys_keeps_its_path():
    text = "api_keys=/etc/baton/keys.toml: it is no TOML"
    assert without_secrets(text, keep_paths=True) == text
    assert "keys.toml" not in without_secrets(text)
    assert SECRET not in without_secrets(f"api_key={SECRET}", keep_paths=True)


def test_collect_env_prints_no_secret_of_the_environment(capsys, monkeypatch):
    environ = {
        "BATON_GATEWAY_REDIS_URL": f"redis://user:{SECRET}@redis:6379/0",
        "BATON_GATEWAY_API_KEYS": f"/run/{SECRET}.toml",
        "BATON_WORKER_MODEL": f"/models/{SECRET}",  # the password, where nobody would look for it
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {SECRET}-more",
        "HF_TOKEN": "hf_" + "a1" * 17,
        "NCCL_DEBUG": "INFO",
        "UNRELATED": "not-told",
        "HOME": "/home/somebody",
        "NCCL_TOPO_FILE": "/home/somebody/topo.xml",
    }
    monkeypatch.setattr("sys.argv", ["baton", "collect-env"])
    assert cli.main(["collect-env", "--look-timeout", "20"], environ) == 0
    text = capsys.readouterr().out
    assert SECRET not in text
    assert "a1a1a1" not in text
    document = json.loads(text)
    assert document["environment"]["NCCL_DEBUG"] == "INFO"
    assert document["environment"]["NCCL_TOPO_FILE"] == "~/topo.xml"
    assert document["environment"]["BATON_GATEWAY_REDIS_URL"].endswith("@redis:6379/0")
    assert "UNRELATED" not in text
    assert document["baton"]["version"]
    assert any(one.startswith("grpcio==") for one in document["packages"])


def test_doctor_prints_no_secret(capsys):
    url = f"redis://:{SECRET}@127.0.0.1:1/0"
    environ = {"BATON_GATEWAY_REDIS_URL": url, "BATON_GATEWAY_MODEL": f"/nowhere/{SECRET}"}
    assert cli.main(["doctor", "gateway", "--look-timeout", "5"], environ) == 1
    assert cli.main(["doctor", "gateway", "--json"], {**environ, "BATON_GATEWAY_PASSWORD": SECRET}) == 1
    text = capsys.readouterr()
    assert SECRET not in text.out + text.err
    assert "127.0.0.1:1" in text.out
