"""Credential-looking parts of provider texts: masked wherever such a text is shown, whoever reads it.

The rest of a text (targets, flags, words) stays as it is. A text may be masked too much, and never too little for the
forms that are named here. Rules are tried only where their trigger stands, and each looks a bounded way ahead, so that
the time is linear in the length of the text.
"""

from __future__ import annotations

import re
import string
from typing import Any

import msgspec

MASK = "***"
REDACTED: dict[str, Any] = {"redacted": True}
TOO_DEEP: dict[str, Any] = {"left_out": True, "why": "nested too deep"}
DEPTH_LIMIT = 64

_VALUE = r"""(?:\\{0,3}"[^"\\]{0,8192}\\{0,3}"|\\{0,3}'[^'\\]{0,8192}\\{0,3}'|[^\s,;&"'\\)\]}]{1,8192})"""
_LINE = r"[^\r\n\"'\\]{1,8192}"
_WORDS = (
    "password", "passwd", "passphrase", "pwd", "secret", "token", "api_key", "api-key", "apikey", "access_key",
    "access-key", "accesskey", "private_key", "private-key", "privatekey", "credential", "_key", "-key",
)  # fmt: skip
_WORD = "(?:" + "|".join("token(?!s)" if word == "token" else word for word in _WORDS) + ")"


class _Rule(msgspec.Struct, frozen=True):
    """What a form looks like from one of its triggers on; the group ``secret`` is masked.

    A text that is shorter than ``least``, or has none of the characters in ``needs``, holds no such form.
    """

    triggers: tuple[str, ...]
    pattern: re.Pattern[str]
    needs: str
    least: int


def _rule(*triggers: str, form: str, needs: str = "", least: int = 5) -> _Rule:
    return _Rule(triggers, re.compile(form, re.IGNORECASE | re.DOTALL), needs, least)


_END = r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----"
_SPACE = " \t\r\n"
_RULES = (
    _rule("-----begin ", needs="-", form=rf"(?P<secret>-----BEGIN [A-Z0-9 ]{{0,40}}PRIVATE KEY-----.*?(?:{_END}|\Z))"),
    _rule(
        "authorization",
        needs=":=",
        form=rf"authorization[\\\"']{{0,4}}\s{{0,4}}[:=]\s{{0,4}}[\\\"']{{0,4}}(?P<secret>{_LINE})",
    ),
    _rule("cookie", needs=":", form=rf"cookie\s{{0,4}}:\s{{0,4}}(?P<secret>{_LINE})"),
    _rule("bearer", needs=_SPACE, form=r"(?<![a-z0-9])bearer\s{1,4}(?P<secret>[a-z0-9._~+/=:-]{6,8192})"),
    _rule(
        "basic", needs=_SPACE, form=r"(?<![a-z0-9])basic\s{1,4}(?P<secret>(?=[a-z]{0,64}[0-9+/=])[a-z0-9+/=]{6,8192})"
    ),
    _rule("://", needs=":", form=r"://[^\s/:@\"'<>\\]{0,256}:(?P<secret>[^\s/\"'<>\\]{1,1024})@"),
    _rule("://", needs=":", form=r"://(?P<secret>[^\s/:@\"'<>\\]{16,1024})@"),
    _rule(
        "--",
        needs="-",
        form=rf"(?<![-\w])--(?=[a-z])[\w-]{{0,40}}?{_WORD}[\w-]{{0,20}}[ =]{{1,4}}(?P<secret>{_VALUE})",
    ),
    _rule(
        *_WORDS,
        needs=":=",
        form=rf"{_WORD}[\w.-]{{0,64}}[\\\"']{{0,4}}\s{{0,4}}(?::=|=>|[:=])\s{{0,4}}(?P<secret>{_VALUE})",
    ),
    _rule("-u", needs=":", form=r"(?<!\S)-u(?:ser)?[ =]{1,4}[\"']?[^\s:\"']{1,256}:(?P<secret>[^\s\"']{1,1024})"),
    _rule("--user", needs=":", form=r"(?<!\S)--user[ =]{1,4}[\"']?[^\s:\"']{1,256}:(?P<secret>[^\s\"']{1,1024})"),
    _rule("sk-", needs="-", least=11, form=r"(?<![a-z0-9])(?P<secret>sk-[a-z0-9_-]{8,512})"),
    _rule(
        *("sk_", "pk_", "rk_", "pk-", "rk-"),
        needs="-_",
        least=11,
        form=r"(?<![a-z0-9])(?P<secret>(?=\D{0,64}\d)[spr]k[-_][a-z0-9_-]{8,512})",
    ),
    _rule(
        *("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
        needs="_",
        least=20,
        form=r"(?<![a-z0-9])(?P<secret>gh[a-z]_[a-z0-9]{16,512})",
    ),
    _rule("github_pat_", needs="_", least=31, form=r"(?P<secret>github_pat_\w{20,512})"),
    _rule("glpat-", needs="-", least=22, form=r"(?P<secret>glpat-[\w-]{16,512})"),
    _rule("hf_", needs="_", least=23, form=r"(?<![a-z0-9])(?P<secret>hf_[a-z0-9]{20,512})"),
    _rule("xox", needs="-", least=15, form=r"(?<![a-z0-9])(?P<secret>xox[a-z]-[\w-]{10,512})"),
    _rule("akia", "asia", least=20, form=r"(?<![a-z0-9])(?P<secret>a(?:ki|si)a[0-9a-z]{16})(?![a-z0-9])"),
    _rule("aiza", least=34, form=r"(?<![a-z0-9])(?P<secret>aiza[\w-]{30,512})"),
    _rule("hr_", needs="_", least=43, form=r"(?<![a-z0-9])(?P<secret>hr_[\w-]{40,512})"),
    _rule(
        "eyj",
        needs=".",
        least=20,
        form=r"(?<![a-z0-9])(?P<secret>eyj[\w-]{8,8192}\.[\w-]{8,8192}(?:\.[\w-]{0,8192})?)",
    ),
)

_SECRET_NAME = re.compile(
    r"(?i)(?:\A(?:proxy[_-])?authorization\Z|\A(?:set[_-])?cookie\Z|\Araw_payload\Z|passw|passphrase|secret|credential"
    r"|token(?!s)|api_?key|[_-]key\Z)"
)
_ASCII_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def mask_text(text: str) -> str:
    """The text with its credential-looking parts replaced by ``***``."""
    low = text.lower()
    if len(low) != len(text):
        low = text.translate(_ASCII_LOWER)
    spans = [
        span
        for rule in _RULES
        if len(text) >= rule.least and (not rule.needs or any(char in text for char in rule.needs))
        for trigger in rule.triggers
        for span in _found(rule.pattern, trigger, text, low)
    ]
    if not spans:
        return text
    parts, told = [], 0
    for start, end in sorted(spans):
        if end > told:
            if start >= told:
                parts += [text[told:start], MASK]
            told = end
    return "".join([*parts, text[told:]])


def _found(pattern: re.Pattern[str], trigger: str, text: str, low: str) -> list[tuple[int, int]]:
    """Where the secrets of this form are, from each place of its trigger on."""
    spans = []
    at = low.find(trigger)
    while at >= 0:
        match = pattern.match(text, at)
        if match:
            spans.append(match.span("secret"))
        at = low.find(trigger, max(at + 1, match.end() if match else 0))
    return spans


def mask(value: Any, depth: int = 1) -> Any:
    """A JSON value with every text masked; a text under a secret's name goes completely (AIP 13.6).

    What is nested deeper than 64 is left out.
    """
    match value:
        case str():
            return mask_text(value)
        case list() | dict() if depth > DEPTH_LIMIT:
            return TOO_DEEP
        case list():
            return [mask(item, depth + 1) for item in value]
        case dict():
            return {
                name: REDACTED if isinstance(name, str) and _is_secret(name, member) else mask(member, depth + 1)
                for name, member in value.items()
            }
        case _:
            return value


def _is_secret(name: str, member: Any) -> bool:
    return isinstance(member, str | list | dict) and bool(member) and _SECRET_NAME.search(name) is not None
