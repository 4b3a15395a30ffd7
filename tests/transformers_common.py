"""Run transformers' own common tests of models on the Golf classes, for the installed release (`make test-newest`).

    python tests/transformers_common.py [pytest's options]

They are in its source distribution, which pip downloads; nothing of it is kept. Two parts are missing there, those of
exports and of generation, so these are empty here; tests/model/test_generation.py has generation. What Golf does not
do is skipped with its reason; there is one, dynamic RoPE.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTER = """
import unittest
from types import SimpleNamespace

import torch
import transformers
from transformers.models.auto import modeling_auto

from hfgolf.model import modeling_golf
from hfgolf.model.configuration_golf import _AUTO_MAP, GolfConfig
from transformers_tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor

modeling_golf.OutputLinear = ()  # blocks that start as the identity would hide what happens in them
transformers.AutoConfig.register("golf", GolfConfig)
CLASSES = {}
for auto, path in _AUTO_MAP.items():
    if auto != "AutoConfig":
        CLASSES[auto] = getattr(modeling_golf, path.partition(".")[2])
        getattr(transformers, auto).register(GolfConfig, CLASSES[auto])
# by these tables the tests know which labels a class takes
modeling_auto.MODEL_MAPPING_NAMES["golf"] = "GolfModel"
for kind in ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING"):
    name = kind.title().replace("_", "")
    getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")["golf"] = f"GolfFor{name}"


class GolfTester(SimpleNamespace):
    def get_config(self):
        return GolfConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], 90) + 3
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class GolfCommonTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = tuple(CLASSES.values())

    def setUp(self):
        self.model_tester = GolfTester(parent=self, batch_size=3, seq_length=7, num_hidden_layers=2, hidden_size=32,
            num_attention_heads=4, num_labels=3, is_training=True)

    def test_model_rope_scaling_from_config_1_dynamic(self):
        self.skipTest("Golf refuses it: the frequencies would change within a text, and a KV cache keeps earlier keys")
"""
MISSING = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "transformers_tests")
        unpack(Path(folder), package)
        for path, name in MISSING.items():
            (package / path).parent.mkdir()
            (package / path).parent.joinpath("__init__.py").touch()
            (package / path).write_text(f"class {name}:\n    pass\n")
        package.joinpath("__init__.py").touch()
        Path(folder, "test_golf.py").write_text(TESTER)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--disable-warnings",
            "--rootdir",
            folder,
            *sys.argv[1:],
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((folder, str(ROOT))), "HF_HUB_OFFLINE": "1"}
        return subprocess.run([*command, "test_golf.py"], cwd=folder, env=environment, check=False).returncode


def unpack(folder: Path, package: Path) -> None:
    """Write the tests of the installed transformers to `package`."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    release = f"transformers=={version('transformers')}"
    subprocess.run([*pip, "install", "parameterized"], check=True)
    subprocess.run(
        [*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", folder, release], check=True, cwd=folder
    )
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (tests,) = folder.glob("transformers-*/tests")
    tests.rename(package)


if __name__ == "__main__":
    sys.exit(main())
