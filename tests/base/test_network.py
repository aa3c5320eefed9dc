"""Settings under which no request could be made are named in one sentence, wherever the Hub is asked."""

import sys

import pytest
from huggingface_hub import constants
from palimpsa_surgery.base.errors import UsageError
from palimpsa_surgery.base.network import check_network
from palimpsa_surgery.base.records import iter_records
from palimpsa_surgery.sharing.hub import push
from palimpsa_surgery.surgery.checkpoint.sources import resolve
from palimpsa_surgery.surgery.checkpoint.tokenizer import load_tokenizer

SECRET = "hf_ö" + "a" * 30


@pytest.fixture(autouse=True)
def usual(monkeypatch, tmp_path):
    for name in ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setitem(sys.modules, "socksio", None)


FAULTS = {
    "ALL_PROXY=socks5://user:secret@localhost:1": r"ALL_PROXY: is a SOCKS proxy, which needs the package socksio, ",
    "https_proxy=ftp://user:secret@localhost:1": "https_proxy: is no address of a proxy, expected one such as http://ho",
    "HTTP_PROXY=http://localhost:x": "HTTP_PROXY: is no address of a proxy",
    f"HF_TOKEN={SECRET}": "HF_TOKEN: character 4 of it is in no Hub token",
    "HF_TOKEN=hf_a b": "HF_TOKEN: character 5 of it",
}
ENDPOINTS = ("localhost:1", "hub.example.org", "", "https://", "ftp://hub.example.org")


@pytest.mark.parametrize("setting", FAULTS)
def test_a_setting_with_which_no_request_can_be_made_is_named_without_its_value(monkeypatch, setting):
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=FAULTS[setting]) as caught:
        check_network()
    assert "secret" not in str(caught.value)
    assert value not in str(caught.value)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_address_of_the_hub_without_its_scheme_or_host_is_named(monkeypatch, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(UsageError, match=f"HF_ENDPOINT: is '{endpoint}', expected an address with its scheme"):
        check_network()


def test_a_given_token_and_a_stored_one_are_looked_at(tmp_path):
    with pytest.raises(UsageError, match="the given token: character 4 of it") as caught:
        check_network(SECRET)
    assert SECRET not in str(caught.value)
    (tmp_path / "token").write_text(SECRET)
    with pytest.raises(UsageError, match="the stored token: character 4 of it"):
        check_network()
    (tmp_path / "token").unlink()
    (tmp_path / "token").mkdir()
    with pytest.raises(UsageError, match=r"token: the stored Hub token cannot be read there .*; correct HF_HOME"):
        check_network()


@pytest.mark.parametrize("setting", ["HTTPS_PROXY=http://localhost:1", "HF_TOKEN=hf_abc", "NO_PROXY=localhost"])
def test_usual_settings_pass(monkeypatch, setting):
    monkeypatch.setenv(*setting.split("="))
    check_network()


@pytest.mark.parametrize(
    "ask",
    [
        resolve,
        load_tokenizer,
        lambda name: push("folder", name),
        pytest.param(lambda name: list(iter_records(name)), id="dataset"),
    ],
)
def test_whatever_asks_the_hub_looks_first(monkeypatch, ask):
    monkeypatch.setenv("ALL_PROXY", "socks5://localhost:1")
    with pytest.raises(UsageError, match="ALL_PROXY: is a SOCKS proxy"):
        ask("owner/name")
