"""Manifests: accepted contents, and the errors for others."""

from __future__ import annotations

import pytest

from jackfield.errors import PluginError
from jackfield.plugins.manifest import Manifest, parse_manifest

COMPLETE = """
name = "fsdp"
kind = "engine"
abi = "1.0"
object = "package.engine:Engine"
config = "package.config:Config"
hooks = "package.hooks"
description = "one line"

[capabilities]
lora = "full"
value_head = "unsupported"
offload = "unverified"

[env]
requires = ["torch>=2.8", "numpy; python_version >= '3'"]
python = "/opt/other/bin/python"

[conformance]
fixture = "package.conformance:tiny"

[conformance.exceptions.gradients]
reason = "kernel is not deterministic"
review = 2027-01-31
"""


def parse(text: str) -> Manifest:
    return parse_manifest(text.encode(), source="plugin.toml", kind="engine", name="fsdp")


def test_a_complete_manifest_is_read_with_every_section():
    manifest = parse(COMPLETE)
    assert manifest.label == "engine 'fsdp'"
    assert manifest.hooks == "package.hooks"
    assert dict(manifest.capabilities) == {"lora": "full", "value_head": "unsupported", "offload": "unverified"}
    assert manifest.env.requires == ("torch>=2.8", "numpy; python_version >= '3'")
    assert manifest.env.python == "/opt/other/bin/python"
    assert manifest.conformance.fixture == "package.conformance:tiny"
    assert manifest.conformance.exceptions["gradients"].review == "2027-01-31"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('object = "package.engine:Engine"', 'objct = "package.engine:Engine"', "did you mean 'object'?"),
        ('object = "package.engine:Engine"', "", "kind = 'engine' needs object"),
        ("package.engine:Engine", "package.engine.Engine", "package.module:Attribute"),
        ("package.config:Config", "package/config:Config", "package.module:Attribute"),
        ('hooks = "package.hooks"', 'hooks = "package.hooks:Object"', "package.module"),
        ('abi = "1.0"', 'abi = "1"', "major.minor"),
        ('abi = "1.0"', 'abi = "1.0.0"', "major.minor"),
        ('abi = "1.0"', "abi = 1.0", "of type float"),
        ('kind = "engine"', 'kind = "motor"', "'motor' is not one of 'engine'"),
        ('name = "fsdp"', 'name = "FSDP"', "lower-case letters"),
        ('lora = "full"', 'lora = "yes"', "'yes' is not one of 'full'"),
        ('lora = "full"', "lora = true", "'full'"),
        ('"torch>=2.8"', '"torch >> 2"', "PEP 508"),
        ("review = 2027-01-31", 'review = "soon"', "YYYY-MM-DD"),
        ('python = "/opt', 'pyhton = "/opt', "did you mean 'python'?"),
        ('name = "fsdp"', 'name = "fsdp', "not TOML"),
    ],
)
def test_a_wrong_manifest_is_refused_naming_file_and_cause(old: str, new: str, message: str):
    assert old in COMPLETE
    with pytest.raises(PluginError) as caught:
        parse(COMPLETE.replace(old, new, 1))
    assert caught.value.code == "plugin.manifest-invalid"
    assert caught.value.where == "plugin.toml"
    assert message in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [("rollout", "fsdp"), ("engine", "other")])
def test_entry_point_and_manifest_have_to_agree(kind: str, name: str):
    with pytest.raises(PluginError) as caught:
        parse_manifest(COMPLETE.encode(), source="plugin.toml", kind=kind, name=name)
    assert "plugin.manifest-invalid" == caught.value.code
    assert repr(kind) in str(caught.value.expected)
    assert "'fsdp'" in str(caught.value.found)


def test_a_declared_capability_may_be_used():
    parse(COMPLETE).require("lora", because="model.lora is set")
    parse(COMPLETE).require("offload", because="placement is shared")


@pytest.mark.parametrize(("capability", "found"), [("value_head", "unsupported"), ("context_parallel", "lora (full)")])
def test_an_undeclared_or_unsupported_capability_is_refused(capability: str, found: str):
    with pytest.raises(PluginError) as caught:
        parse(COMPLETE).require(capability, because="some setting asks for it")
    assert caught.value.code == "plugin.capability"
    assert "some setting asks for it" in str(caught.value)
    assert found in str(caught.value.found)
