"""Credential-looking parts of provider texts: masked wherever such a text is shown, whoever reads it.

The rest of a text (targets, flags, words) stays as it is. Every pattern is bounded, so that the time is linear in the
length of the text; a text may mask too much, and never too little for the forms that are named here.
"""

from __future__ import annotations

import re
from typing import Any

MASK = "***"
REDACTED: dict[str, Any] = {"redacted": True}

_VALUE = r"""(?:\\{0,3}"[^"\\]{0,8192}\\{0,3}"|\\{0,3}'[^'\\]{0,8192}\\{0,3}'|[^\s,;&"'\\)\]}]{1,8192})"""
_WORD = r"password|passwd|passphrase|pwd|secret|token(?!s)|api[_-]?key|apikey|access[_-]?key|private[_-]?key|credential"

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)", re.S
        ),
        MASK,
    ),
    (
        re.compile(r"(?i)\b((?:proxy-)?authorization[\\\"']{0,4}\s{0,4}[:=]\s{0,4}[\\\"']{0,4})[^\r\n\"'\\]{1,8192}"),
        rf"\1{MASK}",
    ),
    (re.compile(r"(?i)\b((?:set-)?cookie\s{0,4}:\s{0,4})[^\r\n\"'\\]{1,8192}"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(bearer\s{1,4})[A-Za-z0-9._~+/=:-]{6,8192}"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b(basic\s{1,4})(?=[A-Za-z]{0,64}[0-9+/=])[A-Za-z0-9+/=]{6,8192}"), rf"\1{MASK}"),
    (re.compile(r"(://[^\s/:@\"'<>\\]{0,256}:)[^\s/\"'<>\\]{1,1024}@"), rf"\1{MASK}@"),
    (re.compile(r"(://)[^\s/:@\"'<>\\]{16,1024}@"), rf"\1{MASK}@"),
    (
        re.compile(rf"(?i)(--[\w-]{{0,40}}?(?:{_WORD}|passw)[\w-]{{0,20}}[ =]{{1,4}}){_VALUE}"),
        rf"\1{MASK}",
    ),
    (
        re.compile(rf"(?i)((?:{_WORD}|[_-]key)[\w.-]{{0,64}}[\\\"']{{0,4}}\s{{0,4}}(?::=|=>|[:=])\s{{0,4}}){_VALUE}"),
        rf"\1{MASK}",
    ),
    (re.compile(r"((?:^|\s)(?:-u|--user)[ =]{1,4}[\"']?[^\s:\"']{1,256}:)[^\s\"']{1,1024}"), rf"\1{MASK}"),
    (
        re.compile(
            r"\b(?:(?:sk|pk|rk)[-_][A-Za-z0-9_-]{8,512}|gh[a-z]_[A-Za-z0-9]{16,512}|github_pat_\w{20,512}"
            r"|glpat-[\w-]{16,512}|hf_[A-Za-z0-9]{20,512}|xox[a-z]-[\w-]{10,512}|A(?:KI|SI)A[0-9A-Z]{16}"
            r"|AIza[\w-]{30,512}|hr_[\w-]{40,512}|eyJ[\w-]{8,8192}\.[\w-]{8,8192}(?:\.[\w-]{0,8192})?)"
        ),
        MASK,
    ),
)

_SECRET_NAME = re.compile(
    r"(?i)(?:\A(?:proxy[_-])?authorization\Z|\A(?:set[_-])?cookie\Z|\Araw_payload\Z|passw|passphrase|secret|credential"
    r"|token(?!s)|api_?key|[_-]key\Z)"
)
_TRACES = re.compile(
    r"(?i)key|pass|pwd|secret|token|cred|auth|cookie|bearer|basic|://|-u|--user|sk[-_]|pk[-_]|rk[-_]|gh._|pat|hf_|xox|AIza|A[KS]IA|hr_|eyJ"
)


def mask_text(text: str) -> str:
    """The text with its credential-looking parts replaced by ``***``."""
    if not _TRACES.search(text):
        return text
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def mask(value: Any) -> Any:
    """A JSON value with every text masked; a text under a secret's name goes completely (AIP 13.6)."""
    match value:
        case str():
            return mask_text(value)
        case list():
            return [mask(item) for item in value]
        case dict():
            return {
                name: REDACTED if isinstance(name, str) and _is_secret(name, member) else mask(member)
                for name, member in value.items()
            }
        case _:
            return value


def _is_secret(name: str, member: Any) -> bool:
    return isinstance(member, str | list | dict) and bool(member) and _SECRET_NAME.search(name) is not None
