"""What the local cluster remembers of this machine: never another boot's facts, never another program's process."""

import fcntl
import json
import os
import subprocess
import sys

from hack.cluster import lifecycle, processes
from hack.cluster.configuration import configuration_files
from hack.cluster.record import MachineRecord
from hack.cluster.settings import ClusterSettings


def settings_in(folder):
    settings = ClusterSettings(name="test", run_parent=folder / "run", state_parent=folder / "state")
    settings.run.mkdir(parents=True)
    return settings


def test_a_record_is_read_back_and_one_of_another_boot_is_forgotten(tmp_path):
    record = MachineRecord.read(tmp_path)
    assert record.is_new
    record.hugepages_added = 7
    record.write(tmp_path)
    assert MachineRecord.read(tmp_path).hugepages_added == 7
    stored = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**stored, "boot_id": "another"}))
    other = MachineRecord.read(tmp_path)
    assert (other.hugepages_added, other.is_new) == (0, True)


def test_a_process_id_that_was_given_to_another_program_is_not_ours(tmp_path):
    settings = settings_in(tmp_path)
    started = processes.read_start_time(os.getpid())
    (settings.run / "etcd.pid").write_text(f"{os.getpid()} {started}")
    assert processes.find_running("etcd", settings) == os.getpid()
    (settings.run / "etcd.pid").write_text(f"{os.getpid()} {int(started) - 1}")
    assert processes.find_running("etcd", settings) is None
    processes.stop("etcd", settings)  # ends nobody: we are still here
    assert not (settings.run / "etcd.pid").exists()


def test_a_lock_that_is_held_around_the_start_is_not_held_by_the_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(ClusterSettings, "namespace_path", "/proc/self/ns/net")
    settings = settings_in(tmp_path)
    with (tmp_path / "lock").open("w") as mine, (tmp_path / "lock").open() as others:
        fcntl.flock(mine, fcntl.LOCK_EX)
        os.set_inheritable(mine.fileno(), True)  # as flock(1) has it
        processes.start("sleeper", ["sleep", "60"], settings)
        mine.close()
        try:
            fcntl.flock(others, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            pid = processes.find_running("sleeper", settings)
            processes.stop("sleeper", settings)
    assert pid is not None
    os.waitpid(pid, 0)


def test_a_program_that_ignores_sigterm_is_ended_all_the_same(tmp_path):
    program = "import signal, sys, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process.stdout.readline()
    processes.end_process(process.pid, patience_seconds=0.2)
    assert process.wait(timeout=5) == -9
    process.stdout.close()


def test_a_program_that_was_started_with_another_configuration_is_known(tmp_path):
    settings = settings_in(tmp_path)
    assert lifecycle.find_outdated(settings) == [], "nothing was started yet"
    for name, content in configuration_files(settings).items():
        (settings.state / name).parent.mkdir(parents=True, exist_ok=True)
        (settings.state / name).write_text(content)
    assert lifecycle.find_outdated(settings) == []
    (settings.state / "containerd.toml").write_text("version = 3")
    assert lifecycle.find_outdated(settings) == ["containerd"]
