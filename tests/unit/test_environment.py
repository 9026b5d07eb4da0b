"""Environment variables and platform facts, read in one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from pomona.workers import environment
from pomona.workers.environment import cache_dir, openblas, worker_environment


def test_pomona_cache_decides_where_converted_models_are_kept():
    assert cache_dir({"POMONA_CACHE": "/big/disk"}, "darwin") == Path("/big/disk")
    assert cache_dir({"POMONA_CACHE": "/big/disk", "XDG_CACHE_HOME": "/x"}, "linux") == Path("/big/disk")


def test_without_it_the_platforms_own_cache_folder_is_used():
    assert cache_dir({}, "darwin") == Path.home() / "Library" / "Caches" / "pomona"
    assert cache_dir({}, "linux") == Path.home() / ".cache" / "pomona"
    assert cache_dir({"XDG_CACHE_HOME": "/x"}, "linux") == Path("/x/pomona")


def test_a_mac_preloads_no_blas():
    assert openblas("darwin") is None


def test_linux_preloads_the_first_openblas_that_is_there(monkeypatch, tmp_path):
    there = tmp_path / "aarch64" / "libblas.so.3"
    there.parent.mkdir()
    there.touch()
    monkeypatch.setattr(environment, "_OPENBLAS", ("/nowhere/libblas.so.3", f"{tmp_path}/{{arch}}/libblas.so.3"))
    assert openblas("linux", "aarch64") == str(there)
    assert openblas("linux", "x86_64") is None


@pytest.mark.parametrize(
    ("cpus", "ranks", "threads"), [(16, 1, "16"), (16, 4, "4"), (10, 4, "2"), (2, 4, "1"), (1, 1, "1"), (8, 0, "8")]
)
def test_ranks_of_one_host_share_its_cores_and_each_has_at_least_one(cpus, ranks, threads):
    env = worker_environment(openblas_path=None, cpus=cpus, ranks_on_host=ranks)
    assert env["OMP_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == threads


def test_a_worker_preloads_openblas_only_where_there_is_one():
    with_one = worker_environment(openblas_path="/lib/blas.so", cpus=4, ranks_on_host=1)
    assert with_one["LD_PRELOAD"] == "/lib/blas.so"
    assert with_one["OPENBLAS_THREAD_TIMEOUT"] == "20"
    without = worker_environment(openblas_path=None, cpus=4, ranks_on_host=1)
    assert not {"LD_PRELOAD", "OPENBLAS_THREAD_TIMEOUT"} & without.keys()


def test_every_value_is_text_as_an_environment_wants_it():
    env = worker_environment(openblas_path="/lib/blas.so", cpus=4, ranks_on_host=2)
    assert all(isinstance(value, str) for value in env.values())
    assert env["TOKENIZERS_PARALLELISM"] == "false"
