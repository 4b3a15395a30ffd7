"""Keep secrets out of what a run logs, writes and publishes.

A secret is the value of a variable with a name like HF_TOKEN, a login that huggingface_hub or wandb stores, or text in
the form of a token or a password. A password that looks like a word and is stored elsewhere cannot be recognized.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

REDACTED = "[redacted]"
_MIN_CHARACTERS = 8  # a shorter value is a switch or a number; redacting it everywhere would damage other text

_WORDS = r"(?:TOKEN|JWT|KEYS?|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)"
# TOKEN names a secret; TOKENIZERS and MAX_TOKENS do not, and neither do names of a secret's location or type.
_SECRET_NAME = re.compile(
    rf"(?!.*_(?:PATH|FILE|DIR|NAME|TYPE)$).*{_WORDS}\d*(?:_|$)|(?:.*_)?PASS$|.+_(?:PAT|PWD)$", re.IGNORECASE
)

# Tokens recognizable by their form. The forms are those of gitleaks (github.com/gitleaks/gitleaks, config/gitleaks.toml
# at 420a0f5) that need no keyword next to them; "+" marks forms from other public scanners. Lengths are lower bounds,
# because issuers lengthen tokens. Why no library: detect-secrets 1.5 takes 0.6 s to import, needs requests, knows none
# of Hugging Face's tokens, and finds secrets without redacting them.
_TOKENS = (
    r"hf_[A-Za-z0-9]{20,}|api_org_\w{20,}|hf_(?:oauth|jwt)_[\w.-]{20,}",  # Hugging Face; + OAuth and JWT
    r"gh[pousr]_[A-Za-z0-9]{36,}|github_pat_\w{22,}",
    r"gl(?:pat|oas|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct)-[\w.-]{20,}|GR1348941[\w-]{20,}",  # GitLab
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])|LTAI[A-Za-z0-9]{20}",  # AWS, Alibaba Cloud
    r"AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}",  # Google: API keys; + OAuth
    r"\w{3}\dQ~[\w.~-]{31,}",  # Azure AD
    r"xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{20,}|hooks\.slack\.com/\w+/[\w+/]{40,}",  # Slack
    r"(?<!-)sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}|gsk_[A-Za-z0-9]{40,}",  # OpenAI; + Anthropic, Groq
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

# The end of the name of a setting that holds a secret. No prefix: a search for one takes quadratic time.
_SETTING = (
    r"(?:passw(?:or)?d|passphrase|passcode|(?<![a-z])pwd|secrets?(?:[_-]?key)?|credentials?"
    r"|(?:api|access|private|auth|account|encryption|signing)[_-]?key(?:[_-]?id)?"
    r"|(?:auth|access|refresh|bearer|api|hub|hf|id|session|bot)[_-]?token)"
)
# What is not a value: nothing, a type, a placeholder, an expression. Of a whole line, an attribute, too.
_NO_VALUE = (
    r"(?!(?:none|null|true|false|str|int|bool|bytes|float|any|object|string|secretstr|optional)\b"
    r"|[~$<{(\[|>&*!%.,\s)\]}])"
)

# Group 1 of each stays. No pattern takes quadratic time.
_PATTERNS = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rf"()(?:hf_[A-Za-z0-9]{{20,}}|(?<![A-Za-z0-9_])(?:{'|'.join(_TOKENS)}))",
        r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)[^-]{20,}",  # RFC 7468
        # user:password@ or token@ in a URL. A password may contain @ or /; a port is no password; {user} is a template.
        r"""()(?<=://)(?![\[<{$])(?:[^\s"'<>/?#:]*:(?!\$?\{\w+\}@)"""
        r"""(?:[^\s"'<>/?#]*|(?!\d+[/?#])[^\s"'<>@]{0,256})|[^\s"'<>/?#:@]{16,})(?=@)""",
        # signed URLs, and URLs with a key as a parameter
        r"(?i)([?&;](?:[\w-]*(?:token|secret|password|signature|credential|api[_-]?key)|sig|key)=)"
        r"""(?![\[<{$])[^\s&#"'<>,;)\]}]+""",
        # API_KEY=..., as in a shell
        rf"(\b(?:(?:[A-Z0-9]+_)*[A-Z]*{_WORDS}\d*|(?:[A-Z0-9]+_)+(?:PASS|PAT|PWD))=[\"']?)"
        rf"""(?![$`({{\[<])[^\s"']{{{_MIN_CHARACTERS},}}""",
        r"(\bBearer )[\w.~+/=-]{20,}",
        # Authorization: Basic ..., X-Api-Key: ..., RFC 7235
        r"""(?i)(\bAuthorization["']?\s{0,9}[:=]\s{0,9}["']?(?:Basic|Bearer|Token|Digest|ApiKey) +)"""
        rf"""{_NO_VALUE}[^\s"',]+""",
        rf"(?i)(\bX-[A-Za-z-]{{0,40}}(?:Key|Token|Secret): ?){_NO_VALUE}[^\s\"',]+",
        # api_key = '...' and "password": "...", in code and JSON
        rf"""(?i)({_SETTING}["']?\]?\s{{0,9}}(?::\s{{0,9}}[a-z |]{{1,20}})?[:=]\s{{0,9}}[rbuf]{{0,2}}(["']))"""
        rf"{_NO_VALUE}" + r"(?:(?!\2)[^\\\n]|\\.){1,4096}(?=\2)",
        # password: x and password = x as a whole line, in YAML, INI and .env, also in a patch
        r"""(?i)(^[-+ ]?[ \t]{0,64}(?:- )?(?:export )?["']?(?:[\w.-]{0,64}?[_.-])?"""
        rf"""{_SETTING}["']?[ \t]{{0,9}}[:=][ \t]{{0,9}})"""
        rf"""{_NO_VALUE}(?![A-Za-z_]\w*(?:\.\w+)+$)[^\s"'(){{}},\\][^\s(){{}},\\]*(?=[ \t]*(?:\#.*)?$)""",
    )
]


def redact(text: str) -> str:
    """Return the text with every secret replaced by `[redacted]`.

    Pass values through `redact_values` before you write them as JSON or YAML, whose escapes would hide secrets.
    """
    for secret in sorted(_known_secrets(), key=len, reverse=True):  # longest first: one may contain another
        text = text.replace(secret, REDACTED)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def redact_values(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with every string redacted; keys are kept.

    A string under a name such as password is a secret, whatever it is.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        names = {key for key in value if isinstance(key, str) and re.search(f"(?i){_SETTING}$", key)}
        return {
            key: REDACTED if inner and isinstance(inner, str) and key in names else redact_values(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(map(redact_values, value))
    return value


def is_secret_name(name: str) -> bool:
    """Return whether an environment variable with this name holds a secret."""
    return _SECRET_NAME.match(name) is not None


def _known_secrets() -> set[str]:
    secrets = [value for name, value in os.environ.items() if is_secret_name(name)]
    secrets = [one for one in secrets if not (os.sep in one and os.path.exists(os.path.expanduser(one)))]
    # as huggingface_hub.constants.HF_TOKEN_PATH, which is slow to import
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    token = os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    stored = token, os.environ.get("NETRC") or "~/.netrc"
    secrets += _stored_secrets(*(os.path.expanduser(os.path.expandvars(path)) for path in stored))
    lines = (line.strip() for secret in secrets for line in secret.splitlines())  # a private key spans many lines
    return {line for line in lines if len(line) >= _MIN_CHARACTERS}


@cache  # read once: every log line is redacted, and a home folder may be on a slow network
def _stored_secrets(token_path: str, netrc_path: str) -> list[str]:
    """Return the words of huggingface_hub's token file, and the passwords of a netrc, where wandb keeps its key."""
    import netrc

    found = []
    with suppress(OSError, ValueError):
        found += Path(token_path).read_text(encoding="utf-8").split()
    with suppress(OSError, ValueError, netrc.NetrcParseError):
        found += [password or "" for _, _, password in netrc.netrc(netrc_path).hosts.values()]
    return found
