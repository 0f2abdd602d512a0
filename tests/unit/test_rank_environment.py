"""The environment of a rank: ours where the user is silent, never against them."""

from pathlib import Path

import pytest

from paceline.core.errors import InputError
from paceline.launch import choose_procs, rank_environment, visible_gpus

MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "67108864",
}


def of(base: dict[str, str], *, gpus: int = 0, cores: int = 8) -> dict[str, str]:
    return rank_environment(base, rank=1, procs=2, port=29500, cores=cores, gpus=gpus)


def test_a_cpu_rank_gets_its_share_of_threads_the_loopback_and_an_allocator_that_keeps_memory() -> None:
    found = of({"HOME": "/root"})
    assert found.items() >= {**MALLOC, "HOME": "/root", "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "lo"}.items()
    assert found.items() >= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items()
    assert found.items() >= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items()
    assert of({}, cores=1)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("name", [*MALLOC, "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTHONPATH", "PYTHONFAULTHANDLER"])
def test_i74_what_the_user_has_set_stays(name: str) -> None:
    assert of({name: "theirs"})[name] == "theirs"


def test_i74_allocator_tunables_of_the_user_stay_alone() -> None:
    assert not of({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}).keys() & MALLOC.keys()


def test_the_rank_is_ours_to_say() -> None:
    assert of({"RANK": "7", "MASTER_PORT": "1"}).items() >= {"RANK": "1", "MASTER_PORT": "29500"}.items()


def test_gpu_ranks_keep_the_allocator_of_the_system() -> None:
    assert not of({}, gpus=2).keys() & {*MALLOC, "GLOO_SOCKET_IFNAME"}


@pytest.fixture
def four_gpus(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("listed", "count"),
    [(None, 4), ("", 0), ("2", 1), ("0,3", 2), ("0,-1,2", 1), ("GPU-a, GPU-b", 2), ("0,1,2,3,4,5", 4)],
)
def test_i76_the_visible_list_counts(four_gpus: Path, listed: str | None, count: int) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(environment, four_gpus)[0] == count


def test_i76_ranks_are_one_a_gpu_or_as_asked_and_a_conflict_names_both(four_gpus: Path, tmp_path: Path) -> None:
    assert choose_procs(None, {}, four_gpus)[0] == 4
    assert choose_procs(2, {}, four_gpus)[0] == 2
    assert choose_procs(None, {}, tmp_path / "no-gpus") == (1, "no GPU here: one rank uses all cores")
    assert choose_procs(3, {}, tmp_path / "no-gpus")[0] == 3
    with pytest.raises(InputError, match=r"8 ranks are asked for, but 2 GPUs are visible \(CUDA_VISIBLE_DEVICES=0,1\)"):
        choose_procs(8, {"CUDA_VISIBLE_DEVICES": "0,1"}, four_gpus)
    with pytest.raises(InputError, match="at least 1 is needed"):
        choose_procs(0, {}, four_gpus)
