"""Plugins are found on the command line and in presets; the digest is that of their source."""

import sys

import pytest

from fairseq_alma.app.arguments import plugin_named_by
from fairseq_alma.app.plugins import (
    call_own_function,
    load_function,
    load_plugin,
    plugin_digest,
    source_digest,
)
from fairseq_alma.core.errors import SettingError


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "module_of_a_test.py"
    path.write_text("value = 1\n")
    yield path
    sys.modules.pop("module_of_a_test", None)


def test_a_plugin_is_imported_from_the_current_folder(module):
    load_plugin("module_of_a_test")
    assert sys.modules["module_of_a_test"].value == 1


def test_the_digest_changes_with_the_source_and_not_with_the_time(module):
    load_plugin("module_of_a_test")
    before = plugin_digest("module_of_a_test")
    module.write_text("value = 1\n")
    assert plugin_digest("module_of_a_test") == before
    module.write_text("value = 2\n")
    assert plugin_digest("module_of_a_test") != before
    assert len(before) == 16


def test_every_file_of_a_package_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("value = 1\n")
    load_plugin("package_of_a_test")
    before = plugin_digest("package_of_a_test")
    (package / "inner.py").write_text("value = 2\n")
    assert plugin_digest("package_of_a_test") != before
    sys.modules.pop("package_of_a_test")


def test_the_command_line_or_the_preset_names_a_plugin(tmp_path):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset/mine.yaml").write_text("# @package _global_\nplugin: from_preset\n")
    assert plugin_named_by(["plugin=given", "out=x"]) == "given"
    assert plugin_named_by(["plugin=null"]) is None
    assert plugin_named_by(["--config-dir", str(tmp_path), "preset=mine"]) == "from_preset"
    assert plugin_named_by([f"--config-dir={tmp_path}", "preset=mine", "plugin=given"]) == "given"
    assert plugin_named_by([f"--config-dir={tmp_path}", "preset=other"]) is None
    assert plugin_named_by(["learner=sm", "-m"]) is None


def test_a_function_that_a_setting_names_is_loaded_from_the_current_folder(module):
    module.write_text("number = 3\ndef seven():\n    return 7\n")
    assert load_function("dataset", "module_of_a_test:seven")() == 7
    digest = source_digest(load_function("dataset", "module_of_a_test:seven"), "dataset", "module_of_a_test:seven")
    assert digest == plugin_digest("module_of_a_test")
    with pytest.raises(SettingError, match=r"dataset: seven failed with TypeError: .* \(line \d+ of "):
        call_own_function("dataset", load_function("dataset", "module_of_a_test:seven"), 3)
    for text, message_part in (
        ("./module_of_a_test:seven", "dataset='./module_of_a_test:seven' must have the form MODULE:FUNCTION"),
        ("module_of_a_test", "dataset='module_of_a_test' must have the form MODULE:FUNCTION"),
        ("module_of_a_test:number", "the module module_of_a_test has no function number"),
        ("no_such_module:seven", "Modules are searched for in the current folder"),
    ):
        with pytest.raises(SettingError) as error:
            load_function("dataset", text)
        assert message_part in str(error.value)
