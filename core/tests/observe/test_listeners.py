from __future__ import annotations

import subprocess
import sys

import pytest

from jackfield import observe
from jackfield.errors import ConfigError, PluginError, RunError
from jackfield.observe import ObserveSettings, observers
from jackfield.plugins import HookManager
from jackfield.plugins.hooks import RunEnded, RunStarted
from jackfield.settings import structure


def test_all_observers_work_together_and_leave_these_files(make_run, sample):
    everything = dict.fromkeys(("metrics_file", "sample_table", "timeline", "curve", "progress"), True)
    run = make_run(**everything, report_to=("tensorboard",)).start()
    run.stage("rollout", "explorer", 0, 1)
    run.samples(1, sample())
    run.step(1, reward=0.5)
    run.evaluate(1, score=0.5)
    run.end(steps=1)

    names = ["learning_curve.png", "metrics.jsonl", "samples", "tensorboard", "trace.json"]
    assert names == sorted(path.name for path in run.folder.iterdir())
    assert "files in FOLDER: metrics.jsonl, tensorboard, samples, trace.json, learning_curve.png" == run.screen[-1]


def test_nothing_is_written_before_the_start(tmp_path):
    observers(ObserveSettings(), tmp_path / "run")
    assert [] == list(tmp_path.iterdir())


def test_they_fit_the_strict_hook_manager(tmp_path):
    config = ObserveSettings(report_to=(), curve=False, progress=False)
    manager = HookManager(observers(config, tmp_path))
    event = RunStarted(name="", folder="", total_steps=1, first_step=0, config={})
    manager.emit(event)
    manager.emit(RunEnded(folder="", steps=0))
    assert ["metrics.jsonl", "samples", "trace.json"] == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "setting", "off"), [("tensorboard", "report_to=[]", ()), ("matplotlib", "curve=false", False)]
)
def test_a_missing_package_is_refused_only_when_it_is_asked_for(tmp_path, monkeypatch, package, setting, off):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PluginError) as caught:
        observers(ObserveSettings(), tmp_path)
    assert "plugin.requirement" == caught.value.code
    assert f"install jackfield[train], or set observe.{setting}" == caught.value.fix
    observers(ObserveSettings(**{setting.partition("=")[0]: off}), tmp_path)


def test_an_unusable_folder_names_the_observer(make_run):
    run = make_run(metrics_file=True)
    run.folder.parent.joinpath("run").write_text("a file where the folder should be")
    with pytest.raises(RunError) as caught:
        run.start()
    assert ("run.failed", str(run.folder / "metrics.jsonl")) == (caught.value.code, caught.value.where)


def test_a_failure_at_the_end_is_told_and_hides_no_other(make_run):
    run = make_run(curve=True, progress=True).start()
    run.folder.write_text("a file where the folder should be")
    run.end(steps=1, error=RuntimeError("the reason"))

    assert "the observer 'curve' failed in run_ended" in "\n".join(run.screen)
    assert "run FAILED after 1 steps in 0 s: RuntimeError: the reason" in run.screen


@pytest.mark.parametrize(
    "settings", [{"samples_per_step": -1}, {"progress_interval": -0.5}, {"on_error": "ignore"}, {"curve": "yes"}]
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ConfigError) as caught:
        structure(ObserveSettings, settings, "observe")
    assert f"observe.{next(iter(settings))}" == caught.value.where


def test_importing_the_observers_imports_nothing_heavy():
    heavy = ("torch", "numpy", "matplotlib", "tensorboard", "rich")
    program = f"import sys, jackfield.observe; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=50)
    assert "[]" == done.stdout.strip()


def test_exports_are_sorted():
    assert sorted(observe.__all__) == list(observe.__all__)
    assert all(hasattr(observe, name) for name in observe.__all__)
