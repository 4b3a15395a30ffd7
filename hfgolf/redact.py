"""Keeping secrets out of what a run says, writes and publishes.

Owns what a secret is: the value of an environment variable that is named like one, what huggingface_hub and wandb
have stored at a login, and what looks like a token or a password wherever it stands. A password that looks like any
other word, and is in none of these places, cannot be told from a word.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"
_SHORTEST = 8  # characters: a shorter value is a switch or a number, and would be cut out of every other text

_WORDS = r"(?:TOKEN|JWT|KEYS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)"
# a TOKEN is a secret, TOKENIZERS and MAX_TOKENS are not; nor is what only says where a secret lies, or its kind
_SECRET_NAME = re.compile(
    rf"(?!.*_(?:PATH|FILE|DIR|NAME|TYPE)$).*{_WORDS}\d*(?:_|$)|(?:.*_)?PASS$|.+_(?:PAT|PWD)$", re.IGNORECASE
)

# Tokens that their form gives away. The forms are those of gitleaks (github.com/gitleaks/gitleaks, config/gitleaks.toml
# at 420a0f5) that need no word beside them; "+" marks forms that gitleaks lacks and other public scanners have. Lengths
# are lower bounds, because issuers lengthen tokens. No library: detect-secrets 1.5 takes 0.6 s to import, needs
# requests, knows none of Hugging Face's tokens, and finds secrets without cutting them out.
_TOKENS = (
    r"hf_[A-Za-z0-9]{20,}|api_org_\w{20,}|hf_(?:oauth|jwt)_[\w.-]{20,}",  # Hugging Face; + OAuth and JWT
    r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}",
    r"gl(?:pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct)-[\w.-]{20,}|GR1348941[\w-]{20,}",  # GitLab
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])|LTAI[A-Za-z0-9]{20}",  # AWS, Alibaba Cloud
    r"AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}",  # Google: API keys; + OAuth
    r"\w{3}\dQ~[\w.~-]{31,}",  # Azure AD
    r"xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{20,}|hooks\.slack\.com/\w+/[\w+/]{40,}",  # Slack
    r"sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|gsk_[A-Za-z0-9]{40,}",  # OpenAI; + Anthropic, Groq
    r"dckr_pat_[\w-]{20,}",  # + Docker Hub
    r"npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|rubygems_[a-f0-9]{48}|CLOJARS_[a-z0-9]{60}",
    r"[sr]k_(?:live|test|prod)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/]{24,}",  # Stripe; + webhooks
    r"sq0atp-[\w-]{22,}|shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{32}|EAA[MC][A-Za-z0-9]{100,}",  # Square, Shopify, Facebook
    r"SG\.[\w-]{22}\.[\w-]{43}|xkeysib-[a-f0-9]{64}-[A-Za-z0-9]{16}|SK[0-9a-fA-F]{32}",  # SendGrid, Brevo, Twilio
    r"do[opr]_v1_[a-f0-9]{64}|dapi[a-f0-9]{32}|fo1_[\w-]{43,}|fm[12][ar]?_[\w+/]{100,}",  # DigitalOcean, ...
    r"hv[sb]\.[\w-]{90,}|[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,}|dp\.pt\.[A-Za-z0-9]{43}",  # HashiCorp, Doppler
    r"ops_eyJ[\w+/]{250,}|AGE-SECRET-KEY-1[A-Z0-9]{58}|ATATT3[\w=-]{180,}|lin_api_\w{40}",  # 1Password, age, Atlassian
    r"gl(?:c_[\w+/]{32,}|sa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8})|sntry[su]_[\w+/=]{60,}|dt0c01\.[\w.]{80,}",  # Grafana, ...
    r"pscale_(?:tkn|oauth|pw)_[\w=.-]{32,}|PMAK-[a-f0-9]{24}-[a-f0-9]{34}|pul-[a-f0-9]{40}|pnu_[A-Za-z0-9]{36}",
    r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",  # a JSON Web Token, RFC 7519
)

_PATTERNS = (
    (re.compile(rf"(?:hf_[A-Za-z0-9]{{20,}}|(?<![A-Za-z0-9_])(?:{'|'.join(_TOKENS)}))"), REDACTED),
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]{20,}"), rf"\1{REDACTED}"),  # RFC 7468
    # a user and password, or a token, before the host; a password may hold @ or /, a port is none, {user} is a template
    (
        re.compile(
            r"""(?<=://)(?![\[<{$])(?:[^\s"'<>/?#:]*:(?!\$?\{\w+\}@)(?:[^\s"'<>/?#]*|(?!\d+[/?#])[^\s"'<>@]{0,256})"""
            r"""|[^\s"'<>/?#:@]{16,})(?=@)"""
        ),
        REDACTED,
    ),
    # addresses that are signed, or that carry their key
    (
        re.compile(
            r"""([?&;](?:[\w-]*(?:token|secret|password|signature|credential|api[_-]?key)|sig|key)=)"""
            r"""(?![\[<{$])[^\s&#"'<>,;)\]}]+""",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    # API_KEY=... as in a shell
    (
        re.compile(
            rf"""(\b(?:(?:[A-Z0-9]+_)*[A-Z]*{_WORDS}\d*|(?:[A-Z0-9]+_)+(?:PASS|PAT|PWD))=["']?)(?![$`({{\[<])[^\s"']{{{_SHORTEST},}}"""
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(\bBearer )[\w.~+/=-]{20,}"), rf"\1{REDACTED}"),
)


def redact(text: str) -> str:
    """Return the text with `[redacted]` in the place of every secret.

    What will become JSON or YAML goes through `redact_values` first: their escapes would hide a secret from this.
    """
    for secret in sorted(_known_secrets(), key=len, reverse=True):  # one may hold another
        text = text.replace(secret, REDACTED)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_values(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with every text in it redacted; keys stay."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(redact_values, value))
    return value


def is_secret_name(name: str) -> bool:
    """Say whether an environment variable of this name holds a secret."""
    return _SECRET_NAME.match(name) is not None


def _known_secrets() -> set[str]:
    secrets = [value for name, value in os.environ.items() if is_secret_name(name) and not _is_path(value)]
    secrets += [*_words_in(_expand(_hf_token_path())), *_passwords_in(_expand(os.environ.get("NETRC") or "~/.netrc"))]
    lines = (line.strip() for secret in secrets for line in secret.splitlines())  # a private key has many
    return {line for line in lines if len(line) >= _SHORTEST}


def _is_path(value: str) -> bool:
    return os.sep in value and os.path.exists(os.path.expanduser(value))


def _hf_token_path() -> str:
    """Return where huggingface_hub keeps its token; worked out here, as importing it takes longer than all of this."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")


def _expand(path: str) -> str:
    return os.path.expanduser(os.path.expandvars(path))


# Both are read once: every log line passes here, and a home folder may lie on a slow network.
@cache
def _words_in(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []


@cache
def _passwords_in(path: str) -> list[str]:
    """Return the passwords of a netrc file, which is where `wandb login` puts its key."""
    import netrc

    try:
        return [password or "" for _, _, password in netrc.netrc(path).hosts.values()]
    except (OSError, ValueError, netrc.NetrcParseError):
        return []
