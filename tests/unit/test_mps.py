"""MPS is found or started, and its absence is explained."""

from __future__ import annotations

import os
import stat

import pytest

from inc_runtime import mps
from inc_runtime.errors import ConfigurationError


@pytest.fixture
def fake_control(tmp_path, monkeypatch):
    """A control program that writes down what it is asked, and answers."""
    program = tmp_path / mps.CONTROL
    program.write_text(f'#!/bin/sh\nif [ "$1" = "-d" ]; then echo start >> {tmp_path}/log; exit 0; fi\ncat >> {tmp_path}/log\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "log"


def test_without_mps_a_shared_placement_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(mps.shutil, "which", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"python -m inc_runtime\.mps -- torchrun"):
        mps.require_daemon({})


def test_a_private_daemon_has_folders_of_its_own_and_is_stopped(fake_control):
    with mps.private_daemon() as environment:
        folder = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder)
    assert not os.path.exists(folder)
    assert fake_control.read_text().splitlines()[0] == "start"
    assert "quit" in fake_control.read_text()


def test_the_daemon_is_stopped_when_the_command_fails(fake_control):
    assert mps.main(["--", "sh", "-c", "exit 3"]) == 3
    assert "quit" in fake_control.read_text()
