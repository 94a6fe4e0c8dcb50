"""What the server reads from its environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.settings import ENGINE_VARIABLES, VARIABLES, Settings, SettingsError

ROOT = Path(__file__).resolve().parents[2]


def test_an_empty_environment_gives_a_laptop() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert (settings.host, settings.port, settings.hosted, settings.allowed_models) == ("127.0.0.1", 7860, False, None)
    assert settings.database == Path(".qevict/sessions.db")


def test_a_space_is_stricter() -> None:
    settings = Settings.from_env({"SPACE_ID": "someone/lab", "GRADIO_SERVER_NAME": "0.0.0.0"})
    assert settings.hosted and settings.host == "0.0.0.0"
    assert settings.allowed_models == ("embedded",)
    assert not settings.list_sessions
    assert settings.max_new_tokens < Settings().max_new_tokens


def test_every_number_can_be_set(tmp_path: Path) -> None:
    env = {
        "QEVICT_DATA_DIR": str(tmp_path),
        "QEVICT_PORT": "8000",
        "PORT": "9000",
        "QEVICT_MAX_NEW_TOKENS": "1_000",
        "QEVICT_ALLOWED_MODELS": "embedded, a/b ,",
        "QEVICT_LIST_SESSIONS": "no",
    }
    settings = Settings.from_env(env)
    assert settings.data_dir == tmp_path
    assert (settings.port, settings.max_new_tokens, settings.list_sessions) == (8000, 1000, False)
    assert settings.allowed_models == ("embedded", "a/b")


def test_a_space_keeps_its_database_at_home_and_knows_its_frame(tmp_path: Path) -> None:
    settings = Settings.from_env({"SPACE_ID": "a/b", "SPACE_HOST": "a-b.hf.space"})
    assert settings.data_dir == Path(".qevict"), "a database on lasting storage of a Space would be torn"
    assert settings.public_host == "a-b.hf.space"
    assert "https://huggingface.co" in settings.frame_ancestors
    assert settings.proxy_hops == 1 and settings.log_json


def test_any_server_can_be_a_hosted_one(tmp_path: Path) -> None:
    env = {
        "QEVICT_HOSTED": "1",
        "QEVICT_LOGIN": "teacher:open sesame, class:pass:word",
        "QEVICT_BACKUP_DIR": str(tmp_path),
        "QEVICT_ALLOWED_HOSTS": "lab.example",
        "QEVICT_SECRET": "0123456789abcdef",
        "QEVICT_KEEP_DAYS": "7",
        "QEVICT_LOG_JSON": "no",
    }
    settings = Settings.from_env(env)
    assert settings.hosted and not settings.list_sessions and settings.max_runs_per_user == 2
    assert settings.login == (("teacher", "open sesame"), ("class", "pass:word"))
    assert settings.backup_dir == tmp_path and settings.keep_days == 7 and not settings.log_json
    assert settings.frame_ancestors == () and settings.allowed_hosts == ("lab.example",)
    assert "open sesame" not in repr(settings) and "0123456789abcdef" not in repr(settings)


@pytest.mark.parametrize(("name", "port"), [("QEVICT_PORT", 1), ("GRADIO_SERVER_PORT", 2), ("PORT", 3)])
def test_the_port_has_three_names(name: str, port: int) -> None:
    assert Settings.from_env({name: str(port)}).port == port


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"QEVICT_MAX_TOKENS": "5"}, "QEVICT_MAX_TOKENS.*did you mean QEVICT_MAX_NEW_TOKENS"),
        ({"QEVICT_ZZZ": "5"}, "unknown variable QEVICT_ZZZ.*known are"),
        ({"QEVICT_RING_SIZE": "many"}, "QEVICT_RING_SIZE must be a whole number, got 'many'"),
        ({"QEVICT_RING_SIZE": "1"}, r"QEVICT_RING_SIZE must be in \[16, "),
        ({"PORT": "70000"}, "PORT must be a port"),
        ({"PORT": "²"}, "PORT must be a port"),
        ({"QEVICT_LIST_SESSIONS": "maybe"}, "QEVICT_LIST_SESSIONS must be one of"),
        ({"QEVICT_DATA_DIR": __file__}, "must be a folder"),
        ({"QEVICT_BACKUP_DIR": __file__}, "QEVICT_BACKUP_DIR must be a folder"),
        ({"QEVICT_DATA_DIR": "~nobody-of-that-name/x"}, "QEVICT_DATA_DIR must be a folder, and there is no such user"),
        ({"QEVICT_DATA_DIR": "a\0b"}, "QEVICT_DATA_DIR must be a folder"),
        ({"QEVICT_LOGIN": "teacher"}, "QEVICT_LOGIN must be name:password"),
        ({"QEVICT_SECRET": "short"}, "QEVICT_SECRET must have at least 16"),
        ({"QEVICT_HOSTED": "perhaps"}, "QEVICT_HOSTED must be one of"),
    ],
)
def test_a_wrong_value_is_one_clear_error(env: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Settings.from_env(env)


def test_a_value_out_of_range_is_refused_in_code_too() -> None:
    with pytest.raises(SettingsError, match="queue_length"):
        Settings(queue_length=-1)


def test_every_variable_that_is_spoken_of_is_read() -> None:
    spoken: set[str] = set()
    for folder in ("engine", "visuals", "presets", "app"):
        for path in (ROOT / folder).rglob("*.py"):
            spoken |= set(re.findall(r'"(QEVICT_[A-Z][A-Z_]+[A-Z])"', path.read_text(encoding="utf-8")))
    assert spoken >= {"QEVICT_DATA_DIR"}
    assert spoken - VARIABLES - ENGINE_VARIABLES == set()
