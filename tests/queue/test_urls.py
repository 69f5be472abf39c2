"""Redis' URL, however it is written: it is taken or refused in words, and its password is nowhere to be read."""

from __future__ import annotations

import logging
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from libs.environment import without_password
from libs.errors import InvalidInput
from libs.queue import connect
from services.router.settings import Settings as RouterSettings
from services.scheduler.settings import Settings as SchedulerSettings

SECRET = "S3CRET"
ODD = some.sampled_from(
    ["", "/", "?", "#", "@", ":", "%", "[", "]", "%00", " ", "\n", "\t", "\\", "&", "=", "é", "\u212a", "//", "0", "::1", "a"]
)
BESIDE = some.lists(ODD, max_size=3).map("".join)
PIECES = some.one_of(
    BESIDE,
    some.sampled_from(
        ["redis", "rediss", "unix", "://", "user", "localhost", "6379", "/0", "?db=", "&password=", "?host=", "?ssl_ca_certs="]
    ),
)
URLS = some.one_of(
    some.builds(
        lambda scheme, user, before, after, host, tail: f"{scheme}://{user}:{before}{SECRET}{after}@{host}{tail}",
        some.sampled_from(["redis", "rediss", "unix", "http"]),
        BESIDE,
        BESIDE,
        BESIDE,
        some.sampled_from(["localhost", "h:1", "[::1]:6379", "h:x", "", "127.0.0.1:99999", "["]),
        some.one_of(BESIDE, some.sampled_from(["/0", "/x", "?db=1", "?db=x", "?foo=1", "?max_connections=2", "/run/redis.sock"])),
    ),
    some.builds(
        lambda parts, rest: "".join([*parts, SECRET, *rest]), some.lists(PIECES, max_size=6), some.lists(PIECES, max_size=6)
    ),
)


def tried(url: str) -> list[str]:
    """All that is told of a URL; empty text for what takes it and tells nothing."""
    told = []
    for read in (RouterSettings.from_env, SchedulerSettings.from_env):
        try:
            settings = read({"SHOAL_REDIS_URL": url, "SHOAL_ALLOW_INSECURE": "1"})
        except InvalidInput as error:
            told += [str(error), repr(error), error.message, repr(error.__cause__), repr(error.__context__ or "")]
        else:
            told += [repr(settings), str(settings.describe())]
    try:
        told.append(repr(connect(url)))
    except InvalidInput as error:
        told += [str(error), repr(error.__cause__)]
    return told


@given(URLS)
@example(f"redis://:{SECRET}/x@h")
@example(f"redis://:{SECRET}@[h")
@example(f"redis://h:{SECRET}")
@example(f"redis://:a/{SECRET}@h")
@example(f"redis:{SECRET}@h")
@example(f"unix://:a/{SECRET}@/run/redis.sock")
@example(f"redis://:{SECRET}#@h")
@example(f"redis://:{SECRET}@h?max_connections=2")
@example(f"redis://:{SECRET}@h/0?db={SECRET}")
@example(f"redis://h?password={SECRET}")
def test_a_url_is_taken_or_refused_and_its_password_is_not_told(url: str) -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage() + str(record.__dict__))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        told = tried(url)
    finally:
        logging.getLogger().removeHandler(handler)
    place = url.rpartition("@")[2]
    if SECRET in place and "password=" not in place:
        return  # there it is a host, a path or a database, as far as anybody can tell
    assert not [text for text in (*told, *seen) if SECRET in text]


@given(some.text(some.characters(min_codepoint=0x21, max_codepoint=0x2FF), min_size=1, max_size=30))
def test_a_password_that_is_escaped_is_the_password(password: str) -> None:
    for url in (f"redis://user:{quote(password, safe='')}@localhost:1/2", f"unix://user:{quote(password, safe='')}@/run/r.sock"):
        made = connect(url)
        assert made.connection_pool.connection_kwargs["password"] == password
        assert RouterSettings.from_env({"SHOAL_REDIS_URL": url}).redis_url == url


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://u:p@h:1/2", "redis://h/2"),
        ("unix://u:p@/run/r.sock", "unix:///run/r.sock"),
        ("redis://[::1]:6379", "redis://::1"),
    ],
)
def test_what_a_log_says_of_a_url(url: str, told: str) -> None:
    assert without_password(url) == told
