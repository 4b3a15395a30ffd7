"""Secrets of every form are redacted; text that only resembles one stays."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfgolf.system.redact import is_secret_name, redact, redact_values

ROOT = Path(__file__).parents[1]
# made up here, so that this file holds nothing that a patch of it would lose
HF_TOKEN = "".join(("hf_", "aB3dE" * 7))
WANDB_KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """Remove all stored logins."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv("NETRC", str(tmp_path / "nobody.netrc"))


SECRET_NAMES = "HF_TOKEN OPENAI_APIKEY db_password AWS_SECRET_ACCESS_KEY GITHUB_TOKEN_2 DB_PASS GITLAB_PAT ROOT_PWD"
SIMILAR_NAMES = "TOKENIZERS_PARALLELISM MAX_TOKENS KEYBOARD_LAYOUT HF_TOKEN_PATH SSH_KEY_TYPE HOME OLDPWD COMPASS SPAT"


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_value_of_a_secret_variable_is_redacted(monkeypatch, name):
    assert redact(f"key {WANDB_KEY}, x{WANDB_KEY}y") == f"key {WANDB_KEY}, x{WANDB_KEY}y"
    monkeypatch.setenv(name, f"{WANDB_KEY}\n")
    assert is_secret_name(name)
    assert redact(f"key {WANDB_KEY}, x{WANDB_KEY}y") == "key [redacted], x[redacted]y"


@pytest.mark.parametrize("name", SIMILAR_NAMES.split())
def test_similar_variable_names_are_not_secret(monkeypatch, name):
    monkeypatch.setenv(name, "north-west")
    assert not is_secret_name(name)
    assert redact("it is north-west") == "it is north-west"


def test_short_values_and_paths_are_not_redacted(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "true")
    monkeypatch.setenv("SECRET_KEY", "a")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    text = f"true: {tmp_path}/account.json is a file"
    assert redact(text) == text


def test_overlapping_secrets_and_each_line_of_a_private_key_are_redacted(monkeypatch):
    secrets = {"A_TOKEN": "correcthorse", "B_TOKEN": "correcthorsebattery", "A_KEY": "MIIEvQIB\nkqhkiG9w\n"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    text = "correcthorsebattery, correcthorse; MIIEvQIB kqhkiG9w"
    assert redact(text) == "[redacted], [redacted]; [redacted] [redacted]"


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME", "HOME"])
def test_token_of_hf_auth_login_is_redacted(monkeypatch, tmp_path, variable):
    homes = {"HF_HOME": "", "HF_TOKEN_PATH": "", "XDG_CACHE_HOME": "huggingface", "HOME": ".cache/huggingface"}
    path = tmp_path / "home" / homes[variable] / "token"
    path.parent.mkdir(parents=True)
    path.write_text("an_old_token_of_another_form\n")
    for name in homes:
        if name != "HOME":
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(path if variable == "HF_TOKEN_PATH" else tmp_path / "home"))
    assert redact("it is an_old_token_of_another_form!") == "it is [redacted]!"
    program = "from huggingface_hub import get_token; print(get_token())"  # it reads the same file as we do
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "an_old_token_of_another_form"


def test_key_of_wandb_login_is_redacted_and_unreadable_logins_are_ignored(monkeypatch, tmp_path):
    (tmp_path / "token").mkdir()
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    login = f"machine api.wandb.ai\n  login user\n  password {WANDB_KEY}\n"
    for name, content in (("netrc", login), ("junk", "\xff\xfe")):
        (tmp_path / name).write_text(content, encoding="latin-1")
        monkeypatch.setenv("NETRC", str(tmp_path / name))
        assert redact(f"key={WANDB_KEY}, user") == f"key={'[redacted]' if name == 'netrc' else WANDB_KEY}, user"


@pytest.mark.parametrize(
    ("before", "secret", "after"),
    [
        ("token ", HF_TOKEN, ""),
        ("%20", HF_TOKEN, "%20"),
        ("", "hf_" + "oauth_eyJ0.eXAi-" * 3, " is short-lived"),
        ("https://", "user:" + "password", "@host/file.txt"),
        ("https://", "user:" + "p@ss", "@host/@scope"),
        ("https://", "user:" + "pa/ss?w#rd", "@host/file.txt"),
        ("redis://", ":" + "password", "@host:6379/0"),
        ("https://", "ghp_" + "x7" * 18, "@github.com/user/name"),
        ("https://host/f?" + "token=", "abc", "&split=train"),
        ("https://host/f?a=b&" + "access_token=", "abc", ""),
        ("(https://host/f?" + "api_key=", "abc", ")"),
        ("https://host/f?X-Amz-Date=2026&" + "X-Amz-Signature=", "0af9", "#top"),
        ("https://host/f?se=2026&" + "sig=", "a%2Fb%3D", "&sp=r"),
        ("Authorization: Bearer ", "abc.def-" * 4, ""),
        ("DB_PASS=", "p$ss(w)rd1", ""),
        ("export GITLAB_PAT='", "p$ss(w)rd1", "'"),
        ("HF_HOME=x MY_API_KEY" + "='", "p$ss(w)rd1", "' python train.py"),
        ("Authorization: " + "Basic ", "dTpw", ""),
        ('{"authorization": ' + '"Basic ', "dTpw", '"}'),
        ("curl -H 'authorization: " + "token ", "abc", "' https://host"),
        ("curl -H 'X-Api-" + "Key: ", "abc", "' https://host"),
        ("+api_key" + " = '", "x", "'"),
        ("+    self.client_secret" + ' = "', "a b c", '"  # a comment'),
        ('{"user": "me", "db_password' + '": "', "x", '", "port": 5432}'),
        ("connect(user='me', password" + "='", "it\\'s", "')"),
        ("os.environ['HF_TOKEN" + "'] = '", "short", "'"),
        ("AWS_SECRET_ACCESS_KEY" + ": str = '", "x", "'"),
        ("+password" + ": ", "x", ""),
        ("-  smtp_password" + ": ", "hunter2", "  # of the server"),
        ("  - api-key" + ": ", "x.y/z", ""),
        ("database:\n  passphrase" + ": ", "hunter2!", "\n  port: 5432"),
        ("export db_passwd" + "=", "x", ""),
        ("[mail]\nsecret_key" + " = ", "x1", "\nport = 25"),
    ],
)
def test_text_like_a_secret_is_redacted(before, secret, after):
    assert redact(before + secret + after) == f"{before}[redacted]{after}"


FORMS = """
ghp_ x7*18; gho_ x7*18; ghu_ x7*18; ghs_ x7*18; ghr_ x7*18; github_pat_ 11ABCDE_*8; GR1348941 a1B2-*4; glpat- a1B2-*4
gloas- a1B2_*10; gldt- a1B2_*10; glrt- a1B2_*10; glcbt- a1B2_*10; glptt- a1B2_*10; glft- a1B2_*10; glimt- a1B2_*10
glagent- a1B2_*10; glsoat- a1B2_*10; glffct- a1B2_*10; AKIA Q3*8; ASIA Q3*8; A3TX Q3*8; ABIA Q3*8; ACCA Q3*8
LTAI aB3dE*4; AIza aB3dE*7; abc8Q~ aB3dE*7; xoxb- 1234567890-abc; xoxp- 1234567890-abc
hooks.slack.com/ services/ aB3dE*9
sk- aB3dE*8; sk-proj- aB3_E-*8; sk-ant-api03- aB3_E-*8; gsk_ aB3dE*10; api_org_ aBcDe*7; dckr_pat_ aB3-E*6
npm_ aB3*12; pypi-AgEI aB3dE*12; rubygems_ 0a*24; CLOJARS_ 0a*30; sk_live_ aB3dE*5; sk_prod_ aB3dE*2; sq0atp- aB3dE*5
shpat_ 0a*16; shpca_ 0a*16; shppa_ 0a*16; shpss_ 0a*16; EAAC aB3dE*20; SG. a*22 . b*43; xkeysib- 0a*32 - aB3d*4
SK 0a*16
dop_v1_ 0a*32; dapi 0a*16; fo1_ aB3dE*9; fm2_ aB3dE*20; hvs. aB3dE*18; aB3dEf1*2 .atlasv1. aB3dE*12; dp.pt. aB3dE*8 aB3
ops_eyJ aB3dE*50; AGE-SECRET-KEY-1 QP*29; ATATT3 aB3dE*37 a; lin_api_ aB3dE*8; glc_ aB3dE*7; glsa_ aB3d*8 _0a0a0a0a
sntryu_ 0a*32; dt0c01. aB3d*6 . aB3d*16; pscale_tkn_ aB3dE*7; PMAK- 0a*12 - 0a*17; pul- 0a*20; pnu_ aB3d*9
eyJ hbGciOiJIUzI1 .eyJ hbGciOiJIUzI1 .eyJ hbGciOiJIUzI1
"""
"""Tokens as their issuers write them, in parts: "a1*3" is a1a1a1."""


@pytest.mark.parametrize("form", FORMS.strip().replace("\n", ";").split(";"))
def test_known_token_formats_are_redacted(form):
    parts = (part.partition("*") for part in form.split())
    token = "".join(text * int(count or 1) for text, _, count in parts)
    assert redact(f"x = '{token}'\n({token})") == "x = '[redacted]'\n([redacted])"


def test_body_of_a_private_key_is_redacted():
    key = "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIEvQIBADANBgkqhki\nabc=\n-----END RSA PRIVATE KEY-----"
    assert "MII" not in redact(key) and "abc=" not in redact(key)


@pytest.mark.parametrize(
    "text",
    [
        "step 10/6000  loss 3.1234  lr 1.00e-03  12,345 tokens/s",
        "from hf_transfer import hf_hub_download_with_a_long_name",
        "4ee9ba6255477ecf972a66baacd6f0c38a5289e8-dirty",
        "http://localhost:8080/@user/file and http://[::1]:8080/a@b",
        "git@github.com:user/name.git, ssh://git@github.com/user/name, pip install name@https://host/name.whl",
        "https://{user}:{password}@{host}/ and https://user:{password}@host/?token={token}",
        "https://<user>:<password>@host/ and https://$USER:$PASSWORD@host/",
        "https://host/f?sort=token&tokens=4096&page=2",
        "token=5 key=val max_tokens=4096 MAX_TOKENS=100000000 TOKENIZERS_PARALLELISM=disabled",
        "TOKEN=$(cat /run/token) KEY=${KEY} API_KEY=short",
        "someone@example.com",
        "class sk-estimator-doc-link sk-toggleable__content task-oriented-programming-for-all",
        "npm_config_cache xoxo-hugs AIzaBella glpat-short AKIA ghp_short risk-3A-assessment-of-everything-here",
        "password: str = None\napi_key: str | None\nsecret: bool = False\npassword:\nsecret = ''\npassword: null",
        "password = getpass.getpass()\nself.password = settings.password\nconnect(password=password, secret=secret)",
        "password: ${PASSWORD}\napi_key: <your key>\nsecret = {{ secrets.X }}\nAuthorization: Basic $TOKEN",
        "eos_token: </s>\nbos_token = '<s>'\nmax_tokens: 4096\nprimary_key: id\ntoken: a\nkey = 'sort'\nkeys: [a, b]",
        "a secret: nobody reads the password, said the author of the authorization: it is basic",
        "SUBPATTERN = 5; FIRST_PASS=True; PWD=/somewhere/else; def test_sk_live(): return eyJ",
    ],
)
def test_ordinary_text_is_not_redacted(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "part",
    [
        *("sk-", "A_", "a-", "x://", "https://a:", "eyJa.", "?token", "-----BEGIN ", "Bearer ", "Authorization: "),
        *("password", "password:", "password='", "_KEY", "\n password: ", "+ -", "X-Key", "\\", " ", "a", "A", "\n"),
    ],
)
def test_the_time_is_linear_in_the_text(part):
    """Twelve times the text in at most forty times the seconds of this process: a square would be 144 times."""

    def seconds(text: str) -> float:
        started_at = time.process_time()
        redact(text)
        return time.process_time() - started_at

    text = part * (10_000 // len(part))
    assert seconds(text * 12) < 40 * min(seconds(text), seconds(text)) + 0.05


def test_hfgolf_sources_are_not_redacted():
    paths = [ROOT / "README.md", Path(__file__), *(ROOT / "hfgolf").rglob("*.py"), *(ROOT / "configs").rglob("*.yaml")]
    assert len(paths) > 40
    assert [path.name for path in paths if redact(path.read_text()) != path.read_text()] == []


def test_redaction_is_idempotent(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    once = "[redacted] https://[redacted]@h/?token=[redacted]&sig=[redacted] API_KEY=[redacted] Bearer [redacted]"
    assert redact(once.replace("[redacted]", WANDB_KEY)) == redact(once) == once


def test_a_value_under_the_name_of_a_secret_is_redacted():
    value = {"smtp": {"Pass" + "word": "x", "port": 25}, "api-" + "key": "x", "client_secret": None, "max_tokens": "9"}
    before, after = (repr(shown) for shown in (value, redact_values(value)))
    assert after == before.replace("'x'", "'[redacted]'")


def test_nested_values_are_redacted_and_keep_their_types(monkeypatch):
    monkeypatch.setenv("ODD_PASSWORD", 'quote"back\\slash')  # JSON and YAML would escape it
    value = {"a": ['x quote"back\\slash', 1, None, True], "b": ({"c": HF_TOKEN}, 0.5)}
    assert redact_values(value) == {"a": ["x [redacted]", 1, None, True], "b": ({"c": "[redacted]"}, 0.5)}
