"""Hooks: the implementations that are called, their order, and their exceptions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jackfield.errors import PluginError, RunError
from jackfield.plugins import HookManager, discover
from jackfield.plugins.hooks import RunEnded, StepEnded, hookimpl

STEP = StepEnded(step=3, metrics={"loss": 1.0})


class Listener:
    def __init__(self, name: str, heard: list[str], error: BaseException | None = None) -> None:
        self.name, self.heard, self.error = name, heard, error

    @hookimpl
    def step_ended(self, event: StepEnded) -> None:
        self.heard.append(f"{self.name} {event.step}")
        if self.error is not None:
            raise self.error


def test_everybody_hears_in_the_order_of_registration():
    heard: list[str] = []
    manager = HookManager([Listener("first", heard), Listener("second", heard)])
    manager.emit(STEP)
    assert ["first 3", "second 3"] == heard


def test_a_hook_that_raises_leaves_the_others_hearing_and_is_named():
    heard: list[str] = []
    cause = ValueError("disk full")
    manager = HookManager([Listener("a", heard, cause), Listener("b", heard), Listener("c", heard, RunError("stop"))])
    with pytest.raises(PluginError) as caught:
        manager.emit(STEP)
    assert ["a 3", "b 3", "c 3"] == heard
    assert "plugin.hook-failed" == caught.value.code
    assert "ValueError: disk full; RunError: stop" == caught.value.found
    assert "Listener.step_ended" in str(caught.value.where)
    assert cause is caught.value.__cause__
    with pytest.raises(PluginError):  # and the next event reaches all again
        manager.emit(STEP)
    assert 6 == len(heard)


def test_a_single_error_of_ours_comes_as_it_is():
    heard: list[str] = []
    error = RunError("the disk is full", fix="make room")
    manager = HookManager([Listener("a", heard, error), Listener("b", heard)])
    with pytest.raises(RunError) as caught:
        manager.emit(STEP)
    assert error is caught.value
    assert ["a 3", "b 3"] == heard


def test_an_interrupt_passes_at_once():
    heard: list[str] = []
    manager = HookManager([Listener("a", heard, KeyboardInterrupt()), Listener("b", heard)])
    with pytest.raises(KeyboardInterrupt):
        manager.emit(STEP)
    assert ["a 3"] == heard


def test_a_failure_in_a_nested_hook_call_belongs_to_the_inner_call():
    heard: list[str] = []

    class Outer:
        @hookimpl
        def run_ended(self, event: object) -> None:
            with pytest.raises(PluginError) as inner:
                manager.emit(STEP)
            assert "Listener.step_ended" in str(inner.value.where)
            raise ValueError("outer")

    manager = HookManager([Outer(), Listener("a", heard, ValueError("x"))])
    with pytest.raises(PluginError) as caught:
        manager.emit(RunEnded(folder="", steps=0))
    assert "plugin.hook-failed" == caught.value.code
    assert "ValueError: outer" == caught.value.found
    assert ["a 3"] == heard


def test_the_hooks_module_of_a_selected_plugin_is_registered_once(site):
    hooks = """
        from jackfield.plugins import hookimpl
        @hookimpl
        def register_parts(register):
            register("loss", "mine", 1)
    """
    site.install("good", extra='hooks = "fake_good.hooks"', modules={"hooks.py": hooks})
    manifest = discover().resolve("good", "reward").usable()
    parts: list[tuple[object, ...]] = []
    HookManager([], [manifest, manifest]).call("register_parts", register=lambda *part: parts.append(part))
    assert [("loss", "mine", 1)] == parts


def test_a_plugin_without_hooks_registers_nothing(site):
    site.install("good")
    HookManager([], [discover().resolve("good", "reward").usable()]).emit(STEP)


def test_a_hooks_module_that_raises_is_an_import_error_of_its_plugin(site):
    site.install("bad", extra='hooks = "fake_bad.hooks"', modules={"hooks.py": "raise OSError('gone')"})
    with pytest.raises(PluginError) as caught:
        HookManager([], [discover().resolve("bad", "reward").usable()])
    assert "plugin.import" == caught.value.code
    assert "hooks of the reward 'bad'" == caught.value.where


def _misspelt() -> object:
    @hookimpl
    def step_endet(event: object) -> None: ...

    return SimpleNamespace(step_endet=step_endet)


def _wrong_parameters() -> object:
    @hookimpl
    def step_ended(step: object) -> None: ...

    return SimpleNamespace(step_ended=step_ended)


def _wrapper() -> object:
    @hookimpl(wrapper=True)
    def step_ended(event: object):
        yield

    return SimpleNamespace(step_ended=step_ended)


@pytest.mark.parametrize(
    ("listener", "message"),
    [
        (SimpleNamespace(), "implements no hook"),
        (_misspelt(), "did you mean 'step_ended'?"),
        (_wrong_parameters(), "'step'"),
        (_wrapper(), "a hook wrapper"),
    ],
)
def test_a_listener_that_would_hear_nothing_is_refused(listener: object, message: str):
    with pytest.raises(PluginError) as caught:
        HookManager([listener])
    assert "plugin.hooks" == caught.value.code
    assert message in str(caught.value)


def test_one_object_twice_is_refused():
    listener = Listener("a", [])
    with pytest.raises(PluginError) as caught:
        HookManager([listener, listener])
    assert "plugin.hooks" == caught.value.code
