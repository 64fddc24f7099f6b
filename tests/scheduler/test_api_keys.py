"""Who calls: the file of API keys, and what a call must carry."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from octavo.cli.keys import new_key_lines
from octavo.service.errors import ServiceError
from scheduler_svc.api_keys import (
    MAX_KEYS,
    ApiKeys,
    ApiKeysError,
    load_api_keys,
    parse_api_keys,
)

KEY, OTHER = "a-key-of-the-acme-sort", "another-tenants-own-key"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


KEYS = ApiKeys(parse_api_keys(f"acme {KEY}\nother sha256:{digest(OTHER).upper()}\n"))


def bearer(value: str) -> tuple[tuple[str, str], ...]:
    return (("user-agent", "x"), ("authorization", value))


@pytest.mark.parametrize(
    ("value", "tenant"),
    [(f"Bearer {KEY}", "acme"), (f"bearer {OTHER}", "other"), (f"BEARER  {KEY} ", "acme")],
)
def test_a_key_tells_the_tenant(value: str, tenant: str) -> None:
    assert KEYS.tenant_of(bearer(value)) == tenant


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ((), "has none"),
        ((("x-api-key", KEY),), "has none"),
        (bearer(""), "not 'Bearer KEY'"),
        (bearer(KEY), "not 'Bearer KEY'"),
        (bearer(f"Basic {KEY}"), "not 'Bearer KEY'"),
        (bearer("Bearer "), "not 'Bearer KEY'"),
        (bearer(f"Bearer {KEY}x"), "not one of this server's"),
        (bearer(f"Bearer {KEY[:-1]}"), "not one of this server's"),
        (bearer(f"Bearer {KEY} {KEY}"), "not one of this server's"),
        (bearer(f"Bearer {digest(KEY)}"), "not one of this server's"),
        (bearer(f"Bearer sha256:{digest(OTHER)}"), "not one of this server's"),
        ((*bearer(f"Bearer {KEY}"), *bearer(f"Bearer {OTHER}")), "2 entries"),
    ],
)
def test_everything_else_is_refused_without_the_key(
    metadata: tuple[tuple[str, str], ...], why: str
) -> None:
    with pytest.raises(ServiceError, match=why) as refused:
        KEYS.tenant_of(metadata)
    assert refused.value.reason == "UNAUTHENTICATED"
    assert KEY[:-1] not in refused.value.message


def test_a_new_key_is_let_in_by_its_line() -> None:
    key, line = new_key_lines("acme")
    assert ApiKeys(parse_api_keys(line)).tenant_of(bearer(f"Bearer {key}")) == "acme"


def test_what_a_server_keeps_does_not_contain_a_key() -> None:
    assert KEY not in repr(vars(KEYS))
    assert digest(KEY) not in repr({k.hex(): v for k, v in KEYS._tenants.items()})


def test_a_file_may_have_comments_and_several_keys_of_one_tenant() -> None:
    text = f"# keys\n\n  acme {KEY}\nacme\tsha256:{digest(OTHER)}\n#acme x\n"
    assert set(parse_api_keys(text).values()) == {"acme"}
    assert len(parse_api_keys(text)) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there are 0 keys"),
        ("# none\n", "there are 0 keys"),
        (f"acme {KEY} more", "line 1 has 3 words"),
        (f"\n{KEY}", "line 2 has 1 words"),
        ("acme short", "a key of 5 characters"),
        (f"acme {'x' * 257}", "a key of 257 characters"),
        (f"acme {'ü' * 20}", "ASCII"),
        ("acme sha256:123", "64 hex digits"),
        (f"acme sha256:{'g' * 64}", "64 hex digits"),
        (f"a/b {KEY}", "line 1: the first word is no name"),
        (f".acme {KEY}", "the first word is no name"),
        (f"{'a' * 65} {KEY}", "the first word is no name"),
        (f"acme {KEY}\nother {KEY}", "line 2 has a key that stands in a line before"),
        (f"acme {KEY}\nother sha256:{digest(KEY)}", "line 2 has a key that stands"),
        (
            "".join(f"acme {KEY}{n}\n" for n in range(MAX_KEYS + 1)),
            f"there are {MAX_KEYS + 1} keys",
        ),
    ],
)
def test_a_line_that_will_not_do(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse_api_keys(text)
    assert KEY not in str(refused.value)


def test_words_the_wrong_way_round_do_not_show_the_key() -> None:
    with pytest.raises(ValueError, match="no name") as refused:
        parse_api_keys(f"+{KEY} acme-acme-acme-acme")
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text(f"acme {KEY}\n")
    path.chmod(mode)
    assert load_api_keys(path).tenant_of(bearer(f"Bearer {KEY}")) == "acme"


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o644, 0o602])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text(f"acme {KEY}\n")
    path.chmod(mode)
    with pytest.raises(ApiKeysError, match="chmod 600"):
        load_api_keys(path)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysError, match="cannot be read: No such file"):
        load_api_keys(tmp_path / "none")
    path = tmp_path / "keys"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(ApiKeysError, match="utf-8"):
        load_api_keys(path)
