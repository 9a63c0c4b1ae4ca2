"""The private names of TRL that the package rests on: listed completely, and checked when a trainer is built."""

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from transformers.trainer import Trainer
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.base_trainer import _BaseTrainer

from toys import length_reward, make_config, make_model, make_tokenizer, string_dataset
from trace_trl import TRACETrainer, seams


PACKAGE = Path(seams.__file__).parent


def defined_by(cls) -> set[str]:
    """Names of methods of a class and of attributes its methods set on `self`."""
    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return names


def used_by_package() -> set[str]:
    """Names of what the package reads, sets or overrides on a trainer: on `self` and `super()` in the trainer's own
    module, on `trainer` and `self.trainer` in the others, and those it sets by `setattr`."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        own = path.name == "trainer.py"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and own:
                names.add(node.name)
            elif isinstance(node, ast.Dict) and own:
                names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Attribute):
                holder = ast.unparse(node.value)
                if holder in ("trainer", "self.trainer") or (own and holder in ("self", "super()")):
                    names.add(node.attr)
    return names


def listed() -> set[str]:
    looked_up = {name for names in seams.LOOKED_UP.values() for name in names}
    attributes = {*seams.ATTRIBUTES, *seams.ENVIRONMENT_ATTRIBUTES, *seams.ASYNC_ATTRIBUTES}
    attributes |= {*seams.TRANSFORMERS_ATTRIBUTES, *seams.VLLM_ATTRIBUTES}
    return {*seams.OVERRIDDEN, *seams.CALLED} | looked_up | attributes


def test_list_covers_every_name_of_trl_that_is_used():
    used = used_by_package() - {"__init__"}
    of_trl = defined_by(GRPOTrainer) | defined_by(_BaseTrainer)
    assert "_tokenize_prompts" in used & of_trl  # the scan sees something
    assert (used & of_trl) - listed() == set()
    private_of_transformers = {name for name in defined_by(Trainer) if name.startswith("_")}
    assert (used & private_of_transformers) - listed() == set()


def test_list_holds_nothing_that_is_not_used():
    asked_for_by_the_check = {"_has_async_funcs", "_prepare_inputs"}
    assert listed() - used_by_package() - asked_for_by_the_check == set()


def test_list_covers_what_is_used_of_trls_vllm_generation():
    used = set()
    for node in ast.walk(ast.parse((PACKAGE / "vllm_generation.py").read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("vllm", "self.vllm"):
            used.add(node.attr)
    assert used == set(seams.VLLM_GENERATION)
    assert used <= defined_by(VLLMGeneration)


def test_overridden_methods_are_those_of_the_list():
    inherited = {name for cls in GRPOTrainer.__mro__ for name in vars(cls)}
    own = {name for name, value in vars(TRACETrainer).items() if inspect.isfunction(value)}
    documented = {"__init__", "train", "evaluate"}  # public, taken with any arguments
    assert own & inherited - documented == set(seams.OVERRIDDEN)


def test_overrides_take_what_the_originals_take():
    for name, parameters in seams.OVERRIDDEN.items():
        assert tuple(inspect.signature(getattr(TRACETrainer, name)).parameters) == parameters


def test_installed_trl_is_what_was_built_against():
    seams.check_trl()


@pytest.mark.parametrize("name", [*seams.OVERRIDDEN, *seams.CALLED])
def test_changed_signature_fails_with_a_sentence(monkeypatch, name):
    def changed(self, something_new): ...

    monkeypatch.setattr(GRPOTrainer, name, changed)
    with pytest.raises(ImportError) as error:
        seams.check_trl()
    assert f"GRPOTrainer.{name}(self, something_new)" in str(error.value)
    assert "install a trl release" in str(error.value)


def test_removed_method_fails_with_a_sentence(monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_tokenize_prompts")
    with pytest.raises(ImportError, match="has no GRPOTrainer._tokenize_prompts, .* install a trl release"):
        seams.check_trl()


@pytest.mark.parametrize("method", seams.LOOKED_UP)
def test_method_that_asks_for_something_else_fails_with_a_sentence(monkeypatch, method):
    parameters = ", ".join(inspect.signature(getattr(GRPOTrainer, method)).parameters)
    names = seams.LOOKED_UP[method][1:]
    scope = {}
    exec(f"def changed({parameters}): return [{', '.join(f'self.{name}' for name in names)}]", scope)
    monkeypatch.setattr(GRPOTrainer, method, scope["changed"])
    with pytest.raises(ImportError, match=f"{method} of trl .* does not use {seams.LOOKED_UP[method][0]}, .* install"):
        seams.check_trl()


def import_beside(folder, version, body):
    """Imports the package where another TRL lies before the installed one, in a process of its own."""
    (folder / "trl").mkdir()
    (folder / "trl" / "__init__.py").write_text(body)
    (folder / f"trl-{version}.dist-info").mkdir()
    (folder / f"trl-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(PACKAGE.parent)])}
    command = [sys.executable, "-c", "from trace_trl import TRACEConfig, TRACETrainer"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("version", ["1.15.3", "1.17.0.dev0", "2.0.0"])
def test_a_foreign_version_fails_with_a_sentence_whatever_is_missing_in_it(tmp_path, version):
    """TRL of another minor release, also a development version of the next, that has none of the private names."""
    last = import_beside(tmp_path, version, "")
    assert f"supports trl<1.17,>=1.16, but {version} is installed: run `pip install 'trl" in last


def test_a_supported_version_that_lacks_a_private_name_fails_with_a_sentence(tmp_path):
    last = import_beside(tmp_path, "1.16.9", "class GRPOConfig: ...\nclass GRPOTrainer: ...")
    assert "trl 1.16.9 lacks what trace_trl was built against" in last and "pip install" in last


@pytest.mark.parametrize(
    "version, supported",
    [
        ("1.16.0", True),
        ("1.16.4", True),
        ("1.16.1rc1", True),
        ("1.16.0.dev0", False),
        ("1.17.0.dev0", False),
        ("1.17.0", False),
    ],
)
def test_supported_versions(monkeypatch, version, supported):
    monkeypatch.setattr(seams.importlib.metadata, "version", lambda name: version)
    if supported:
        assert seams.check_version() == version
    else:
        with pytest.raises(ImportError, match=f"{version} is installed"):
            seams.check_version()


def test_nothing_of_trl_is_imported_elsewhere():
    """Else an upgrade could fail before the version is looked at."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert path.name == "seams.py" or not any(name.partition(".")[0] == "trl" for name in names), path


NAMES = (
    *(*seams.ATTRIBUTES, *seams.ENVIRONMENT_ATTRIBUTES, *seams.ASYNC_ATTRIBUTES),
    *(*seams.TRANSFORMERS_ATTRIBUTES, *seams.VLLM_ATTRIBUTES),
)


class Bare:
    """A trainer that has every attribute on the list but one."""

    def __init__(self, without: str, environments: bool = True):
        for name in NAMES:
            if name != without:
                setattr(self, name, None)
        self._has_async_funcs = True
        if without != "use_vllm":
            self.use_vllm = without in seams.VLLM_ATTRIBUTES
        if without != "environment_factories":
            self.environment_factories = {} if environments else None
        if without == "_has_async_funcs":
            del self._has_async_funcs


@pytest.mark.parametrize("name", NAMES)
def test_removed_attribute_fails_with_a_sentence(name):
    with pytest.raises(ImportError, match=rf"no longer sets GRPOTrainer\.{name}, .* install"):
        seams.check_trainer(Bare(without=name))


def test_attributes_of_environments_are_asked_for_only_with_environments():
    seams.check_trainer(Bare(without="_env_tools", environments=False))


def test_construction_checks_the_trainer(monkeypatch, tmp_path):
    monkeypatch.setattr(seams, "ATTRIBUTES", (*seams.ATTRIBUTES, "something_gone"))
    with pytest.raises(ImportError, match="something_gone"):
        TRACETrainer(
            make_model(), length_reward, make_config(tmp_path), string_dataset(), processing_class=make_tokenizer()
        )
